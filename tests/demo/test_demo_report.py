"""Summary, verdict and report from a fixed record of a run."""

import io
import json
import math
import queue
import re
from pathlib import Path

import pytest
from browser import chromium, needs_chromium
from demo_helpers import make_row
from rich.console import Console

from midstream.demo.progress import Display, steps_table, summary_lines
from midstream.demo.report import Chart, Line, difference_stderr, misses, render, summarise, write

pytestmark = pytest.mark.fast

KEYS_PROMISED = {
    "reward_first", "reward_last", "reward_stderr", "swaps", "failed_requests", "streams_crossed_swap", "affinity_share",
    "kl_own_routes", "kl_replayed_routes", "pause_ms_p50", "pause_ms_max", "cached_prompt_share", "seconds",
}  # fmt: skip


@pytest.fixture
def rows():
    first = make_row(
        0, reward=0.1, rewards=(0.0, 0.2), streams_crossed_swap=0, tokens=100, kl_own_routes=4e-3,
        kind="full", bytes_sent=1_000_000, publish_s=1.5,
    )  # fmt: skip
    last = make_row(
        1, reward=0.9, rewards=(0.8, 1.0), tokens=300, kl_own_routes=8e-3, kl_replayed_routes=4e-4,
        cached_prompt_tokens=90, prompt_tokens=300, pause_ms=(2.0, 10.0), route_diff_share=0.08,
    )  # fmt: skip
    return [first, last]


@pytest.fixture
def summary(rows):
    return summarise(rows, seed=7, steps=2, seconds=12.5)


def test_the_summary_has_every_promised_key_with_the_numbers_of_the_rows(summary):
    assert set(summary) >= KEYS_PROMISED
    assert summary["reward_first"] == 0.1
    assert summary["reward_last"] == 0.9
    assert summary["reward_stderr"] == pytest.approx(math.sqrt(0.02 / 2 + 0.02 / 2))
    assert summary["swaps"] == 2
    assert summary["streams_crossed_swap"] == 1
    assert summary["affinity_share"] == 1.0
    assert summary["kl_own_routes"] == pytest.approx((4e-3 * 100 + 8e-3 * 300) / 400)
    assert summary["kl_replayed_routes"] == pytest.approx(3e-4)
    # Of 1, 3, 2, 10.
    assert summary["pause_ms_p50"] == 2.5
    assert summary["pause_ms_max"] == 10.0
    assert summary["cached_prompt_share"] == 150 / 400
    assert summary["seconds"] == 12.5
    assert (summary["full_snapshots"], summary["bytes_full"], summary["publish_s_full"]) == (
        1,
        1_000_000,
        1.5,
    )
    assert (summary["deltas"], summary["bytes_delta"], summary["publish_s_delta"]) == (1, 250_000, 0.5)


def test_sizes_of_deltas_and_full_snapshots_are_printed_side_by_side(rows, summary):
    (line,) = [line for line in summary_lines(summary, [], Path("x")) if line.startswith("published")]
    assert line == "published         1 full of 1.00 MB in 1.5 s, 1 deltas of 250.00 kB in 0.5 s (medians)"
    assert "delta 250.00 kB" in render(rows, summary, [])


def test_a_good_run_misses_nothing(summary):
    assert misses(summary) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"reward_last": 0.35}, "reward"),
        ({"reward_last": 0.0, "reward_stderr": 0.0}, "reward"),
        ({"swaps": 1}, "swaps"),
        ({"failed_requests": 1}, "failed"),
        ({"streams_crossed_swap": 0}, "crossed"),
        ({"affinity_share": 0.99}, "one replica"),
    ],
)
def test_each_shortfall_is_named_by_itself(summary, change, word):
    found = misses(summary | change)
    assert len(found) == 1
    assert word in found[0]


def test_ten_swaps_are_wanted_once_there_are_ten_steps(summary):
    assert misses(summary | {"steps": 30, "swaps": 10}) == []
    assert "wanted 10" in misses(summary | {"steps": 30, "swaps": 9})[0]


def test_a_single_rollout_has_no_spread_to_measure():
    assert difference_stderr([0.5], [0.7]) == 0.0
    assert difference_stderr([0.0, 2.0], [0.7]) == 1.0


def test_a_run_without_swaps_has_no_pauses():
    row = make_row(0, pause_ms=(), served=False)
    summary = summarise([row], seed=0, steps=1, seconds=1.0)
    assert summary["pause_ms_p50"] is None
    assert summary["swaps"] == 0
    assert "no swap" in "\n".join(summary_lines(summary, [], Path("x")))


def charts_of(html: str) -> list[dict]:
    return json.loads(re.search(r'id="charts">(.*?)</script>', html)[1])


