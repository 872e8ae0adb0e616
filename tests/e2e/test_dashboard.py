"""The dashboard in a real browser, before a real server through a hot load: what is on the screen is what the API says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser import chromium, needs_chromium
from serving import Server, serve

from midstream.client import SnapshotPublisher

KEYS = """[[gateway.api_keys]]
key = "key-of-all"
scopes = ["operate"]

[[gateway.api_keys]]
key = "key-of-a-sampler"
scopes = ["sample"]
"""
PHONE = {"width": 390, "height": 780}
#: What is in the cells of a table, row by row.
CELLS = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent.trim()))"

# test_dashboard_page.py has the page in a browser, before a server that is played.
pytestmark = [needs_chromium, pytest.mark.variant]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("dashboard")
    config = directory / "midstream.toml"
    config.write_text(KEYS)
    with serve(directory / "state", "--config", str(config), "--no-tinker") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


class Page:
    """A page that was given a key; what it complained of is in `errors`."""

    def __init__(self, browser: Any, server: Server, key: str, **given: Any) -> None:
        self.context = browser.new_context(**given)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        asked: list[str] = []
        self.page.on("request", lambda request: asked.append(request.url))
        self.asked = asked
        self.page.goto(f"{server.url}/dashboard")
        self.page.fill("#key", key)
        self.page.click("#key-go")

    def rows(self, table: str) -> list[list[str]]:
        found: list[list[str]] = self.page.eval_on_selector_all(f"#{table} tr[data-key]", CELLS)
        return found

    def until(self, table: str, text: str) -> list[list[str]]:
        self.page.locator(f"#{table} tr[data-key]", has_text=text).first.wait_for(timeout=30_000)
        return self.rows(table)


def api(server: Server, path: str, **body: Any) -> Any:
    headers = {"x-api-key": "key-of-all", "x-multi-turn-session-id": "tour", "x-midstream-records": "routes"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:
        answer = http.post(path, json=body) if body else http.get(path)
    return answer.raise_for_status().json()


def chat(server: Server, turns: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": server.model, "messages": turns, "max_tokens": 12, "temperature": 0.0, "logprobs": True}
    answer: dict[str, Any] = api(server, "/v1/chat/completions", **body)
    return answer


def test_a_hot_load_on_the_screen_has_the_numbers_of_the_api(server: Server, browser: Any) -> None:
    turns = [{"role": "user", "content": "Digits."}]
    first = chat(server, turns)
    shown = Page(browser, server, "key-of-all")
    assert [row[0] for row in shown.until("replica-table", "replica-1")] == ["replica-0", "replica-1"]
    assert {row[3] for row in shown.rows("replica-table")} == {"base"}
    with SnapshotPublisher(server.url, server.bucket.as_uri(), api_key="key-of-all") as publisher:
        publisher.publish("step-1", server.state_dir / "models" / "tiny-moe", reset_prompt_cache="none")
    shown.until("swap-table", "ready")
    page = shown.page
    for table, column, text in (("swap-table", 6, "ready"), ("replica-table", 4, "step-1")):
        # On both replicas.
        cell = f"td:nth-child({column}):text-is('{text}')"
        page.locator(f"#{table} tr[data-key]:has({cell})").nth(1).wait_for()
    status = api(server, "/hot_load/v1/models/hot_load")
    told = {row["midstream"]["replica"]: row["midstream"]["last_swap"] for row in status["replicas"]}
    for row in shown.rows("swap-table"):
        assert row[1] == "step-1"
        assert float(row[6]) == pytest.approx(told[row[0]]["pause_ms"], rel=0.01)
        assert int(row[7]) == told[row[0]]["streams_crossed"]
    # The same conversation goes on under the new snapshot.
    turns += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
    chat(server, [*turns, {"role": "user", "content": "More."}])

    page.keyboard.press("7")
    [snapshot] = shown.until("snapshot-table", "step-1")
    [row] = api(server, f"/v1/{server.deployment}/ledger")["snapshots"]
    size = sum(file["size"] for file in row["files"])
    assert snapshot[0] == "step-1 (desired)"
    assert snapshot[2] == f"{size / 1e6:.3g} MB"

    page.keyboard.press("2")
    # The page asks every second: the second turn is shown with its next answer.
    page.locator("#session-table tr[data-key='tour'] td:nth-child(3):text-is('2')").wait_for()
    [session] = shown.rows("session-table")
    known = api(server, "/v1/sessions/tour")
    assert session[:3] == ["tour", known["replica"], str(known["turns"])]
    assert session[6] == str(known["generated_tokens"])
    page.focus("#session-table tr[data-key='tour']")
    page.keyboard.press("Enter")
    page.locator("#trace .sampled").first.wait_for()
    [trace] = api(server, "/v1/sessions/tour/trace")["traces"]
    sampled = [
        (str(token), span["snapshot"])
        for turn in trace["turns"]
        for span in turn["snapshots"]
        for token in turn["token_ids"][span["start"] : span["end"]]
    ]
    on_screen = page.eval_on_selector_all(
        "#trace .sampled", "all => all.map(one => [one.dataset.token, one.dataset.snapshot])"
    )
    assert [tuple(one) for one in on_screen] == sampled
    assert {label for _, label in sampled} == {"base", "step-1"}
    assert page.locator("#trace-legend li").all_inner_texts() == ["base", "step-1"]
    page.hover("#trace .sampled >> nth=3")
    tip = page.inner_text("#tip")
    assert f"logprob {trace['turns'][0]['logprobs'][3]:.4f} nats" in tip
    assert "layer 0: experts " in tip
    assert shown.errors == []
    assert {url.split("/dashboard")[0] for url in shown.asked if "/dashboard" in url} == {server.url}
    assert not [url for url in shown.asked if not url.startswith((server.url, "data:"))], (
        "nothing comes from elsewhere"
    )
    shown.context.close()


def test_a_key_without_the_scope_is_asked_for_another(server: Server, browser: Any) -> None:
    shown = Page(browser, server, "key-of-a-sampler")
    shown.page.locator("#key-why", has_text="'observe'").wait_for()
    shown.page.fill("#key", "key-of-all")
    shown.page.click("#key-go")
    assert len(shown.until("replica-table", "replica-1")) == 2
    assert "key-of" not in shown.page.url
    assert shown.errors == []
    shown.context.close()


def test_a_phone_has_no_sideways_scroll_and_the_dark_theme_is_the_systems(
    server: Server, browser: Any
) -> None:
    shown = Page(browser, server, "key-of-all", viewport=PHONE, color_scheme="dark")
    shown.until("replica-table", "replica-1")
    page = shown.page
    page.locator(".charts canvas").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.keyboard.press("?")
    assert page.is_visible("#help-dialog")
    assert shown.errors == []
    shown.context.close()
