"""Table 1: models × data sets × seeds. Every run leaves a small report, and no run is repeated.

A run of RECAP is a student of the recipe; all seeds share their teachers and their probe. `table1_text` makes the table
of the reports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from recap_ctr.bench.arms import Arm, arm_of
from recap_ctr.bench.costs import Cost, Rehearsal, cost_of, missing_costs
from recap_ctr.bench.published import PAPER_ORDER, title_of
from recap_ctr.config import TrainConfig, parse
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.jobs.engines import LOCAL
from recap_ctr.jobs.executor import Executor
from recap_ctr.models.catalogue import MODELS, model_class, parse_model, short_name
from recap_ctr.plugins import is_dotted
from recap_ctr.recipe.ablation import Cell, ablation_cells, train_cells
from recap_ctr.recipe.config import RecipeConfig
from recap_ctr.recipe.runner import StageRunner
from recap_ctr.recipe.stages import Plan, Recipe
from recap_ctr.storage.files import make_directory
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.training.config import RunConfig, RunSettings, default_threads, read_settings
from recap_ctr.training.parallel import run_many
from recap_ctr.training.report import REPORT, RunReport, read_report, write_report

AVERAGED: dict[str, Any] = {"schedule": "constant", "ema_epochs": (4.0,), "max_epochs": 32, "patience": 3}
"""What our trajectory averaging changes in a published protocol."""
OURS = "recap"


class Treatment(Enum):
    """How baselines are trained; its value ends the labels of their reports."""

    AS_PUBLISHED = ""
    """By the settings in their files."""
    AVERAGED = "-ema"
    """The same, with our averaging of weights."""
    TUNED = "-tuned"
    """As RECAP is: with averaged weights, and each with a probe of its own for what RECAP's probes choose."""


