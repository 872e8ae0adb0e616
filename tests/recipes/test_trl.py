"""TRL's GRPOTrainer learns over live hot loads: all weights, an adapter, its own hook for rollouts, two processes."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from recipes import needs, printed_by, run_recipe, steps_in
from serving import serve


@needs("trl")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("what", "steps"), [("", 12), ("lora", 18), ("rollout_func", 12)])
def test_grpo_learns_from_data_that_are_one_snapshot_old(tmp_path: Path, what: str, steps: int) -> None:
    with serve(tmp_path / "state") as server:
        taken = run_recipe("trl", server, steps, *([what] if what else []))
    assert max(step.reward for step in taken[:2]) < 0.1
    assert min(step.reward for step in taken[-2:]) > 0.2, taken
    # The first rollouts are of the run's own weights.
    assert taken[0].behind == 0
    assert all(step.behind <= 1 for step in taken)


@needs("trl")
@pytest.mark.timeout(600)
def test_two_processes_train_one_model(tmp_path: Path) -> None:
    with serve(tmp_path / "state") as server:
        taken = run_recipe("trl", server, 6, launcher=("torchrun", "--nproc_per_node", "2"))
    assert taken[-1].reward > taken[0].reward + 0.03
    assert [taken[0].behind, max(step.behind for step in taken)] == [0, 1]


@needs("trl")
@pytest.mark.timeout(600)
def test_async_grpo_samples_from_the_weights_that_it_pushed(tmp_path: Path) -> None:
    with serve(tmp_path / "state") as server:
        printed = printed_by("trl", server, 3, script="async_grpo.py")
        ledger = httpx.get(f"{server.url}/v1/{server.deployment}/ledger").json()
    taken = steps_in(printed, 3)
    assert all(0 <= step.reward <= 1 and step.behind <= 3 for step in taken)
    # One push before the first rollout, and one after each step.
    pushed = [update["identity"].rpartition("-")[0] for update in ledger["transfers"][0]["updates"]]
    assert pushed == [f"update-{number:06d}-push" for number in range(4, 0, -1)]
    # The mean place of the snapshots that sampled between two steps.
    places = [float(place) for place in re.findall(r"^tokens of snapshot (\S+)$", printed, re.MULTILINE)]
    assert places[0] >= 1
    assert places[-1] > places[0] + 1
