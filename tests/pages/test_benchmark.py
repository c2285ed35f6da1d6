"""The page of a benchmark."""

from recap_ctr.pages.benchmark import page
from recap_ctr.pages.page import Image

MARKDOWN = """
## **recap** is best by `0.1` points.

| model | AUC |
|---|---|
| fcn | <u>90.5</u> |
| recap | **90.6** |

Three seeds each.
"""


def test_page_shows_the_tables_and_sentences_of_a_benchmark() -> None:
    benchmark = page("Table 1", MARKDOWN, [Image("curve", "a curve", b"png")], "recap bench table1")
    assert (benchmark.title, benchmark.lead) == ("Table 1", "recap is best by 0.1 points.")
    tables, figure, command = benchmark.sections
    assert tables.points == ("Three seeds each.",)
    assert [(table.header, table.rows) for table in tables.tables] == [
        (("model", "AUC"), (("fcn", "90.5"), ("recap", "90.6")))
    ]
    assert [image.name for image in figure.images] == ["curve"]
    assert command.code == "recap bench table1"
    assert [section.title for section in page("Table 1", "").sections] == ["Tables"]
