"""What an engine does not declare is refused by name before it waits; what it may lack without that is served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
from replica_fakes import MODEL, FakeEngine, ids, running
from test_replica_tool_api import TOOLS, write_tool_model

from midstream.core.reports import ReplicaReport
from midstream.core.resumption import HEADER_RESUMABLE, PATH_RESUME
from midstream.core.types import ENGINE_FEATURES, EngineCard, GenerateRequest
from midstream.engine.base import AtOnce
from midstream.replica.gate import Door

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
ASKED: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("routes", "include_routing_matrix", COMPLETIONS, {"logprobs": True, "include_routing_matrix": True}, "MoE routes"),
    (
        "router_weights",
        "return_router_weights",
        COMPLETIONS,
        {"logprobs": True, "include_routing_matrix": True, "return_router_weights": True},
        "router weights",
    ),
    ("prompt_logprobs", "echo", COMPLETIONS, {"logprobs": True, "echo": True}, "log-probabilities of prompt tokens"),
    ("prompt_logprobs", "echo", COMPLETIONS, {"logprobs": 0, "echo": True, "max_tokens": 0}, "prompt tokens"),
    ("prompt_logprobs", "echo_last", CHAT, {"logprobs": True, "echo_last": 2}, "prompt tokens"),
    ("grammars", "response_format", COMPLETIONS, {"response_format": {"type": "json_object"}}, "constrain answers"),
    ("grammars", "response_format", CHAT, {"response_format": SCHEMA}, "constrain answers"),
    ("grammars", "tools", CHAT, {"tools": TOOLS, "tool_choice": "required"}, "constrain answers"),
    ("logit_bias", "logit_bias", COMPLETIONS, {"logit_bias": {"65": -3}}, "take a bias"),
    ("logit_bias", "repetition_penalty", CHAT, {"repetition_penalty": 1.2}, "apply penalties"),
    ("logit_bias", "presence_penalty", COMPLETIONS, {"presence_penalty": -1}, "apply penalties"),
    ("logit_bias", "frequency_penalty", CHAT, {"frequency_penalty": 0.5}, "apply penalties"),
]  # fmt: skip
#: Near what is refused, and needing none of it.
NOT_ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"echo": True}),
    (COMPLETIONS, {"logprobs": True, "echo_last": 0, "include_routing_matrix": False}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "response_format": {"type": "text"}}),
    (CHAT, {"tools": TOOLS, "tool_choice": "auto"}),
    (COMPLETIONS, {"logit_bias": {}, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0}),
    (COMPLETIONS, {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2}),
]  # fmt: skip


def an_engine(*lacks: str, **more: Any) -> FakeEngine:
    engine = FakeEngine(**more)
    features = tuple(feature for feature in ENGINE_FEATURES if feature not in lacks)
    card = EngineCard(kind="vllm", version="0.32.0", features=features)
    engine.info = msgspec.structs.replace(
        engine.info, vocab_size=264, max_model_len=4096, grammars=True, card=card
    )
    return engine


def fields(path: str, more: dict[str, Any]) -> dict[str, Any]:
    given = (
        {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": list(ids("hey"))}
    )
    return {"model": MODEL, "max_tokens": 3, **given, **more}


@asynccontextmanager
async def play(
    directory: Path,
    engine: FakeEngine,
) -> AsyncIterator[Any]:
    async with running(directory, engine, write=write_tool_model) as here:
        yield here


@pytest.mark.parametrize(("feature", "param", "path", "more", "words"), ASKED)
async def test_what_the_engine_lacks_is_refused_with_the_field_the_engine_and_the_feature(
    tmp_path: Path, feature: str, param: str, path: str, more: dict[str, Any], words: str
) -> None:
    async with play(tmp_path, an_engine(feature)) as here:
        # Whoever waits for it would get a 425 in the end.
        here.replica.own.gate.set(Door.CLOSED)
        for stream in (False, True):
            answer = await here.http.post(path, json={**fields(path, more), "stream": stream})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (
                400,
                "invalid_request_error",
                param,
            )
            message: str = error["message"]
            assert message.startswith(f"{param}: this deployment's engine (vllm 0.32.0) does not ")
            assert words in message
            assert message.endswith(f"(feature {feature})")
        assert here.engine.requests == []


@pytest.mark.parametrize(("path", "more"), [*((path, more) for _, _, path, more, _ in ASKED), *NOT_ASKED])
async def test_an_engine_that_has_everything_refuses_none_of_it(
    tmp_path: Path, path: str, more: dict[str, Any]
) -> None:
    async with play(tmp_path, an_engine()) as here:
        answer = await here.http.post(path, json=fields(path, more))
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "more"), NOT_ASKED)
async def test_what_needs_no_feature_is_served_by_an_engine_that_has_none(
    tmp_path: Path, path: str, more: dict[str, Any]
) -> None:
    async with play(tmp_path, an_engine(*ENGINE_FEATURES)) as here:
        for stream in (False, True):
            answer = await here.http.post(path, json={**fields(path, more), "stream": stream})
            assert answer.status_code == 200, answer.text


async def test_a_dense_model_is_called_dense_whatever_its_engine_can_do(tmp_path: Path) -> None:
    async with play(tmp_path, an_engine("routes", moe=False)) as here:
        more = {"logprobs": True, "include_routing_matrix": True}
        answer = await here.http.post(COMPLETIONS, json=fields(COMPLETIONS, more))
        assert answer.status_code == 400
        assert "this model is dense" in answer.json()["error"]["message"]


async def test_the_report_carries_the_card_once_the_engine_was_started(tmp_path: Path) -> None:
    engine = an_engine("routes")
    # For want of a tokenizer.
    engine.info = msgspec.structs.replace(engine.info, grammars=False)

    async with play(tmp_path, engine) as here:
        report = here.replica.report()
        assert report.max_model_len == 4096
        assert report.card is not None
        assert (report.card.kind, report.card.version) == ("vllm", "0.32.0")
        assert set(ENGINE_FEATURES) - set(report.card.features) == {"routes", "grammars"}
        assert msgspec.json.decode(msgspec.json.encode(report), type=ReplicaReport).card == report.card
        more = {"tools": TOOLS, "tool_choice": "required"}
        refused = await here.http.post(CHAT, json=fields(CHAT, more))
        assert refused.json()["error"]["message"].endswith("(feature grammars)")


async def test_a_stream_of_an_engine_that_cannot_resume_is_not_told_and_none_is_taken_up(
    tmp_path: Path,
) -> None:
    async with play(tmp_path, an_engine("resume")) as here:
        body = {**fields(COMPLETIONS, {}), "stream": True}
        asked = {HEADER_RESUMABLE: "1"}
        answer = await here.http.post(COMPLETIONS, json=body, headers=asked)
        assert HEADER_RESUMABLE not in answer.headers
        assert ": m " not in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")

        assert here.replica.own.service is not None
        here.replica.own.service.info = an_engine().info
        told = await here.http.post(COMPLETIONS, json=body, headers=asked)
        state = "\n".join(line[4:] for line in told.text.splitlines()[:1])
        sent = {"path": COMPLETIONS, "lost": "r", "exact": True, "state": state, "body": body}
        assert (await here.http.post(PATH_RESUME, json=sent)).status_code == 200

        here.replica.own.service.info = an_engine("resume").info
        refused = await here.http.post(PATH_RESUME, json=sent)
        assert refused.status_code == 409
        assert "(vllm 0.32.0) does not continue another's stream" in refused.json()["error"]["message"]


class WithoutSamplingLogprobs(FakeEngine):
    async def generate(self, request: GenerateRequest, at_once: AtOnce | None = None) -> Any:
        async for event in super().generate(request):
            tokens = tuple(msgspec.structs.replace(token, sampling_logprob=nan) for token in event.tokens)
            yield msgspec.structs.replace(event, tokens=tokens) if tokens else event


async def test_a_sampling_logprob_that_the_engine_cannot_tell_is_left_out_and_nothing_else_is(
    tmp_path: Path,
) -> None:
    engine = WithoutSamplingLogprobs()
    engine.info = an_engine("sampling_logprobs").info

    async with play(tmp_path, engine) as here:
        more: dict[str, Any] = {"logprobs": True, "temperature": 0.5, "raw_output": True}
        plain = await here.http.post(COMPLETIONS, json=fields(COMPLETIONS, more))
        assert plain.status_code == 200
        content = plain.json()["choices"][0]["logprobs"]["content"]
        assert not any("sampling_logprob" in entry for entry in content)
        assert [entry["logprob"] for entry in content] == [-2.0, -3.0, -4.0]
        legacy = await here.http.post(COMPLETIONS, json=fields(COMPLETIONS, {"logprobs": 1, "stream": True}))
        assert legacy.text.endswith("data: [DONE]\n\n")
        assert "error" not in legacy.text


def salts(requests: list[GenerateRequest]) -> list[bytes]:
    return [request.salt for request in requests]


@pytest.mark.parametrize("lacks", [(), ("max_cache_age",)])
async def test_an_age_limit_that_the_engine_cannot_keep_means_no_reuse_at_all(
    tmp_path: Path, lacks: tuple[str, ...]
) -> None:
    async with play(tmp_path, an_engine(*lacks)) as here:

        async def twice() -> list[bytes]:
            here.engine.requests.clear()
            for _ in range(2):
                answer = await here.http.post(COMPLETIONS, json=fields(COMPLETIONS, {"user": "one"}))
                assert answer.status_code == 200
            return salts(here.engine.requests)

        before = await twice()
        await here.swapped("s1", reset_prompt_cache="none", max_cache_age=2)
        limited = await twice()
        assert len({*before, *limited}) == (3 if lacks else 1)
        await here.swapped("s2", reset_prompt_cache="none")
        assert await twice() == before
