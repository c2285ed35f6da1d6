import ctypes
import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recap_ctr.errors import InputError
from recap_ctr.storage import hashes
from recap_ctr.storage.claims import INPUTS, claim
from recap_ctr.storage.files import atomic_directory, atomic_file, read_json, write_json
from recap_ctr.storage.hashes import fingerprint, sha256
from recap_ctr.storage.locks import locked


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


class TestAtomicFile:
    def test_replaces_only_when_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "f"
        with atomic_file(path) as file:
            file.write(b"old")
            assert not path.exists()
        with atomic_file(path) as file:
            file.write(b"new")
            file.flush()
            assert path.read_bytes() == b"old"
        assert contents(tmp_path) == {"f": b"new"}

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    def test_an_error_keeps_the_old(self, error: type[BaseException], tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"old")
        with pytest.raises(error), atomic_file(tmp_path / "f") as file:
            file.write(b"new")
            raise error
        assert contents(tmp_path) == {"f": b"old"}

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_a_full_disk_keeps_the_old(
        self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "f").write_bytes(b"old")
        monkeypatch.setattr(os if call == "fsync" else Path, call, full_disk)
        with pytest.raises(OSError, match="No space left"), atomic_file(tmp_path / "f") as file:
            file.write(b"new")
        assert contents(tmp_path) == {"f": b"old"}

    def test_what_a_killed_writer_left_is_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / ".f.partial").write_bytes(b"x" * 100)
        with atomic_file(tmp_path / "f") as file:
            file.write(b"new")
        assert contents(tmp_path) == {"f": b"new"}


class TestAtomicDirectory:
    def test_appears_whole(self, tmp_path: Path) -> None:
        with atomic_directory(tmp_path / "deep" / "d") as partial:
            (partial / "sub").mkdir()
            (partial / "sub" / "f").write_bytes(b"1")
            assert not (tmp_path / "deep" / "d").exists()
        assert contents(tmp_path) == {"deep/d/sub/f": b"1"}

    @pytest.mark.parametrize("system_call", [True, False], ids=["exchange", "two renames"])
    def test_an_existing_one_is_exchanged(
        self, system_call: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not system_call:
            monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
        for number in (b"1", b"2", b"3"):
            with atomic_directory(tmp_path / "d") as partial:
                assert contents(partial) == {}
                (partial / number.decode()).write_bytes(number)
            assert contents(tmp_path) == {f"d/{number.decode()}": number}

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("old", [False, True])
    def test_an_error_leaves_what_was_there(
        self, error: type[BaseException], old: bool, tmp_path: Path
    ) -> None:
        if old:
            (tmp_path / "d").mkdir()
            (tmp_path / "d" / "f").write_bytes(b"old")
        before = contents(tmp_path)
        with pytest.raises(error), atomic_directory(tmp_path / "d") as partial:
            (partial / "f").write_bytes(b"new")
            raise error
        assert contents(tmp_path) == before
        assert (tmp_path / "d").exists() == old
        assert len(list(tmp_path.iterdir())) == old

    @pytest.mark.parametrize("call", ["fsync", "rename"])
    def test_a_full_disk_leaves_what_was_there(
        self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "f").write_bytes(b"old")
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())  # no exchange in one call
        monkeypatch.setattr(os if call == "fsync" else Path, call, full_disk)
        with pytest.raises(OSError, match="No space left"), atomic_directory(tmp_path / "d") as partial:
            (partial / "f").write_bytes(b"new")
        assert contents(tmp_path) == {"d/f": b"old"}

    def test_what_a_killed_writer_left_is_removed_first(self, tmp_path: Path) -> None:
        litter = tmp_path / ".d.partial"
        (litter / "sub").mkdir(parents=True)
        (litter / "sub" / "f").write_bytes(b"litter")
        (litter / "link").symlink_to(tmp_path / "outside")
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "keep").write_bytes(b"kept")
        with atomic_directory(tmp_path / "d") as partial:
            (partial / "f").write_bytes(b"new")
        assert contents(tmp_path) == {"d/f": b"new", "outside/keep": b"kept"}

    def test_a_link_stays_and_what_it_leads_to_is_exchanged(self, tmp_path: Path) -> None:
        (tmp_path / "v1").mkdir()
        (tmp_path / "v1" / "f").write_bytes(b"old")
        for link, target in (("current", "v1"), ("new", "v2")):
            (tmp_path / link).symlink_to(target)
            for number in (b"1", b"2"):
                with atomic_directory(tmp_path / link) as partial:
                    (partial / "f").write_bytes(number)
                assert (tmp_path / link).readlink() == Path(target)
                assert (tmp_path / target / "f").read_bytes() == number
        assert {path.name for path in tmp_path.iterdir()} == {"current", "new", "v1", "v2"}

    def test_a_link_in_the_place_of_the_partial_one_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "keep").write_bytes(b"kept")
        (tmp_path / ".d.partial").symlink_to("outside")
        with atomic_directory(tmp_path / "d") as partial:
            (partial / "f").write_bytes(b"new")
        assert contents(tmp_path) == {"d/f": b"new", "outside/keep": b"kept"}


