"""The rows of the table of promises: what is tried, the target, the commands that measure it, and what they say.

`python -m benchmarks.reliability` runs the commands; `python -m benchmarks.summary` writes the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Answer = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """A command of this package, whose answer is kept in results/NAME.json."""

    name: str
    command: tuple[str, ...]
    """The module and its arguments."""
    quick: tuple[str, ...]
    """Arguments in place of those, or beside them, that make it short."""
    say: Callable[[Answer], str]
    """Its answer in words."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    number: int
    test: str
    target: str
    measurements: tuple[Measurement, ...]


def checks(row: int) -> Measurement:
    """Return the tests of a row as a measurement."""
    return Measurement(
        f"tests-{row}", ("checks", str(row)), (), lambda answer: f"{answer['passed']} tests pass"
    )


def _total(counts: dict[str, int]) -> int:
    return sum(counts.values())


def _kills(answer: Answer) -> str:
    return f"{answer['kills']:,} kills of {answer['commands']} commands, {len(answer['different'])} different outputs"


def _power_loss(answer: Answer) -> str:
    crashes = answer["crashes"]
    count = sum(entry.get("old", 0) + entry.get("new", 0) for entry in crashes.values())
    return f"{count:,} crashes of {len(crashes)} writers, all whole"


def _calls(answer: Answer) -> str:
    outcomes = [outcome for counts in answer["outcomes"].values() for outcome in counts.items()]
    tracebacks = sum(count for name, count in outcomes if "traceback" in name)
    return (
        f"{answer['cases']:,} failing calls of {len(answer['outcomes'])} commands, {len(answer['wrong'])} not as"
        f" promised; {tracebacks} ended in a traceback"
    )


def _flips(answer: Answer) -> str:
    refused = ", ".join(f"{count:,} {kind}" for kind, count in answer["refused"].items())
    part = "" if answer["over"] else " so far"
    return f"refused{part}: {refused}; accepted: {len(answer['accepted'])}"


def _fuzz(answer: Answer) -> str:
    return (
        f"{answer['cases']:,} requests: {answer['server_errors']} server errors, {answer['workers_died']} dead"
        f" workers, {answer['grown_mib']} MiB more"
    )


def _swap(answer: Answer) -> str:
    sentence = (
        f"{answer['requests']:,} requests, {answer['swaps']} swaps: {answer['lost']} lost, {answer['mixed']}"
    )
    sentence += " mixed"
    if "p99_over_calm" not in answer:  # An earlier version of the command.
        return f"{sentence}, at half of the rate that saturates"
    return (
        f"{sentence}; p99 {answer['p99_over_calm']:.2f} × that without swaps; refused {answer['refused_share']:.2%},"
        f" without swaps {answer['calm_refused_share']:.2%}"
    )


def _overload(answer: Answer) -> str:
    return "; ".join(
        f"{name}: goodput {at['goodput']:.2f}, in time {at['accepted_in_time']:.2%}, refusals' p99"
        f" {at['refusal_p99_ms']} ms beside {at['empty_p99_ms']} ms of an empty endpoint"
        for name, at in answer.items()
        if isinstance(at, dict) and "goodput" in at
    )


def _settings(answer: Answer) -> str:
    aucs = [setting["auc"] for setting in answer["settings"]]
    burst = answer["burst"]
    return (
        f"{burst['in_time']:.2%} of {burst['accepted']:,} answers in time, {burst['lowered']:,} lowered and flagged;"
        f" AUC of the cheapest setting {aucs[-1] - aucs[0]:+.4f}"
    )


def _soak(answer: Answer) -> str:
    added = ", ".join(
        f"{stretch['resident_mib']:+.1f} MiB, {stretch['descriptors']:+.0f} descriptors, {stretch['threads']:+.0f}"
        " threads"
        for stretch in answer["stretches"]
    )
    return f"{answer['requests']:,} requests, {answer['server_errors']} server errors: {added}"


def _values(answer: Answer) -> str:
    (few, _), (many, peak) = answer["preparing"]["peak_mib"].items()
    return (
        f"{int(many):,} distinct values: {peak:,} MiB, {answer['preparing']['ratio']:.2f} × that of {int(few):,};"
        f" unseen values take {answer['requests']['latency_ratio']:.2f} × the time,"
        f" {answer['requests']['grown_mib']:+.1f} MiB"
    )


def _faults(answer: Answer) -> str:
    return (
        f"{answer['caught']['share']:.1%} of {answer['caught']['injected']:,} faults caught, false alarms in"
        f" {answer['false_alarm_share']:.1%} of {answer['clean_windows']:,} clean windows"
    )


