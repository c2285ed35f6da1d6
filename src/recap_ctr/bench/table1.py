"""Table 1: models × data sets × seeds. A cell is one run; its report is one small file, and no cell is done twice.

A cell of RECAP is a student of the recipe, whose teachers and probe all seeds share.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from scipy.optimize import brentq
from scipy.stats import nct, ttest_ind
from scipy.stats import t as student_t

from recap_ctr.bench import tables
from recap_ctr.bench.costs import Cost, Rehearsal, cost_of
from recap_ctr.bench.published import PAPER_ORDER, SAME_SPLIT, TITLES, Published, logged, published
from recap_ctr.bench.scaling import Repeated, cells_of, train_cells
from recap_ctr.bench.tables import METRICS, NO_TEST, NONE, Arm, arm_of, spread
from recap_ctr.config import TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.models.catalogue import MODELS, model_class, parse_model, short_name
from recap_ctr.plugins import is_dotted
from recap_ctr.recipe.stages import Plan, Recipe, RecipeConfig
from recap_ctr.storage.files import atomic_file, read_json, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.training.run import (
    REPORT,
    RunConfig,
    RunSettings,
    default_threads,
    read_settings,
    run_many,
)

AVERAGED: dict[str, Any] = {"schedule": "constant", "ema_epochs": (4.0,), "max_epochs": 32, "patience": 3}
"""What our trajectory averaging changes in a published protocol."""
SUFFIX = "-ema"
OURS = "recap"
ONE_ROUTE = {"count": 1, "choice": "late"}
LEVEL = 0.01  # of the star, as in the paper
AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    label: str
    """The model's name, with a suffix where its weights are averaged."""
    seed: int
    config: RunConfig


def cells(
    data: PreparedData,
    models: Sequence[str],
    seeds: Iterable[int],
    settings: Path | None,
    *,
    averaged: bool = False,
    recipe: RecipeConfig | None = None,
    threads: int | None = None,
    device: str = "cpu",
) -> list[Cell]:
    """Cells of all models but RECAP, by the settings in SETTINGS/MODEL.toml, or by default ones.

    A model's name there is any: the file's own [model] name says which one it is. They are calibrated and measured as
    RECAP is by its `recipe`.
    """
    like = recipe or RecipeConfig()
    found = []
    for model in models:
        path = None if settings is None else settings / f"{short_name(model)}.toml"
        given = read_settings(path, model) if path and path.is_file() else RunSettings(model, {}, {})
        train = {**given.train, **(AVERAGED if averaged else {})}
        model_config = parse_model(given.model, given.model_settings)
        for seed in seeds:
            config = RunConfig(
                model=given.model,
                model_config=model_config,
                train=parse(TrainConfig, {**train, "seed": seed}, str(path or "table1")),
                calibration=like.calibration,
                negative_rate=like.negative_rate,
                reference=False,
                threads=threads or default_threads(model_config, data.layout),
                device=device,
            )
            found.append(Cell(short_name(model) + SUFFIX * averaged, seed, config))
    return found


def is_done(report: Path, cell: Cell, data: PreparedData) -> bool:
    """Whether there is a report of just this cell: the same data, model and training."""
    if not report.is_file():
        return False
    known = read_json(report)
    return (
        known["data"]["fingerprint"] == data.fingerprint
        and known["model"]["name"] == cell.config.model
        and parse_model(cell.config.model, known["model"]["config"]) == cell.config.model_config
        and parse(TrainConfig, known["train"], str(report)) == cell.config.train
        and _measuring(known) == (cell.config.calibration, cell.config.negative_rate)
    )


def _measuring(report: dict[str, Any]) -> tuple[str, float]:
    """How a run's figures were made; what a record of before leaves out is as by default."""
    return report.get("calibration", "affine"), report.get("negative_rate", 1.0)


