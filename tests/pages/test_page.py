"""The page of a run and of several: what it says, that it is safe, and how a browser shows it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.errors import InputError
from recap_ctr.pages import compare
from recap_ctr.pages.run import page
from recap_ctr.training.report import FitReport, RunReport, parse_report, write_report
from tests.conftest import Recap

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TITLES = ["Results", "Frontier", "Reliability", "Theory", "Training", "Fields", "Configuration"]


def metrics(auc: float) -> dict[str, Any]:
    """Return metrics on 1,000 validation and 2,000 test rows."""
    figures = {"auc": auc, "auc_error": 0.001, "logloss": 1 - auc, "calibration_error": 0.02}
    bins = [
        {"low": low, "high": low + 0.5, "rows": 500.0, "mean_prediction": low + 0.2, "mean_label": low + 0.3}
        for low in (0.0, 0.5)
    ]
    return {
        split: {
            "rows": rows,
            "base_rate": 0.2,
            "base_rate_logloss": 0.5,
            "raw": figures,
            "calibrated": {**figures, "logloss": 0.3},
            "reliability": bins,
            "reliability_raw": bins,
        }
        for split, rows in (("valid", 1_000), ("test", 2_000))
    }


def run_values() -> dict[str, Any]:
    """Return the report of a RECAP run as plain JSON values."""
    epoch = {"step": 10, "learning_rate": 0.001, "valid_logloss": 0.3, "seconds": 1.0, "beta": 0.99}
    return {
        "data": {
            "name": "toy",
            "fingerprint": "1" * 32,
            "splits": {"train": {"rows": 8_000, "positives": 1_600}},
        },
        "model": {"name": "recap", "config": {"dim": 4}},
        "train": {"max_epochs": 2},
        "threads": 1,
        "device": "cpu",
        "calibration": "affine",
        "negative_rate": 1.0,
        "parameters": 110,
        "calibrated_by": {"kind": "affine", "scale": 1.0, "shift": 0.0},
        "metrics": metrics(0.81),
        "best_epoch": 2,
        "history": [
            {**epoch, "epoch": 1, "train_loss": 0.4, "valid_auc": 0.79, "raw_auc": 0.78},
            {**epoch, "epoch": 2, "train_loss": 0.3, "valid_auc": 0.80, "raw_auc": 0.79},
        ],
        "seconds": {"train": 1.0, "evaluate": 1.0},
        "versions": {"torch": "2"},
        "machine": {"processor": "A processor", "cores": 2},
        "date": "2026-01-01",
    }


def fit_values() -> dict[str, Any]:
    """Return the report of a fit with two teachers as plain JSON values."""

    def estimate(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.001, "high": value + 0.001}

    names = ("loss", "auc", "predicted", "gain", "auc_gain")
    points = [{"count": count, **{name: estimate(0.01) for name in names}} for count in (1, 2)]
    teacher = {"parameters": 100, "epochs": 2, "seconds": {"train": 1.0, "evaluate": 1.0}}
    return {
        **run_values(),
        "reference": {"lr": {"test": {"auc": 0.7, "logloss": 0.45}}},
        "fields": [
            {"name": name, "values": 30, "oov": {"train": 0.0, "test": oov}, "drift": {"test": 0.1}}
            for name, oov in (("site", 0.01), ("ad", 0.05))
        ],
        "recipe": {},
        "plan": {},
        "student": "students/recap",
        "students": {"students/recap": metrics(0.81)},
        "teacher_runs": {
            f"teachers/teacher-{seed}": {**teacher, "seed": seed, "metrics": metrics(0.80)} for seed in (1, 2)
        },
        "ensembles": [{"teachers": count, "metrics": metrics(auc)} for count, auc in ((1, 0.80), (2, 0.82))],
        "recovered": 0.5,
        "size_against_teacher": 1.1,
        "averaging": {"axis": "run", "averaged": [], "held": {}, "points": points, "forecast": []},
    }


@pytest.fixture
def report() -> RunReport | FitReport:
    return parse_report(fit_values())


class Outline(HTMLParser):
    """The headings of a page, and every address in its tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self._in_heading = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_heading = tag == "h2"
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")
        ]

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings.append(data)
            self._in_heading = False


