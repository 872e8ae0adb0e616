"""`midstream status --deployment MODEL`: a deployment may be named by its model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from midstream.client import ServerClient
from midstream.client.status import read_status
from midstream.commands.status import _look, render

ROW = {
    "current_snapshot_identity": "step-1",
    "readiness": True,
    "loading_state": {"stage": "done", "target_snapshot_identity": "step-1"},
    "midstream": {"replica": "replica-0", "reachable": True},
}


def server() -> ServerClient:
    """One with a deployment `d` of another name than its model. The header of the status calls finds it by both."""

    def policies(name: str, **_: Any) -> list[dict[str, Any]]:
        raise AssertionError(f"{name} is no deployment")

    made = SimpleNamespace(
        snapshots=SimpleNamespace(status=lambda **_: read_status({"replicas": [ROW]})),
        metrics=lambda **_: "",
        deployments=SimpleNamespace(
            all=lambda **_: [{"name": "accounts/a/deployments/d"}], policies=policies
        ),
    )
    return cast(ServerClient, made)


@pytest.mark.parametrize("model", ["tiny-moe", "accounts/a/models/tiny-moe"])
def test_a_model_names_its_deployment(model: str) -> None:
    drawn = _look(server(), render, model)
    assert "replica-0" in drawn
    assert "step-1" in drawn


def test_a_replica_whose_machine_goes_is_named_with_the_time() -> None:
    metrics = {"midstream_replica_leaves_timestamp_seconds": [({"replica": "replica-0"}, 3725.0)]}
    shown = render(read_status({"replicas": [ROW]}), metrics)
    assert shown.endswith("\n\nreplica-0 leaves at 01:02:05 UTC")
    assert "leaves" not in render(read_status({"replicas": [ROW]}), {})


@pytest.mark.parametrize(
    ("waits", "said"),
    [(["replica-1", "replica-2"], "ending, waits for replica-1, replica-2"), ([], "ending")],
)
def test_a_policy_that_ends_is_shown_with_the_replicas_that_this_waits_for(
    waits: list[str], said: str
) -> None:
    policy = {"policy": "red", "state": "DELETING", "frozen": True, "waits_for": waits, "replicas": [ROW]}
    shown = render(read_status({"replicas": [ROW]}), {}, [policy])
    assert shown.endswith(f"replica-0  {said}")


def test_a_second_tier_of_the_cache_is_shown_once_it_holds_something() -> None:
    def kv(offloaded: float) -> str:
        found = {"kv_blocks_used": 10.0, "kv_blocks_capacity": 40.0, "kv_block_tokens": 16.0}
        found |= {"kv_between_turns_tokens": 320.0, "kv_free_tokens": 160.0, "kv_offloaded_tokens": offloaded}
        metrics = {
            f"midstream_replica_{name}": [({"replica": "replica-0"}, at)] for name, at in found.items()
        }
        return render(read_status({"replicas": [ROW]}), metrics)

    assert "25% live, 50% between turns, 25% free, 75% offloaded" in kv(480.0)
    assert "offloaded" not in kv(0.0)
