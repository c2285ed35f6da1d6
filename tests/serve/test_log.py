"""The log: one JSON object per line, without the content of a row, and bounded under attack."""

import json
import logging
import time

import pytest

from recap_ctr.serve.log import JsonHandler, log, log_refusal


def events(capfd: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_a_line_holds_time_level_event_and_details(capfd: pytest.CaptureFixture[str]) -> None:
    log("started", port=80)
    (line,) = events(capfd)
    assert (line["level"], line["event"], line["port"]) == ("info", "started", 80)
    assert "T" in str(line["time"])


def test_the_message_of_an_exception_is_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("library")
    logger.addHandler(JsonHandler())
    try:
        raise ValueError("a value of a row")
    except ValueError:
        logger.exception("it failed")
    (line,) = events(capfd)
    assert (line["level"], line["event"], line["reason"]) == ("error", "it failed", "ValueError")
    assert "a value" not in json.dumps(line)


def test_refusals_beyond_twenty_a_second_are_only_counted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic() + 2  # a second that no other test has logged in
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log_refusal(status=429)
    capfd.readouterr()
    for _ in range(49):
        log_refusal(status=429)
    assert [line["event"] for line in events(capfd)] == ["refused"] * 19
    now += 1.5
    log_refusal(status=429)
    rest, refusal = events(capfd)
    assert (rest["event"], rest["count"]) == ("more refusals, not listed", 30)
    assert refusal["event"] == "refused"
