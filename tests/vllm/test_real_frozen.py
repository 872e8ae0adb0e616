"""A real vLLM server checks weights that come in a pause, while all streams stand still with their KV."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from test_vllm_sampling_numbers import LONG, TOLERANCE, Recomputed, Served, engine_of, requests
from test_vllm_sampling_numbers import snapshots as snapshots
from vllm_bed import DEADLINE_S, load, logprobs_of
from vllm_streams import random_prompt

from midstream.core.types import GenerateRequest, SamplingParams

#: Streams that fill two blocks of 128 tokens each, and all blocks with the null block. It is no shorter than the context.
FULL_STREAMS, FULL_BLOCKS = 8, 17
CANARY = random_prompt("canary", 32)


def streams() -> list[GenerateRequest]:
    """Some of all kinds without a grammar, each within two blocks."""
    every = (r for r in requests("frozen") if r.grammar is None)
    return [
        replace(
            r,
            n=1,
            priority=i % 2,
            sampling=replace(r.sampling, max_tokens=LONG, stop_token_ids=(), min_tokens=0),
        )
        for i, r in enumerate(itertools.islice(every, 0, 4 * FULL_STREAMS, 4))
    ]


async def canary(served: Served, name: str) -> list[float]:
    request = GenerateRequest(
        request_id=name,
        prompt=tuple(CANARY),
        sampling=SamplingParams(max_tokens=0),
        prompt_records=len(CANARY),
        urgent=True,
        salt=name.encode(),
    )
    events = [event async for event in served.engine.generate(request)]
    assert [event.error for event in events] == [None]
    assert events[0].prompt is not None
    assert {record.snapshot for record in events[0].prompt} == {served.engine._epochs.snapshot}
    return [record.logprob for record in events[0].prompt[1:]]


async def swap_in_a_pause(served: Served, directory: Path) -> None:
    engine, asked = served.engine, streams()
    begun = asyncio.Event()

    def moved() -> None:
        if all(len(one.records) >= 70 for one in served.drawn):
            begun.set()

    async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as group:
        for request in asked:
            group.create_task(served.ask(request, moved))
        await begun.wait()
        await engine.pause()
        counts = [len(one.records) for one in served.drawn]
        assert min(LONG - count for count in counts) > 0
        await engine.stage("next", directory)
        await engine.commit("next")
        await engine.until_computing()
        expected = logprobs_of(load(directory), CANARY)
        # One after the other, and several at once.
        for name in ("first", "second"):
            for found in await asyncio.gather(*(canary(served, f"{name} {i}") for i in range(3))):
                assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= TOLERANCE
        engine.settle("next", sound=True)
        assert [len(one.records) for one in served.drawn] == counts
        await engine.resume()
    assert [len(one.records) for one in served.drawn] == [LONG] * len(asked)
    assert {tuple(dict.fromkeys(r.snapshot for r in one.records)) for one in served.drawn} == {
        ("base", "next")
    }


@pytest.mark.parametrize("full", [False, True], ids=["with room", "without a free block"])
def test_weights_are_checked_in_a_pause_and_streams_go_on_from_where_they_stood(
    full: bool, vllm_python: Path, snapshots: Any, tmp_path: Path
) -> None:
    """Without a free block one of the streams is preempted, and computes its KV again with the new weights."""
    places = snapshots("qwen3_moe")
    blocks = [f"--num-gpu-blocks-override={FULL_BLOCKS}"] if full else []

    async def main() -> tuple[Served, int]:
        async with engine_of(places["base"], tmp_path / "cache", *blocks) as served:
            assert served.engine._info().card.has("frozen_check")
            before = await served.preemptions()
            await swap_in_a_pause(served, places["next"])
            return served, await served.preemptions() - before

    served, preempted = asyncio.run(main())
    assert (preempted > 0) == full
    recomputed = Recomputed(places)
    if not full:
        assert max(recomputed.check(one) for one in served.drawn) <= TOLERANCE
