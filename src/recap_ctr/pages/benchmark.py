"""The page of a benchmark: its tables, its sentences and its figure."""

import re
from collections.abc import Sequence
from itertools import groupby

from recap_ctr.pages.page import Image, Page, Section, Table


def page(title: str, markdown: str, images: Sequence[Image] = (), command: str = "") -> Page:
    """Return the page of a benchmark that printed `markdown`: tables with sentences between them.

    The first sentence leads the page. `command` is the one that would make the benchmark again.
    """
    blocks = [
        (is_table, [line for line in lines if line.strip()])
        for is_table, lines in groupby(markdown.splitlines(), lambda line: line.startswith("|"))
    ]
    tables = tuple(_table(lines) for is_table, lines in blocks if is_table)
    sentences = [
        _without_emphasis(line.lstrip("# ")) for is_table, lines in blocks if not is_table for line in lines
    ]
    lead, *points = sentences or [title]
    sections = [
        Section("Tables", points=tuple(points), tables=tables),
        *([Section("Figure", images=tuple(images))] if images else []),
        *([Section("Command", code=command)] if command else []),
    ]
    return Page(title, lead, tuple(sections))


def _table(lines: Sequence[str]) -> Table:
    header, _, *rows = [
        tuple(_without_emphasis(cell.strip()) for cell in line.strip().strip("|").split("|"))
        for line in lines
    ]
    return Table(header, tuple(rows))


def _without_emphasis(text: str) -> str:
    """Return `text` without its marks of bold, underlined and code text."""
    return re.sub(r"</?u>|\*\*|`", "", text)