def test_page_gives_the_answer_first(report: RunReport) -> None:
    fit_page = page(report, "recap fit data --out model")
    html = fit_page.to_html()
    assert Outline(html).headings == TITLES
    assert fit_page.lead == (
        "RECAP puts the click first in 81.00 % of pairs of a click and a non-click (AUC 81.00 ± 0.20) on 2,000 test"
        " rows: +1.00 points compared with one of its teachers, where the ensemble of all 2 gains +2.00, with 1.10"
        " times the parameters of one teacher."
    )
    assert "recap fit data --out model" in html
    assert report.data.fingerprint in html
    assert "ensemble of 2" in html and "teacher-1" in html
    assert "<td>lr</td><td></td><td>70.000</td>" in html
    assert "The field ad has the most unknown values: 5.00 %" in html
    assert "docs/glossary.md" in html.partition("<footer>")[2]


def test_page_fetches_nothing_and_escapes_values() -> None:
    evil = '<script>fetch("https://example.com")</script>'
    values = fit_values()
    values["data"]["name"] = evil
    values["fields"][0]["name"] = evil
    html = page(parse_report(values)).to_html()
    assert evil not in html
    assert all(address.startswith("#") for address in Outline(html).addresses)
    assert "default-src 'none'" in html
    links = set(re.findall(r"https?://[^\s\"'<&]+", html))
    assert links <= {"http://www.w3.org/2000/svg", "https://example.com"}


def test_figures_are_written_next_to_the_page(report: RunReport, tmp_path: Path) -> None:
    assert page(report).write(tmp_path) == tmp_path / "report.html"
    names = {chart.name for chart in page(report).charts}
    for suffix in ("png", "csv"):
        assert {path.stem for path in (tmp_path / "figures").glob(f"*.{suffix}")} == names


def test_page_of_a_run_without_teachers() -> None:
    run_page = page(parse_report(run_values()))
    titles = [section.title for section in run_page.sections]
    assert titles == ["Results", "Reliability", "Training", "Configuration"]
    assert "calibrated, it lowers logloss by 40.0 %" in run_page.lead


def test_page_quotes_validation_rows_where_there_are_no_test_rows() -> None:
    values = run_values()
    del values["metrics"]["test"]
    assert "on 1,000 valid rows" in page(parse_report(values)).lead


def test_page_shows_auc_within_groups() -> None:
    values = run_values()
    values["metrics"]["test"]["raw"]["group_auc"] = {"auc": 0.75, "num_groups": 1_200, "num_one_class": 3}
    groups = next(section for section in page(parse_report(values)).sections if section.title == "Groups")
    assert [value for _, value in groups.tables[0].rows] == ["75.000", "1,200", "3"]


def test_several_runs_on_one_page(report: RunReport) -> None:
    worse = parse_report({**run_values(), "metrics": metrics(0.76)})
    comparison = compare.page({"old": worse, "new": report})
    assert comparison.lead == (
        "new has the highest AUC of 2 runs on the test rows: 81.00 points, 5.00 more than old."
    )
    titles = [section.title for section in comparison.sections]
    assert titles == ["Results", "Frontier", "Reliability", "Training"]
    other = report.model_copy(update={"data": report.data.model_copy(update={"fingerprint": "0" * 32})})
    with pytest.raises(InputError, match="2 different data sets"):
        compare.page({"one": report, "two": other})


def test_command_writes_the_page(report: RunReport, tmp_path: Path, recap: Recap) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_report(tmp_path / name, report)
    done = recap("report", tmp_path / "a")
    assert done.code == 0 and "RECAP puts the click first" in done.out
    assert (tmp_path / "a" / "report.html").is_file()
    assert recap("report", tmp_path / "a", tmp_path / "b").code == 2
    missing = recap("report", tmp_path / "c")
    assert missing.code == 2 and "holds no report.json" in missing.err and "recap fit" in missing.err
    both = recap("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "both", "--json")
    assert json.loads(both.out)["page"].endswith("report.html")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install Debian's chromium")
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_browser_shows_the_page_without_errors_or_requests(
    report: RunReport, tmp_path: Path, width: int, height: int
) -> None:
    assert CHROMIUM is not None
    path = page(report).write(tmp_path)
    log = tmp_path / "net.json"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--v=0",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--log-net-log={log}",
        f"--window-size={width},{height}",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--dump-dom",
    ]
    done = subprocess.run(
        [CHROMIUM, *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert ":CONSOLE" not in done.stderr
    dom = done.stdout
    assert dom.count('<svg viewBox="0 0 640 380"') == len(page(report).charts)
    # Only the script sets tabindex, so it has run.
    assert dom.count('tabindex="0"') == dom.count("data-tip=") > 10
    hosts = set(re.findall(r'"url":"(?:https?|wss?)://([^/":]+)', log.read_text()))
    page_hosts = {host for host in hosts if not host.endswith(("google.com", "googleapis.com", "gvt1.com"))}
    assert not page_hosts, "the page made requests that are not the browser's own"
