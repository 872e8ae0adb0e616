"""A deployment made, hot-loaded, changed, scaled and deleted by the real client, beside another that notices nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fireworks_helpers import Endpoint, assert_served

PROMPT = list(b"Another deployment")
NEW = "accounts/acme/deployments/rollouts-2"
FIRST = "accounts/acme/deployments/policy"


@pytest.fixture(scope="module")
def got(endpoint: Endpoint, tiny_model: Callable[..., Path]) -> dict[str, Any]:
    result: dict[str, Any] = endpoint.run(
        "deployments",
        first="policy",
        checkpoint=str(tiny_model(seed=1)),
        identity="for-the-new-one",
        prompt=PROMPT,
    )
    result["model_served"] = endpoint.server.model
    return result


def test_create_or_get_makes_it_once_and_it_becomes_ready(got: dict[str, Any]) -> None:
    assert (got["before"], got["missing"]) == ([FIRST], None)
    for answer in (got["created"], got["again"], got["ready"]):
        assert (answer["name"], answer["inference_model"]) == (NEW, NEW)
        assert answer["base_model"] == got["model_served"]
        assert answer["hot_load_transition_type"] == "ASYNC"
    assert got["created"]["state"] in ("CREATING", "READY")
    assert got["ready"]["state"] == "READY"
    assert sorted(got["listed"]) == [FIRST, NEW]
    typed = got["typed"]
    assert (typed["minReplicaCount"], typed["maxReplicaCount"]) == (0, 1)
    assert typed["replicaStats"]["readyReplicaCount"] == 1, (
        "min 0, max 1 is the client's default, and must serve"
    )
    assert typed["status"]["code"] == "OK"
    assert typed["description"] == "Fireworks training deployment"
    assert typed["createTime"] <= typed["updateTime"]
    assert got["conflict"]["status"] == 409
    assert got["unknown_model"]["status"] == 400
    assert "baseModel" in got["unknown_model"]["message"] or got["unknown_model"]["param"] == "baseModel"


def test_it_is_hot_loaded_by_itself(got: dict[str, Any], tiny_model: Callable[..., Path]) -> None:
    assert got["hot_loaded"] is True
    for sample in got["samples"]:
        assert_served(sample, tiny_model(seed=1))
    assert [r["current_snapshot_identity"] for r in got["others"]["replicas"]] == ["base"] * 2


def test_it_is_changed_scaled_and_deleted(got: dict[str, Any]) -> None:
    assert got["reattached"]["state"] == "READY"
    assert got["reattached"]["hot_load_trainer_job"] == "accounts/acme/rlorTrainerJobs/job-1"
    assert got["reattached"]["hot_load_transition_type"] == "SYNC"
    assert got["renamed"]["displayName"] == "Second"
    assert got["renamed"]["hotLoadTransitionType"] == "SYNC", "an update of one field changed another"
    assert got["unknown_mask"]["status"] == 400
    assert "no_such_field" in got["unknown_mask"]["message"]
    assert (got["scaled"]["minReplicaCount"], got["scaled"]["maxReplicaCount"]) == (0, 0)
    assert got["after"] == [FIRST]
