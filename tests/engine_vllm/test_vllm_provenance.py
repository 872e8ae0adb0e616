"""Which weights computed the KV behind each token, as a server with midstream's scheduler says it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import BLOCK, FakeRequest, FakeVllm, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import examples
from vllm_helpers import Reading, asking, attached, begun, swap

from midstream.core.types import GenerateRequest, GenerationEvent
from midstream.engine.servers.chunks import InvalidAnswer
from midstream.engine.servers.labels import UNKNOWN
from midstream.engine.vllm import protocol
from midstream.engine.vllm.arguments import UNTOLD
from midstream.engine.vllm.engine import VllmEngine

Spans = tuple[tuple[str, int, int], ...]


def scheduling(fake: FakeVllm) -> None:
    """With midstream's scheduler."""
    fake.by_priority = fake.checks_in_pause = fake.tells_kv = True
    fake.unasked = []


@asynccontextmanager
async def telling(
    folder: Path, set_up: Callable[[FakeVllm], None] = lambda fake: None
) -> AsyncIterator[tuple[VllmEngine, FakeVllm]]:
    def both(fake: FakeVllm) -> None:
        scheduling(fake)
        set_up(fake)

    async with attached(folder, set_up=both) as (engine, fake):
        fake.unasked = None
        fake.requests.clear()
        yield engine, fake


def wanting(name: str = "r", prompt: Any = range(10), max_tokens: int = 6, **more: Any) -> GenerateRequest:
    return asking(name, prompt, max_tokens=max_tokens, want_kv_snapshots=True, **more)


def reported(reading: Reading, index: int = 0) -> list[Spans]:
    return [e.kv_snapshots for e in reading.events if e.index == index and e.kv_snapshots is not None]


def behind_tokens(events: list[GenerationEvent], prompt: int) -> list[list[str]]:
    """Of each token, what its response says of the KV of every position before it."""
    found: list[list[str]] = []
    latest: Spans = ()
    for event in events:
        latest = event.kv_snapshots or latest
        for _ in event.tokens:
            size = prompt + len(found)
            labels = [name for name, start, end in latest for _ in range(start, end)][:size]
            # The last span grows.
            found.append(labels + [latest[-1][0]] * (size - len(labels)))
    return found


async def test_a_server_that_says_it_has_the_feature(tmp_path: Path) -> None:
    async with telling(tmp_path) as (engine, fake):
        card = engine._info().card
        assert card.has("kv_provenance")
        assert "kv_provenance" not in card.why
        # That of the proof.
        assert fake.version == engine._epochs.serving_version == "1:base"


def silent(fake: FakeVllm) -> None:
    fake.tells_kv = False


def forgetful(fake: FakeVllm) -> None:
    """As vLLM's own scheduler, it finds what is too old."""
    find = fake.find
    fake.find = lambda model, salt, tokens, _: find(model, salt, tokens)  # type: ignore[method-assign, misc]


def standing(fake: FakeVllm) -> None:
    """No stream of it crosses a pause."""
    fake.unasked = type("Ending", (list,), {"append": lambda _, one: one.to_the_end()})()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (silent, r"it said \[\] of the KV of a token"),
        (forgetful, "cached tokens that are too old"),
        (standing, "no stream ran for long enough"),
    ],
)
async def test_a_server_that_fails_the_proof_is_used_without_it(
    tmp_path: Path, fault: Callable[[FakeVllm], None], why: str
) -> None:
    async with telling(tmp_path, fault) as (engine, fake):
        card = engine._info().card
        assert not card.has("kv_provenance")
        assert card.why["kv_provenance"].startswith(UNTOLD)
        assert why.replace("\\", "") in card.why["kv_provenance"]
        assert fake.version == engine._epochs.serving_version
        # As before: known until a switch.
        reading, (request,) = await begun(engine, fake, wanting())
        assert "midstream_kv" not in request.sampling.get("extra_args", {})
        request.step(2)
        await until(lambda: len(reading.records()) == 2)
        await swap(engine, tmp_path, 1)
        request.to_the_end()
        await reading.ended()
        assert [spans[0][0] for spans in reported(reading)] == ["base", UNKNOWN, UNKNOWN]


