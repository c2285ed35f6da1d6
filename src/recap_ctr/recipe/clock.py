"""The time that a fit may take, and how much of it is used."""

import math
import time


class Clock:
    """Counts the seconds of a fit from its first row on; `budget` is in minutes, None if there is no limit."""

    def __init__(self, budget: float | None, *, started: float | None = None, spent: float = 0.0) -> None:
        """Begin at `started`, a time of `time.time`; `spent` are the seconds of earlier, interrupted calls."""
        self.seconds = math.inf if budget is None else 60 * budget
        self._started = (time.time() if started is None else started) - spent

    @property
    def is_limited(self) -> bool:
        """Return whether there is a budget."""
        return math.isfinite(self.seconds)

    @property
    def taken(self) -> float:
        """Return the seconds so far."""
        return time.time() - self._started

    def until(self, share: float, reserve: float = 0.0) -> float:
        """Return the seconds until `share` of the budget is used, or until only `reserve` seconds are left of it."""
        return max(min(share * self.seconds, self.seconds - reserve) - self.taken, 0.0)

    def deadline(self, seconds: float) -> float | None:
        """Return the value that `time.time` will have in `seconds` seconds; None without a limit."""
        return time.time() + seconds if math.isfinite(seconds) else None