def test_the_report_is_one_file_that_fetches_nothing(rows, summary):
    html = render(rows, summary | {"versions": {"torch": "2.13"}}, ["reward <fell>"])
    assert not re.search(r"<link|<img|\bsrc=|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", html)
    # An even number: the grid of two columns has no hole.
    assert len(charts_of(html)) == 8
    assert "Missed: reward &lt;fell&gt;" in html
    assert "step-2" in html
    assert "torch 2.13" in html


def test_the_summary_in_the_report_is_in_words_and_units(rows, summary):
    html = render(rows, summary, [])
    for words, value in (
        ("mean reward, last step", "0.900"),
        ("prompt tokens from the cache", "37.5%"),
        ("size of a delta (median)", "250.00 kB"),
        ("pause of a swap, worst", "10.0 ms"),
        ("time", "12.5 s"),
        ("generated tokens", "400"),
    ):
        assert f'<td data-head="quantity">{words}</td><td data-head="value">{value}</td>' in html


@needs_chromium
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("light", 800), ("dark", 390)])
def test_a_browser_draws_every_chart_of_the_report(rows, summary, tmp_path, scheme, width):
    rows[0].snapshot = "demo-20261127-101500-3fa9/19"
    rows[1].snapshot = "</script><b id=x>"
    write(tmp_path, rows, summary, [])
    with chromium() as browser:
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 700})
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.locator(".plots canvas").count() == 8
        wide = "all => all.filter(one => one.querySelector('.uplot').offsetWidth > one.clientWidth).length"
        assert page.eval_on_selector_all(".plots figure", wide) == 0, "no chart lies over another"
        assert page.locator("#x").count() == 0
        assert page.locator(".u-legend", has_text="replayed routes").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cut = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert page.eval_on_selector_all(".wide, figure", cut) == 0, "no column is cut off"
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")
        assert errors == []


def test_the_report_and_the_summary_are_written_beside_each_other(rows, summary, tmp_path):
    write(tmp_path, rows, summary, [])
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert "Every check of the run holds." in (tmp_path / "report.html").read_text()


def test_a_chart_has_every_value_in_order_with_its_band():
    (line,) = Chart("t", "u", [Line("a", [0.0, 5.0, 10.0], [1.0, 0.5, 0.0])]).data()["lines"]
    assert (line["values"], line["low"], line["high"]) == (
        [0.0, 5.0, 10.0],
        [-1.0, 4.5, 10.0],
        [1.0, 5.5, 10.0],
    )


def test_a_logarithmic_chart_leaves_out_zero():
    data = Chart("t", "u", [Line("a", [1e-4, 0.0, 1e-3, 1e-2])], log=True).data()
    assert (data["log"], data["lines"][0]["values"]) == (True, [1e-4, None, 1e-3, 1e-2])


def test_values_that_are_not_numbers_are_left_out():
    data = Chart("a & b", "<u>", [Line("x<y", [1.0, math.nan, 3.0]), Line("none", [math.inf] * 3)]).data()
    assert [line["values"] for line in data["lines"]] == [[1.0, None, 3.0], [None] * 3]


def test_what_takes_long_is_said_again_with_the_seconds():
    """Without a terminal nobody waits before a silent line."""
    clock = iter(range(0, 10_000, 40))
    told = Lines()
    with Display(
        Console(width=120, file=told), steps=2, quiet_s=0.01, monotonic=lambda: float(next(clock))
    ) as display:
        display.say("starting midstream serve with 2 replicas")
        assert told.next() == "starting midstream serve with 2 replicas"
        found = re.fullmatch(r"  (\d+) s since: starting midstream serve with 2 replicas", told.next())
        assert found
        assert int(found[1]) >= 40


class Lines(io.StringIO):
    """A file whose lines are waited for."""

    def __init__(self):
        super().__init__()
        self.lines = queue.SimpleQueue()

    def write(self, text):
        for line in filter(None, text.split("\n")):
            self.lines.put(line)
        return len(text)

    def next(self):
        return self.lines.get(timeout=60)


def test_without_a_terminal_progress_is_plain_lines(rows, capsys):
    with Display(Console(width=120), steps=2) as display:
        display.say("starting")
        rows[0].served = False
        display.row(rows[0])
        rows[0].served = True
        display.row(rows[0])
    text = capsys.readouterr().out
    assert text.splitlines() == [
        "starting",
        "step 1: reward 0.100 (0.0 s)",
        "step-1 serves on every replica: full, 1.00 MB, 1.5 s, paused for 2.0 ms",
    ]


def test_the_table_has_a_line_per_step_with_what_the_swap_did(rows, capsys):
    Console(width=200).print(steps_table(rows))
    lines = [line for line in capsys.readouterr().out.splitlines() if "step-" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells[1] == [
        "2",
        "0.900",
        "step-2",
        "delta 250.00 kB",
        "0.5",
        "6.0",
        "30%",
        "50%",
        "1/4",
        "8.0%",
        "8.0e-03",
        "4.0e-04",
        "0.0",
    ]
