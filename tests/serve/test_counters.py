"""Counters add up over workers, survive them, and are published in Prometheus' own format."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from recap_ctr.serve.counters import BUCKETS, Counters, exposition, labelled


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    values = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return values


def test_workers_add_up_and_successors_continue(tmp_path: Path) -> None:
    first, second = (Counters(tmp_path / f"counters-{slot:03d}.bin") for slot in range(2))
    name = labelled("recap_requests_total", status=200)
    first.add(name, 3)
    second.add(name, 4)
    first.set("recap_waiting_requests", 5)
    second.set("recap_waiting_requests", 1)
    assert first.totals() == second.totals()
    assert first.totals()[name] == 7 and first.totals()["recap_waiting_requests"] == 6
    successor = Counters(tmp_path / "counters-000.bin")  # as after a kill: nothing was closed
    successor.add(name)
    assert successor.totals()[name] == 8
    assert successor.totals()["recap_waiting_requests"] == 1, "a dead worker's requests are gone"


def test_prometheus_can_read_the_exposition(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "counters-000.bin")
    counters.add(labelled("recap_rows_total", routes=8, depth="full"), 12)
    odd = 'a "b" \\ c\nd'
    counters.add(labelled("recap_unseen_total", field=odd), 2)
    latencies = [0.0001, BUCKETS[3], 0.02, 99.0]
    for seconds in latencies:
        counters.observe(seconds)
    values = parse(exposition(counters.totals()))
    assert values["recap_rows_total", (("depth", "full"), ("routes", "8"))] == 12
    assert values["recap_unseen_total", (("field", odd),)] == 2
    assert values["recap_request_seconds_count", ()] == 4
    assert values["recap_request_seconds_sum", ()] == pytest.approx(sum(latencies))
    for edge in BUCKETS:
        below = sum(seconds <= edge for seconds in latencies)
        assert values["recap_request_seconds_bucket", (("le", f"{edge:g}"),)] == below
    assert values["recap_request_seconds_bucket", (("le", "+Inf"),)] == 4


@given(st.text(max_size=200))
def test_any_label_is_kept_or_counted_as_uncounted(value: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        counters = Counters(Path(directory) / "counters-000.bin")
        name = labelled("recap_missing_total", field=value)
        counters.add(name)
        totals = counters.totals()
        assert sum(totals.values()) == 1
        if len(name.encode()) <= 120:
            assert totals[name] == 1


def test_names_beyond_the_table_are_counted_together(tmp_path: Path) -> None:
    counters = Counters(tmp_path / "counters-000.bin")
    for number in range(3000):
        counters.add(f"recap_number_{number}")
    totals = counters.totals()
    assert len(totals) == 1024 and sum(totals.values()) == 3000
    assert totals["recap_uncounted_total"] > 1900
