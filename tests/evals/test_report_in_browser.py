"""The HTML report in a real browser, light and dark, wide and narrow."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bough_server.evals.reports.html import html_page
from tests.evals.report_results import comparison, example

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_REQUIRED = "chromium" in os.environ.get("BOUGH_REQUIRE", "").split(",")


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    missing = [name for name in ("chromium",) if shutil.which(name) is None]
    if importlib.util.find_spec("playwright") is None:
        missing.append("the package playwright (pip install --editable '.[browser]')")
    if missing:
        reason = (
            f"NOT TESTED IN A BROWSER: missing {' and '.join(missing)}; BOUGH_REQUIRE=chromium makes this a failure"
        )
        if _REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Root may run it without a sandbox only.
        launched = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield launched
        launched.close()


class _Opened:
    """A report that was opened from a file, with what it requested and what the console said."""

    def __init__(self, browser: "Browser", folder: Path, *, scheme: str = "light", width: int = 1200) -> None:
        self.path = folder / "report.html"
        self.path.write_text(html_page(example(passed=3), comparison()), encoding="ascii")
        self.requests: list[str] = []
        self.errors: list[str] = []
        shown = "dark" if scheme == "dark" else "light"
        self.page: Page = browser.new_page(color_scheme=shown, viewport={"width": width, "height": 900})
        self.page.set_default_timeout(10_000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(self.path.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_a_report_loads_only_itself_and_fits_its_window(
    browser: "Browser", tmp_path: Path, scheme: str, width: int
) -> None:
    opened = _Opened(browser, tmp_path, scheme=scheme, width=width)
    # Everything unfolded is the widest that a page can be.
    opened.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    inner, outer = opened.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert inner <= outer
    assert opened.requests == [opened.path.as_uri()]
    assert opened.errors == []
    folder = os.environ.get("BOUGH_SCREENSHOTS")
    opened.page.screenshot(path=Path(folder or tmp_path) / f"report-{scheme}-{width}.png", full_page=True)
    opened.page.close()


def test_a_case_a_trial_and_a_call_unfold_by_clicks(browser: "Browser", tmp_path: Path) -> None:
    opened = _Opened(browser, tmp_path)
    page = opened.page
    case = page.locator("details.case", has_text="easy-0")
    trial = case.locator("details", has_text="trial 1").first
    call = case.get_by_text("call_researcher")
    assert not trial.is_visible()
    case.locator("> summary").click()
    assert trial.is_visible()
    assert not call.is_visible()
    trial.locator("> summary").click()
    call.click()
    assert case.get_by_text('"topic": "leaves"').first.is_visible()
    assert case.get_by_text("Let me ask the researcher.").is_visible()
    page.close()


def test_dark_and_light_differ_and_paper_is_light(browser: "Browser", tmp_path: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = (_Opened(browser, tmp_path, scheme=scheme).page for scheme in ("light", "dark"))
    assert light.evaluate(background) == "rgb(252, 252, 253)"
    assert dark.evaluate(background) == "rgb(17, 17, 19)"
    dark.emulate_media(media="print")
    assert dark.evaluate(background) == "rgb(252, 252, 253)"
    light.close()
    dark.close()
