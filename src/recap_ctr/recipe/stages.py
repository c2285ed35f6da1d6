"""The stages of a fit: references, probe, teachers and students, each resumable and redone only when its inputs change.

Every stage has a directory named after what it was made from. So a changed setting redoes the stages that depend on it
and no others, and going back to an earlier setting finds the earlier stages again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from recap_ctr.config import Frozen, TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.jobs.engines import LOCAL, executor_for
from recap_ctr.jobs.executor import Executor, Job
from recap_ctr.jobs.progress import overall, say
from recap_ctr.models.catalogue import parse_model, short_name
from recap_ctr.models.recap import SIZE_LIMIT, RecapConfig, default_rank
from recap_ctr.recipe.choice import choose_shipped
from recap_ctr.recipe.clock import Clock
from recap_ctr.recipe.config import TEACHER_SEEDS, RecipeConfig, training_of
from recap_ctr.recipe.probe import FURTHER, Arm, ProbeConfig, ProbeResult, Race
from recap_ctr.recipe.report import fit_report
from recap_ctr.recipe.runner import Runner, StageRunner
from recap_ctr.recipe.ship import INTERRUPTED, has_finished_fit, ship, ship_best
from recap_ctr.storage.files import make_directory, read_object, write_json
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.storage.locks import locked
from recap_ctr.training import trees
from recap_ctr.training.breakdown import check_slices
from recap_ctr.training.config import ARTIFACT, LOGITS, RunConfig, default_threads
from recap_ctr.training.parallel import Runs, packed_early, teacher_tables
from recap_ctr.training.pool import ONE_SIDE, Recombination
from recap_ctr.training.references import CONVERGED, LOGISTIC, TREES, write_tree_logits
from recap_ctr.training.report import FitReport, write_report
from recap_ctr.training.run import epoch_seconds

PLAN = "plan.json"
REFERENCES, TEACHERS, STUDENT = "references", "teachers", "student"  # The titles of stages.
MIN_EPOCHS = 6
EXTEND = 4  # How many strengths beyond the recipe's factors a probe of a student may try.
PROBE_SHARE = 0.25  # The share of a budget that the probe may take beyond its search for l2.
LINEAR_SHARE, REFERENCES_SHARE = 0.1, 0.2
"""Shares of a budget by which the logistic regression, and all references, must have ended."""
SEARCH_SHARE, TEACHERS_SHARE, STUDENT_SHARE = 0.4, 0.65, 0.92
"""Shares of a budget by which the search for l2, the teachers and the student must have ended."""


@dataclass(frozen=True)
class Plan:
    """What the recipe decided where it had a choice; it is decided once, then read back."""

    l2: float
    learning_rate: float
    teachers: int
    max_epochs: int | None
    """None here and below: as configured."""
    given_up: tuple[str, ...]
    """What the budget left no time for, in words."""
    horizon: float | None = None
    dropout: float | None = None
    dim: int | None = None

    @property
    def arm(self) -> Arm:
        """Return the settings that the probe found."""
        return Arm(self.l2, self.learning_rate, self.horizon, self.dropout, self.dim)


class Recipe:
    """The stages of a fit of prepared data in a directory."""

    def __init__(
        self,
        config: RecipeConfig,
        data: PreparedData,
        out: Path,
        *,
        threads: int | None = None,
        device: str = "cpu",
        runner: StageRunner | None = None,
        executor: Executor | str = LOCAL,
        budget: float | None = None,
        started: float | None = None,
        quiet: bool = False,
    ) -> None:
        """Check the recipe; `budget` is in minutes from `started` on, `threads` are those of one run.

        Without a `runner`, jobs run on the `executor`, which may be the name of an engine: as many at a time as it has
        cores for.
        """
        self.config, self.data, self.out = config, data, out
        self.device, self.budget, self.quiet = device, budget, quiet
        check_slices(config.slices, data.schema)
        self.teacher_model_config = parse_model(config.teacher_model, config.teacher_settings)
        self.threads = threads or default_threads(self.teacher_model_config, data.layout)
        self.runner = runner or Runner(executor_for(executor, self.threads, device), quiet)
        self.student_training = training_of(config, len(data.train))
        self.teacher_training = training_of(config, len(data.train), teacher=True)
        self.clock = Clock(budget, started=started)
        self.begun: dict[str, dict[Path, RunConfig]] = {}
        """The runs of each stage so far, by its title."""
        self.recombination = Recombination(data, config.recombined) if config.recombined else None
        """The recombined rows that students learn from, too; None if there are none."""
        self.linear: Runs = {}
        """The run of the logistic regression, once it is trained."""
        self.edges: dict[float, str] = {}
        """Strengths of the regulariser that are the weakest or the strongest that their probe has tried."""
        self.references: dict[str, Path] = {}
        """The directories of the logit tables of what the result is compared with."""

    def say(self, text: str) -> None:
        """Show a message, unless the recipe is quiet."""
        if not self.quiet:
            say(text)

    def directory(self, stage: str, inputs: dict[str, Any]) -> Path:
        """Return the directory of a stage that is made from `inputs` and the data."""
        return self.out / f"{stage}-{fingerprint({'data': self.data.fingerprint, **inputs})[:10]}"

    def directory_of_runs(self, stage: str, config: RunConfig) -> Path:
        """Return the directory of runs that differ in their seed alone."""
        return self.directory(stage, config.inputs_without_seed(self.data, self.runner.checksum))

    def run(self) -> FitReport:
        """Do all stages, ship the best student, and return the report. Interrupted, ship the best so far."""
        make_directory(self.out)
        with (
            locked(self.out),
            overall("fit", lambda: (self.clock.taken, self.clock.seconds), counts_jobs=True),
        ):
            try:
                return self._run()
            except KeyboardInterrupt:
                if self.linear and isinstance(self.runner, Runner):
                    self._ship_what_is_there(self.runner)
                raise

    def _run(self) -> FitReport:
        self.train_references()
        plan = self.plan()
        teachers = self.train_teachers(plan)
        if teachers:
            self._ship_meanwhile(teachers)
        students = self.train_students(plan, list(teachers))
        return self.finish(asdict(plan), teachers, students)

    def _ship_meanwhile(self, runs: Runs) -> None:
        """Ship the best of the runs if it is the best so far; what a finished fit has shipped stays until the end."""
        if not has_finished_fit(self.out, self.data):
            ship_best(runs, self.out, self.data)

    def _ship_what_is_there(self, runner: Runner) -> None:
        """Ship the best so far, half-trained runs among them, unless a finished fit has shipped its model."""
        artifact = self.out / ARTIFACT
        if has_finished_fit(self.out, self.data):
            self.say(f"interrupted: {artifact} is still that of the last fit that was finished")
            return
        self.say(INTERRUPTED)
        teachers, students = (self.begun.get(stage, {}) for stage in (TEACHERS, STUDENT))
        plan = read_object(self._plan_file, "a plan") if self._plan_file.is_file() else {"given_up": []}
        with packed_early(
            {**teachers, **students}, self.data, executor=runner.executor, quiet=self.quiet
        ) as packed:
            self.finish(
                plan,
                {path: packed[path] for path in teachers if path in packed},
                {path: packed[path] for path in students if path in packed},
                interrupted=True,
            )
        self.say(f"{artifact} is the best so far")

    def finish(
        self, plan: dict[str, Any], teachers: Runs, students: Runs, *, interrupted: bool = False
    ) -> FitReport:
        """Ship the best run on validation, a student unless another is better, and report on it and its teachers."""
        others = {**teachers, **self.linear} if self.config.ship == "best" or interrupted else {}
        choice = choose_shipped(self.data, students, others)
        chosen = choice.path
        if choice.reason:
            self.say(f"shipped: {chosen.name}; {choice.reason}")
        report = fit_report(
            self.config, plan, self.data, self.out, teachers, students, choice, self.references
        )
        if interrupted:
            report = report.model_copy(update={"interrupted": True})
        ship(chosen, self.out)
        write_report(self.out, report)
        return report

    # The plan.

    def plan(self) -> Plan:
        """Probe where needed, and fit teachers and epochs to the budget; a recorded plan is read back."""
        if self._plan_file.is_file():
            values = read_object(self._plan_file, "a plan")
            return Plan(**{**values, "given_up": tuple(values["given_up"])})
        result = None
        if self.config.l2 is not None:
            self.say(f"probe: skipped, l2 is set ({self.config.l2:g})")
        else:
            result = self._probe()
            self.say(f"probe: {result.choices}; validation AUC {100 * result.auc:.3f}; {result.verdict}")
        plan = Plan(
            l2=result.l2 if result else self.config.l2 or 0.0,
            learning_rate=self.config.learning_rate or (result.learning_rate if result else 1e-3),
            teachers=self.config.num_teachers,
            max_epochs=None,
            given_up=tuple(f"the probe of {name.replace('_', ' ')}" for name in result.skipped)
            if result
            else (),
            horizon=result.horizon if result else None,
            dropout=result.dropout if result else None,
            dim=result.dim if result else None,
        )
        if self.budget is not None:
            plan = self._within_budget(plan, result)
        if self.runner.keeps_plans:
            self.record(plan)
        return plan

    @property
    def _plan_file(self) -> Path:
        later = {
            "seed",
            "ship",
            "recombined",
            "routes",
            "route_choice",
            "calibration",
            "negative_rate",
            "slices",
            "card",
        }
        inputs = {
            "recipe": self.config.model_dump(mode="json", exclude=later)
            | {"probe": self.config.probe.identity()},
            "threads": self.threads,
            "device": self.device,
            "budget": self.budget,
        }
        return self.directory("plan", inputs) / PLAN

    def record(self, plan: Plan) -> None:
        """Record what was decided, by the recipe or for it: it is read back, not decided again."""
        make_directory(self._plan_file.parent)
        write_json(self._plan_file, asdict(plan))

    def _probe(self) -> ProbeResult:
        self.say(
            f"probe: {len(self.config.probe.strengths)} strengths of the regulariser,"
            f" up to {self.config.probe.rungs[-1]} epochs each, {self.runner.workers} at a time"
        )
        return self.runner.probe(
            self._race(
                self.probe_directory,
                self.open_questions(),
                self.config.teacher_model,
                self.teacher_model_config,
                self.teacher_training,
                probe_rate=self.config.learning_rate is None,
                seconds=self._probe_seconds,
            )
        )

    @property
    def _probe_seconds(self) -> float | None:
        return None if self.budget is None else 60 * self.budget * PROBE_SHARE

    @property
    def probe_directory(self) -> Path:
        """Return the directory of the probe of the teachers' settings."""
        config = self.config
        inputs: dict[str, Any] = {"settings": config.teacher_settings, "rate": config.learning_rate is None}
        if self._probe_seconds is not None:
            inputs["seconds"] = self._probe_seconds
        return self._race_directory(
            "probe", self.open_questions(), config.teacher_model, self.teacher_training, inputs
        )

    def open_questions(self) -> ProbeConfig:
        """Return the probe without what the user has decided, for teachers or for the student."""
        config = self.config
        training = {**config.train, **config.teacher_train}
        model_settings = {**config.model_settings, **config.teacher_settings}
        decided: dict[str, tuple[float, ...]] = {}
        if {"ema", "ema_epochs", "ema_warmup"} & training.keys():
            decided["horizon_factors"] = ()
        if any(name.endswith("dropout") for name in model_settings):
            decided["dropouts"] = ()
        sizes = tuple(factor for factor in config.probe.dim_factors if self._suits_students(factor))
        if "dim" in model_settings or sizes != config.probe.dim_factors:
            decided["dim_factors"] = () if "dim" in model_settings else sizes
        return config.probe.model_copy(update=decided)

    def _suits_students(self, factor: float) -> bool:
        """Return whether students can have vectors of the size that the teachers would have."""
        dim = getattr(self.teacher_model_config, "dim", None)
        if dim is None:
            return False
        arm = Arm(0.0, 1.0, dim=int(dim * factor))
        try:
            for student in self.config.students:
                arm.model_config(student, self.config.model_config_of(student))
        except InputError:
            return False
        return True

    def _race_directory(
        self, stage: str, probe: ProbeConfig, model: str, training: TrainConfig, inputs: dict[str, Any]
    ) -> Path:
        """Return the directory of a probe; `inputs` are those that differ between the kinds of probe."""
        common = {
            "probe": probe.identity(),
            "train": _training_of_arms(probe, training).model_dump(mode="json"),
            "model": model,
            "threads": self.threads,
            "device": self.device,
        }
        return self.directory(stage, {**common, **inputs})

    def _race(
        self,
        directory: Path,
        probe: ProbeConfig,
        model: str,
        model_config: Frozen,
        training: TrainConfig,
        *,
        probe_rate: bool = False,
        teachers: tuple[Path, ...] = (),
        pool: tuple[Path, ...] = (),
        seconds: float | None = None,
    ) -> Race:
        return Race(
            config=probe,
            model=model,
            model_config=model_config,
            training=_training_of_arms(probe, training),
            data=self.data,
            out=directory,
            threads=self.threads,
            device=self.device,
            probe_rate=probe_rate,
            teachers=teachers,
            pool=pool,
            seconds=seconds,
            deadline=self.clock.deadline(self.clock.until(SEARCH_SHARE)),
        )

    def _within_budget(self, plan: Plan, result: ProbeResult | None) -> Plan:
        """Fit the plan to the budget: down to half of the epochs, then down to two teachers, then fewer epochs."""
        assert self.budget is not None
        per_epoch = result.seconds_per_epoch if result else epoch_seconds(self._teacher(plan), self.data)
        left = max(self.clock.until(1.0), 1.0)
        workers = self.runner.workers
        student_waves = -(-len(self.config.students) // workers)

        def waves(teachers: int) -> int:
            return -(-teachers // workers) + student_waves

        def seconds(teachers: int, epochs: int) -> float:
            return waves(teachers) * epochs * per_epoch

        wanted = max(self.student_training.max_epochs, self.teacher_training.max_epochs)
        given_up = list(plan.given_up)
        teachers, epochs = plan.teachers, wanted
        while teachers > 2 and seconds(teachers, epochs) > left and seconds(teachers, wanted // 2) > left:
            teachers -= 1
        if seconds(teachers, epochs) > left:
            epochs = max(min(wanted, int(left / (waves(teachers) * per_epoch))), MIN_EPOCHS)
        if teachers < plan.teachers:
            given_up.append(f"{plan.teachers - teachers} of {plan.teachers} teachers")
        if epochs < wanted:
            given_up.append(f"epochs after {epochs} (of up to {wanted})")
        if seconds(teachers, epochs) > left:
            given_up.append(
                f"the budget itself: about {seconds(teachers, epochs) / 60:.0f} minutes are needed"
            )
        self.say(
            f"budget: {left / 60:.0f} minutes are left at {per_epoch:.1f} s an epoch;"
            f" {teachers} teachers, at most {epochs} epochs"
            + (f"; given up: {', '.join(given_up)}" if given_up else "")
        )
        return replace(plan, teachers=teachers, max_epochs=epochs, given_up=tuple(given_up))

    # Teachers and students.

    def run_config(self, plan: Plan, model: str, model_config: Frozen, training: TrainConfig) -> RunConfig:
        """Return a run of `model` as planned."""
        training = plan.arm.train_config(training)
        if plan.max_epochs is not None:
            training = training.model_copy(update={"max_epochs": min(training.max_epochs, plan.max_epochs)})
        return RunConfig(
            model=model,
            model_config=plan.arm.model_config(model, model_config),
            train=training,
            calibration=self.config.calibration,
            negative_rate=self.config.negative_rate,
            train_baseline=False,
            report_fields=False,
            slices=self.config.slices,
            threads=self.threads,
            device=self.device,
        )

    def _teacher(self, plan: Plan) -> RunConfig:
        """Return what all teachers have in common."""
        return self.run_config(
            plan, self.config.teacher_model, self.teacher_model_config, self.teacher_training
        )

    def train(self, configs: dict[Path, RunConfig], title: str, share: float = 1.0) -> Runs:
        """Do runs side by side, until `share` of the budget is used; read the reports of those that are finished."""
        self.begun[title] = configs
        return self.runner.train(configs, self.data, title, self.clock.deadline(self.clock.until(share)))

    def train_teachers(self, plan: Plan) -> Runs:
        """Train the teachers and write their logit tables; a smaller number takes the first of a larger one."""
        if not plan.teachers:
            return {}
        teacher = self._teacher(plan)
        directory = self.directory_of_runs("teachers", teacher)
        configs = {
            directory / f"teacher-{number}": teacher.with_seed(TEACHER_SEEDS + number)
            for number in range(1, plan.teachers + 1)
        }
        self.say(f"teachers: {plan.teachers} × {self.config.teacher_model}, {self.runner.workers} at a time")
        runs = self.train(configs, TEACHERS, TEACHERS_SHARE)
        self._score_recombined_rows(list(configs))
        return runs

    def _score_recombined_rows(self, teachers: Sequence[Path]) -> None:
        """Let all teachers score the recombined rows, if students are to learn from some."""
        if self.recombination is None:
            return
        if len(self.recombination.sides) == 1:
            self.say(f"recombined rows: none, as {ONE_SIDE}")
            self.recombination = None
            return
        self.say(f"recombined rows: {self.recombination.summary(teachers).sentence}")
        jobs = self.recombination.jobs(teachers, threads=self.threads, device=self.device)
        self.runner.run(jobs, "scoring recombined rows")

    def taught(self, run: RunConfig, teachers: Sequence[Path]) -> RunConfig:
        """Return the run as a student of some teachers, by their logits of training rows and of recombined rows."""
        student = replace(run, teachers=teacher_tables(teachers, "train"))
        return student if self.recombination is None else self.recombination.taught(student, teachers)

    def train_references(self) -> None:
        """Train what the result is compared with; the logistic regression is the first to be shipped."""
        # References that a budget has cut must not be taken for those of a longer fit.
        suffix = "" if self.budget is None else f"-{self.budget:g}"
        config = RunConfig(
            "lr",
            parse_model("lr", {}),
            CONVERGED,
            calibration=self.config.calibration,
            negative_rate=self.config.negative_rate,
            train_baseline=False,
            report_fields=False,
            slices=self.config.slices,
            threads=self.threads,
            device=self.device,
        )
        directory = self.directory_of_runs(f"reference-lr{suffix}", config)
        names = [LOGISTIC, TREES] if trees.is_installed() else [LOGISTIC]
        self.say(f"references: {' and '.join(names)}")
        self.linear = self.train({directory: config}, REFERENCES, LINEAR_SHARE)
        self.references = {LOGISTIC: directory / LOGITS}
        self._ship_meanwhile(self.linear)
        if TREES in names:
            tables = self.directory(f"reference-lightgbm{suffix}", {})
            arguments = {
                "data": str(self.data.path),
                "out": str(tables),
                "threads": self.threads,
                "deadline": self.clock.deadline(self.clock.until(REFERENCES_SHARE)),
            }
            self.runner.run([Job(TREES, write_tree_logits, arguments)], REFERENCES)
            self.references[TREES] = tables

    def train_students(self, plan: Plan, teachers: Sequence[Path]) -> Runs:
        """Train one student, or one of each kind where validation is to choose."""
        configs = {}
        for student in self.config.students:
            model_config = self.config.model_config_of(student)
            l2 = self.student_l2(plan, student, model_config, teachers)
            base = self.run_config(replace(plan, l2=l2), student, model_config, self.student_training)
            config = replace(
                self.taught(base.with_seed(self.config.seed), teachers),
                routes=self.config.routes if isinstance(model_config, RecapConfig) else 1,
                route_choice=self.config.route_choice,
            )
            inputs = config.training_inputs(self.data, self.runner.checksum)
            configs[self.directory(f"student-{short_name(student)}", inputs)] = config
        self.say(f"student: {' and '.join(self.config.students)}, taught by {len(teachers)} teachers")
        self._say_rank(configs.values())
        return self.train(configs, STUDENT, STUDENT_SHARE)

    def _say_rank(self, configs: Iterable[RunConfig]) -> None:
        """Say where the recipe's rank of adapters would make a student too large, and which rank it has instead."""
        for config in configs:
            model = config.model_config
            if isinstance(model, RecapConfig) and model.max_rank and model.lora_rank is None:
                rank = default_rank(model, self.data.layout)
                if rank < model.max_rank:
                    self.say(
                        f"adapters of rank {rank}: rank {model.max_rank} would make the model larger than"
                        f" {SIZE_LIMIT} times FCN"
                    )

    def student_l2(self, plan: Plan, student: str, model_config: Frozen, teachers: Sequence[Path]) -> float:
        """Return the regulariser of a taught student: the teachers' or a weaker one, as validation says."""
        if not teachers or len(self.config.student_factors) < 2 or self.budget is not None:
            return plan.l2
        run = self.run_config(plan, student, model_config, self.student_training)
        return self.own_l2(plan, self.taught(run, teachers))

    def own_l2(self, plan: Plan, run: RunConfig) -> float:
        """Return the regulariser that a probe finds for exactly this kind of run, starting from the plan's. A strength
        that is set stays.
        """
        factors = self.config.student_factors
        if self.config.l2 is not None or len(factors) < 2:
            return plan.l2
        rows = len(self.data.train)
        probe = self.config.probe.model_copy(
            update={
                "strengths": tuple(factor * plan.l2 * rows for factor in factors),
                "refinements": (),
                "extend": EXTEND,
                **dict.fromkeys(FURTHER, ()),
            }
        )
        inputs = {
            "settings": run.model_config.model_dump(mode="json"),
            "teachers": [self.runner.checksum(table) for table in run.teachers],
        }
        if run.pool:
            inputs["pool"] = [self.runner.checksum(table) for table in run.pool]
        # The arms have strengths of their own; that of the run must not name their directory.
        training = run.train.model_copy(update={"l2": self.student_training.l2})
        directory = self._race_directory(f"probe-{short_name(run.model)}", probe, run.model, training, inputs)
        result = self.runner.probe(
            self._race(
                directory,
                probe,
                run.model,
                run.model_config,
                training,
                teachers=run.teachers,
                pool=run.pool,
            )
        )
        self.say(f"probe of {run.model}: l2 {result.l2:g}; {result.verdict}")
        if result.edge:
            self.edges[result.l2] = result.edge
        return result.l2


def _training_of_arms(probe: ProbeConfig, training: TrainConfig) -> TrainConfig:
    """Return the training of a probe's arms: the rungs decide how long they train."""
    changes = {"seed": TEACHER_SEEDS, "max_epochs": probe.rungs[-1], "checkpoints": 0}
    return training.model_copy(update=changes)
