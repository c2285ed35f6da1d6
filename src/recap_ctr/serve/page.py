"""The page at `/`: one self-contained HTML file that talks only to this server."""

import base64
import hashlib
from functools import cache
from importlib.resources import files
from string import Template


def _read(package: str, name: str) -> str:
    return (files(package) / name).read_text(encoding="utf-8")


_STYLE = _read("recap_ctr.pages", "style.css") + _read("recap_ctr.serve", "page.css")
_SCRIPT = _read("recap_ctr.serve", "page.js")


def hash_source(text: str) -> str:
    """Return how a content security policy names a style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Browsers run only our own style and script, whatever a value on the page contains.
POLICY = (
    f"default-src 'none'; connect-src 'self'; style-src {hash_source(_STYLE)}; script-src {hash_source(_SCRIPT)};"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def html() -> str:
    """Return the page with its style and script inlined."""
    return Template(_read("recap_ctr.serve", "page.html")).substitute(style=_STYLE, script=_SCRIPT)
