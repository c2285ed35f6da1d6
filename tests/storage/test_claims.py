"""Claims of an output: whose it is, what it was made from, and when it may be written."""

import json
from pathlib import Path

import pytest

from recap_ctr.errors import InputError
from recap_ctr.storage import files
from recap_ctr.storage.claims import INPUTS, claim, is_made, output_file
from recap_ctr.storage.hashes import fingerprint
from tests.support.preparing import contents


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


class TestOutputFile:
    """A file with a record of what it was made from; the record is right at every moment."""

    def write(self, out: Path, content: bytes, inputs: dict[str, int] | None, force: bool = False) -> None:
        with output_file(out, inputs, force=force) as file:
            file.write(content)

    def test_is_made_once(self, tmp_path: Path) -> None:
        out = tmp_path / "s.csv"
        assert not is_made(out, {"a": 1}, force=False)
        self.write(out, b"1", {"a": 1})
        assert is_made(out, {"a": 1}, force=False)
        with pytest.raises(InputError, match="exists"):
            is_made(out, {"a": 2}, force=False)
        with pytest.raises(InputError, match="exists"):
            self.write(out, b"2", {"a": 2})
        assert contents(tmp_path)["s.csv"] == b"1"
        self.write(out, b"2", {"a": 2}, force=True)
        assert is_made(out, {"a": 2}, force=False)
        out.write_bytes(b"changed by hand")
        with pytest.raises(InputError, match="exists"):
            is_made(out, {"a": 2}, force=False)

    @pytest.mark.parametrize("old", [False, True])
    @pytest.mark.parametrize("call", ["replace", "sync"])
    def test_killed_around_the_rename(
        self, call: str, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before the rename the old file is there, or none; after it the new one, and the same command knows it."""
        out = tmp_path / "s.csv"
        if old:
            self.write(out, b"old", {"a": 1})

        owner, name = (Path, "replace") if call == "replace" else (files, "sync_directory")
        real = getattr(owner, name)

        def dies(*arguments: Path) -> object:
            if call == "replace" and arguments[-1] == out:
                raise KeyboardInterrupt
            if call == "sync" and out.is_file() and out.read_bytes() == b"new":
                raise KeyboardInterrupt
            return real(*arguments)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(owner, name, dies)
            self.write(out, b"new", {"a": 2}, force=True)
        if call == "sync":
            assert is_made(out, {"a": 2}, force=False)
        elif old:
            assert out.read_bytes() == b"old"
            with pytest.raises(InputError, match="exists"):
                is_made(out, {"a": 2}, force=False)
        else:
            assert not is_made(out, {"a": 2}, force=False)

    def test_a_record_of_an_earlier_version(self, tmp_path: Path) -> None:
        (tmp_path / "s.csv").write_bytes(b"1")
        (tmp_path / f".s.csv.{INPUTS}").write_text(json.dumps(fingerprint({"a": 1})))
        assert is_made(tmp_path / "s.csv", {"a": 1}, force=False)

    def test_rows_of_a_pipe_leave_no_record(self, tmp_path: Path) -> None:
        self.write(tmp_path / "s.csv", b"1", {"a": 1})
        self.write(tmp_path / "s.csv", b"2", None, force=True)
        assert contents(tmp_path) == {"s.csv": b"2"}
