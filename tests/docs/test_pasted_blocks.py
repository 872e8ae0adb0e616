"""The blocks of the README, the documents and the examples' pages: each has its place in one table.

Those that can be run here are run as pasted, page after page, against one server, whose address alone is another one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from blocks import BLOCKS, ROOT, Block, Elsewhere, Run, blocks, pages
from serving import Server, serve

from midstream.core.settings import load_settings

ADDRESS = "http://127.0.0.1:8080"
#: What a person's shell would not have from this process.
FOREIGN = ("TINKER", "PYTHON", "HF_", "MIDSTREAM")


def test_every_block_of_every_page_has_its_place_in_the_table() -> None:
    there = {page: [block.language for block in blocks(page)] for page in pages()}
    assert {page: len(found) for page, found in there.items() if found} == {
        page: len(kinds) for page, kinds in BLOCKS.items()
    }
    for page, kinds in BLOCKS.items():
        for language, kind in zip(there[page], kinds, strict=True):
            if isinstance(kind, Run) and not kind.how.startswith("/"):
                assert language in {"sh": ("", "bash", "sh")}.get(kind.how, (kind.how,)), (page, language)
            if language == "toml":
                assert isinstance(kind, Run), f"{page}: settings are read"


def test_what_runs_elsewhere_has_its_test() -> None:
    named = {kind.test for kinds in BLOCKS.values() for kind in kinds if isinstance(kind, Elsewhere)}
    assert sorted(name for name in named if not (ROOT / "tests" / name).exists()) == []


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{page}-{block.number}")
        for page, kinds in BLOCKS.items()
        for block, kind in zip(blocks(page), kinds, strict=False)
        if kind == Run("toml")
    ],
)
def test_settings_of_a_page_are_settings_of_a_server(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "midstream.toml"
    file.write_text(block.text)
    load_settings(str(file), {})


class Shell:
    """A person's directory beside a running server. What each block printed is in `said`, by page and number."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.said: dict[tuple[str, int], str] = {}
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        (programs / "midstream").write_text(f'#!/bin/sh\nexec {sys.executable} -m midstream.cli "$@"\n')
        (programs / "midstream").chmod(0o755)
        home = folder / "home"
        home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self.env = {
            **kept, "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "MIDSTREAM_SERVER": server.url,
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        }  # fmt: skip

    def run(self, block: Block, how: Run) -> None:
        text = block.text.replace(ADDRESS, self.server.url)
        if how.how.startswith("/"):
            answer = httpx.post(self.server.url + how.how, json=json.loads(text), timeout=120)
            self.said[block.page, block.number] = answer.raise_for_status().text
            return
        python = sys.executable if how.environment == ".venv" else ROOT / how.environment / "bin" / "python"
        if how.environment != ".venv" and how.how == "python":
            # The threads of an SDK may crash an interpreter that shuts down, when all was said.
            text += "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
        command = [python, "-W", "ignore", "-c", text] if how.how == "python" else ["sh", "-e", "-c", text]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, (
            f"{block.page}, block {block.number}:\n{text}\n{done.stdout}{done.stderr}"
        )
        self.said[block.page, block.number] = done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Its server's state directory is the default one of the directory that the blocks run in."""
    folder = tmp_path_factory.mktemp("blocks")
    with serve(folder / ".midstream") as server:
        yield Shell(server, folder)


@pytest.mark.variant
@pytest.mark.timeout(900)
def test_every_block_runs_as_pasted_in_the_order_of_the_pages(shell: Shell) -> None:
    for page, kinds in BLOCKS.items():
        for block, kind in zip(blocks(page), kinds, strict=True):
            if isinstance(kind, Run) and kind.how != "toml":
                shell.run(block, kind)
    readme = [shell.said["README.md", number] for number in (2, 3, 4)]
    check_rollouts(readme[0])
    assert readme[1] == "full [('replica-0', 'first'), ('replica-1', 'first')]\n"
    sampled = json.loads(readme[2])
    assert len(sampled) == 2
    assert all(0 < len(tokens) <= 16 for tokens in sampled)
    steps = re.findall(
        r"^step (\d): (\d+) rollouts, run-\S+/(\d) was the newest$", shell.said["docs/publishing.md", 4], re.M
    )
    assert [(step, newest) for step, _, newest in steps] == [(str(n), str(n)) for n in range(3)]
    first = json.loads(shell.said["docs/start.md", 1])
    before = first["model"].partition("@")[2]
    [told] = json.loads(shell.said["docs/start.md", 3])["traces"]
    assert all(len(turn["logprobs"]) == len(turn["token_ids"]) > 0 for turn in told["turns"])
    assert [span["snapshot"] for turn in told["turns"] for span in turn["snapshots"]][:1] == [before]
    # As the page says, the same request is asked again after the publication.
    [again] = [block for block in blocks("docs/start.md") if block.number == 1]
    shell.run(again, Run("sh"))
    assert json.loads(shell.said["docs/start.md", 1])["model"].endswith("@step-1")
    [trace] = [block for block in blocks("docs/start.md") if block.number == 3]
    shell.run(trace, Run("sh"))
    [told] = json.loads(shell.said["docs/start.md", 3])["traces"]
    assert [span["snapshot"] for turn in told["turns"] for span in turn["snapshots"]] == [before, "step-1"]


def check_rollouts(printed: str) -> None:
    """Earlier turns are found in the cache, and each token has a route."""
    turns: list[Any] = [line.split() for line in printed.splitlines()]
    assert [turn[0] for turn in turns] == ["base"] * 3
    assert all(0 < int(turn[1]) <= 16 for turn in turns)
    assert int(turns[0][2]) == 0 < int(turns[1][2]) < int(turns[2][2])
