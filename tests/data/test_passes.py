"""Preparation by several workers: the same bytes as by one, whole or not at all."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import polars as pl
import pytest

import recap_ctr
from recap_ctr.data import pieces
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.source import FileSource
from recap_ctr.data.split import Split
from recap_ctr.errors import InputError
from recap_ctr.jobs import progress
from recap_ctr.jobs.engines import workers_for
from recap_ctr.jobs.executor import Executor, InThisProcess, Job
from recap_ctr.schema import Field, Schema
from tests.support.job_functions import die_then_do
from tests.support.preparing import EVERY_KIND, PLAIN, contents, every_kind, simple

pytestmark = pytest.mark.slow

TABLE = every_kind(500).with_columns(part=pl.Series(["train", "valid", "test", "train", "train"] * 100))


def write_csv(directory: Path) -> FileSource:
    for i, start in enumerate(range(0, TABLE.height, 130)):
        TABLE.slice(start, 130).write_csv(directory / f"day-{i}.csv")
    return FileSource([directory])


def write_one_csv(directory: Path) -> FileSource:
    TABLE.write_csv(directory / "all.csv")
    return FileSource([directory / "all.csv"])


def write_parquet(directory: Path) -> FileSource:
    TABLE.write_parquet(directory / "t.parquet", row_group_size=90)
    return FileSource([directory / "t.parquet"])


def write_json_lines(directory: Path) -> FileSource:
    """Write files of which the second alone has a column."""
    TABLE.head(200).drop("age").with_columns(price=None).write_ndjson(directory / "a.jsonl")
    TABLE.tail(300).write_ndjson(directory / "b.jsonl")
    return FileSource([directory])


def write_partitions(directory: Path) -> FileSource:
    """Write files whose directories add a column."""
    for site in ("x", "y"):
        (directory / f"site={site}").mkdir()
        TABLE.drop("site").write_csv(directory / f"site={site}" / "rows.csv")
    return FileSource([directory])


def made(preparation: Preparation, out: Path, executor: Executor | None) -> dict[str, bytes]:
    write_prepared_data(preparation, out, quiet=True, executor=executor)
    return contents(out)


SPLITS = {
    "random": Split(seed=3),
    "time": Split(kind="time"),
    "column": Split(kind="column", column="part"),
    "folds": Split(kind="folds", seed=2),
    "hash": Split(kind="hash", column="id"),
}


class TestTheSameBytes:
    @pytest.mark.parametrize(
        "write", [write_csv, write_one_csv, write_parquet, write_json_lines, write_partitions]
    )
    def test_of_every_format(self, write: Callable[[Path], FileSource], tmp_path: Path) -> None:
        (tmp_path / "raw").mkdir()
        preparation = Preparation(EVERY_KIND, {"all": write(tmp_path / "raw")})
        whole = made(preparation, tmp_path / "one", None)
        for workers in (2, 3):
            assert made(preparation, tmp_path / f"many-{workers}", InThisProcess(workers)) == whole

    @pytest.mark.parametrize("split", SPLITS)
    def test_of_every_split(self, split: str, tmp_path: Path) -> None:
        (tmp_path / "raw").mkdir()
        preparation = Preparation(EVERY_KIND, {"all": write_csv(tmp_path / "raw")}, SPLITS[split])
        whole = made(preparation, tmp_path / "one", None)
        assert made(preparation, tmp_path / "many", InThisProcess(2)) == whole

    def test_of_files_for_each_split(self, tmp_path: Path) -> None:
        sources = {}
        for name, start in (("train", 0), ("valid", 300), ("test", 400)):
            (tmp_path / name).mkdir()
            for half in (0, 1):
                TABLE.slice(start + 50 * half, 50).write_csv(tmp_path / name / f"{half}.csv")
            sources[name] = FileSource([tmp_path / name])
        preparation = Preparation(EVERY_KIND, sources, Split(kind="files"))
        whole = made(preparation, tmp_path / "one", None)
        assert made(preparation, tmp_path / "many", InThisProcess(2)) == whole

    @pytest.mark.parametrize("kind", ["cells", "pieces"])
    def test_of_counted_fields_and_dropped_rows(
        self, kind: Literal["cells", "pieces"], tmp_path: Path
    ) -> None:
        (tmp_path / "raw").mkdir()
        schema = Schema(label="y", fields=(Field(name="tags", kind="multi", separator="|", min_count=9),))
        unlabelled = TABLE.with_columns(y=pl.when(pl.col("t") > 5).then("y"))
        for i in range(4):
            unlabelled.slice(125 * i, 125).write_csv(tmp_path / "raw" / f"{i}.csv")
        source = FileSource([tmp_path / "raw"])
        preparation = Preparation(schema, {"all": source}, counted={"tags": kind}, drop_unlabelled=True)
        whole = made(preparation, tmp_path / "one", None)
        assert made(preparation, tmp_path / "many", InThisProcess(2)) == whole

    @pytest.mark.parametrize("max_values", [7, 30])
    def test_with_values_beyond_the_limit(self, max_values: int, tmp_path: Path) -> None:
        (tmp_path / "raw").mkdir()
        preparation = Preparation(EVERY_KIND, {"all": write_csv(tmp_path / "raw")})
        whole = made(preparation, tmp_path / "one", None)
        small = replace(preparation, max_values=max_values)
        assert made(small, tmp_path / "small", None) == whole
        assert made(small, tmp_path / "many", InThisProcess(2)) == whole

    def test_of_processes(self, tmp_path: Path) -> None:
        """The same through the public call, with workers that share nothing but the disk."""
        (tmp_path / "raw").mkdir()
        write_csv(tmp_path / "raw")
        for name, workers in (("one", 1), ("two", 2)):
            recap_ctr.prepare(tmp_path / "raw", out=tmp_path / name, schema=EVERY_KIND, workers=workers)
        assert contents(tmp_path / "one") == contents(tmp_path / "two")

    def test_of_a_table_that_one_process_reads(self, tmp_path: Path) -> None:
        executors: dict[str, str | Executor] = {"one": "local", "many": InThisProcess(2)}
        for name, executor in executors.items():
            recap_ctr.prepare(simple(60), out=tmp_path / name, schema=PLAIN, executor=executor)
        assert contents(tmp_path / "one") == contents(tmp_path / "many")


class TestErrors:
    def test_name_the_row_of_the_whole_file(self, tmp_path: Path) -> None:
        table = simple(90).with_columns(y=pl.when(pl.int_range(90) == 77).then(5).otherwise("y"))
        table.write_parquet(tmp_path / "t.parquet", row_group_size=10)
        preparation = Preparation(PLAIN, {"all": FileSource([tmp_path / "t.parquet"])})
        with pytest.raises(InputError, match=r"t\.parquet: row 78"):
            made(preparation, tmp_path / "out", InThisProcess(3))

    def test_name_the_row_of_the_whole_text(self, tmp_path: Path) -> None:
        rows = [f'{i % 2},"a\n{i}"' for i in range(90)]
        rows[77] = "x,a"
        (tmp_path / "t.csv").write_text("\n".join(["y,c", *rows]) + "\n")
        preparation = Preparation(PLAIN, {"all": FileSource([tmp_path / "t.csv"])})
        for executor in (None, InThisProcess(3)):
            with pytest.raises(InputError, match=r"t\.csv: row 78: the label 'y' is 'x'"):
                made(preparation, tmp_path / "out", executor)

    def test_times_of_two_kinds(self, tmp_path: Path) -> None:
        schema = PLAIN.model_copy(update={"time": "t"})
        (tmp_path / "raw").mkdir()
        simple(9, t=range(9)).write_csv(tmp_path / "raw" / "a.csv")
        simple(9, t=["2026-01-01"] * 9).write_csv(tmp_path / "raw" / "b.csv")
        preparation = Preparation(schema, {"all": FileSource([tmp_path / "raw"])})
        messages = []
        for executor in (None, InThisProcess(2)):
            with pytest.raises(InputError, match="holds dates, before that numbers") as caught:
                made(preparation, tmp_path / "out", executor)
            messages.append(caught.value.message)
        assert messages[0] == messages[1]

    def test_workers_of_a_cluster(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"a cluster has as many.*\n  fix: remove --workers"):
            recap_ctr.prepare(simple(60), out=tmp_path, schema=PLAIN, workers=2, executor="ray")


PASSES = ("reading rows", "counting values", "writing shards")


@dataclass
class Watched:
    """Runs jobs by another executor; counts them, and can kill a worker of every pass or interrupt one."""

    executor: Executor
    killed: Path | None = None
    interrupted: str = ""
    ran: Counter[str] = field(default_factory=Counter)

    @property
    def workers(self) -> int:
        return self.executor.workers

    def run(
        self,
        jobs: Sequence[Job],
        *,
        title: str,
        quiet: bool = False,
        done: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        jobs = list(jobs)
        if self.killed is not None:
            call = {"function": jobs[1].dotted_name, "arguments": jobs[1].arguments}
            jobs[1] = Job(jobs[1].name, die_then_do, {"mark": f"{self.killed}-{title}", **call})
        if title == self.interrupted:
            self.executor.run(jobs[:2], title=title, quiet=quiet, done=done)
            raise KeyboardInterrupt
        self.ran[title] += len(jobs)
        return self.executor.run(jobs, title=title, quiet=quiet, done=done)


def visible(directory: Path) -> list[str]:
    """Return what is in a directory besides locks."""
    return sorted(entry.name for entry in directory.iterdir() if not entry.name.endswith(".lock"))


@pytest.fixture
def csv(tmp_path: Path) -> Preparation:
    (tmp_path / "raw").mkdir()
    return Preparation(EVERY_KIND, {"all": write_csv(tmp_path / "raw")})


def test_killed_workers_change_nothing(
    csv: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of every pass is killed once, in the middle of the pass."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    whole = made(csv, tmp_path / "one", None)
    local = workers_for("local", 2)
    assert local is not None
    assert made(csv, tmp_path / "many", Watched(local, tmp_path / "killed")) == whole
    assert visible(tmp_path) == sorted([*(f"killed-{title}" for title in PASSES), "many", "one", "raw"])


class TestResume:
    @pytest.mark.parametrize("title", PASSES)
    def test_only_what_is_missing_is_done(self, title: str, csv: Preparation, tmp_path: Path) -> None:
        """Also with another number of workers than before."""
        whole, out = made(csv, tmp_path / "one", None), tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            made(csv, out, Watched(InThisProcess(2), interrupted=title))
        assert visible(tmp_path) == [".out.work", "one", "raw"]
        again = Watched(InThisProcess(3))
        assert made(csv, out, again) == whole
        in_full = Watched(InThisProcess(2))
        made(csv, tmp_path / "full", in_full)
        before = PASSES[: PASSES.index(title)]  # Later passes follow the new number of workers.
        assert [again.ran[name] for name in before] == [0] * len(before)
        assert again.ran[title] == in_full.ran[title] - 2
        assert visible(tmp_path) == ["full", "one", "out", "raw"]

    def test_other_inputs_begin_anew(self, csv: Preparation, tmp_path: Path) -> None:
        out, other = tmp_path / "out", replace(csv, split=Split(seed=8))
        with pytest.raises(KeyboardInterrupt):
            made(csv, out, Watched(InThisProcess(2), interrupted=PASSES[1]))
        again = Watched(InThisProcess(2))
        assert made(other, out, again) == made(other, tmp_path / "one", None)
        assert again.ran[PASSES[0]] > 0

    def test_bad_input_leaves_nothing(self, tmp_path: Path) -> None:
        for name, label in (("a", 1), ("b", 7)):
            simple(40, y=[label, 0] * 20).write_csv(tmp_path / f"{name}.csv")
        preparation = Preparation(PLAIN, {"all": FileSource([tmp_path / "*.csv"])})
        with pytest.raises(InputError, match=r"b\.csv: row 1"):
            made(preparation, tmp_path / "out", InThisProcess(2))
        assert visible(tmp_path) == ["a.csv", "b.csv"]

    @pytest.mark.slow
    def test_after_the_whole_command_was_killed(self, csv: Preparation, tmp_path: Path) -> None:
        whole, out = made(csv, tmp_path / "one", None), tmp_path / "out"
        (tmp_path / "schema.toml").write_text(EVERY_KIND.to_toml())
        arguments = [str(tmp_path / name) for name in ("raw", "schema.toml", "out")]
        for title in PASSES:
            child = subprocess.run([sys.executable, "-c", CHILD, *arguments, title])
            assert child.returncode == -signal.SIGKILL
            assert not out.exists()
        again = Watched(InThisProcess(2))
        assert made(csv, out, again) == whole
        assert not again.ran[PASSES[0]]
        assert not again.ran[PASSES[1]]
        assert visible(tmp_path) == ["one", "out", "raw", "schema.toml"]


CHILD = """
import os, signal, sys
from pathlib import Path
from recap_ctr.data.prepare import Preparation, write_prepared_data
from recap_ctr.data.source import FileSource
from recap_ctr.jobs.executor import InThisProcess
from recap_ctr.schema import read_schema

