"""What a running server says of its engine, and what it refuses for want of a feature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, serve

from midstream import __version__
from midstream.core.types import ENGINE_FEATURES
from midstream.models.tiny_moe import write_tiny_moe

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_the_model_shows_its_engine_to_openai_clients_and_others(
    client: openai.OpenAI, server: Server
) -> None:
    (listed,) = client.models.list().data
    assert (listed.id, listed.object) == (server.model, "model")
    for url in (f"{server.url}/v1/models/{server.model}", f"{server.url}/inference/v1/models/tiny-moe"):
        shown = httpx.get(url, timeout=60).json()["midstream"]
        assert shown["engine"] == {
            "kind": "embedded",
            "version": __version__,
            "features": [name for name in ENGINE_FEATURES if name != "router_weights"],
            "lacks": ["router_weights"],
            "why": {"router_weights": "the setting embedded.router_weights is off"},
        }
        assert shown["max_model_len"] > 0
        assert listed.model_extra is not None
        assert listed.model_extra["midstream"] == shown
    room = shown["max_model_len"]
    asked = {"model": server.model, "prompt": [1] * (room - 1), "max_tokens": 2}
    asked |= {"context_length_exceeded_behavior": "error"}
    assert httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).status_code == 400
    asked |= {"max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).status_code == 200
    health = httpx.get(f"{server.url}/health", timeout=60).json()
    assert [replica["engine"] for replica in health["replicas"]] == [f"embedded {__version__}"] * 2


@pytest.mark.variant
def test_what_this_model_and_these_settings_cannot_is_not_declared_and_refused_by_name(
    tmp_path: Path,
) -> None:
    model, config = tmp_path / "plain", tmp_path / "settings.toml"
    # Modules in float32: a bit may depend on the batch.
    write_tiny_moe(model, dtype="float32")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    # Of which llguidance knows nothing.
    tokenizer["decoder"] = {"type": "Fuse"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    config.write_text('[embedded]\nkernels = "torch"\n')
    with serve(
        tmp_path / "state", "--model", str(model), "--replicas", "1", "--config", str(config), "--no-tinker"
    ) as server:
        (listed,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
        engine = listed["midstream"]["engine"]
        assert engine["lacks"] == ["router_weights", "grammars", "reproducible_sampling"]
        assert {*engine["features"], *engine["lacks"]} == set(ENGINE_FEATURES)

        def ask(**more: Any) -> httpx.Response:
            body = {"model": server.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            return httpx.post(f"{server.url}/v1/chat/completions", json=body | more, timeout=60)

        for more, param in (
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        ):
            refused = ask(**more)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param)
            assert error["message"] == (
                f"{param}: this deployment's engine (embedded {__version__}) does not constrain answers to a schema,"
                " or not with this model's tokenizer (feature grammars)"
            )
        # A seed is taken, only not promised.
        assert ask(tools=[TOOL], seed=1).status_code == 200
        routed = ask(logprobs=True, include_routing_matrix=True)
        assert routed.status_code == 200
        assert routed.json()["choices"][0]["logprobs"]["content"][0]["routing_matrix"]
