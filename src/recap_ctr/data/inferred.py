"""An inferred schema: what each column was taken for and why, as a file that people read and correct."""

from collections.abc import Sequence
from dataclasses import dataclass

import tomli_w

from recap_ctr.schema import Schema

LEFT_OUT = "left out: "
WEIGHT = f"{LEFT_OUT}weight"


@dataclass(frozen=True)
class Finding:
    """What a column was taken for, and why."""

    column: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class Untimed:
    """Why no column can order the rows, though one holds moments, and what to do about it."""

    reason: str
    fix: str


@dataclass(frozen=True)
class Inferred:
    """A schema and the findings it follows from: for each column in the table's order, then for derived fields."""

    schema: Schema
    findings: tuple[Finding, ...]
    origin: str
    rows: int
    notes: tuple[str, ...] = ()
    """What a user should know before anything else: which value of the label was taken for a click."""
    untimed: Untimed | None = None
    """Why the rows can't be split by time, though a column holds moments; None if they can, or none does."""

    def describe_left_out(self) -> str:
        """Return in a sentence which columns are not used, each with the kind of reason; "" if all are."""
        verdicts = {
            finding.column: finding.verdict.removeprefix(LEFT_OUT)
            for finding in self.findings
            if finding.verdict.startswith(LEFT_OUT)
        }
        listed = ", ".join(f"{column!r} ({verdict})" for column, verdict in verdicts.items())
        return f"{LEFT_OUT}{listed}" if listed else ""

    def to_toml(self) -> str:
        """Return the schema as a file to be read by people: each line comes with its reason above it."""
        reasons = {finding.column: _comment(finding.reason) for finding in self.findings}
        lines = [
            f"# Inferred from {self.rows:,} rows of {_comment(self.origin)}.",
            "# Check each reason: what you know of the columns counts for more.",
            f"format = {self.schema.format}",
        ]
        for role, name in self.schema.roles.items():
            lines += ["", f"# {reasons[name]}", _toml_line(role, name)]
            if role == "label":
                values = {"positive": self.schema.positive, "negative": self.schema.negative}
                lines += [_toml_line(key, value) for key, value in values.items() if value is not None]
        for finding in self.findings:
            if finding.verdict == WEIGHT:
                lines += ["", f"# {_comment(finding.reason)}", f"# {_toml_line('weight', finding.column)}"]
        if self.schema.columns is not None:
            lines += ["", "# The files have no header line.", _toml_line("columns", self.schema.columns)]
        if self.schema.separator is not None:
            lines += ["", "# What separates the columns.", _toml_line("separator", self.schema.separator)]
        left_out = [finding for finding in self.findings if finding.verdict.startswith(LEFT_OUT)]
        if left_out:
            lines += ["", "# Columns left out:"]
        for finding in left_out:
            why = f"{finding.verdict.removeprefix(LEFT_OUT)} ({finding.reason})"
            lines.append(f"#   {finding.column!r}: {_comment(why)}")
        for field in self.schema.fields:
            values = field.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
            lines += ["", f"# {reasons[field.name]}", "[[fields]]", tomli_w.dumps(values).rstrip()]
        return "\n".join(lines) + "\n"


def _toml_line(name: str, value: str | Sequence[str]) -> str:
    return tomli_w.dumps({name: value}).rstrip()


def _comment(text: str) -> str:
    """Return text on one line: a column's name or value may hold line ends, which a comment can't."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
