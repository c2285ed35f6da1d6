"""Downloads from a server on this machine: whole, resumed, cut off, replaced, or something else altogether."""

import errno
import hashlib
import io
import re
import shutil
import socket
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from recap_ctr.datasets import download as download_module
from recap_ctr.datasets import ml_1m
from recap_ctr.datasets.download import Archive, download
from recap_ctr.errors import InputError
from tests.conftest import Recap

FILES = ("ratings.dat", "users.dat")


def pack(members: dict[str, bytes]) -> bytes:
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as packed:
            for name, content in members.items():
                packed.writestr(name, content)
        return buffer.getvalue()


CONTENT = {
    "ml/ratings.dat": np.random.default_rng(0).bytes(200_000),
    "ml/users.dat": b"1::F\n",
    "ml/README": b"read me",
}


class Server:
    """Answers /a.zip with `body`; `sent` bytes of it if that is set, and by range if it `resumes`."""

    def __init__(self) -> None:
        self.body = pack(CONTENT)
        self.sent: int | None = None
        self.resumes = True
        self.ranges: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                outer.ranges.append(wanted)
                if self.path == "/moved.zip":
                    self.send_response(302)
                    self.send_header("Location", "/login.html")
                    self.end_headers()
                    return
                body = b"<html>Please log in</html>" if self.path == "/login.html" else outer.body
                if self.path in ("/404.zip", "/416.zip"):
                    self.send_error(int(self.path[1:4]))
                    return
                start = int(re.findall(r"\d+", wanted)[0]) if wanted and outer.resumes else 0
                if start >= len(body):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
                self.send_header("Content-Length", str(len(body) - start))
                self.end_headers()
                self.wfile.write(body[start : outer.sent])

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def archive(self, page: str = "a.zip") -> Archive:
        port = self._server.server_address[1]
        return Archive(f"http://127.0.0.1:{port}/{page}", hashlib.md5(self.body).hexdigest(), "ml")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fails(archive: Archive, directory: Path, *words: str) -> None:
    with pytest.raises(InputError) as error:
        download(archive, FILES, directory, quiet=True)
    for word in (archive.url, *words):
        assert word in str(error.value)
    assert not {*FILES} & {*names(directory)}


def test_only_the_files_asked_for(server: Server, tmp_path: Path) -> None:
    assert download(server.archive(), FILES, tmp_path / "raw", quiet=True) is False
    assert names(tmp_path / "raw") == sorted(FILES)
    for name in FILES:
        assert (tmp_path / "raw" / name).read_bytes() == CONTENT[f"ml/{name}"]
    assert download(server.archive(), FILES, tmp_path / "raw", quiet=True) is True
    assert len(server.ranges) == 1
    (tmp_path / "raw" / "users.dat").write_text("mine")
    assert download(server.archive(), FILES, tmp_path / "raw", force=True, quiet=True) is False
    assert (tmp_path / "raw" / "users.dat").read_bytes() == b"1::F\n"


@pytest.mark.parametrize("resumes", [True, False])
def test_a_cut_connection_goes_on(server: Server, tmp_path: Path, resumes: bool) -> None:
    server.resumes, server.sent = resumes, 150_000
    fails(
        server.archive(),
        tmp_path,
        "the connection broke off after 150,000 bytes",
        "continues where it stopped",
    )
    assert names(tmp_path) == [".a.zip.partial"]
    server.sent = None
    download(server.archive(), FILES, tmp_path, quiet=True)
    assert server.ranges == [None, "bytes=150000-"]
    assert names(tmp_path) == sorted(FILES)


def test_part_of_another_file_is_dropped(server: Server, tmp_path: Path) -> None:
    for part in (b"PK of another file", bytes(300_000)):
        (tmp_path / ".a.zip.partial").write_bytes(part)
        download(server.archive(), FILES, tmp_path, force=True, quiet=True)
        assert (tmp_path / "users.dat").read_bytes() == b"1::F\n"
    assert server.ranges == ["bytes=18-", None, "bytes=300000-", None]


