"""Several processes: dead workers come back, versions change under load, and stopping loses no request."""

import json
import os
import re
import signal
import socket
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
from tests.support.running_server import Address, Load, Process, wait_until

BODY = json.dumps({"rows": [{"site": "a", "tags": "x|y"}] * 3, "deadline_ms": 20000}).encode()
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes = []

    def start_server(artifact: Path, **options: Any) -> Process:
        config = ServeConfig(
            artifact=str(artifact),
            port=0,
            loader="tests.support.fake_engine:load",
            cost_seconds=0.05,
            deadline_ms=20_000,
            **options,
        )
        state = tmp_path / "state"
        state.mkdir(exist_ok=True)
        processes.append(Process(config, state))
        return processes[-1]

    yield start_server
    for process in processes:
        process.close()
    left = [path.name for path in (tmp_path / "state").glob("recap-serve-*")]
    assert not left, "the server leaves nothing behind"


def serving_model(address: Address) -> str:
    model: str = address.ask("GET", "/model").json()["model"]
    return model


def swaps(address: Address) -> dict[str, float]:
    return address.counter("recap_swaps_total", "outcome")


@pytest.mark.slow
def test_a_killed_worker_comes_back_and_the_others_answer(tmp_path: Path, start: Start) -> None:
    begun = time.monotonic()
    server = start(write(tmp_path / "model", row_us=200), workers=2)
    server.wait("worker ready", 2)
    first_start = time.monotonic() - begun
    address = server.address
    with Load(address, BODY, threads=4) as load:
        load.wait(20)
        victim = server.events("worker ready")[0]["worker"]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        server.wait("worker ready", 3)
        back = time.monotonic() - killed
        load.wait(20)
    # On idle cores it takes a second; on busy ones the first start took longer, too.
    assert back < 3 + 3 * first_start, f"{back:.1f} s"
    assert len(load.failures) <= 4, "at most the requests that the dead worker held"
    assert {answer.status for _, answer in load.answers} == {200}
    meanwhile = [sent for sent, _ in load.answers if killed < sent < killed + back]
    assert len(meanwhile) > 5
    # The dead worker's counters are kept: all answers are counted, but for those that died with it.
    text = address.ask("GET", "/metrics").body.decode()
    match = re.search(r'recap_requests_total{status="200"} (\d+)', text)
    assert match and len(load.answers) <= int(match[1]) <= len(load.answers) + len(load.failures)
    assert "recap_worker_starts_total 3" in text


@pytest.mark.slow
def test_versions_change_under_load_without_a_lost_request(tmp_path: Path, start: Start) -> None:
    model = write(tmp_path / "model", seed=1, row_us=100)
    server = start(model, workers=2)
    server.wait("worker ready", 2)
    address = server.address
    first = serving_model(address)
    with Load(address, BODY) as load:
        load.wait(20)
        write(model, seed=2, row_us=100)
        server.send(signal.SIGHUP)
        swapped = server.wait("swapped")
        load.wait(20)
        write(model, seed=3, broken="checksum")
        server.send(signal.SIGHUP)
        damaged = server.wait("refused")
        write(model, seed=3, broken="nan")
        server.send(signal.SIGHUP)
        not_finite = server.wait("refused", 2)
        load.wait(20)
    assert not load.failures and {answer.status for _, answer in load.answers} == {200}
    by_model: dict[str, set[bytes]] = {}
    for _, answer in load.answers:
        by_model.setdefault(answer.json()["model"], set()).add(json.dumps(answer.json()["rows"]).encode())
    assert set(by_model) == {first, swapped["model"]}
    assert all(len(scores) == 1 for scores in by_model.values()), "no answer mixes two versions"
    assert swapped["shadow"]["rows"] > 0 and swapped["shadow"]["mean_difference"] > 0
    assert "differs from its checksum" in damaged["reason"] and str(model) in damaged["reason"]
    assert "recap-serve-" not in damaged["reason"]
    assert "not probabilities" in not_finite["reason"]
    wait_until(lambda: swaps(address) == {"swapped": 2, "refused": 4}, "each worker counts each outcome")
    description = address.ask("GET", "/model").json()
    assert description["model"] == swapped["model"] and description["swap"]["outcome"] == "refused"
    assert "recap_shadow_rows_total" in address.ask("GET", "/metrics").body.decode()

    server.send(signal.SIGUSR1)
    server.wait("rolled back")
    wait_until(lambda: serving_model(address) == first, "the first version serves again")
    # A worker that starts after that serves what the others serve.
    os.kill(server.events("worker ready")[0]["worker"], signal.SIGKILL)
    assert server.wait("worker ready", 3)["model"] == first
    # A second rollback brings the second version back, in the new worker too.
    server.send(signal.SIGUSR1)
    server.wait("rolled back", 2)
    wait_until(
        lambda: {serving_model(address) for _ in range(8)} == {swapped["model"]},
        "the second version serves again",
    )


