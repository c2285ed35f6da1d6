"""What lives outside the package: found by its dotted name, held to what ours is, not imported for an artifact."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import recap_ctr
from recap_ctr import CTRClassifier
from recap_ctr.axes.logits import LogitTable
from recap_ctr.bench.request import Request, fulfil
from recap_ctr.config import TrainConfig
from recap_ctr.data.shards import PreparedData
from recap_ctr.datasets.catalogue import find_protocol
from recap_ctr.errors import InputError
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.models.catalogue import count_parameters, model_class, paper, parse_model, purpose
from recap_ctr.recipe.estimator_grid import write_grid
from recap_ctr.training.config import RunConfig
from recap_ctr.training.run import run
from tests.conftest import Recap
from tests.support.forged_artifact import forge
from tests.support.published import ML_1M

EXTENDING = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
PAIRS = "my_ctr.nets:Pairs"
BROKEN = """
from __future__ import annotations

from torch import nn

from recap_ctr.config import Frozen
from recap_ctr.models.lr import LR


class Plain:
    pass


class NoConfig(nn.Module):
    def __init__(self, layout):
        super().__init__()


class Untyped(nn.Module):
    def __init__(self, config: dict, layout):
        super().__init__()


class Nothing(Frozen):
    pass


class NoLoss(nn.Module):
    def __init__(self, config: Nothing, layout):
        super().__init__()


class Anything(Frozen):
    loss: str = "bce"


class Text(LR):
    def __init__(self, config: Anything, layout):
        super().__init__(config, layout)
"""


def write_package(directory: Path) -> None:
    """The files that docs/extending.md shows."""
    (directory / "my_ctr").mkdir(parents=True)
    for path, text in re.findall(r"^```python\n# (\S+)\n(.*?)^```", EXTENDING, re.MULTILINE | re.DOTALL):
        (directory / path).write_text(text)
    assert {path.name for path in (directory / "my_ctr").iterdir()} == {"nets.py", "clicks.py", "spaces.py"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with that package in it, and one of broken models, where this process and its workers look."""
    write_package(tmp_path / "path")
    (tmp_path / "path" / "broken_ctr.py").write_text(BROKEN)
    (tmp_path / "path" / "failing_ctr.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    source = Path(recap_ctr.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'path'}{os.pathsep}{source}")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_ctr", "broken_ctr")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "path"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported it."""
    for name in ("my_ctr.nets", "my_ctr"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.slow
def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    """Line by line in an empty directory but for the package, each command a process of its own."""
    write_package(tmp_path)
    (script,) = re.findall(r"^```console\n(.*?)^```", EXTENDING, re.MULTILINE | re.DOTALL)
    source = Path(recap_ctr.__file__).parents[1]
    lines = [line.removeprefix("$ ").replace("=.", f"=.:{source}", 1) for line in script.splitlines()]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 2001
    record = json.loads((tmp_path / "tuned" / "tune.json").read_text())
    assert len(record["trials"]) == 3 and record["model"]["name"] == PAIRS
    assert f'name = "{PAIRS}"' in (tmp_path / "tuned" / "best.toml").read_text()
    assert "# PAIRS click model" in (tmp_path / "run" / "artifact" / "MODEL_CARD.md").read_text()


@pytest.mark.usefixtures("package")
class TestNames:
    def test_a_model(self) -> None:
        config = parse_model(PAIRS, {"dim": 4})
        assert count_parameters(PAIRS, config, ML_1M) == 9_751 * 5 + 1 + 7 * 7
        assert purpose(PAIRS).startswith("For few fields") and "WWW 2018" in paper(PAIRS)
        with pytest.raises(InputError, match=r"model my_ctr\.nets:Pairs: dropuot: unknown setting"):
            parse_model(PAIRS, {"dropuot": 0.1})

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("nowhere_ctr.nets:Pairs", "'nowhere_ctr'.*\n.*holds nowhere_ctr on PYTHONPATH, or install"),
            ("failing_ctr:Net", "failing_ctr can't be imported: No module named 'a_package"),
            ("my_ctr.nets:Piars", r"my_ctr\.nets has no Piars"),
            ("my_ctr.nets:", "write it as package.module:Name"),
            (":Pairs", "write it as package.module:Name"),
            ("../nets:Pairs", "write it as package.module:Name"),
            ("os:system", r"is not a torch\.nn\.Module"),
            ("broken_ctr:Plain", r"is not a torch\.nn\.Module"),
            ("broken_ctr:NoConfig", "`config` of its __init__ is not annotated"),
            ("broken_ctr:Untyped", "`config` of its __init__ is not annotated"),
            ("broken_ctr:NoLoss", "Nothing has no setting `loss`"),
        ],
    )
    def test_no_model(self, name: str, words: str) -> None:
        with pytest.raises(InputError, match=words):
            model_class(name)

    def test_postponed_annotations_and_unknown_losses(self) -> None:
        assert dict(parse_model("broken_ctr:Text", {})) == {"loss": "bce"}
        with pytest.raises(InputError, match=r"no loss 'hinge'\n.*choose bce"):
            parse_model("broken_ctr:Text", {"loss": "hinge"})

    def test_a_data_set(self) -> None:
        assert find_protocol("my_ctr.clicks:PROTOCOL").title == "My clicks"
        with pytest.raises(InputError, match=r"is not a recap_ctr\.datasets\.protocol\.Protocol"):
            find_protocol("my_ctr.clicks:SCHEMA")


