"""The site of the documents: every page has its place in it, and it is of use where it is opened, from a server or the disk."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import chromium, needs_chromium

ROOT = Path(__file__).parents[2]
PAGES = {page.name for page in (ROOT / "docs").glob("*.md")}


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for inner in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from pages_of(inner)


def test_every_page_has_one_place_in_the_site() -> None:
    listed = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(PAGES)


MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
needs_mkdocs = pytest.mark.skipif(not MKDOCS.exists(), reason="run `make docs`")
PAGE_S = 30


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    command = [str(MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(built)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return built


@pytest.fixture(scope="module", params=["server", "disk"])
def base(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    if request.param == "disk":
        yield site.as_uri()
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@needs_chromium
@needs_mkdocs
@pytest.mark.variant
@pytest.mark.parametrize(
    ("page", "word", "title"),
    [
        ("index", "rendezvous", "Architecture"),
        ("decisions/0081-mkdocs-for-the-site", "multipart", "Training records"),
    ],
)
def test_the_search_finds_a_word_and_leads_to_its_page(
    base: str, browser: Any, page: str, word: str, title: str
) -> None:
    opened = browser.new_page()
    opened.set_default_timeout(1000 * PAGE_S)
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(f"{base}/{page}.html")
    opened.get_by_role("textbox", name="Search").click()
    opened.keyboard.type(word)
    found = opened.locator(".md-search-result__article h1", has_text=title).first
    found.click()
    opened.locator(".md-content h1", has_text=title).wait_for()
    assert word in " ".join(opened.locator(".md-content").inner_text().split())
    opened.close()
    assert [url for url in asked if not url.startswith((base, "data:"))] == [], "all of the site is here"


@needs_chromium
@needs_mkdocs
@pytest.mark.variant
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_headings_stand_out_from_the_text(site: Path, browser: Any, scheme: str) -> None:
    opened = browser.new_page(color_scheme=scheme)
    opened.goto((site / "api.html").as_uri())
    background = colour(opened, "body", "backgroundColor")
    for heading in ("h1", "h2", "h3"):
        at = f".md-content {heading}"
        assert int(style(opened, at, "fontWeight")) >= 600
        assert contrast(colour(opened, at, "color"), background) >= 7, "WCAG's AAA"
        assert float(style(opened, at, "fontSize")[:-2]) > float(
            style(opened, ".md-content p", "fontSize")[:-2]
        )
    opened.close()


def style(page: Any, selector: str, name: str) -> str:
    value: str = page.locator(selector).first.evaluate(f"node => getComputedStyle(node).{name}")
    return value


def colour(page: Any, selector: str, name: str) -> tuple[float, ...]:
    """Red, green, blue from 0 to 1, and how opaque it is."""
    numbers = [float(number) for number in re.findall(r"[0-9.]+", style(page, selector, name))]
    return (*(number / 255 for number in numbers[:3]), *(numbers[3:] or [1.0]))


def contrast(over: tuple[float, ...], under: tuple[float, ...]) -> float:
    """WCAG's ratio of luminances of a colour on an opaque one."""

    def luminance(channels: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    seen = [c * over[3] + u * (1 - over[3]) for c, u in zip(over[:3], under[:3], strict=True)]
    darker, lighter = sorted((luminance(seen), luminance(list(under[:3]))))
    return (lighter + 0.05) / (darker + 0.05)
