"""How much one request may ask for and hold up: choices, the gate's bound, tokenizing, and ended choices."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from replica_fakes import MODEL, FakeEngine, Running, ids, running, sse

from midstream.core.errors import Overloaded, ReplicaUnavailable, SnapshotTransition
from midstream.core.types import GenerateRequest, GenerationEvent
from midstream.engine.base import EngineDied
from midstream.replica.gate import Door, Gate


async def ask(here: Running, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return await here.http.post(path, json={"model": MODEL, **fields})


async def test_prompts_times_n_has_a_limit_that_names_both(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await ask(here, prompt=["a"] * 9, n=114, max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            400,
            "prompt, n: 9 prompts with n 114 make 1026 choices, at most 1024",
        )
        assert here.engine.requests == []
        whole = (await ask(here, prompt=["a"] * 8, n=128, max_tokens=1)).json()
        assert [choice["index"] for choice in whole["choices"]] == list(range(1024))


async def test_the_gate_counts_choices(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine(allowed=1), requests_max=5) as here:
        first = asyncio.create_task(ask(here, prompt=["a", "b"], n=2, max_tokens=2))
        await here.until(lambda: here.replica.own.gate.choices == 4)
        refused = await ask(here, prompt="a", n=2, max_tokens=2)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["message"] == (
            "4 choices are being served or waiting and this request asks for 2 more; at most 5 fit; retry it later"
        )
        assert here.replica.report().in_flight == 1
        fits = asyncio.create_task(ask(here, prompt="a", max_tokens=2))
        await here.until(lambda: here.replica.own.gate.choices == 5)
        here.engine.allow(2)
        assert [(await task).status_code for task in (first, fits)] == [200, 200]
        assert here.replica.own.gate.choices == 0


async def test_a_request_larger_than_the_bound_is_served_when_it_is_alone() -> None:
    gate = Gate(lambda: None, requests_max=2)
    gate.set(Door.OPEN)
    await gate.enter(0, 3)
    with gate.admitted(3), pytest.raises(Overloaded):
        await gate.enter(0, 1)
    gate.set(Door.HELD)
    large = asyncio.create_task(gate.enter(60, 3))
    await asyncio.sleep(0)
    assert (gate.waiting, gate.choices) == (1, 3)
    with pytest.raises(Overloaded):
        await gate.enter(60, 1)
    gate.set(Door.OPEN)
    await large


@pytest.mark.parametrize(
    ("door", "refusal"), [(Door.CLOSED, SnapshotTransition), (Door.DOWN, ReplicaUnavailable)]
)
def test_a_closed_gate_refuses_without_waiting(door: Door, refusal: type[Exception]) -> None:
    gate = Gate(lambda: None)
    gate.set(door)
    with pytest.raises(refusal):
        gate.check(1)
    gate.set(Door.HELD)
    gate.check(1)


def test_a_door_that_moves_is_told_at_once() -> None:
    """The report says whether newcomers get in; a gateway that hears of it late sends them to be refused."""
    told: list[Door] = []
    gate = Gate(lambda: told.append(gate.door))
    for door in (Door.OPEN, Door.CLOSED, Door.CLOSED, Door.OPEN):
        gate.set(door)
    assert told == [Door.OPEN, Door.CLOSED, Door.OPEN]


def count_tokenizing(here: Running, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every text that is tokenized from now on: was it done on the event loop's thread?"""
    loop_thread, seen = threading.get_ident(), list[bool]()
    text = here.replica._text

    def watched(encode: Callable[[str], tuple[int, ...]]) -> Callable[[str], tuple[int, ...]]:
        def call(prompt: str) -> tuple[int, ...]:
            seen.append(threading.get_ident() == loop_thread)
            return encode(prompt)[:8]

        return call

    monkeypatch.setattr(text, "encode", watched(text.encode))
    monkeypatch.setattr(text, "encode_rendered", watched(text.encode_rendered))
    return seen


