"""The whole way on a small scale: everything that `recap demo` promises is there, and a second call leaves it alone."""

import json
from pathlib import Path

import polars as pl
import pytest

from recap_ctr import runs
from recap_ctr.artifact import load_artifact
from recap_ctr.data.shards import PreparedData
from recap_ctr.demo import run_demo
from tests.conftest import Recap, contents

DEMO = ("demo", "--rows", 5_000, "--threads", 1, "--json", "--out")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A demo that was interrupted just before its artifact was written, and then resumed."""
    out = tmp_path_factory.mktemp("demo") / "out"

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "write_artifact", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_demo(out, rows=5_000, seed=1, threads=1, force=False, quiet=True)
    assert not (out / "run" / "artifact").exists()
    before = contents(out)
    run_demo(out, rows=5_000, seed=1, threads=1, force=False, quiet=True)
    kept = [name for name in before if name.startswith(("clicks", "data", "run/best", "run/state"))]
    assert {name: before[name] for name in kept} == {name: contents(out)[name] for name in kept}
    return out


def test_the_demo_reports_against_the_best_possible(recap: Recap, made: Path) -> None:
    done = recap(*DEMO, made, "-q")

    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    names = [line[0] for line in result["table"]]
    assert names == ["base rate", "logistic regression", "FCN", "Bayes (best possible)"]
    # 500 test rows: Bayes' AUC is 0.8 by construction, its standard error here 0.025.
    base, regression, fcn, bayes = result["table"]
    assert float(bayes[1]) == pytest.approx(0.8, abs=0.1)
    assert float(bayes[1]) > float(fcn[1]) > 0.5
    assert float(bayes[2]) < float(fcn[3]) < float(base[2])
    assert float(bayes[4]) == 0.0 < float(fcn[4]) < float(base[4])
    assert regression[0] in result["report"]["reference"]
    assert result["closed"] == pytest.approx(1 - float(fcn[4]) / float(base[4]), abs=0.01)
    assert "best possible" in result["finding"]


def test_the_demo_leaves_all_its_parts(made: Path) -> None:
    assert pl.read_csv(made / "clicks.csv").height == 5_000
    assert len(PreparedData(made / "data").train) == 4_000
    assert load_artifact(made / "run").name == "fcn"
    scored = pl.read_csv(made / "ten-scored.csv")
    assert scored.columns[-2:] == ["score", "logit"]
    assert scored.height == 10


def test_a_finished_demo_is_left_alone(recap: Recap, made: Path) -> None:
    before = contents(made)
    again = recap(*DEMO, made)
    assert again.code == 0
    assert "nothing to do" in again.err
    assert json.loads(again.out) == json.loads((made / "demo.json").read_bytes())
    assert contents(made) == before


def test_other_inputs_need_force(recap: Recap, made: Path) -> None:
    before = contents(made)
    done = recap(*DEMO, made, "--seed", 2)
    assert done.code == 2
    assert "--force" in done.err
    assert contents(made) == before


def test_the_table_reads_well_without_json(recap: Recap, made: Path) -> None:
    done = recap(*[part for part in DEMO if part != "--json"], made, "-q")
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert lines[0].split() == ["model", "test", "AUC", "logloss", "calibrated", "excess", "over", "Bayes"]
    assert any(line.startswith("Bayes (best possible)") for line in lines)
    assert any(line.startswith("row  click  f1") for line in lines)