async def test_another_scheduler_is_not_asked(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        assert engine._info().card.why["kv_provenance"] == UNTOLD
        assert fake.requests == []


async def test_streams_cached_prompts_and_preemptions_are_told_position_by_position(tmp_path: Path) -> None:
    async with telling(tmp_path) as (engine, fake):
        crossing, (one,) = await begun(engine, fake, wanting("crossing"))
        queued, (two,) = await begun(engine, fake, wanting("queued", range(20, 30)))
        one.step(3)
        await until(lambda: len(crossing.records()) == 3)
        await swap(engine, tmp_path, 1)
        one.step()
        one.preempt()
        one.to_the_end()
        await crossing.ended()
        mixed = (("base", 0, 12), ("step-1", 12, 13))
        assert reported(crossing) == [
            (("base", 0, 12),),
            mixed,
            (("step-1", 0, 14),),
            (("step-1", 0, 15),),
        ]
        two.to_the_end()
        assert reported(await queued.ended())[-1] == (("step-1", 0, 15),)
        # Two blocks of the first stream's beginning are cached.
        after, (three,) = await begun(engine, fake, wanting("after"))
        three.to_the_end()
        cached = 2 * BLOCK
        spans = (("base", 0, cached), ("step-1", cached, 10))
        assert reported(await after.ended())[0] == spans
        assert three.salt == one.salt


OPS = st.lists(
    st.tuples(st.sampled_from(["step", "late", "preempt", "swap", "ask"]), st.integers(0, 3)), max_size=24
)


@given(OPS, st.booleans(), st.integers(0, 40))
@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_token_gets_the_kv_of_another(
    tmp_path: Path, ops: list[tuple[str, int]], routes: bool, cut: int
) -> None:
    """Chunks of several tokens, cut anywhere, and with routes all at once."""

    async def main() -> None:
        async with telling(tmp_path) as (engine, fake):
            # The proof had one.
            fake.cut, names = cut, {1: "base"}
            truth: dict[int, list[list[int]]] = {}
            asked: list[tuple[Reading, FakeRequest]] = []

            async def ask(number: int) -> None:
                request = wanting(f"r{len(asked)}", range(6 + number), max_tokens=12, want_routes=routes)
                reading, (there,) = await begun(engine, fake, request)
                sample = there.sample

                def sampling(count: int = 1) -> Any:
                    new: list[Any] = []
                    for _ in range(count):
                        new += sample(1)
                        truth.setdefault(id(there), []).append(list(there.kv))
                    return new

                there.sample = sampling  # type: ignore[method-assign]
                asked.append((reading, there))

            await ask(3)
            for what, number in ops:
                there = asked[number % len(asked)][1]
                if what == "ask":
                    await ask(number)
                elif what == "swap":
                    number = len(names) + 1
                    names[number] = await swap(engine, tmp_path, number)
                elif there.over:
                    continue
                elif what == "preempt":
                    there.preempt()
                else:
                    there.step(min(number + 1, 12 - len(there.tokens)))
            for reading, there in asked:
                if not there.over:
                    there.to_the_end()
                await reading.ended()
                assert reading.errors == []
                expected = [[names[epoch] for epoch in kv] for kv in truth[id(there)]]
                assert behind_tokens(reading.events, len(there.prompt)) == expected

    asyncio.run(main())


@pytest.mark.parametrize(
    "numbers",
    [
        # The weights are of version 1.
        [0, 0, 0],
        [0, 2, 0],
        [0, 1, 0, 5, 9],
        [0, 1, 0, 1, 10],
        [1, 1, 0],
        [9, 1, 0],
        [-1, 1, 0],
        [0],
        [0, 1],
        [],
        [0, 1, 3],
    ],
    ids=str,
)
async def test_what_cannot_be_is_an_error(numbers: list[int], tmp_path: Path) -> None:
    async with telling(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, wanting())
        other, (kept,) = await begun(engine, fake, wanting("other", range(40, 50)))
        new = request.sample()
        request.telling = []
        request.write(new, sampling_mask=[numbers])
        await reading.ended()
        assert len(reading.errors) == 1
        assert reading.records() == []
        kept.to_the_end()
        assert (await other.ended()).errors == []


async def test_where_nothing_is_said_nothing_is_known(tmp_path: Path) -> None:
    async with telling(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, wanting(max_tokens=9))
        for number in range(3):
            new = request.sample(2)
            if number == 1:
                request.telling = []
            request.write(new)
            await until(lambda: len(reading.records()) == len(request.tokens))
            await swap(engine, tmp_path, number + 1)
        request.to_the_end()
        await reading.ended()
        assert reading.errors == []
        known = [(("base", 0, 11),), ((UNKNOWN, 0, 13),)]
        later = (("base", 0, 11), ("step-1", 11, 13), ("step-2", 13, 15))
        assert reported(reading)[:3] == [*known, later]


async def test_a_name_that_has_other_weights_now_stands_for_these_alone(tmp_path: Path) -> None:
    async with telling(tmp_path) as (engine, fake):
        await swap(engine, tmp_path, 1, "same")
        crossing, (one,) = await begun(engine, fake, wanting("crossing"))
        one.step(2)
        await until(lambda: len(crossing.records()) == 2)
        engine.announce("files-2", [("same", "same before")])
        await swap(engine, tmp_path, 2, "same")
        one.to_the_end()
        await crossing.ended()
        assert reported(crossing)[1] == (("same before", 0, 11), ("same", 11, 12))
        events = [event for event in crossing.events if event.kv_snapshots is not None]
        assert [event.renamed for event in events] == [(), (("same", "same before"),), ()]
        assert [event.kv_files for event in events] == ["", "files-2", "files-2"]
        assert one.versions[-1] == "3:same"


async def test_cached_kv_may_be_as_old_as_its_request_says_and_no_older(tmp_path: Path) -> None:
    async with telling(tmp_path) as (engine, fake):

        async def ask(name: str, first: int = 0, **more: Any) -> tuple[FakeRequest, list[str]]:
            reading, (request,) = await begun(engine, fake, wanting(name, range(first, first + 10), **more))
            request.to_the_end()
            return request, [label for label, _, _ in reported(await reading.ended())[0]]

        old, _ = await ask("old")
        await swap(engine, tmp_path, 1)
        younger, _ = await ask("younger", 50)
        await swap(engine, tmp_path, 2)
        assert (await ask("any"))[1] == ["base", "step-2"]
        assert (await ask("two", kv_age_max=2))[1] == ["base", "step-2"]
        assert (await ask("one", kv_age_max=1))[1] == ["step-2"]
        # The namespace has one salt, so what is young enough is found.
        found, labels = await ask("young", 50, kv_age_max=1)
        assert labels == ["step-1", "step-2"]
        assert found.salt == younger.salt == old.salt
        resumed, labels = await ask("resumed", 50, kv_age_max=0, emitted=((60, 61),), max_tokens=8)
        assert labels == ["step-2"]
        assert resumed.salt == old.salt
        other, labels = await ask("other", salt=b"another")
        assert labels == ["step-2"]
        assert other.salt != old.salt


async def test_a_request_that_waits_over_a_switch_is_not_sent_again(tmp_path: Path) -> None:
    """vLLM looks how old its cached KV is when it computes it."""
    async with telling(tmp_path) as (engine, fake):
        reading, (first,) = await begun(engine, fake, wanting("first"))
        first.to_the_end()
        await reading.ended()
        waiting, (request,) = await begun(engine, fake, wanting("waiting", kv_age_max=0))
        await swap(engine, tmp_path, 1)
        assert fake.requests == [first, request]
        request.to_the_end()
        assert reported(await waiting.ended())[0] == (("step-1", 0, 10),)


async def test_nobody_is_told_who_did_not_ask(tmp_path: Path) -> None:
    async with telling(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(kv_age_max=3))
        assert request.sampling["extra_args"]["midstream_kv"] == [0, 3]
        request.step(2)
        await until(lambda: reading.records())
        await swap(engine, tmp_path, 1)
        request.to_the_end()
        assert reported(await reading.ended()) == []


def test_real_masks_are_not_read(tmp_path: Path) -> None:
    choice = {"index": 0, "finish_reason": "stop", "sampling_mask": [[7, 8]], "token_ids": []}
    data = protocol.msgspec.json.encode({"choices": [choice]})
    assert protocol.read_answer(data).kv == ()
    with pytest.raises(InvalidAnswer, match=r"\[7, 8\] do not say"):
        protocol.read_answer(data, kv=True)
