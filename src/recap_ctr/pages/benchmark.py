"""The page of a benchmark: its tables and sentences, and its figure."""

import re
from collections.abc import Sequence
from itertools import groupby

from recap_ctr.pages.page import Image, Page, Section, Table


def page(title: str, markdown: str, images: Sequence[Image] = (), command: str = "") -> Page:
    """`markdown` is what the benchmark prints: tables, and between them sentences, of which the first leads."""
    blocks = [
        (is_table, [line for line in lines if line.strip()])
        for is_table, lines in groupby(markdown.splitlines(), lambda line: line.startswith("|"))
    ]
    tables = tuple(_table(lines) for is_table, lines in blocks if is_table)
    said = [_plain(line.lstrip("# ")) for is_table, lines in blocks if not is_table for line in lines]
    lead, *points = said or [title]
    sections = [
        Section("Tables", points=tuple(points), tables=tables),
        *([Section("Figure", images=tuple(images))] if images else []),
        *([Section("Settings", code=command)] if command else []),
    ]
    return Page(title, lead, tuple(sections))


def _table(lines: Sequence[str]) -> Table:
    header, _, *rows = [
        tuple(_plain(cell.strip()) for cell in line.strip().strip("|").split("|")) for line in lines
    ]
    return Table(header, tuple(rows))


def _plain(text: str) -> str:
    """Without the marks of emphasis."""
    return re.sub(r"</?u>|\*\*|`", "", text)
