"""Hostile requests by the ten thousand: no 5xx, no crash, no hang, no growth of memory, and the same score afterwards.

    python -m benchmarks.reliability.fuzz_server [--cases 20000] [--seed 0]

About a fifth of the cases each: requests that schemathesis makes of the OpenAPI document, fitting and not; JSON bodies
with anything anywhere; Arrow bodies with bytes changed or cut off; raw bytes in place of HTTP, and senders that stop in
the middle; and good requests, which must be scored all the same.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import msgspec
import schemathesis
from hypothesis import HealthCheck, Phase

from benchmarks.reliability.running import Server, resident_mib
from benchmarks.speed.criteo_artifact import rows, write
from benchmarks.speed.load import post
from recap_ctr.jobs.machine import machine, versions
from recap_ctr.serve import arrow
from recap_ctr.serve.codec import JSON

FIELDS = ("I1", "I5", "C1", "C3", "C20", "unknown")
TIMEOUT = 30  # seconds; a request that takes longer hangs
WARM = 0.2  # the share of cases after which memory must not grow any more


class Fuzzer:
    """Sends cases, and counts their answers by kind and status."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.rng = port, random.Random(seed)
        self.counts: dict[str, Counter[str]] = {}
        self._connection = self._connect()
        frame = rows(5)
        self._json = msgspec.json.encode({"rows": frame.to_dicts()})
        self._arrow = {kind: arrow.write(frame, kind) for kind in (arrow.STREAM, arrow.FILE)}
        self.golden = self.score()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)

    @property
    def sent(self) -> int:
        return sum(sum(statuses.values()) for statuses in self.counts.values())

    def count(self, kind: str, status: object) -> None:
        self.counts.setdefault(kind, Counter())[str(status)] += 1

    def ask(self, body: bytes, content_type: str) -> tuple[int, bytes]:
        for attempt in range(2):
            try:
                self._connection.request("POST", "/score", body, {"content-type": content_type})
                answer = self._connection.getresponse()
                return answer.status, answer.read()
            except (
                ConnectionError,
                http.client.HTTPException,
            ):  # it may close a kept connection after an error
                self._connection.close()
                if attempt:
                    raise
        raise AssertionError

    def score(self) -> Any:
        status, body = self.ask(self._json, JSON)
        if status != 200:
            raise SystemExit(f"a good request was answered with {status}")
        return json.loads(body)["rows"]

    def good(self) -> None:
        self.count("good", 200)
        if self.score() != self.golden:
            raise SystemExit("a good request got another score than before")

    def anything(self, depth: int = 0) -> Any:
        """Any JSON value."""
        draw = self.rng.random()
        if depth < 3 and draw < 0.15:
            return [self.anything(depth + 1) for _ in range(self.rng.randrange(4))]
        if depth < 3 and draw < 0.3:
            return {
                self.rng.choice((*FIELDS, "rows", "")): self.anything(depth + 1)
                for _ in range(self.rng.randrange(4))
            }
        text = "".join(
            chr(self.rng.choice((self.rng.randrange(32, 127), self.rng.randrange(0xD7FF)))) for _ in range(6)
        )
        huge = self.rng.choice((10**30, -(2**63), 1e308, 5e-324, "9" * 5000, "inf", "NaN", "1e999"))
        return self.rng.choice((None, True, False, 0, 1, -1, 2.5, huge, text, "", text * 1000))

    def json_body(self) -> None:
        asked: Any = {
            self.rng.choice(
                ("rows", "columns", "context", "routes", "depth", "deadline_ms", "other")
            ): self.anything()
            for _ in range(self.rng.randrange(1, 4))
        }
        if self.rng.random() < 0.5:
            asked["rows"] = [
                {self.rng.choice(FIELDS): self.anything(2)} for _ in range(self.rng.randrange(4))
            ]
        body = json.dumps(asked).encode()
        form = self.rng.random()
        if form < 0.1:
            body = body[: self.rng.randrange(len(body))]
        elif form < 0.2:
            at = self.rng.randrange(len(body))
            body = body[:at] + bytes([self.rng.randrange(256)]) + body[at + 1 :]
        elif form < 0.22:
            body = b'{"rows":' + b"[" * 100_000
        self.count("json", self.ask(body, JSON)[0])

    def arrow_body(self) -> None:
        kind = self.rng.choice((arrow.STREAM, arrow.FILE))
        body = bytearray(self._arrow[kind])
        for _ in range(self.rng.randrange(1, 6)):
            body[self.rng.randrange(len(body))] = self.rng.randrange(256)
        if self.rng.random() < 0.2:
            body = body[: self.rng.randrange(len(body))]
        self.count("arrow", self.ask(bytes(body), kind)[0])

    def raw(self) -> None:
        """What is no HTTP, or not all of it."""
        whole = post("/score", self._json, JSON)
        data = self.rng.choice(
            (
                self.rng.randbytes(self.rng.randrange(1, 200)),
                whole[: self.rng.randrange(1, len(whole))],
                whole.replace(
                    b"content-length: ", b"content-length: " + self.rng.choice((b"-", b"1", b"x", b"0x"))
                ),
                whole.replace(b"host:", b"transfer-encoding: chunked\r\nhost:"),
                b"POST /score HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
                + self.rng.choice((b"zz", b"-1\r\n", b"ffffffffffffffff\r\n")),
                b"GET /" + b"x" * self.rng.choice((10, 20_000)) + b" HTTP/1.1\r\n\r\n",
                whole * 3,
            )
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=0.05) as connection:
            answer = b""
            with suppress(OSError):
                connection.sendall(data)
                answer = connection.recv(1 << 16)
        status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "none yet"
        self.count("raw", status)