class TestLock:
    def test_a_second_writer_is_refused_and_harms_nothing(self, tmp_path: Path) -> None:
        with atomic_directory(tmp_path / "d") as partial:
            (partial / "f").write_bytes(b"1")
            for _ in range(2):  # a lock belongs to an open file, so one process can play both
                with (
                    pytest.raises(InputError, match="another process is writing"),
                    atomic_directory(tmp_path / "d"),
                ):
                    pass
        assert contents(tmp_path) == {"d/f": b"1"}

    def test_is_given_back_after_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError), locked(tmp_path):
            raise ValueError
        with locked(tmp_path), pytest.raises(InputError, match="fix: wait for it"), locked(tmp_path):
            pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(derandomize=True, max_examples=80, deadline=None)
@given(value=JSON, other=JSON)
def test_json(value: object, other: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("json") / "v.json"
    write_json(path, value)
    assert read_json(path) == value
    same = json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (fingerprint(value) == fingerprint(other)) == same


def test_numbers_that_are_none_are_no_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "v", float("nan"))
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_said(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(data)
    with pytest.raises(InputError, match="is not valid JSON"):
        read_json(tmp_path / "v")


def test_sha256_reads_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "CHUNK_BYTES", 2)
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


class TestClaim:
    def test_work_is_resumed_and_done_once(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        assert not claim(out, {"seed": 1}, finished="done", force=False)
        (out / "half").write_bytes(b"1")
        assert not claim(out, {"seed": 1}, finished="done", force=False)
        assert (out / "half").exists()
        (out / "done").write_bytes(b"")
        assert claim(out, {"seed": 1}, finished="done", force=False)

    def test_other_work_is_replaced_only_by_force(self, tmp_path: Path) -> None:
        claim(tmp_path, {"seed": 1, "lr": 2}, finished="done", force=False)
        (tmp_path / "done").write_bytes(b"")
        with pytest.raises(InputError, match=r"belongs to other inputs \(changed: seed\)\n  fix: .*--force"):
            claim(tmp_path, {"seed": 2, "lr": 2}, finished="done", force=False)
        assert (tmp_path / "done").exists()
        assert not claim(tmp_path, {"seed": 2, "lr": 2}, finished="done", force=True)
        assert set(contents(tmp_path)) == {INPUTS}

    @pytest.mark.parametrize("force", [False, True])
    def test_what_is_not_ours_is_never_touched(self, force: bool, tmp_path: Path) -> None:
        (tmp_path / "theirs").write_bytes(b"1")
        with pytest.raises(InputError, match="holds something else"):
            claim(tmp_path, {}, finished="done", force=force)
        with pytest.raises(InputError, match="is a file"):
            claim(tmp_path / "theirs", {}, finished="done", force=force)
        assert contents(tmp_path) == {"theirs": b"1"}
