"""The Tinker examples, as a user runs them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdk_venvs import NEWEST_AND_OLDEST, ROOT, sdk_python

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from serving import Server, serve

# Scripts may take 400.
pytestmark = [pytest.mark.variant, pytest.mark.timeout(600)]

DEMO = ROOT / "examples" / "session_routing" / "demo.py"
TRAJECTORIES, TURNS = 6, 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("examples") / "state", "--replicas", "4") as running:
        yield running


@pytest.mark.parametrize("version", NEWEST_AND_OLDEST)
def test_client_and_server_agree_on_every_key_and_trajectories_stay(version: str, server: Server) -> None:
    arguments = ["--url", server.url, "--trajectories", str(TRAJECTORIES), "--turns", str(TURNS)]
    done = subprocess.run(
        [sdk_python(version), "-W", "ignore", DEMO, *arguments], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    dispatched = re.findall(r"^client: dispatch routing-key=(\S+)$", done.stdout, re.MULTILINE)
    session = dispatched[0].partition(":")[0]
    logged = re.findall(
        rf"\[sticky-routing\] dispatch idx=\d+ model=\S+ session_id=({session}:\d+)", server.log.read_text()
    )
    assert len(dispatched) == TRAJECTORIES * TURNS
    assert sorted(logged) == sorted(dispatched)
    assert done.stdout.endswith("every trajectory stayed on one replica\n")
    cached = re.findall(r"cached prompt tokens (.+)$", done.stdout, re.MULTILINE)
    assert len(cached) == TRAJECTORIES
    # Whatever the first turn shares: each later one has at least all of the one before.
    for line in cached:
        turns = [tuple(map(int, turn.split("/"))) for turn in line.split(", ")]
        assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(turns)), line
