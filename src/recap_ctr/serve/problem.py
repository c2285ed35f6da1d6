"""The error answer of the server."""


class Problem(Exception):  # noqa: N818 (an answer to the client, not a fault of the server)
    """A refused request: its HTTP status, what is wrong, and how to fix it."""

    def __init__(
        self, status: int, message: str, *, fix: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.fix = status, message, fix
        self.retry_after = retry_after
        """Seconds after which the client may try again."""
