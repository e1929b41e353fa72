"""The page in a browser: what it draws, that it lives, and that everybody can use it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from services.chromium import chromium
from ui.sample import NOW, SampleRun, sample_sources

from monolith.cluster.status import ProcessStatus, StatusBoard
from monolith.ui import Feed, Page
from monolith.ui.run_source import RunSource

PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


class Shown:
    """A page, what feeds it, and a tab that looks at it."""

    def __init__(self, page: Page, run: SampleRun, frozen: Feed, tab: Any) -> None:
        self.page = page
        self.run = run
        self.frozen = frozen
        self.tab = tab
        self.asked: list[str] = []
        self.problems: list[str] = []
        tab.on("request", lambda request: self.asked.append(request.url))
        tab.on("pageerror", lambda error: self.problems.append(str(error)))
        tab.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)

    def text(self, selector: str) -> str:
        return str(self.tab.inner_text(selector))

    def wait(self, selector: str, pattern: str) -> None:
        """Wait until the text of an element matches."""
        self.tab.wait_for_function(
            "([place, pattern]) => new RegExp(pattern).test(document.querySelector(place)?.innerText ?? '')",
            arg=[selector, pattern],
            timeout=PATIENCE_MS,
        )


@pytest.fixture
def shown(browser: Any) -> Iterator[Shown]:
    run, sources = sample_sources()
    with Page(sources, every=0.05) as page:
        context = browser.new_context(viewport={"width": 1100, "height": 900})
        context.set_default_timeout(PATIENCE_MS)
        tab = context.new_page()
        looked = Shown(page, run, sources[1], tab)
        tab.goto(str(page.address))
        looked.wait("#connection", "^live$")
        yield looked
        context.close()


def test_it_draws_what_runs_and_servers_say_and_takes_nothing_from_elsewhere(shown: Shown) -> None:
    tab = shown.tab
    assert re.findall(r"(online|frozen|ads)", shown.text("#sources")) == ["online", "frozen", "ads"]
    auc = "figure[data-chart=auc]"
    assert [shown.text(f"{auc} .legend li:nth-child({n}) span") for n in (1, 2)] == ["online", "frozen"]
    assert tab.locator(f"{auc} svg[role=img] path.curve").count() == 2
    label = tab.get_attribute(f"{auc} svg[role=img]", "aria-label")
    assert re.search(r"^AUC, online, over event time\. Now: online 0\.77\d\d; frozen 0\.66\d\d\.", label)
    assert [shown.text(f".stage:nth-child({n}) h4") for n in range(1, 7)] == [
        "read",
        "train",
        "publish",
        "wire",
        "apply",
        "total",
    ]
    assert re.search(r"p50\s50\sms, p99\s155\sms", shown.text(".stage:nth-child(1)"))
    assert re.search(r"item\s+1,204,331\s+193 MB\s+1,310,002\s+88,120\s+12\s+105,671", shown.text("#tables"))
    assert re.search(
        r"ps 1\s+silent for 14 s.*\s2\s", shown.text("#processes tbody tr:nth-child(1)"), re.DOTALL
    )
    assert re.search(r"model\.ckpt-48000.*latest", shown.text("#checkpoints"), re.DOTALL)
    assert "the file rows.bin is damaged" in shown.text("#models")
    assert re.search(r"ads p50\s*1\.9\s*ads p99\s*3\.9", shown.text("figure[data-chart=latency] .legend"))
    assert {url.partition("://")[2].partition("/")[0] for url in shown.asked} == {
        str(shown.page.address).partition("://")[2].strip("/")
    }
    assert shown.problems == []


def test_it_lives_and_shows_a_source_that_goes_and_comes_back(shown: Shown) -> None:
    shown.frozen.add("auc", NOW + 500, 0.1234)
    shown.wait("figure[data-chart=auc] .legend", "frozen\\s*0\\.1234")
    shown.run.problem = "the trainer is away"
    shown.wait("#connection", "^live; down: online$")
    assert "the trainer is away" in shown.text("#sources li:nth-child(1)")
    assert "item" in shown.text("#tables")  # what it said last stays
    shown.run.problem = None
    shown.wait("#connection", "^live$")
    assert shown.problems == []


def test_a_metric_of_another_scale_has_axes_of_its_own_and_an_ended_run_is_not_up(shown: Shown) -> None:
    assert re.search(r"online\s+run, up", shown.text("#sources li:nth-child(1)"))
    shown.frozen.add("evaluation", 100, 0.7, "click/auc")
    for step in (100, 200):
        shown.frozen.add("evaluation:loss", step, 12.5, "loss")
    shown.wait('figure[data-chart="evaluation:loss"] .legend', "frozen\\s*12\\.5")
    assert "loss, evaluated" in shown.text('figure[data-chart="evaluation:loss"] h3')
    axes = [
        shown.tab.locator(f'figure[data-chart="{chart}"] text.axis').all_text_contents()
        for chart in ("evaluation", "evaluation:loss")
    ]
    assert "0.7000" in axes[0]
    assert not [text for text in axes[0] if text.startswith("12")]
    shown.run.state = "ended"
    shown.wait("#sources li:nth-child(1)", "run, ended")
    assert "up" not in shown.text("#sources li:nth-child(1)").split("\n")[1]
    assert shown.tab.get_attribute("#sources li:nth-child(1) p", "class") == "soft"
    assert shown.problems == []


def test_it_finds_its_way_back_when_its_own_server_was_away(browser: Any) -> None:
    with Page([Feed("one <img src=x onerror=alert(1)>")], every=0.05) as first:
        port = int(str(first.address).rpartition(":")[2].strip("/"))
        tab = browser.new_page()
        looked = Shown(first, SampleRun(), Feed("x"), tab)
        tab.goto(str(first.address))
        looked.wait("#sources", "one <img src=x")  # a name is text, whatever it says
        assert tab.locator("img").count() == 0
    looked.wait("#connection", "does not answer; trying again")
    with Page([Feed("two")], port=port, every=0.05):
        looked.wait("#sources", "two")
    tab.close()


def test_a_run_whose_saves_fail_says_why_until_one_succeeds(browser: Any, tmp_path: Path) -> None:
    board, now = StatusBoard(str(tmp_path)), time.time()
    chief = ProcessStatus(role="worker", index=0, state="training", time=now, every=60.0, started=now)
    board.write(replace(chief, save_trouble="saving fails, attempt 2 of 10, 0 bytes free: the disk is full"))
    with Page([RunSource("run", str(tmp_path))], every=0.05) as page:
        tab = browser.new_page()
        looked = Shown(page, SampleRun(), Feed("x"), tab)
        tab.goto(str(page.address))
        looked.wait("#sources", "saving fails, attempt 2 of 10, 0 bytes free: the disk is full")
        assert tab.locator("#processes td.bad").count() == 1
        board.write(chief)
        looked.wait("#sources", "^(?![\\s\\S]*saving fails)")
        assert tab.locator("#processes td.bad").count() == 0
    tab.close()


def test_buttons_are_pressed_by_keyboard_and_say_what_came_of_it(shown: Shown) -> None:
    tab = shown.tab
    hold = tab.get_by_role("button", name="Hold publishing of online")
    resume = tab.get_by_role("button", name="Resume publishing of online")
    assert resume.is_disabled()
    hold.focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#act[open]")
    assert tab.evaluate("document.activeElement.id") == "act-text"
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#act:not([open])", state="attached")
    assert shown.run.calls == []
    assert tab.evaluate("document.activeElement.innerText") == "Hold"  # focus comes back
    tab.keyboard.press("Enter")
    tab.keyboard.type("scores look odd")
    tab.keyboard.press("Enter")
    shown.wait("#publish", "held[\\s\\S]*scores look odd")
    assert shown.run.calls == [("hold", "scores look odd")]
    assert shown.text("#said") == "Hold publishing of online: done"
    tab.get_by_role("button", name="Roll back publishing of online").click()
    tab.fill("#act-text", "9")
    tab.click("#act-do")
    shown.wait("#said", "Roll back of online failed: version 9 is not there any more")
    resume.click()
    tab.click("#act-do")
    shown.wait("#publish", "publishing")
    assert shown.run.calls[-1] == ("resume", "")


def test_splits_are_shown_as_shares_and_changed(shown: Shown) -> None:
    shown.wait("#splits", "ads/45000: 75 %[\\s\\S]*ads/48000: 25 %")
    change = shown.tab.get_by_role("button", name="Change the split of ads of ads")
    change.click()
    assert shown.tab.input_value("#act-text") == "ads/45000:30,ads/48000:10"
    shown.tab.fill("#act-text", "ads/9")
    shown.tab.click("#act-do")
    shown.wait("#said-split", "Change the split of ads, ads failed: ads answers 404")
    change.click()
    shown.tab.fill("#act-text", "ads/45000:1,ads/48000:1")
    shown.tab.keyboard.press("Enter")
    shown.wait("#splits", "ads/45000: 50 %")
    change.click()
    shown.tab.fill("#act-text", "")
    shown.tab.click("#act-do")
    shown.wait("#said-split", "Change the split of ads, ads: done")
    shown.tab.wait_for_selector("#splits li", state="detached")


def test_charts_are_tables_too(shown: Shown) -> None:
    tab = shown.tab
    details = tab.locator("figure[data-chart=auc] details")
    details.locator("summary").focus()
    tab.keyboard.press("Enter")
    rows = details.locator("tbody tr")
    rows.first.wait_for()
    assert 20 <= rows.count() <= 40
    assert re.search(r"^frozen\s+2026-09-21 \d\d:\d\d:\d\d UTC\s+0\.66\d\d$", rows.last.inner_text())


CONTRAST = """
() => {
  const channel = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    return 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  };
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = rgb(getComputedStyle(one).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const written = "h1, h2, h3, h4, p, dt, dd, th, td, li > span, b, summary, button, .axis";
  for (const element of document.querySelectorAll(written)) {
    if (!element.textContent.trim() || !element.checkVisibility() || element.disabled) continue;
    const style = getComputedStyle(element);
    const color = rgb(element.matches(".axis") ? style.fill : style.color);
    const [a, b] = [light(color), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${element.tagName} ${element.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}
"""
UNNAMED = """
() => [...document.querySelectorAll("button, input, [tabindex='0'], section, figure, svg[role=img], dialog")]
  .filter((element) => element.checkVisibility())
  .filter((element) => {
    const by = (element.getAttribute("aria-labelledby") ?? "").split(" ").filter(Boolean);
    const own = element.tagName === "BUTTON" && element.textContent.trim();
    const named = by.map((id) => document.getElementById(id)?.textContent).join("");
    return !(element.getAttribute("aria-label") || named || own || element.labels?.length);
  })
  .map((element) => element.outerHTML.slice(0, 80))
"""


def test_the_page_is_readable_light_or_dark_on_a_screen_or_a_phone(shown: Shown) -> None:
    tab = shown.tab
    for at, (scheme, width) in enumerate(product(("light", "dark"), (1100, 360))):
        tab.emulate_media(color_scheme=scheme)
        tab.set_viewport_size({"width": width, "height": 800})
        shown.frozen.add("auc", NOW + 500 + at, 0.1 + at / 100)  # it is drawn anew
        shown.wait("figure[data-chart=auc] .legend", f"0\\.1{at}00")
        assert tab.evaluate(CONTRAST) == []
        # Only tables scroll sideways, each by itself.
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_users_of_a_screen_reader_find_landmarks_headings_and_names(shown: Shown) -> None:
    tab = shown.tab
    assert tab.evaluate(UNNAMED) == []
    headings = "[...document.querySelectorAll('h1, main h2, main h3, main h4')].map((one) => +one.tagName[1])"
    levels = tab.evaluate(headings)
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for landmark in ("banner", "main"):
        assert tab.get_by_role(landmark).count() == 1
    assert tab.get_by_role("region").count() >= 9
    tab.get_by_role("button", name="Roll back publishing of online").click()
    assert tab.evaluate(UNNAMED) == []
    assert tab.get_by_role("dialog", name="Roll back: online").count() == 1


def test_users_of_the_keyboard_see_the_focus(shown: Shown) -> None:
    tab = shown.tab
    seen = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        seen.append(
            tab.evaluate(
                "(() => { const e = document.activeElement; const s = getComputedStyle(e);"
                " return [e.innerText.slice(0, 24) || e.id, parseFloat(s.outlineWidth) >= 2"
                " && s.outlineStyle !== 'none', e === document.body]; })()"
            )
        )
        if seen[-1][2]:
            break
    names = [name for name, _, left in seen if not left]
    assert names[0] == "Skip to the figures"
    assert {"AUC, online as a table", "Hold", "Roll back"} <= set(names)
    assert [name for name, outlined, left in seen if not outlined and not left] == []


def test_a_page_with_a_token_asks_for_it_and_takes_it_from_the_address_too(browser: Any) -> None:
    _, sources = sample_sources()
    with Page(sources, token="s3cret", every=0.05) as page:
        context = browser.new_context()
        context.set_default_timeout(PATIENCE_MS)
        tab = context.new_page()
        tab.goto(str(page.address))
        tab.wait_for_selector("#ask[open]")
        tab.fill("#ask-token", "wrong")
        tab.keyboard.press("Enter")
        tab.wait_for_function(
            "() => document.querySelector('#ask').open && !document.querySelector('#ask-token').value"
        )
        tab.fill("#ask-token", "s3cret")
        tab.keyboard.press("Enter")
        tab.wait_for_function("() => document.querySelector('#connection').innerText === 'live'")
        tab.close()
        other = context.new_page()
        other.goto(f"{page.address}#token=s3cret")
        other.wait_for_function("() => document.querySelector('#connection').innerText === 'live'")
        assert other.url == page.address  # it is not left where it could be read or copied
        context.close()
