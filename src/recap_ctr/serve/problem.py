"""What the server answers instead of scores."""


class Problem(Exception):  # noqa: N818 (an answer, not a fault of ours)
    """A request that is not answered: its status, what is wrong with it, and what to do about it."""

    def __init__(
        self, status: int, message: str, *, fix: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.fix = status, message, fix
        self.retry_after = retry_after
        """Seconds until it may go better."""