@dataclass(frozen=True)
class Bench:
    """Where table 1 of a data set is made: runs in `out`, reports in `reports`/MODEL/seed-N."""

    data: PreparedData
    out: Path
    reports: Path
    settings: Path | None = None
    """Directory of MODEL.toml and recipe.toml."""
    recipe: RecipeConfig | None = None
    """Of the cells of RECAP."""
    threads: int | None = None
    """Of a run; None: as many as suit its model."""
    device: str = "cpu"
    workers: int | None = None
    quiet: bool = False

    def report_of(self, label: str, seed: int) -> Path:
        return self.reports / label / f"seed-{seed}" / REPORT

    def _cells(self, models: Sequence[str], seeds: Iterable[int], *, averaged: bool) -> list[Cell]:
        return cells(
            self.data, models, seeds, self.settings, averaged=averaged, recipe=self.recipe, threads=self.threads,
            device=self.device,
        )  # fmt: skip

    def missing(self, wanted: Sequence[Cell]) -> list[Cell]:
        return [c for c in wanted if not is_done(self.report_of(c.label, c.seed), c, self.data)]

    def run(self, models: Sequence[str], num_seeds: int, *, averaged: bool = False) -> None:
        """Train what is missing; each report is written as soon as its run has ended."""
        seeds = range(1, num_seeds + 1)
        plain = [model for model in models if model != OURS]
        todo = self.missing(self._cells(plain, seeds, averaged=averaged))
        places = {self._directory(cell): cell for cell in todo}

        def keep(out: Path, report: dict[str, Any]) -> None:
            self._keep(places[out].label, report)

        run_many(
            {out: cell.config for out, cell in places.items()},
            self.data, title="table 1", workers=self.workers, quiet=self.quiet, done=keep,
        )  # fmt: skip
        if OURS in models:
            recipe = self._cook(Recipe)
            plan = recipe.plan()
            students = students_of(recipe, plan, list(recipe.teachers(plan)), num_seeds)
            for report in train_cells(recipe, students, title=OURS)[OURS].values():
                self._keep(OURS, report)

    def _cook(self, kind: type[AnyRecipe]) -> AnyRecipe:
        """The recipe at work, for the cells of RECAP."""
        assert self.recipe is not None, "a recipe is given where RECAP is wanted"
        return kind(
            self.recipe, self.data, self.out, threads=self.threads, device=self.device, workers=self.workers,
            quiet=self.quiet,
        )  # fmt: skip

    def _directory(self, cell: Cell) -> Path:
        """Named by the settings, so that changed ones find a place of their own."""
        mark = fingerprint(cell.config.without_seed(self.data))[:10]
        return self.out / f"{cell.label}-{mark}" / f"seed-{cell.seed}"

    def _keep(self, label: str, report: dict[str, Any]) -> None:
        path = self.report_of(label, report["train"]["seed"])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, report)

    def costs(self, models: Sequence[str], num_seeds: int, *, averaged: bool = False) -> list[Cost]:
        """What the missing cells would take, timed by a few steps of each model."""
        plain = [model for model in models if model != OURS]
        todo = self.missing(self._cells(plain, range(1, num_seeds + 1), averaged=averaged))
        found = []
        for label in dict.fromkeys(cell.label for cell in todo):
            own = [cell for cell in todo if cell.label == label]
            known = [read_json(path) for path in (self.reports / label).glob(f"seed-*/{REPORT}")]
            found.append(cost_of(label, len(own), own[0].config, self.data, known))
        return found + (self._cook(Rehearsal).rehearse(students_of, num_seeds) if OURS in models else [])


def students_of(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Repeated]:
    """The cells of RECAP."""
    return {OURS: cells_of(recipe, plan, OURS, ["ema-kd"], range(1, seeds + 1), teachers)["ema-kd"]}


# From here on: the table, made of reports alone.


def read_arms(reports: Path, *, averaged: bool = False, data: PreparedData | None = None) -> dict[str, Arm]:
    """By model, in the paper's order: all of which there is a report. Others stand before RECAP.

    With `data`, reports of others are left out.
    """
    found: dict[str, Arm] = {}
    firsts: list[dict[str, Any]] = []
    others = sorted({*MODELS, *_guests(reports, averaged)} - set(PAPER_ORDER))
    for model in (*PAPER_ORDER[:-1], *others, PAPER_ORDER[-1]):
        label = model if model == OURS else model + SUFFIX * averaged
        known = [read_json(path) for path in sorted((reports / label).glob(f"seed-*/{REPORT}"))]
        if data is not None:
            known = [one for one in known if one["data"]["fingerprint"] == data.fingerprint]
        if known:
            _refuse_mixtures(label, known)
            found[model] = arm_of(TITLES.get(model, model), known)
            _refuse_mixtures("the table", [*firsts, known[0]], data_alone=True)
            firsts.append(known[0])
    return found


def _refuse_mixtures(name: str, reports: Sequence[dict[str, Any]], *, data_alone: bool = False) -> None:
    """Runs are one arm if only their seeds differ; all arms of a table are of the same data."""
    first = reports[0]
    for other in reports[1:]:
        same = first["data"]["fingerprint"] == other["data"]["fingerprint"]
        if same and (data_alone or _settings(first) == _settings(other)):
            continue
        seeds = " and ".join(f"{one['model']['name']}/seed-{one['train']['seed']}" for one in (first, other))
        raise InputError(
            f"{name} would mix runs of different {'settings' if same else 'data'}: reports of {seeds}",
            fix="delete the report that is out of date, or run its cell again with as many --seeds",
        )


