"""The bearer token: where it is read from, and which ones are refused."""

from pathlib import Path

import pytest

from recap_ctr.errors import InputError
from recap_ctr.serve.token import MIN_TOKEN, TOKEN, read_token

GOOD = "t" * MIN_TOKEN


def test_a_file_takes_precedence_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN, GOOD)
    assert read_token(None) == GOOD
    (tmp_path / "token").write_text(f"{GOOD}-of-the-file\n")
    assert read_token(tmp_path / "token") == f"{GOOD}-of-the-file"


@pytest.mark.parametrize(
    "content", [b"", GOOD[1:].encode(), b"two words " * 4, f"{GOOD}é".encode(), GOOD.encode() + b"\xff"]
)
def test_weak_and_malformed_tokens_are_refused_without_being_quoted(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(InputError, match="token") as error:
        read_token(tmp_path / "token")
    assert GOOD[1:] not in str(error.value)
