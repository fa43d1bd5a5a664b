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

    def __init__(
        self, browser: "Browser", folder: Path, *, scheme: str = "light", width: int = 1280, scripts: bool = True
    ) -> None:
        self.path = folder / "report.html"
        self.path.write_text(html_page(example(passed=3), comparison()), encoding="ascii")
        self.requests: list[str] = []
        self.errors: list[str] = []
        shown = "dark" if scheme == "dark" else "light"
        self.page: Page = browser.new_page(
            color_scheme=shown, viewport={"width": width, "height": 900}, java_script_enabled=scripts
        )
        self.page.set_default_timeout(10_000)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(self.path.as_uri())

    def cases(self) -> list[str]:
        """The cases that are shown, in order."""
        return self.page.locator("#cases tbody:visible > tr > th a").all_inner_texts()


_WORDS = """() => {
  // A word that is broken inside has more boxes than one.
  const broken = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    for (const match of node.data.matchAll(/[A-Za-z_]{2,20}/g)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      if (range.getClientRects().length > 1) broken.push(match[0]);
    }
  }
  return broken;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_report_loads_only_itself_fits_its_window_and_breaks_no_word(
    browser: "Browser", tmp_path: Path, scheme: str, width: int
) -> None:
    opened = _Opened(browser, tmp_path, scheme=scheme, width=width)
    # Why a case failed is read without scrolling aside.
    reasons = opened.page.locator("#cases .why").all()
    assert all(box["x"] + box["width"] <= width for reason in reasons if (box := reason.bounding_box()))
    # Everything unfolded is the widest that a page can be.
    for link in opened.page.locator("#cases th a").all():
        link.click()
    opened.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    inner, outer = opened.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert inner <= outer
    assert opened.page.evaluate(_WORDS) == []
    assert opened.requests == [opened.path.as_uri()]
    assert opened.errors == []
    if folder := os.environ.get("BOUGH_SCREENSHOTS"):
        opened.page.screenshot(path=Path(folder) / f"report-{scheme}-{width}.png", full_page=True)
    opened.page.close()


def test_a_case_a_trial_and_a_call_unfold_by_clicks(browser: "Browser", tmp_path: Path) -> None:
    opened = _Opened(browser, tmp_path)
    page = opened.page
    case = page.locator("tbody", has_text="easy-0")
    trial = case.locator("details", has_text="trial 1").first
    call = case.get_by_text("call_researcher")
    link = case.get_by_role("link", name="easy-0")
    assert (link.get_attribute("aria-expanded"), trial.is_visible()) == ("false", False)
    link.click()
    assert (link.get_attribute("aria-expanded"), trial.is_visible()) == ("true", True)
    assert not call.is_visible()
    trial.locator("> summary").click()
    call.click()
    assert case.get_by_text('"topic": "leaves"').first.is_visible()
    assert case.get_by_text("Let me ask the researcher.").is_visible()
    link.press("Enter")
    assert not trial.is_visible()
    page.close()


def test_a_link_of_a_trial_shows_its_tree(browser: "Browser", tmp_path: Path) -> None:
    opened = _Opened(browser, tmp_path)
    link = opened.page.get_by_title("trial 2, passed")
    for _ in range(2):
        link.click()
        assert opened.page.locator("#case-0-trial-1 .mark.moved").is_visible()
        opened.page.get_by_role("link", name="who-calls-whom").click()
    address = f"{opened.path.as_uri()}#case-2-trial-0"
    opened.page.goto("about:blank")
    opened.page.goto(address)
    assert opened.page.get_by_text("asked by lead / mailer").is_visible()
    opened.page.close()


def test_cases_are_sorted_filtered_and_searched(browser: "Browser", tmp_path: Path) -> None:
    opened = _Opened(browser, tmp_path)
    page = opened.page
    passed = ["easy-0", "easy-1", "easy-2"]
    assert opened.cases() == ["who-calls-whom", "crash", "approval", *passed]
    head = page.locator("#cases").get_by_role("columnheader", name="case", exact=True)
    head.get_by_role("button").click()
    assert (head.get_attribute("aria-sort"), opened.cases()[:2]) == ("ascending", ["approval", "crash"])
    head.get_by_role("button").press("Enter")
    assert (head.get_attribute("aria-sort"), opened.cases()[0]) == ("descending", "who-calls-whom")
    head.get_by_role("button").click()
    assert (head.get_attribute("aria-sort"), opened.cases()[1]) == ("none", "crash")
    # What has no score comes last, whichever way.
    score = page.get_by_role("columnheader", name="agent_trajectory").get_by_role("button")
    for _ in range(2):
        score.click()
        assert opened.cases()[0] == "who-calls-whom"
    page.get_by_role("button", name="passed").click()
    assert opened.cases() == passed
    assert page.locator("#count").inner_text() == "3 of 6 cases"
    page.get_by_role("button", name="flaky").click()
    assert opened.cases() == ["who-calls-whom"]
    page.get_by_role("button", name="all").click()
    page.get_by_label("search").fill("THE MODEL IS gone")
    assert opened.cases() == ["crash"]
    page.get_by_label("search").fill("")
    page.get_by_label("label", exact=True).select_option("topic=nature")
    assert opened.cases() == ["who-calls-whom"]
    page.get_by_label("label", exact=True).select_option("any")
    page.get_by_label("metric not reached").select_option("polite")
    assert opened.cases() == ["who-calls-whom"]
    assert opened.errors == []
    page.close()


def test_of_many_cases_the_first_are_shown_until_all_are_asked_for(browser: "Browser", tmp_path: Path) -> None:
    opened = _Opened(browser, tmp_path)
    opened.path.write_text(html_page(example(passed=250)), encoding="ascii")
    opened.page.reload()
    assert len(opened.cases()) == 200
    opened.page.get_by_role("button", name="show all 253 cases").click()
    assert len(opened.cases()) == 253
    assert not opened.page.locator("#more").is_visible()
    opened.page.close()


def test_a_report_without_scripts_shows_everything(browser: "Browser", tmp_path: Path) -> None:
    opened = _Opened(browser, tmp_path, scripts=False)
    assert len(opened.cases()) == 6
    assert not opened.page.locator("#tools").is_visible()
    assert opened.page.locator("tr.detail details[id]").count() == 7
    assert opened.page.locator("#case-0-trial-0").get_by_text("checker", exact=True).first.is_visible()
    opened.page.close()


def test_dark_and_light_differ_and_paper_is_light(browser: "Browser", tmp_path: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = (_Opened(browser, tmp_path, scheme=scheme).page for scheme in ("light", "dark"))
    assert light.evaluate(background) == "rgb(252, 252, 253)"
    assert dark.evaluate(background) == "rgb(17, 17, 19)"
    dark.emulate_media(media="print")
    assert dark.evaluate(background) == "rgb(252, 252, 253)"
    light.close()
    dark.close()
