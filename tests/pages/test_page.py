"""The page of a run and of several: what it says, that it is safe, and how a browser takes it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from recap_ctr.data.shards import PreparedData
from recap_ctr.errors import InputError
from recap_ctr.pages import compare
from recap_ctr.pages.run import page
from recap_ctr.recipe.stages import Recipe
from tests.bench.test_scaling import recipe
from tests.conftest import Recap

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ORDER = ["Figures", "Frontier", "Reliability", "Theory", "Training", "Fields", "Settings"]


@pytest.fixture(scope="module")
def report(prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made: Recipe = recipe(prepared, tmp_path_factory.mktemp("recipe"), teachers=2)
    return made.run()


class Outline(HTMLParser):
    """Headings, and every address that a tag names."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self._heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._heading = tag == "h2"
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")
        ]

    def handle_data(self, data: str) -> None:
        if self._heading:
            self.headings.append(data)
            self._heading = False


def outline(html: str) -> Outline:
    found = Outline()
    found.feed(html)
    return found


def test_page_answers_first_and_then_goes_in_order(report: dict[str, Any]) -> None:
    shown = page(report, "recap fit data --out model")
    html = shown.to_html()
    assert outline(html).headings == ORDER
    auc = report["metrics"]["test"]["raw"]["auc"]
    assert f"{100 * auc:.2f}" in shown.lead
    assert "recap fit data --out model" in html
    assert report["data"]["fingerprint"] in html
    assert "ensemble of 2" in html and "teacher-1" in html


def test_nothing_is_fetched_and_values_are_only_text(report: dict[str, Any]) -> None:
    evil = '<script>fetch("https://example.com")</script>'
    poisoned = json.loads(json.dumps(report))
    poisoned["data"]["name"] = evil
    poisoned["fields"][0]["name"] = evil
    html = page(poisoned).to_html()
    assert evil not in html
    assert all(address.startswith("#") for address in outline(html).addresses)
    assert "default-src 'none'" in html
    links = set(re.findall(r"https?://[^\s\"'<&]+", html))
    assert links <= {"http://www.w3.org/2000/svg", "https://example.com"}


def test_figures_lie_beside_the_page(report: dict[str, Any], tmp_path: Path) -> None:
    written = page(report).write(tmp_path)
    assert written == tmp_path / "report.html"
    names = {chart.name for chart in page(report).charts}
    for suffix in ("png", "csv"):
        assert {path.stem for path in (tmp_path / "figures").glob(f"*.{suffix}")} == names


def test_a_plain_run_has_a_page_too(report: dict[str, Any]) -> None:
    plain = {
        key: value
        for key, value in report.items()
        if key not in ("teacher_runs", "ensembles", "recovered", "averaging")
    }
    shown = page({**plain, "reference": None, "fields": None})
    assert [section.title for section in shown.sections] == ["Figures", "Reliability", "Training", "Settings"]
    assert "explains" in shown.lead


def test_several_runs_on_one_page(report: dict[str, Any]) -> None:
    worse = json.loads(json.dumps(report))
    worse["metrics"]["test"]["raw"]["auc"] -= 0.05
    shown = compare.page({"old": worse, "new": report})
    assert shown.lead.startswith("new ranks best of 2 runs") and "5.00 points before old" in shown.lead
    other = {**report, "data": {**report["data"], "fingerprint": "0" * 32}}
    with pytest.raises(InputError, match="different data sets"):
        compare.page({"one": report, "two": other})


def test_command_writes_the_page(report: dict[str, Any], tmp_path: Path, recap: Recap) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(report))
    done = recap("report", tmp_path / "a")
    assert done.code == 0 and "RECAP ranks" in done.out
    assert (tmp_path / "a" / "report.html").is_file()
    assert recap("report", tmp_path / "a", tmp_path / "b").code == 2
    missing = recap("report", tmp_path / "c")
    assert missing.code == 2 and "holds no report.json" in missing.err and "recap fit" in missing.err
    both = recap("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "both", "--json")
    assert json.loads(both.out)["page"].endswith("report.html")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install Debian's chromium")
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_a_browser_shows_it_without_errors_or_requests(
    report: dict[str, Any], tmp_path: Path, width: int, height: int
) -> None:
    assert CHROMIUM is not None
    written = page(report).write(tmp_path)
    log = tmp_path / "net.json"
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
            f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", f"--window-size={width},{height}",
            "--no-first-run", "--disable-background-networking", "--disable-component-update", "--dump-dom",
            written.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert ":CONSOLE" not in done.stderr
    dom = done.stdout
    assert dom.count('<svg viewBox="0 0 640 380"') == len(page(report).charts)
    assert dom.count('tabindex="0"') == dom.count("data-tip=") > 10  # the script has run
    asked = set(re.findall(r'"url":"(?:https?|wss?)://([^/":]+)', log.read_text()))
    assert all(host.endswith(("google.com", "googleapis.com", "gvt1.com")) for host in asked), (
        f"beside the browser's own errands, the page asked for {asked}"
    )