async def test_long_prompts_are_tokenized_off_the_loop_also_when_each_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(here: Running) -> None:
        seen = count_tokenizing(here, monkeypatch)
        assert (await ask(here, prompt=["a" * 1000] * 2, max_tokens=1)).status_code == 200
        assert (await ask(here, prompt=["a" * 1000] * 17, max_tokens=1)).status_code == 200
        assert seen == [True] * 2 + [False] * 17
        chat: Any = [{"role": "user", "content": "a" * 1000}]
        assert (await ask(here, "/v1/chat/completions", messages=chat, max_tokens=1)).status_code == 200
        assert (await ask(here, "/v1/chat/completions", messages=chat * 17, max_tokens=1)).status_code == 200
        assert seen[19:] == [True, False]

    engine = FakeEngine()
    engine.info = replace(engine.info, max_model_len=2**16)
    async with running(tmp_path, engine) as here:
        await scenario(here)


async def test_a_request_that_cannot_enter_is_refused_before_it_is_tokenized_but_after_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        seen = count_tokenizing(here, monkeypatch)
        here.replica.own.gate.set(Door.CLOSED)
        assert (await ask(here, prompt="a")).status_code == 425
        assert (await ask(here, prompt="a", n=0)).status_code == 400
        assert (await ask(here, prompt=[1, "a"])).status_code == 400
        assert (await ask(here, "/v1/chat/completions", messages=[])).status_code == 400
        here.replica.own.gate.set(Door.DOWN)
        assert (await ask(here, prompt="a")).status_code == 503
        assert seen == []
        here.replica.own.gate.set(Door.OPEN)


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
async def test_a_choice_that_hit_its_stop_string_is_ended_in_the_engine(
    tmp_path: Path, prompts: list[str]
) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        here.engine.replies = {1: ids("world ")}
        whole = (await ask(here, prompt=prompts, n=2, max_tokens=9, stop="lo")).json()
        assert [(c["text"], c["finish_reason"]) for c in whole["choices"]] == [
            ("hel", "stop"),
            ("world wor", "length"),
        ] * len(prompts)
        requests = [request.request_id for request in here.engine.requests]
        assert sorted(here.engine.end_choice_calls) == sorted((request, 0) for request in requests)
        assert [here.engine.made_of[request, 0] for request in requests] == [4] * len(prompts)
        assert [here.engine.made_of[request, 1] for request in requests] == [9] * len(prompts)


async def test_an_echo_without_logprobs_asks_the_engine_for_no_records(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        fields: dict[str, Any] = {
            "prompt": [65, 66, 67], "echo": True, "raw_output": True, "return_token_ids": True,
        }  # fmt: skip
        with_records = (await ask(here, **fields, max_tokens=2, logprobs=True)).json()["choices"][0]
        without = (await ask(here, **fields, max_tokens=2)).json()["choices"][0]
        assert [request.prompt_records for request in here.engine.requests] == [3, 0]
        for choice in (with_records, without):
            del choice["logprobs"], choice["raw_output"]["completion_logprobs"]
        # Without log-probabilities there is nothing to say it of.
        scored_by = with_records.pop("prompt_snapshots")
        assert scored_by == [{"snapshot": "base", "start": 0, "end": 3}]
        assert without == with_records
        assert without["text"] == "ABChel"
        last = (await ask(here, prompt=[65, 66, 67], echo_last=1, max_tokens=0)).json()["choices"][0]
        assert (last["text"], last["finish_reason"]) == ("C", "length")
        await here.swapped("v1")
        events = sse((await ask(here, prompt=[65, 66], echo=True, max_tokens=1, stream=True)).text)
        assert [(e["model"], e["choices"][0]["text"]) for e in events[:-1]] == [
            (f"{MODEL}@v1", "AB"),
            (f"{MODEL}@v1", "he"),
            (f"{MODEL}@v1", ""),
        ]


async def test_an_engine_that_dies_under_several_prompts_is_reported_once(tmp_path: Path) -> None:
    class Dying(FakeEngine):
        async def _events(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
            self._announce()
            try:
                await self.until(lambda: len(self.requests) == 3 and request is self.requests[0])
            # As an engine that finds out while it cleans up.
            except asyncio.CancelledError:
                raise EngineDied("killed by the test") from None
            async for _ in super()._events(request):
                raise EngineDied("killed by the test")
            yield GenerationEvent()

    async with running(tmp_path, Dying()) as here:
        unheard: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        assert (await ask(here, prompt=["a", "b", "c"])).status_code == 503
        await here.until(lambda: here.replica.ready and here.replica.own.gate.inside == 0)
        gc.collect()
        assert unheard == []
