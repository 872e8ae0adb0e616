"""Echo through vLLM: records of the prompt, of one snapshot whatever is switched meanwhile, and their routes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_vllm import FakeVllm, logprob_at, route_bytes, until, weights_of
from vllm_helpers import Reading, asking, attached, begun, swap

from midstream.core.types import TokenRecord
from midstream.engine.servers.scoring import TRIES
from midstream.engine.vllm.protocol import NOT_FINITE, URGENT

PROMPT = tuple(range(20, 32))


def prompt_of(reading: Reading, index: int = 0) -> list[tuple[TokenRecord, ...]]:
    return [e.prompt for e in reading.events if e.index == index and e.prompt is not None]


@pytest.mark.parametrize("count", [1, 5, 11, 12, 40])
@pytest.mark.parametrize("routes", [False, True])
async def test_records_of_the_last_tokens_of_a_prompt(tmp_path: Path, count: int, routes: bool) -> None:
    async with attached(tmp_path) as (engine, fake):
        asked = asking(prompt=PROMPT, max_tokens=0, prompt_records=count, want_routes=routes)
        reading = await Reading(engine, asked).ended()
        (records,) = prompt_of(reading)
        at = range(max(0, len(PROMPT) - count), len(PROMPT))
        assert [r.token_id for r in records] == [PROMPT[i] for i in at]
        assert [r.logprob for r in records] == [logprob_at(i, 0) if i else 0.0 for i in at]
        assert [r.route for r in records] == [route_bytes(i - 1) if i and routes else None for i in at]
        assert {r.snapshot for r in records} == {"base"}
        assert {r.sampling_logprob for r in records} == {None}
        assert (reading.finishes, fake.requests) == ({0: "length"}, [])


async def test_requests_have_vllms_priorities_behind_the_checks(tmp_path: Path) -> None:
    def set_up(fake: FakeVllm) -> None:
        fake.by_priority = True

    async with attached(tmp_path, set_up=set_up) as (engine, fake):
        assert engine._info().card.has("priorities")
        for priority in (0, 1, 2**63 - 1):
            _, choices = await begun(engine, fake, asking(str(priority), n=2, priority=priority))
            assert [c.body.get("priority", 0) for c in choices] == [priority] * 2
            assert priority > URGENT


async def test_a_server_without_an_order_says_so(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, _):
        assert "--scheduling-policy priority" in engine._info().card.why["priorities"]


@pytest.mark.parametrize("by_priority", [False, True])
async def test_a_check_goes_before_all_other_requests_where_the_server_goes_by_priority(
    tmp_path: Path, by_priority: bool
) -> None:
    def set_up(fake: FakeVllm) -> None:
        fake.by_priority = by_priority

    async with attached(tmp_path, set_up=set_up) as (engine, fake):
        for name, urgent in (("canary", True), ("echo", False)):
            asked = asking(name, PROMPT, max_tokens=0, prompt_records=3, urgent=urgent)
            assert len(prompt_of(await Reading(engine, asked).ended())) == 1
        _, (stream,) = await begun(engine, fake, asking())
        # A token that is not finite is followed by a prompt of the replica's own.
        stream.sample()
        stream.write([(0, NOT_FINITE)])
        await until(lambda: len(fake.scores) == 3)
        bodies = [request.body for request in (*fake.scores, stream)]
        assert [body.get("priority") for body in bodies] == (
            [-1, None, -1, None] if by_priority else [None] * 4
        )


async def test_every_choice_tells_the_prompt_once_and_first(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        emitted = ((), (1,) * 4, (1,))
        for name, more in (("new", {}), ("resumed", {"emitted": emitted})):
            before, live = len(fake.requests), 3 - (name == "resumed")
            asked = asking(name, PROMPT, n=3, prompt_records=2, want_routes=True, **more)
            reading = Reading(engine, asked)
            await until(lambda before=before, live=live: len(fake.requests) == before + live)
            for request in fake.requests[before:]:
                request.to_the_end()
            await reading.ended()
            for index in range(3):
                events = [e for e in reading.events if e.index == index]
                assert [e.prompt is not None for e in events] == [True] + [False] * (len(events) - 1)
            assert len(fake.scores) == 1 + (name == "resumed")
            assert fake.scores[-1].prompt == list(PROMPT)
            assert len({prompt_of(reading, i)[0] for i in range(3)}) == 1


async def test_a_prompt_that_was_scored_while_weights_changed_is_scored_again(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        fake.hold_scores = True
        asked = asking(prompt=PROMPT, prompt_records=12, want_kv_snapshots=True)
        reading = Reading(engine, asked)
        for i in range(2):
            await until(lambda i=i: len(fake.scores) == i + 1)
            await swap(engine, tmp_path, i + 1)
            fake.scores[i].gate.set()
        await until(lambda: len(fake.scores) == 3)
        fake.scores[2].gate.set()
        await until(lambda: fake.requests)
        fake.requests[0].step()
        await until(lambda: reading.records())
        await swap(engine, tmp_path, 3)
        fake.requests[0].to_the_end()
        (records,) = prompt_of(await reading.ended())
        assert {r.snapshot for r in records} == {"step-2"}
        assert {weights_of(r) for r in records[1:]} == {2}
        assert reading.labels() == ["step-2"] + ["step-3"] * 3
        assert [weights_of(r) for r in reading.records()] == [2, 3, 3, 3]


async def test_one_that_was_asked_while_paused_is_of_the_new_weights(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        fake.gates["/collective_rpc"] = gate = asyncio.Event()
        switching = asyncio.create_task(swap(engine, tmp_path, 1))
        await until(lambda: "/collective_rpc" in fake.calls)
        reading = Reading(engine, asking(prompt=PROMPT, max_tokens=0, prompt_records=12))
        await until(lambda: fake.scores)
        gate.set()
        await switching
        (records,) = prompt_of(await reading.ended())
        assert {r.snapshot for r in records} == {"step-1"}
        assert {weights_of(r) for r in records[1:]} == {1}


async def test_a_prompt_is_given_up_when_weights_change_at_every_try(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        fake.hold_scores = True
        reading = Reading(engine, asking(prompt=PROMPT, prompt_records=12))
        for i in range(TRIES):
            await until(lambda i=i: len(fake.scores) == i + 1)
            await swap(engine, tmp_path, i + 1)
            fake.scores[i].gate.set()
        await reading.ended()
        assert reading.errors == [f"weights were switched {TRIES} times while the prompt was scored"]
        assert fake.requests == []


async def test_scores_that_cannot_be_used_are_an_error_and_never_a_label(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        fake.refuse = (400, {"error": {"message": "too long"}})
        refused = await Reading(engine, asking("refused", PROMPT, prompt_records=3)).ended()
        assert refused.errors == ["vLLM answered 400: too long"]
        fake.refuse = None
        fake.routes = False
        bare = asking("bare", PROMPT, max_tokens=0, prompt_records=3, want_routes=True)
        assert "no routes" in (await Reading(engine, bare).ended()).errors[0]
        fake.hold_scores = True
        lying = Reading(engine, asking("lying", PROMPT, max_tokens=0, prompt_records=3))
        await until(lambda: len(fake.scores) == 2)
        fake.scores[1].lie = lambda spans: [spans[0] | {"version": "default"}]
        fake.scores[1].gate.set()
        await lying.ended()
        assert (prompt_of(lying), len(lying.errors), lying.died) == ([], 1, None)


async def test_a_restarted_server_scores_nothing_under_a_name_that_it_does_not_serve(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        await swap(engine, tmp_path, 1)
        await fake.restart()
        reading = await Reading(engine, asking(prompt=PROMPT, max_tokens=0, prompt_records=3)).ended()
        assert prompt_of(reading) == []
        assert reading.died is not None


async def test_choices_that_are_ended_while_their_prompt_is_scored_are_not_begun(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        fake.hold_scores = True
        for name, count, ended in (("some", 2, 1), ("all", 1, 1), ("none to make", 2, 1)):
            before, scores = len(fake.requests), len(fake.scores)
            most = 0 if name == "none to make" else 4
            reading = Reading(engine, asking(name, PROMPT, max_tokens=most, n=count, prompt_records=3))
            await until(lambda scores=scores: len(fake.scores) > scores)
            for index in range(ended):
                engine.end_choice(name, index)
            fake.scores[-1].gate.set()
            if name == "some":
                await until(lambda before=before: len(fake.requests) > before)
                fake.requests[-1].to_the_end()
            await reading.ended()
            assert {e.index for e in reading.events} == set(range(ended, count))


async def test_nothing_of_a_prompt_is_cached_for_it_and_what_comes_after_finds_it(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        asked = asking(prompt=PROMPT, prompt_records=3)
        reading, (request,) = await begun(engine, fake, asked)
        assert request.salt == fake.scores[0].salt
        request.to_the_end()
        await reading.ended()
        assert [e.cached_tokens for e in reading.events if e.finish] == [0]
