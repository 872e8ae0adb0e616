"""The site of the documents: every page has its place in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

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
