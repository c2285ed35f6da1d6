"""A page as HTML: it is safe, complete, and works in a browser."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from recap_ctr.pages.run import page
from recap_ctr.training.report import RunReport, parse_report, write_report
from tests.conftest import Recap
from tests.support.browser import CHROMIUM, Browser, browser_needed
from tests.support.example_reports import fit_values
from tests.support.html_outline import Outline


def test_page_fetches_nothing_and_escapes_values() -> None:
    evil = '<script>fetch("https://example.com")</script>'
    values = fit_values()
    values["data"]["name"] = evil
    values["fields"][0]["name"] = evil
    html = page(parse_report(values)).to_html()
    assert evil not in html
    assert all(address.startswith("#") for address in Outline(html).addresses)
    assert "default-src 'none'" in html
    links = set(re.findall(r"https?://[^\s\"'<&…]+", html))  # A chart cuts long names short.
    texts = {link for link in links if "https://example.com".startswith(link)}
    assert links - texts <= {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
def test_figures_are_written_next_to_the_page(report: RunReport, tmp_path: Path) -> None:
    assert page(report).write(tmp_path) == tmp_path / "report.html"
    names = {chart.name for chart in page(report).charts}
    for suffix in ("png", "csv"):
        assert {path.stem for path in (tmp_path / "figures").glob(f"*.{suffix}")} == names


@pytest.mark.slow
def test_command_writes_the_page(report: RunReport, tmp_path: Path, recap: Recap) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_report(tmp_path / name, report)
    done = recap("report", tmp_path / "a")
    assert done.code == 0 and "RECAP ranks a clicked row above" in done.out
    assert (tmp_path / "a" / "report.html").is_file()
    assert recap("report", tmp_path / "a", tmp_path / "b").code == 2
    missing = recap("report", tmp_path / "c")
    assert missing.code == 2 and "holds no report.json" in missing.err and "recap fit" in missing.err
    both = recap("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "both", "--json")
    assert json.loads(both.out)["page"].endswith("report.html")


@pytest.mark.slow
@browser_needed
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


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install Debian's chromium")
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_the_answer_comes_first_and_the_rest_is_folded(
    report: RunReport, tmp_path: Path, width: int, height: int
) -> None:
    path = page(report).write(tmp_path)
    browser = Browser(tmp_path / "profile", width, height)
    try:
        browser.open(path.as_uri())
        browser.wait("document.readyState === 'complete'")
        wide, tall = browser.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        assert wide <= width and (width < 600 or tall <= 4 * height)
        assert browser.evaluate("document.querySelector('.lead').getBoundingClientRect().bottom") < height
        assert browser.smallest_letters() >= 11
        browser.evaluate("location.hash = '#configuration'")
        browser.wait("document.querySelector('#configuration').getBoundingClientRect().height > 0")
    finally:
        browser.close()