def _settings(report: dict[str, Any]) -> tuple[Any, ...]:
    """All but a run's seed that its figures depend on; what a record of before leaves out is as by default."""
    model = report["model"]
    known = model["config"]
    if not is_dotted(model["name"]):  # one from outside may be gone by now
        known = parse_model(model["name"], known).model_dump(mode="json")
    train = parse(TrainConfig, {**report["train"], "seed": 0}, REPORT)
    return (
        model["name"],
        known,
        train,
        report.get("teachers", []),
        report.get("routes", ONE_ROUTE),
        _measuring(report),
    )


def _guests(reports: Path, averaged: bool) -> set[str]:
    """Labels of finished cells that no model of ours has: of models from outside, and of settings of their own."""
    found = set()
    for path in reports.glob(f"*/seed-*/{REPORT}"):
        name = path.parents[1].name
        guest = name.removesuffix(SUFFIX) if averaged else name
        known = (reports / f"{guest}.toml").is_file() or is_dotted(read_json(path)["model"]["name"])
        if known and name.endswith(SUFFIX) == averaged:
            found.add(guest)
    return found


@dataclass(frozen=True)
class Comparison:
    """Ours against one other model, in AUC."""

    gap: float
    """Over the seeds that both have, where p is of these; else of the means over all."""
    p: float | None
    """Two-tailed, corrected by Holm for all comparisons on the data set; None where a side has one run only."""
    alone: float | None
    """The same without correction, for the one comparison with the best baseline."""
    paired: bool
    seeds: int
    """Runs of RECAP that it rests on."""


def compare(arms: Mapping[str, Arm], ours: str = OURS) -> dict[str, Comparison]:
    """Ours minus each other: paired over shared seeds, which share their split, else by Welch's test."""
    if ours not in arms:
        return {}
    own = arms[ours]
    found: dict[str, Comparison] = {}
    for name, arm in arms.items():
        if name == ours:
            continue
        gap = statistics.mean(own.figures["auc"]) - statistics.mean(arm.figures["auc"])
        pairs = tables.paired(arm, own, "auc")
        if pairs.p is not None and pairs.mean is not None:
            found[name] = Comparison(pairs.mean, pairs.p, pairs.p, paired=True, seeds=len(pairs.seeds))
            continue
        p = None
        if len(arm.seeds) > 1 and len(own.seeds) > 1:
            p = float(ttest_ind(own.figures["auc"], arm.figures["auc"], equal_var=False).pvalue)
        found[name] = Comparison(gap, p, p, paired=False, seeds=len(own.seeds))
    corrected = holm({name: one.p for name, one in found.items() if one.p is not None})
    return {name: replace(one, p=corrected.get(name)) for name, one in found.items()}


def holm(ps: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: each p-value times the number of those not smaller, and never falling.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for at, (name, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(ps) - at)))
        corrected[name] = largest
    return corrected


def detectable(one: Arm, other: Arm) -> float | None:
    """Smallest true difference in AUC that the test at 5 % would find four times in five, by the runs' spread.

    The test is that of the table: paired over the seeds that both have, else of two samples.
    """
    pairs = tables.paired(one, other, "auc")
    if pairs.standard_error:
        return _noncentrality(len(pairs.seeds) - 1) * pairs.standard_error
    counts = len(one.seeds), len(other.seeds)
    if min(counts) < 2:
        return None
    squares = [statistics.variance(arm.figures["auc"]) for arm in (one, other)]
    freedom = sum(counts) - 2
    pooled = sum((count - 1) * square for count, square in zip(counts, squares, strict=True)) / freedom
    return _noncentrality(freedom) * math.sqrt(pooled * (1 / counts[0] + 1 / counts[1]))


def _noncentrality(freedom: int) -> float:
    """By how many standard errors means must differ for a two-tailed t-test at 5 % to find it four times in five."""
    bar = float(student_t.ppf(0.975, freedom))

    def lacking(shift: float) -> float:
        return 0.8 - float(nct.sf(bar, freedom, shift))  # in the other tail it is next to never found

    return float(brentq(lacking, 1.0, 100.0))


def best_two(arms: Mapping[str, Arm], metric: str) -> tuple[str | None, str | None]:
    """Names of the best and the second best by their means."""
    order = sorted(
        arms, key=lambda name: statistics.mean(arms[name].figures[metric]), reverse=metric == "auc"
    )
    return (order[0] if order else None), (order[1] if len(order) > 1 else None)


