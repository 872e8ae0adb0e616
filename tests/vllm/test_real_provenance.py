"""Which weights computed the KV of real vLLM servers: every record is computed again over the KV that it is said to stand on.

There are swaps of every cache policy, shared prompts, turns of sessions that claim what they had, preemptions and resumes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kv_claims import Stream, judge
from msgspec.structs import replace
from recompute import Recomputer
from test_vllm_sampling_numbers import Served, engine_of
from test_vllm_sampling_numbers import snapshots as snapshots
from test_vllm_session_kv import said, turn
from tiers import of_tier, variant
from vllm_bed import BLOCK, needs_provenance
from vllm_streams import random_prompt

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.servers.labels import UNKNOWN
from midstream.engine.vllm.engine import VllmEngine
from midstream.replica.namespaces import Namespaces, cache_salt

# Nats, in float32.
TOLERANCE = 1e-4
TOKENS_MIN = of_tier(fast=2_500, test=2_500, all=10_000)
#: So few blocks that streams are preempted in some rounds.
BLOCKS = "--num-gpu-blocks-override=24"
BESIDE = 8
#: Cache policy and bound of each swap, in turn.
POLICIES: tuple[tuple[Any, int | None], ...] = (
    ("none", None),
    ("none", 1),
    ("new_session", None),
    ("none", None),
    ("none", 0),
    ("none", 2),
    ("all", None),
)


class Storm:
    """Rounds of requests to one engine, whose weights are switched while they run."""

    def __init__(self, engine: VllmEngine, places: dict[str, Path]) -> None:
        self.engine = engine
        self.serving = {"base": places["base"]}
        self.streams: list[Stream] = []
        self.bounded: list[tuple[int, Stream]] = []
        self._places = [places["next"], places["base"]]
        self._namespaces = Namespaces()
        self._chance = random.Random(5)
        self._trunks = [random_prompt(f"trunk {i}", 3 * BLOCK + 10) for i in range(2)]

    def _prompt(self) -> list[int]:
        """The beginning of a trunk, at times with a branch of its own; or what a stream became."""
        chance = self._chance
        if self.streams and chance.random() < 0.4:
            ids = chance.choice(self.streams[-2 * BESIDE :]).ids
            return ids[: chance.randrange(len(ids) // 2, len(ids)) + 1][: 4 * BLOCK]
        trunk = chance.choice(self._trunks)[
            : chance.choice((40, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 10))
        ]
        return trunk + random_prompt(chance.random(), chance.choice((0, 1, 30)))

    def _request(self) -> GenerateRequest:
        chance = self._chance
        session = chance.choice([None, ("", "a"), ("", "b"), ("", "c")])
        sampling = SamplingParams(max_tokens=chance.randrange(4, 90), seed=chance.randrange(3))
        return GenerateRequest(
            request_id=f"r{len(self.streams)}",
            prompt=tuple(self._prompt()),
            sampling=sampling,
            n=chance.choice((1, 1, 1, 2)),
            salt=cache_salt(self._namespaces.admit(session), "", "", "model"),
            kv_age_max=self._namespaces.kv_age_max,
            want_kv_snapshots=True,
            reproducible=False,
            priority=chance.randrange(2),
            session="" if session is None else session[1],
            returns_s=1.0,
            kept_s=60.0,
        )

    def _resumed(self) -> list[GenerateRequest]:
        """Streams that another replica lost, and that no other weights may continue."""
        found = [s for s in self.streams[-BESIDE:] if s.request.n == 1 and len(s.tokens) > 20]
        return [
            replace(
                s.request,
                request_id=f"{s.request.request_id} again",
                emitted=(tuple(r.token_id for r in s.tokens[:10]),),
                kv_age_max=0,
            )
            for s in found[:2]
        ]

    async def round(self, policy: Any, age_max: int | None) -> None:
        begun = asyncio.Event()
        there: list[Stream] = []

        def moved() -> None:
            if sum(len(one.tokens) > 2 for one in there) > BESIDE // 2:
                begun.set()

        asked = [self._request() for _ in range(BESIDE)] + self._resumed()
        async with asyncio.TaskGroup() as group:
            for request in asked:
                group.create_task(self._read(request, there, moved))
            await begun.wait()
            await self._swap(policy, age_max)
            # These find what is cached under the new weights.
            for request in [self._request() for _ in range(BESIDE)]:
                group.create_task(self._read(request, there, moved))
        self.streams += there

    async def _swap(self, policy: Any, age_max: int | None) -> None:
        name = f"step-{len(self.serving)}"
        directory = self.serving[name] = self._places[len(self.serving) % 2]
        await self.engine.stage(name, directory)
        await self.engine.commit(name)
        self._namespaces.commit(policy, age_max)
        self.engine.settle(name, sound=True)

    async def _read(self, request: GenerateRequest, there: list[Stream], moved: Callable[[], None]) -> None:
        choices = {index: Stream(request, index) for index in request.choices}
        there += choices.values()
        async for event in self.engine.generate(request):
            choices[event.index].take(event)
            moved()

    def check_ages(self) -> None:
        """No stream began with cached KV that was too old for its request."""
        order = [*self.serving]
        for stream in self.streams:
            bound = stream.request.kv_age_max
            if bound is not None and stream.cached_kv:
                age = order.index(stream.tokens[0].snapshot) - order.index(stream.cached_kv[0])
                assert age <= bound, stream.request.request_id


@pytest.mark.parametrize("family", ["qwen3_moe", variant("qwen3"), variant("llama")])
def test_every_record_is_borne_out_over_the_kv_that_vllm_says_it_stands_on(
    family: str,
    vllm_python: Path,
    snapshots: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    computed_again: Callable[..., None],
) -> None:
    places = snapshots(family)

    async def main() -> tuple[Storm, int]:
        async with engine_of(places["base"], tmp_path / "cache", BLOCKS) as served:
            needs_provenance(served.engine._info().card.why)
            storm, rounds = Storm(served.engine, places), 0
            while sum(len(stream.tokens) for stream in storm.streams) < TOKENS_MIN or rounds < len(POLICIES):
                await storm.round(*POLICIES[rounds % len(POLICIES)])
                rounds += 1
            # What sessions claim is given up for others, as two do not fit, and all can be used.
            for session, blocks in (("first", 11), ("second", 15)):
                await turn(storm.engine, session, session, blocks * BLOCK + 1)
            await said(storm.engine, lambda kv: kv.evicted_tokens > 0)
            return storm, await Served(served.engine).preemptions()

    storm, preempted = asyncio.run(main())
    streams = storm.streams
    verdict = judge(streams, Recomputer(storm.serving), TOLERANCE)
    several = sum(len(set(stream.cached_kv)) > 1 for stream in streams)
    count = len(storm.serving)
    again = sum(len(stream.eras) > 1 for stream in streams)
    with capsys.disabled():
        print(
            f"\n{family}: {verdict}; {verdict.mixed} over KV of several snapshots; {len(streams)} streams, {several} with "
            f"cached KV of several, {again} whose KV was computed again; {preempted} preemptions, {count} snapshots"
        )
    found = {
        "tokens": verdict.checked,
        "worst": verdict.worst,
        "wrong": len(verdict.wrong),
        "snapshots": count,
    }
    computed_again(family, **found, over_several_snapshots=verdict.mixed, preemptions=preempted)
    assert not verdict.wrong, str(verdict)
    assert UNKNOWN not in {name for stream in streams for era in stream.eras for name in era.kv}
    storm.check_ages()
    assert verdict.mixed > verdict.checked // 10
    assert preempted > 0
    assert several > 0
    assert again > 0
