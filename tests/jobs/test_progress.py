"""What several boards show as parts of one whole."""

import io
import math
import re
import sys
import time

import pytest
from rich.console import Console

from recap_ctr.jobs import progress
from recap_ctr.jobs.progress import board, overall


@pytest.mark.parametrize(
    ("taken", "total", "text"),
    [
        (65.0, 600.0, "1:05 of 10:00, 8:55 left"),
        (620.0, 600.0, "10:20 of 10:00, 0:00 left"),
        (5.0, math.inf, "0:05 so far"),
    ],
)
def test_logs_say_how_far_the_whole_is(
    taken: float, total: float, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    event = {"kind": "progress", "done": 1, "total": 2, "note": "epoch 3"}
    with overall("fit", lambda: (taken, total)), board("race", 2) as shown:
        shown.receive("fcn", event)
        shown.finish("fcn")
    assert capsys.readouterr().err == f"fit: {text}; race: fcn, epoch 3\n"


def test_it_is_said_every_ten_seconds_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"kind": "progress", "done": 1, "total": 2, "note": ""}
    with overall("fit", lambda: (time.time(), math.inf)), board("race", 2) as shown:
        for _ in range(100):
            shown.receive("fcn", event)
    assert capsys.readouterr().err == ""


def test_a_whole_may_count_the_jobs_of_its_boards(capsys: pytest.CaptureFixture[str]) -> None:
    for counts_jobs in (False, True):
        with overall("fit", lambda: (1.0, math.inf), counts_jobs=counts_jobs), board("teachers", 2) as shown:
            shown.finish("teacher-1")
    assert capsys.readouterr().err == "teachers: 1 of 2 done (teacher-1)\n"


def test_on_a_narrow_terminal_every_task_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    event = {
        "kind": "progress",
        "done": 3,
        "total": 9,
        "note": "epoch 3, 28,046 rows/s, valid AUC " + "0" * 60,
    }
    with overall("fit", lambda: (65.0, 600.0)), board("race of models", 9) as shown:
        shown.receive("fcn l2=0.00208 rate=0.004", event)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", screen.getvalue().replace("\r", "\n"))
    lines = [line for line in text.split("\n") if line.strip()]
    assert max(map(len, lines)) <= 80
    assert any("fit" in line and "1:05 of 10:00, 8:55 left" in line for line in lines)
    assert any("fcn l2=0.00208 rate=0.004" in line and "epoch 3" in line for line in lines)
