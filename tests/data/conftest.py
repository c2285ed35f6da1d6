import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_fsync() -> Iterator[None]:
    """Skip waiting for the disk: no file here has to survive a power cut, and it is most of a small test's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield
