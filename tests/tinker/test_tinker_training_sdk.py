"""The unmodified SDK trains the served model, and samples from the server what it trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from sdk_venvs import ALIAS, API_KEY, VERSIONS, run_sdk
from serving import Server
from tiers import variant

# Scripts may take 400.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
PROMPT, TARGET = list(b"The capital of France is"), list(b" Paris.")
LEARNED = len(PROMPT) - 1
LORA_RATE = 0.005
LOSSES = ("importance_sampling", "ppo", "cispo", "dro")


@pytest.fixture(scope="module")
def server(sdk_server: Server) -> Server:
    return sdk_server


def ledger(server: Server) -> dict[str, dict[str, Any]]:
    """The snapshots that were signalled, by identity."""
    url = f"{server.url}/v1/{server.deployment}/ledger"
    answer = httpx.get(url, headers={"x-api-key": API_KEY}, timeout=60).raise_for_status().json()
    return {row["identity"]: row for row in answer["snapshots"]}


@pytest.mark.parametrize(
    ("version", "rank", "rate"),
    [
        (VERSIONS[0], 8, LORA_RATE),
        variant(VERSIONS[0], 0, 0.003),
        *(variant(version, 8, LORA_RATE) for version in VERSIONS[1:]),
    ],
)
def test_what_is_trained_is_what_is_sampled(server: Server, version: str, rank: int, rate: float) -> None:
    told = run_sdk(
        version,
        HERE / "sdk_training.py",
        {
            "url": server.url,
            "api_key": API_KEY,
            "base_model": ALIAS,
            "prompt": PROMPT,
            "target": TARGET,
            "rank": rank,
            "rate": rate,
            "small_rate": rate / 5,
            "steps": 16,
            "losses": LOSSES,
        },
    )
    check_training(told)
    check_states(told)
    check_serving(told)
    check_ledger(server, told, lora=rank > 0)
    check_errors(told, lora=rank > 0)


def check_training(told: dict[str, Any]) -> None:
    """The loss falls, is the sum it says it is, and each policy loss makes a rewarded target likelier."""
    assert told["model_name"] == ALIAS
    losses = told["losses"]
    assert losses[0] == pytest.approx(-sum(told["before"][LEARNED:]), abs=1e-3)
    assert losses[-1] < losses[0] / 10
    assert sum(told["trained"][LEARNED:]) > sum(told["before"][LEARNED:]) + 5
    assert all(name.count(":") == 1 for name in told["optim_metrics"])
    for loss_fn, seen in told["reinforced"].items():
        assert seen["gain"] > 0, loss_fn
    # Ratios of 1 with advantages of 1.
    for loss_fn in ("importance_sampling", "ppo"):
        assert told["reinforced"][loss_fn]["loss"] == pytest.approx(-len(TARGET), abs=1e-2)


def check_states(told: dict[str, Any]) -> None:
    assert told["state"].endswith("/weights/half-way")
    for name in ("loaded", "after_errors", "restored"):
        assert told[name] == pytest.approx(told["trained"], abs=1e-4), name
    assert told["changed"] != pytest.approx(told["trained"], abs=1e-4)
    assert told["restored_losses"][0] == pytest.approx(-sum(told["trained"][LEARNED:]), abs=1e-3)


def check_serving(told: dict[str, Any]) -> None:
    """Replicas score as the trainer does, write the target, and label it with this run's snapshots."""
    assert told["greedy"] == TARGET
    assert told["served"] == pytest.approx(told["trained"], abs=2e-3)
    assert told["served_changed"] == pytest.approx(told["changed"], abs=2e-3)
    assert told["saved_scores"] == pytest.approx(told["changed"], abs=2e-3)
    run, restored_run = runs_of(told)
    assert all(label.startswith(run) for label in told["labels"])
    assert all(label.startswith(restored_run) for label in told["restored_labels"])
    assert all(label.startswith(run) and label.endswith("-final") for label in told["saved_labels"])


def runs_of(told: dict[str, Any]) -> tuple[str, str]:
    """What the snapshots of the two runs begin with."""
    model = told["named"].removeprefix("tinker://").partition("/")[0]
    session, _, number = model.removeprefix("session_").split(":")
    return f"tinker-{session}-{number}-", f"tinker-{session}-{int(number) + 1}-"


def check_ledger(server: Server, told: dict[str, Any], lora: bool) -> None:
    """Whole snapshots and deltas go to the deployment; of a LoRA run it has heard nothing."""
    rows, runs = ledger(server), runs_of(told)
    of_run = {identity: row for identity, row in rows.items() if identity.startswith(runs)}
    if lora:
        assert of_run == {}
    else:
        assert [rows[label]["kind"] for label in told["saved_labels"][:1]] == ["full"]
        assert "delta" in {row["kind"] for row in of_run.values()}


def check_errors(told: dict[str, Any], lora: bool) -> None:
    assert "nonsense" in told["unknown_loss"]["text"]
    assert "half-way-not" in told["unknown_state"]["text"]
    if lora:
        # The other run's weights are served as before.
        assert told["superseded"] == {}
    else:
        assert "-final" in told["superseded"]["text"]