HEADER = [
    "model", "seeds", "parameters", "AUC", "logloss", "calibrated logloss", "RECAP minus it", "p", "published AUC",
    "published logloss", "public log: AUC", "public log: logloss",
]  # fmt: skip


def markdown(dataset: str, arms: Mapping[str, Arm], title: str, by_default: Sequence[str] = ()) -> str:
    """One data set: a line a model, best bold, second underlined, what others published beside it.

    `by_default` are titles of models that had no settings of their own.
    """
    compared = compare(arms)
    marks = {metric: best_two(arms, metric) for metric in METRICS}

    def marked(name: str, metric: str) -> str:
        scale, digits = (100, 3) if metric == "auc" else (1, 4)
        text = spread(arms[name].figures[metric], digits, scale)
        best, second = marks[metric]
        return f"**{text}**" if name == best else f"<u>{text}</u>" if name == second else text

    lines = [HEADER, ["---"] * len(HEADER)]
    for name, arm in arms.items():
        found = compared.get(name)
        gap = NONE if found is None else f"{100 * found.gap:+.3f}"
        p = NONE if found is None else _say_p(found, max(len(arm.seeds), len(arms[OURS].seeds)))
        beside = [*_beside(published(dataset, name)), *_beside(logged(dataset, name))]
        size = NONE if arm.parameters is None else f"{arm.parameters:,}"
        figures = [marked(name, metric) for metric in METRICS]
        lines.append([arm.name, str(len(arm.seeds)), size, *figures, gap, p, *beside])
    body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"**{title}**", "", *body, "", _note(dataset, arms, compared, by_default)])


def _beside(known: Published | None) -> tuple[str, str]:
    return (NONE, NONE) if known is None else (f"{known.auc:.2f}", f"{known.logloss:.4f}")


def _say_p(found: Comparison, seeds: int) -> str:
    """With what a reader would not expect of it."""
    if found.p is None:
        return NONE
    text = f"{found.p:.3f}" if found.p >= 0.001 else "<0.001"
    if not found.paired:
        return f"{text} (unpaired)"
    return text if found.seeds == seeds else f"{text} ({found.seeds} seeds)"


def _note(
    dataset: str, arms: Mapping[str, Arm], compared: Mapping[str, Comparison], by_default: Sequence[str]
) -> str:
    splits = sorted({arm.split for arm in arms.values()})
    said = [
        f"On {' and '.join(splits)} rows; AUC in points, mean ± standard deviation over seeds; best bold, second"
        " underlined.",
        *([NO_TEST] if "valid" in splits else []),
    ]
    beside = {
        "published": ("the figures of the RECAP paper and, for ECN, of FCN's", published),
        "public log": (
            "what a run by the published settings printed, by its authors or BARS",
            logged,
        ),
    }
    split = "on the same folds" if dataset in SAME_SPLIT else "on another random split"
    for word, (what, known) in beside.items():
        if any(known(dataset, name) for name in arms):
            said.append(f"{word.capitalize()}: {what}, {split}; for reference only.")
    if by_default:
        said.append(
            f"By default settings, for want of a MODEL.toml: {', '.join(by_default)}; they are no fair rivals, since"
            " RECAP's regulariser is found on validation."
        )
    tested = sum(one.p is not None for one in compared.values())
    if tested:
        said.append(
            "p: two-tailed t-test on AUC, paired over the seeds that both have unless it says otherwise, as is the"
            f" difference then; corrected by Holm for the {tested} comparisons. Students of RECAP"
            " share their teachers, so p is conditional on these."
        )
    if compared:
        rival = max(compared, key=lambda name: statistics.mean(arms[name].figures["auc"]))
        least = detectable(arms[OURS], arms[rival])
        if least is not None:
            said.append(
                f"Smallest difference from the best baseline, {arms[rival].name}, that these seeds could detect"
                f" (by this test alone, without correction: 5 % level, power 80 %): {100 * least:.3f} points."
            )
    return " ".join(said)


