"""Counters add up over workers, survive them, and are told in Prometheus' own format."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from recap_ctr.serve.counters import BUCKETS, Counters, exposition, labelled


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_workers_add_up_and_successors_go_on(tmp_path: Path) -> None:
    one, other = (Counters(tmp_path / f"counters-{slot:03d}.bin") for slot in range(2))
    name = labelled("recap_requests_total", status=200)
    one.add(name, 3)
    other.add(name, 4)
    one.set("recap_waiting_requests", 5)
    other.set("recap_waiting_requests", 1)
    assert one.totals() == other.totals()
    assert one.totals()[name] == 7 and one.totals()["recap_waiting_requests"] == 6
    after = Counters(tmp_path / "counters-000.bin")  # as after a kill: nothing was closed
    after.add(name)
    assert after.totals()[name] == 8
    assert after.totals()["recap_waiting_requests"] == 1, "what a dead worker held is gone"


def test_exposition_is_what_prometheus_reads(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "counters-000.bin")
    counters.add(labelled("recap_rows_total", routes=8, depth="full"), 12)
    odd = 'a "b" \\ c\nd'
    counters.add(labelled("recap_unseen_total", field=odd), 2)
    latencies = [0.0001, BUCKETS[3], 0.02, 99.0]
    for seconds in latencies:
        counters.observe(seconds)
    found = parsed(exposition(counters.totals()))
    assert found["recap_rows_total", (("depth", "full"), ("routes", "8"))] == 12
    assert found["recap_unseen_total", (("field", odd),)] == 2
    assert found["recap_request_seconds_count", ()] == 4
    assert found["recap_request_seconds_sum", ()] == pytest.approx(sum(latencies))
    for edge in BUCKETS:
        below = sum(seconds <= edge for seconds in latencies)
        assert found["recap_request_seconds_bucket", (("le", f"{edge:g}"),)] == below
    assert found["recap_request_seconds_bucket", (("le", "+Inf"),)] == 4


@given(st.text(max_size=200))
def test_any_label_survives_or_is_counted_elsewhere(value: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        counters = Counters(Path(directory) / "counters-000.bin")
        counters.add(labelled("recap_missing_total", field=value))
        found = counters.totals()
        assert sum(found.values()) == 1
        kept = labelled("recap_missing_total", field=value)
        if len(kept.encode()) <= 120:
            assert found[kept] == 1


def test_names_without_end_are_counted_together(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "counters-000.bin")
    for number in range(3000):
        counters.add(f"recap_number_{number}")
    found = counters.totals()
    assert len(found) == 1024 and sum(found.values()) == 3000
    assert found["recap_uncounted_total"] > 1900
