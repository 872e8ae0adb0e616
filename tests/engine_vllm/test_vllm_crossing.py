"""Swaps of a policy of VllmEngine under running requests: what ends or begins in the pause, and what is cached behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_vllm import UNLOAD, FakeRequest, FakeVllm, until, weights_of, write_adapter, write_weights
from test_vllm_adapters import both_of, ours, publish
from test_vllm_digest import gives_digests
from vllm_helpers import Reading, asking, attached, begun, swap

from midstream.core.types import SwapTiming
from midstream.engine.vllm.engine import VllmEngine

PAUSE = "/pause"


async def one_under_each(
    engine: VllmEngine, fake: FakeVllm, folder: Path
) -> list[tuple[Reading, FakeRequest]]:
    """Two requests, of which the first has crossed a swap: they run under two names."""
    found = []
    for number in (1, 2):
        await publish(engine, folder, "red", number)
        reading, (request,) = await begun(engine, fake, asking(f"r{number}", policy="red", max_tokens=6))
        request.step(1)
        found.append((reading, request))
    return found


async def in_pause(
    engine: VllmEngine, fake: FakeVllm, folder: Path
) -> tuple[asyncio.Task[SwapTiming], asyncio.Event]:
    """A swap that has begun. It goes on once the event is set."""
    gate = fake.gates[PAUSE] = asyncio.Event()
    swapping = asyncio.create_task(publish(engine, folder, "red", 3))
    await until(lambda: PAUSE not in fake.gates, "vLLM is told to pause")
    return swapping, gate


async def test_a_request_that_ends_before_vllm_stands_still_does_not_end_the_swap(tmp_path: Path) -> None:
    """It was the last one under its name."""

    async with attached(tmp_path, places=6) as (engine, fake):
        (old, ending), (new, running) = await one_under_each(engine, fake, tmp_path)
        swapping, gate = await in_pause(engine, fake, tmp_path)
        ending.to_the_end()
        await old.ended()
        # Its name would be unloaded, and its files removed, meanwhile.
        await engine.slot("green").stage("green-1", write_adapter(tmp_path / "green-1", 7))
        gate.set()
        await swapping
        running.to_the_end()
        await new.ended()
        for reading in (old, new):
            assert reading.errors == []
            assert [weights_of(r) for r in reading.records()] == [both_of(name) for name in reading.labels()]
        assert new.labels() == ["red-2"] + ["red-3"] * 5
        # Its name and its files are gone now.
        await until(lambda: fake.calls.count(UNLOAD) == 2)
        await until(lambda: not fake.files[ending.model].exists())


async def test_a_request_that_begins_before_vllm_stands_still_crosses_the_swap(tmp_path: Path) -> None:
    """It is the only one under its name."""

    async with attached(tmp_path, places=4) as (engine, fake):
        (old, _), (new, ending) = await one_under_each(engine, fake, tmp_path)
        ending.to_the_end()
        await new.ended()
        swapping, gate = await in_pause(engine, fake, tmp_path)
        late, (begins,) = await begun(engine, fake, asking("late", policy="red", max_tokens=6))
        begins.step(1)
        await until(lambda: late.labels() == ["red-2"])
        gate.set()
        assert (await swapping).streams_crossed == 2
        begins.to_the_end()
        await late.ended()
        assert late.labels() == ["red-2"] + ["red-3"] * 5
        assert [weights_of(r) for r in late.records()] == [both_of(name) for name in late.labels()]
        await old.stop()


async def test_kv_of_the_base_before_is_not_found_after_a_swap_that_a_request_crossed(tmp_path: Path) -> None:
    """One that waits for its first token, and bounds the age of cached KV."""

    async with attached(tmp_path, places=4) as (engine, fake):
        ours(engine)

        async def asked(name: str) -> tuple[Reading, FakeRequest]:
            request = asking(name, range(20), policy="red", salt=b"s", kv_age_max=0, want_kv_snapshots=True)
            reading, requests = await begun(engine, fake, request)
            return reading, requests[0]

        await publish(engine, tmp_path, "red", 1)
        waiting, _ = await asked("waits")
        await publish(engine, tmp_path, "red", 2)
        await until(lambda: len(fake.requests) == 2, "it is sent again")
        fake.requests[-1].to_the_end()
        await waiting.ended()
        for label in ("red-2", "red-2@step-2"):
            if label != "red-2":
                await engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
                await engine.commit("step-2")
            reading, request = await asked(label)
            request.to_the_end()
            await reading.ended()
            assert request.reused == []
            assert reading.labels() == [label] * 4
            assert reading.events[-1].kv_snapshots == ((label, 0, 23),)


@pytest.mark.parametrize("which", ["adapter", "base"])
async def test_kv_of_what_is_overwritten_under_a_request_loses_its_name(tmp_path: Path, which: str) -> None:
    """The name and its label mean other weights now."""

    async with attached(tmp_path, places=4) as (engine, fake):
        ours(engine)
        await swap(engine, tmp_path, 1)
        await publish(engine, tmp_path, "red", 1)
        asked = asking(policy="red", max_tokens=6, want_kv_snapshots=True)
        reading, (request,) = await begun(engine, fake, asked)
        request.step(1, 1)
        await until(lambda: len(reading.records()) == 2)
        assert reading.events[0].kv_snapshots == (("red-1@step-1", 0, 3),)
        if which == "base":
            await engine.stage("step-1", write_weights(tmp_path / "again", 2))
            engine.announce("other", [("step-1", "step-1@1")])
            await engine.commit("step-1")
        else:
            slot = engine.slot("red")
            await slot.stage("red-1", write_adapter(tmp_path / "again", 2))
            slot.announce("other", [("red-1", "red-1@1")])
            await slot.commit("red-1")
        request.to_the_end()
        await reading.ended()
        assert set(reading.labels()) == {"red-1@step-1"}
        renamed = [pair for event in reading.events for pair in event.renamed]
        assert renamed == [("red-1@step-1", "?")]
        assert next(event for event in reading.events if event.renamed).kv_snapshots == (("?", 0, 5),)


async def test_swaps_of_other_policies_leave_a_prompt_its_scores(tmp_path: Path) -> None:
    async with attached(tmp_path, places=4) as (engine, fake):
        await publish(engine, tmp_path, "red", 1)
        await publish(engine, tmp_path, "blue", 1)
        stream, _ = await begun(engine, fake, asking("blue", policy="blue"))
        fake.hold_scores = True
        reading = Reading(engine, asking("red", policy="red", prompt_records=3, max_tokens=0))
        await until(lambda: fake.scores, "the prompt is at vLLM")
        for number in (2, 3):
            await publish(engine, tmp_path, "blue", number)
        fake.hold_scores = False
        fake.scores[0].gate.set()
        await reading.ended()
        assert reading.errors == []
        records = [record for event in reading.events for record in event.prompt or ()]
        assert [(r.snapshot, weights_of(r)) for r in records[1:]] == [("red-1", 1)] * 2
        assert len(fake.scores) == 1, "it is not computed again"
        await stream.stop()


async def test_a_swap_of_a_policy_leaves_the_base_its_digest(tmp_path: Path) -> None:
    async with attached(tmp_path, places=6, set_up=gives_digests) as (engine, fake):
        (old, _), (new, _) = await one_under_each(engine, fake, tmp_path)
        expected, pieces = await engine.weights_digest(), fake.digest_pieces
        fake.digest_pieces = 10**9
        fake.digested.clear()
        reading = asyncio.create_task(engine.weights_digest())
        await fake.digested.wait()
        swapping, gate = await in_pause(engine, fake, tmp_path)
        fake.digested.clear()
        await until(lambda: fake.digested.is_set() or reading.done())
        gate.set()
        await swapping
        fake.digest_pieces = pieces
        assert await reading == expected
        for stream in (old, new):
            await stream.stop()


async def test_a_server_that_refuses_the_running_request_of_the_proof_is_used_without_crossing(
    tmp_path: Path,
) -> None:
    def refusing(fake: FakeVllm) -> None:
        fake.refuse_streams = True

    async with asyncio.timeout(60), attached(tmp_path, places=4, set_up=refusing) as (engine, fake):
        card = engine._info().card
        assert card.has("policies")
        assert not card.has("policy_crossing")
        assert "made up by the test" in card.why["policy_crossing"]
        assert fake.adapters == {}