def latex(by_dataset: Mapping[str, Mapping[str, Arm]], caption: str) -> str:
    """All data sets side by side, as the paper's Table 1; a star where RECAP beats the best baseline at 1 %."""
    caption += " Best bold, second underlined; *: RECAP beats the best baseline, two-tailed t-test, p < 0.01."
    titles = {name: arm.name for arms in by_dataset.values() for name, arm in arms.items()}
    guests = [name for name in titles if name not in PAPER_ORDER]
    models = [name for name in (*PAPER_ORDER[:-1], *guests, PAPER_ORDER[-1]) if name in titles]
    marks = {
        dataset: {metric: best_two(arms, metric) for metric in ("logloss", "auc")}
        for dataset, arms in by_dataset.items()
    }

    def cell(dataset: str, name: str, metric: str) -> str:
        arm = by_dataset[dataset].get(name)
        if arm is None:
            return "--"
        value = statistics.mean(arm.figures[metric])
        text = f"{100 * value:.2f}" if metric == "auc" else f"{value:.4f}"
        if metric == "auc" and name == OURS and _beats_best(by_dataset[dataset]):
            text += "*"
        best, second = marks[dataset][metric]
        return rf"\textbf{{{text}}}" if name == best else rf"\underline{{{text}}}" if name == second else text

    heads = " & ".join(
        rf"\multicolumn{{2}}{{c}}{{{dataset.translate(tables.TO_LATEX)}}}" for dataset in by_dataset
    )
    rows = [
        " & ".join(
            [
                titles[name].translate(tables.TO_LATEX),
                *(cell(dataset, name, metric) for dataset in by_dataset for metric in ("logloss", "auc")),
            ]
        )
        + r" \\"
        for name in models
    ]
    return "\n".join(
        [
            r"\begin{table}", r"\centering", rf"\caption{{{caption.translate(tables.TO_LATEX)}}}",
            r"\label{tab:main_results}", rf"\begin{{tabular}}{{l{'cc' * len(by_dataset)}}}", r"\toprule",
            rf"Models & {heads} \\", " & ".join(["", *["Logloss", r"AUC (\%)"] * len(by_dataset)]) + r" \\",
            r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
        ]
    )  # fmt: skip


def _beats_best(arms: Mapping[str, Arm]) -> bool:
    """Against the best baseline: better, and significantly."""
    compared = compare(arms)
    if not compared:
        return False
    rival = max(compared, key=lambda name: statistics.mean(arms[name].figures["auc"]))
    found = compared[rival]
    return found.gap > 0 and found.alone is not None and found.alone < LEVEL


def to_csv(by_dataset: Mapping[str, Mapping[str, Arm]]) -> str:
    """One line a data set and model."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ["data", "model", "seeds", "parameters"]
    writer.writerow([*columns, *(f"{metric}_{kind}" for metric in METRICS for kind in ("mean", "sd"))])
    for dataset, arms in by_dataset.items():
        for name, arm in arms.items():
            figures: list[float | str] = []
            for metric in METRICS:
                values = arm.figures[metric]
                figures += [statistics.mean(values), statistics.stdev(values) if len(values) > 1 else ""]
            writer.writerow([dataset, name, len(arm.seeds), arm.parameters, *figures])
    return text.getvalue()


def write_tables(by_dataset: Mapping[str, Path], directory: Path, *, averaged: bool = False) -> str:
    """Markdown, LaTeX and CSV of all data sets' reports, into one directory; returns the first."""
    arms = {dataset: read_arms(reports, averaged=averaged) for dataset, reports in by_dataset.items()}
    empty = [dataset for dataset, found in arms.items() if not found]
    if empty:
        raise InputError(f"no reports of {', '.join(empty)}", fix="run the table's cells first")
    how = "with averaged weights" if averaged else "by the published training protocol"
    name = "table1" + SUFFIX * averaged
    by_default = {
        dataset: [arm.name for model, arm in arms[dataset].items() if lacks_settings(model, reports)]
        for dataset, reports in by_dataset.items()
    }
    text = "\n\n".join(
        markdown(
            dataset,
            found,
            f"Baselines{'' if by_default[dataset] else f' {how}'}, and RECAP, on {dataset}",
            by_default[dataset],
        )
        for dataset, found in arms.items()
    )
    whole = {
        "md": text + "\n",
        "tex": latex(arms, f"Performance of CTR models{'' if any(by_default.values()) else f' {how}'}."),
        "csv": to_csv(arms),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for suffix, content in whole.items():
        with atomic_file(directory / f"{name}.{suffix}") as file:
            file.write(content.encode())
    return whole["md"]


def lacks_settings(model: str, settings: Path) -> bool:
    """Whether a baseline is trained by default settings, because nobody gave its own."""
    return model != OURS and not (settings / f"{short_name(model)}.toml").is_file()


def check_models(names: Sequence[str], settings: Path) -> None:
    """Each is a model of ours, one from outside, or has a file of its own: SETTINGS/DATA/NAME.toml."""
    for name in names:
        if is_dotted(name):
            model_class(name)
        elif name not in MODELS and not any(settings.glob(f"*/{name}.toml")):
            raise InputError(
                f"no model {name}", fix=f"known are {', '.join(MODELS)}; or write {settings}/DATA/{name}.toml"
            )
