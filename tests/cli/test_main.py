"""The command as a whole: conventions, help, version, completion, errors, exit codes and Ctrl-C."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recap_ctr.cli.errors import as_command_error
from recap_ctr.cli.main import GROUPS
from recap_ctr.cli.options import SECTIONS
from recap_ctr.data.encode import Encoder
from recap_ctr.data.shards import PreparedData
from recap_ctr.inference.torch_backend import load_artifact
from recap_ctr.jobs.executor import JobError
from recap_ctr.storage.files import read_json
from tests.conftest import Done, Recap, contents
from tests.support.command_line import all_commands, assert_refused, only_json

COMMAND = [sys.executable, "-m", "recap_ctr"]
HEAVY = ("torch", "polars")
RUN_AND_LIST_HEAVY_IMPORTS = f"""
import sys
from recap_ctr.cli.main import main
try:
    main()
finally:
    print("imported:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
"""


def run_alone(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, which says at the end which heavy modules it has imported."""
    return subprocess.run(
        [sys.executable, "-c", RUN_AND_LIST_HEAVY_IMPORTS, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


class TestConventions:
    @pytest.mark.parametrize("name", all_commands())
    def test_options(self, name: str, recap: Recap) -> None:
        command = all_commands()[name]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--quiet", "-q"} <= options
        assert "--json" in options or name == "serve"  # Its log is JSON, one event a line.
        # Stages never replace each other, and a page is made from its report each time.
        if "--out" in options and name not in ("fit", "bench", "report", "diagnose", "plan", "dial", "drift"):
            assert "--force" in options
        if name in ("prepare", "train", "tune", "fit", "synthetic", "demo"):
            assert "--seed" in options
        if name not in (
            "inspect",
            "models",
            "synthetic",
            "datasets",
            "download",
            "report",
            "score",
            "apply",
            "sign",
            "push",
            "pull",
        ):
            assert "--threads" in options
        if name in ("train", "tune", "fit", "plan", "bench", "diagnose"):
            assert "--set" in options
        assert all(parameter.help for parameter in command.params)
        shown = recap(*name.split(), "--help")
        assert (shown.code, shown.err) == (0, "")
        assert f"Example: recap {name} " in shown.out
        assert "docs/glossary.md" in shown.out
        for line in command.help.splitlines():
            if "Example:" in line:
                for word in line.split():
                    assert not word.startswith("--") or word in options, f"{line}: no option {word}"
        assert recap(*name.split(), "-h") == shown

    def test_help_lists_options_in_sections(self, recap: Recap) -> None:
        shown = re.split(r"^([A-Z][a-z ]+):(?: |$)", recap("fit", "--help").out, flags=re.MULTILINE)
        sections = dict(zip(shown[1::2], shown[2::2], strict=True))
        sections = {title: text for title, text in sections.items() if title in SECTIONS}
        assert list(sections) == list(SECTIONS), "the sections come in one order"
        for title, option in (
            ("Arguments", "DATA"),
            ("Options", "--budget"),
            ("Raw files", "--label"),
            ("Recipe", "--teachers"),
            ("Machine", "--engine"),
            ("Output", "--keep-state"),
        ):
            assert [name for name, text in sections.items() if f"  {option}" in text] == [title]

    @pytest.mark.slow
    def test_the_whole_way_in_json(self, raw: Path, recap: Recap) -> None:
        """Each command prints one JSON object and nothing else; quiet, it says nothing at all."""

        def call(*arguments: object) -> dict[str, Any]:
            done = recap(*arguments, "--json", "-q")
            assert (done.code, done.err) == (0, "")
            return only_json(done.out)

        log, schema, data, run = (raw / name for name in ("log.parquet", "inferred.toml", "data", "run"))
        drawn = call("synthetic", "--rows", 900, "--fields", 3, "--out", log)
        assert drawn["rows"] == pl.read_parquet(log).height == 900
        inferred = call("schema", "infer", log, "--label", "click", "--out", schema)
        assert [column["column"] for column in inferred["columns"]] == ["row", "click", "f1", "f2", "f3"]
        made = call("prepare", log, "--schema", schema, "--out", data)
        assert made["splits"]["train"]["rows"] == 720
        assert made["done_before"] is False
        trained = call("train", data, "--config", raw / "train.toml", "--threads", 1, "--out", run)
        assert trained == read_json(run / "report.json")
        measured = call("evaluate", run, log, "--threads", 1)
        assert measured["rows"] == 900
        scored = call("predict", run / "artifact", log, "--out", raw / "s.csv", "--threads", 1)
        assert scored["rows"] == 900
        assert scored["unseen"].keys() == {"f1", "f2", "f3"}
        assert call("inspect", run)["kind"] == "artifact"
        assert call("inspect", data)["kind"] == "prepared data"

    @pytest.mark.slow
    def test_the_whole_way_in_words(self, raw: Path, recap: Recap) -> None:
        """Tables go to standard output, what is said along the way to standard error."""
        log, schema, data, run = (raw / name for name in ("clicks.csv", "schema.toml", "data", "run"))
        training = ("--config", raw / "train.toml", "--threads", 1)
        steps: list[tuple[tuple[object, ...], str, str]] = [
            (("synthetic", "--rows", 500, "--out", raw / "s.csv"), "", "best possible model"),
            (
                ("schema", "infer", log, "--label", "click", "--out", raw / "i.toml"),
                "verdict",
                "recap prepare",
            ),
            (("prepare", log, "--schema", schema, "--out", data), "clicked", "is ready"),
            (("train", data, *training, "--out", run), "logistic regression", "epoch 2: train loss"),
            (("evaluate", run, log), "base rate", "on held-out rows after training"),
            (("predict", run, log), "row,click,site,ad,user,price,tags,score,logit", "600 rows."),
            (("predict", run, log, "--out", raw / "scores.csv"), "", "calibrated probability"),
            (("logits", run, data, "--split", "train", "--out", raw / "l"), "", "recap train"),
            (("inspect", run), "every file has its checksum", "It is whole"),
            (("inspect", data), "vocabulary", "recap fit"),
            (("models",), "fcn", "can be trained"),
            (("datasets",), "criteo-x4", "data sets"),
        ]
        for arguments, out, err in steps:
            done = recap(*arguments)
            assert done.code == 0, done.err
            assert out in done.out
            assert err in done.err
            last = done.err.splitlines()[-1]  # What to do next, or what the figures mean.
            assert "recap " in last or arguments[0] in ("evaluate", "predict"), last


class TestHelp:
    def test_commands_are_grouped(self, recap: Recap) -> None:
        done = recap("--help")
        assert (done.code, done.err) == (0, "")
        assert list(GROUPS) == ["Start here", "Data", "Train", "Update", "Deploy", "Research"]
        sections = re.split(r"^([A-Z][\w ]+):\n", done.out, flags=re.MULTILINE)
        listed = dict(zip(sections[1::2], sections[2::2], strict=True))
        names = {title: re.findall(r"^  (\w+)", listed[title], re.MULTILINE) for title in GROUPS}
        assert {name for group in names.values() for name in group} >= {
            name.split()[0] for name in all_commands()
        }
        assert names["Start here"][:2] == ["demo", "fit"]
        assert "schema" in names["Data"]
        assert "docs/glossary.md" in done.out
        assert "..." not in done.out.replace("[ARGS]...", ""), "a line of help is cut off"

    def test_no_command_shows_the_help(self, recap: Recap) -> None:
        for group in ((), ("schema",)):
            done = recap(*group)
            assert (done.code, done.out) == (2, "")
            assert done.err == recap(*group, "--help").out

    @pytest.mark.slow
    @pytest.mark.parametrize("option", ["--help", "--version"])
    def test_help_and_version_import_nothing_heavy(self, option: str) -> None:
        done = run_alone(option)
        assert done.returncode == 0
        assert done.stderr == "imported:\n"

    def test_version(self, recap: Recap) -> None:
        done = recap("--version")
        assert (done.code, done.err) == (0, "")
        assert re.fullmatch(r"recap \d+\.\d+\.\d+\S*\n", done.out)


class TestCompletion:
    """The protocol between the shell and the command; shells get the script by `recap --install-completion`."""

    LINES = (
        ("recap pred", ["predict"]),
        ("recap prepare --split t", ["time"]),
        ("recap train data --model rec", ["recap"]),
        ("recap prepare --dataset ml", ["ml-1m"]),
        ("recap bench fc", ["fcn-scaling"]),
        ("recap train data --max", ["--max-epochs"]),
    )

    def request(self, shell: str, line: str) -> dict[str, str]:
        """Return the environment in which the shell calls the command."""
        return {
            "_RECAP_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    @pytest.mark.parametrize(("line", "offers"), LINES)
    def test_offers(
        self, shell: str, line: str, offers: list[str], recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in self.request(shell, line).items():
            monkeypatch.setenv(name, value)
        done = recap()
        assert (done.code, done.err) == (0, "")
        values = {
            "bash": done.out.splitlines(),
            "zsh": re.findall(r'"([^"]+)"(?::"[^"]*")?', done.out),
            "fish": [entry.partition("\t")[0] for entry in done.out.splitlines()],
        }
        assert values[shell] == offers

    @pytest.mark.slow
    @pytest.mark.parametrize(("line", "offers"), LINES[:4])
    def test_nothing_heavy_is_imported(self, line: str, offers: list[str]) -> None:
        done = run_alone(**self.request("bash", line))
        assert (done.returncode, done.stderr) == (0, "imported:\n")
        assert done.stdout.splitlines() == offers

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_script(self, shell: str) -> None:
        done = run_alone(_RECAP_COMPLETE=f"source_{shell}")
        assert done.returncode == 0
        assert f"_RECAP_COMPLETE=complete_{shell}" in done.stdout

    @pytest.mark.slow
    def test_in_a_real_bash(self, tmp_path: Path) -> None:
        (tmp_path / "recap").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m recap_ctr "$@"\n')
        (tmp_path / "recap").chmod(0o755)
        script = run_alone(_RECAP_COMPLETE="source_bash").stdout
        ask = 'COMP_WORDS=(recap pred); COMP_CWORD=1; _recap_completion recap; echo "${COMPREPLY[@]}"'
        done = subprocess.run(
            ["bash", "--norc", "-c", f"{script}\n{ask}"],
            env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (0, "predict\n"), done.stderr


USAGE_ERRORS: dict[str, tuple[tuple[object, ...], str]] = {
    "mistyped command": (("trian",), "no such command 'trian'; did you mean 'train'?"),
    "mistyped subcommand": (("schema", "infr"), "no such command 'infr'; did you mean 'infer'?"),
    "unknown command": (("nonsense",), "no such command 'nonsense'"),
    "mistyped option": (("train", "data", "--modle", "fcn"), "no such option: --modle; did you mean --model"),
    "unknown option": (("--nonsense",), "no such option: --nonsense"),
    "missing argument": (("predict",), "missing argument"),
    "missing option": (("train", "data"), "missing option '--out'"),
    "missing choice": (("bench", "--data", "x"), "missing argument 'table'. Choose from: table1, ablation"),
    "missing value": (("train", "data", "--out"), "'--out' requires an argument"),
    "mistyped choice": (
        ("fit", "data", "--out", "x", "--preset", "papr"),
        "'papr' is not one of 'default', 'paper'; did you mean 'paper'?",
    ),
    "too small": (("train", "data", "--out", "x", "--threads", 0), "'--threads'"),
    "no number": (("synthetic", "--rows", "many", "--out", "x.csv"), "'--rows'"),
    "too few rows": (("demo", "--rows", 10), "'--rows'"),
    "extra argument": (("models", "fcn"), "unexpected extra argument(s) (fcn)"),
}


class TestErrors:
    @pytest.mark.parametrize("name", USAGE_ERRORS)
    def test_usage(self, name: str, recap: Recap) -> None:
        arguments, words = USAGE_ERRORS[name]
        assert_refused(recap(*arguments), words, "fix: see `recap", "--help`")

    @pytest.mark.parametrize("name", USAGE_ERRORS)
    def test_usage_in_json(self, name: str, recap: Recap) -> None:
        arguments, words = USAGE_ERRORS[name]
        is_last = name != "missing value"  # Otherwise --json would be that value.
        done = recap(*arguments, "--json") if is_last else recap(*arguments[:-1], "--json", arguments[-1])
        assert (done.code, done.err) == (2, "")
        error = only_json(done.out)["error"]
        assert error.keys() == {"message", "fix"}
        assert words in error["message"]
        assert error["fix"].startswith("see `recap")

    def test_bad_input_in_json(self, tmp_path: Path, recap: Recap) -> None:
        done = recap("inspect", tmp_path / "nowhere", "--json")
        assert (done.code, done.err) == (2, "")
        error = only_json(done.out)["error"]
        assert error["message"] in recap("inspect", tmp_path / "nowhere").err

    @pytest.mark.slow
    def test_what_comes_after_two_dashes_is_no_option(self, packed: Path, recap: Recap) -> None:
        assert_refused(recap("predict", packed, "--", "--json"), "--json")

    def test_a_failed_job(self, packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise JobError("teacher 1 ended without a result, with code -9")

        monkeypatch.setattr(Encoder, "load", fail)
        done = recap("inspect", packed)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("error: teacher 1 ended without a result")
        assert "fix: run the same command again" in done.err
        assert "code -9" in only_json(recap("inspect", packed, "--json").out)["error"]["message"]

    def test_a_fault_of_ours_is_shown_as_one(
        self, packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fault(*_: object) -> None:
            raise ZeroDivisionError("ours")

        monkeypatch.setattr(Encoder, "load", fault)
        with pytest.raises(ZeroDivisionError):
            recap("inspect", packed)
        assert capsys.readouterr().out == ""
        with pytest.raises(ZeroDivisionError):
            recap("inspect", packed, "--json")
        assert only_json(capsys.readouterr().out)["error"]["message"] == "ZeroDivisionError: ours"


class TestInterrupt:
    def test_message_and_code(self, packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        fix = "run the same command again: nothing is half-written, and it goes on from what is finished"
        monkeypatch.setattr(Encoder, "load", interrupt)
        assert recap("inspect", packed) == Done(130, "", f"error: interrupted\n  fix: {fix}\n")
        done = recap("inspect", packed, "--json")
        assert (done.code, done.err) == (130, "")
        assert only_json(done.out) == {"error": {"message": "interrupted", "fix": fix}}

    @pytest.mark.slow
    @pytest.mark.parametrize("as_json", [False, True])
    def test_ctrl_c_in_a_terminal(
        self, as_json: bool, raw: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        arguments = [
            "train",
            str(prepared.path),
            "--config",
            str(raw / "train.toml"),
            "--out",
            str(raw / "run"),
        ]
        long_run = ["--max-epochs", "2000", "--set", "train.patience=2000", "--threads", "1"]
        with subprocess.Popen(
            [*COMMAND, *arguments, *long_run, *(["--json"] if as_json else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                assert process.stderr is not None
                assert any("epoch 2:" in line for line in process.stderr)
                os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal.
                out, error = process.communicate(timeout=60)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 130
        assert "Traceback" not in error
        if as_json:
            assert only_json(out)["error"]["message"] == "interrupted"
        else:
            assert out == ""
            assert "error: interrupted\n  fix: run the same command again" in error
            assert not (raw / "run" / "artifact").exists()
            assert not list((raw / "run").glob(".*partial*"))


class TestOutputs:
    @pytest.mark.parametrize("force", [[], ["--force"]])
    def test_what_is_not_ours_is_left_alone(
        self, force: list[str], raw: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        (raw / "thesis").mkdir()
        (raw / "thesis" / "chapter.txt").write_text("years of work")
        for out in (raw / "thesis", raw / "thesis" / "chapter.txt"):
            for command in (
                ("train", prepared.path),
                ("prepare", raw / "clicks.csv", "--schema", raw / "schema.toml"),
                ("demo",),
            ):
                assert_refused(recap(*command, "--out", out, *force), "choose another --out")
        assert contents(raw / "thesis").keys() == {"chapter.txt"}

    @pytest.mark.slow
    def test_places_that_can_not_be(
        self, raw: Path, packed: Path, prepared: PreparedData, recap: Recap
    ) -> None:
        rows = raw / "clicks.csv"
        for place in (rows / "below", Path("/proc/nowhere/deeper"), raw / ("x" * 300)):
            for arguments in (
                ("prepare", rows, "--schema", raw / "schema.toml", "--out", place),
                ("train", prepared.path, "--config", raw / "train.toml", "--out", place),
                ("predict", packed, rows, "--out", place / "out.csv"),
                ("schema", "infer", rows, "--label", "click", "--out", place / "s.toml"),
                ("synthetic", "--rows", 10, "--out", place / "s.csv"),
                ("demo", "--rows", 5_000, "--out", place),
            ):
                assert_refused(recap(*arguments))


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Let writes beyond `size` fail, as on a full disk, whoever makes them."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


class TestDisk:
    @pytest.mark.slow
    @pytest.mark.parametrize("size", [0, 1_500, 4_000])
    def test_no_room(self, size: int, raw: Path, packed: Path, prepared: PreparedData, recap: Recap) -> None:
        """Every writer meets the limit; each says so, leaves no litter, and succeeds once there is room."""
        rows = raw / "clicks.csv"
        for arguments in (
            ("prepare", rows, "--schema", raw / "schema.toml", "--out", raw / "data"),
            ("predict", packed, rows, "--out", raw / "out.csv"),
            ("predict", packed, rows, "--out", raw / "out.parquet"),
            ("predict", packed, rows, "--out", raw / "out.arrow"),
            ("synthetic", "--rows", 1_000, "--out", raw / "synthetic.parquet"),
        ):
            before = contents(raw)
            with no_file_larger_than(size):
                done = recap(*arguments, "-q")
            assert_refused(done, "no space left on the disk", "run the same command again")
            assert contents(raw) == before
        settings = ("--config", raw / "train.toml", "--threads", 1, "-q")
        train = ("train", prepared.path, *settings, "--out", raw / "run")
        with no_file_larger_than(size):
            assert_refused(recap(*train), "no space left on the disk")
        assert not (raw / "run" / "artifact").exists()
        assert not list((raw / "run").glob(".*"))
        assert recap(*train).code == 0
        load_artifact(raw / "run")

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (OSError(errno.EIO, "x", "/somewhere"), "the disk failed to read or write (/somewhere)"),
            (OSError(errno.EMFILE, "x"), "too many files are open at once"),
            (OSError(errno.ENFILE, "x"), "too many files are open at once"),
            (OSError(errno.ENOMEM, "x"), "not enough memory"),
            (MemoryError(), "not enough memory"),
            (
                pl.exceptions.ComputeError("Input/output error (os error 5)"),
                "the disk failed to read or write",
            ),
        ],
    )
    def test_what_the_machine_lacks(self, error: BaseException, message: str) -> None:
        shown = as_command_error(error)
        assert shown is not None
        assert shown.message == message
        assert shown.code != 0
        assert "run the same command again" in (shown.fix or "")

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS])
    @pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
    def test_what_the_system_refuses(
        self, number: int, call: str, raw: Path, packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number), "/somewhere")

        owner: Any = os if call == "fsync" else Path
        before = contents(raw)
        word = "no space left" if number in (errno.ENOSPC, errno.EDQUOT) else "no permission"
        for arguments in (
            ("prepare", raw / "clicks.csv", "--schema", raw / "schema.toml", "--out", raw / "new" / "data"),
            ("predict", packed, raw / "clicks.csv", "--out", raw / "new" / "out.parquet"),
            ("schema", "infer", raw / "clicks.csv", "--label", "click", "--out", raw / "new" / "schema.toml"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(owner, call, refuse)
                assert_refused(recap(*arguments), word, "/somewhere")
            assert contents(raw) == before

    def test_rights_to_read(
        self, raw: Path, packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Root may read everything, so the refusal is played."""
        real: Callable[..., Any] = Path.open

        def guarded(path: Path, *arguments: Any, **settings: Any) -> Any:
            if path.name == "clicks.csv":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *arguments, **settings)

        monkeypatch.setattr(Path, "open", guarded)
        assert_refused(recap("predict", packed, raw / "clicks.csv"), "ermission", "clicks.csv")
