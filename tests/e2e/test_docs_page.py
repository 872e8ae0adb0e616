"""The page that shows the HTTP API, in a real browser, as a real server serves it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from browser import chromium, needs_chromium
from serving import serve

KEYS = '[[gateway.api_keys]]\nkey = "key-of-all"\nscopes = ["operate"]\n'

pytestmark = needs_chromium


@pytest.mark.variant
def test_the_page_shows_the_chat_operation_and_asks_no_other_host(tmp_path: Path) -> None:
    config = tmp_path / "midstream.toml"
    config.write_text(KEYS)
    with serve(tmp_path / "state", "--config", str(config)) as server, chromium() as browser:
        # What is out of sight is not drawn.
        page = browser.new_page(viewport={"width": 1200, "height": 12_000})
        complaints: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{server.url}/docs")
        chat = page.locator("#operations-Inference-post_v1_chat_completions")
        chat.wait_for(timeout=60_000)
        document = httpx.get(f"{server.url}/openapi.json").raise_for_status().json()
        page.locator("h3.opblock-tag").nth(len(document["tags"]) - 1).wait_for()
        told = document["paths"]["/v1/chat/completions"]["post"]
        assert told["summary"] in chat.inner_text()
        groups = page.locator("h3.opblock-tag").all_inner_texts()
        assert [one.split("\n")[0] for one in groups] == [tag["name"] for tag in document["tags"]]

        chat.locator(".opblock-summary-control").click()
        body = chat.locator(".opblock-section-request-body")
        body.get_by_text("include_routing_matrix").first.wait_for(timeout=60_000)
        assert "x-multi-turn-session-id" in chat.locator(".parameters").first.inner_text()
        # A call of the page's own, with the key that it was given.
        page.locator(".auth-wrapper .authorize").first.click()
        page.locator("#auth-bearer-value").fill("key-of-all")
        page.locator(".auth-btn-wrapper .authorize").first.click()
        page.locator(".btn-done").first.click()
        models = page.locator("#operations-Inference-get_v1_models")
        models.locator(".opblock-summary-control").click()
        models.get_by_role("button", name="Try it out").click()
        models.get_by_role("button", name="Execute").click()
        models.locator(".live-responses-table .response-col_status", has_text="200").first.wait_for()
        assert server.model in models.locator(".live-responses-table").inner_text()

        assert complaints == []
        hosts = {urlsplit(url).netloc for url in asked if not url.startswith(("data:", "blob:"))}
        assert hosts == {urlsplit(server.url).netloc}
