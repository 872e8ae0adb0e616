"""The README: its length, and its three first uses, run as they stand against a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
sys.path.append(str(Path(__file__).parents[1] / "tinker"))

from sdk_venvs import ROOT, VERSIONS, sdk_python
from serving import Server, command, serve

README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def snippet(marker: str) -> str:
    """The one snippet that has this text in it."""
    (found,) = [code for code in SNIPPETS if marker in code]
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its state directory is the default one of the directory that the snippets run in."""
    with serve(tmp_path_factory.mktemp("readme") / ".midstream") as running:
        yield running


def run(python: str | Path, code: str, server: Server) -> str:
    """What a snippet prints. Only the address of the server is another one."""
    assert "http://127.0.0.1:8080" in code
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TINKER")}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code.replace("http://127.0.0.1:8080", server.url)],
        cwd=server.state_dir.parent,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme_fits_on_two_screens_and_has_three_first_uses() -> None:
    assert len(README.splitlines()) <= 120
    assert len(SNIPPETS) == 3


def test_the_readme_says_that_nothing_has_run_on_a_gpu_as_long_as_there_is_no_result_of_one() -> None:
    results = ROOT / "benchmarks" / "results" / "gpu.json"
    assert ("Nothing has run on a GPU yet" in README) == (not results.exists())
    assert "make gpu-check" in README


@pytest.mark.parametrize(
    ("page", "count", "link"), [("README.md", 5, "](docs/"), ("docs/index.md", 10, "](")]
)
def test_every_guarantee_leads_to_the_page_that_shows_it(page: str, count: int, link: str) -> None:
    section = (ROOT / page).read_text().split("## What you can rely on\n")[1].split("\n## ")[0]
    guarantees = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(guarantees) == count
    assert [guarantee for guarantee in guarantees if link not in guarantee] == []


@pytest.mark.slow
def test_the_rollout_loop_finds_its_earlier_turns_in_the_cache_and_has_a_route_per_token(
    server: Server,
) -> None:
    turns = [line.split() for line in run(sys.executable, snippet("from openai import"), server).splitlines()]
    assert [turn[0] for turn in turns] == ["base"] * 3
    assert all(0 < int(turn[1]) <= 16 for turn in turns)
    assert int(turns[0][2]) == 0 < int(turns[1][2]) < int(turns[2][2])


@pytest.mark.slow
def test_the_published_checkpoint_is_served_by_every_replica(server: Server) -> None:
    (made,) = re.findall(r"`midstream (model tiny-moe my-checkpoint[^`]*)`", README)
    subprocess.run(command(*made.split()), cwd=server.state_dir.parent, check=True, capture_output=True)
    out = run(sys.executable, snippet("SnapshotPublisher"), server)
    assert out == "full [('replica-0', 'first'), ('replica-1', 'first')]\n"


@pytest.mark.slow
def test_the_tinker_sdk_samples_what_it_trains(server: Server) -> None:
    out = run(sdk_python(VERSIONS[0]), snippet("import tinker"), server)
    sampled = json.loads(out)
    assert len(sampled) == 2
    assert all(0 < len(tokens) <= 16 for tokens in sampled)
