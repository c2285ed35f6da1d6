"""The numbers of README.md, docs/results.md, docs/speed.md, docs/deploy.md and docs/reliability.md, from reports.

`python -m benchmarks.summary` prints them; `--write` puts them there, between their markers; a test compares. Table 1
is made of the reports of single runs first, with the statistics of today.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.reliability.promises import ROWS, Measurement
from recap_ctr.bench.arms import METRICS, arm_of
from recap_ctr.bench.significance import paired_difference
from recap_ctr.bench.table1 import Treatment, read_reports
from recap_ctr.bench.table1_text import write_tables
from recap_ctr.bench.tables import spread

HERE = Path(__file__).parent
README, DOCS = HERE.parent / "README.md", HERE.parent / "docs"
BEFORE_DATES = "2026-11-16"  # Results of `benchmarks.reliability` without a date are of this day.
START, END = "<!-- {}: python -m benchmarks.summary --write -->", "<!-- end of {} -->"


def load(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file."""
    values = json.loads(path.read_text())
    assert isinstance(values, dict)
    return values


def accuracy() -> list[str]:
    """Return FCN by both kinds of update, mean and standard deviation over seeds."""
    lines = [
        "| data | model | update | seeds | parameters | test AUC | logloss | calibrated logloss | epochs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for directory in (HERE / "ml-1m" / "fcn", HERE / "ml-1m" / "fcn-fast"):
        reports = read_reports(directory)
        first, test = reports[0], [report.metrics.on("test") for report in reports]
        seeds = ", ".join(str(report.train.seed) for report in reports)
        epochs = ", ".join(str(len(report.history)) for report in reports)
        lines.append(
            f"| {first.data.name} | {first.model.name} | {first.train.update} | {seeds}"
            f" | {first.parameters:,} | {spread([figures.raw.auc for figures in test], 3, 100)}"
            f" | {spread([figures.raw.logloss for figures in test], 4)}"
            f" | {spread([figures.calibrated.logloss for figures in test], 4)} | {epochs} |"
        )
        splits = first.data.splits
        note = (
            f"{first.data.name}: {splits['train'].rows:,} training, {splits['test'].rows:,} test rows,"
            f" one random split; {first.machine['processor']}, {first.threads} thread, {first.date}."
        )
        if note not in notes:
            notes.append(note)
    return [*lines, "", *notes]


def paired(directory: Path, other: Path) -> list[str]:
    """Return how two settings differ over the seeds they share: mean, standard error, two-tailed paired t-test."""
    arm, other_arm = (arm_of(side.name, read_reports(side)) for side in (directory, other))
    differences = {metric: paired_difference(arm, other_arm, metric) for metric in METRICS}
    lines = []
    for metric, words in METRICS.items():
        gap = differences[metric]
        assert gap is not None
        lines.append(f"| {words} | {gap.mean:+.5f} | {gap.standard_error:.5f} | {gap.p:.2f} |")
        seeds = len(gap.seeds)
    header = f"| {other.name} minus {directory.name}, {seeds} seeds | mean | standard error | p |"
    return [header, "|---|---|---|---|", *lines]


TABLES = (
    "overview",
    "ablation",
    "fcn-scaling",
    "teachers",
    "routes",
    "variance",
    "sensitivity",
    "capacity",
    "estimators",
    "frontier",
)


def table(name: str, data: str) -> list[str]:
    """Return a table of `recap bench` on a data set, as it was written."""
    return (HERE / data / name / f"{name}.md").read_text().rstrip().splitlines()


def tables_of(data: str) -> list[str]:
    """Return all tables that `recap bench` wrote of a data set, with their figures."""
    lines: list[str] = []
    for name in TABLES:
        directory = HERE / data / name
        if not (directory / f"{name}.md").is_file():
            continue
        lines += [f"### `recap bench {name}`", "", *table(name, data), ""]
        if (directory / f"{name}.png").is_file():
            figure = (directory / f"{name}.png").relative_to(HERE.parent).as_posix()
            lines += [f"![{name}, {data}](../{figure})", ""]
    for path in sorted((HERE / data).glob("table1*.md")):
        option = {"-ema": " --averaged", "-tuned": " --tuned"}.get(path.stem.removeprefix("table1"), "")
        lines += [f"### `recap bench table1{option}`", "", *path.read_text().rstrip().splitlines(), ""]
    return lines


def tables1() -> list[tuple[Path, Treatment]]:
    """Return each Table 1 that there is: the directory of a data set, and how its baselines were trained."""
    paths = sorted(HERE.glob("*/table1*.md"))
    return [(path.parent, Treatment(path.stem.removeprefix("table1"))) for path in paths]


def results() -> list[str]:
    """Return the results by data set, and at the end what `recap train` alone does."""
    ml_1m = HERE / "ml-1m"
    lines = [line for data in ("ml-1m", "synthetic") for line in (f"## {data}", "", *tables_of(data))]
    lines += ["## `recap train`, one model at a time", "", *accuracy(), ""]
    return [*lines, *paired(ml_1m / "fcn", ml_1m / "fcn-fast")]


def speed() -> list[str]:
    """Return what `benchmarks/speed` measured last, as ratios to the peer."""
    lines = ["| against FuxiCTR 2.3.10 | ratio | wanted | beside it |", "|---|---|---|---|"]
    results = HERE / "speed" / "results"
    measured = load(results / "prepare.json")
    lines.append(
        f"| prepare, {measured['rows']:,} rows of Criteo's layout | {measured['ratio']:.1f} | 3 |"
        f" CPU time {measured['cpu_ratio']:.1f} |"
    )
    for shape in ("criteo", "avazu"):
        measured = load(results / f"train-{shape}.json")
        lines += [
            f"| training, {shape} shape, `{update}` | {measured['ratio'][update]:.2f} | {measured['wanted'][update]} |"
            f" {measured['rows_per_second'][update]:,} rows/s; a step is {measured['times_products'][update]:.2f}"
            f" of its bare matrix products (peer {measured['times_products']['peer']:.2f}) |"
            for update in ("exact", "fast")
        ]
    for file, what in (("memory", "prepare"), ("protocol-memory", "prepare by Criteo's protocol")):
        measured = load(results / f"{file}.json")
        rows = " and ".join(f"{count:,}" for count in measured["rows"])
        peaks = " and ".join(f"{peak} MiB" for peak in measured["peak_mib"])
        ratio = measured["peak_mib"][-1] / measured["peak_mib"][0]
        lines.append(f"| peak memory of {what}, {rows} rows | {ratio:.2f} | at most 1.3 | {peaks} |")
    return lines


def headline() -> list[str]:
    """Return what RECAP is worth beside the ensemble of its teachers, on the real benchmark."""
    overview = load(HERE / "ml-1m" / "overview" / "overview.json")
    lines = {line["name"]: line for line in overview["lines"] if not line["name"].startswith("ensemble")}
    teachers = lines["FCN, averaged weights: the teachers"]
    at = overview["lines"].index(teachers) + 1
    together, recap = overview["lines"][at], lines["RECAP"]
    alone = f"{spread(teachers['auc'], 2, 100)} ({len(teachers['auc'])} runs)"
    return [
        f"On MovieLens-1M one FCN has a test AUC of {alone}, the {together['name']} of them"
        f" {spread(together['auc'], 2, 100)}, and RECAP, taught by them, {spread(recap['auc'], 2, 100)}"
        f" ({len(recap['auc'])} runs) with {recap['parameters']:,} parameters,"
        f" {recap['parameters'] / teachers['parameters']:.2f} times those of one FCN: [measured](docs/results.md) by"
        " `recap bench overview`.",
    ]


def graphs() -> list[str]:
    """Return what `benchmarks.speed.onnx` measured last."""
    measured = load(HERE / "speed" / "results" / "onnx.json")
    sizes = list(measured["microseconds_per_row"])
    lines = [
        f"| time relative to the graph in 32 bits | {' | '.join(f'{int(size):,} rows' for size in sizes)} |",
        f"|---|{'---|' * len(sizes)}",
    ]
    for model, by_size in measured["torch_over_onnx"].items():
        lines.append(f"| {model}: torch | {' | '.join(f'{by_size[size]:.2f}' for size in sizes)} |")
        rounded = measured["onnx_over_int8"][model]
        lines.append(f"| {model}: int8 | {' | '.join(f'{1 / rounded[size]:.2f}' for size in sizes)} |")
    times = measured["microseconds_per_row"]
    for model in measured["torch_over_onnx"]:
        microseconds = " | ".join(f"{times[size][f'{model}, onnx']:,.1f} µs a row" for size in sizes)
        lines.append(f"| {model}: the graph itself | {microseconds} |")
    rates = measured["rows_per_second"]
    return [
        *lines,
        "",
        f"RECAP with 8 routes scores {measured['recap_rows_per_second_over_five_fcns']:.2f} times the rows a second of"
        f" five FCNs on the same engine ({rates['ours']:,} and {rates['five']:,}, 512 rows at a time), at"
        f" {measured['recap_cost_over_one_fcn']:.2f} of the cost of one ({measured['threads']} thread,"
        f" {measured['machine']['processor']}).",
    ]


def server() -> list[str]:
    """Return what `benchmarks.speed.serve` measured last, and both parts of `benchmarks.reliability`."""
    measured = load(HERE / "speed" / "results" / "serve.json")
    lines = [
        "| candidates | format | rows a second | of the engine's | p50 | p99 |",
        "|---|---|---|---|---|---|",
    ]
    for size in ("1", "100", "500"):
        for form in ("json", "arrow"):
            test = measured[f"{form} {size}"]
            lines.append(
                f"| {size} | {form} | {test['rows_per_second']:,} | {test['of_engine']:.2f} | {test['p50_ms']:.0f} ms |"
                f" {test['p99_ms']:.0f} ms |"
            )
    calm, dial, none = (
        measured[name]
        for name in ("half of saturation", "twice saturation, dial", "twice saturation, no dial")
    )
    swap, fuzz = (load(HERE / "reliability" / "results" / f"{name}.json") for name in ("swap", "fuzz_server"))
    return [
        *lines,
        "",
        f"At half of saturation p99 is {calm['scored']['p99_over_p50']:.1f} times p50, beside"
        f" {calm['empty']['p99_over_p50']:.1f} for an endpoint that does nothing. At twice saturation"
        f" {dial['accepted_in_time']:.1%} of accepted requests are answered within {measured['deadline_ms']:.0f} ms"
        f" with the dial (p99 {dial['p99_ms']:.0f} ms), {none['accepted_in_time']:.1%} without (p99"
        f" {none['p99_ms']:,.0f} ms; [figure](../benchmarks/speed/results/serve.png)).",
        f"Five swaps and a damaged artifact in {swap['seconds']:.0f} s of load: {swap['requests']:,} requests,"
        f" {swap['lost']} lost. {fuzz['cases']:,} hostile requests: {fuzz['server_errors']} server errors,"
        f" {fuzz['workers_died']} dead workers, {fuzz['grown_mib']:.1f} MiB more memory.",
    ]


def fits() -> list[str]:
    """Return budgeted fits beside logistic regression, LightGBM and CatBoost, on the same rows."""
    rivals = ("logistic regression", "LightGBM", "CatBoost")
    lines = [
        f"| data | model | minutes taken | CPU seconds | test AUC | logloss | lead over {' | over '.join(rivals)} |",
        "|---" * 9 + "|",
    ]
    notes = []
    for file in sorted((HERE / "fits" / "results").glob("*.json")):
        measured = load(file)
        for budget, fitted in sorted(measured["fits"].items(), key=lambda item: float(item[0])):
            leads = [
                f"{100 * lead['auc']:+.2f} ± {196 * lead['error']:.2f}" if lead else ""
                for lead in (fitted["leads"].get(name) for name in rivals)
            ]
            lines.append(
                f"| {file.stem} | `--budget {budget}`: {fitted['model']} | {fitted['seconds'] / 60:.1f}"
                f" | {fitted['cpu_seconds']:,.0f} | {100 * fitted['auc']:.2f} | {fitted['logloss']:.4f}"
                f" | {' | '.join(leads)} |"
            )
        for name, rival in measured["rivals"].items():
            lines.append(
                f"| {file.stem} | {name} | {rival['seconds'] / 60:.1f} | {rival['cpu_seconds']:,.0f}"
                f" | {100 * rival['auc']:.2f} | {rival['logloss']:.4f} | | | |"
            )
        rows = ", ".join(f"{count:,} {split}" for split, count in measured["rows"].items())
        notes.append(f"{file.stem}: {rows} rows; split {measured['split']}; {measured['date']}.")
    return [*lines, "", "Leads are paired, in points of AUC, ± half of the 95 % interval. " + " ".join(notes)]


def budgets() -> list[str]:
    """Return what budgets were asked for, and what was taken."""
    if not (HERE / "fits" / "budgets.json").is_file():
        return ["Not measured yet."]
    measured = load(HERE / "fits" / "budgets.json")
    lines = ["| log | asked | taken, minutes | shipped | test AUC | given up |", "|---|---|---|---|---|---|"]
    for name, fitted in measured["fits"].items():
        rows, asked = name.split(", ")
        lines.append(
            f"| {int(rows.split()[0]):,} rows | {asked} | {fitted['minutes']:.2f} | {fitted['model']}"
            f" | {100 * fitted['auc']:.2f} | {', '.join(fitted['given_up'])} |"
        )
    return [
        *lines,
        "",
        f"{measured['machine']['processor']}, {measured['machine']['cores']} cores, {measured['date']}.",
    ]


def reliability() -> list[str]:
    """Return the rows of promises, target beside what was measured last."""
    lines = ["| # | what is tried | target | measured | by, when |", "|---|---|---|---|---|"]
    for row in ROWS:
        cells = [str(row.number), row.test, row.target]
        parts = [promise(measurement) for measurement in row.measurements]
        lines.append(
            f"| {' | '.join([*cells, *('<br>'.join(column) for column in zip(*parts, strict=True))])} |"
        )
    return lines


def promise(measurement: Measurement) -> tuple[str, str]:
    """Return what a command of `benchmarks.reliability` said last, and the command with its date."""
    path = HERE / "reliability" / "results" / f"{measurement.name}.json"
    if not path.is_file():
        return "not measured yet", f"`{' '.join(measurement.command)}`"
    measured = load(path)
    held = "" if measured.get("as_promised", True) else "**not as promised:** "
    command = measured.get("command", " ".join(measurement.command)).rpartition("benchmarks.reliability.")[2]
    short = ", a short run" if measured.get("quick") and measurement.quick else ""
    return f"{held}{measurement.say(measured)}", f"`{command}`, {measured.get('date', BEFORE_DATES)}{short}"


BLOCKS = {
    "budgets": (DOCS / "results.md", budgets),
    "fits": (DOCS / "results.md", fits),
    "headline": (README, headline),
    "results": (DOCS / "results.md", results),
    "speed": (DOCS / "speed.md", speed),
    "graphs": (DOCS / "deploy.md", graphs),
    "server": (DOCS / "deploy.md", server),
    "reliability": (DOCS / "reliability.md", reliability),
}
"""Generated parts: the file, and the function that makes the lines."""


def block(name: str) -> str:
    """Return one of the generated parts, markers included."""
    return "\n".join([START.format(name), "", *BLOCKS[name][1](), "", END.format(name)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put them into their files")
    if not parser.parse_args().write:
        print("\n\n".join(block(name) for name in BLOCKS))
        return
    for directory, treatment in tables1():
        write_tables({directory.name: directory}, directory, treatment)
    for name, (file, _) in BLOCKS.items():
        before, _, rest = file.read_text().partition(START.format(name))
        file.write_text(before + block(name) + rest.partition(END.format(name))[2])


if __name__ == "__main__":
    main()