def test_killed_while_unpacking(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfileobj", stop)
        download(server.archive(), FILES, tmp_path, quiet=True)
    assert names(tmp_path) == [".a.zip.partial"]
    download(server.archive(), FILES, tmp_path, quiet=True)
    assert len(server.ranges) == 1  # what was fetched is not fetched again


def test_a_wrong_checksum(server: Server, tmp_path: Path) -> None:
    md5 = hashlib.md5(server.body).hexdigest()
    fails(
        replace(server.archive(), md5="0" * 32),
        tmp_path,
        f"MD5 of the download is {md5}",
        f"the published one is {'0' * 32}",
    )
    assert names(tmp_path) == []


def test_another_page(server: Server, tmp_path: Path) -> None:
    fails(server.archive("404.zip"), tmp_path, "the server answers 404 Not Found")
    fails(server.archive("416.zip"), tmp_path, "the server answers 416 Requested Range Not Satisfiable")
    fails(
        server.archive("moved.zip"), tmp_path, "did not send a zip archive but another page", "in a browser"
    )
    assert names(tmp_path) == []


def test_no_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    fails(
        Archive(f"http://127.0.0.1:{port}/a.zip", "", "ml"),
        tmp_path,
        "can't be reached: ",
        "Connection refused",
    )


def test_a_full_disk_is_no_fault_of_the_network(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Path, "open", full)
        download(server.archive(), FILES, tmp_path, quiet=True)


def test_bombs_and_odd_archives(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.body = pack({"ml/ratings.dat": b"1"})
    fails(replace(server.archive(), folder="../ml"), tmp_path, "There is no item named '../ml/ratings.dat'")
    server.body = b"PK" + bytes(100)
    fails(server.archive(), tmp_path, "File is not a zip file")
    (tmp_path / ".a.zip.partial").unlink()
    server.body = pack({"ml/ratings.dat": bytes(10_000), "ml/users.dat": b"1"})
    monkeypatch.setattr(download_module, "MAX_BYTES", 15_000)
    with monkeypatch.context() as patch:
        patch.setattr(download_module, "MAX_BYTES", 5_000)
        fails(server.archive(), tmp_path, "sends more than 0 MiB; stopped")
    download(server.archive(), FILES, tmp_path, force=True, quiet=True)
    with zipfile.ZipFile(packed := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("ml/ratings.dat", bytes(1_000_000))
    server.body = packed.getvalue()
    (tmp_path / "ratings.dat").unlink()
    (tmp_path / "users.dat").unlink()
    fails(server.archive(), tmp_path, "ratings.dat unpacks to 1,000,000 bytes; stopped")


class TestCommand:
    def test_download(
        self, server: Server, recap: Recap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.body = pack({f"ml/{name}": b"1::2\n" for name in (*ml_1m.PROTOCOL.files, "README")})
        monkeypatch.setattr(ml_1m, "PROTOCOL", replace(ml_1m.PROTOCOL, archive=server.archive()))
        done = recap("download", "ml-1m", tmp_path / "raw")
        assert (done.code, done.out) == (0, "")
        assert "ratings.dat, users.dat, movies.dat are there, as published. Licence: research use" in done.err
        assert f"Next: recap prepare --dataset ml-1m --raw {tmp_path / 'raw'} --out data/ml-1m" in done.err
        assert names(tmp_path / "raw") == ["movies.dat", "ratings.dat", "users.dat"]
        assert "are up to date" in recap("download", "ml-1m", tmp_path / "raw").err
        again = recap("download", "ml-1m", tmp_path / "raw", "--json", "-q")
        assert '"done_before": true' in again.out
        assert again.err == ""

    def test_what_can_not_be_downloaded(self, recap: Recap, tmp_path: Path) -> None:
        done = recap("download", "criteo-x4", tmp_path)
        assert done.code == 2
        assert done.err == (
            "error: Criteo (x4) can't be downloaded; ml-1m can\n"
            "  fix: get train.txt from https://www.kaggle.com/c/criteo-display-ad-challenge\n"
        )
        assert recap("download", "nonsense", tmp_path).code == 2


def test_the_known_address() -> None:
    archive = ml_1m.PROTOCOL.archive
    assert archive is not None
    assert archive.url.startswith("https://files.grouplens.org/")
