"""What a worker keeps of requests, to compare an offered version by."""

from recap_ctr.serve.codec import Table
from recap_ctr.serve.versions import RECENT_BYTES, RECENT_ROWS, RecentRows


def test_only_small_requests_are_kept() -> None:
    recent = RecentRows()
    for size in (100, RECENT_BYTES, RECENT_BYTES + 1):
        recent.add(Table(10, {"site": [str(size)] * 10}), size)
    assert [table.columns["site"][0] for table in recent.tables()] == ["100", str(RECENT_BYTES)]
    for _ in range(RECENT_ROWS):
        recent.add(Table(3, {}), 10)
    assert RECENT_ROWS - 3 < sum(table.height for table in recent.tables()) <= RECENT_ROWS
