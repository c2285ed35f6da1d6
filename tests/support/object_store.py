"""An S3 server on loopback, in this process, and what is in its bucket."""

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import obstore
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import from_url

BUCKET = "bucket"
SECRET = "a-secret-that-nobody-may-see"


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve an empty bucket, and set the environment that leads to it; yield the bucket's URL."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        for name, value in {
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }.items():
            patch.setenv(name, value)
        request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request):
            pass
        yield f"s3://{BUCKET}"
    finally:
        server.stop()


def keys(prefix: str = "") -> list[str]:
    """Return the keys in the bucket."""
    store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
    return sorted(entry["path"] for batch in obstore.list(store, prefix=prefix or None) for entry in batch)


def put(key: str, content: bytes) -> None:
    """Put an object into the bucket."""
    obstore.put(from_url(f"s3://{BUCKET}", client_options={"allow_http": True}), key, content)


def delete(key: str) -> None:
    """Remove an object from the bucket."""
    obstore.delete(from_url(f"s3://{BUCKET}", client_options={"allow_http": True}), key)
