"""The report in a browser: what the page's script does. Needs playwright and Chromium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.observe.report import save_report
from tests.support.histories import Made, history_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

Opened = Callable[..., Any]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    history = history_of(Made(workers=3, microbatches=6, slow=1.3))
    save_report(history, path, history_of(Made(seed=2)))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    """Opens the report; in the end nothing may have been said on the console."""
    said: list[str] = []
    pages = []

    def opened(width: int = 1280, scheme: str = "light") -> Any:
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        pages.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.extend([request.url] * is_elsewhere(request.url)))
        page.goto(report.as_uri())
        page.wait_for_selector("#lanes .box")
        return page

    yield opened
    for page in pages:
        page.close()
    assert said == []


def is_elsewhere(url: str) -> bool:
    return not url.startswith(("file:", "data:", "blob:"))


def scale(page: Any) -> float:
    return float(page.get_attribute("#lanes svg", "data-scale"))


def begin(page: Any) -> float:
    return float(page.get_attribute("#lanes svg", "data-from"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(opened: Opened, width: int, scheme: str) -> None:
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .bar b, svg')"
        " && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


def test_keys_zoom_and_move_the_drawing(opened: Opened) -> None:
    page = opened()
    page.focus("#lanes svg")
    assert scale(page) == 1
    page.keyboard.press("+")
    assert scale(page) == pytest.approx(1.5, rel=1e-3)
    before = begin(page)
    page.keyboard.press("ArrowRight")
    assert begin(page) > before
    page.keyboard.press("ArrowLeft")
    assert begin(page) == pytest.approx(before)
    page.keyboard.press("-")
    assert scale(page) == pytest.approx(1.0)
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert (scale(page), begin(page)) == (1, 0)


def test_the_wheel_zooms_a_drawing_that_was_clicked_and_else_moves_the_page(
    opened: Opened,
) -> None:
    page = opened()
    box = page.locator("#lanes svg")
    box.scroll_into_view_if_needed()
    place = box.bounding_box()
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + 60)
    page.mouse.wheel(0, -200)
    page.wait_for_timeout(100)
    assert scale(page) == 1
    box.scroll_into_view_if_needed()
    place = box.bounding_box()
    page.mouse.click(place["x"] + place["width"] / 2, place["y"] + 60)
    page.mouse.wheel(0, -200)
    page.wait_for_function("document.querySelector('#lanes svg').dataset.scale > 1")
    before = begin(page)
    page.mouse.down()
    page.mouse.move(place["x"] + place["width"] / 2 - 80, place["y"] + 60)
    page.mouse.up()
    assert begin(page) > before


def test_boxes_say_what_they_are_when_they_have_the_focus(opened: Opened) -> None:
    page = opened()
    assert page.locator("#tip").is_hidden()
    page.focus("#lanes svg")
    page.keyboard.press("Tab")
    assert page.locator("#tip").is_visible()
    assert "forward of micro-batch 0 in stage 0" in page.inner_text("#tip")
    assert "stage 0 is layers.0 to layers.2" in page.inner_text("#tip")
    page.keyboard.press("ArrowDown")
    assert "waits to begin with micro-batch 0 in stage 1" in page.inner_text("#tip")
    assert "it waits for the forward of micro-batch 0 in stage 0 on worker 0" in page.inner_text(
        "#tip"
    )
    page.keyboard.press("ArrowRight")
    assert "forward of micro-batch 0 in stage 1" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_tab_enters_a_box_that_is_to_be_seen(opened: Opened) -> None:
    page = opened()
    page.focus("#lanes svg")
    for _ in range(8):
        page.keyboard.press("+")
    for _ in range(200):
        page.keyboard.press("ArrowRight")
    at = begin(page)
    assert at > 0
    page.keyboard.press("Tab")
    assert page.locator("#tip").is_visible()
    assert begin(page) == at
    page.keyboard.press("0")
    assert page.locator("#tip").is_visible()


def test_boxes_say_what_they_are_under_the_mouse(opened: Opened) -> None:
    page = opened()
    page.locator("#lanes rect.p-backward").first.hover()
    assert "backward of micro-batch" in page.inner_text("#tip")


def test_another_step_can_be_chosen(opened: Opened) -> None:
    page = opened()
    names = page.locator("#record option").all_inner_texts()
    assert len(names) == 3
    assert sum("(median)" in name for name in names) == 1
    other = next(place for place, name in enumerate(names) if "(median)" not in name)
    page.select_option("#record", index=other)
    assert names[other] in page.text_content("#lanes")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_button_turns_light_into_dark_and_back(opened: Opened, scheme: str) -> None:
    page = opened(scheme=scheme)

    def is_dark() -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour[4:-1].split(","))) < 300

    assert is_dark() == (scheme == "dark")
    page.click("#theme")
    assert is_dark() == (scheme == "light")
    page.click("#theme")
    assert is_dark() == (scheme == "dark")


def test_bars_are_as_long_as_their_parts(opened: Opened) -> None:
    page = opened()
    bar = page.locator("#workers .bar").first
    widths = bar.locator(".part").evaluate_all(
        "parts => parts.map(part => part.getBoundingClientRect().width)"
    )
    shares = bar.locator(".part").evaluate_all("parts => parts.map(part => +part.style.flexGrow)")
    assert sum(shares) == pytest.approx(100)
    whole = bar.bounding_box()["width"]
    assert sum(widths) > 0.95 * whole
    for width, share in zip(widths, shares, strict=True):
        assert width == pytest.approx(whole * share / 100, abs=0.04 * whole)


def test_the_data_can_be_downloaded(opened: Opened, tmp_path: Path) -> None:
    page = opened()
    with page.expect_download() as download:
        page.click("#download")
    path = tmp_path / "run.json"
    download.value.save_as(path)
    assert json.loads(path.read_text())["about"]["description"]["model"] == "Net"