@dataclass(frozen=True)
class Table1:
    """Table 1 of one data set: runs are in `out`, their reports in `reports`/MODEL/seed-N."""

    data: PreparedData
    out: Path
    reports: Path
    """Holds settings too: MODEL.toml, where MODEL may be any name, because the file names the model."""
    config: RecipeConfig = field(default_factory=RecipeConfig)
    """The recipe of RECAP. Baselines are calibrated and measured as it says."""
    threads: int | None = None
    """Threads of one run; by default as many as suit its model."""
    device: str = "cpu"
    executor: Executor | str = LOCAL
    """What runs the jobs, or the name of an engine."""
    quiet: bool = False

    def baselines(
        self,
        models: Sequence[str],
        seeds: int,
        treatment: Treatment = Treatment.AS_PUBLISHED,
        runner: StageRunner | None = None,
    ) -> dict[str, Cell]:
        """Return the runs of all models but RECAP, by label; `runner` does the probes of tuned ones."""
        configs = {
            model: self._tuned(model, runner)
            if treatment is Treatment.TUNED
            else self._baseline(model, averaged=treatment is Treatment.AVERAGED)
            for model in models
            if model != OURS
        }
        return {
            short_name(model) + treatment.value: Cell(config, range(1, seeds + 1))
            for model, config in configs.items()
        }

    def _tuned(self, model: str, runner: StageRunner | None) -> RunConfig:
        """Return what a model's runs have in common, with what two probes find: the teachers', and the student's."""
        settings = settings_of(model, self.reports)
        config = self.config.model_copy(
            update={"teacher_model": settings.model, "teacher_settings": settings.model_settings}
        )
        recipe = Recipe(
            config,
            self.data,
            self.out,
            threads=self.threads,
            device=self.device,
            runner=runner,
            executor=self.executor,
            quiet=self.quiet,
        )
        plan = recipe.plan()
        run = recipe.run_config(plan, settings.model, recipe.teacher_model_config, recipe.student_training)
        return replace(run, train=run.train.model_copy(update={"l2": recipe.own_l2(plan, run)}))

    def _baseline(self, model: str, *, averaged: bool) -> RunConfig:
        """Return what a model's runs have in common, by its file of settings or by default."""
        path = self.reports / f"{short_name(model)}.toml"
        settings = settings_of(model, self.reports)
        model_config = parse_model(settings.model, settings.model_settings)
        return RunConfig(
            model=settings.model,
            model_config=model_config,
            train=parse(TrainConfig, {**settings.train, **(AVERAGED if averaged else {})}, str(path)),
            calibration=self.config.calibration,
            negative_rate=self.config.negative_rate,
            train_baseline=False,
            report_fields=False,
            threads=self.threads or default_threads(model_config, self.data.layout),
            device=self.device,
        )

    def missing(self, cells: Mapping[str, Cell]) -> dict[str, Cell]:
        """Return the cells that lack reports, each with the seeds that it lacks."""
        seeds_by_label = {
            label: [
                seed
                for seed in cell.seeds
                if not is_reported(
                    self._directory_of_report(label, seed), cell.config.with_seed(seed), self.data
                )
            ]
            for label, cell in cells.items()
        }
        return {label: Cell(cells[label].config, seeds) for label, seeds in seeds_by_label.items() if seeds}

    def train(self, models: Sequence[str], seeds: int, treatment: Treatment = Treatment.AS_PUBLISHED) -> None:
        """Train what is missing; write each report as soon as its run has ended."""
        configs: dict[Path, RunConfig] = {}
        labels: dict[Path, str] = {}
        for label, cell in self.missing(self.baselines(models, seeds, treatment)).items():
            directory = self._directory_of_runs(label, cell.config)
            for seed in cell.seeds:
                configs[directory / f"seed-{seed}"] = cell.config.with_seed(seed)
                labels[directory / f"seed-{seed}"] = label

        def keep(directory: Path, report: RunReport) -> None:
            self._write_report(labels[directory], report)

        run_many(configs, self.data, title="table 1", executor=self.executor, quiet=self.quiet, done=keep)
        if OURS in models:
            self._train_students(seeds)

    def _train_students(self, seeds: int) -> None:
        recipe = Recipe(
            self.config,
            self.data,
            self.out,
            threads=self.threads,
            device=self.device,
            executor=self.executor,
            quiet=self.quiet,
        )
        plan = recipe.plan()
        cells = student_cells(recipe, plan, list(recipe.train_teachers(plan)), seeds)
        for report in train_cells(recipe, cells, title=OURS)[OURS].values():
            self._write_report(OURS, report)

    def costs(
        self, models: Sequence[str], seeds: int, treatment: Treatment = Treatment.AS_PUBLISHED
    ) -> list[Cost]:
        """Estimate what the missing runs would cost, by timing a few steps of each model."""
        rehearsal = Rehearsal()
        wanted = self.baselines(models, seeds, treatment, rehearsal)
        costs = rehearsal.costs
        for label, cell in self.missing(wanted).items():
            finished = read_reports(self.reports / label)
            costs.append(cost_of(label, len(cell.seeds), cell.config, self.data, finished))
        if OURS in models:
            costs += missing_costs(
                self.config,
                self.data,
                self.out,
                student_cells,
                seeds,
                threads=self.threads,
                device=self.device,
            )
        return costs

    def _directory_of_report(self, label: str, seed: int) -> Path:
        return self.reports / label / f"seed-{seed}"

    def _directory_of_runs(self, label: str, config: RunConfig) -> Path:
        """Return a directory that is named after the settings, so that changed ones have another."""
        return self.out / f"{label}-{fingerprint(config.inputs_without_seed(self.data))[:10]}"

    def _write_report(self, label: str, report: RunReport) -> None:
        directory = self._directory_of_report(label, report.train.seed)
        make_directory(directory)
        write_report(directory, report)


def student_cells(recipe: Recipe, plan: Plan, teachers: Sequence[Path], seeds: int) -> dict[str, Cell]:
    """Return the runs of RECAP."""
    return {OURS: ablation_cells(recipe, plan, OURS, ["ema-kd"], range(1, seeds + 1), teachers)["ema-kd"]}


def is_reported(directory: Path, config: RunConfig, data: PreparedData) -> bool:
    """Return whether `directory` holds the report of exactly this run: the same data, model, training and measuring."""
    if not (directory / REPORT).is_file():
        return False
    report = read_report(directory)
    return (
        report.data.fingerprint == data.fingerprint
        and report.model.name == config.model
        and parse_model(config.model, report.model.config) == config.model_config
        and report.train == config.train
        and (report.calibration, report.negative_rate) == (config.calibration, config.negative_rate)
    )


