"""Run the tests that show a row of the table of promises (docs/reliability.md), where tests of seconds show all of it.

python -m benchmarks.reliability.checks ROW
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from recap_ctr.jobs.machine import machine, versions

ROOT = Path(__file__).resolve().parents[2]
TESTS = {
    1: ("training/test_kill.py", "training/test_run.py::TestOutput", "data/test_passes.py::TestResume"),
    3: (
        "storage/test_files.py",
        "data/test_prepare.py::TestExistingData",
        "data/test_spool.py",
        "data/test_sink.py",
        "inference/test_artifact.py::TestWriting",
        "cli/test_main.py",
    ),
    5: (
        "inference/test_artifact.py::TestHostileManifest",
        "inference/test_artifact.py::TestBombs",
        "inference/test_artifact.py::TestHostileFiles",
        "inference/test_operators.py",
        "serve/test_supervisor.py::test_an_offer_that_takes_too_much_ends_alone",
    ),
    11: (
        "serve/test_connection.py",
        "serve/test_codec.py",
        "serve/test_app.py::TestPackedBodies",
        "serve/test_app.py::test_the_size_of_a_body_is_limited",
        "serve/test_app.py::test_the_sum_of_all_bodies_is_limited",
        "serve/test_app.py::test_the_number_of_held_requests_is_limited",
    ),
    13: (
        "inference/test_artifact.py::TestHostileFiles::test_weights_that_are_not_finite",
        "training/test_run.py::TestVariants::test_a_loss_that_is_no_number_is_an_error",
        "serve/test_codec.py::test_errors_name_field_row_and_fix",
        "serve/test_app.py::test_any_body_is_scored_or_refused",
    ),
    14: (
        "data/test_csv.py",
        "data/test_parquet.py",
        "data/test_source.py::TestDamagedFiles",
        "inference/test_artifact.py::TestHostileFiles::test_mutated_parquet",
    ),
    16: (
        "serve/test_token.py",
        "serve/test_app.py::test_without_a_token_other_host_names_are_refused",
        "serve/test_app.py::test_everything_but_health_and_page_needs_the_token",
        "serve/test_app.py::test_other_paths",
        "serve/test_supervisor.py::test_listening_beyond_loopback_needs_a_token",
    ),
    18: (
        "serve/test_supervisor.py",
        "serve/test_connection.py",
        "serve/test_batcher.py",
    ),
    19: ("test_release.py", "test_house_rules.py", "test_layering.py"),
}
"""By row, what pytest is given, below tests/."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("row", type=int, choices=TESTS)
    args = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", *(f"tests/{name}" for name in TESTS[args.row])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, file=sys.stderr)
    counts = {
        name: int(count)
        for count, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout.splitlines()[-1])
    }
    print(json.dumps({"row": args.row, **counts, "machine": machine(), "versions": versions()}))
    if done.returncode:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