@pytest.mark.usefixtures("package")
class TestArtifact:
    def train(self, prepared: PreparedData, out: Path) -> Path:
        config = TrainConfig(batch_size=512, max_epochs=1)
        run(
            RunConfig(PAIRS, parse_model(PAIRS, {}), config, train_baseline=False, report_fields=False),
            prepared,
            out,
            quiet=True,
        )
        return out / "artifact"

    @pytest.mark.slow
    def test_its_module_is_not_imported_for_it(
        self,
        prepared: PreparedData,
        click_log: pl.DataFrame,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        recap: Recap,
    ) -> None:
        artifact = self.train(prepared, tmp_path / "run")
        assert load_artifact(artifact).name == PAIRS, "it is imported"
        forget(monkeypatch)
        assert recap("inspect", artifact).code == 0, "what it says of itself needs no code"
        assert "my_ctr.nets" not in sys.modules
        rows = tmp_path / "rows.csv"
        click_log.head(5).write_csv(rows)
        done = recap("predict", artifact, rows)
        assert done.code == 2 and f"set RECAP_MODELS={PAIRS}" in done.err
        assert "my_ctr.nets" not in sys.modules
        monkeypatch.setenv("RECAP_MODELS", "my_ctr.nets:Piars")
        assert recap("predict", artifact, rows).code == 2
        assert "my_ctr.nets" not in sys.modules
        monkeypatch.setenv("RECAP_MODELS", f"other.module:Name, {PAIRS}")
        assert recap("predict", artifact, rows).code == 0

    def test_a_diagnosis_trusts_what_the_user_named(
        self, prepared: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = TrainConfig(batch_size=512, max_epochs=1, checkpoints=1)
        config_of_run = RunConfig(
            PAIRS, parse_model(PAIRS, {}), config, train_baseline=False, report_fields=False
        )
        run(config_of_run, prepared, tmp_path / "run", quiet=True)
        forget(monkeypatch)
        write_grid(
            data=str(prepared.path),
            run=str(tmp_path / "run"),
            out=str(tmp_path / "table"),
            split="test",
            model=PAIRS,
            has_routes=False,
            threads=1,
            device="cpu",
        )
        assert len(LogitTable(tmp_path / "table")) == len(prepared.test)

    @pytest.mark.parametrize("name", ["antigravity:fly", "os:system", ":", "a:b:c"])
    def test_a_forged_name_runs_nothing(self, packed: Path, tmp_path: Path, name: str) -> None:
        copy = Path(shutil.copytree(packed, tmp_path / "copy"))
        forge(copy, lambda manifest: manifest["model"].update(name=name))
        with pytest.raises(InputError):
            load_artifact(copy)
        assert "antigravity" not in sys.modules


@pytest.mark.usefixtures("package")
class TestCommands:
    @pytest.mark.slow
    def test_table_1_has_guests(self, prepared: PreparedData, tmp_path: Path) -> None:
        """By a settings file of any name, and by the dotted name itself."""
        reports = tmp_path / "reports" / prepared.name
        reports.mkdir(parents=True)
        fast = "[train]\nbatch_size = 512\nmax_epochs = 1\n"
        (reports / "pairs.toml").write_text(f'[model]\nname = "{PAIRS}"\ndim = 4\n{fast}')
        (reports / "lr-slow.toml").write_text(f'[model]\nname = "lr"\n{fast}')
        request = Request(
            "table1",
            (str(prepared.path),),
            tmp_path / "out",
            tmp_path / "reports",
            models=("lr-slow", PAIRS),
            seeds=1,
            quiet=True,
        )
        text = fulfil(request)
        assert "| pairs | a file | 1 |" in text and "| lr-slow | a file | 1 |" in text
        report = json.loads((reports / "pairs" / "seed-1" / "report.json").read_text())
        assert report["model"] == {"name": PAIRS, "config": {"dim": 4, "dropout": 0.1, "loss": "bce"}}
        assert "\npairs & " in (reports / "table1.tex").read_text()
        assert fulfil(Request(**{**vars(request), "models": ("pairs",)})) == text

    @pytest.mark.slow
    @pytest.mark.usefixtures("one_process")
    def test_fit(self, prepared: PreparedData, tmp_path: Path, recap: Recap) -> None:
        """That worker processes find the package is shown by `recap tune`, above."""
        done = recap(
            "fit",
            prepared.path,
            "--model",
            PAIRS,
            "--teacher-model",
            PAIRS,
            "--teachers",
            1,
            "--set",
            "l2=1e-4",
            "--set",
            "train.max_epochs=1",
            "--set",
            "teacher_train.max_epochs=1",
            "--threads",
            1,
            "--out",
            tmp_path / "model",
            "--json",
            "-q",
        )
        assert done.code == 0, done.err
        report = json.loads(done.out)
        assert report["student"].startswith("student-pairs-")
        assert report["recipe"]["teacher_model"] == report["model"]["name"] == PAIRS

    def test_classifier(self, click_log: pl.DataFrame, tmp_path: Path) -> None:
        rows, clicked = click_log.select("site", "ad"), click_log["click"]
        model = CTRClassifier(PAIRS, max_epochs=1, random_state=1).fit(rows, clicked)
        model.save(tmp_path / "saved")
        assert CTRClassifier.load(tmp_path / "saved").get_params()["model"] == PAIRS
