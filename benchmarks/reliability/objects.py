"""From and to an object store, with a kill in the middle: prepare, fit, predict and serve by s3:// alone.

    python -m benchmarks.reliability.objects [--rows 3000]

The store is moto's S3 server, a process on loopback. A fit is killed as soon as its first version is in the store, and
goes on from there with an empty cache, as on another machine. Meanwhile a reader looks at the index again and again:
`torn` counts the times that it named a file that was missing or of another size.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import obstore
import polars as pl
from obstore.store import from_url

from benchmarks.reliability.ray import EPOCHS, checksums
from benchmarks.reliability.running import Server
from recap_ctr.bench.synthetic import draw
from recap_ctr.data.synthetic import SyntheticConfig
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.storage.places import input_directory, input_files

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "s3://bucket"
FIT = ["--teachers", "2", "--set", "l2=0.01", *EPOCHS, "--threads", "1", "--device", "cpu"]


def start_store() -> subprocess.Popen[bytes]:
    """Start an S3 server with one bucket, and set the environment that leads to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    for _ in range(600):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
            return server
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the store did not start")


class Reader:
    """Reads the index of a tree again and again, and checks that all files that it names are there, whole."""

    def __init__(self, tree: str) -> None:
        self.versions: list[str] = []
        self.looks = self.torn = 0
        self._tree, self._store = tree, from_url(BUCKET, client_options={"allow_http": True})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat)
        self._thread.start()

    def _repeat(self) -> None:
        while not self._over.wait(0.2):
            try:
                answer = obstore.get(self._store, f"{self._tree}/index.json")
            except FileNotFoundError:
                continue
            files = json.loads(bytes(answer.bytes()))["files"]
            listed = obstore.list(self._store, prefix=f"{self._tree}/files")
            sizes = {entry["path"].rpartition("/")[2]: entry["size"] for batch in listed for entry in batch}
            again = obstore.head(self._store, f"{self._tree}/index.json")
            if again["e_tag"] != answer.meta["e_tag"]:
                continue  # A new version came between the two, and the files of the old one may be gone.
            self.looks += 1
            self.torn += any(sizes.get(entry["sha256"]) != entry["bytes"] for entry in files.values())
            if str(again["e_tag"]) not in self.versions:
                self.versions.append(str(again["e_tag"]))

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def recap(cache: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a command with its cache in a directory of its own."""
    environment = {**os.environ, "RECAP_CACHE": str(cache), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "recap_ctr", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def must(process: subprocess.Popen[str]) -> None:
    """Wait for a command, which must succeed."""
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(errors)


def fit_with_a_kill(directory: Path) -> dict[str, Any]:
    """Fit from and to the store; kill the command in the middle, and go on as another machine would."""
    reader = Reader("model")
    arguments = ["fit", f"{BUCKET}/data", *FIT, "--out", f"{BUCKET}/model"]
    first = recap(directory / "cache-1", *arguments)
    while not reader.versions and first.poll() is None:
        time.sleep(0.1)
    if first.poll() is not None:
        raise SystemExit(f"the fit ended before it could be killed\n{first.communicate()[1]}")
    first.kill()
    first.communicate()
    killed, refused = time.monotonic(), 0
    while True:
        again = recap(directory / "cache-2", *arguments)
        _, errors = again.communicate()
        if again.returncode == 0:
            break
        if "another process is writing s3://bucket/model" not in errors:
            raise SystemExit(errors)
        refused += 1
        time.sleep(10)
    reader.end()
    return {
        "versions": len(reader.versions),
        "looks": reader.looks,
        "torn": reader.torn,
        "refused_while_the_claim_held": refused,
        "seconds_after_the_kill": round(time.monotonic() - killed, 1),
    }


def score_on_server() -> int:
    """Serve the model from the store; return how many rows of a request were scored."""
    with Server(Path(f"{BUCKET}/model"), "--threads", "1") as server:
        columns = {f"f{number}": ["f1-1"] for number in range(1, 8)}
        body = json.dumps({"columns": columns}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/score", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return len(json.load(answer)["columns"]["probability"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=3000)
    args = parser.parse_args()
    store = start_store()
    try:
        with TemporaryDirectory() as name:
            directory = Path(name)
            os.environ["RECAP_CACHE"] = str(directory / "cache")
            log = directory / "clicks.csv"
            draw(SyntheticConfig(rows=args.rows, seed=1), log, directory / "drawn", quiet=True)
            obstore.put(from_url(BUCKET, client_options={"allow_http": True}), "clicks.csv", log)
            for place, source in ((str(directory), str(log)), (BUCKET, f"{BUCKET}/clicks.csv")):
                must(
                    recap(
                        directory / "cache-1", "prepare", source, "--label", "click", "--out", f"{place}/data"
                    )
                )
            must(recap(directory / "cache-1", "fit", directory / "data", *FIT, "--out", directory / "model"))
            middle = fit_with_a_kill(directory)
            for place, source in ((str(directory), str(log)), (BUCKET, f"{BUCKET}/clicks.csv")):
                scores = f"{place}/scores.parquet"
                must(recap(directory / "cache-2", "predict", f"{place}/model", source, "--out", scores))
            ((stored, _),) = input_files(f"{BUCKET}/scores.parquet")
            result = {
                "rows": args.rows,
                "fit": middle,
                "identical_files": checksums(input_directory(f"{BUCKET}/model"))
                == checksums(directory / "model"),
                "identical_scores": pl.read_parquet(stored).equals(
                    pl.read_parquet(directory / "scores.parquet")
                ),
                "rows_scored_by_the_server": score_on_server(),
                "machine": machine(),
                "versions": {**versions(), **{name: version(name) for name in ("moto", "obstore")}},
            }
    finally:
        store.kill()
        store.wait()
    print(json.dumps(result))
    if middle["torn"] or not (result["identical_files"] and result["identical_scores"]):
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
