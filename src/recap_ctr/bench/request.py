"""A request for one of the paper's tables: check it, train what is missing, and write table and page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recap_ctr.bench import (
    capacity,
    estimators,
    frontier,
    overview,
    routes,
    scaling,
    sensitivity,
    table1,
    variance,
)
from recap_ctr.bench.costs import Cells, costs_text, missing_costs
from recap_ctr.bench.published import PAPER_ORDER
from recap_ctr.bench.synthetic import NAME, ROWS, draw, quick_recipe
from recap_ctr.bench.table1_text import write_tables
from recap_ctr.config import read_toml
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.synthetic import SyntheticConfig
from recap_ctr.errors import InputError
from recap_ctr.jobs.engines import LOCAL
from recap_ctr.jobs.executor import Executor
from recap_ctr.jobs.progress import say
from recap_ctr.models.recap import SIZE_LIMIT, RecapConfig, default_rank
from recap_ctr.pages.benchmark import page
from recap_ctr.pages.page import Image
from recap_ctr.recipe.config import RecipeConfig, merge_settings, recipe_config
from recap_ctr.recipe.stages import Recipe
from recap_ctr.storage.files import make_directory


class Table(NamedTuple):
    """How a table is made, and the runs that it is made of."""

    make: Callable[[Recipe, int, Path], str]
    cells: Cells


ONE_RECIPE: dict[str, Table] = {
    "overview": Table(overview.overview, overview.cells),
    "variance": Table(variance.variance, overview.cells),
    **{name: Table(partial(scaling.scaling, name), partial(scaling.cells, name)) for name in scaling.TABLES},
    "sensitivity": Table(sensitivity.sensitivity, sensitivity.cells),
    "capacity": Table(capacity.capacity, capacity.cells),
    "estimators": Table(estimators.estimators, estimators.cells),
    "frontier": Table(frontier.frontier, frontier.cells),
    "routes": Table(routes.routes, routes.cells),
}
"""Tables of one data set, made of what its recipe trains."""
ONE_SEED = ("sensitivity", "frontier")
"""Tables of many settings, of which most have one run; the settings with several runs show the noise."""
TABLES = ("table1", *ONE_RECIPE)


@dataclass(frozen=True)
class Request:
    """What `recap bench` is asked for."""

    table: str
    data: tuple[str, ...]
    """Prepared directories, or the word synthetic."""
    out: Path
    """Directory for all runs; each data set has a directory of its own in it."""
    reports: Path
    """Directory for reports and tables; settings are read there too: NAME/MODEL.toml and NAME/recipe.toml."""
    config: Path | None = None
    """File of the recipe's settings, for all data sets; by default NAME/recipe.toml of `reports`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the recipe that override those of the file, table by table."""
    preset: str = "default"
    models: tuple[str, ...] = ()
    """The models of table1; by default all."""
    seeds: int | None = None
    """Runs of each kind; by default 1 or 3, as suits the table."""
    treatment: table1.Treatment = table1.Treatment.AS_PUBLISHED
    """How the baselines of table1 are trained."""
    dry_run: bool = False
    threads: int | None = None
    device: str = "cpu"
    executor: Executor | str = LOCAL
    """What runs the jobs, or the name of an engine."""
    quiet: bool = False
    command: str = ""
    """The command that makes the table again, for its page."""

    @property
    def num_seeds(self) -> int:
        """Return how many runs of each kind the table has."""
        return self.seeds or (1 if self.table in ONE_SEED else 3)

    @property
    def models_or_all(self) -> tuple[str, ...]:
        """Return the models of table1."""
        return self.models or PAPER_ORDER

    @property
    def needs_teachers(self) -> bool:
        """Return whether some of the runs are students."""
        return table1.OURS in self.models_or_all if self.table == "table1" else self.table != "capacity"


class Dataset(NamedTuple):
    """One of the requested data sets, with its recipe."""

    data: PreparedData
    config: RecipeConfig


def fulfil(request: Request) -> str:
    """Make the requested table, or estimate its cost on a dry run; return the text to print."""
    datasets = _check(request)
    for data, config in datasets if not request.quiet else ():
        _announce_rank(data, config)
    if request.dry_run:
        return "\n".join(f"{data.name}:\n{_costs(request, data, config)}" for data, config in datasets)
    if request.table == "table1":
        return _make_table1(request, datasets)
    return "\n".join(_make_table(request, data, config) for data, config in datasets)


def _check(request: Request) -> list[Dataset]:
    """Return the data sets of a request that can be fulfilled."""
    if request.table not in TABLES:
        raise InputError(f"no table {request.table!r}", fix=f"choose from {', '.join(TABLES)}")
    if request.table != "table1" and (request.models or request.treatment.value):
        raise InputError("--models, --averaged and --tuned belong to table1")
    table1.check_models(request.models_or_all, request.reports)
    datasets = [_open(request, name) for name in request.data]
    if request.needs_teachers and not all(config.num_teachers for _, config in datasets):
        raise InputError(
            "this table needs teachers", fix="set at least one, by --set teachers=3 or in recipe.toml"
        )
    if request.treatment is table1.Treatment.TUNED and any(config.l2 is not None for _, config in datasets):
        raise InputError(
            "l2 is set, and --tuned finds one for each model", fix="leave l2 out of the recipe's settings"
        )
    names = [data.name for data, _ in datasets]
    if len(set(names)) < len(names):
        raise InputError(f"two data sets have the same name: {', '.join(names)}", fix="rename a directory")
    return datasets


