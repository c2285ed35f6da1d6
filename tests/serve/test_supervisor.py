"""Several processes: workers that die come back, versions change under load, and stopping loses nothing."""

import errno
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.errors import InputError
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.supervisor import Supervisor
from tests.conftest import Recap
from tests.support.fake_engine import write
from tests.support.running_server import Address, Load, Process

BODY = json.dumps({"rows": [{"site": "a", "tags": "x|y"}] * 3, "deadline_ms": 20000}).encode()
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun = []

    def begin(artifact: Path, **settings: Any) -> Process:
        config = ServeConfig(
            artifact=str(artifact),
            port=0,
            loader="tests.support.fake_engine:load",
            cost_seconds=0.05,
            deadline_ms=20_000,
            **settings,
        )
        state = tmp_path / "state"
        state.mkdir(exist_ok=True)
        begun.append(Process(config, state))
        return begun[-1]

    yield begin
    for process in begun:
        process.close()
    left = [path.name for path in (tmp_path / "state").glob("recap-serve-*")]
    assert not left, "the server leaves nothing behind"


def served(address: Address) -> str:
    found: str = address.ask("GET", "/model").json()["model"]
    return found


def test_a_killed_worker_comes_back_and_the_others_answer(tmp_path: Path, start: Start) -> None:
    server = start(write(tmp_path / "model", row_us=200), workers=2)
    server.wait("worker ready", 2)
    address = server.address
    with Load(address, BODY, threads=4) as load:
        time.sleep(0.4)
        victim = server.events("worker ready")[0]["worker"]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        server.wait("worker ready", 3)
        back = time.monotonic() - killed
        time.sleep(0.3)
    assert back < 6, f"{back:.1f} s"  # alone on its cores it takes one
    assert len(load.failures) <= 4, "no more than were under way"
    assert {answer.status for _, answer in load.answers} == {200}
    meanwhile = [sent for sent, _ in load.answers if killed < sent < killed + back]
    assert len(meanwhile) > 5
    # The counters of the dead one are not lost: all answers are counted, but for what died with it.
    found = address.ask("GET", "/metrics").body.decode()
    match = re.search(r'recap_requests_total{status="200"} (\d+)', found)
    assert match and len(load.answers) <= int(match[1]) <= len(load.answers) + len(load.failures)
    assert "recap_worker_starts_total 3" in found


def test_versions_change_under_load_without_a_lost_request(tmp_path: Path, start: Start) -> None:
    model = write(tmp_path / "model", seed=1, row_us=100)
    server = start(model, workers=2)
    server.wait("worker ready", 2)
    address = server.address
    first = served(address)
    with Load(address, BODY) as load:
        time.sleep(0.3)
        write(model, seed=2, row_us=100)
        server.send(signal.SIGHUP)
        swapped = server.wait("swapped")
        time.sleep(0.2)
        write(model, seed=3, broken="checksum")
        server.send(signal.SIGHUP)
        refused = server.wait("refused")
        write(model, seed=3, broken="nan")
        server.send(signal.SIGHUP)
        not_finite = server.wait("refused", 2)
        time.sleep(0.2)
    assert not load.failures and {answer.status for _, answer in load.answers} == {200}
    by_model: dict[str, set[bytes]] = {}
    for _, answer in load.answers:
        by_model.setdefault(answer.json()["model"], set()).add(json.dumps(answer.json()["rows"]).encode())
    assert set(by_model) == {first, swapped["model"]}
    assert all(len(scores) == 1 for scores in by_model.values()), "no answer mixes two versions"
    assert swapped["shadow"]["rows"] > 0 and swapped["shadow"]["mean_difference"] > 0
    assert "differs from its checksum" in refused["reason"] and str(model) in refused["reason"]
    assert "recap-serve-" not in refused["reason"]
    assert "no probabilities" in not_finite["reason"]
    told = address.ask("GET", "/model").json()
    assert told["model"] == swapped["model"] and told["swap"]["outcome"] == "refused"
    found = address.ask("GET", "/metrics").body.decode()
    assert 'recap_swaps_total{outcome="swapped"} 2' in found and "recap_shadow_rows_total" in found

    server.send(signal.SIGUSR1)
    server.wait("rolled back")
    end = time.monotonic() + 5
    while served(address) != first:
        assert time.monotonic() < end
    # A worker that starts after that serves what the others serve.
    os.kill(server.events("worker ready")[0]["worker"], signal.SIGKILL)
    assert server.wait("worker ready", 3)["model"] == first
    # And forth again, the new worker too.
    server.send(signal.SIGUSR1)
    server.wait("rolled back", 2)
    end = time.monotonic() + 5
    while {served(address) for _ in range(8)} != {swapped["model"]}:
        assert time.monotonic() < end


