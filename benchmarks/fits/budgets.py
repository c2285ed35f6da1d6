"""Budgets asked and taken: fits of synthetic logs from the raw file to the report, timed from outside.

    python -m benchmarks.fits.budgets --work DIR --rows 50000 --rows 1000000 --budget 1 --budget 3 --budget 10

Each fit is a process of its own, so its start counts too. Results go to budgets.json beside this file; what is there is
not measured again. `python -m benchmarks.summary --write` puts the table into docs/results.md.
"""

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from recap_ctr.jobs import machine
from recap_ctr.training.report import FitReport, read_report

RESULTS = Path(__file__).parent / "budgets.json"
RECAP = [sys.executable, "-m", "recap_ctr"]


def measure(log: Path, budget: float, out: Path) -> dict[str, Any]:
    """Fit a log within a budget, and return what it took and what came out."""
    started = time.monotonic()
    command = [*RECAP, "fit", str(log), "--label", "click", "--budget", f"{budget:g}", "--out", str(out)]
    subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    taken = time.monotonic() - started
    report = read_report(out)
    assert isinstance(report, FitReport)
    return {
        "minutes": round(taken / 60, 3),
        "model": report.model.name,
        "auc": report.metrics.on("test").raw.auc,
        "given_up": report.plan["given_up"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=int, action="append", required=True)
    parser.add_argument("--budget", type=float, action="append", required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"fits": {}}
    for rows in arguments.rows:
        log = arguments.work / f"clicks-{rows}.csv"
        if not log.is_file():
            subprocess.run(
                [*RECAP, "synthetic", "--rows", str(rows), "--out", str(log), "--quiet"], check=True
            )
        for budget in arguments.budget:
            key = f"{rows} rows, {budget:g} minutes"
            if key not in results["fits"]:
                results["fits"][key] = measure(log, budget, arguments.work / f"fit-{rows}-{budget:g}")
                results |= {"machine": machine.machine(), "date": datetime.now(UTC).date().isoformat()}
                RESULTS.write_text(json.dumps(results, indent=2) + "\n")
                print(key, json.dumps(results["fits"][key]))


if __name__ == "__main__":
    main()
