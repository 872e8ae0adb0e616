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
