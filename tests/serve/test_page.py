"""The page, in a real browser: it scores a row, also by keyboard, and talks only to its server."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recap_ctr.evaluation.calibrate import AffineCalibration, IsotonicCalibration
from recap_ctr.evaluation.metrics import sigmoid
from recap_ctr.serve.config import ServeConfig
from recap_ctr.serve.page import POLICY, html
from tests.support.browser import Browser, browser_needed
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import Address, serve_in_thread

TAB, ENTER = 9, 13
TOKEN = "a-token-of-some-length"
Open = Callable[..., Browser]
CUT = """[...document.querySelectorAll('figure > svg text')].filter((text) => {
  const box = text.getBoundingClientRect(), chart = text.ownerSVGElement.getBoundingClientRect();
  return box.top < chart.top || box.bottom > chart.bottom || box.left < chart.left || box.right > chart.right;
}).map((text) => text.textContent)"""


@pytest.fixture
def browse(tmp_path: Path) -> Iterator[Open]:
    opened: list[Browser] = []

    def begin(width: int = 1280, height: int = 900, *, dark: bool = False) -> Browser:
        opened.append(Browser(tmp_path / f"profile{len(opened)}", width, height, dark=dark))
        return opened[-1]

    yield begin
    for browser in opened:
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Address]:
    with serve_in_thread(FakeEngine({"model": {"name": "recap"}, "parameters": 1234})) as address:
        yield address


def test_the_page_is_one_file_that_loads_nothing_else() -> None:
    text = html()
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "unsafe" not in POLICY and "connect-src 'self'" in POLICY


@pytest.mark.slow
@browser_needed
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_a_row_is_scored_at_every_setting(server: Address, browse: Open, width: int, dark: bool) -> None:
    page = browse(width, dark=dark)
    page.open(server.url)
    shown = page.wait("document.getElementById('probability')?.textContent")
    rows = page.evaluate(
        "[...document.querySelectorAll('#settings tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert [row[0] for row in rows] == [
        "8 routes, depth 4",
        "4 routes, depth 4",
        "1 route, depth 4",
        "1 route, depth 2",
    ]
    assert rows[0][1].startswith(shown[:5])
    filled = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#fields > div')]"
        ".map(d => [d.querySelector('label').textContent.split(' (')[0], d.querySelector('input').value]))"
    )
    assert filled == {"site": "a", "user id": str(10**17), "price": "", "age": "", "tags": "x", "device": ""}
    row = {name: value for name, value in filled.items() if value}
    expected = server.score({"rows": [row]}).json()["rows"][0]["probability"]
    assert shown == f"{expected:.4f}"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "nothing sticks out on a phone"
    )
    assert page.evaluate(
        "document.getElementById('probability').getBoundingClientRect().bottom < innerHeight"
    )
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 23, 28)") == dark
    page.wait("document.querySelectorAll('#latency polyline').length === 2")  # two readings of the counters
    assert "rows scored in all" in page.evaluate("document.getElementById('now').textContent")
    assert page.evaluate("document.getElementById('card').textContent") == "# a card"
    assert page.smallest_letters() >= 11
    assert page.evaluate(CUT) == []
    ticks = page.evaluate("[...document.querySelectorAll('#spread text')].map(t => t.textContent)")
    assert len(set(ticks)) == len(ticks)
    assert not page.console
    assert all(url.startswith((server.url, "data:")) for url in page.requested), page.requested


@pytest.mark.slow
@browser_needed
def test_the_page_shows_what_each_field_adds(server: Address, browse: Open) -> None:
    page = browse()
    page.open(server.url)
    page.wait("document.getElementById('probability')?.textContent")
    shown = page.evaluate(
        "[...document.querySelectorAll('#contributions tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    row = {"site": "a", "user id": str(10**17), "tags": "x"}
    answer = server.score({"rows": [row], "routes": 8, "depth": 4, "explain": 10}).json()["rows"][0]
    expected = [
        [entry["field"], entry["value"], f"{entry['contribution']:+.3f}".replace("-", "−")]
        for entry in answer["contributions"]
    ]
    assert shown == expected and {entry[0] for entry in shown} == set(row)
    assert "not what causes a click" in page.evaluate("document.getElementById('why').textContent")
    page.evaluate("document.getElementById('clear').click(), score()")
    page.wait("document.getElementById('why').hidden")


@pytest.mark.slow
@browser_needed
def test_a_lone_reading_of_the_counters_shows(server: Address, browse: Open) -> None:
    page = browse()
    page.open(server.url)
    page.wait("document.getElementById('probability')?.textContent")
    drawn = "chart(by('rate'), 'Rate', {labels}, [{{ name: 'rate', y: {values} }}], 1), by('rate').innerHTML"
    for labels, values, dots in (
        ("['1']", "[3]", 1),
        ("['1', '2']", "[NaN, 3]", 1),
        ("['1', '2']", "[3, 3]", 0),
    ):
        assert page.evaluate(drawn.format(labels=labels, values=values)).count("<circle") == dots


@pytest.mark.slow
@browser_needed
@pytest.mark.parametrize("width", [390, 1280])
def test_no_table_of_the_docs_is_cut(server: Address, browse: Open, width: int) -> None:
    page = browse(width)
    page.open(f"{server.url}/docs")
    page.wait("document.querySelectorAll('.scroll').length > 10")
    cut = page.evaluate(
        "[...document.querySelectorAll('.scroll, pre')].filter((box) => box.scrollWidth > box.clientWidth + 1)"
        ".map((box) => box.textContent)"
    )
    assert cut == []


@pytest.mark.slow
@browser_needed
def test_keyboard_suggestions_and_errors(server: Address, browse: Open) -> None:
    page = browse()
    page.open(server.url)
    before = page.wait("document.getElementById('probability')?.textContent")
    page.evaluate("document.querySelector('nav a:last-child').focus()")
    page.press("Tab", TAB)
    assert page.evaluate("document.activeElement.id") == "f0"
    page.evaluate("document.activeElement.select()")
    page.type("b")
    page.wait("[...document.querySelectorAll('#list0 option')].map(o => o.value).join() === 'b'")
    page.press("Enter", ENTER)
    page.wait(f"document.getElementById('probability').textContent !== {before!r}")
    page.press("Tab", TAB)
    page.press("Tab", TAB)
    assert page.evaluate("document.activeElement.inputMode") == "decimal"
    page.type("cheap")
    page.press("Enter", ENTER)
    problem = page.wait(
        "document.getElementById('problem').hidden ? '' : document.getElementById('problem').textContent"
    )
    assert "'price'" in problem and "not a number" in problem
    tags = "document.querySelector('#f4')"
    page.evaluate(f"{tags}.focus(), {tags}.select()")
    page.type("x|")
    page.wait("[...document.querySelectorAll('#list4 option')].some(o => o.value === 'x|y')")


@pytest.mark.slow
@browser_needed
def test_the_range_of_routes_is_calibrated_as_the_answer_is(server: Address, browse: Open) -> None:
    page = browse()
    page.open(server.url)
    page.wait("document.getElementById('probability')?.textContent")
    isotonic = IsotonicCalibration((-1.0, 0.5, 2.0), (-3.0, 0.0, 0.25))
    for calibration in (AffineCalibration(2.0, -0.5), isotonic):
        page.evaluate(f"void (model.calibration = {json.dumps(calibration.to_dict())})")
        for raw in (-4.0, -1.0, -0.2, 0.5, 1.9, 2.0, 7.0):
            ends = page.evaluate(f"spread({{raw_logit: {raw}, disagreement: 0.3}})")
            expected = sigmoid(calibration.apply([raw - 0.6, raw + 0.6]))
            assert ends == pytest.approx(expected.tolist())


@pytest.mark.slow
@browser_needed
def test_fields_of_odd_names_are_filled_or_stay_empty(browse: Open) -> None:
    """A browser never sends the name `..`: it takes it for the directory above."""
    for name, filled in (("a/b?#%2F", "q"), ("..", "")):
        with serve_in_thread(FakeEngine({"extra": name})) as address:
            page = browse()
            page.open(address.url)
            page.wait("document.getElementById('probability')?.textContent")
            assert page.evaluate("document.getElementById('f6').value") == filled
            assert page.evaluate("document.getElementById('f0').value") == "a"


@pytest.mark.slow
@browser_needed
def test_hostile_names_are_shown_as_text_and_the_page_asks_for_a_token(browse: Open) -> None:
    evil = '<img src=x onerror="document.title = 1">'
    engine = FakeEngine({"model": {"name": evil}})
    with serve_in_thread(engine, ServeConfig(artifact="", deadline_ms=20_000), token=TOKEN) as address:
        page = browse()
        page.open(address.url)
        page.wait("!document.getElementById('login').hidden")
        page.evaluate("document.getElementById('token').focus()")
        page.type(TOKEN)
        page.press("Enter", ENTER)
        page.wait("document.getElementById('probability')?.textContent")
        assert page.evaluate("document.getElementById('login').hidden")
        assert evil in page.evaluate("document.getElementById('title').textContent")
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.evaluate("document.title").startswith("RECAP")
