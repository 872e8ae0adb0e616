"""vLLM's token ids in, token ids out, on a replica: what it reads, what it answers, and how its streams go on elsewhere."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from replica_fakes import HE, IM_END, MODEL, FakeEngine, Running, ids, running, sse
from test_replica_wire import refusal

from midstream.core.resumption import HEADER_RESUMABLE

PATH = "/inference/v1/generate"
PROMPT = [65, 66, 67]
#: By its position, as the fake engine has it.
ROUTES = [[[1, 66]], [[2, 67]], [[3, HE % 256]], [[4, 108]]]


async def generate(here: Running, sampling: Any = None, **fields: Any) -> httpx.Response:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, **(sampling or {})}, **fields}
    return await here.http.post(PATH, json=body)


def an_npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


async def test_an_answer_has_ids_numbers_and_labels(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        said = (await generate(here, {"logprobs": 1, "skip_special_tokens": False}, request_id="r")).json()
        assert (said["request_id"], said["output_mode"]) == ("generate-tokens-r", "tokens")
        assert said["model"] == f"{MODEL}@base"
        (choice,) = said["choices"]
        assert choice["token_ids"] == [*ids("he"), *ids("l")]
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "base", "start": 0, "end": 2}]
        assert "text" not in choice
        entries = choice["logprobs"]["content"]
        assert [(e["token"], e["token_id"], e["logprob"], e["sampling_logprob"]) for e in entries] == [
            (f"token_id:{token}", token, -position, -position / 2)
            for position, token in enumerate(choice["token_ids"], 3)
        ]
        assert [[top["token"] for top in e["top_logprobs"]] for e in entries] == [["token_id:65"]] * 2
        assert "routing_matrix" not in entries[0]
        assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert choice["routed_experts"] is None
        (request,) = here.engine.requests
        assert (request.prompt, request.prompt_records) == (tuple(PROMPT), 0)
        assert (await generate(here)).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("start", [0, 1, 2, 3])
@pytest.mark.parametrize("experts", [8, 300])
async def test_routes_have_a_row_for_every_position_but_the_last(
    tmp_path: Path, start: int, experts: int
) -> None:
    engine = FakeEngine(experts=experts)
    engine.info = msgspec.structs.replace(engine.info, top_k=1 if experts > 256 else 2)
    rows = np.asarray(ROUTES, np.uint8)[start:]
    expected = rows.view("<u2") if experts > 256 else rows

    async with running(tmp_path, engine) as here:
        asked = {"return_routed_experts": True, "routed_experts_prompt_start": start}
        said = (await generate(here, asked)).json()
        found = an_npy(said["choices"][0]["routed_experts"])
        assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())
        assert said["choices"][0]["logprobs"] is None
        raw = (await generate(here, {**asked, "return_routed_experts": "raw"})).json()["choices"][0][
            "routed_experts"
        ]
        assert (raw["start"], raw["shape"], raw["dtype"]) == (
            start,
            list(expected.shape),
            str(expected.dtype),
        )
        assert base64.b64decode(raw["data"]) == expected.tobytes()
        assert next(iter(raw)) == "data"
        streamed = sse((await generate(here, asked, stream=True)).text)
        told = [event["choices"][0]["routed_experts"] for event in streamed[:-1]]
        assert told[:-1] == [None, None]
        assert an_npy(told[-1]).tolist() == expected.tolist()


async def test_masks_are_lists_of_ids_token_by_token(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        asked = {"n": 2, "seed": 1, "top_p": 0.9, "return_sampling_mask": True}
        plain = (await generate(here, asked)).json()["choices"]
        # The prompt has three tokens.
        assert [choice["sampling_mask"] for choice in plain] == [[[HE, HE + 1], [108]]] * 2
        events = sse((await generate(here, asked, stream=True)).text)[:-1]
        for index in range(2):
            told = [c for e in events for c in e["choices"] if c["index"] == index and "sampling_mask" in c]
            assert [ids for choice in told for ids in choice["sampling_mask"]] == [[HE, HE + 1], [108]]
            assert all(len(choice["sampling_mask"]) == len(choice["token_ids"]) for choice in told)
        assert "sampling_mask" not in (await generate(here)).text


async def test_masks_of_the_whole_vocabulary_are_not_listed(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await generate(here, {"top_p": 1.0, "top_k": -1, "return_sampling_mask": True})
        said = answer.json()["error"]
        assert (answer.status_code, said["param"]) == (400, "sampling_params.return_sampling_mask")
        assert "without top_k, top_p, min_p" in said["message"]
        greedy = await generate(here, {"temperature": 0, "return_sampling_mask": True})
        assert greedy.status_code == 200


async def test_a_stream_tells_the_plain_answer_token_by_token(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        asked = {"logprobs": 0, "n": 2, "seed": 1, "include_routing_matrix": True}
        more = {"return_token_ids": True, "output_mode": "text"}
        plain = (await generate(here, asked, **more)).json()
        assert plain["prompt_token_ids"] == PROMPT
        assert [choice["text"] for choice in plain["choices"]] == ["hel"] * 2
        assert plain["choices"][0]["logprobs"]["content"][0]["token"] == "he"
        *events, usage, done = sse(
            (await generate(here, asked, stream=True, stream_options={"include_usage": True}, **more)).text
        )
        assert (done, usage["choices"], usage["usage"]) == ("[DONE]", [], plain["usage"])
        for index, whole in enumerate(plain["choices"]):
            own = [event for event in events if event["choices"][0]["index"] == index]
            assert own[0]["prompt_token_ids"] == PROMPT
            assert all("prompt_token_ids" not in event for event in own[1:])
            choices = [event["choices"][0] for event in own]
            assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
            entries = [
                entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]
            ]
            assert entries == whole["logprobs"]["content"]
            assert all(entry["routing_matrix"] for entry in entries)
            assert "".join(choice["text"] for choice in choices) == whole["text"]
            assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
            assert choices[-1]["weight_versions"] == whole["weight_versions"]
            assert {choice["midstream"]["snapshot"] for choice in choices} == {"base"}


async def test_a_prompt_can_be_scored_and_what_ended_a_choice_is_told(tmp_path: Path) -> None:
    engine = FakeEngine("hello")
    engine.replies = {1: (*ids("he"), IM_END)}

    async with running(tmp_path, engine) as here:
        said = (await generate(here, {"prompt_logprobs": 1})).json()
        assert said["prompt_logprobs"][0] is None
        assert [set(scores) for scores in said["prompt_logprobs"][1:]] == [{"65", "66"}, {"65", "67"}]
        asked = {"max_tokens": 5, "n": 2, "stop": ["lo"], "stop_token_ids": [99]}
        first, second = (await generate(here, asked)).json()["choices"]
        assert (first["finish_reason"], first["stop_reason"]) == ("stop", "lo")
        assert (second["finish_reason"], second["stop_reason"]) == ("stop", None)
        assert second["token_ids"][-1] == IM_END
        (third,) = (await generate(here, {"max_tokens": 5, "stop_token_ids": [108]})).json()["choices"]
        assert (third["stop_reason"], third["token_ids"][-1]) == (108, 108)
        # Up to the context.
        engine.reply = ids("a")
        whole = (await here.http.post(PATH, json={"token_ids": PROMPT, "sampling_params": {}})).json()
        assert whole["usage"]["completion_tokens"] == 128 - len(PROMPT)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [259]}, "token_ids"),
        ({"token_ids": [1] * 129}, "token_ids"),
        ({"token_ids": "a"}, "token_ids"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"output_mode": "words"}, "output_mode"),
        ({"cachesalt": "a"}, "cachesalt"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"stop_token_ids": [300]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"best_of": 2}}, "sampling_params.best_of"),
        ({"sampling_params": {"logprob_token_ids": [3]}}, "sampling_params.logprob_token_ids"),
        (
            {"sampling_params": {"routed_experts_prompt_start": 4}},
            "sampling_params.routed_experts_prompt_start",
        ),
        ({"sampling_params": {"return_routed_experts": "npz"}}, "sampling_params.return_routed_experts"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
        ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "output_mode"),
    ],
)
async def test_what_is_refused_is_named(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        status, message, named = refusal(
            await here.http.post(PATH, json={"token_ids": PROMPT, "sampling_params": {}, **body})
        )
        assert (status, named) == (400, param), message
        assert param in message
        assert not here.engine.requests


async def test_a_stream_that_ends_with_all_routes_cannot_go_on_elsewhere(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}, "stream": True}
        for routes, resumable in ((False, True), (True, False)):
            body["sampling_params"]["return_routed_experts"] = routes
            answer = await here.http.post(PATH, json=body, headers={HEADER_RESUMABLE: "1"})
            assert (HEADER_RESUMABLE in answer.headers) == resumable
