"""The cube is put together by coordinates, and refuses what doesn't fit."""

from pathlib import Path

import numpy as np
import pytest

from recap_ctr.axes.logits import Estimator, LogitTable, LogitWriter
from recap_ctr.data.shards import PreparedData
from recap_ctr.diagnose import Cube, Floats
from recap_ctr.diagnose.cube import MAX_NAMED_CELLS
from recap_ctr.errors import InputError


def table(
    path: Path, data: PreparedData, estimators: list[Estimator], seed: int = 0, split: str = "valid"
) -> LogitTable:
    rows = len(getattr(data, split))
    with LogitWriter(path, data, split, estimators) as writer:
        writer.write(np.random.default_rng(seed).normal(size=(rows, len(estimators))))
    return LogitTable(path)


def run(name: str, steps: tuple[int, ...] = (10, 20)) -> list[Estimator]:
    return [Estimator(name, step, route) for route in ("0-1", "1-0") for step in steps]


def whole(cube: Cube) -> Floats:
    return cube.block(0, len(cube))


def test_columns_of_several_tables_find_their_cells(prepared: PreparedData, tmp_path: Path) -> None:
    tables = [table(tmp_path / name, prepared, run(name, (20, 10)), seed=len(name)) for name in ("b", "aa")]

    cube = Cube.from_tables(tables)

    assert (cube.runs, cube.steps, cube.routes) == (("b", "aa"), (10, 20), ("0-1", "1-0"))
    assert cube.shape == (2, 2, 2)
    logits_STRN = whole(cube).reshape(2, 2, 2, -1)
    for s, source in enumerate(tables):
        for column, estimator in enumerate(source.estimators):
            t, r = cube.steps.index(estimator.step), cube.routes.index(estimator.route)
            assert np.array_equal(logits_STRN[s, t, r], source.logits_NM[:, column])


def test_blocks_are_slices_of_the_whole(prepared: PreparedData, tmp_path: Path) -> None:
    cube = Cube.from_tables([table(tmp_path / "a", prepared, run("a"))])
    parts = [cube.block(start, start + 37) for start in range(0, len(cube), 37)]

    assert np.array_equal(np.concatenate(parts, axis=1), whole(cube))


def test_an_array_keeps_its_order() -> None:
    logits = np.random.default_rng(0).normal(size=(7, 2, 3, 4))

    cube = Cube.from_array(logits)

    assert cube.shape == (2, 3, 4)
    assert np.array_equal(whole(cube), logits.reshape(7, -1).T)
    with pytest.raises(InputError, match="shape"):
        Cube.from_array(logits[0])


def test_a_table_of_other_rows_is_named(prepared: PreparedData, tmp_path: Path) -> None:
    first = table(tmp_path / "first", prepared, run("a"))
    second = table(tmp_path / "second", prepared, run("b"))
    other = table(tmp_path / "other", prepared, run("c"), split="train")

    with pytest.raises(InputError, match=r"other holds other rows than .*first"):
        Cube.from_tables([first, second, other])
    second.rows_N = np.asarray(second.rows_N)[::-1]
    with pytest.raises(InputError, match=r"second holds other rows than .*first"):
        Cube.from_tables([first, second])


def test_missing_cells_are_named(prepared: PreparedData, tmp_path: Path) -> None:
    complete, partial = (
        table(tmp_path / "one", prepared, run("a")),
        table(tmp_path / "other", prepared, run("b", (20,))),
    )

    with pytest.raises(InputError) as error:
        Cube.from_tables([complete, partial])

    assert "2 runs × 2 steps × 2 routes lacks run b, step 10, route 0-1; run b, step 10, route 1-0" in str(
        error.value
    )
    many = table(tmp_path / "many", prepared, run("c", tuple(range(30, 40))))
    with pytest.raises(InputError, match=rf"\(and {2 * 12 * 2 - 4 - 20 - MAX_NAMED_CELLS} more\)"):
        Cube.from_tables([complete, many])


def test_a_cell_that_is_there_twice_is_refused_unless_a_depth_is_chosen(
    prepared: PreparedData, tmp_path: Path
) -> None:
    deep = table(tmp_path / "deep", prepared, [Estimator("a", 10, depth=depth) for depth in (2, 4)])

    with pytest.raises(InputError, match="two columns hold the logits of run a, step 10"):
        Cube.from_tables([deep])
    assert np.array_equal(whole(Cube.from_tables([deep], depth=4))[0], deep.logits_NM[:, 1])
    with pytest.raises(InputError, match="no estimators"):
        Cube.from_tables([deep], depth=3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_is_named(value: float) -> None:
    logits = np.zeros((50, 2, 2, 1), np.float32)
    logits[33, 1, 0, 0] = value

    with pytest.raises(InputError, match=f"row 33 from run 1, step 0, route 0 is {value}"):
        Cube.from_array(logits).block(20, 40)
