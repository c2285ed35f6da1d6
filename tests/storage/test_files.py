import ctypes
import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recap_ctr.errors import InputError
from recap_ctr.storage import files
from recap_ctr.storage.files import (
    append_file,
    atomic_directory,
    atomic_file,
    make_directory,
    new_file,
    read_json,
    read_object,
    scratch_directory,
    write_json,
)
from recap_ctr.storage.hashes import fingerprint
from recap_ctr.storage.locks import locked
from tests.support.preparing import contents


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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


class TestOneWriter:
    @pytest.mark.parametrize("name", [".f.partial", ".f.0123abcd.partial", ".f.lock"])
    def test_a_planted_link_is_not_followed(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "victim").write_bytes(b"precious")
        (tmp_path / name).symlink_to("victim")
        with suppress(OSError), atomic_file(tmp_path / "f") as file:
            file.write(b"new")
        assert (tmp_path / "victim").read_bytes() == b"precious"

    def test_neither_a_file_nor_a_link_is_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "victim").write_bytes(b"precious")
        (tmp_path / "link").symlink_to("victim")
        for name in ("link", "victim"):
            with pytest.raises(FileExistsError):
                new_file(tmp_path / name)
        with pytest.raises(OSError, match="symbolic link"):
            append_file(tmp_path / "link")
        assert (tmp_path / "victim").read_bytes() == b"precious"

    def test_no_two_writers_share_a_name(self, tmp_path: Path) -> None:
        with atomic_file(tmp_path / "f") as file:
            file.write(b"1")
            names = {entry.name for entry in tmp_path.iterdir()}
            with (
                pytest.raises(InputError, match="another process is writing"),
                atomic_file(tmp_path / "f", wait=False),
            ):
                pass
            assert {entry.name for entry in tmp_path.iterdir()} == names
        assert contents(tmp_path) == {"f": b"1"}

    def test_writers_take_turns(self, tmp_path: Path) -> None:
        def write(number: int) -> None:
            with atomic_file(tmp_path / "f") as file:
                for _ in range(20):
                    file.write(bytes([number]) * 10)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(8)))
        assert len(set((tmp_path / "f").read_bytes())) == 1
        assert set(contents(tmp_path)) == {"f"}

    def test_what_killed_writers_left_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".f.0123abcd.partial").write_bytes(b"half")
        (tmp_path / ".f.89abcdef.scratch").mkdir()
        (tmp_path / ".f.89abcdef.scratch" / "part").write_bytes(b"half")
        kept = {".g.0123abcd.partial", ".f.mine.partial", "f.0123abcd.partial"}
        for name in kept:
            (tmp_path / name).write_bytes(b"theirs")
        with atomic_file(tmp_path / "f") as file, scratch_directory(tmp_path / "f") as scratch:
            file.write(b"new")
            (scratch / "part").write_bytes(b"1")
        assert set(contents(tmp_path)) == {"f", *kept}

    def test_new_parents_are_synced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[Path] = []
        monkeypatch.setattr(files, "sync_directory", synced.append)
        make_directory(tmp_path / "a" / "b" / "c")
        make_directory(tmp_path / "a" / "b")
        assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


class TestChecksum:
    VALUE: ClassVar[dict[str, object]] = {"mean": 3.25, "fields": [{"name": "é", "size": 12}], "on": True}

    @pytest.mark.slow
    def test_every_flipped_bit_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "v.json"
        write_json(path, self.VALUE)
        whole = path.read_bytes()
        assert read_json(path) == self.VALUE
        for at, bit in product(range(len(whole)), range(8)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(InputError):
                read_json(path)
        for length in range(len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(InputError):
                read_json(path)

    def test_files_of_earlier_versions_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "v").write_text(json.dumps(self.VALUE, indent=2) + "\n")
        assert read_json(tmp_path / "v") == self.VALUE

    def test_keys_are_text_once_read(self, tmp_path: Path) -> None:
        write_json(tmp_path / "v", {10: 1, 9: (2, 3)})
        assert read_json(tmp_path / "v") == {"10": 1, "9": [2, 3]}
        with pytest.raises(ValueError, match="taken by the checksum"):
            write_json(tmp_path / "v", {"checksum": 1})

    @pytest.mark.parametrize("text", ["[]", "3", "null"])
    def test_another_value_than_an_object(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "v").write_text(text)
        with pytest.raises(InputError, match="is not a report: it holds"):
            read_object(tmp_path / "v", "a report")


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
    assume(not isinstance(value, dict) or "checksum" not in value)
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
