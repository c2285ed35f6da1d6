"""One table of what estimator scaling does on a data set: single models, their ensembles, and RECAP beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from scipy.stats import t as student_t
from scipy.stats import ttest_1samp

from recap_ctr.bench.published import title_of
from recap_ctr.bench.scaling import Repeated, cells_of, copy_reports, on_routes, train_cells
from recap_ctr.bench.tables import NO_TEST, spread
from recap_ctr.inference.costs import relative_costs
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import parse_model
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import atomic_file, write_json
from recap_ctr.training.run import ARTIFACT, REFERENCE, RunConfig, run_many

TRAININGS = ("ema-kd", "plain", "ema", "kd")
PUBLISHED = "published"
METRICS = ("auc", "logloss", "calibrated")


@dataclass(frozen=True)
class Line:
    """A model or an ensemble: one value of each figure per run."""

    name: str
    auc: tuple[float, ...]
    logloss: tuple[float, ...]
    calibrated: tuple[float, ...]
    parameters: int
    cost: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), **{metric: list(getattr(self, metric)) for metric in METRICS}}


def line_of(name: str, figures: list[dict[str, Any]], parameters: int, cost: float | None = None) -> Line:
    """`figures` are those of `evaluate`, one for each run."""
    return Line(
        name,
        tuple(one["raw"]["auc"] for one in figures),
        tuple(one["raw"]["logloss"] for one in figures),
        tuple(one["calibrated"]["logloss"] for one in figures),
        parameters,
        cost,
    )


def held_out(report: dict[str, Any]) -> str:
    return "test" if "test" in report["metrics"] else "valid"


def single_lines(
    recipe: Recipe, title: str, runs: dict[Path, dict[str, Any]], costs: tuple[float, float]
) -> list[Line]:
    """Runs that differ in their seed, and the ensemble of all of them; `costs` are of one and of all."""
    reports = list(runs.values())
    split, size = held_out(reports[0]), reports[0]["parameters"]
    lines = [line_of(title, [report["metrics"][split] for report in reports], size, costs[0])]
    if len(runs) > 1:
        together = recipe.ensembles(list(runs))[-1]["metrics"][split]
        lines.append(line_of(f"ensemble of {len(runs)}", [together], size * len(runs), costs[1]))
    return lines


def logistic_regression(recipe: Recipe) -> dict[Path, dict[str, Any]]:
    config = RunConfig(
        model="lr",
        model_config=parse_model("lr", {}),
        train=REFERENCE.model_copy(update={"seed": recipe.config.seed}),
        calibration=recipe.config.calibration,
        negative_rate=recipe.config.negative_rate,
        reference=False,
        device=recipe.device,
    )
    where = recipe.directory("lr", config.training(recipe.data))
    return run_many({where: config}, recipe.data, title="logistic regression", quiet=recipe.quiet)


def costs(
    teachers: Sequence[Path], student: Path, recipe: Recipe, others: Sequence[Path] = ()
) -> dict[str, float]:
    """Scoring cost of one teacher (1), of all, of the student on one route and on all of its own, and of others."""
    device = torch.device(recipe.device)
    torch.set_num_threads(recipe.threads)
    members, rest = (
        [load_artifact(path / ARTIFACT).model.to(device) for path in paths] for paths in (teachers, others)
    )
    shipped = load_artifact(student / ARTIFACT)
    shard = recipe.data.test if len(recipe.data.test) else recipe.data.valid
    return relative_costs(
        {
            "one": members[:1],
            "ensemble": members,
            "route": [shipped.dialled(routes=1).model.to(device)],
            "routes": [shipped.model.to(device)],
            **({"another": rest[:1], "others": rest} if rest else {}),
        },
        shard,
        device,
    )


def against(values: tuple[float, ...], fixed: float) -> dict[str, float | None]:
    """How runs differ from a fixed value: mean, 95 % interval, two-tailed one-sample t-test."""
    gap = mean(values) - fixed
    if len(values) < 2 or stdev(values) == 0:
        return {"mean": gap, "low": None, "high": None, "p": None}
    half = float(student_t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return {"mean": gap, "low": gap - half, "high": gap + half, "p": float(ttest_1samp(values, fixed).pvalue)}


def rows(lines: list[Line]) -> list[list[str]]:
    """As text: AUC in points, mean ± standard deviation where there are several runs."""
    return [
        [
            line.name,
            str(len(line.auc)),
            f"{line.parameters:,}" if line.parameters else "",
            spread(line.auc, 3, 100),
            spread(line.logloss, 5),
            spread(line.calibrated, 5),
            "" if line.cost is None else f"{line.cost:.2f}",
        ]
        for line in lines
    ]


def cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Repeated]:
    """What the table is made of: students by training, and as many FCN by the published protocol as teachers."""
    published = cells_of(recipe, plan, "fcn", ["plain"], range(1, len(teachers) + 1), teachers)
    own = cells_of(recipe, plan, "recap", TRAININGS, range(1, seeds + 1), teachers)
    return {**own, PUBLISHED: published["plain"]}


def overview(recipe: Recipe, seeds: int, reports: Path) -> str:
    """Train all that the table needs; write its figures as JSON and the table as Markdown; return the latter."""
    plan = recipe.plan()
    teachers = recipe.teachers(plan)
    students = train_cells(recipe, cells(recipe, plan, list(teachers), seeds), title="overview")
    published = students.pop(PUBLISHED)
    reference = logistic_regression(recipe)
    lines = collect(recipe, teachers, students, published, reference)
    own = (
        f"Regulariser and rate are the probe's: l2 {plan.l2:g}, {plan.learning_rate:g};"
        " taught students have an l2 of their own."
    )
    text = "\n".join([*markdown(lines), "", *_findings(lines, recipe), own, ""])
    copy_reports(
        {"teachers": teachers, "fcn-plain": published, **{f"recap-{k}": v for k, v in students.items()}},
        reports,
    )
    directory = reports / "overview"
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "overview.json", {"kind": "overview", "lines": [line.to_json() for line in lines]})
    with atomic_file(directory / "overview.md") as file:
        file.write(text.encode())
    return text


def collect(
    recipe: Recipe,
    teachers: dict[Path, dict[str, Any]],
    students: dict[str, dict[Path, dict[str, Any]]],
    published: dict[Path, dict[str, Any]],
    reference: dict[Path, dict[str, Any]],
) -> list[Line]:
    """All lines, in the order of the table."""
    split = held_out(next(iter(teachers.values())))
    (regression,) = reference.values()
    base = regression["metrics"][split]["base_rate_logloss"]
    # Where teachers are FCNs, those by the published protocol cost the same.
    differ = recipe.config.teacher_model != "fcn"
    cost = costs(list(teachers), next(iter(students["ema-kd"])), recipe, list(published) if differ else ())

    def students_line(name: str, training: str, *, routes: bool) -> Line:
        found = [on_routes(report, all_of_them=routes) for report in students[training].values()]
        figures = [report["metrics"][split] for report in found]
        return line_of(name, figures, found[0]["parameters"], cost["routes" if routes else "route"])

    plain = "FCN, published protocol"
    averaged = f"{title_of(recipe.config.teacher_model)}, averaged weights: the teachers"
    own = cost["one"], cost["ensemble"]
    theirs = (cost["another"], cost["others"]) if differ else own
    return [
        Line("base rate", (0.5,), (base,), (base,), 0),
        line_of("logistic regression", [regression["metrics"][split]], regression["parameters"]),
        *single_lines(recipe, plain, published, theirs),
        *single_lines(recipe, averaged, teachers, own),
        students_line("recursive backbone", "plain", routes=False),
        students_line("+ EMA", "ema", routes=False),
        students_line("+ KD", "kd", routes=False),
        students_line("+ routes", "plain", routes=True),
        students_line("RECAP", "ema-kd", routes=True),
    ]


def _findings(lines: list[Line], recipe: Recipe) -> list[str]:
    """What RECAP is worth beside the ensembles, with the test that goes with it."""
    recap = lines[-1]
    said = []
    for at, line in enumerate(lines):
        if not line.name.startswith("ensemble"):
            continue
        alone, together = mean(lines[at - 1].auc), line.auc[0]
        found = against(recap.auc, together)
        interval = (
            ""
            if found["p"] is None
            else f" [{100 * (found['low'] or 0):+.3f}, {100 * (found['high'] or 0):+.3f}], p {found['p']:.3f}"
        )
        kept = (
            f"; {(mean(recap.auc) - alone) / (together - alone):.0%} of its gain" if together > alone else ""
        )
        said.append(
            f"RECAP minus the {line.name} of {lines[at - 1].name}: {100 * (found['mean'] or 0):+.3f} points of"
            f" AUC{interval}{kept}, at {recap.parameters / lines[at - 1].parameters:.3f} of one member's size."
        )
    said.append(
        "Tests are two-tailed one-sample t-tests over student seeds; students share their teachers, so they are"
        f" conditional on these. Cost: time to score relative to one {title_of(recipe.config.teacher_model)}, same"
        " process, interleaved."
    )
    if not len(recipe.data.test):
        said.append(NO_TEST)
    return said


HEADER = ["model", "runs", "parameters", "AUC", "logloss", "calibrated", "cost"]


def markdown(lines: list[Line]) -> list[str]:
    cells = [HEADER, ["---"] * len(HEADER), *rows(lines)]
    return [f"| {' | '.join(row)} |" for row in cells]
