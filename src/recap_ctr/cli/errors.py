"""How a command fails: one message, how to put it right, and an exit code; a traceback only for a bug of ours."""

import errno
import os
import re
import sys
from typing import NoReturn

from typer.exceptions import TyperException

from recap_ctr.cli.output import print_json
from recap_ctr.errors import InputError, did_you_mean
from recap_ctr.jobs.executor import JobError
from recap_ctr.jobs.progress import say

BAD_INPUT, OTHER_FAILURE = 2, 1
FINDINGS = 3  # The command did its work, and what it looked at is not as it should be.
INTERRUPTED = 130  # What shells expect after Ctrl-C: 128 + SIGINT.
RESUME = "run the same command again: nothing is half-written, and it goes on from what is finished"
MORE_MEMORY = "close other programs, or use a machine with more, then run the same command again"
PATH_ERRORS = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


class CommandError(Exception):
    """A failure to show to the user: what is wrong, how to put it right if that is known, and the exit code."""

    def __init__(self, message: str, fix: str | None = None, *, code: int = OTHER_FAILURE) -> None:
        super().__init__(message)
        self.message, self.fix, self.code = message, fix, code


def wants_json() -> bool:
    """Return whether the command line has --json, even if it can't be parsed."""
    arguments = sys.argv[1:]
    return "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)


def end_with(error: BaseException) -> NoReturn:
    """Show a failure, on standard error for people or as JSON on standard output for programs, and exit."""
    if _system_error(error) == errno.EPIPE:  # A reader that leaves early is not a failure of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For what is still buffered.
        sys.exit(OTHER_FAILURE)
    failure = as_command_error(error)
    if wants_json():
        shown = failure or CommandError(f"{type(error).__name__}: {error}")
        print_json({"error": {"message": shown.message, "fix": shown.fix}})
    elif failure is not None:
        say(f"error: {failure.message}" + (f"\n  fix: {failure.fix}" if failure.fix else ""))
    if failure is None:
        raise error
    sys.exit(failure.code)


def as_command_error(error: BaseException) -> CommandError | None:
    """Return what to show for an error; None if it is a bug of ours, which needs its traceback."""
    match error:
        case CommandError():
            return error
        case InputError():
            return CommandError(error.message, error.fix, code=BAD_INPUT)
        case TyperException():
            return _usage_error(error)
        case JobError():
            return CommandError(f"{error}; its messages are above", RESUME)
        case KeyboardInterrupt():
            return CommandError("interrupted", RESUME, code=INTERRUPTED)
        case MemoryError():
            return CommandError("not enough memory", MORE_MEMORY)
    return _disk_error(error)


def _usage_error(error: TyperException) -> CommandError:
    """Return a mistake in the command line in our words, with a suggestion for a mistyped name."""
    message = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    message = re.sub(r" \(Possible options: (.*)\)$", r"; did you mean \1?", message)
    message = message.replace(". Did you mean", "; did you mean").replace(": Input should", ": it should")
    if choice := re.search(r"'([^']*)' is not one of (.*)$", message):
        message += did_you_mean(choice[1], re.findall(r"'([^']*)'", choice[2]))
    context = getattr(error, "ctx", None)
    command = "recap" if context is None else context.command_path
    return CommandError(message, f"see `{command} --help`", code=error.exit_code)


def _system_error(error: BaseException) -> int | None:
    """Return the system's error number, which polars and safetensors keep in their text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def _disk_error(error: BaseException) -> CommandError | None:
    """Return what the disk or its permissions forbid, or a path that does not exist; None for any other error."""
    number = _system_error(error)
    name = error.filename if isinstance(error, OSError) else None
    where = f" ({name})" if name else ""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = "free some, then run the same command again"
        return CommandError(f"no space left on the disk{where}", fix, code=BAD_INPUT)
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "choose a place you may read and write"
        return CommandError(f"no permission{where}", fix, code=BAD_INPUT)
    if number == errno.EIO:
        fix = "check the disk and its cable or network, then run the same command again"
        return CommandError(f"the disk failed to read or write{where}", fix)
    if number in (errno.EMFILE, errno.ENFILE):
        fix = "raise the limit with `ulimit -n 65536`, then run the same command again"
        return CommandError(f"too many files are open at once{where}", fix)
    if number == errno.ENOMEM:
        return CommandError(f"not enough memory{where}", MORE_MEMORY)
    if number in PATH_ERRORS and name:
        return CommandError(f"{name}: {os.strerror(number).lower()}", code=BAD_INPUT)
    return None
