"""Object stores: copies, trees that are whole or absent, claims, and the commands from and to s3://."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import polars as pl
import pytest

from recap_ctr.axes.logits import table_checksum
from recap_ctr.data.shards import PreparedData
from recap_ctr.data.source import FileSource
from recap_ctr.errors import InputError
from recap_ctr.schema import Schema
from recap_ctr.serve.snapshots import Snapshots
from recap_ctr.storage import objects, places
from recap_ctr.storage.claims import claim, take
from recap_ctr.storage.locks import BusyError
from recap_ctr.storage.places import input_directory, input_files, output_directory, output_file
from recap_ctr.training.report import read_report
from tests.conftest import Recap
from tests.support.object_store import SECRET, delete, keys, put, s3_server

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as url:
        patch.setenv(objects.CACHE, str(tmp_path_factory.mktemp("cache")))
        yield url


@pytest.fixture
def bucket(server: str, request: pytest.FixtureRequest) -> str:
    """A prefix of the bucket that no other test uses."""
    return f"{server}/{request.node.name}"


def key_of(url: str) -> str:
    return url.removeprefix("s3://bucket/")


def files_of(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def on_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(objects.CACHE, str(tmp_path / "other-cache"))


class TestObjects:
    def test_names_patterns_and_prefixes(self, bucket: str) -> None:
        for name in ("day=1/a.csv", "day=2/b.csv", "day=2/deep/c.csv", "day=2/_SUCCESS", "notes.md"):
            put(f"{key_of(bucket)}/{name}", b"x,y\n1,2\n")

        def found(pattern: str) -> list[str]:
            return [path.relative_to(root / key_of(bucket)).as_posix() for path, root in input_files(pattern)]

        assert found(f"{bucket}/day=1/a.csv") == ["day=1/a.csv"]
        assert found(f"{bucket}/*/*.csv") == ["day=1/a.csv", "day=2/b.csv"]
        assert found(f"{bucket}/**/*.csv") == ["day=1/a.csv", "day=2/b.csv", "day=2/deep/c.csv"]
        assert len(found(bucket)) == 5
        with pytest.raises(InputError, match=f"nothing is at {bucket}/none"):
            input_files(f"{bucket}/none")

        rows = pl.concat(block.frame for block, _ in FileSource([bucket]).blocks())
        assert rows["day"].to_list() == ["1", "2", "2"]

    def test_a_copy_is_kept_until_the_object_changes(self, bucket: str) -> None:
        name = f"{bucket}/rows.csv"
        put(key_of(name), b"a\n1\n")
        ((first, _),) = input_files(name)
        assert input_files(name)[0][0] == first
        put(key_of(name), b"a\n2\n")
        assert input_files(name)[0][0].read_text() == "a\n2\n"
        assert first.read_text() == "a\n1\n"

    def test_a_file_becomes_an_object_or_nothing(self, bucket: str) -> None:
        out = Path(f"{bucket}/scores.csv")
        with pytest.raises(KeyError), output_file(out) as path:
            path.write_text("half")
            raise KeyError
        assert keys(key_of(bucket)) == []
        with output_file(out) as path:
            path.write_text("first")
        with pytest.raises(InputError, match=r"scores.csv exists\n  fix: .*--force"), output_file(out):
            pass
        with output_file(out, force=True) as path:
            path.write_text("second")
        assert input_files(str(out))[0][0].read_text() == "second"

    def test_a_large_object_has_no_more_parts_than_stores_take(
        self, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = []
        monkeypatch.setattr(obstore, "put", lambda *_, **options: sizes.append(options["chunk_size"]))
        with output_file(Path(f"{bucket}/scores"), force=True) as path, path.open("wb") as file:
            file.truncate(700 << 30)  # Without content, it takes no room.
        assert 10_000 * sizes[0] >= 700 << 30

    def test_of_two_that_write_the_same_object_one_wins(self, bucket: str) -> None:
        out = Path(f"{bucket}/scores.csv")
        with pytest.raises(InputError, match="exists"), output_file(out) as path:
            path.write_text("late")
            put(key_of(f"{bucket}/scores.csv"), b"early")
        assert input_files(str(out))[0][0].read_text() == "early"


class TestTrees:
    def test_a_directory_comes_back_as_it_was(
        self, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with output_directory(bucket) as work:
            (work / "artifact").mkdir()
            (work / "artifact" / "manifest.json").write_text("{}")
            (work / "big").write_text("x" * 100)
            (work / ".half.partial").write_text("half")
        on_another_machine(monkeypatch, tmp_path)
        assert files_of(input_directory(bucket)) == {"artifact/manifest.json": "{}", "big": "x" * 100}
        assert files_of(input_directory(Path(bucket), "artifact")) == {"manifest.json": "{}"}
        with output_directory(bucket) as work:
            (work / "big").unlink()
        assert files_of(input_directory(bucket)) == {"artifact/manifest.json": "{}"}
        files = [key for key in keys(key_of(bucket)) if "/files/" in key]
        assert len(files) == 1, "those of the version before are removed"
        assert f"{key_of(bucket)}/claim.json" not in keys(key_of(bucket))

    def test_work_that_fails_goes_on_elsewhere(
        self, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with pytest.raises(KeyError), output_directory(bucket) as work:
            (work / "checkpoint").write_text("epoch 1")
            raise KeyError
        on_another_machine(monkeypatch, tmp_path)
        with output_directory(bucket) as work:
            assert files_of(work) == {"checkpoint": "epoch 1"}

    def test_work_is_pushed_while_it_goes_on(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(objects, "PUSH_SECONDS", 0.05)
        with output_directory(bucket) as work:
            (work / "checkpoint").write_text("epoch 1")
            deadline = time.monotonic() + 60
            while not places.has_directory(bucket):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert files_of(input_directory(bucket)) == {"checkpoint": "epoch 1"}

    def test_only_one_may_write(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with output_directory(bucket) as work:
            (work / "mine").touch()
            with (
                pytest.raises(BusyError, match=f"another process is writing {bucket}"),
                output_directory(bucket),
            ):
                pass
        assert list(files_of(input_directory(bucket))) == ["mine"]

    def test_a_claim_without_a_holder_ends(self, bucket: str) -> None:
        put(f"{key_of(bucket)}/claim.json", b'{"owner": "killed", "until": %d}' % (time.time() + 60))
        with (
            pytest.raises(BusyError, match="if it was killed, try again in 120 seconds"),
            output_directory(bucket),
        ):
            pass
        put(f"{key_of(bucket)}/claim.json", b'{"owner": "killed", "until": %d}' % (time.time() - 1))
        with output_directory(bucket) as work:
            (work / "mine").touch()
        assert f"{key_of(bucket)}/claim.json" not in keys(key_of(bucket))

    def test_of_two_that_write_in_spite_of_claims_one_wins(
        self, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Such as one that was suspended for longer than its claim holds."""
        wait, go_on, errors = threading.Event(), threading.Event(), []

        def slow() -> None:
            try:
                with output_directory(bucket) as work:
                    (work / "slow").write_text("slow")
                    wait.set()
                    go_on.wait()
            except InputError as error:
                errors.append(error)

        thread = threading.Thread(target=slow)
        thread.start()
        wait.wait()
        delete(f"{key_of(bucket)}/claim.json")
        on_another_machine(monkeypatch, tmp_path)
        with output_directory(bucket) as work:
            (work / "quick").write_text("quick")
        go_on.set()
        thread.join()
        assert [error.message for error in errors] == [
            f"another process has written {bucket} since this one began"
        ]
        assert files_of(input_directory(bucket)) == {"quick": "quick"}

    def test_a_writer_that_was_suspended_removes_nothing_of_the_next_one(
        self, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """It goes on after its index, and the next one's files, but not yet their index, are in the store."""
        location = objects.Location.of(bucket)
        first, next_one = objects.Tree(location), objects.Tree(location)
        work = first.check_out()
        (work / "weights").write_text("old")
        remove, put = objects.Tree._remove_unused, obstore.put
        with monkeypatch.context() as patch:
            patch.setattr(objects.Tree, "_remove_unused", lambda _: None)
            first.push(work)
        time.sleep(1.1)  # The store's clock counts seconds.
        on_another_machine(monkeypatch, tmp_path)
        work = next_one.check_out()
        (work / "weights").write_text("new")

        def put_late(store: Any, key: str, *rest: Any, **options: Any) -> Any:
            if key.endswith(objects.INDEX):
                remove(first)
            return put(store, key, *rest, **options)

        monkeypatch.setattr(obstore, "put", put_late)
        next_one.push(work)
        assert files_of(input_directory(bucket)) == {"weights": "new"}
        assert sum("/files/" in key for key in keys(key_of(bucket))) == 1
        remove(first)
        assert files_of(input_directory(bucket)) == {"weights": "new"}, "its version is not the last one"

    def test_work_is_pushed_after_a_disk_was_full(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(objects, "PUSH_SECONDS", 0.05)
        push, fails = objects.Tree.push, [OSError(errno.ENOSPC, "no space")]

        def push_or_fail(tree: objects.Tree, work: Path) -> None:
            if fails:
                raise fails.pop()
            push(tree, work)

        monkeypatch.setattr(objects.Tree, "push", push_or_fail)
        with output_directory(bucket) as work:
            (work / "checkpoint").write_text("epoch 1")
            deadline = time.monotonic() + 60
            while not places.has_directory(bucket):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert not fails

    def test_a_killed_writer_leaves_the_last_version_whole(self, bucket: str, tmp_path: Path) -> None:
        """It is killed after some of its files are in the store, but before the index is."""
        with output_directory(bucket) as work:
            (work / "weights").write_text("old")
            (work / "report").write_text("old")
        script = f"""
import os, signal, obstore
from recap_ctr.storage import objects
put, count = obstore.put, 0
def put_or_die(store, key, *rest, **options):
    if key.endswith("index.json"):
        os.kill(os.getpid(), signal.SIGKILL)
    return put(store, key, *rest, **options)
obstore.put = put_or_die
with objects.checked_out({bucket!r}) as work:
    (work / "weights").write_text("new")
    (work / "report").write_text("new, too")
"""
        environment = {**os.environ, objects.CACHE: str(tmp_path / "other"), "PYTHONPATH": str(ROOT / "src")}
        killed = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert sum("/files/" in key for key in keys(key_of(bucket))) == 3, "old (once) and two new ones"
        assert files_of(input_directory(bucket)) == {"weights": "old", "report": "old"}
        delete(f"{key_of(bucket)}/claim.json")  # As if two minutes had passed.
        with output_directory(bucket) as work:
            (work / "weights").write_text("newest")
        assert sum("/files/" in key for key in keys(key_of(bucket))) == 2, "what the killed one left is gone"

    def test_what_others_have_there_is_left_alone(self, bucket: str) -> None:
        put(f"{key_of(bucket)}/files/photo.jpg", b"theirs")
        with (
            pytest.raises(InputError, match=r"holds something else, such as .*photo\.jpg"),
            output_directory(bucket),
        ):
            pass
        assert keys(key_of(bucket)) == [f"{key_of(bucket)}/files/photo.jpg"]

    def test_a_damaged_or_missing_file_is_noticed(self, bucket: str) -> None:
        with output_directory(bucket) as work:
            (work / "weights").write_text("whole")
        (name,) = [key for key in keys(key_of(bucket)) if "/files/" in key]
        put(name, b"other")
        with pytest.raises(InputError, match="its content does not match its name"):
            input_directory(bucket)
        delete(name)
        with pytest.raises(InputError, match=f"nothing is at s3://bucket/{name}"):
            input_directory(bucket)
        put(
            f"{key_of(bucket)}/index.json",
            b'{"files": {"../../x": {"bytes": 1, "sha256": "%s"}}}' % (b"0" * 64),
        )
        with pytest.raises(InputError, match=r"names a file '../../x'"):
            input_directory(bucket)

    def test_a_served_artifact_changes_with_its_tree(
        self, bucket: str, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("recap_ctr.serve.snapshots.STORE_SECONDS", 0.0)
        with output_directory(bucket) as work:
            for path in packed.rglob("*"):
                if path.is_file():
                    target = work / "artifact" / path.relative_to(packed)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())
        snapshots = Snapshots(bucket, tmp_path)
        before = snapshots.signature()
        assert snapshots.signature() == before
        copy = snapshots.take()
        assert (copy / "manifest.json").read_bytes() == (packed / "manifest.json").read_bytes()
        with output_directory(bucket) as work:
            (work / "artifact" / "MODEL_CARD.md").write_text("another")
        assert snapshots.signature() != before


class TestErrors:
    def test_other_commands_don_t_make_directories_of_urls(self) -> None:
        with pytest.raises(InputError, match=r"s3://bucket/x: this command writes to directories"):
            take(Path("s3://bucket/x"), "mark.json")
        with pytest.raises(InputError, match="prepare, fit, train, logits, export and predict"):
            claim(Path("s3://bucket/x"), {}, finished="x", force=True)

    def test_without_the_library_the_error_says_how_to_install_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr("recap_ctr.storage.objects")
        monkeypatch.delitem(sys.modules, "recap_ctr.storage.objects")
        monkeypatch.setitem(sys.modules, "obstore", None)
        with pytest.raises(
            InputError, match=r"s3://bucket/x needs obstore\n  fix: pip install 'recap-ctr\[objects\]'"
        ):
            input_directory("s3://bucket/x")

    def test_no_secret_is_shown(self, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setattr(objects, "RETRIES", 0)
        with pytest.raises(InputError) as caught:
            input_directory(f"{server}/x")
        text = str(caught.value)
        assert "s3://bucket/x/index.json can't be reached" in text and "AWS_SECRET_ACCESS_KEY" in text
        assert SECRET not in text and "\nDebug" not in text

    @pytest.mark.parametrize(
        ("url", "environment", "message"),
        [
            (
                f"s3://KEY:{SECRET}@bucket/x",
                {},
                "a s3:// URL has credentials before the name of its bucket\n  fix: remove them, and set AWS_",
            ),
            (
                "s3://bucket/x",
                {"AWS_ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:9"},
                "s3://bucket/x/index.json can't be reached: .* HEAD http://127.0.0.1:9/bucket",
            ),
            ("s3://bucket/x", {"AWS_ENDPOINT_URL": f"no {SECRET}"}, "AWS_ENDPOINT_URL is no URL"),
            ("az://bucket/x", {}, "az://bucket.* can't be reached: .*Account must be specified"),
            (
                "az://bucket/x",
                {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": SECRET},
                "az://bucket.* can't be reached: .*Invalid Access Key",
            ),
            (
                "gs://bucket/x",
                {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere"},
                "gs://bucket.* can't be reached: .*\n  fix: .*GOOGLE_APPLICATION_CREDENTIALS",
            ),
        ],
    )
    def test_a_mistake_in_a_place_or_its_credentials_is_explained(
        self, url: str, environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(objects, "RETRIES", 0)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=message) as caught:
            places.has_directory(url)
        assert SECRET not in str(caught.value) and "\nDebug" not in str(caught.value)


def test_the_commands_from_and_to_a_store(
    bucket: str,
    click_log: pl.DataFrame,
    click_schema: Schema,
    tmp_path: Path,
    recap: Recap,
    monkeypatch: pytest.MonkeyPatch,
    one_process: None,
) -> None:
    """Prepare, train and predict from and to s3://, with the same bytes as on this machine."""
    schema = tmp_path / "schema.toml"
    schema.write_text(click_schema.to_toml())
    log = tmp_path / "clicks.parquet"
    click_log.write_parquet(log)
    put(f"{key_of(bucket)}/clicks.parquet", log.read_bytes())
    settings = ["--model", "lr", "--max-epochs", 1, "--threads", 1, "--no-baseline", "--device", "cpu"]

    for source, data, run, scores in (
        (log, tmp_path / "data", tmp_path / "run", tmp_path / "scores.parquet"),
        (
            f"{bucket}/clicks.parquet",
            f"{bucket}/data",
            f"{bucket}/run",
            f"{bucket}/scores.parquet",
        ),
    ):
        for command in (
            ["prepare", source, "--schema", schema, "--out", data],
            ["train", data, *settings, "--out", run],
            ["predict", run, source, "--out", scores],
        ):
            done = recap(*command)
            assert done.code == 0, done.err
            assert f"{command[-1]}".replace("s3:/b", "s3://b") in done.err

    assert PreparedData(Path(f"{bucket}/data")).fingerprint == PreparedData(tmp_path / "data").fingerprint
    weights = "model.safetensors"
    copy = input_directory(f"{bucket}/run", "artifact")
    assert (copy / weights).read_bytes() == (tmp_path / "run" / "artifact" / weights).read_bytes()
    ((stored, _),) = input_files(f"{bucket}/scores.parquet")
    assert pl.read_parquet(stored).equals(pl.read_parquet(tmp_path / "scores.parquet"))

    wrote = recap(
        "logits", f"{bucket}/run", f"{bucket}/data", "--out", f"{bucket}/teacher", "--device", "cpu"
    )
    assert wrote.code == 0 and f"{bucket}/teacher: " in wrote.err, wrote.err
    again = recap(
        "logits", f"{bucket}/run", f"{bucket}/data", "--out", f"{bucket}/teacher", "--device", "cpu"
    )
    assert again.code == 0 and "is up to date" in again.err
    student = ["--teacher", f"{bucket}/teacher", *settings, "--out", tmp_path / "student"]
    assert recap("train", f"{bucket}/data", *student).code == 0
    (table,) = read_report(tmp_path / "student").teachers
    assert table == table_checksum(input_directory(f"{bucket}/teacher"))

    again = recap("prepare", f"{bucket}/clicks.parquet", "--schema", schema, "--out", f"{bucket}/data")
    assert again.code == 0 and "is up to date" in again.err
    refused = recap(
        "predict", f"{bucket}/run", f"{bucket}/clicks.parquet", "--out", f"{bucket}/scores.parquet"
    )
    assert refused.code == 2 and f"{bucket}/scores.parquet exists" in refused.err

    def export(directory: Path, **_: object) -> list[object]:
        (directory / "artifact" / "graph").write_text("a graph")
        return []

    monkeypatch.setattr("recap_ctr.inference.export.export", export)
    exported = recap("export", f"{bucket}/run", "--threads", 1)
    assert exported.code == 0, exported.err
    assert (input_directory(f"{bucket}/run", "artifact") / "graph").read_text() == "a graph"