class Killed(InThisProcess):
    def run(self, jobs, *, title, quiet=False, done=None):
        if title == sys.argv[4]:
            super().run(jobs[:2], title=title, quiet=quiet, done=done)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(jobs, title=title, quiet=quiet, done=done)

preparation = Preparation(read_schema(Path(sys.argv[2])), {"all": FileSource([sys.argv[1]])})
write_prepared_data(preparation, Path(sys.argv[3]), quiet=True, executor=Killed(2))
"""


def test_time_left_is_told(
    csv: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(progress, "SEND_SECONDS", 0.0)
    write_prepared_data(csv, tmp_path / "out", executor=InThisProcess(2))
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"prepare: 0:\d\d so far; reading rows: piece 1, .* rows/s", lines[0])
    assert re.fullmatch(r"prepare: 0:\d\d of \d:\d\d, 0:\d\d left; writing shards: rows from .*", lines[-1])


def test_pieces(tmp_path: Path) -> None:
    """Small files are put together to pieces of about the same size, large ones are cut."""
    for name in "abcdefgh":
        simple(40).write_csv(tmp_path / f"{name}.csv")
    simple(4_000).write_csv(tmp_path / "large.csv")
    source = FileSource([tmp_path / "*.csv"])
    divided = pieces.divide({"all": source}, 2, tmp_path)
    assert divided is not None
    assert [len(piece.files) for piece in divided] == [8] + [1] * 6
    assert [piece.span is None for piece in divided] == [True] + [False] * 6
    TABLE.write_ndjson(tmp_path / "t.jsonl")
    divided = pieces.divide({"all": FileSource([tmp_path / "t.jsonl"])}, 2, tmp_path)
    assert divided is not None
    assert [(len(piece.files), piece.span, piece.rows) for piece in divided] == [(1, None, None)]
    simple(4_000).write_parquet(tmp_path / "t.parquet")
    divided = pieces.divide({"all": FileSource([tmp_path / "t.parquet"])}, 2, tmp_path)
    assert divided is not None
    assert [piece.rows for piece in divided] == [
        (start, min(start + 572, 4_000)) for start in range(0, 4_000, 572)
    ]
