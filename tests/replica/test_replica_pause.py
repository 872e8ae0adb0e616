"""Pauses of one replica: newcomers wait, running requests end, freeze or are cut short, and swaps go on meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from replica_fakes import FakeEngine, Running, running, sse
from test_replica_pins import BODY, streaming

from midstream.core.types import Pause
from midstream.engine.base import StagingFailed
from midstream.replica.gate import HEADER_DRAIN_TIMEOUT
from midstream.replica.wire.table import GENERATING


async def pause(here: Running, serial: int, mode: str | None) -> None:
    answer = await here.http.post("/replica/pause", json={"serial": serial, "mode": mode})
    assert answer.status_code == 202
    await here.until(lambda: here.replica.report().pause.serial >= serial)


async def is_held(here: Running) -> bool:
    answer = await here.http.post("/v1/completions", json=BODY, headers={HEADER_DRAIN_TIMEOUT: "0"})
    assert answer.status_code in (200, 425)
    return answer.status_code == 425


def said(text: str) -> tuple[str, list[Any]]:
    choices = [event["choices"][0] for event in sse(text) if event != "[DONE]"]
    return "".join(choice["text"] for choice in choices), [choice["finish_reason"] for choice in choices]


async def test_newcomers_wait_as_long_as_the_pause_lasts_and_a_swap_does_not_let_them_in(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await pause(here, 1, "wait")
        assert await is_held(here)
        waits = asyncio.create_task(here.http.post("/v1/completions", json=BODY))
        await here.until(lambda: here.replica.own.gate.waiting == 1)
        await here.swapped("step-1")
        assert here.replica.own.gate.waiting == 1
        await pause(here, 1, None)
        assert await is_held(here), "an older message changes nothing"
        await pause(here, 2, None)
        answer = await waits
        assert said(answer.text)[1][-1] == "length"
        assert sse(answer.text)[0]["model"].endswith("@step-1")
        assert not await is_held(here)


async def test_an_abort_ends_streams_and_plain_answers_with_what_they_have(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here, streaming(here) as stream:
        plain = asyncio.create_task(here.http.post("/v1/completions", json=BODY | {"stream": False, "n": 2}))
        await here.until(lambda: here.replica.own.gate.inside == 2)
        await pause(here, 1, "abort")
        await here.until(lambda: here.replica.report().in_flight == 0)
        text, finishes = said((await stream).text)
        # Two tokens.
        assert (text, finishes[-1]) == ("hel", "abort")
        answer = (await plain).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
        assert here.engine.calls.count("pause") == 0


async def test_each_wire_tells_that_an_answer_was_cut(tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"input_ids": [65], "sampling_params": {"max_new_tokens": 6}},
        "/inference/v1/generate": {"token_ids": [65], "sampling_params": {"max_tokens": 6}},
        "/v1/messages": {"model": "m", "max_tokens": 6, "messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x", "max_output_tokens": 16},
    }
    async with running(tmp_path, FakeEngine(allowed=2)) as here:
        bodies["/v1/messages"]["model"] = BODY["model"]
        asked = [asyncio.create_task(here.http.post(path, json=body)) for path, body in bodies.items()]
        await here.engine.until(lambda: list(here.engine.made.values()) == [2] * len(bodies))
        await pause(here, 1, "abort")
        sglang, vllm, messages, responses = [(await task).json() for task in asked]
        assert sglang["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(sglang["output_ids"]) == 2
        assert vllm["choices"][0]["finish_reason"] == "abort"
        assert messages["stop_reason"] == "max_tokens"
        assert responses["status"] == "incomplete"
        assert [told["midstream"]["finish_reason"] for told in (messages, responses)] == ["abort", "abort"]


async def test_each_wire_tells_of_a_dead_end_and_keeps_the_tokens_before_it(tmp_path: Path) -> None:
    plain = {"stream": False, "return_token_ids": True}
    async with running(tmp_path, FakeEngine()) as here:
        here.engine.dead_end_after = 2
        chat = {"messages": [{"role": "user", "content": "x"}], "model": BODY["model"], "max_tokens": 6}
        asked = {
            "/v1/completions": BODY | plain,
            "/v1/chat/completions": chat,
            "/generate": {"input_ids": [65], "sampling_params": {"max_new_tokens": 6}},
            "/inference/v1/generate": {"token_ids": [65], "sampling_params": {"max_tokens": 6}},
            "/v1/messages": chat,
            "/v1/responses": {"input": "x", "max_output_tokens": 16},
        }
        answers = [await here.http.post(path, json=body) for path, body in asked.items()]
        assert [answer.status_code for answer in answers] == [200] * len(asked)
        completion, message, sglang, vllm, messages, responses = [answer.json() for answer in answers]
        for choice in (completion["choices"][0], message["choices"][0], vllm["choices"][0]):
            assert choice["finish_reason"] == "dead_end"
        assert completion["choices"][0]["text"] == "hel"
        assert sglang["meta_info"]["finish_reason"]["type"] == "dead_end"
        assert len(sglang["output_ids"]) == 2
        assert (messages["stop_reason"], responses["status"]) == ("max_tokens", "incomplete")
        assert [told["midstream"]["finish_reason"] for told in (messages, responses)] == ["dead_end"] * 2
        assert said((await here.http.post("/v1/completions", json=BODY)).text)[1][-1] == "dead_end"


async def test_an_abort_by_name_ends_no_other_request(tmp_path: Path) -> None:
    async with (
        running(tmp_path, FakeEngine()) as here,
        streaming(here, request_id="one") as one,
        streaming(here, headers={"x-request-id": "two"}) as two,
        streaming(here) as other,
    ):
        answer = await here.http.post("/replica/abort", json=["one", "two", "three"])
        assert answer.json() == {"aborted": 2}
        assert [said((await task).text)[1][-1] for task in (one, two)] == ["abort", "abort"]
        here.engine.allow(100)
        assert said((await other).text)[1][-1] == "length"


async def test_keep_freezes_the_engine_until_the_pause_ends_and_another_mode_lets_it_go(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await pause(here, 1, "keep")
        await pause(here, 2, "keep")
        await pause(here, 3, "abort")
        assert here.engine.calls == ["pause", "pause", "resume"]
        assert here.replica.report().pause == Pause(3, "abort")


async def test_a_pause_that_failed_is_carried_out_when_its_message_comes_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    failures = [StagingFailed("no room")]
    freeze = engine.pause

    async def fail_once() -> None:
        if failures:
            raise failures.pop()
        await freeze()

    engine.pause = fail_once  # type: ignore[method-assign]
    async with running(tmp_path, engine) as here:
        asked = {"serial": 1, "mode": "keep"}
        assert (await here.http.post("/replica/pause", json=asked)).status_code == 202
        await here.until(lambda: not failures)
        assert here.replica.report().pause.serial == 0
        await pause(here, 1, "keep")
        assert engine.calls.count("pause") == 1


async def test_an_engine_that_begins_anew_in_a_pause_serves_nobody_before_it_ends(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await pause(here, 1, "keep")
        boot = here.replica.boot
        await here.engine.die()
        await here.until(lambda: here.replica.ready and here.replica.boot != boot)
        assert await is_held(here)
        await pause(here, 2, None)
        assert not await is_held(here)


async def test_a_reset_of_the_cache_gives_equal_requests_another_salt(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        for reset in (False, False, True):
            if reset:
                assert (await here.http.post("/replica/reset_cache")).status_code == 200
            await here.http.post("/v1/completions", json=BODY | {"user": "s"})
        first, second, third = (request.salt for request in here.engine.requests)
        assert first == second != third


# By name, in lists and with n


def batch(rid: Any, count: int, n: int = 1, **more: Any) -> dict[str, Any]:
    return {"input_ids": [[65 + i] for i in range(count)], "rid": rid, **more} | {
        "sampling_params": {"max_new_tokens": 6, "n": n}
    }


def ends(answer: httpx.Response) -> list[tuple[str, str, int]]:
    assert answer.status_code == 200, answer.text
    return [
        (one["meta_info"]["id"], one["meta_info"]["finish_reason"]["type"], len(one["output_ids"]))
        for one in answer.json()
    ]


async def test_each_id_of_a_list_is_known_and_ends_alone(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(allowed=2)) as here:
        asked = asyncio.create_task(here.http.post("/generate", json=batch(["a", "b", "c"], 3)))
        await here.engine.until(lambda: list(here.engine.made.values()) == [2, 2, 2])
        assert (await here.http.post("/replica/abort", json=["b", "x"])).json() == {"aborted": 1}
        assert (await here.http.post("/replica/abort", json=["a"])).json() == {"aborted": 1}
        here.engine.allow(10)
        assert ends(await asked) == [("a", "abort", 2), ("b", "abort", 2), ("c", "length", 6)]


async def test_each_choice_of_a_prompt_ends_alone_and_its_id_ends_all(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(allowed=2)) as here:
        asked = asyncio.create_task(here.http.post("/generate", json=batch(["a", "b"], 2, n=2)))
        await here.engine.until(lambda: list(here.engine.made.values()) == [2, 2])
        assert (await here.http.post("/replica/abort", json=["a_1"])).json() == {"aborted": 1}
        assert (await here.http.post("/replica/abort", json=["a_1"])).json() == {"aborted": 0}
        assert (await here.http.post("/replica/abort", json=["b"])).json() == {"aborted": 1}
        here.engine.allow(10)
        assert ends(await asked) == [
            *(("a_0", "length", 6), ("a_1", "abort", 2)),
            *(("b_0", "abort", 2), ("b_1", "abort", 2)),
        ]


async def test_requests_that_a_pause_holds_end_by_name_and_the_others_wait_on(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await pause(here, 1, "wait")
        post = here.http.post
        whole = asyncio.create_task(post("/generate", json=batch(["a", "b"], 2)))
        part = asyncio.create_task(post("/generate", json=batch(["c", "d"], 2)))
        named = asyncio.create_task(post("/v1/completions", json=BODY | {"stream": False, "request_id": "e"}))
        other = asyncio.create_task(post("/v1/completions", json=BODY | {"stream": False}))
        await here.until(lambda: here.replica.own.gate.waiting == 4)
        assert (await post("/replica/abort", json=["a", "b", "c", "e"])).json() == {"aborted": 3}
        assert ends(await whole) == [("a", "abort", 0), ("b", "abort", 0)]
        (choice,) = (await named).json()["choices"]
        assert (choice["finish_reason"], here.engine.requests) == ("abort", [])
        assert here.replica.own.gate.waiting == 2
        await pause(here, 2, None)
        assert ends(await part) == [("c", "abort", 0), ("d", "length", 6)]
        assert (await other).json()["choices"][0]["finish_reason"] == "length"
        assert not here.replica.own.service.called


async def test_all_means_those_that_wait_too_but_a_pause_ends_none_of_them(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        await pause(here, 1, "wait")
        waits = asyncio.create_task(here.http.post("/v1/completions", json=BODY | {"stream": False}))
        await here.until(lambda: here.replica.own.gate.waiting == 1)
        await pause(here, 2, "abort")
        assert here.replica.own.gate.waiting == 1
        assert (await here.http.post("/replica/abort", content=b"null")).json() == {"aborted": 1}
        assert (await waits).json()["choices"][0]["finish_reason"] == "abort"


class Slow:
    """A client that takes what it is given one write at a time. between: what happens after the first one."""

    writable = False

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = [between]
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    async def drained(self) -> None:
        await asyncio.sleep(0)
        for happens in self._between:
            happens()
        self._between.clear()


async def test_a_choice_that_ends_while_others_are_told_that_they_did_ends_too(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        service = here.replica.own.service
        assert service is not None
        body = json.dumps(BODY | {"n": 4}).encode()
        async with service.admitted(GENERATING["completions"], body, {}) as generation:
            generation.abort([0, 1])
            client = Slow(lambda: generation.abort([3]))
            await generation.stream(client)
        assert [request.choices for request in here.engine.requests] == [(2,)]
        choices = [event["choices"][0] for event in sse(client.data.decode()) if event != "[DONE]"]
        assert {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"]} == {
            **dict.fromkeys((0, 1, 3), "abort"),
            2: "length",
        }
