"""SGLang's `/generate` on a replica: what it reads, what it answers, plain and streamed."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from replica_fakes import HE, IM_END, FakeEngine, Running, ids, running, sse
from test_replica_wire import refusal
from test_resume_pipeline import events as data_of

from midstream.core.resumption import HEADER_RESUMABLE
from midstream.core.wires import WIRES
from midstream.fleet.sessions import session_key

PATH = "/generate"
PROMPT = [65, 66, 67]
#: By its position, as the fake engine has it.
ROUTES = [[[1, 66]], [[2, 67]], [[3, HE % 256]], [[4, 108]]]


async def generate(here: Running, sampling: Any = None, **fields: Any) -> httpx.Response:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, **(sampling or {})}, **fields}
    return await here.http.post(PATH, json=body)


async def test_an_answer_has_text_ids_numbers_and_labels(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        # As slime asks.
        sampling = {
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": None,
            "skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False,
        }  # fmt: skip
        asked: dict[str, Any] = {"return_logprob": True, "rid": "r", "top_logprobs_num": 1}
        said = (await generate(here, sampling, **asked, return_text_in_logprobs=True)).json()
        assert (said["text"], said["output_ids"]) == ("hel", [HE, 108])
        meta = said["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r", 3, 2)
        assert (meta["cached_tokens"], meta["weight_version"]) == (3, "base")
        assert meta["weight_versions"] == [{"version": "base", "start": 0, "end": 2}]
        assert meta["finish_reason"] == {"type": "length", "length": 2}
        assert meta["output_token_logprobs"] == [[-3.0, HE, "he"], [-4.0, 108, "l"]]
        assert meta["output_top_logprobs"] == [[[-0.5, 65, "A"]]] * 2
        assert meta["input_token_logprobs"] == []
        assert said["midstream"]["sampling_logprobs"] == [-1.5, -2.0]
        assert said["midstream"]["snapshots"] == [{"snapshot": "base", "start": 0, "end": 2}]
        assert meta["e2e_latency"] >= 0
        assert "index" not in said
        bare = (await generate(here)).json()
        assert "output_token_logprobs" not in bare["meta_info"]
        default = (await here.http.post(PATH, json={"text": "ABC"})).json()
        assert default["meta_info"]["completion_tokens"] == 128 - len(PROMPT)
        assert here.engine.requests[-1].prompt == tuple(PROMPT)


@pytest.mark.parametrize("incremental", [False, True])
async def test_masks_come_with_the_log_probabilities_over_them(tmp_path: Path, incremental: bool) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        asked: dict[str, Any] = {"return_sampling_mask": True, "incremental_streaming_output": incremental}
        plain = (await generate(here, {"top_k": 5}, **asked)).json()["meta_info"]
        names = ("output_token_sampling_mask", "output_token_sampling_logprobs")
        assert [plain[name] for name in names] == [[[HE, HE + 1], [108]], [-1.5, -2.0]]
        assert "output_token_logprobs" not in plain
        events = [
            event["meta_info"]
            for event in sse((await generate(here, {"top_k": 5}, **asked, stream=True)).text)[:-1]
        ]
        for name in names:
            told = [one for event in events for one in event[name]] if incremental else events[-1][name]
            assert told == plain[name]
        answer = await generate(here, {"top_p": 1.0}, return_sampling_mask=True)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_sampling_mask")


@pytest.mark.parametrize("start", [0, 2, 3])
async def test_prompt_tokens_are_scored_from_where_the_request_says(tmp_path: Path, start: int) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
        asked |= {"return_routed_experts": True, "routed_experts_start_len": 1}
        plain = (await generate(here, **asked)).json()
        *_, last, _ = sse((await generate(here, **asked, stream=True)).text)
        for said in (plain, last):
            meta = said["meta_info"]
            scored = [[-float(p), PROMPT[p], None] for p in range(start, 3)]
            assert meta["input_token_logprobs"] == [[None, *row[1:]] for row in scored[:1]] + scored[1:]
            assert meta["input_top_logprobs"] == [None, *[[[-0.5, 65, None]]] * (2 - start)][: 3 - start]
            data = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
            assert data.reshape(-1, 1, 2).tolist() == ROUTES[1:]
            assert meta["routed_experts_start_len"] == 1


async def test_a_request_may_score_its_prompt_alone(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        said = (await generate(here, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)).json()
        assert said["output_ids"] == []
        assert said["meta_info"]["input_token_logprobs"] == [
            [None, 65, None],
            [-1.0, 66, None],
            [-2.0, 67, None],
        ]


async def test_a_stream_that_scores_its_prompt_alone_tells_its_ids(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        more = {"logprob_start_len": 0, "return_prompt_token_ids": True}
        answer = await generate(here, {"max_new_tokens": 0}, stream=True, return_logprob=True, **more)
        only, done = sse(answer.text)
        assert (only["output_ids"], only["prompt_token_ids"], done) == ([], [65, 66, 67], "[DONE]")


@pytest.mark.parametrize("incremental", [False, True])
async def test_the_last_event_of_a_stream_has_the_ids_of_the_prompt_as_sglangs_have(
    tmp_path: Path, incremental: bool
) -> None:
    """Clients of cumulative streams read no other event."""
    async with running(tmp_path, FakeEngine()) as here:
        more = {"return_prompt_token_ids": True, "incremental_streaming_output": incremental}
        first, *others, last, _ = sse((await generate(here, stream=True, **more)).text)
        assert first["prompt_token_ids"] == last["prompt_token_ids"] == PROMPT
        # Long prompts make long events.
        assert others
        assert not any("prompt_token_ids" in event for event in others)


async def test_a_batch_is_a_list_and_every_choice_has_its_id(tmp_path: Path) -> None:
    engine = FakeEngine("hello")
    engine.replies = {1: (*ids("he"), IM_END)}

    async with running(tmp_path, engine) as here:
        asked: dict[str, Any] = {
            "input_ids": [PROMPT, [68]],
            "rid": ["a", "b"],
            "return_logprob": [True, True],
        }
        sampling = {"max_new_tokens": 5, "n": 2, "stop": "lo"}
        plain = (await generate(here, sampling, **asked)).json()
        assert [said["index"] for said in plain] == [0, 1, 2, 3]
        assert [said["meta_info"]["id"] for said in plain] == ["a_0", "a_1", "b_0", "b_1"]
        assert [said["meta_info"]["prompt_tokens"] for said in plain] == [3, 3, 1, 1]
        assert [said["meta_info"]["cached_tokens"] for said in plain] == [3] * 4
        ends = [said["meta_info"]["finish_reason"] for said in plain]
        assert ends == [{"type": "stop", "matched": "lo"}, {"type": "stop", "matched": IM_END}] * 2
        assert [said["text"] for said in plain] == ["hel", "he"] * 2
        events = sse((await generate(here, sampling, **asked, stream=True)).text)
        assert events.pop() == "[DONE]"
        last = {event["index"]: event for event in events}
        for said in plain:
            streamed = last[said["index"]]
            for one in (said, streamed):
                one["meta_info"].pop("e2e_latency")
            assert streamed == said
        two = (await generate(here, {"n": 2})).json()
        assert len(two) == 2


async def test_events_tell_all_so_far_or_what_is_new(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine("hello")) as here:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 3},
            "return_logprob": True,
            "stream": True,
        }
        for new, numbers, resumable in ((False, True, False), (True, True, True), (False, False, True)):
            sent = body | {"incremental_streaming_output": new, "return_logprob": numbers}
            answer = await here.http.post(PATH, json=sent, headers={HEADER_RESUMABLE: "1"})
            assert (HEADER_RESUMABLE in answer.headers) == resumable
            events = data_of(answer.text)[:-1]
            told = [event["output_ids"] for event in events]
            texts = [event["text"] for event in events]
            whole = [HE, 108, 108]
            assert told == ([[HE], [108], [108], []] if new else [whole[:1], whole[:2], whole, whole])
            assert texts == (["he", "l", "l", ""] if new else ["he", "hel", "hell", "hell"])
            if numbers:
                for event in events:
                    rows = event["meta_info"]["output_token_logprobs"]
                    assert [row[1] for row in rows] == event["output_ids"]
                    assert len(event["midstream"]["sampling_logprobs"]) == len(rows)


async def test_the_session_is_named_by_header_session_id_or_routing_key(tmp_path: Path) -> None:
    user = WIRES[PATH].user

    async with running(tmp_path, FakeEngine()) as here:
        for body, headers, key in (
            ({"routing_key": "k"}, {}, "k"),
            ({"routing_key": "k", "session_id": "s"}, {}, "s"),
            ({"session_id": "s"}, {"x-smg-routing-key": "h"}, "h"),
        ):
            sent = {"text": "A", "sampling_params": {"max_new_tokens": 1}, **body}
            request = here.http.build_request("POST", PATH, json=sent, headers=headers)
            assert (await here.http.send(request)).status_code == 200
            assert here.replica.sessions.holds(("", key))
            heads = {name.encode(): value.encode() for name, value in headers.items()}
            assert session_key(heads, request.content, user) == key


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "a"}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [259]}, "input_ids"),
        ({"input_ids": [[1], "a"]}, "input_ids"),
        ({"input_ids": None, "text": "a" * 10_000}, "text"),
        ({"lora_path": ["a", "b"]}, "lora_path"),
        ({"lora_path": "a", "model": "m"}, "lora_path"),
        ({"image_data": ["a"]}, "image_data"),
        ({"session_params": {"id": "a"}}, "session_params"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"routed_experts_start_len": 4, "return_routed_experts": True}, "routed_experts_start_len"),
        ({"logprob_start_len": 4, "return_logprob": True}, "logprob_start_len"),
        ({"top_logprobs_num": 21, "return_logprob": True}, "top_logprobs_num"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"input_ids": [[1], [2]], "sampling_params": [{"top_p": 0.5}, {"top_p": 0.6}]}, "sampling_params"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"ebnf": "root ::= a"}}, "sampling_params.ebnf"),
        ({"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, "sampling_params.custom_params"),
        ({"sampling_params": {"stop_regex": "a+"}}, "sampling_params.stop_regex"),
        ({"returnlogprob": True}, "returnlogprob"),
    ],
)  # fmt: skip
async def test_what_is_refused_is_named(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.http.post(PATH, json={"input_ids": PROMPT, "sampling_params": {}, **body})
        status, message, named = refusal(answer)
        assert (status, named) == (400, param), message
        assert param in message
        assert not here.engine.requests


@pytest.mark.parametrize("path", [PATH, "/inference/v1/generate"])
async def test_more_ids_than_an_answer_lists_end_the_request_and_name_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A set that a filter hardly bounds has the whole vocabulary, of each token."""
    monkeypatch.setattr("midstream.replica.wire.tokenwires.LISTED_MAX", 2)

    async with running(tmp_path, FakeEngine()) as here:
        if path == PATH:
            field, prompt = "return_sampling_mask", {"input_ids": PROMPT, "return_sampling_mask": True}
            body = prompt | {"sampling_params": {"top_k": 5, "max_new_tokens": 2}}
        else:
            field = "sampling_params.return_sampling_mask"
            asked = {"top_k": 5, "max_tokens": 2, "return_sampling_mask": True}
            body = {"token_ids": PROMPT, "sampling_params": asked}
        answer = await here.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        streamed = await here.http.post(path, json=body | {"stream": True})
        errors = [event["error"] for event in sse(streamed.text) if "error" in event]
        assert [error["param"] for error in errors] == [field]