def settings_of(model: str, directory: Path) -> RunSettings:
    """Return the settings of a baseline: those of its file, or its defaults."""
    path = directory / f"{short_name(model)}.toml"
    return read_settings(path, model) if path.is_file() else RunSettings(model, {}, {}, "defaults")


def lacks_settings(model: str, settings: Path) -> bool:
    """Return whether a baseline has no settings file, so that it is trained with its defaults."""
    return model != OURS and not (settings / f"{short_name(model)}.toml").is_file()


def check_models(names: Sequence[str], settings: Path) -> None:
    """Refuse a name unless it is a model, the dotted name of a class, or has a file SETTINGS/DATA/NAME.toml."""
    for name in names:
        if is_dotted(name):
            model_class(name)
        elif name not in MODELS and not any(settings.glob(f"*/{name}.toml")):
            raise InputError(
                f"no model {name}",
                fix=f"choose from {', '.join(MODELS)}; or write {settings}/DATA/{name}.toml",
            )


def read_reports(directory: Path) -> list[RunReport]:
    """Return the reports of all seeds of one label."""
    return [read_report(path.parent) for path in sorted(directory.glob(f"seed-*/{REPORT}"))]


def read_arms(
    reports: Path, treatment: Treatment = Treatment.AS_PUBLISHED, data: PreparedData | None = None
) -> dict[str, Arm]:
    """Return the arms of all models that have reports, in the paper's order; others come just before RECAP.

    With `data`, reports of other data are left out.
    """
    arms: dict[str, Arm] = {}
    first_of_arms: list[RunReport] = []
    others = sorted({*MODELS, *_other_labels(reports, treatment)} - set(PAPER_ORDER))
    for model in (*PAPER_ORDER[:-1], *others, PAPER_ORDER[-1]):
        label = model if model == OURS else model + treatment.value
        runs = [
            report
            for report in read_reports(reports / label)
            if data is None or report.data.fingerprint == data.fingerprint
        ]
        if runs:
            _refuse_mixtures(label, runs)
            arms[model] = arm_of(title_of(model), runs)
            _refuse_mixtures("the table", [*first_of_arms, runs[0]], data_alone=True)
            first_of_arms.append(runs[0])
    return arms


def _other_labels(reports: Path, treatment: Treatment) -> set[str]:
    """Return the labels with reports that no model of ours has: dotted models, and files of settings with any name."""
    labels = set()
    for path in reports.glob(f"*/seed-*/{REPORT}"):
        name = path.parents[1].name
        label = name.removesuffix(treatment.value)
        suffixes = [each.value for each in Treatment if each.value and name.endswith(each.value)]
        if suffixes != [treatment.value] * bool(treatment.value) or label in labels:
            continue
        if (reports / f"{label}.toml").is_file() or is_dotted(read_report(path.parent).model.name):
            labels.add(label)
    return labels


def _refuse_mixtures(name: str, reports: Sequence[RunReport], *, data_alone: bool = False) -> None:
    """Refuse runs that differ in more than their seed; with `data_alone`, only runs of different data."""
    first = reports[0]
    for other in reports[1:]:
        same_data = first.data.fingerprint == other.data.fingerprint
        if same_data and (data_alone or _settings(first) == _settings(other)):
            continue
        runs = " and ".join(f"{report.model.name}/seed-{report.train.seed}" for report in (first, other))
        raise InputError(
            f"{name} would mix runs of different {'settings' if same_data else 'data'}: reports of {runs}",
            fix="delete the report that is out of date, or run its cell again with as many --seeds",
        )


def _settings(report: RunReport) -> tuple[Any, ...]:
    """Return everything but the seed and the data that a run's figures depend on."""
    model, config = report.model.name, report.model.config
    if not is_dotted(model):  # The class of a dotted name may not be installed here.
        config = parse_model(model, config).model_dump(mode="json")
    train = report.train.model_copy(update={"seed": 0})
    return model, config, train, report.teachers, report.routes, report.calibration, report.negative_rate
