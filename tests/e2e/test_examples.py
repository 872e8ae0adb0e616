"""The examples, as a user runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from serving import Server, serve

from midstream.client import RolloutClient

EXAMPLES = Path(__file__).parents[2] / "examples"

# Of a busy machine.
pytestmark = pytest.mark.timeout(900)


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_rollout_example_hits_the_cache_on_its_second_turn(server: Server) -> None:
    out = run("rollout.py", server.url)
    turns = [line for line in out.splitlines() if line.startswith("turn")]
    assert turns[0].endswith(" 0 from the cache")
    assert not turns[1].endswith(" 0 from the cache")
    assert out.count("snapshots ['base']") == 2


def test_the_hot_load_example_ends_with_every_replica_on_the_snapshot(
    published: Server, tiny_model: Callable[..., Path]
) -> None:
    checkpoint = tiny_model(seed=8, dtype="bfloat16")
    out = run("hot_load.py", published.url, published.bucket.as_uri(), str(checkpoint), "step-1")
    served = [line for line in out.splitlines() if "serves step-1" in line]
    assert [line.split()[0] for line in sorted(served)] == ["replica-0", "replica-1"]


@pytest.mark.variant
def test_the_explaining_example_names_every_mistake_of_its_trainer(tmp_path: Path) -> None:
    told = run("explain/mistakes.py", str(tmp_path))
    assert told.count(": named\n") == 9
    assert "MISSED" not in told
    assert "<svg" in (tmp_path / "explained.html").read_text()


@pytest.mark.variant
def test_the_publishing_example_sends_deltas_between_full_snapshots(
    published: Server, tiny_model: Callable[..., Path]
) -> None:
    checkpoint = tiny_model(seed=9, dtype="bfloat16")
    out = run("publish.py", published.url, published.bucket.as_uri(), str(checkpoint), "6")
    kinds = [line.split()[1].rstrip(",") for line in out.splitlines()]
    assert kinds == ["full", "delta", "delta", "delta", "delta", "full"]
    assert out.count("2 replicas serve it") == 6


@pytest.mark.variant
def test_the_self_play_example_plays_the_learner_against_what_it_was(
    tmp_path: Path, adapter_base: Path
) -> None:
    with serve(tmp_path / "state", "--model", str(adapter_base), "--replicas", "2") as server:
        out = run("self_play/train.py", server.url, server.bucket.as_uri(), str(adapter_base), "8")
        names = httpx.get(f"{server.url}/v1/{server.deployment}/policies").json()["policies"]
    rounds = [
        re.fullmatch(r"(\S+) against (\S+): reward (\S+), says (\S+)", line) for line in out.splitlines()
    ]
    assert [(line[1], line[2]) for line in rounds if line] == [
        (f"learner/{number}", f"learner/{number // 2}") for number in range(8)
    ]
    # It has learned to say larger digits, and wins against what it was.
    assert float(rounds[-1][4]) > float(rounds[0][4]) + 1
    assert float(rounds[-1][3]) > 0.2
    # Each opponent is still the snapshot that it was forked from.
    kept = {one["policy"]: (one["snapshot"], one["frozen"]) for one in names}
    assert kept == {
        "learner": ("learner/7", False),
        **{f"past-{number}": (f"learner/{number}", True) for number in range(8)},
    }


@pytest.mark.variant
def test_the_plain_loop_learns_from_data_that_are_one_snapshot_old(tmp_path: Path) -> None:
    with serve(tmp_path / "state") as server:
        base = str(server.state_dir / "models" / "tiny-moe")
        out = run("plain_loop/train.py", server.url, str(server.bucket), base, "8")
    lines = [
        re.fullmatch(r"step (\d): reward (\S+), (\S+) snapshots behind", line) for line in out.splitlines()
    ]
    found = [(int(line[1]), float(line[2]), float(line[3])) for line in lines if line]
    assert [step for step, _, _ in found] == list(range(1, 9))
    assert found[-1][1] > found[0][1] + 0.05
    # The first step samples the run's own weights, and later ones do not wait for the newest.
    assert found[0][2] == 0.0
    assert all(0 <= behind <= 1 for _, _, behind in found)


@pytest.mark.variant
def test_the_loop_in_publishing_md_runs_as_it_stands(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "publishing.md").read_text()
    [code] = [
        one for one in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "importance_ratios" in one
    ]
    with serve(tmp_path / ".midstream") as server:
        told = code.replace("http://127.0.0.1:8080", server.url)
        assert told != code
        done = subprocess.run(
            [sys.executable, "-c", told], cwd=tmp_path, capture_output=True, text=True, timeout=400
        )
        # Routes, as the page says they are asked for.
        with RolloutClient(server.url, num_experts_per_tok=2) as client:
            [[rollout]] = client.sample(["Write digits: "], max_tokens=5, seed=1)
        config = json.loads((server.state_dir / "models" / "tiny-moe" / "config.json").read_text())
    assert (config["num_experts_per_tok"], len(rollout.prompt_ids)) == (2, len("Write digits: "))
    assert rollout.routes is not None
    assert rollout.routes.shape == (len(rollout.token_ids), config["num_hidden_layers"], 2)
    assert done.returncode == 0, done.stderr
    lines = [
        re.fullmatch(r"step (\d): 16 rollouts, \S+/(\d) was the newest", line)
        for line in done.stdout.splitlines()
    ]
    assert [line and (line[1], line[2]) for line in lines] == [("0", "0"), ("1", "1"), ("2", "2")]


@pytest.mark.variant
def test_the_multi_tenant_example_trains_every_team_by_its_own_snapshots_alone(
    tmp_path: Path, adapter_base: Path
) -> None:
    with serve(tmp_path / "state", "--model", str(adapter_base), "--replicas", "2") as server:
        out = run("multi_tenant/teams.py", server.url, server.bucket.as_uri(), str(adapter_base), "3", "8")
    lines = [re.fullmatch(r"team-(\d): (\S+) to (\S+) by (.+)", line) for line in out.splitlines()]
    assert [line and line[1] for line in lines] == ["0", "1", "2"]
    for team, line in enumerate(lines):
        assert line is not None
        assert line[4].split() == [f"team-{team}/{step}" for step in range(8)]
        assert float(line[3]) > float(line[2]) + 0.1
