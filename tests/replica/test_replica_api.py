"""The rollout API over a real HTTP server, asked by the real OpenAI SDK and byte by byte."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from msgspec.structs import replace
from replica_fakes import (
    DEPLOYMENT,
    HE,
    IM_END,
    IM_START,
    MODEL,
    FakeEngine,
    Running,
    ids,
    mask_at,
    router_weights_at,
    running,
    sse,
)

from midstream.client.decode import router_weights_of, routes_of
from midstream.core.errors import HEADER_ANOTHER_BOOT
from midstream.core.headers import HEADER_BOOT
from midstream.core.reports import ReplicaReport
from midstream.core.sse import sse_event
from midstream.core.types import NEAR_ROUTER, NEAR_TOP_P, GenerateRequest, GenerationEvent, Stage, TokenRecord
from midstream.engine.base import AtOnce
from midstream.replica import app

BASE = f"{MODEL}@base"
HI: Any = [{"role": "user", "content": "hi"}]
CHAT_PROMPT = ids("<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n")


async def ask(here: Running, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return await here.http.post(path, json={"model": MODEL, **fields})


def content(choice: dict[str, Any]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = choice["logprobs"]["content"]
    return entries


async def test_a_plain_completion_through_the_sdk(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.sdk.completions.create(model=MODEL, prompt="hey", max_tokens=3)
        choice = answer.choices[0]
        assert (answer.object, answer.model, choice.text, choice.finish_reason) == (
            "text_completion", BASE, "hell", "length",
        )  # fmt: skip
        assert answer.usage is not None
        assert answer.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        assert choice.model_extra == {"snapshots": [{"snapshot": "base", "start": 0, "end": 3}]}
        request = here.engine.requests[0]
        assert (request.prompt, request.n, request.sampling.seed) == ((HE, ord("y")), 1, 77)


async def test_a_plain_chat_through_the_sdk_with_token_ids_and_logprobs(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.sdk.chat.completions.create(
            model=DEPLOYMENT, messages=HI, max_tokens=2, logprobs=True, top_logprobs=1,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        choice = answer.choices[0]
        assert (answer.object, answer.model) == ("chat.completion", BASE)
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            "hel",
            "length",
        )
        assert answer.model_extra is not None
        assert choice.model_extra is not None
        assert answer.model_extra["prompt_token_ids"] == list(CHAT_PROMPT)
        assert choice.model_extra["token_ids"] == [HE, ord("l")]
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        size = len(CHAT_PROMPT)
        assert [(t.token, t.bytes, t.logprob) for t in choice.logprobs.content] == [
            ("he", [104, 101], -float(size)),
            ("l", [108], -float(size + 1)),
        ]
        assert [(t.token, t.logprob) for t in choice.logprobs.content[0].top_logprobs] == [("A", -0.5)]


async def test_a_chat_without_max_tokens_goes_up_to_the_context(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.sdk.chat.completions.create(model=MODEL, messages=HI)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 128 - len(CHAT_PROMPT)


async def test_a_streamed_chat_through_the_sdk(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        stream = await here.sdk.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.model for chunk in chunks} == {BASE}
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        deltas = [(c.choices[0].delta.role, c.choices[0].delta.content) for c in chunks[:-1]]
        assert deltas == [("assistant", "he"), (None, "l"), (None, "l"), (None, None)]
        assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None, None, None, "length"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize("n", [1, 2])
async def test_the_sdks_helper_counts_the_numbers_of_each_token_once(tmp_path: Path, n: int) -> None:
    """Helpers take numbers twice that come with the chunk that opens a choice: openai-node#2444, openai-ruby#564.

    The Python SDK does so with each choice but the first.
    """

    async with running(tmp_path, FakeEngine()) as here:
        asked: Any = {"model": MODEL, "messages": HI, "max_tokens": 3, "n": n, "logprobs": True}
        body = {"return_token_ids": True}
        async with here.sdk.chat.completions.stream(**asked, extra_body=body) as stream:
            chunks = [event.chunk async for event in stream if event.type == "chunk"]
            made = stream.current_completion_snapshot
        for choice in made.choices:
            assert choice.message.content == "hell"
            assert choice.logprobs is not None
            assert [entry.token for entry in choice.logprobs.content or ()] == ["he", "l", "l"]
        for index in range(n):
            opened, second, *_ = [one for c in chunks for one in c.choices if one.index == index]
            assert (opened.delta.role, opened.delta.content, opened.logprobs) == ("assistant", "", None)
            assert (second.delta.role, second.delta.content) == (None, "he")
        prompts = [chunk.to_dict().get("prompt_token_ids") for chunk in chunks]
        assert [ids for ids in prompts if ids is not None] == [list(CHAT_PROMPT)] * n


LINE_ENDS = "a\u2028b\u2029c\x85d"


@pytest.mark.parametrize("kind", ["chat", "completion", "legacy"])
async def test_no_client_can_cut_an_event_at_a_line_end_of_unicode(tmp_path: Path, kind: str) -> None:
    """httpx splits a stream into lines as str.splitlines does, and many clients read it so."""
    tokens = ids(LINE_ENDS)
    asked: dict[str, Any] = {"logprobs": True} if kind != "legacy" else {"logprobs": 2}
    asked |= {"messages": HI} if kind == "chat" else {"prompt": LINE_ENDS, "echo": True}

    async with running(tmp_path, FakeEngine(LINE_ENDS)) as here:
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        body = {
            "model": MODEL,
            "max_tokens": len(tokens),
            "stream": True,
            "raw_output": kind != "legacy",
            **asked,
        }
        async with here.http.stream("POST", path, json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert {line[:6] for line in lines} == {"data: "}
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        assert lines[-1] == "data: [DONE]"
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        said = "".join(c["delta"].get("content") or "" if kind == "chat" else c["text"] for c in choices)
        assert said == (LINE_ENDS if kind == "chat" else LINE_ENDS * 2)
        if kind != "legacy":
            assert choices[-1]["raw_output"]["completion"] == said


def test_an_error_event_that_quotes_line_ends_of_unicode_is_one_line() -> None:
    written = sse_event({"error": {"message": LINE_ENDS}})
    assert written.decode().splitlines() == [written.decode().rstrip("\n"), ""]
    assert json.loads(written[6:]) == {"error": {"message": LINE_ENDS}}


async def test_several_prompts_and_choices_are_indexed_prompt_by_prompt(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.sdk.completions.create(
            model=MODEL, prompt=[[1, 2], [3, 4, 5]], n=2, max_tokens=2, echo=True, seed=9,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        prompts = [choice.model_extra["prompt_token_ids"] for choice in answer.choices]  # type: ignore[index]
        assert prompts == [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]
        assert [choice.text for choice in answer.choices] == ["\x01\x02hel"] * 2 + ["\x03\x04\x05hel"] * 2
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
        by_prompt = {request.prompt: request for request in here.engine.requests}
        assert by_prompt[1, 2].sampling.seed == 9
        assert by_prompt[3, 4, 5].sampling.seed not in (9, 77)

        stream = await here.sdk.completions.create(
            model=MODEL, prompt=["a", "b"], n=2, max_tokens=2, stream=True
        )
        texts, finishes = [""] * 4, [0] * 4
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            finishes[choice.index] += choice.finish_reason == "length"
        assert (texts, finishes) == (["hel"] * 4, [1] * 4)


async def test_the_new_logprobs_format_exactly(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await ask(
            here, prompt=[65, 66], max_tokens=1, logprobs=True, top_logprobs=1, include_routing_matrix=True
        )
        assert content(answer.json()["choices"][0]) == [
            {
                "token": "he",
                "bytes": [104, 101],
                "logprob": -2.0,
                "sampling_logprob": -1.0,
                "text_offset": 0,
                "token_id": HE,
                "top_logprobs": [{"token": "A", "logprob": -0.5, "token_id": 65, "bytes": [65]}],
                "routing_matrix": base64.b64encode(bytes([2, HE % 256])).decode(),
            }
        ]


@pytest.mark.parametrize("chat", [False, True])
async def test_sampling_masks_stand_beside_the_numbers_of_generated_tokens_plain_and_streamed(
    tmp_path: Path, chat: bool
) -> None:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": [65, 66]}
    )
    path = "/v1/chat/completions" if chat else "/v1/completions"
    fields = {"model": MODEL, "max_tokens": 3, "n": 2, "seed": 1, "logprobs": True} | prompt

    async with running(tmp_path, FakeEngine()) as here:
        asked = fields | {"return_sampling_mask": True, "echo": not chat}
        plain = (await here.http.post(path, json=asked)).json()["choices"]
        at = len(here.engine.requests[-1].prompt)
        masks = [base64.b64encode(mask_at(at + i, t)).decode() for i, t in enumerate((HE, 108, 108))]
        echoed = 0 if chat else at
        for choice in plain:
            assert [e.get("sampling_mask") for e in content(choice)] == [None] * echoed + masks
        events = sse((await here.http.post(path, json=asked | {"stream": True})).text)[:-1]
        for choice in plain:
            own = [c for e in events for c in e["choices"] if c["index"] == choice["index"] and c["logprobs"]]
            assert [entry for c in own for entry in content(c)] == content(choice)
        bare = await here.http.post(path, json=fields)
        assert "sampling_mask" not in bare.text
        assert not here.engine.requests[-1].want_masks


@pytest.mark.parametrize("chat", [False, True])
async def test_router_weights_stand_beside_the_routes_of_all_tokens_plain_and_streamed(
    tmp_path: Path, chat: bool
) -> None:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": [65, 66]}
    )
    path = "/v1/chat/completions" if chat else "/v1/completions"
    fields = {"model": MODEL, "max_tokens": 3, "n": 2, "seed": 1, "logprobs": True} | prompt

    async with running(tmp_path, FakeEngine()) as here:
        asked = fields | {"include_routing_matrix": True, "return_router_weights": True, "echo": not chat}
        plain = (await here.http.post(path, json=asked)).json()["choices"]
        at = len(here.engine.requests[-1].prompt)
        echoed = [] if chat else [None, base64.b64encode(router_weights_at(1)).decode()]
        own = [base64.b64encode(router_weights_at(at + i)).decode() for i in range(3)]
        for choice in plain:
            assert [e.get("router_weights") for e in content(choice)] == echoed + own
            routes = routes_of(choice, top_k=2)
            weights = router_weights_of(choice, routes)
            places = range(1 if echoed else at, at + 3)
            assert weights.tolist() == [[[place + 0.25, 0.5]] for place in places]
        events = sse((await here.http.post(path, json=asked | {"stream": True})).text)[:-1]
        for choice in plain:
            parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
            assert [entry for c in parts if c["logprobs"] for entry in content(c)] == content(choice)
        bare = await here.http.post(path, json=fields | {"include_routing_matrix": True})
        assert "router_weights" not in bare.text
        assert not here.engine.requests[-1].want_router_weights


async def test_missing_router_weights_and_weights_without_routes_fail_closed(tmp_path: Path) -> None:
    class Weightless(FakeEngine):
        async def _events(self, request: Any) -> Any:
            without = msgspec.structs.replace(request, want_router_weights=False)
            async for event in super()._events(without):
                yield event

    async with running(tmp_path, Weightless()) as here:
        asked = {"logprobs": True, "include_routing_matrix": True, "return_router_weights": True}
        answer = await ask(here, prompt="a", **asked)
        assert answer.json()["error"]["message"] == "the engine returned a token without its router weights"
        answer = await ask(here, prompt=[65, 66], echo=True, **asked | {"max_tokens": 0})
        said = "the engine returned a prompt token without its router weights"
        assert answer.json()["error"]["message"] == said
        for lacks in ("logprobs", "include_routing_matrix"):
            answer = await ask(here, prompt="a", **asked | {lacks: None})
            assert answer.status_code == 400
        message = "return_router_weights: requires logprobs: true and include_routing_matrix: true"
        assert answer.json()["error"]["message"] == message


async def test_a_missing_mask_and_masks_without_logprobs_fail_closed(tmp_path: Path) -> None:
    class Maskless(FakeEngine):
        async def _events(self, request: Any) -> Any:
            async for event in super()._events(msgspec.structs.replace(request, want_masks=False)):
                yield event

    async with running(tmp_path, Maskless()) as here:
        answer = await ask(here, prompt="a", logprobs=True, return_sampling_mask=True)
        assert answer.json()["error"]["message"] == "the engine returned a token without its sampling mask"
        for logprobs in (None, False, 1):
            answer = await ask(here, prompt="a", logprobs=logprobs, return_sampling_mask=True)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == "return_sampling_mask: requires logprobs: true"
        # As the Fireworks SDK asks; it reads this message.
        answer = await ask(here, prompt="a", logprobs=True, sampling_mask="parquet_v1")
        said = answer.json()["error"]
        assert (said["code"], answer.status_code) == ("invalid_request_error", 400)
        assert "Extra inputs are not permitted, field: 'sampling_mask'" in said["message"]


async def test_near_ties_are_named_beside_the_numbers_of_their_token_and_absent_where_there_are_none(
    tmp_path: Path,
) -> None:
    class Engine(FakeEngine):
        """Marks the tokens of some positions."""

        async def generate(
            self, request: GenerateRequest, at_once: AtOnce | None = None
        ) -> AsyncIterator[GenerationEvent]:
            def marked(records: tuple[TokenRecord, ...]) -> tuple[TokenRecord, ...]:
                ties = {-1.0: NEAR_ROUTER, -3.0: NEAR_ROUTER | NEAR_TOP_P}
                return tuple(replace(r, near_tie=ties.get(r.logprob, 0)) for r in records)

            async for event in super().generate(request):
                prompt = None if event.prompt is None else marked(event.prompt)
                yield replace(event, tokens=marked(event.tokens), prompt=prompt)

    async with running(tmp_path, Engine()) as here:
        fields: dict[str, Any] = {"prompt": [65, 66, 67], "max_tokens": 2, "logprobs": True, "echo": True}
        plain = content((await ask(here, **fields)).json()["choices"][0])
        expected = [None, ["router"], None, ["router", "top_p"], None]
        assert [e.get("near_tie") for e in plain] == expected
        assert ["near_tie" in e for e in plain] == [near is not None for near in expected]
        *events, _ = sse((await ask(here, **fields, stream=True)).text)
        streamed = [e for event in events for c in event["choices"] if c["logprobs"] for e in content(c)]
        assert streamed == plain
        raw = (await ask(here, **fields, raw_output=True)).json()["choices"][0]["raw_output"]
        assert raw["completion_logprobs"]["content"] == plain


async def test_the_legacy_logprobs_format_exactly(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        plain = await ask(here, prompt=[65], max_tokens=2, logprobs=1, echo=True)
        legacy = {
            "tokens": ["A", "he", "l"],
            "token_logprobs": [0.0, -1.0, -2.0],
            "token_ids": [65, HE, 108],
            "text_offset": [0, 1, 3],
            "top_logprobs": [{"A": 0.0}, {"A": -0.5, "he": -1.0}, {"A": -0.5, "l": -2.0}],
        }
        assert plain.json()["choices"][0]["logprobs"] == legacy
        streamed = await ask(here, prompt=[65], max_tokens=2, logprobs=1, echo=True, stream=True)
        events = [e for e in sse(streamed.text) if e != "[DONE]" and e["choices"][0]["logprobs"]]
        joined: dict[str, list[Any]] = {key: [] for key in legacy}
        for event in events:
            for key, values in event["choices"][0]["logprobs"].items():
                joined[key] += values
        assert joined == legacy


async def test_echo_gives_routes_and_logprobs_aligned_with_the_tokens(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        fields: dict[str, Any] = {
            "prompt": [65, 66, 67], "max_tokens": 2, "logprobs": True, "include_routing_matrix": True,
            "echo": True, "raw_output": True, "return_token_ids": True,
        }  # fmt: skip
        choice = (await ask(here, **fields)).json()["choices"][0]
        entries = content(choice)
        assert [e["token_id"] for e in entries] == [65, 66, 67, HE, 108]
        assert [e["logprob"] for e in entries] == [0.0, -1.0, -2.0, -3.0, -4.0]
        assert [e["sampling_logprob"] for e in entries] == [None, None, None, -1.5, -2.0]
        assert [e["text_offset"] for e in entries] == [0, 1, 2, 3, 5]
        assert "routing_matrix" not in entries[0]
        routes = [base64.b64decode(e["routing_matrix"]) for e in entries[1:]]
        assert routes == [bytes([p, t % 256]) for p, t in [(1, 66), (2, 67), (3, HE), (4, 108)]]
        assert (choice["text"], choice["token_ids"]) == ("ABChel", [HE, 108])
        raw = choice["raw_output"]
        assert raw == {
            "completion": "ABChel",
            "prompt_fragments": [65, 66, 67],
            "prompt_token_ids": [65, 66, 67],
            "completion_token_ids": [65, 66, 67, HE, 108],
            "completion_logprobs": {"content": entries},
        }

        events = sse((await ask(here, **fields, stream=True)).text)
        streamed = [
            entry for e in events[:-1] if e["choices"][0]["logprobs"] for entry in content(e["choices"][0])
        ]
        assert streamed == entries
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "ABChel"
        assert events[-2]["choices"][0]["raw_output"] == raw


async def test_an_echoed_first_token_is_its_own_only_alternative(tmp_path: Path) -> None:
    """The Fireworks client drops the alternatives of all tokens when one token has none."""

    async with running(tmp_path, FakeEngine()) as here:
        answer = await ask(
            here, prompt=[72, 66], max_tokens=1, logprobs=True, top_logprobs=2, echo=True, stream=True
        )
        choices = [event["choices"][0] for event in sse(answer.text)[:-1]]
        entries = [entry for choice in choices if choice["logprobs"] for entry in content(choice)]
        alternatives = [[(top["token_id"], top["logprob"]) for top in e["top_logprobs"]] for e in entries]
        assert alternatives == [[(72, 0.0)], [(65, -0.5), (66, -1.5)], [(65, -0.5), (66, -1.5)]]


async def test_echo_last_gives_the_prompts_end_only(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await ask(here, prompt=[65, 66, 67], max_tokens=1, logprobs=True, echo_last=2)
        choice = answer.json()["choices"][0]
        assert choice["text"] == "BChe"
        assert [e["token_id"] for e in content(choice)] == [66, 67, HE]
        assert here.engine.requests[0].prompt_records == 2


async def test_max_tokens_zero_with_echo_scores_the_prompt(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        plain = (await ask(here, prompt=[65, 66], max_tokens=0, echo=True, logprobs=True)).json()
        assert [e["logprob"] for e in content(plain["choices"][0])] == [0.0, -1.0]
        assert (plain["model"], plain["choices"][0]["finish_reason"]) == (BASE, "length")
        assert plain["usage"]["completion_tokens"] == 0
        events = sse(
            (await ask(here, prompt=[65, 66], max_tokens=0, echo=True, logprobs=True, stream=True)).text
        )
        assert [len(content(events[0]["choices"][0])), events[1]["choices"][0]["finish_reason"]] == [
            2,
            "length",
        ]
        assert events[2:] == ["[DONE]"]


async def test_routes_of_more_than_256_experts_say_their_width(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(experts=300)) as here:
        answer = await ask(here, prompt=[65], max_tokens=1, logprobs=True, include_routing_matrix=True)
        assert content(answer.json()["choices"][0])[0]["routing_matrix_dtype"] == "uint16"


async def test_a_stream_with_token_ids_in_raw_output_and_metrics(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await ask(
            here, "/inference/v1/completions", prompt=[65, 66], max_tokens=2, stream=True, raw_output=True,
            perf_metrics_in_response=True, return_token_ids=True,
        )  # fmt: skip
        events = sse(answer.text)
        first, second, last, done = events
        assert done == "[DONE]"
        assert (first["choices"][0]["prompt_token_ids"], first["choices"][0]["token_ids"]) == ([65, 66], [HE])
        assert "prompt_token_ids" not in second["choices"][0]
        assert second["choices"][0]["token_ids"] == [108]
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["choices"][0]["raw_output"]["completion_token_ids"] == [HE, 108]
        assert last["choices"][0]["raw_output"]["completion_logprobs"] is None
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert set(last["perf_metrics"]) == {
            "prompt-tokens", "cached-prompt-tokens", "server-time-to-first-token", "server-processing-time",
            "num-concurrent-requests", "prefill-queue-duration",
        }  # fmt: skip
        assert last["perf_metrics"]["num-concurrent-requests"] == 1
        assert last["perf_metrics"]["prefill-queue-duration"] == 0.25
        assert "perf_metrics" not in first
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["fireworks-prompt-tokens"] == "2"
        assert answer.headers["fireworks-cached-prompt-tokens"] == "3"


async def test_chat_chunks_have_prompt_ids_at_the_top_and_on_the_choice(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await ask(
            here, "/v1/chat/completions", messages=HI, max_tokens=1, stream=True, return_token_ids=True
        )
        first, last, done = sse(answer.text)
        assert first["prompt_token_ids"] == first["choices"][0]["prompt_token_ids"] == list(CHAT_PROMPT)
        assert first["choices"][0]["token_ids"] == [HE]
        assert (last["choices"][0]["token_ids"], "prompt_token_ids" in last, done) == ([], False, "[DONE]")


async def test_plain_responses_carry_the_metrics_as_headers(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": [65], "max_tokens": 1, "perf_metrics_in_response": True},
            headers={"x-request-id": "abc"},
        )
        assert answer.headers["x-request-id"] == "abc"
        metrics = answer.json()["perf_metrics"]
        assert {name: answer.headers[f"fireworks-{name}"] for name in metrics} == {
            name: str(value) for name, value in metrics.items()
        }
        assert (metrics["prompt-tokens"], metrics["cached-prompt-tokens"]) == (1, 3)
        assert "fireworks-server-processing-time" in answer.headers


async def test_a_stop_string_ends_the_generation_and_does_not_leak(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine("hello world ")) as here:
        fields: dict[str, Any] = {"prompt": [65], "max_tokens": 50, "stop": ["lo w"], "logprobs": True}
        choice = (await ask(here, **fields)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hel", "stop")
        assert [e["token"] for e in content(choice)] == ["he", "l", "l", "o", " ", "w"]
        await here.engine.any_aborted.wait()
        assert here.engine.aborted == [here.engine.requests[0].request_id]

        events = sse((await ask(here, **fields, stream=True)).text)[:-1]
        assert [e["choices"][0]["text"] for e in events] == ["he", "", "l", "", "", "", ""]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_one_choice_that_stops_leaves_the_others_going(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.sdk.completions.create(
            model=MODEL, prompt=["a", "b"], max_tokens=12, stop="lo", n=2, logprobs=0
        )
        assert [(c.text, c.finish_reason) for c in answer.choices] == [("hel", "stop")] * 4
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16


async def test_the_end_token_stops_without_text_but_stands_in_the_records(tmp_path: Path) -> None:
    def engine() -> FakeEngine:
        fake = FakeEngine()
        fake.reply = (65, IM_END)
        return fake

    async with running(tmp_path, engine()) as here:
        fields = {"prompt": [65], "max_tokens": 4, "return_token_ids": True}
        choice = (await ask(here, **fields)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("A", "stop", [65, IM_END])
        choice = (await ask(here, **fields, ignore_eos=True)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("AA", "length")
        assert choice["token_ids"] == [65, IM_END] * 2


@pytest.mark.parametrize("asked", [{"stop_token_ids": [66]}, {"stop": ["<|im_start|>", "zz"]}])
async def test_a_stop_token_by_id_or_name_ends_like_the_end_token(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    token = 66 if "stop_token_ids" in asked else IM_START

    def engine() -> FakeEngine:
        fake = FakeEngine()
        fake.reply = (65, token, 65, IM_END)
        return fake

    async with running(tmp_path, engine()) as here:
        fields = {"prompt": [65], "max_tokens": 8, "return_token_ids": True, "ignore_eos": True, **asked}
        choice = (await ask(here, **fields)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("A", "stop", [65, token])
        events = sse((await ask(here, **fields, stream=True)).text)[:-1]
        assert "".join(event["choices"][0]["text"] for event in events) == "A"


async def test_a_stream_across_a_swap_labels_every_chunk_and_the_plain_answer_its_spans(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine(allowed=2)) as here:
        body = {"model": MODEL, "prompt": [65], "max_tokens": 5}
        plain = asyncio.create_task(here.http.post("/v1/completions", json=body))
        stream = asyncio.create_task(here.http.post("/v1/completions", json={**body, "stream": True}))
        await here.engine.until(lambda: list(here.engine.made.values()) == [2, 2])
        await here.swapped("v1")
        here.engine.allow(5)
        events = sse((await stream).text)
        assert [event["model"].rpartition("@")[2] for event in events[:-1]] == ["base"] * 2 + ["v1"] * 4
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hello "
        whole = (await plain).json()
        assert (whole["model"], whole["choices"][0]["text"]) == (f"{MODEL}@v1", "hello ")
        assert whole["choices"][0]["snapshots"] == [
            {"snapshot": "base", "start": 0, "end": 2},
            {"snapshot": "v1", "start": 2, "end": 5},
        ]


async def test_choices_that_cross_a_swap_each_have_their_spans(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(allowed=2)) as here:
        # Is over before the swap.
        here.engine.replies = {1: (IM_END,)}
        body = {"model": MODEL, "prompt": [65], "max_tokens": 5, "n": 3}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "A"}], "max_tokens": 5, "n": 3}
        plain = asyncio.create_task(here.http.post("/v1/completions", json=body))
        talk = asyncio.create_task(here.http.post("/v1/chat/completions", json=chat))
        stream = asyncio.create_task(here.http.post("/v1/completions", json={**body, "stream": True}))
        await here.engine.until(lambda: list(here.engine.made.values()) == [2, 2, 2])
        await here.swapped("v1")
        here.engine.allow(5)
        crossed = [{"snapshot": "base", "start": 0, "end": 2}, {"snapshot": "v1", "start": 2, "end": 5}]
        for answer in ((await plain).json(), (await talk).json()):
            assert answer["model"] == f"{MODEL}@v1"
            assert [choice["snapshots"] for choice in answer["choices"]] == [
                crossed,
                [{"snapshot": "base", "start": 0, "end": 1}],
                crossed,
            ]
            assert not any("prompt_snapshots" in choice for choice in answer["choices"])
        labels: dict[int, list[str]] = {0: [], 1: [], 2: []}
        for event in sse((await stream).text)[:-1]:
            labels[event["choices"][0]["index"]].append(event["model"].rpartition("@")[2])
        # One chunk per token, and one that ends the choice.
        finished = ["base"] * 2 + ["v1"] * 4
        assert labels == {0: finished, 1: ["base"] * 2, 2: finished}


@pytest.mark.parametrize("n", [1, 2])
async def test_an_echoed_prompt_scored_under_two_snapshots_says_so_in_spans(tmp_path: Path, n: int) -> None:
    class Chunked(FakeEngine):
        """A swap came between two chunks of the prompt."""

        async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
            async for event in super()._events(request):
                first = [msgspec.structs.replace(r, snapshot="older") for r in (event.prompt or ())[:3]]
                yield (
                    event
                    if event.prompt is None
                    else msgspec.structs.replace(event, prompt=(*first, *event.prompt[3:]))
                )

    async with running(tmp_path, Chunked()) as here:
        body = {"model": MODEL, "prompt": [65, 66, 67, 68, 69], "max_tokens": 2, "echo": True, "n": n}
        answer = (await here.http.post("/v1/completions", json={**body, "logprobs": True})).json()
        assert answer["model"] == f"{MODEL}@base"
        for choice in answer["choices"]:
            assert choice["snapshots"] == [{"snapshot": "base", "start": 0, "end": 2}]
            assert choice["prompt_snapshots"] == [
                {"snapshot": "older", "start": 0, "end": 3},
                {"snapshot": "base", "start": 3, "end": 5},
            ]
        unscored = (await here.http.post("/v1/completions", json=body)).json()
        assert not any("prompt_snapshots" in choice for choice in unscored["choices"])


async def test_tokens_reach_the_client_while_the_generation_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(allowed=1)) as here:
        body = {"model": MODEL, "prompt": [65], "max_tokens": 2, "stream": True}
        async with here.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = (line.removeprefix("data: ") async for line in answer.aiter_lines() if line)
            assert json.loads(await anext(lines))["choices"][0]["text"] == "he"
            # Only now may the second token be made.
            here.engine.allow(2)
            assert json.loads(await anext(lines))["choices"][0]["text"] == "l"


async def test_a_request_during_a_commit_waits_and_is_served_by_the_new_snapshot(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        here.engine.commit_gate.clear()
        await here.swap("v1")
        await here.engine.committing.wait()
        early = await here.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "a"},
            headers={"x-fireworks-hot-load-drain-timeout": "0"},
        )
        assert (early.status_code, early.headers["retry-after"]) == (425, "1")
        assert early.json()["error"]["code"] == "snapshot_transition"
        waiting = asyncio.create_task(ask(here, prompt="a", max_tokens=1))
        await here.until(lambda: here.replica.own.gate.waiting == 1)
        here.engine.commit_gate.set()
        assert (await waiting).json()["model"] == f"{MODEL}@v1"


async def test_a_snapshot_named_in_the_model_must_be_the_one_that_serves(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        assert (
            await here.http.post("/v1/completions", json={"model": BASE, "prompt": "a"})
        ).status_code == 200
        await here.swapped("v1")
        for model, headers in ((BASE, {}), (MODEL, {"fireworks-model": BASE})):
            with pytest.raises(openai.ConflictError, match=f"snapshot 'base' is not serving; {MODEL}@v1 is"):
                await here.sdk.completions.create(model=model, prompt="a", extra_headers=headers)
        with pytest.raises(openai.NotFoundError, match="model 'gpt-4' is not served here"):
            await here.sdk.completions.create(model="gpt-4", prompt="a")


async def test_salts_follow_session_tenant_isolation_and_reset_policy(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:

        async def salt(session: str | None = None, /, *, tenant: str = "", **fields: Any) -> bytes:
            headers = {"x-midstream-tenant": tenant} | ({"x-midstream-session": session} if session else {})
            body = {"model": MODEL, "prompt": [65], "max_tokens": 1, **fields}
            assert (await here.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            return here.engine.requests[-1].salt

        first = await salt("s%20one")
        assert await salt() == first
        assert await salt(prompt_cache_isolation_key="x") not in (first, await salt(tenant="t"))
        assert await salt(prompt_cache_max_len=0) != await salt(prompt_cache_max_len=0)
        assert here.engine.requests[0].session
        await salt("s%20one", prompt_cache_max_len=0)
        assert not here.engine.requests[-1].session, "its session would hold KV that nobody finds"
        await here.swapped("v1", reset_prompt_cache="new_session")
        assert await salt("s%20one") == await salt(user="s one") == first
        assert await salt("s2") == await salt() != first
        await here.swapped("v2", reset_prompt_cache="none")
        assert [await salt("s%20one"), await salt("s2") == await salt()] == [first, True]
        assert here.engine.abandoned == 0, "a known session finds its KV"
        await here.swapped("v3", reset_prompt_cache="all")
        assert here.engine.abandoned == 1
        assert await salt("s%20one") == await salt("s2") == await salt() != first


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_ends_its_generation(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, FakeEngine(allowed=1)) as here:
        body = {"model": MODEL, "prompt": [65], "max_tokens": 9, "stream": stream}
        task = asyncio.create_task(ask(here, **body))
        await here.engine.started_streams.wait()
        await here.until(lambda: here.replica.own.gate.inside == 1)
        task.cancel()
        await here.engine.any_aborted.wait()
        assert here.engine.aborted == [here.engine.requests[0].request_id]
        await here.until(lambda: here.replica.own.gate.inside == 0)


async def test_an_engine_error_before_the_first_byte_has_its_status_and_after_it_ends_the_stream(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        here.engine.fail_after = 0
        answer = await ask(here, prompt="a", stream=True)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            500,
            "the step failed: out of pages",
        )
        here.engine.fail_after = 2
        assert (await ask(here, prompt="a")).status_code == 500
        answer = await ask(here, prompt="a", stream=True)
        events = sse(answer.text)
        assert (answer.status_code, len(events)) == (200, 3)
        assert events[-1]["error"]["code"] == "engine_error"
        assert events[-1]["error"]["status_code"] == 500
        with pytest.raises(openai.APIError, match="out of pages"):
            async for _ in await here.sdk.completions.create(model=MODEL, prompt="a", stream=True):
                pass


async def test_a_stream_that_the_engine_ends_too_early_ends_with_an_error(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        here.engine.stop_short = True
        events = sse((await ask(here, prompt="a", stream=True)).text)
        assert (
            events[-1]["error"]["message"] == "the engine ended the request before every choice was complete"
        )


async def test_a_dying_engine_gives_503_and_the_replica_comes_back_as_a_new_boot(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        boot = here.replica.boot
        here.engine.die_after = 1
        answer = await ask(here, prompt="a")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "replica_unavailable"
        here.engine.die_after = None
        await here.until(lambda: here.replica.ready)
        assert here.replica.boot != boot
        assert (await ask(here, prompt="a", max_tokens=1)).status_code == 200


async def test_errors_have_one_shape_everywhere(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:

        async def error(method: str, path: str, **more: Any) -> tuple[int, str]:
            answer = await here.http.request(method, path, **more)
            body = answer.json()["error"]
            assert set(body) == {"message", "type", "code", "param"}
            return answer.status_code, body["code"]

        assert await error("GET", "/nowhere") == (404, "not_found_error")
        assert await error("GET", "/v1/completions") == (405, "method_not_allowed")
        assert await error("POST", "/v1/chat/completions", content=b"{") == (400, "invalid_request_error")
        assert await error("POST", "/replica/desired", content=b"{}") == (400, "invalid_request_error")
        assert await error("POST", "/v1/completions", json={"model": MODEL, "prompt": ""}) == (
            400,
            "invalid_request_error",
        )


async def test_a_dense_model_and_a_missing_route_fail_closed(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(moe=False)) as here:
        answer = await ask(here, prompt="a", logprobs=True, include_routing_matrix=True)
        assert (answer.status_code, "dense" in answer.json()["error"]["message"]) == (400, True)

    class Routeless(FakeEngine):
        async def _events(self, request: Any) -> Any:
            async for event in super()._events(msgspec.structs.replace(request, want_routes=False)):
                yield event

    async with running(tmp_path, Routeless()) as here:
        answer = await ask(here, prompt="a", logprobs=True, include_routing_matrix=True)
        assert answer.json()["error"]["message"] == "the engine returned a token without its route"


async def test_missing_records_of_an_echoed_prompt_fail_closed(tmp_path: Path) -> None:
    class Echoless(FakeEngine):
        async def _events(self, request: Any) -> Any:
            async for event in super()._events(msgspec.structs.replace(request, prompt_records=0)):
                yield event

    async with running(tmp_path, Echoless()) as here:
        answer = await ask(here, prompt="a", echo=True, logprobs=True)
        assert answer.json()["error"]["message"] == "the engine returned no records of the prompt"


async def test_one_request_more_than_the_limit_is_told_to_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(allowed=1), requests_max=1) as here:
        first = asyncio.create_task(ask(here, prompt="a", max_tokens=2))
        await here.until(lambda: here.replica.own.gate.inside == 1)
        answer = await ask(here, prompt="a")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["code"] == "overloaded_error"
        here.engine.allow(2)
        assert (await first).status_code == 200
        assert (await ask(here, prompt="a", max_tokens=2)).status_code == 200


async def test_the_report_health_and_model_list(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await here.swapped("v1")
        report = msgspec.json.decode((await here.http.get("/replica/report")).content, type=ReplicaReport)
        assert (report.replica, report.ready, report.own.snapshot, report.own.generation) == (
            "replica-0",
            True,
            "v1",
            1,
        )
        assert (await here.http.get("/health")).json() == {"status": "ok"}
        for path in ("/v1/models", "/inference/v1/models"):
            models = (await here.http.get(path)).json()["data"]
            assert [(m["id"], m["snapshot"]) for m in models] == [(MODEL, "v1")]
        here.engine.start_gate.clear()
        await here.engine.die()
        assert (await here.http.get("/health")).status_code == 503
        refused = await ask(here, prompt="a")
        assert (refused.status_code, refused.headers[HEADER_ANOTHER_BOOT]) == (503, "1")
        here.engine.start_gate.set()
        await here.until(lambda: here.replica.ready)
        assert (await here.http.get("/health")).status_code == 200


async def test_a_request_that_was_meant_for_an_earlier_boot_is_not_served_by_other_weights(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await here.swapped("v1")
        boot = here.replica.boot
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        meant = {HEADER_BOOT: boot}
        assert (await here.http.post("/v1/completions", json=body, headers=meant)).status_code == 200
        await here.engine.die()
        await here.until(lambda: here.replica.ready)
        answer = await here.http.post("/v1/completions", json=body, headers=meant)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_unavailable")
        assert answer.headers[HEADER_ANOTHER_BOOT] == "1"
        again = {HEADER_BOOT: here.replica.boot}
        answer = await here.http.post("/v1/completions", json=body, headers=again)
        assert answer.json()["model"] == f"{MODEL}@base"


async def test_the_event_stream_sends_whole_reports_at_once_and_on_change(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here, here.http.stream("GET", "/replica/events") as events:
        lines = events.aiter_lines()
        assert '"kind":"sessions"' in await anext(lines)
        first = msgspec.json.decode(await anext(lines), type=ReplicaReport)
        assert (first.own.snapshot, first.boot) == ("base", here.replica.boot)
        await here.swap("v1")
        report = first
        while report.own.snapshot != "v1" or report.own.stage is not Stage.IDLE:
            report = await next_report(lines)
        assert [t.stage.value for t in report.own.transitions][-1] == "idle"


async def next_report(lines: AsyncIterator[str]) -> ReplicaReport:
    """What was measured is told between two reports."""
    while '"kind":"trajectories"' in (line := await anext(lines)):
        pass
    return msgspec.json.decode(line, type=ReplicaReport)


async def test_the_end_of_a_load_is_told_at_once_while_other_changes_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than the test may take.
    monkeypatch.setattr(app, "REPORT_GAP_S", 3600.0)

    async with running(tmp_path, FakeEngine()) as here, here.http.stream("GET", "/replica/events") as events:
        lines = events.aiter_lines()
        assert '"kind":"sessions"' in await anext(lines)
        assert msgspec.json.decode(await anext(lines), type=ReplicaReport).own.snapshot == "base"
        for snapshot in ("v1", "v2"):
            await here.swap(snapshot)
            report = await next_report(lines)
            assert (report.own.snapshot, report.own.stage) == (snapshot, Stage.IDLE)


async def test_a_desired_snapshot_is_taken_once_however_often_it_is_sent(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        body = {"snapshot": "v1", "generation": 7, "url": "file:///b/v1"}
        for _ in range(3):
            answer = await here.http.post("/replica/desired", json=body)
            assert (answer.status_code, answer.json()["policies"][0]["generation"]) == (202, 7)
        await here.until(lambda: here.replica.own.driver.machine.serving == "v1")
        await here.http.post("/replica/desired", json=body)
        assert here.engine.calls == ["stage v1 v1", "commit v1"]
