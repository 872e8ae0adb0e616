"""Answers have schemas, and the check that holds all tests' answers against them can fail."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from gateway_harness import Message, Peer, get, post, staged
from openapi_answers import HELD, Checked, misfit, misfit_of_answer, the_document
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from midstream.api.schemas import Schemas
from midstream.core.traces import Reward, RewardTaken, Span, Trace, TracedEarlierKv, TracedTurn

METHODS = ("get", "post", "patch", "delete")
#: JSON answers without a schema, beside those of the Tinker API: the document itself.
OPEN = {("get", "/openapi.json")}


def successes() -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, contents by media type) of each operation."""
    return [
        (method, path, answer.get("content", {}))
        for path, item in the_document()["paths"].items()
        for method in METHODS
        if method in item
        for status, answer in item[method]["responses"].items()
        if status < "300"
    ]


def test_every_json_answer_has_a_schema_but_those_that_are_named_here() -> None:
    is_open = {
        (method, path)
        for method, path, content in successes()
        if content.get("application/json") == {} and not path.startswith("/api/v1/")
    }
    assert is_open == OPEN


def test_every_stream_of_inference_says_what_its_events_are() -> None:
    streams = {path: content for _, path, content in successes() if "text/event-stream" in content}
    del streams["/dashboard/events"]
    for path, content in streams.items():
        event = content["text/event-stream"]["x-event-schema"]
        assert "description" in event or "StreamError" in str(event), path
    assert len(streams) == 2 * 4 + 2


def test_an_answer_may_have_more_fields_and_a_field_without_a_word_is_always_there() -> None:
    class Told(msgspec.Struct):
        """Words."""

        size: int
        kind: str = "a"
        more: list[int] | msgspec.UnsetType = msgspec.UNSET

    schemas = Schemas()
    schema = schemas.of(Told)
    assert schema == {"$ref": "#/components/schemas/Told"}
    assert schemas.components["Told"] == {
        "type": "object",
        "description": "Words.",
        "properties": {
            "size": {"type": "integer"},
            "kind": {"type": "string"},
            "more": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["size", "kind"],
    }
    with pytest.raises(TypeError, match="no schema"):
        schemas.of(complex)


def test_two_structs_of_one_name_are_refused() -> None:
    schemas = Schemas()
    schemas.of(msgspec.defstruct("Same", [("a", int)]))
    with pytest.raises(AssertionError, match="one name"):
        schemas.of(msgspec.defstruct("Same", [("b", int)]))


PAUSED = {"is_paused": True, "mode": "wait"}
COMPLETION = {
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m@s", "choices": [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}
    ],
}  # fmt: skip


def told_of(method: str, path: str, answer: Any) -> str | None:
    return misfit_of_answer(method, path, 200, "application/json", json.dumps(answer).encode())


def test_the_check_finds_a_field_that_is_gone_or_new_and_a_value_of_another_kind() -> None:
    assert told_of("GET", "/is_paused", PAUSED) is None
    for bad, why in (
        ({"is_paused": True}, "mode is missing"),
        (PAUSED | {"since": 1}, "since is not known"),
        (PAUSED | {"mode": "sleep"}, "none of"),
    ):
        assert why in str(told_of("GET", "/is_paused", bad))
    # Clients go on when a new field comes.
    assert misfit(PAUSED | {"since": 1}, {"$ref": "#/components/schemas/PauseState"}) is None
    assert told_of("POST", "/v1/completions", COMPLETION) is None
    [choice] = COMPLETION["choices"]  # type: ignore[misc]
    for gone in choice:
        cut = {name: value for name, value in choice.items() if name != gone}
        why = told_of("POST", "/v1/completions", COMPLETION | {"choices": [cut]})
        assert why == f"POST /v1/completions.choices[].{gone} is missing"
    assert "is not told" in str(misfit_of_answer("GET", "/is_paused", 200, "text/plain", b"paused"))


def test_the_check_finds_a_field_that_is_gone_from_an_event() -> None:
    event = json.dumps({name: value for name, value in COMPLETION.items() if name != "created"})
    body = f"data: {json.dumps(COMPLETION)}\n\ndata: {event}\n\ndata: [DONE]\n\n".encode()
    why = misfit_of_answer("POST", "/v1/completions", 200, "text/event-stream", body)
    assert "created is missing" in str(why)


async def test_an_app_whose_answer_lacks_a_field_fails_the_test_that_asks_it() -> None:
    async def answer(request: Any) -> JSONResponse:
        return JSONResponse({"is_paused": False})

    app = Checked(Starlette(routes=[Route("/is_paused", answer)]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as http:
        with pytest.raises(AssertionError, match="mode is missing"):
            await http.get("/is_paused")
    assert len(app.misfits) == 1


def traced() -> Trace:
    turn = TracedTurn(
        turn=1, parent=0, model="m", added=[1], token_ids=[2], loss_mask=[0, 1], finish_reason="stop",
        created=1.0, logprobs=[-0.5], sampling_logprobs=[None], routing_matrix=["AA=="],
        routing_matrix_dtype="uint8", routing_matrix_shape=[1, 1], snapshots=[Span("s", 0, 1)],
        kv_snapshots=[Span("s", 0, 2)], earlier_kv_snapshots=[TracedEarlierKv(1, [Span("r", 0, 1)])],
        branch={"reason": "edited"},
    )  # fmt: skip
    return Trace([turn], rewards=[Reward(reward=1.0, created=2.0, metadata={"a": 1})])


async def test_a_trace_and_a_reward_are_as_they_are_told() -> None:
    async def replica(request: Message, peer: Peer) -> None:
        is_trace = request.start.split()[1] == "/replica/trace"
        answer = {"trace": traced()} if is_trace else RewardTaken(has=True, taken=True)
        peer.respond(msgspec.json.encode(answer))

    async with staged(replica) as stage:
        for base in ("/v1/sessions/a", "/sessions/a"):
            answer = await stage.ask(get(f"{base}/trace"))
            assert json.loads(answer.body)["traces"][0]["turns"] == msgspec.to_builtins(traced().turns)
            answer = await stage.ask(post(b'{"reward": 1, "turn": 1}', f"{base}/reward"))
            assert json.loads(answer.body)["turn"] == 1
            path = base.removesuffix("a") + "{key}"
            assert HELD["GET", f"{path}/trace"]
            assert HELD["POST", f"{path}/reward"]
