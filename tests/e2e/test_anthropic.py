"""The Anthropic SDK against a running server: messages, streams, tools, counting and errors of the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from serving import Server, serve

from midstream.core.versions import HEADER_SNAPSHOT_WAIT

if TYPE_CHECKING:
    # The import takes 3 s of a core: of the worker that runs these tests, not of each one that collects them.
    import anthropic

USER: list[Any] = [{"role": "user", "content": "What to wear?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS: list[Any] = [{"name": "weather", "description": "Asks.", "input_schema": WEATHER}]
RECORDS = {"logprobs": True, "return_token_ids": True, "include_routing_matrix": True, "seed": 3}


@pytest.fixture
def sdk(server: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as made:
        yield made


def test_a_message_plain_streamed_and_counted(sdk: anthropic.Anthropic, server: Server) -> None:
    asked: dict[str, Any] = {"model": server.model, "system": "Be kind.", "messages": USER}
    full: dict[str, Any] = {**asked, "max_tokens": 24, "extra_body": RECORDS}
    plain = sdk.messages.create(**full)
    assert plain.type == "message"
    assert plain.model == f"{server.model}@base"
    assert plain.stop_reason in ("max_tokens", "end_turn")
    ours: Any = plain.model_dump()["midstream"]
    entries = ours["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == ours["token_ids"]
    assert len(entries) == plain.usage.output_tokens
    assert all(entry["routing_matrix"] and entry["sampling_logprob"] <= 0 for entry in entries)
    counted = sdk.messages.count_tokens(**asked).input_tokens
    assert counted == len(ours["prompt_token_ids"])
    assert counted == plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)

    with sdk.messages.stream(**full) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.model_dump() for block in final.content] == [block.model_dump() for block in plain.content]
    assert (final.stop_reason, final.usage.output_tokens) == (plain.stop_reason, plain.usage.output_tokens)
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"
    said = [event.model_dump().get("midstream") for event in events]
    streamed = [token for one in said if one for token in one.get("token_ids") or ()]
    assert streamed == ours["token_ids"]


def test_a_tool_loop_goes_on_from_the_cache(sdk: anthropic.Anthropic, server: Server) -> None:
    def turn(messages: list[Any]) -> anthropic.types.Message:
        asked: dict[str, Any] = {
            "model": server.model, "max_tokens": 200, "tools": TOOLS, "metadata": {"user_id": "wardrobe"},
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": {"seed": 1},
        }  # fmt: skip
        plain = sdk.messages.create(messages=messages, **asked)
        with sdk.messages.stream(messages=messages, **asked) as stream:
            final = stream.get_final_message()
        called = [(b.name, b.input) for m in (plain, final) for b in m.content if b.type == "tool_use"]
        assert called[0] == called[1]
        return plain

    messages, cached = list(USER), list[int]()
    for _ in range(3):
        message = turn(messages)
        assert message.stop_reason == "tool_use"
        (call,) = message.content
        assert call.type == "tool_use"
        assert call.input["city"] in {"Oslo", "Rome"}
        cached.append(message.usage.cache_read_input_tokens or 0)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert cached[2] > cached[1] > 0


def test_a_session_is_named_in_a_header_in_the_path_or_in_the_metadata(server: Server) -> None:
    import anthropic

    def turn(base_url: str, headers: dict[str, str] | None = None, **more: Any) -> None:
        with anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0) as sdk:
            asked: dict[str, Any] = {"model": server.model, "messages": USER, "max_tokens": 2, **more}
            sdk.messages.create(extra_headers=headers, **asked)

    turn(f"{server.url}/sessions/S")
    turn(server.url, {"x-session-id": "S"})
    turn(server.url, metadata={"user_id": "M"})
    turn(f"{server.url}/inference", metadata={"user_id": "M"})
    for key in ("S", "M"):
        assert httpx.get(f"{server.url}/v1/sessions/{key}").json()["turns"] == 2


def test_the_sdk_raises_its_own_errors(sdk: anthropic.Anthropic, server: Server) -> None:
    import anthropic

    asked: dict[str, Any] = {"messages": USER, "max_tokens": 2}
    picture: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        sdk.messages.create(
            model=server.model, max_tokens=2, messages=[{"role": "user", "content": [picture]}]
        )
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert "messages[0].content[0]" in body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        sdk.messages.create(model="accounts/local/models/other", **asked)
    body = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    with pytest.raises(anthropic.ConflictError) as other:
        sdk.messages.create(model=f"{server.model}@never", extra_headers={HEADER_SNAPSHOT_WAIT: "0"}, **asked)
    body = other.value.body
    assert (body["type"], body["error"]["code"]) == ("error", "snapshot_not_served")
    with pytest.raises(anthropic.BadRequestError):
        sdk.messages.count_tokens(model=server.model, messages=[])


@pytest.mark.variant
def test_a_key_comes_in_the_sdks_own_header(tmp_path: Path) -> None:
    import anthropic

    config = tmp_path / "keys.toml"
    config.write_text('[gateway]\napi_keys = ["right", { key = "looks", scopes = ["observe"] }]\n')
    with serve(tmp_path / "state", "--replicas", "1", "--config", str(config)) as served:
        asked: dict[str, Any] = {"model": served.model, "messages": USER, "max_tokens": 2}

        def ask(key: str) -> Any:
            with anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0) as sdk:
                return sdk.messages.create(**asked)

        assert ask("right").type == "message"
        for key, kind, name in (
            ("wrong", anthropic.AuthenticationError, "authentication_error"),
            ("looks", anthropic.PermissionDeniedError, "permission_error"),
        ):
            with pytest.raises(kind) as refused:
                ask(key)
            assert json.loads(refused.value.response.text)["error"]["type"] == name
