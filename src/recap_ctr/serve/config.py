"""The configuration of a server; the supervisor passes it to its workers as JSON."""

import ipaddress
import re

import msgspec

from recap_ctr.errors import InputError
from recap_ctr.serve.token import TOKEN

MEBI = 1 << 20


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client may ask for. Anything beyond is refused with a 4xx before anything large is allocated."""

    body_bytes: int = 8 * MEBI
    held_bytes: int = 256 * MEBI
    """Bytes of all bodies that one worker holds at a time; decoded, they take several times as much memory."""
    rows: int = 10_000
    value_length: int = 4096
    """Characters of one value."""
    values: int = 1000
    """Values of one multi field in one row."""
    header_bytes: int = 16 << 10
    header_seconds: float = 10.0
    body_seconds: float = 10.0
    idle_seconds: float = 75.0
    """How long a connection may stay silent before its first request and between two requests."""
    requests: int = 1024
    """Requests that one worker holds at a time."""
    connections: int = 4096
    """Connections that one worker holds at a time."""
    deadline_ms: float = 60_000.0
    """The longest deadline that a request may set."""
    batch_rows: int = 512
    """The most rows of one batch that joins several requests."""

    @property
    def text_bytes(self) -> int:
        """Return how much text the rows of one body may hold; what a context or Arrow shares counts in each row."""
        return 2 * self.body_bytes


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of one server."""

    artifact: str
    host: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()
    """Host names to accept, in addition to loopback, when the server has no token: those of a proxy."""
    origins: tuple[str, ...] = ()
    """Web pages' origins whose scripts may read the answers (CORS)."""
    workers: int = 1
    threads: int = 1
    """Threads that each worker's engine computes with."""
    deadline_ms: float = 100.0
    """The deadline of requests that set none."""
    dial: bool = True
    watch: bool = False
    access_log: bool = False
    grace_seconds: float = 30.0
    """How long accepted requests may take to finish when the server stops."""
    cost_seconds: float = 1.0
    """How long to measure the engine's speed at the start."""
    offer_seconds: float = 120.0
    """Processor time that the check of an offered artifact may take."""
    offer_mib: int = 2048
    """Memory that it may take, beyond eight times the size of the artifact."""
    limits: Limits = Limits()
    verify_key: str | None = None
    """The file of a public key: every version must be signed by its owner."""
    loader: str = "recap_ctr.serve.interface:load_engine"
    """The function that loads an artifact, as module:function; it takes (path, threads), returns a RowScorer."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address `host`.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """Return the name or address in a Host header, without its port; empty if the header is malformed.

    >>> [host_name(header) for header in ("localhost:8000", "[::1]:80", "[::1]", "Example.com.", "[::1].com")]
    ['localhost', '::1', '::1', 'example.com', '']
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@]+?)\.?)(?::[0-9]*)?", header)
    return (match[1] or match[2]).lower() if match else ""


def check_exposure(config: ServeConfig, token: str | None) -> None:
    """Refuse to listen beyond loopback, or to answer any web page, without a token."""
    if token is None and not is_loopback(config.host):
        raise InputError(
            f"--host {config.host} can be reached from other machines, but no token is set",
            fix=f"set {TOKEN} or --token-file, or serve on 127.0.0.1 behind a proxy",
        )
    if token is None and "*" in config.origins:
        raise InputError(
            "--allow-origin '*' lets the scripts of any web page read the answers, and no token is set",
            fix=f"name the pages' origins, such as https://example.com, or set {TOKEN}",
        )
