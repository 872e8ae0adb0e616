"""The dashboard's page in a real browser, before a stand-in of a server: what it shows of many sessions, swaps and rewards, and
that a refresh takes nothing away from who reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from browser import chromium, needs_chromium
from dashboard_stand import REPLICAS, RUN, SESSIONS, Stand, served

from midstream.api import dashboard

pytestmark = needs_chromium
STEPS = 40
#: The page reads sessions again when this has passed.
MORE_THAN_READ_AGAIN_MS = 5500
#: Where an element is on the screen.
TOP = "element => element.getBoundingClientRect().top"

#: Where elements are, with their texts.
BOXES = """all => all.map((one) => {
  const { x, y, width, height } = one.getBoundingClientRect();
  return { x, y, width, height, text: one.textContent };
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "LOOK_EVERY_S", 0.05)


@pytest.fixture(scope="module")
def busy() -> Stand:
    """After 40 steps of a run."""
    stand = Stand()
    for _ in range(STEPS):
        stand.traffic()
        stand.step()
    return stand


class Shown:
    """A page; what it complained of is in `errors`."""

    def __init__(self, browser: Any, url: str, width: int = 1280) -> None:
        viewport = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=viewport, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.clock.install()
        self.page.goto(url)
        self.page.locator("#session-table tr[data-key]").first.wait_for()
        self.page.locator("#charts figure").first.wait_for()

    def close(self) -> None:
        assert self.errors == []
        self.context.close()

    def refresh(self, stand: Stand) -> None:
        """Every session has another turn, and the page has shown it."""
        stand.traffic()
        self.page.clock.fast_forward(MORE_THAN_READ_AGAIN_MS)
        turns = 3 + stand.turns
        cell = self.page.locator(f"#session-table tr[data-key] td:nth-child(3):text-is('{turns}')")
        cell.first.wait_for(state="attached")

    def turns(self) -> list[str]:
        found: list[str] = self.page.locator("#session-table tr[data-key] td:nth-child(3)").all_inner_texts()
        return found


@pytest.mark.parametrize("focus", ["a session", "a token"])
def test_an_opened_trajectory_keeps_its_place_and_the_focus_over_ten_refreshes(
    browser: Any, focus: str
) -> None:
    stand = Stand()
    with served(stand) as url:
        shown = Shown(browser, url)
        page = shown.page
        row = page.locator("#session-table tr[data-key]").first
        row.focus()
        page.keyboard.press("Enter")
        page.locator("#trace .turn").nth(7).wait_for()
        # The last rows of the sessions are on the screen too, so they are read again.
        page.evaluate(
            "scrollTo(0, scrollY + document.querySelector('#trajectory').getBoundingClientRect().top - 150)"
        )
        token = page.locator("#trace .sampled").nth(5)
        if focus == "a token":
            token.focus()
        held = page.evaluate_handle("document.activeElement")
        where, scrolled = token.evaluate(TOP), page.evaluate("scrollY")
        assert 0 < where < 900
        assert scrolled > 0
        for refresh in range(10):
            if refresh == 5:
                # What is above the trajectory grows.
                stand.error = "the embedding has a NaN at [17, 3]"
            shown.refresh(stand)
            assert token.evaluate(TOP) == pytest.approx(where, abs=1), refresh
            assert held.evaluate("element => document.activeElement === element && element.isConnected")
        assert page.locator("#error-table tr[data-key]").count() == len(REPLICAS)
        assert page.evaluate("scrollY") > scrolled, "what is above grew, and the page went with it"
        shown.close()


def test_a_refresh_keeps_what_is_typed_and_what_is_unfolded(browser: Any, busy: Stand) -> None:
    with served(busy) as url:
        shown = Shown(browser, url)
        page = shown.page
        rows = page.locator("#swap-table tr[data-key]")
        assert rows.count() == 10
        search = page.locator("#swap-table input[type=search]")
        search.fill("/17")
        assert rows.count() == len(REPLICAS)
        assert {text.split("\t")[1] for text in rows.all_inner_texts()} == {f"{RUN}/17"}
        page.get_by_role("button", name=f"Show all {SESSIONS}").click()
        assert page.locator("#session-table tr[data-key]").count() == SESSIONS
        # The sessions are read again while they are on the screen.
        search.evaluate("element => element.focus({preventScroll: true})")
        page.evaluate("scrollTo(0, 0)")
        shown.refresh(busy)
        assert set(shown.turns()) == {str(3 + busy.turns)}
        assert page.locator("#session-table tr[data-key]").count() == SESSIONS
        assert (search.input_value(), rows.count()) == ("/17", len(REPLICAS))
        assert search.evaluate("element => document.activeElement === element")
        search.fill("")
        page.locator("#swap-table button").click()
        assert rows.count() == STEPS * len(REPLICAS)
        shown.close()


def test_errors_come_first_then_sessions_then_charts_and_short_times_are_milliseconds(
    browser: Any, busy: Stand
) -> None:
    with served(busy) as url:
        shown = Shown(browser, url)
        page = shown.page
        sections = page.eval_on_selector_all("main section", "all => all.map(one => one.id)")
        assert sections[:4] == ["errors", "sessions", "trajectory", "charts"]
        figures = page.locator("#charts figcaption").all_inner_texts()
        assert figures[:4] == ["Time to the first token", "Cache hits", "Staleness", "Reward per step"]
        newest = max(busy.sessions, key=lambda one: one["used_at"])
        heads = page.locator("#session-table th").all_inner_texts()
        cells = page.locator("#session-table tr[data-key]").first.locator("td").all_inner_texts()
        told = dict(zip(heads, cells, strict=True))
        assert told["session"] == newest["id"]
        assert (told["first token"], told["token every"]) == ("83.2 ms", "12.3 ms")
        assert told["reward"] == f"{newest['last_reward']:.3g}"
        shown.close()


def legend(page: Any, name: str, across: float) -> dict[str, str]:
    """What a chart says under the pointer, which is at this share of its width."""
    over = page.locator("#charts figure", has_text=name).locator(".u-over")
    # In the middle of the screen: nothing lies over it.
    over.evaluate("element => element.scrollIntoView({block: 'center'})")
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] * across, box["y"] + 20)
    figure = page.locator("#charts figure", has_text=name)
    labels = figure.locator(".u-legend th").all_inner_texts()
    values = figure.locator(".u-legend td").all_inner_texts()
    return dict(zip(map(str.strip, labels), map(str.strip, values), strict=True))