def _open(request: Request, name: str) -> Dataset:
    """Open prepared data by their path, or draw the synthetic ones by their name."""
    if name != NAME:
        data = PreparedData(Path(name))
    else:
        directory = request.out / NAME
        make_directory(directory)
        config = SyntheticConfig(rows=ROWS, seed=1)
        _, data = draw(config, directory / "clicks.csv", directory / "data" / NAME, quiet=True)
    return Dataset(data, _recipe_config(request, name, data))


def _recipe_config(request: Request, name: str, data: PreparedData) -> RecipeConfig:
    """Return the recipe of the request's file, or of the data set's; by default, that of the preset.

    The data set's file belongs to the default recipe; another preset is taken as it is. Only data that were requested
    by the `name` synthetic get the quick recipe.
    """
    file = request.reports / data.name / "recipe.toml"
    path = request.config or (file if file.is_file() and request.preset == "default" else None)
    if path is None and name == NAME and request.preset == "default":
        return quick_recipe(len(data.train), 1, max_epochs=6, settings={"teachers": 2, **request.settings})
    settings = merge_settings(read_toml(path) if path is not None else {}, request.settings)
    return recipe_config(request.preset, settings, str(path or "bench"))


def _costs(request: Request, data: PreparedData, config: RecipeConfig) -> str:
    """Return what the missing runs of one data set would cost, in words."""
    if request.table == "table1":
        table = _table1(request, data, config)
        costs = table.costs(request.models_or_all, request.num_seeds, request.treatment)
    else:
        costs = missing_costs(
            config,
            data,
            request.out / data.name,
            ONE_RECIPE[request.table].cells,
            request.num_seeds,
            threads=request.threads,
            device=request.device,
        )
    return costs_text(costs)


def _make_table(request: Request, data: PreparedData, config: RecipeConfig) -> str:
    """Make a table of one data set and its page; return it as Markdown."""
    recipe = Recipe(
        config,
        data,
        request.out / data.name,
        threads=request.threads,
        device=request.device,
        executor=request.executor,
        quiet=request.quiet,
    )
    reports = request.reports / data.name
    text = ONE_RECIPE[request.table].make(recipe, request.num_seeds, reports)
    _write_page(request, data.name, text, reports / request.table / f"{request.table}.png")
    return text


def _make_table1(request: Request, datasets: Sequence[Dataset]) -> str:
    """Make Table 1 of all data sets and its page; return it as Markdown."""
    for data, config in datasets:
        _announce_defaults(request, request.reports / data.name)
        _table1(request, data, config).train(request.models_or_all, request.num_seeds, request.treatment)
    names = [data.name for data, _ in datasets]
    only = names[0] if len(names) == 1 else ""
    text = write_tables(
        {name: request.reports / name for name in names}, request.reports / only, request.treatment
    )
    _write_page(request, only, text)
    return text


def _table1(request: Request, data: PreparedData, config: RecipeConfig) -> table1.Table1:
    return table1.Table1(
        data,
        request.out / data.name,
        request.reports / data.name,
        config,
        request.threads,
        request.device,
        request.executor,
        request.quiet,
    )


def _announce_rank(data: PreparedData, config: RecipeConfig) -> None:
    """Say where the recipe's rank would make RECAP too large, and which rank it has instead."""
    model = config.model_config_of(table1.OURS)
    if isinstance(model, RecapConfig) and model.max_rank and model.lora_rank is None:
        rank = default_rank(model, data.layout)
        if rank < model.max_rank:
            say(
                f"RECAP on {data.name} has rank {rank}: {model.max_rank} would exceed {SIZE_LIMIT} times FCN's size"
            )


def _announce_defaults(request: Request, reports: Path) -> None:
    """Say which models are trained by default settings, because their figures can't be compared with published ones."""
    defaults = [model for model in request.models_or_all if table1.lacks_settings(model, reports)]
    if defaults and not request.quiet:
        say(
            f"by default settings, for want of {reports}/MODEL.toml: {', '.join(defaults)}; to compare with published"
            " figures give --reports a directory with the settings they were made with"
        )


def page_directory(request: Request, data: str) -> Path:
    """Return the directory of a table's page; `data` is empty for a table of several data sets."""
    return request.out / data / "pages" / f"{request.table}{request.treatment.value}"


def _write_page(request: Request, data: str, markdown: str, figure: Path | None = None) -> None:
    title = f"{request.table} on {data or ' and '.join(Path(name).name for name in request.data)}"
    images = (
        [Image(request.table, f"{title}, drawn from the numbers of the table", figure.read_bytes())]
        if figure is not None and figure.is_file()
        else []
    )
    page(title, markdown, images, request.command).write(page_directory(request, data))


def split_names(text: str | None) -> tuple[str, ...]:
    """Return the names in a comma-separated list.

    >>> split_names("fcn, lr"), split_names(None)
    (('fcn', 'lr'), ())
    """
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())
