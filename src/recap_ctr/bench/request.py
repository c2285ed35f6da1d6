"""What `recap bench` was asked for, and which module does it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from recap_ctr.bench import (
    capacity,
    estimators,
    frontier,
    overview,
    scaling,
    sensitivity,
    table1,
    variance,
)
from recap_ctr.bench.costs import Cells, Rehearsal, say_costs
from recap_ctr.bench.published import PAPER_ORDER
from recap_ctr.bench.synthetic import NAME, ROWS, draw, quick_recipe
from recap_ctr.config import read_toml
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.synthetic import SyntheticConfig
from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import say
from recap_ctr.pages.benchmark import page
from recap_ctr.pages.page import Image
from recap_ctr.recipe.stages import Recipe, RecipeConfig, recipe_config


class Table(NamedTuple):
    """How to make a table, and what it is made of."""

    make: Callable[[Recipe, int, Path], str]
    cells: Cells


ONE_RECIPE: dict[str, Table] = {
    "overview": Table(overview.overview, overview.cells),
    "variance": Table(variance.variance, overview.cells),
    **{name: Table(partial(scaling.bench, name), partial(scaling.cells, name)) for name in scaling.BENCHES},
    "sensitivity": Table(sensitivity.sensitivity, sensitivity.cells),
    "capacity": Table(capacity.capacity, capacity.cells),
    "estimators": Table(estimators.estimators, estimators.cells),
    "frontier": Table(frontier.frontier, frontier.cells),
}
"""Tables of one data set, made of what its recipe trains."""
ONE_SEED = ("sensitivity", "capacity", "estimators", "frontier")
"""Tables of many settings, where one run each is enough beside the noise of those that have several."""
TABLES = ("table1", *ONE_RECIPE)


@dataclass(frozen=True)
class Request:
    table: str
    data: tuple[str, ...]
    """Prepared directories, or the word synthetic."""
    out: Path
    """For all runs, each data set in a directory of its own."""
    reports: Path
    """For reports and tables; there too, settings are looked for: NAME/MODEL.toml and NAME/recipe.toml."""
    config: Path | None = None
    given: dict[str, Any] | None = None
    """Settings of the recipe that go before those of the file."""
    preset: str = "default"
    models: tuple[str, ...] = ()
    """Of table1; none: all."""
    seeds: int | None = None
    """Runs of each kind; None: 1 or 3, as suits the table."""
    averaged: bool = False
    dry_run: bool = False
    threads: int | None = None
    device: str = "cpu"
    quiet: bool = False
    command: str = ""
    """How to ask for it again, for its page."""


def fulfil(request: Request) -> str:
    """Do it, and return what there is to print."""
    if request.table not in TABLES:
        raise InputError(f"no table {request.table!r}", fix=f"known are {', '.join(TABLES)}")
    if request.table != "table1" and (request.models or request.averaged):
        raise InputError("--models and --averaged belong to table1")
    models = request.models or tuple(PAPER_ORDER)
    taught = table1.OURS in models if request.table == "table1" else request.table != "capacity"
    seeds = request.seeds or (1 if request.table in ONE_SEED else 3)
    table1.check_models(models, request.reports)
    sets = [_open(request, name) for name in request.data]
    recipes = [_recipe(request, name, data) for name, data in zip(request.data, sets, strict=True)]
    if taught and not all(config.teachers for config in recipes):
        raise InputError(
            "this table needs teachers", fix="give at least one, by --teachers or in recipe.toml"
        )
    names = [data.name for data in sets]
    if len(set(names)) < len(names):
        raise InputError(f"two data sets have the same name: {', '.join(names)}", fix="rename a directory")
    said = []
    for data, config in zip(sets, recipes, strict=True):
        reports = request.reports / data.name
        if request.table == "table1":
            own = table1.Bench(
                data, request.out / data.name, reports, reports, config, request.threads, request.device,
                quiet=request.quiet,
            )  # fmt: skip
            _say_defaults(models, reports, request)
            if request.dry_run:
                costs = own.costs(models, seeds, averaged=request.averaged)
                said.append(f"{data.name}:\n{say_costs(costs)}")
            else:
                own.run(models, seeds, averaged=request.averaged)
        else:
            kind = Rehearsal if request.dry_run else Recipe
            recipe = kind(
                config, data, request.out / data.name, threads=request.threads, device=request.device,
                quiet=request.quiet or request.dry_run,
            )  # fmt: skip
            table = ONE_RECIPE[request.table]
            if isinstance(recipe, Rehearsal):
                said.append(f"{data.name}:\n{say_costs(recipe.rehearse(table.cells, seeds))}")
                continue
            said.append(table.make(recipe, seeds, reports))
            _write_page(request, data.name, said[-1], reports / request.table / f"{request.table}.png")
    if request.table == "table1" and not request.dry_run:
        by_dataset = {data.name: request.reports / data.name for data in sets}
        where = request.reports / names[0] if len(names) == 1 else request.reports
        said.append(table1.write_tables(by_dataset, where, averaged=request.averaged))
        _write_page(request, names[0] if len(names) == 1 else "", said[-1])
    return "\n".join(said)


def _say_defaults(models: Sequence[str], reports: Path, request: Request) -> None:
    lacking = [name for name in models if table1.lacks_settings(name, reports)]
    if lacking and not request.quiet:
        say(
            f"by default settings, for want of {reports}/MODEL.toml: {', '.join(lacking)}; to compare with published"
            " figures give --reports a directory with the settings they were made with"
        )


def page_directory(request: Request, data: str) -> Path:
    """Of the page of a table; `data` is empty for one of several data sets."""
    return request.out / data / "pages" / f"{request.table}{'-averaged' if request.averaged else ''}"


def _write_page(request: Request, data: str, markdown: str, figure: Path | None = None) -> None:
    title = f"{request.table} on {data or ' and '.join(Path(name).name for name in request.data)}"
    images = (
        [Image(request.table, f"{title}, drawn from the numbers of the table", figure.read_bytes())]
        if figure is not None and figure.is_file()
        else []
    )
    page(title, markdown, images, request.command).write(page_directory(request, data))


def _open(request: Request, name: str) -> PreparedData:
    if name != NAME:
        return PreparedData(Path(name))
    directory = request.out / NAME
    directory.mkdir(parents=True, exist_ok=True)
    config = SyntheticConfig(rows=ROWS, seed=1)
    return draw(config, directory / "clicks.csv", directory / "data" / NAME, quiet=True)[1]


def _recipe(request: Request, name: str, data: PreparedData) -> RecipeConfig:
    """Of the file that is given, or of the data set's own, or else the default; `name` is what was asked for."""
    own = request.reports / data.name / "recipe.toml"
    path = request.config or (own if own.is_file() else None)
    given = {key: value for key, value in (request.given or {}).items() if value is not None}
    if path is None and name == NAME and request.preset == "default":
        return quick_recipe(len(data.train), 1, max_epochs=6, **{"teachers": 2, **given})
    tables = read_toml(path) if path is not None else {}
    return recipe_config(request.preset, {**tables, **given}, str(path or "bench"))


def split_names(text: str | None) -> Sequence[str]:
    """Names from a comma-separated list.

    >>> split_names("fcn, lr"), split_names(None)
    (('fcn', 'lr'), ())
    """
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())