def _threads(answer: Answer) -> str:
    same = sum(answer["identical"].values())
    apart = max(answer["logloss_apart"].values())
    return f"{same} of {len(answer['identical'])} ways repeated with the same bytes; logloss at most {apart:.1g} apart"


ROWS = (
    Row(
        1,
        "SIGKILL at random instants, then the same command",
        "500 kills over all commands: identical weights, optimizer state and figures",
        (checks(1), Measurement("kills", ("kills",), ("--kills", "30", "--seconds", "300"), _kills)),
    ),
    Row(
        2,
        "power loss after every change on disk, unsynced writes dropped or not",
        "the old or the new output, whole, at every point",
        (Measurement("power_loss", ("power_loss",), ("--seeds", "1"), _power_loss),),
    ),
    Row(
        3,
        "failing calls: full and broken disk, too many files, no memory; once and from then on",
        "another exit code than 0 and the previous output intact, or the new one whole; no litter",
        (checks(3), Measurement("calls", ("calls",), ("--cases", "40", "--seconds", "300"), _calls)),
    ),
    Row(
        4,
        "every bit of an artifact flipped, every truncation, swapped files",
        "all refused before any score",
        (Measurement("flips", ("flips",), ("--every", "97"), _flips),),
    ),
    Row(
        5,
        "hostile artifacts: links, pipes, paths, bombs, mutated headers",
        "nothing outside is read or written; memory at most that of the file and 64 MiB",
        (checks(5),),
    ),
    Row(
        6,
        "fuzzed requests",
        "no 5xx but a deliberate 503, no hang, the same score afterwards",
        (Measurement("fuzz_server", ("fuzz_server",), ("--cases", "2000"), _fuzz),),
    ),
    Row(
        7,
        "new versions at 70 % load, a damaged one among them",
        "no failed request, no mixed answer, no 429 more, p99 at most 1.5 ×",
        (Measurement("swap", ("swap",), ("--seconds", "20"), _swap),),
    ),
    Row(
        8,
        "2, 5 and 10 times the capacity",
        "at least 99.9 % of what is accepted in time, goodput at least 0.95, refusals 5 ms beyond an empty endpoint",
        (Measurement("overload", ("overload",), ("--seconds", "5"), _overload),),
    ),
    Row(
        9,
        "the dial's cheap settings under a burst",
        "at least 99 % in time, flagged, AUC at most 0.005 less",
        (Measurement("settings", ("settings",), (), _settings),),
    ),
    Row(
        10,
        "a million requests, a tenth of them bad",
        "at most 2 MiB more; descriptors and threads as before",
        (Measurement("soak", ("soak",), ("--requests", "50000", "--warm-up", "10000"), _soak),),
    ),
    Row(
        11,
        "every limit just kept and just broken, false lengths, packed bombs",
        "413 or 400, at most 64 MiB more",
        (checks(11),),
    ),
    Row(
        12,
        "floods of unseen values; 20M distinct values while preparing",
        "memory within its cap, latency at most 1.1 ×",
        (Measurement("values", ("values",), ("--rows", "10000000", "--max-values", "100000"), _values),),
    ),
    Row(
        13,
        "NaN and infinity in tensors, inputs and losses",
        "load refused, 400, the last good checkpoint kept",
        (checks(13),),
    ),
    Row(
        14,
        "bombs of CSV and Parquet, mutated and cut files",
        "bounded time and memory, or an error that names file and row",
        (checks(14),),
    ),
    Row(
        15,
        "faults in rows beside clean windows",
        "at least 95 % caught, at most 1 % false alarms",
        (
            Measurement(
                "faults",
                ("faults", "--logs", "6", "--windows", "56"),
                ("--logs", "3", "--windows", "14"),
                _faults,
            ),
        ),
    ),
    Row(
        16,
        "surface: addresses, tokens, host names",
        "loopback by default, no public bind without a token, no endpoint takes a path",
        (checks(16),),
    ),
    Row(
        17,
        "training with 1, 2 and 4 threads, and 2 workers",
        "the same bytes again; between ways at most 0.001 of logloss",
        (Measurement("threads", ("threads",), ("--rows", "5000"), _threads),),
    ),
    Row(
        18,
        "killed workers, SIGTERM, slow and broken senders",
        "lost at most what was in flight, back in seconds, none lost at the end",
        (checks(18),),
    ),
    Row(
        19,
        "supply chain: floors, lock file, licences, no pickle, no eval",
        "all lists current, no forbidden call",
        (checks(19),),
    ),
)