@pytest.mark.slow
def test_offers_that_are_not_taken_leave_the_serving_version_alone(tmp_path: Path, start: Start) -> None:
    model = write(tmp_path / "model", extra="extra")
    server = start(model)
    address = server.address
    first = serving_model(address)

    def serves() -> bool:
        return address.score({"rows": [{"extra": "q"}]}).status == 200

    # The artifact that serves already is not counted as refused.
    server.send(signal.SIGHUP)
    assert server.wait("unchanged")["model"] == first
    wait_until(lambda: bool(swaps(address)), "the offer is counted")
    assert swaps(address) == {"unchanged": 1}
    assert address.ask("GET", "/model").json()["swap"]["outcome"] == "unchanged" and serves()
    # Another one must have the fields of the serving version.
    write(model, seed=2)
    server.send(signal.SIGHUP)
    assert "'extra'" in server.wait("refused")["reason"]
    write(model, extra="extra")
    server.send(signal.SIGHUP)
    server.wait("unchanged", 2)
    assert serves()
    # A directory may hold no artifact at all.
    (model / "manifest.json").unlink()
    server.send(signal.SIGHUP)
    assert f"{model} holds no artifact" in server.wait("refused", 2)["reason"]
    assert serves() and serving_model(address) == first


@pytest.mark.slow
def test_watching_takes_a_new_version_without_a_signal(tmp_path: Path, start: Start) -> None:
    write(tmp_path / "v1", seed=1)
    write(tmp_path / "v2", seed=2)
    link = tmp_path / "current"
    link.symlink_to("v1")
    server = start(link, watch=True)
    first = serving_model(server.address)
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").replace(link)
    assert server.wait("swapped")["model"] != first


@pytest.mark.slow
def test_an_offer_that_takes_too_much_ends_alone(tmp_path: Path, start: Start) -> None:
    """Neither an endless loop nor a huge array reaches the workers, and the next offer is taken."""
    model = write(tmp_path / "model")
    server = start(model, offer_seconds=3.0, offer_mib=1024)
    address = server.address
    write(model, seed=2, broken="endless")
    server.send(signal.SIGHUP)
    # The check runs at a low priority, so that three seconds of it may take long on a busy machine.
    assert "it may take 3 s and 1,024 MiB" in server.wait("refused", seconds=200)["reason"]
    write(model, seed=2, broken="large")
    server.send(signal.SIGHUP)
    assert "too much memory" in server.wait("refused", 2, seconds=100)["reason"]
    assert address.score({"rows": [{"site": "a"}]}).status == 200
    write(model, seed=2)
    server.send(signal.SIGHUP)
    server.wait("swapped", seconds=100)
    assert len(server.events("worker ready")) == 1 and not server.events("worker died")


@pytest.mark.slow
def test_stopping_answers_accepted_requests(tmp_path: Path, start: Start) -> None:
    server = start(write(tmp_path / "model", start_us=100_000))
    address = server.address

    def all_are_queued() -> bool:
        return "\nrecap_waiting_requests 3\n" in address.ask("GET", "/metrics").body.decode()

    with Load(address, BODY, threads=3) as load:
        wait_until(all_are_queued, "three requests wait for their scores")
        server.send(signal.SIGTERM)
        assert server.popen.wait(60) == 0
        stopped = time.monotonic()
    accepted = [answer for sent, answer in load.answers if sent < stopped]
    assert len(accepted) >= 3 and {answer.status for answer in accepted} == {200}
    # Later connections are refused; no answer is cut off.
    assert all(isinstance(error, ConnectionError) for _, error in load.failures)
    assert server.events("stopped")


@pytest.mark.slow
def test_workers_end_when_the_supervisor_is_killed(tmp_path: Path, start: Start) -> None:
    server = start(write(tmp_path / "model"))
    status = Path(f"/proc/{server.wait('worker ready')['worker']}/stat")
    server.popen.kill()
    server.popen.wait()
    wait_until(lambda: not status.exists() or status.read_text().split()[2] == "Z", "the worker ends")
    (left,) = (tmp_path / "state").glob(
        "recap-serve-*"
    )  # The killed supervisor could not tidy up; the next one does.
    again = start(tmp_path / "model")
    again.wait("serving")
    assert not left.exists() and len(list((tmp_path / "state").glob("recap-serve-*"))) == 1


def test_listening_beyond_loopback_needs_a_token(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.com"):
        with pytest.raises(InputError, match="no token is set"):
            Supervisor(ServeConfig(artifact=str(model), host=host), None, lambda *_: None)
    with pytest.raises(InputError, match="any web page"):
        Supervisor(ServeConfig(artifact=str(model), origins=("*",)), None, lambda *_: None)


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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = recap("serve", model, "--port", taken.getsockname()[1])
    assert busy.code == 2 and "--port" in busy.err


@pytest.mark.slow
def test_a_damaged_artifact_is_not_served(tmp_path: Path, start: Start, recap: Recap) -> None:
    server = start(write(tmp_path / "model", broken="checksum"))
    assert server.popen.wait(60) != 0
    refused = recap("serve", tmp_path / "model", "--port", 0)
    assert refused.code == 2 and str(tmp_path / "model") in refused.err, "the path is the user's"
    assert "recap-serve-" not in refused.err