def test_the_charts_have_the_numbers_of_the_reports(browser: Any, busy: Stand) -> None:
    with served(busy) as url:
        shown = Shown(browser, url)
        page = shown.page
        # Each step's mean reward is a fortieth more than the one before.
        for across, step in ((0.0, 1), (1.0, STEPS)):
            told = legend(page, "Reward per step", min(across, 0.999))
            assert told["step"] == f"{step}: {RUN}/{step - 1}"
            assert float(told["reward"]) == pytest.approx((step - 1) / 40, rel=0.01)
        # Chart by chart; a sample in which no turn came to a first token says nothing.
        means = {
            legend(page, "Time to the first token", at / 200)["mean of the turns"] for at in range(96, 106, 2)
        }
        assert means <= {"20", "–"}
        assert "20" in means
        hits = {legend(page, "Cache hits", at / 200)["from the cache"] for at in range(96, 106, 2)}
        assert hits <= {"80", "–"}
        assert "80" in hits
        shown.close()


def test_idle_charts_say_so_and_become_charts(browser: Any) -> None:
    stand = Stand()
    with served(stand) as url:
        shown = Shown(browser, url)
        idle = dict(
            zip(
                shown.page.locator("#charts figcaption").all_inner_texts(),
                shown.page.locator("#charts .idle").all_inner_texts(),
                strict=True,
            )
        )
        assert idle.pop("Reward per step") == "no rewards yet"
        # All replicas serve the newest snapshot: zero says something.
        assert idle.pop("Staleness") == ""
        assert set(idle.values()) == {"no traffic yet"}
        stand.traffic()
        shown.page.locator("#charts figure", has_text="Time to the first token").locator(
            ".idle", has_text=re.compile("^$")
        ).wait_for(state="attached")
        shown.close()


def apart(boxes: list[dict[str, Any]]) -> bool:
    ordered = sorted(boxes, key=lambda box: box["x"])
    return all(one["x"] + one["width"] <= other["x"] for one, other in pairwise(ordered))


@pytest.mark.parametrize("width", [1280, 800, 400])
def test_nothing_is_cut_off_and_the_names_at_the_lanes_can_be_read(
    browser: Any, busy: Stand, width: int
) -> None:
    busy.error = "snapshot refused: " + "the embedding has a NaN at [17, 3]; " * 4
    busy.report()
    with served(busy) as url:
        shown = Shown(browser, url, width)
        page = shown.page
        page.locator("#snapshots").scroll_into_view_if_needed()
        page.locator("#snapshot-table tr[data-key]").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cut = page.eval_on_selector_all(
            ".wide, .charts, figure, header, #timeline",
            "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.id || one.tagName)",
        )
        assert cut == []
        # At one moment: each drawing makes them anew.
        boxes = page.eval_on_selector_all(".lane-name", BOXES)
        lanes: dict[int, list[dict[str, Any]]] = {}
        for box in boxes:
            lanes.setdefault(round(box["y"]), []).append(box)
        assert len(lanes) == len(REPLICAS)
        [over] = page.eval_on_selector_all("#timeline .u-over", BOXES)
        for lane in lanes.values():
            assert apart(lane)
            assert all(
                over["x"] <= box["x"] and box["x"] + box["width"] <= over["x"] + over["width"] for box in lane
            )
            assert all(
                over["y"] <= box["y"] and box["y"] + box["height"] <= over["y"] + over["height"]
                for box in lane
            )
            assert max(lane, key=lambda box: box["x"])["text"] == str(STEPS - 1)
            assert len(lane) >= (STEPS if width == 1280 else 10)
        assert page.inner_text("#swap-names") == f"{STEPS - 1} is short for {RUN}/{STEPS - 1}."
        shown.close()
