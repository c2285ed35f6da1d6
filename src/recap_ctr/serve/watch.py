"""What is not usual in the rows that a worker scores, given the training rows, as counters."""

import asyncio
import time
from collections.abc import Callable

import numpy as np

from recap_ctr.data.encode import Encoded
from recap_ctr.inference.window import Window
from recap_ctr.serve.counters import Counters, labelled
from recap_ctr.serve.interface import RowScorer

WINDOW_ROWS = 10_000


class RowsWatch:
    """Compares every `WINDOW_ROWS` rows with the profile of the artifact that scored them.

    The rows are taken to be of now. `later` runs a function outside the event loop, which must not wait for it.
    """

    def __init__(
        self, counters: Counters, later: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        self._counters, self._later = counters, later or _in_thread
        self._engine: RowScorer | None = None
        self._window: Window | None = None

    def add(self, engine: RowScorer, encoded: Encoded) -> None:
        """Count rows that were scored; artifacts of older versions have no profile to compare them with."""
        if engine is not self._engine or self._window is None:
            self._engine = engine
            self._window = None if engine.profile is None else Window(engine.encoder, engine.profile)
        if self._window is None:
            return
        self._window.add(encoded)
        self._window.add_moments(np.array([time.time()]).astype(np.int64))
        if self._window.rows >= WINDOW_ROWS:
            full, self._window = self._window, self._window.fresh()
            self._later(lambda: self._report(full))

    def _report(self, window: Window) -> None:
        """Count the findings of a full window."""
        add = self._counters.add
        for i, name in enumerate(window.profile.names):
            add(labelled("recap_psi_total", field=name), window.psi(i))
            add(labelled("recap_rare_share_total", field=name), window.rare(i))
            findings = {
                "missing": window.missing(i).is_beyond,
                "unseen": window.unseen(i).is_beyond,
                "shifted": window.largest_shift(i) is not None,
            }
            for check, is_beyond in findings.items():
                if is_beyond:
                    add(labelled("recap_findings_total", check=check, field=name))
        add("recap_windows_total")


def _in_thread(function: Callable[[], None]) -> object:
    return asyncio.get_running_loop().run_in_executor(None, function)
