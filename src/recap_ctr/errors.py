"""What a user can put right, told so that she can."""


class InputError(Exception):
    """Bad input or usage: one clear message and, where one is known, its fix. The command ends with exit code 2."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\n  fix: {self.fix}"
