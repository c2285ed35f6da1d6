"""Fetch the raw files of a public data set from the site that publishes it."""

import hashlib
import http.client
import shutil
import ssl
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from recap_ctr.errors import InputError
from recap_ctr.jobs.progress import meter
from recap_ctr.storage.files import append_file, atomic_file, make_directory
from recap_ctr.storage.locks import locked

TIMEOUT_SECONDS = 30
CHUNK = 1 << 16
MAX_BYTES = 1 << 28  # of an archive and of a file in it, because a server or a zip bomb could go on for ever
NETWORK = (URLError, ConnectionError, TimeoutError, ssl.SSLError, http.client.HTTPException)
RESUME = "run the same command again: it continues where it stopped"


@dataclass(frozen=True)
class Archive:
    """A zip file on the web."""

    url: str
    md5: str
    folder: str
    """The folder in the archive that holds the files."""


def download(
    archive: Archive, files: Sequence[str], directory: Path, *, force: bool = False, quiet: bool = False
) -> bool:
    """Fetch, check and unpack the files into `directory`; return whether they were there already.

    An interrupted download is resumed. `force` fetches files that are there already.
    """
    if not force and all((directory / name).is_file() for name in files):
        return True
    make_directory(directory)
    partial = directory / f".{archive.url.rpartition('/')[2]}.partial"
    with locked(directory):
        if not _is_whole(archive, partial):
            resumed = partial.is_file()
            _fetch(archive, partial, quiet)
            if resumed and not _is_whole(archive, partial):  # the old part belongs to another file
                partial.unlink()
                _fetch(archive, partial, quiet)
            _verify(archive, partial)
        _unpack(archive, partial, files, directory)
        partial.unlink()
    return False


def _fetch(archive: Archive, partial: Path, quiet: bool) -> None:
    """Append to `partial` what it lacks; replace it if the server sends the whole file."""
    size = partial.stat().st_size if partial.is_file() else 0
    headers = {"User-Agent": "recap-ctr"} | ({"Range": f"bytes={size}-"} if size else {})
    try:
        with urlopen(Request(archive.url, headers=headers), timeout=TIMEOUT_SECONDS) as response:
            resumes = response.headers.get("Content-Range", "").startswith(f"bytes {size}-")
            if not (response.status == 206 and resumes):
                size = 0
                partial.unlink(missing_ok=True)
            length = response.headers.get("Content-Length")
            total = size + int(length) if length and length.isdigit() else None
            title = f"downloading {archive.url.rpartition('/')[2]}"
            with (
                meter(title, total, "KiB", quiet=quiet) as shown,
                append_file(partial) as file,
            ):
                shown.advance(0, size)
                while chunk := response.read(CHUNK):
                    size += len(chunk)
                    if size > MAX_BYTES:
                        raise InputError(f"{archive.url} sends more than {MAX_BYTES >> 20} MiB; stopped")
                    file.write(chunk)
                    shown.advance(len(chunk) >> 10, len(chunk))
            if total is not None and size < total:
                raise InputError(f"{archive.url}: the connection broke off after {size:,} bytes", fix=RESUME)
    except HTTPError as error:
        error.close()
        if error.code == 416 and size:  # no such range, so `partial` is not the beginning of this file
            partial.unlink()
            _fetch(archive, partial, quiet)
            return
        raise InputError(f"{archive.url}: the server answers {error.code} {error.reason}") from None
    except NETWORK as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(f"{archive.url} can't be reached: {reason}", fix=RESUME) from None


def _is_whole(archive: Archive, partial: Path) -> bool:
    return partial.is_file() and _md5(partial) == archive.md5


def _verify(archive: Archive, partial: Path) -> None:
    """Remove the file and raise an error if it is not the published one."""
    if (md5 := _md5(partial)) == archive.md5:
        return
    with partial.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    partial.unlink()
    if not is_zip:
        raise InputError(
            f"{archive.url}: the server did not send a zip archive but another page",
            fix="open the address in a browser; the network may want a login first",
        )
    raise InputError(
        f"{archive.url}: the MD5 of the download is {md5}, the published one is {archive.md5}",
        fix="run the same command again; if it fails again, the file was replaced",
    )


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(archive: Archive, partial: Path, files: Sequence[str], directory: Path) -> None:
    """Unpack only these files, each under its plain name, so that no path in the archive is followed."""
    try:
        with zipfile.ZipFile(partial) as packed:
            for name in files:
                member = packed.getinfo(f"{archive.folder}/{name}")
                if member.file_size > MAX_BYTES:
                    raise InputError(f"{archive.url}: {name} unpacks to {member.file_size:,} bytes; stopped")
                with packed.open(member) as source, atomic_file(directory / name) as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{archive.url}: {error.args[0]}") from None
