"""What a public data set's file provides: how its raw files become rows, and which numbers must come out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recap_ctr.data.prepare import Preparation
from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError


@dataclass(frozen=True)
class Protocol:
    """A public data set with a fixed preparation."""

    title: str
    files: tuple[str, ...]
    """The raw files, by the names under which they are distributed."""
    homepage: str
    licence: str
    preparation: Callable[[Path], Preparation]
    check: Callable[[PreparedData], None]
    """Raise if a known figure (rows, classes, vocabulary sizes) does not come out."""

    def raw_files(self, raw: Path) -> list[Path]:
        missing = [name for name in self.files if not (raw / name).is_file()]
        if missing:
            raise InputError(
                f"{raw} lacks {', '.join(missing)} of {self.title}",
                fix=f"get the raw files from {self.homepage}",
            )
        return [raw / name for name in self.files]


def expect(what: str, found: object, known: object) -> None:
    if found != known:
        raise InputError(
            f"{what}: found {found}, the published protocol has {known}", fix="check the raw files"
        )
