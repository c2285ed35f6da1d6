"""Object stores (s3://, gs://, az://): sources and scores as single objects, directories as trees.

A tree is an index, `index.json`, over files that are named after their hash and never change. Writing the index is the
one step that makes a new version visible, and it succeeds only if nobody else has written it since it was read: so a
reader finds a whole version, and of two writers one wins. Everything is worked on in a cache on this machine.

Credentials come from the environment that the stores' own tools use, and are never shown.
"""

import fnmatch
import glob
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile
from pathlib import Path, PurePosixPath
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import ObjectStore, from_url

from recap_ctr.errors import InputError
from recap_ctr.storage.files import (
    atomic_directory,
    atomic_file,
    empty_directory,
    make_directory,
    read_json,
    write_json,
)
from recap_ctr.storage.hashes import fingerprint, sha256
from recap_ctr.storage.locks import BusyError, held
from recap_ctr.storage.places import URL, Place

INDEX, CLAIM, FILES = "index.json", "claim.json", "files"
LEASE_SECONDS = 120.0  # A claim that was not renewed for this long belongs to a process that was killed.
PUSH_SECONDS = 60.0  # If a machine is lost, at most the work of this long is lost with it.
MULTIPART_BYTES = 1 << 30  # Larger objects can't be created conditionally in one request.
PART_BYTES, MOST_PARTS = 8 << 20, 10_000  # Stores take an object in so many parts at most.
RETRIES = 5  # A request is repeated this often.
ATTEMPTS = 3  # A directory that others replace meanwhile is read again this often.
CONNECTIONS = 8
CACHE, ENDPOINT = "RECAP_CACHE", "AWS_ENDPOINT_URL"
Item = TypeVar("Item")
Result = TypeVar("Result")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


@dataclass(frozen=True)
class Location:
    """A key in a bucket, or the keys below it."""

    scheme: str
    bucket: str
    key: str

    @classmethod
    def of(cls, place: Place) -> "Location":
        """Return the location that a URL names."""
        match = URL.fullmatch(str(place))
        if match is None:
            raise InputError(f"{place} is no URL of an object store", fix="use s3://, gs:// or az://")
        location = cls(*match.groups())
        if "@" in location.bucket:  # It must not get into messages and manifests.
            raise InputError(
                f"a {location.scheme}:// URL has credentials before the name of its bucket",
                fix=f"remove them, and set {_CREDENTIALS[location.scheme]}",
            )
        return location

    @property
    def url(self) -> str:
        """Return the location as a URL."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")

    @property
    def name(self) -> str:
        """Return the last part of the key."""
        return PurePosixPath(self.key).name or self.bucket

    def __truediv__(self, name: str) -> "Location":
        return Location(self.scheme, self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def cache(self) -> Path:
        """Return the directory on this machine for what belongs to this location."""
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "recap-ctr")
        return Path(os.environ.get(CACHE) or default) / fingerprint(self.url)[:16]

    def store(self) -> ObjectStore:
        """Connect to the store of the bucket, with the credentials of the environment."""
        endpoint = os.environ.get(ENDPOINT, "") if self.scheme == "s3" else ""
        if endpoint and not re.fullmatch(r"https?://[!-~]+", endpoint):  # The library would panic.
            raise InputError(f"{ENDPOINT} is no URL", fix="set it to http://HOST:PORT or https://HOST:PORT")
        with _named_errors(self):
            return from_url(
                f"{self.scheme}://{self.bucket}",
                client_options={"allow_http": endpoint.startswith("http://")},
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=60)},
            )


@contextmanager
def _named_errors(location: Location) -> Iterator[None]:
    """Say which object can't be read or written, and why; without anything that a URL of a request may carry."""
    try:
        yield
    except FileNotFoundError:
        raise _absent(location) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        fix = f"set {_CREDENTIALS[location.scheme]} for an account that may read and write there"
        raise InputError(f"no permission for {location.url}", fix=fix) from None
    except exceptions.BaseError as error:
        detail = re.sub(r"\?\S*|(?<=://)[^\s/@]*@", "", str(error).partition("\n")[0])
        fix = f"check the network, and {_CREDENTIALS[location.scheme]}"
        raise InputError(f"{location.url} can't be reached: {detail}", fix=fix) from None


class AbsentError(InputError):
    """There is no such object."""


def _absent(location: Location) -> AbsentError:
    return AbsentError(f"nothing is at {location.url}", fix="check the name of the bucket and the key")


# Single objects.


def local_copies(pattern: Place) -> list[tuple[Path, Path]]:
    """Return copies of the objects that a URL, a pattern or a prefix names: each path, and the root of its key.

    A copy is kept under the object's version, so that it is fetched again only after it has changed.
    """
    location = Location.of(pattern)
    objects = _matching(location)
    if not objects:
        raise _absent(location)
    return _at_once(
        lambda entry: _copy(Location(location.scheme, location.bucket, entry["path"]), entry), objects
    )


