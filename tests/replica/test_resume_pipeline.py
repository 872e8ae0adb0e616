"""A stream broken off after any write and resumed on another replica says what the undisturbed one said, chunk for chunk."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
from replica_fakes import MODEL, FakeEngine, Running, ids, running, write_tokenizer
from test_replica_meanings import A, B, wanted
from test_replica_tool_api import CALLS, TOOLS, USER, tokens, write_tool_model

from midstream.core.errors import HEADER_ANOTHER_BOOT, HEADER_LOST
from midstream.core.headers import HEADER_BOOT
from midstream.core.resumption import (
    HEADER_RESUMABLE,
    PATH_RESUME,
    CannotResume,
    Resume,
    ResumeLogReader,
    snapshot_to_resume_under,
)
from midstream.core.types import EngineCard, GenerateRequest, GenerationEvent, SwapTiming
from midstream.engine.base import StreamLost
from midstream.models.tiny_moe import TOKEN_ID
from midstream.replica.response.resume import Continued

RESUMABLE = {HEADER_RESUMABLE: "1"}
COMPLETIONS, CHAT = "/v1/completions", "/inference/v1/chat/completions"
VLLM, SGLANG = "/inference/v1/generate", "/generate"
DONE = "data: [DONE]"
EOS = TOKEN_ID["<|im_end|>"]


def an_engine(reply: str = "hello ", **more: Any) -> FakeEngine:
    engine = FakeEngine(reply, **more)
    engine.tells_kv = True
    return engine


def a_tool_engine(text: str) -> FakeEngine:
    engine = an_engine()
    engine.info = msgspec.structs.replace(engine.info, vocab_size=264, max_model_len=4096, grammars=True)
    engine.reply = (*tokens(text), EOS)
    return engine


@asynccontextmanager
async def play(
    directory: Path,
    make: Callable[[], FakeEngine] = an_engine,
    write: Any = write_tokenizer,
) -> AsyncIterator[tuple[Running, Running]]:
    async with AsyncExitStack() as stack:
        pair = []
        for name in ("a", "b"):
            (directory / name).mkdir()
            pair.append(await stack.enter_async_context(running(directory / name, make(), write=write)))
        yield pair[0], pair[1]


async def stream(here: Running, path: str, body: dict[str, Any]) -> list[str]:
    """The writes of a whole stream."""
    answer = await here.http.post(path, json={"model": MODEL, "stream": True, **body}, headers=RESUMABLE)
    assert (answer.status_code, answer.headers[HEADER_RESUMABLE]) == (200, "1"), answer.text
    return units(answer.text)


def units(text: str) -> list[str]:
    """What was written at a time: comments and their events; in the end references, usage, a comment and [DONE]."""
    found: list[str] = []
    ends = False
    for block in text.split("\n\n")[:-1]:
        if ends:
            found[-1] += block + "\n\n"
            continue
        ends = block == ": m end" or '"choices":[]' in block or '"r3_store_id"' in block
        if ends or block.startswith(": m "):
            found.append("")
        found[-1] += block + "\n\n"
    assert found[-1].endswith(DONE + "\n\n")
    return found


def state_of(writes: list[str]) -> str:
    return "\n".join(line for write in writes for line in re.findall(r"(?m)^: m (.*)$", write))


async def resume(
    there: Running, path: str, body: dict[str, Any], writes: list[str], *, exact: bool = True
) -> Any:
    sent = {"model": MODEL, "stream": True, **body}
    asked = {"path": path, "lost": "replica-7", "exact": exact, "state": state_of(writes), "body": sent}
    return await there.http.post(PATH_RESUME, json=asked)


def events(text: str) -> list[Any]:
    data = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


async def until_it_breaks(answer: httpx.Response) -> str:
    got = b""
    try:
        async for data in answer.aiter_raw():
            got += data
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return got.decode()
    raise AssertionError(f"the stream ended: {got!r}")


def by_choice(found: list[Any]) -> dict[Any, list[Any]]:
    """Chunks of each choice in order; what is random or a duration is left out."""
    sorted_out: dict[Any, list[Any]] = {}
    for event in found:
        if event == "[DONE]":
            sorted_out.setdefault("end", []).append(event)
            continue
        event.pop("midstream", None)
        if "perf_metrics" in event:
            names = ("prompt-tokens", "cached-prompt-tokens")
            event["perf_metrics"] = {name: event["perf_metrics"][name] for name in names}
        event.get("meta_info", {}).pop("e2e_latency", None)
        if "choices" not in event:
            sorted_out.setdefault(event.get("index", 0), []).append(event)
            continue
        for choice in event["choices"]:
            for name in ("resumed", "perf_metrics"):
                choice.get("midstream", {}).pop(name, None)
            for call in choice.get("delta", {}).get("tool_calls", ()):
                assert call.pop("id")
        key = event["choices"][0]["index"] if event["choices"] else "end"
        sorted_out.setdefault(key, []).append(event)
    return sorted_out


PROMPT = list(ids("he said"))
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 9}),
    "no seed": (CHAT, {"messages": USER, "max_tokens": 5, "stream_options": {"include_usage": True}}),
    "seed": (CHAT, {"messages": USER, "max_tokens": 5, "seed": 3, "temperature": 0.5, "return_token_ids": True}),
    "choices": (
        COMPLETIONS,
        {
            "prompt": [PROMPT, PROMPT[:3]], "n": 2, "max_tokens": 6, "return_token_ids": True,
            "logprobs": True, "top_logprobs": 2, "include_routing_matrix": True, "return_sampling_mask": True,
        },
    ),
    "stops": (COMPLETIONS, {"prompt": PROMPT, "n": 2, "max_tokens": 20, "stop": ["o hello h", "lo x"]}),
    "echo": (
        COMPLETIONS,
        {"prompt": PROMPT, "n": 2, "max_tokens": 4, "echo": True, "logprobs": 2, "return_token_ids": True},
    ),
    "echo of ids": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "echo_last": 2}),
    "raw": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "raw_output": True, "echo": True}),
    "metrics": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4, "perf_metrics_in_response": True}),
    "vllm ids": (
        VLLM,
        {
            "token_ids": PROMPT, "return_token_ids": True, "perf_metrics_in_response": True,
            "stream_options": {"include_usage": True},
            "sampling_params": {
                "max_tokens": 9, "n": 2, "logprobs": 1, "stop": ["o hello h"], "include_routing_matrix": True,
                "top_p": 0.9, "return_sampling_mask": True,
            },
        },
    ),
    "vllm text": (
        VLLM, {"token_ids": PROMPT, "output_mode": "text", "sampling_params": {"max_tokens": 20, "stop": ["o he"]}}
    ),
    "sglang so far": (
        SGLANG,
        {"input_ids": [PROMPT, PROMPT[:3]], "rid": "r", "sampling_params": {"max_new_tokens": 9, "n": 2, "stop": "o hello h"}},
    ),
    "sglang one": (SGLANG, {"text": "he said", "perf_metrics_in_response": True, "sampling_params": {"max_new_tokens": 4}}),
    "sglang new": (
        SGLANG,
        {
            "input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 2, "incremental_streaming_output": True,
            "return_prompt_token_ids": True, "return_sampling_mask": True,
            "sampling_params": {"max_new_tokens": 9, "stop": ["o hello h"], "top_k": 5},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
async def test_after_any_write_the_rest_is_what_it_would_have_been(tmp_path: Path, name: str) -> None:
    path, body = BODIES[name]

    async with play(tmp_path) as (here, there):
        writes = await stream(here, path, body)
        whole = by_choice(events("".join(writes)))
        generated = there.engine.made_of
        for cut in range(1, len(writes)):
            generated.clear()
            answer = await resume(there, path, body, writes[:cut])
            assert answer.status_code == 200, answer.text
            assert HEADER_RESUMABLE not in answer.headers
            assert by_choice(events("".join(writes[:cut]) + answer.text)) == whole


async def test_a_session_is_told_what_was_generated_here_only(tmp_path: Path) -> None:
    path, body = COMPLETIONS, {"prompt": PROMPT, "max_tokens": 9, "user": "u", "n": 2}

    async with play(tmp_path) as (here, there):
        writes = await stream(here, path, body)
        cut = next(i for i in range(len(writes)) if len(re.findall(": m [01]:", "".join(writes[:i]))) == 8)
        seam = events((await resume(there, path, body, writes[:cut])).text)[0]["midstream"]["resumed"]
        stats = there.replica.sessions.one(("", "u"))
        assert stats is not None
        had = sum(seam["tokens"])
        assert had > 8
        assert stats.generated_tokens == 18 - had
        assert stats.token_gaps == 9 - min(seam["tokens"]) - 1


async def test_streams_are_resumed_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.replica.response.generation.REPLAYED_AT_ONCE", 1)

    async with play(tmp_path) as (here, there):
        asked = [BODIES[name] for name in ("text", "choices", "stops", "echo")]
        begun = [await stream(here, *given) for given in asked]
        tasks = [resume(there, *given, writes[:-4]) for given, writes in zip(asked, begun, strict=True)]
        answers = await asyncio.gather(*tasks)
        for writes, answer in zip(begun, answers, strict=True):
            assert by_choice(events("".join(writes[:-4]) + answer.text)) == by_choice(events("".join(writes)))


async def test_the_requests_that_reach_the_engine_go_on_behind_what_was_emitted(tmp_path: Path) -> None:
    path, body = BODIES["choices"]

    async with play(tmp_path) as (here, there):
        writes = await stream(here, path, body)
        told = ResumeLogReader(state_of(writes[:-1])).events(4)
        at = next(i for i in range(len(writes)) if state_of(writes[: i + 1]).count('"finish"') == 1)
        answer = await resume(there, path, body, writes[: at + 1])
        over = next(choice for choice, event in told if event.finish)
        asked = {i: request.emitted_of(i % 2) for i in range(4) for request in there.engine.requests
                 if request.prompt == tuple([PROMPT, PROMPT[:3]][i // 2])}  # fmt: skip
        seen: dict[int, list[int]] = {i: [] for i in range(4)}
        for choice, event in ResumeLogReader(state_of(writes[: at + 1])).events(4):
            seen[choice] += [record.token_id for record in event.tokens]
        assert {i: list(tokens) for i, tokens in asked.items()} == seen | {over: []}
        for original, again in zip(here.engine.requests, there.engine.requests, strict=True):
            # The seed of an unseeded request too.
            assert again.sampling == original.sampling
            assert again.kv_age_max == 0
        first = events(answer.text)[0]
        tokens = [len(seen[i]) for i in range(4)]
        assert first["midstream"] == {"resumed": {"from": "replica-7", "tokens": tokens, "exact": True}}
        assert all("midstream" not in event for event in events(answer.text)[1:])


async def test_half_characters_and_held_back_text_come_out_whole(tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 15, "stop": ["é!"], "logprobs": True}

    async with play(tmp_path) as (here, there):
        for running_one in (here, there):
            running_one.engine.reply = tuple("aé?é€x".encode())
        writes = await stream(here, COMPLETIONS, body)
        whole = by_choice(events("".join(writes)))
        assert "".join(e["choices"][0]["text"] for e in whole[0]) == "aé?é€xaé?\ufffd"
        for cut in range(1, len(writes)):
            answer = await resume(there, COMPLETIONS, body, writes[:cut])
            assert by_choice(events("".join(writes[:cut]) + answer.text)) == whole


@pytest.mark.parametrize("parallel", [True, False])
async def test_tool_calls_go_on_in_the_middle(tmp_path: Path, parallel: bool) -> None:
    body = {
        "messages": USER, "tools": TOOLS, "max_tokens": 400, "parallel_tool_calls": parallel, "logprobs": True,
    }  # fmt: skip

    async with play(tmp_path, lambda: a_tool_engine(f"I look.\n{CALLS}"), write_tool_model) as (here, there):
        writes = await stream(here, CHAT, body)
        whole = by_choice(events("".join(writes)))
        assert whole[0][-1]["choices"][0]["finish_reason"] == "tool_calls"
        for cut in range(1, len(writes), 7):
            answer = await resume(there, CHAT, body, writes[:cut])
            assert by_choice(events("".join(writes[:cut]) + answer.text)) == whole


async def test_a_swap_behind_a_stream_is_not_pretended_away(tmp_path: Path) -> None:
    path, body = BODIES["metrics"]

    async with play(tmp_path) as (here, there):
        await here.swapped("step-1")
        writes = await stream(here, path, body)
        refused = await resume(there, path, body, writes[:2])
        assert refused.status_code == 409
        assert "KV is of snapshot 'step-1', and 'base' serves here" in refused.json()["error"]["message"]
        # Nothing is left to compute.
        over = await resume(there, path, body, writes[:-1])
        assert events(over.text) == ["[DONE]"]
        other = events((await resume(there, path, body, writes[:2], exact=False)).text)
        assert [e["model"].partition("@")[2] for e in other[:-1]] == ["base"] * len(other[:-1])
        assert other[0]["midstream"]["resumed"]["exact"] is False
        assert [e["choices"][0]["text"] for e in other[:-1]] == ["l", "l", "o", ""]
        assert other[-2]["usage"]["completion_tokens"] == 4
        state = state_of(writes[:2]) + '\n{"c":0,"kv":[["step-1",0,8],["step-2",8,9]]}'
        asked = {"path": path, "lost": "replica-7", "exact": True, "state": state,
                 "body": {"model": MODEL, "stream": True, **body}}  # fmt: skip
        mixed = await there.http.post(PATH_RESUME, json=asked)
        assert (mixed.status_code, "swapped" in mixed.text) == (409, True)


async def test_a_swap_while_kv_is_computed_again_ends_the_stream(tmp_path: Path) -> None:
    path, body = BODIES["text"]

    async with play(tmp_path) as (here, there):
        writes = await stream(here, path, body)
        # The engine has switched, the replica does not know yet.
        there.engine.serving = "step-9"
        refused = await resume(there, path, body, writes[:3])
        assert (refused.status_code, "swapped while" in refused.text) == (409, True)


async def test_what_cannot_be_resumed_says_so_and_is_no_worse_than_before(tmp_path: Path) -> None:
    path, body = BODIES["text"]

    async with play(tmp_path) as (here, there):
        writes = await stream(here, path, body)
        raw = {**body, "raw_output": True, "logprobs": True}
        answer = await here.http.post(path, json={"model": MODEL, "stream": True, **raw}, headers=RESUMABLE)
        assert HEADER_RESUMABLE not in answer.headers
        assert ": m " not in answer.text
        plain = await here.http.post(path, json={"model": MODEL, **body}, headers=RESUMABLE)
        assert "choices" in plain.json()
        unasked = await here.http.post(path, json={"model": MODEL, "stream": True, **body})
        assert ": m " not in unasked.text
        for given, status in (
            # Another prompt.
            ({**body, "prompt": [1, 2]}, 409),
            (raw, 409),
            ({**body, "stream": False}, 409),
            # A field that the first replica ignored changes nothing.
            ({**body, "nonsense": 1}, 200),
        ):
            assert (await resume(there, path, given, writes[:2])).status_code == status
        for state in (
            "",
            "x",
            state_of(writes[:2]) + "\n9:1",
            state_of(writes[:2]) + "\n{}",
            state_of(writes[:2]) + "\n0:x",
        ):
            asked = {"model": MODEL, "stream": True, **body}
            sent = {"path": path, "lost": "r", "exact": True, "state": state, "body": asked}
            assert (await there.http.post(PATH_RESUME, json=sent)).status_code == 400
        sent = {"path": "/v1/models", "lost": "r", "exact": True, "state": "", "body": body}
        assert (await there.http.post(PATH_RESUME, json=sent)).status_code == 400
        assert (await there.http.post(PATH_RESUME, content=b"{}")).status_code == 400


async def test_an_engine_that_dies_under_a_stream_breaks_it_off_so_that_it_can_be_resumed(
    tmp_path: Path,
) -> None:
    path, body = BODIES["text"]

    async with play(tmp_path) as (here, there):
        whole = await stream(there, path, body)
        here.engine.die_after = 3
        sent = {"model": MODEL, "stream": True, **body}
        async with here.http.stream("POST", path, json=sent, headers=RESUMABLE) as broken:
            got = await until_it_breaks(broken)
        assert ": m 0:" in got
        assert "error" not in got
        answer = await resume(there, path, body, [got])
        both = by_choice(events(got + answer.text))[0]
        assert [e["choices"] for e in both] == [e["choices"] for e in by_choice(events("".join(whole)))[0]]


async def test_a_request_that_the_engine_gives_up_is_told_as_no_loss(tmp_path: Path) -> None:
    """Of a stream by its last line, of an answer without a byte by the refusal."""
    path, body = BODIES["text"]

    async with play(tmp_path) as (here, there):
        whole = await stream(there, path, body)
        here.engine.die_after, here.engine.death = 3, StreamLost("the snapshot s failed its check")
        sent = {"model": MODEL, "stream": True, **body}
        async with here.http.stream("POST", path, json=sent, headers=RESUMABLE) as broken:
            got = await until_it_breaks(broken)
        assert got.endswith(": m given up\n\n")
        answer = await resume(there, path, body, [got.removesuffix(": m given up\n\n")])
        both = by_choice(events(got + answer.text))[0]
        assert [e["choices"] for e in both] == [e["choices"] for e in by_choice(events("".join(whole)))[0]]
        for more in ({"stream": False}, {}):
            here.engine.die_after = 0
            refused = await here.http.post(path, json={"model": MODEL, **body, **more}, headers=RESUMABLE)
            assert (refused.status_code, HEADER_LOST in refused.headers) == (503, False)
            assert refused.headers[HEADER_ANOTHER_BOOT] == "1"
        assert here.replica.ready


async def test_an_engine_that_dies_under_a_resumed_stream_breaks_it_off_for_the_gateway_to_judge(
    tmp_path: Path,
) -> None:
    """An error event would pass the gateway by, which counts the losses of a request and says where it was lost."""
    path, body = BODIES["text"]

    async with play(tmp_path) as (here, there):
        writes = await stream(here, path, body)
        asked = {"model": MODEL, "stream": True, **body}
        sent = {"path": path, "lost": "r", "exact": True, "state": state_of(writes[:2]), "body": asked}
        there.engine.die_after = 3
        async with there.http.stream("POST", PATH_RESUME, json=sent) as broken:
            got = await until_it_breaks(broken)
        assert "data: " in got
        assert "error" not in got


@pytest.mark.parametrize("of_gateway", [True, False])
async def test_a_gateways_stream_that_cannot_be_resumed_is_broken_off_too_and_anybody_elses_tells_the_error(
    tmp_path: Path, of_gateway: bool
) -> None:
    """With failover off, and where a request was sent anew."""
    path, body = BODIES["text"]

    async with play(tmp_path) as (here, _there):
        here.engine.die_after = 3
        sent = {"model": MODEL, "stream": True, **body}
        headers = {HEADER_BOOT: here.replica.boot} if of_gateway else {}
        async with here.http.stream("POST", path, json=sent, headers=headers) as broken:
            got = await until_it_breaks(broken) if of_gateway else (await broken.aread()).decode()
        assert ("the engine stopped while it served this request" in got) is not of_gateway
        assert got.startswith("data: ")


async def test_a_stream_that_waited_to_be_replayed_does_not_go_on_at_a_later_boot(tmp_path: Path) -> None:
    path, body = BODIES["text"]

    async with play(tmp_path) as (here, there):
        writes = await stream(here, path, body)
        service = there.replica.own.service
        assert service is not None
        async with service.replays:
            asked = asyncio.create_task(resume(there, path, body, writes[:2]))
            await there.until(lambda: there.replica.own.gate.inside == 1)
            await there.engine.die()
            await there.until(lambda: there.replica.ready)
        answer = await asked
        assert (answer.status_code, answer.headers[HEADER_ANOTHER_BOOT]) == (503, "1")
        assert there.engine.requests == []


async def test_resumed_streams_are_let_in_beside_as_many_as_fit(tmp_path: Path) -> None:
    path, body = BODIES["text"]

    async with play(tmp_path) as (here, there):
        writes = await stream(here, path, body)
        there.engine.allowed = 0
        there.replica.own.gate._requests_max = 1
        first = asyncio.create_task(stream(there, path, body))
        await there.engine.started_streams.wait()
        full = await there.http.post(path, json={"model": MODEL, **body})
        assert full.status_code == 429
        resumed = [asyncio.create_task(resume(there, path, body, writes[:2])) for _ in range(3)]
        await there.until(lambda: there.replica.own.gate.inside == 4)
        there.engine.allow(99)
        assert [(await answer).status_code for answer in resumed] == [200] * 3
        await first


def test_steps_are_read_back_as_the_events_they_were() -> None:
    from midstream.core.resumption import Opening, ResumeLogWriter
    from midstream.core.types import TokenRecord

    given = [
        (1, GenerationEvent(cached_tokens=2, kv_snapshots=(("a", 0, 3),))),
        (1, GenerationEvent(tokens=(TokenRecord(7, 0.0, None, "a"),))),
        (1, GenerationEvent(tokens=(TokenRecord(8, 0.0, None, "a"),))),
        (0, GenerationEvent(tokens=(TokenRecord(9, 0.0, None, 'é"\u2028'),), finish="stop")),
        (1, GenerationEvent(tokens=(TokenRecord(8, 0.0, None, "b"), TokenRecord(6, 0.0, None, "b")))),
    ]
    resume_log = ResumeLogWriter(Opening("id", 1, 2, "p"), 2)
    text = b"".join(
        resume_log.write(choice, event, event.finish is not None) for choice, event in given
    ).decode()
    assert ": m 1:8\n\n" in text
    told = ResumeLogReader(state_of([text]))
    assert (told.opening, list(told.events(2))) == (Opening("id", 1, 2, "p"), given)
    assert told.over() == {0}
    assert told.snapshot([1]) is None
    with pytest.raises(CannotResume, match="swapped behind"):
        told.snapshot([])


def test_tokens_that_came_together_from_two_snapshots_are_all_told_each_with_its_own() -> None:
    from midstream.core.resumption import Opening, ResumeLogWriter
    from midstream.core.types import TokenRecord

    records = [
        TokenRecord(token, 0.0, None, label) for token, label in ((1, "a"), (2, "a"), (3, "b"), (4, "c"))
    ]
    told = ResumeLogReader(
        state_of(
            [
                ResumeLogWriter(Opening("id", 1, 2, "p"), 1)
                .write(0, GenerationEvent(tokens=tuple(records)), False)
                .decode()
            ]
        )
    )
    assert [record for _, event in told.events(1) for record in event.tokens] == records


def test_kv_of_two_loads_of_one_snapshot_is_computed_again_under_it() -> None:
    """The trainer rolled back and forth again: a, b, a."""
    state = '{"id":"i","created":1,"seed":7,"prompts":"d"}\n{"c":0,"t":[1],"s":"a","kv":[["a",0,4]]}'
    again = {"c": 0, "t": [1], "kv": [["a", 0, 4], ["a", 4, 5]]}
    assert snapshot_to_resume_under(f"{state}\n{json.dumps(again)}\n0:7") == "a"


def test_a_stream_over_files_that_were_overwritten_goes_on_nowhere_as_if_they_were_the_new_ones() -> None:
    opening = '{"id":"i","created":1,"seed":7,"prompts":"d"}'
    state = f'{opening}\n{{"c":0,"t":[1],"s":"a","kv":[["a",0,4]],"files":"x"}}\n0:7'
    told = ResumeLogReader(state)
    assert (told.snapshot([]), told.files([]), told.files([0])) == ("a", {"x"}, set())
    checked = SimpleNamespace(stream=True, cumulative=False, by_file=False, raw_output=False)
    resume = Resume("/v1/completions", "replica-0", True, state, msgspec.Raw(b"{}"))
    for files in ("x", ""):
        Continued(resume, cast(Any, checked), 1, EngineCard()).check_snapshot("a", files, [])
    with pytest.raises(CannotResume, match="other files of 'a', which was overwritten"):
        Continued(resume, cast(Any, checked), 1, EngineCard()).check_snapshot("a", "y", [])
    anywhere = msgspec.structs.replace(resume, exact=False)
    Continued(anywhere, cast(Any, checked), 1, EngineCard()).check_snapshot("a", "y", [])


# The second one: the files of the first load were others.
@pytest.mark.parametrize("other", ["b", "a@3"])
def test_kv_of_two_snapshots_cannot_be_computed_again(other: str) -> None:
    state = '{"id":"i","created":1,"seed":7,"prompts":"d"}\n{"c":0,"t":[1],"s":"a","kv":[["a",0,4]]}'
    assert snapshot_to_resume_under(state) == "a"
    step = {"c": 0, "t": [1], "s": other, "kv": [["a", 0, 4], [other, 4, 5]]}
    crossed = f"{state}\n{json.dumps(step)}\n0:7"
    over_older = state.replace('"s":"a"', '"s":"b"')
    with pytest.raises(CannotResume, match="swapped behind"):
        snapshot_to_resume_under(over_older)
    with pytest.raises(CannotResume, match="swapped behind"):
        snapshot_to_resume_under(crossed)
    assert snapshot_to_resume_under(crossed + '\n{"c":0,"finish":"stop","over":true}') is None


class SlowToSay(FakeEngine):
    """It has switched before it says so. first: what the first event of every request waits for."""

    def __init__(self) -> None:
        super().__init__("hello ")
        self.tells_kv = True
        self.says, self.first = asyncio.Event(), asyncio.Event()
        self.says.set()

    async def commit(self, snapshot: str) -> SwapTiming:
        timing = await super().commit(snapshot)
        await self.says.wait()
        return timing

    async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        await self.first.wait()
        async for event in super()._events(request):
            yield event


async def test_the_log_says_of_which_files_kv_is_before_the_engine_has_told_of_its_switch(
    tmp_path: Path,
) -> None:
    """Of a stream that waits in the engine while other files come under the name of what serves."""
    path, body = BODIES["text"]

    async with play(tmp_path, SlowToSay) as (here, _):
        engine, replica = cast(SlowToSay, here.engine), here.replica

        async def loaded(generation: int) -> str:
            await here.until(
                lambda: replica.report().own.generation == generation and replica.own.driver.resting
            )
            return replica.own.driver.meanings.files("s")

        replica.desire(wanted("s", 1, A))
        old = await loaded(1)
        engine.says.clear()
        asked = asyncio.create_task(stream(here, path, body))
        await here.until(lambda: engine.requests)
        replica.desire(wanted("s", 2, B))
        await here.until(lambda: engine.switches == ["s", "s"])
        engine.first.set()
        told = ResumeLogReader(state_of(await asked)).files([])
        engine.says.set()
        new = await loaded(2)
        assert (told, old != new) == ({new}, True)


def test_kv_that_is_computed_again_under_other_files_of_the_name_is_refused() -> None:
    """The engine had switched to them before the replica, which looked before, heard of it."""
    opening = '{"id":"i","created":1,"seed":7,"prompts":"d"}'
    state = f'{opening}\n{{"c":0,"t":[1],"s":"a","kv":[["a",0,4]],"files":"x"}}'
    checked = SimpleNamespace(stream=True, cumulative=False, by_file=False, raw_output=False)
    resume = Resume("/v1/completions", "replica-0", True, state, msgspec.Raw(b"{}"))
    for files in ("x", "", "y"):
        continued = Continued(resume, cast(Any, checked), 1, EngineCard())
        continued.check_snapshot("a", "x", [])
        event = GenerationEvent(kv_snapshots=(("a", 0, 5),), kv_files=files)
        if files == "y":
            with pytest.raises(CannotResume, match="other files of 'a', which was overwritten"):
                continued.check_kv(0, event, 4)
        else:
            continued.check_kv(0, event, 4)