def test_watching_takes_a_new_version_by_itself(tmp_path: Path, start: Start) -> None:
    write(tmp_path / "v1", seed=1)
    write(tmp_path / "v2", seed=2)
    link = tmp_path / "current"
    link.symlink_to("v1")
    server = start(link, watch=True)
    first = served(server.address)
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").replace(link)
    assert server.wait("swapped", seconds=15)["model"] != first


def test_an_offer_must_take_the_requests_that_are_served(tmp_path: Path, start: Start) -> None:
    model = write(tmp_path / "model", extra="extra")
    server = start(model)
    assert server.address.score({"rows": [{"extra": "q"}]}).status == 200
    write(model, seed=2)
    server.send(signal.SIGHUP)
    assert "'extra'" in server.wait("refused")["reason"]
    write(model, extra="extra")
    server.send(signal.SIGHUP)
    server.wait("unchanged")
    assert server.address.score({"rows": [{"extra": "q"}]}).status == 200


def test_stopping_finishes_what_was_accepted(tmp_path: Path, start: Start) -> None:
    server = start(write(tmp_path / "model", start_us=100_000))
    address = server.address
    with Load(address, BODY, threads=3) as load:
        time.sleep(0.25)  # all three wait for their scores
        server.send(signal.SIGTERM)
        assert server.popen.wait(15) == 0
        stopped = time.monotonic()
    accepted = [answer for sent, answer in load.answers if sent < stopped]
    assert len(accepted) >= 3 and {answer.status for answer in accepted} == {200}
    # Later ones find nobody: refused connections, not broken answers.
    assert all(isinstance(error, ConnectionError) for _, error in load.failures)
    assert server.events("stopped")


def test_workers_end_when_the_supervisor_is_killed(tmp_path: Path, start: Start) -> None:
    server = start(write(tmp_path / "model"))
    worker = server.wait("worker ready")["worker"]
    server.popen.kill()
    server.popen.wait()
    end = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < end
        time.sleep(0.05)
    for left in (tmp_path / "state").glob("recap-serve-*"):  # nobody was left to tidy up
        for file in sorted(left.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        left.rmdir()


def test_what_others_can_reach_needs_a_token(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.com"):
        with pytest.raises(InputError, match="no token is set"):
            Supervisor(ServeConfig(artifact=str(model), host=host), None, lambda *_: None)


def test_the_command_says_what_is_wrong(
    tmp_path: Path, recap: Recap, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = recap("serve", tmp_path / "nothing", "--port", 0)
    assert missing.code == 2 and "holds no artifact" in missing.err
    model = write(tmp_path / "model")
    exposed = recap("serve", model, "--host", "0.0.0.0")
    assert exposed.code == 2 and "RECAP_TOKEN" in exposed.err
    monkeypatch.setenv("RECAP_TOKEN", "short")
    short = recap("serve", model)
    assert short.code == 2 and "openssl rand" in short.err
    monkeypatch.delenv("RECAP_TOKEN")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = recap("serve", model, "--port", taken.getsockname()[1])
    assert busy.code == 2 and "--port" in busy.err


def test_a_damaged_artifact_is_not_served(tmp_path: Path, start: Start, recap: Recap) -> None:
    server = start(write(tmp_path / "model", broken="checksum"))
    assert server.popen.wait(20) != 0
    refused = recap("serve", tmp_path / "model", "--port", 0)
    assert refused.code == 2 and str(tmp_path / "model") in refused.err, "named as it was given"
    assert "recap-serve-" not in refused.err


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "model")
    (model / "a-first-file").write_bytes(b"1")
    supervisor = Supervisor(ServeConfig(artifact=str(model)), None, lambda *_: None)
    supervisor._state = tmp_path / "state"
    supervisor._state.mkdir()
    supervisor._models[supervisor._state / "artifact-0"] = "one that serves"
    supervisor._current = supervisor._state / "artifact-0"
    copy = shutil.copyfile

    def full(source: Path, into: Path) -> None:
        if source.name == "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(into))
        copy(source, into)

    monkeypatch.setattr(shutil, "copyfile", full)
    supervisor._try()
    assert not any(supervisor._state.iterdir())
    said = supervisor._history
    assert said["outcome"] == "refused" and str(supervisor._state) not in said["reason"]
    assert f"No space left on device: '{model}/manifest.json'" in said["reason"]
