"""LoRA add-ons loaded by the real client: each is a policy, and samples as PEFT computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fireworks_helpers import API_KEY, Endpoint
from policy_helpers import Adapters

from midstream.client import SnapshotPublisher

PROMPT = list(b"An add-on of the")
ADDONS = {"red": 1, "blue": 2, "green": 3, "unfit": 4}
MODELS = "accounts/acme/models/"


@pytest.fixture(scope="module")
def adapters(tiny_model: Any) -> Adapters:
    return Adapters(tiny_model(dtype="float32"))


@pytest.fixture(scope="module")
def got(published: Endpoint, adapters: Adapters) -> Iterator[dict[str, Any]]:
    server = published.server
    for name, seed in ADDONS.items():
        adapters.put(server, name, seed)
    unfit = server.bucket / "unfit" / "adapter_config.json"
    unfit.write_text(unfit.read_text().replace('"use_dora": false', '"use_dora": true'))
    # A policy that was not loaded by these calls.
    adapters.make("kept-1", 5)
    with SnapshotPublisher(
        server.url, server.bucket.as_uri(), policy="kept", adapter=adapters.made["kept-1"], api_key=API_KEY
    ) as publisher:
        publisher.publish("kept-1")
    yield published.run("addons", prompt=PROMPT)
    kept = f"{server.url}/v1/{server.deployment}/policies/kept"
    httpx.delete(kept, headers={"x-api-key": API_KEY}, timeout=60).raise_for_status()


def check(adapters: Adapters, sampled: dict[str, Any], name: str, addon: str) -> None:
    expected = adapters.logprobs(addon, [*PROMPT, *sampled["tokens"]])[len(PROMPT) - 1 :]
    assert sampled["logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert sampled["model"].partition("@")[0] == MODELS + name


def test_add_ons_are_loaded_beside_each_other_and_each_is_sampled_by_its_name(
    got: dict[str, Any], adapters: Adapters
) -> None:
    assert got["before"] == [MODELS + "kept"]
    loaded = got["loaded"]
    assert (loaded["name"], loaded["model"]) == ("accounts/acme/deployedModels/red", MODELS + "red")
    # The call is answered when every replica serves it.
    assert (loaded["deployment"], loaded["state"]) == ("accounts/acme/deployments/policy", "DEPLOYED")
    assert (loaded["displayName"], loaded["description"]) == ("Red", "of the red team")
    assert got["got"] == loaded
    assert got["listed"] == [MODELS + name for name in ("blue", "kept", "red")]
    assert got["models"][MODELS + "red"] == "HF_PEFT_ADDON"
    assert sorted(got["models"].values()).count("HF_BASE_MODEL") == len(got["models"]) - 3
    for asked, name in (("red", "red"), ("red_on", "red"), ("blue", "blue")):
        check(adapters, got[asked], name, name)
    assert len({tuple(got[asked]["tokens"]) for asked in ("red", "blue", "base")}) == 3


def test_what_cannot_be_is_refused_by_name_and_changes_nothing(got: dict[str, Any]) -> None:
    assert (got["elsewhere"]["status"], got["twice"]["status"]) == (404, 409)
    assert got["renamed"]["displayName"] == "Crimson"
    assert got["renamed"]["description"] == "of the red team"
    for field in ("serverless", "public", "default"):
        assert (got[field]["status"], got[field]["param"]) == (400, field)
    assert (got["moved"]["status"], got["moved"]["param"]) == (400, "model")
    assert got["nowhere"]["status"] == 404
    assert got["unfit"]["status"] == 400
    assert "use_dora is True, which is not served" in got["unfit"]["message"]
    assert got["no_deployment"]["status"] == 404
    assert (got["filtered"]["status"], got["filtered"]["param"]) == (400, "filter")
    assert got["after_refusals"] == got["listed"]


def test_a_merged_add_on_is_replaced_once_the_new_one_serves(got: dict[str, Any], adapters: Adapters) -> None:
    assert got["replacing"]["state"] == "DEPLOYED"
    check(adapters, got["green"], "green", "green")
    assert [refused["status"] for refused in got["replaced"]] == [404, 404]
    assert got["unfit_replaces"]["status"] == 400
    check(adapters, got["green_still"], "green", "green")
    assert got["again"]["state"] == "DEPLOYED"


def test_an_unloaded_add_on_is_gone_and_other_policies_stay(got: dict[str, Any], adapters: Adapters) -> None:
    assert [refused["status"] for refused in got["unloaded"]] == [404, 404]
    assert got["after"] == []
    check(adapters, got["kept"], "kept", "kept-1")
