"""What a run finds out of an endpoint before its rows: nothing that is missing hides, and signals reach what is looked at."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import scripted
from scripted import DEPLOYMENT, MODEL, Scripted

from midstream.core.errors import ConfigError
from midstream.core.wires import HOT_LOAD_PATH
from midstream_conformance.endpoint import Endpoint
from midstream_conformance.target import WIRES, Target, look

pytestmark = pytest.mark.fast


def looked(endpoint: Endpoint, checkpoint: Path | None = None) -> Target:
    return asyncio.run(look(endpoint, checkpoint, publish=checkpoint is not None))


def without_routes(message: str) -> Scripted:
    def answer(request: httpx.Request) -> httpx.Response:
        asked = "include_routing_matrix" in json.loads(request.content)
        return scripted.refused(400, message) if asked else scripted.completed(request)

    found = Scripted()
    found.on["POST", "/v1/completions"] = answer
    return found


UNKNOWN = "Extra inputs are not permitted, field: 'include_routing_matrix'"
DENSE = "include_routing_matrix: this model is dense"


@pytest.mark.parametrize(
    ("message", "config", "skipped"),
    [
        (DENSE, None, True),
        (UNKNOWN, None, False),
        (DENSE, {"num_experts": 8}, False),
        (UNKNOWN, {"num_local_experts": 8}, False),
        (UNKNOWN, {"text_config": {"n_routed_experts": 8}}, False),
        (UNKNOWN, {"hidden_size": 64}, True),
    ],
)
def test_an_endpoint_that_lacks_router_replay_is_no_dense_model(
    tmp_path: Path, message: str, config: dict[str, object] | None, skipped: bool
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    target = looked(without_routes(message).endpoint(), tmp_path if config else None)
    assert (target.missing("moe") is not None) == skipped


def test_signals_and_status_are_of_the_model_that_is_meant() -> None:
    server = Scripted()
    other = {"id": "accounts/a/models/b", "deployment": "accounts/a/deployments/of-b"}
    server.on["GET", "/v1/models"] = lambda _: scripted.listed({"id": MODEL, "deployment": DEPLOYMENT}, other)
    endpoint = server.endpoint(model="b")
    target = looked(endpoint)
    asyncio.run(endpoint.request("POST", HOT_LOAD_PATH, {"identity": "x"}))
    for request in (*server.of("GET", HOT_LOAD_PATH), *server.of("POST", HOT_LOAD_PATH)):
        assert request.headers["fireworks-model"] == other["id"]
        assert request.headers["fireworks-deployment"] == other["deployment"]
    assert "fireworks-deployment" not in server.of("POST", "/v1/completions")[0].headers
    assert target.deployment == other["deployment"]


def test_a_deployment_that_models_do_not_list_is_the_one_that_was_named() -> None:
    server = Scripted()
    target = looked(server.endpoint(deployment="second"))
    assert target.deployment == "accounts/a/deployments/second"
    assert not server.of("GET", f"/v1/{DEPLOYMENT}"), "another deployment's transition was read"


def test_no_key_given_is_the_one_reason_to_skip_what_is_said_of_keys() -> None:
    assert looked(Scripted().endpoint(api_key="sk-1")).missing("keys") is None
    assert looked(Scripted().endpoint()).missing("keys") is not None


def test_without_logprobs_the_length_of_streams_follows_usage() -> None:
    server = Scripted()
    server.on["POST", "/v1/completions"] = lambda request: scripted.completed(
        request, logprobs=False, most=80
    )
    assert looked(server.endpoint()).stream_tokens == 80
    server.on["POST", "/v1/completions"] = lambda request: scripted.completed(request, logprobs=False)
    assert looked(server.endpoint()).stream_tokens >= 96


def test_what_served_before_is_remembered() -> None:
    assert looked(Scripted().endpoint()).serving == ("step-400",)


def test_a_page_for_people_where_the_deployments_api_would_be_is_none() -> None:
    server = Scripted()
    server.on["GET", f"/v1/{DEPLOYMENT}"] = lambda _: httpx.Response(200, text="<html>")
    target = looked(server.endpoint())
    assert target.transition is None
    assert target.missing("sync") is not None


@pytest.mark.parametrize(
    ("method", "path", "answer"),
    [
        ("GET", "/v1/models", httpx.Response(200, text="<html>")),
        ("GET", "/v1/models", httpx.Response(200, json=[1])),
        ("POST", "/v1/completions", httpx.Response(200, text="")),
        ("POST", "/v1/completions", httpx.Response(200, text="data: {\n\n")),
        ("POST", "/v1/completions", httpx.Response(200, text="data: {}\n\n")),
        ("POST", "/v1/completions", scripted.refused(503, "no")),
    ],
)
def test_an_endpoint_that_cannot_be_tested_is_named_as_such(
    method: str, path: str, answer: httpx.Response
) -> None:
    server = Scripted()
    server.on[method, path] = lambda _: answer
    with pytest.raises(ConfigError, match="http://scripted"):
        looked(server.endpoint())


def test_what_cannot_be_decoded_is_named_as_such() -> None:
    server = Scripted()
    server.on["GET", "/v1/models"] = lambda _: httpx.Response(
        200, stream=httpx.ByteStream(b"plain"), headers={"content-encoding": "gzip"}
    )
    with pytest.raises(ConfigError, match="http://scripted"):
        looked(server.endpoint())


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-secret\n", " sk-secret", "sk-sécret", "", "sk secret"])
def test_a_key_that_no_header_can_have_is_refused_unseen(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Endpoint("http://127.0.0.1:1", api_key=key, deployment=None)
    assert "--api-key" in str(refused.value)
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://host:port", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        Endpoint(url, api_key=None, deployment=None)


@pytest.mark.parametrize("need", WIRES)
def test_an_api_counts_as_lacking_only_where_its_path_is_not_there(need: str) -> None:
    path = WIRES[need].format(prefix="/v1")
    for status, lacking in ((404, True), (405, True), (501, True), (400, False), (422, False), (500, False)):
        server = Scripted()
        server.on["POST", path] = lambda _, status=status: scripted.refused(status, "no")  # type: ignore[misc]
        why = looked(server.endpoint()).missing(need)
        assert (why is not None) == lacking, status
        assert why is None or f"{status} no" in why
        (asked,) = server.of("POST", path)
        assert json.loads(asked.content) == {"model": MODEL}, "it could make tokens"


@pytest.mark.parametrize("need", WIRES)
def test_of_midstream_itself_no_promised_path_may_be_missing(need: str) -> None:
    server = Scripted()
    entry = {"id": MODEL, "deployment": DEPLOYMENT, "midstream": {}}
    server.on["GET", "/v1/models"] = lambda _: scripted.listed(entry)
    assert looked(server.endpoint()).missing(need) is None