def schemathesis_cases(fuzzer: Fuzzer, cases: int) -> None:
    """Requests made of the OpenAPI document, some that fit it and some that don't."""
    url = f"http://127.0.0.1:{fuzzer.port}"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    modes = list(schemathesis.GenerationMode)
    operations: list[Any] = [operation.ok() for operation in schema.get_all_operations()]  # type: ignore[union-attr]
    for operation in operations:
        # Half of them for the address that takes bodies.
        share = cases // 2 if operation.path == "/score" else cases // 2 // (len(operations) - 1)
        for mode in modes:

            @hypothesis.settings(
                max_examples=max(1, share // len(modes)),
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @hypothesis.seed(0)
            @hypothesis.given(operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                fuzzer.count("schemathesis", case.call(base_url=url, timeout=TIMEOUT).status_code)

            with suppress(
                hypothesis.errors.Unsatisfiable
            ):  # nothing can misfit an address without parameters
                send()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write(model, 0, small=True)
        with Server(model, "--threads", "1", "--deadline-ms", "30000") as server:
            fuzzer = Fuzzer(server.port, args.seed)
            (worker,) = server.workers
            kinds: list[Callable[[], None]] = [fuzzer.good, fuzzer.json_body, fuzzer.arrow_body, fuzzer.raw]
            warm = 0.0
            schemathesis_cases(fuzzer, args.cases // 5)
            # Of addresses without parameters schemathesis soon has no more to ask.
            rounds = -(-(args.cases - fuzzer.sent) // len(kinds))
            for at in range(rounds):
                if at == int(WARM * rounds):
                    warm = resident_mib(worker)
                for send in kinds:
                    send()
            fuzzer.good()
            grown = resident_mib(worker) - warm
            died = len(server.events("worker died"))
    counts = {kind: dict(statuses) for kind, statuses in fuzzer.counts.items()}
    bad = sum(
        count
        for statuses in counts.values()
        for status, count in statuses.items()
        if status.startswith("5") and status != "503"
    )
    result = {
        "cases": fuzzer.sent,
        "status_by_kind": counts,
        "server_errors": bad,
        "workers_died": died,
        "resident_mib": round(warm, 1),
        "grown_mib": round(grown, 1),
        "seed": args.seed,
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(result))
    if bad or died:
        raise SystemExit("not as promised")


if __name__ == "__main__":
    main()
