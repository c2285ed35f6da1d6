"""Commands that put a model into production, and a server that Ctrl-C stops without losing a request."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recap_ctr.data.shards import PreparedData
from tests.conftest import Recap
from tests.support.command_line import assert_refused, only_json
from tests.support.running_server import Address


class TestDial:
    @pytest.mark.slow
    def test_in_words_and_in_json(self, packed: Path, tmp_path: Path, recap: Recap) -> None:
        call = ("dial", packed, "--seconds", "0.01", "--threads", 1)
        result = only_json(recap(*call, "--json").out)
        assert len(result["settings"]) == 1
        done = recap(*call, "--out", tmp_path / "dial")
        assert "A millisecond scores" in done.out
        assert f"Open {tmp_path / 'dial'}" in done.err
        assert (tmp_path / "dial" / "dial.json").is_file()

    def test_without_an_artifact(self, tmp_path: Path, recap: Recap) -> None:
        assert_refused(recap("dial", tmp_path), "holds no artifact")


def test_export_offers_only_what_it_can_make(packed: Path, recap: Recap) -> None:
    done = recap("export", packed, "--format", "onx")
    assert_refused(done, "'onx' is not one of 'onnx'; did you mean 'onnx'?", "recap export --help")


def test_serve_listens_beyond_this_machine_only_with_a_token(
    packed: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECAP_TOKEN", raising=False)
    assert_refused(recap("serve", packed, "--host", "0.0.0.0", "--port", 0), "token")


@pytest.mark.slow
def test_ctrl_c_stops_a_server_after_it_has_answered(packed: Path, prepared: PreparedData) -> None:
    command = [sys.executable, "-m", "recap_ctr", "serve", str(packed), "--port", "0", "--threads", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "RECAP_TOKEN"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as server:
        try:
            assert server.stderr is not None
            ready = server.stderr.readline()
            match = re.search(r"answers at http://127\.0\.0\.1:(\d+)", ready)
            assert match, ready
            answer = Address(int(match[1])).score({"rows": [{"site": "f1_1", "ad": "f2_1"}]})
            assert answer.status == 200
            os.killpg(server.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal.
            out, error = server.communicate(timeout=60)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
    assert server.returncode == 0
    assert "Traceback" not in error
    events = [json.loads(line)["event"] for line in out.splitlines()]
    assert events[-1] == "stopped"
