"""The site of the documents: every page has its place in it, and the first five minutes are as they are told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from serving import Server, serve

ROOT = Path(__file__).parents[2]
PAGES = {page.name for page in (ROOT / "docs").glob("*.md")}
BLOCKS = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), flags=re.DOTALL)


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for inner in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from pages_of(inner)


def test_every_page_has_one_place_in_the_site() -> None:
    listed = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(PAGES)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path / "state") as running:
        yield running


def test_the_first_five_minutes_are_as_the_page_says(server: Server, tmp_path: Path) -> None:
    def run(block: str) -> str:
        told = block.replace("http://127.0.0.1:8080", server.url)
        told = told.replace(".venv/bin/midstream", f"{sys.executable} -m midstream.cli")
        done = subprocess.run(
            ["sh", "-e", "-c", told],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "MIDSTREAM_SERVER": server.url},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    setup, chat, publish, trace = BLOCKS
    assert "make setup" in setup
    assert json.loads(run(chat))["model"].endswith("@base")
    run(publish)
    assert json.loads(run(chat))["model"].endswith("@step-1")
    [told] = json.loads(run(trace))["traces"]
    assert all(len(turn["logprobs"]) == len(turn["token_ids"]) > 0 for turn in told["turns"])
    labels = [span["snapshot"] for turn in told["turns"] for span in turn["snapshots"]]
    assert labels == ["base", "step-1"]