def _at_once(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function for all items, several at a time: most of it is waiting for the store."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(function, items))


def _matching(location: Location) -> list[Mapping[str, Any]]:
    """Return what the store says of the objects that a location names, sorted by key."""
    parts = PurePosixPath(location.key).parts
    fixed = list(takewhile(lambda part: not glob.has_magic(part), parts))
    prefix = "/".join(fixed)
    store = location.store()
    with _named_errors(location):
        if len(fixed) == len(parts) and location.key:
            with suppress(FileNotFoundError):
                return [obstore.head(store, location.key)]
        listed = [entry for batch in obstore.list(store, prefix=prefix or None) for entry in batch]
    is_pattern = len(fixed) < len(parts)
    chosen = [entry for entry in listed if not is_pattern or _fits(entry["path"], parts)]
    return sorted(chosen, key=lambda entry: entry["path"])


def _fits(key: str, pattern: tuple[str, ...]) -> bool:
    """Return whether a key matches a pattern part by part; ** stands for any number of parts."""
    if "**" in pattern:
        return fnmatch.fnmatchcase(key, "/".join(pattern).replace("**/", "*"))
    parts = PurePosixPath(key).parts
    return len(parts) == len(pattern) and all(map(fnmatch.fnmatchcase, parts, pattern))


def _copy(location: Location, entry: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return the copy of an object, which may have to be fetched, and the root of its key."""
    version = fingerprint([str(entry[key]) for key in ("e_tag", "size", "last_modified")])[:16]
    root = location.cache / version
    path = root / location.key
    if not path.is_file():
        make_directory(path.parent)
        with _fetching(path):
            if not path.is_file():
                _fetch(location, path, entry["e_tag"])
    return path, root


@contextmanager
def _fetching(copy: Path) -> Iterator[None]:
    """Let one process fetch a copy while others wait for it; its writer has a lock of its own."""
    with held(copy.with_name(f"{copy.name}.fetch"), wait=True):
        yield


def _fetch(location: Location, path: Path, e_tag: str | None = None) -> None:
    """Write an object to a file, a part at a time; refuse it if it is of another version than `e_tag`."""
    with _named_errors(location), atomic_file(path) as file:
        try:
            answer = obstore.get(
                location.store(), location.key, options={} if e_tag is None else {"if_match": e_tag}
            )
        except PreconditionError:
            raise InputError(f"{location.url} changed while it was read", fix="try again") from None
        for part in answer.stream():
            file.write(part)


@contextmanager
def written(place: Place, *, force: bool) -> Iterator[Path]:
    """Yield the path of a file that becomes an object when the block has ended; see `places.output_file`."""
    location = Location.of(place)
    if not force and _exists(location):
        raise _occupied(location)
    with TemporaryDirectory() as directory:
        path = Path(directory, location.name)
        yield path
        _put_file(location, path, replace=force)


def _exists(location: Location) -> bool:
    store = location.store()
    with _named_errors(location):
        try:
            obstore.head(store, location.key)
        except FileNotFoundError:
            return False
        return True


def _put_file(location: Location, path: Path, *, replace: bool) -> None:
    store = location.store()
    with _named_errors(location):
        size = path.stat().st_size
        if replace or size > MULTIPART_BYTES:
            obstore.put(store, location.key, path, chunk_size=max(PART_BYTES, -(-size // MOST_PARTS)))
            return
        try:
            obstore.put(store, location.key, path, mode="create", use_multipart=False)
        except AlreadyExistsError:
            raise _occupied(location) from None


def _occupied(location: Location) -> InputError:
    return InputError(f"{location.url} exists", fix="choose another --out, or replace it with --force")


# Directories.


def pull(place: Place, part: str = "") -> Path:
    """Return a copy of a directory, or of its subdirectory `part` alone if it has one."""
    return Tree(Location.of(place)).pull(part)


def has_tree(place: Place) -> bool:
    """Return whether there is a directory at a URL."""
    return _exists(Location.of(place) / INDEX)


def signature(place: Place) -> str:
    """Return a value that changes when the directory at a URL does."""
    tree = Tree(Location.of(place))
    tree.read_index()
    return fingerprint(tree.files)


def working_directory(place: Place) -> Path:
    """Return where a directory of a store is worked on; see `places.working_directory`."""
    location = Location.of(place)
    return location.cache / "work" / location.name


@contextmanager
def checked_out(place: Place) -> Iterator[Path]:
    """Yield a directory to work in, whose changes go back to the store; see `places.output_directory`."""
    tree = Tree(Location.of(place))
    with _Claim.held(tree.location) as claim:
        work = tree.check_out()
        beside = _Beside(tree, work, claim)
        try:
            yield work
        except BaseException:
            with suppress(InputError):  # The first error tells more.
                beside.end()
            raise
        beside.end()


@dataclass
class Tree:
    """A directory in an object store."""

    location: Location
    version: Any = None
    """What the store calls the version of the index that was read or written last; None if there is none."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size and hash of each file, by its path in the directory."""
    _hashes: dict[tuple[int, int, int], str] = field(default_factory=dict)

    def read_index(self) -> None:
        """Read which files the directory has."""
        index = self.location / INDEX
        self.version, self.files = None, {}
        store = index.store()
        with _named_errors(index), suppress(FileNotFoundError):
            answer = obstore.get(store, index.key)
            self.files = json.loads(bytes(answer.bytes()))["files"]
            self.version = _version_of(answer.meta)

    def pull(self, part: str = "") -> Path:
        """Return a copy of the directory, or of its subdirectory `part` if it has one; nothing is fetched twice."""
        for attempt in range(ATTEMPTS):
            self.read_index()
            if self.version is None:
                raise InputError(f"{self.location.url} holds no directory", fix="check the URL")
            names = [name for name in self.files if name.startswith(f"{part}/")] if part else []
            wanted = {name: self.files[name] for name in names or self.files}
            copy = self.location.cache / fingerprint(wanted)[:16] / self.location.name
            make_directory(copy.parent)
            with _fetching(copy):
                try:
                    if not copy.is_dir():
                        with atomic_directory(copy) as partial:
                            self._fetch_all(wanted, partial)
                except AbsentError:  # It was replaced meanwhile.
                    if attempt + 1 == ATTEMPTS:
                        raise
                    continue
            return copy / part if names else copy
        raise AssertionError("the last attempt returns or raises")

    def _fetch_all(self, files: Mapping[str, Mapping[str, Any]], directory: Path) -> None:
        def fetch(name: str) -> None:
            path = directory / name
            if directory.resolve() not in path.resolve().parents:
                raise InputError(f"{self.location.url} is damaged: it names a file {name!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            source = self.location / FILES / files[name]["sha256"]
            _fetch(source, path)
            if sha256(path) != files[name]["sha256"]:
                raise InputError(f"{source.url} is damaged: its content does not match its name")

        _at_once(fetch, files)

    def check_out(self) -> Path:
        """Return the directory to work in, with the content of the store, or with later work of this machine."""
        work = working_directory(self.location.url)
        base = work.parent / "base.json"
        work.mkdir(parents=True, exist_ok=True)
        self.read_index()
        if self.version is None:
            self._refuse_others()
        if not base.is_file() or read_json(base) != self.version:
            empty_directory(work)
            self._fetch_all(self.files, work)
            write_json(base, self.version)
        return work

    def _refuse_others(self) -> None:
        """Refuse a place that has no index, but objects that are not ours."""
        claim = (self.location / CLAIM).key
        others = [key for key in self._entries() if key != claim and not self._is_file(key)]
        if others:
            raise InputError(
                f"{self.location.url} exists and holds something else, such as {others[0]}",
                fix="choose another --out",
            )

    def push(self, work: Path) -> None:
        """Make the content of a directory the new version in the store; do nothing if it is the version there."""
        with TemporaryDirectory(dir=work.parent) as directory:
            snapshot = Path(directory)
            files = {name: self._entry(snapshot / name) for name in _link_all(work, snapshot)}
            if files == self.files:
                return
            stored = {entry["sha256"] for entry in self.files.values()}
            new = {entry["sha256"]: name for name, entry in files.items() if entry["sha256"] not in stored}
            _at_once(
                lambda digest: _put_file(
                    self.location / FILES / digest, snapshot / new[digest], replace=True
                ),
                new,
            )
        text = json.dumps({"kind": "directory", "format": 1, "files": files}, indent=2, sort_keys=True)
        index = self.location / INDEX
        store = index.store()
        with _named_errors(index):
            try:
                put = obstore.put(store, index.key, text.encode(), mode=self.version or "create")
            except (AlreadyExistsError, PreconditionError):
                raise BusyError(
                    f"another process has written {self.location.url} since this one began",
                    fix="run the same command again, or choose another --out",
                ) from None
        self.version, self.files = _version_of(put), files
        write_json(work.parent / "base.json", self.version)
        self._remove_unused()

    def _entry(self, path: Path) -> dict[str, Any]:
        status = path.stat()
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        if stamp not in self._hashes:
            self._hashes[stamp] = sha256(path)
        return {"bytes": status.st_size, "sha256": self._hashes[stamp]}

    def _remove_unused(self) -> None:
        """Remove the files of earlier versions, and of writers that were killed.

        A writer whose claim has ended may come here late, when the next one has begun to send its files. So nothing is
        removed that came after this version, nor if this version is not the last one any more.
        """
        entries = self._entries()
        index = entries.get((self.location / INDEX).key)
        if index is None or index["e_tag"] != self.version.get("e_tag"):
            return
        used = {(self.location / FILES / entry["sha256"]).key for entry in self.files.values()}
        unused = [
            key
            for key, entry in entries.items()
            if self._is_file(key) and key not in used and entry["last_modified"] <= index["last_modified"]
        ]
        store = self.location.store()
        with _named_errors(self.location):
            if unused:
                obstore.delete(store, unused)

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        """Return what the store says of all objects below the tree's location, by key."""
        store = self.location.store()
        with _named_errors(self.location):
            batches = obstore.list(store, prefix=self.location.key or None)
            return {entry["path"]: entry for batch in batches for entry in batch}

    def _is_file(self, key: str) -> bool:
        """Return whether a key is that of a file of the tree, of any version: what is named after a hash is ours."""
        directory, _, name = key.rpartition("/")
        return directory == (self.location / FILES).key and re.fullmatch(r"[0-9a-f]{64}", name) is not None


def _version_of(meta: Any) -> Any:
    """Return what the store compares a version by, as a condition for the next write."""
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def _link_all(work: Path, snapshot: Path) -> list[str]:
    """Link all files of a directory into an empty one, as they were at one moment; return their names.

    Files are replaced, never changed, so a link keeps what was there. If one came, went or was replaced meanwhile, the
    links are made again. What is hidden is half-written, or a lock.
    """
    while True:
        before = _stamps(work)
        empty_directory(snapshot)
        with suppress(FileNotFoundError):
            for name in before:
                (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(work / name, snapshot / name)
            if _stamps(work) == before:
                return list(before)


def _stamps(directory: Path) -> dict[str, tuple[int, int, int]]:
    stamps = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        with suppress(FileNotFoundError):
            if path.is_file() and not any(part.startswith(".") for part in PurePosixPath(name).parts):
                status = path.stat()
                stamps[name] = status.st_ino, status.st_size, status.st_mtime_ns
    return stamps


@dataclass
class _Claim:
    """The right to write a tree: an object that its holder renews. It stands in for a lock of the file system."""

    location: Location
    owner: str
    version: Any = None

    @classmethod
    @contextmanager
    def held(cls, tree: Location) -> Iterator["_Claim"]:
        """Hold the tree against other processes; refuse if one of them holds it."""
        claim = cls(tree / CLAIM, token_hex(16))
        claim._take(tree)
        try:
            yield claim
        finally:
            with suppress(InputError, FileNotFoundError):
                store = claim.location.store()
                with _named_errors(claim.location):
                    answer = obstore.get(store, claim.location.key)
                    if json.loads(bytes(answer.bytes()))["owner"] == claim.owner:
                        obstore.delete(store, claim.location.key)

    def _take(self, tree: Location) -> None:
        busy = BusyError(
            f"another process is writing {tree.url}",
            fix=f"wait for it, or choose another --out; if it was killed, try again in {LEASE_SECONDS:.0f} seconds",
        )
        store = self.location.store()
        with _named_errors(self.location):
            try:
                self._put("create")
            except AlreadyExistsError:
                answer = obstore.get(store, self.location.key)
                if json.loads(bytes(answer.bytes()))["until"] > time.time():
                    raise busy from None
                try:
                    self._put(_version_of(answer.meta))
                except (AlreadyExistsError, PreconditionError):
                    raise busy from None

    def _put(self, mode: Any) -> None:
        text = json.dumps({"owner": self.owner, "until": time.time() + LEASE_SECONDS})
        self.version = _version_of(
            obstore.put(self.location.store(), self.location.key, text.encode(), mode=mode)
        )

    def renew(self) -> None:
        """Hold the tree for longer."""
        with _named_errors(self.location):
            self._put(self.version)


class _Beside:
    """A thread that renews the claim and pushes the work, while the work goes on."""

    def __init__(self, tree: Tree, work: Path, claim: _Claim) -> None:
        self._tree, self._work, self._claim = tree, work, claim
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def _repeat(self) -> None:
        pushed = time.monotonic()
        while not self._over.wait(min(LEASE_SECONDS / 3, PUSH_SECONDS)):
            with suppress(InputError, OSError):  # The next attempt may succeed; the last one tells.
                self._claim.renew()
                if time.monotonic() - pushed >= PUSH_SECONDS:
                    self._tree.push(self._work)
                    pushed = time.monotonic()

    def end(self) -> None:
        """Push what the work has left."""
        self._over.set()
        self._thread.join()
        self._tree.push(self._work)
