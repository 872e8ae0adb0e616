"""Which weights computed the KV of a real vLLM server with policies: every record is computed again over the KV that it names.

Adapters and the base are switched in turn, under streams of two policies and of the base.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kv_claims import judge
from msgspec.structs import replace
from recompute import Recomputer
from test_real_provenance import BESIDE, TOKENS_MIN, TOLERANCE, Storm
from test_real_provenance import POLICIES as CACHES
from test_vllm_sampling_numbers import Served, engine_of
from test_vllm_sampling_numbers import snapshots as snapshots
from tiers import variant
from vllm_bed import BLOCK, load, needs_provenance

from adapter_helpers import ATTENTION, MLP, adapted, write_adapter  # isort: skip

from midstream.core.types import GenerateRequest
from midstream.engine.servers.labels import UNKNOWN, label_on
from midstream.engine.vllm.engine import VllmEngine
from midstream.replica.namespaces import Namespaces, cache_salt

CONFIG: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP}
FLAGS = ("--enable-lora", "--max-loras", "8", "--max-lora-rank", "8", "--num-gpu-blocks-override=24")
#: What is switched, in turn.
TURNS = ("red", "", "", "blue", "")
KNOWN = ("red", "blue", "")


class PolicyStorm(Storm):
    """folder: for adapters, each made of a seed."""

    def __init__(self, engine: VllmEngine, places: dict[str, Path], folder: Path) -> None:
        super().__init__(engine, places)
        self.seeds: dict[str, int] = {}
        # Of each policy, its labels in their order.
        self.labels: dict[str, list[str]] = {policy: [] for policy in KNOWN}
        self.crossed = 0
        self._folder = folder
        self._modules = {place: load(place) for place in places.values()}
        self._base, self._policy, self._turn, self._staged = "base", "", "", ""
        self._newest = dict.fromkeys(KNOWN, "")
        self._turns = itertools.cycle(TURNS)
        self._spaces = {policy: Namespaces() for policy in KNOWN}
        self._numbers = itertools.count(1)

    def module(self, label: str) -> Any:
        """As transformers and PEFT compute it."""
        name, _, base = label.partition("@")
        if name in self.seeds:
            return adapted(self._modules[self.serving[base or "base"]], self.seeds[name], **CONFIG)
        return load(self.serving[name])

    def _prompt(self) -> list[int]:
        """What a stream of its policy became, at times."""
        own = [s for s in self.streams[-4 * BESIDE :] if s.request.policy == self._policy]
        if own and self._chance.random() < 0.5:
            return self._chance.choice(own).ids[: 3 * BLOCK]
        return super()._prompt()

    def _request(self) -> GenerateRequest:
        self._policy = policy = self._chance.choice(KNOWN)
        request, spaces = super()._request(), self._spaces[policy]
        salt = cache_salt(spaces.admit(None), "", "", policy or "model")
        sampling = replace(request.sampling, max_tokens=self._chance.randrange(30, 120))
        return replace(request, policy=policy, salt=salt, kv_age_max=spaces.kv_age_max, sampling=sampling)

    async def stage(self, policy: str) -> None:
        number = next(self._numbers)
        name = self._staged = f"{policy}-{number}"
        self.seeds[name] = 100 + number
        directory = self._folder / name
        write_adapter(adapted(self._modules[self.serving["base"]], self.seeds[name], **CONFIG), directory)
        await self.engine.slot(policy).stage(name, directory)

    async def publish(self, policy: str, cache: Any = "none", age_max: int | None = None) -> None:
        """What is staged."""
        name = self._newest[policy] = self._staged
        self.crossed += (await self.engine.slot(policy).commit(name)).streams_crossed
        self._spaces[policy].commit(cache, age_max)
        self.labels[policy].append(label_on(name, self._base))

    async def round(self, policy: Any, age_max: int | None) -> None:
        self._turn = next(self._turns)
        if self._turn:
            # Before the streams, so that they are there when it is switched to.
            await self.stage(self._turn)
        await super().round(policy, age_max)

    async def _swap(self, policy: Any, age_max: int | None) -> None:
        if self._turn:
            await self.publish(self._turn, policy, age_max)
            return
        await super()._swap(policy, age_max)
        name = self._base = [*self.serving][-1]
        for each, spaces in self._spaces.items():
            spaces.commit(policy, age_max)
            self.labels[each].append(label_on(self._newest[each], name) if each else name)

    def check_ages(self) -> None:
        for stream in self.streams:
            bound, order = stream.request.kv_age_max, ["base", *self.labels[stream.request.policy]]
            if bound is not None and stream.cached_kv:
                age = order.index(stream.tokens[0].snapshot) - order.index(stream.cached_kv[0])
                assert age <= bound, stream.request.request_id


@pytest.mark.parametrize("family", ["qwen3", variant("llama")])
def test_every_record_is_borne_out_over_the_kv_of_adapters_and_of_the_base(
    family: str,
    vllm_python: Path,
    snapshots: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    computed_again: Callable[..., None],
) -> None:
    places = snapshots(family)

    async def main() -> tuple[PolicyStorm, int]:
        async with engine_of(places["base"], tmp_path / "cache", *FLAGS) as served:
            card = served.engine._info().card
            needs_provenance(card.why)
            assert card.has("policy_crossing"), card.why
            assert card.has("full_snapshots"), card.why
            storm = PolicyStorm(served.engine, places, tmp_path / "adapters")
            for policy in ("red", "blue"):
                await storm.stage(policy)
                await storm.publish(policy)
            rounds = 0
            while sum(len(stream.tokens) for stream in storm.streams) < TOKENS_MIN or rounds < 2 * len(TURNS):
                await storm.round(*CACHES[rounds % len(CACHES)])
                rounds += 1
            return storm, await Served(served.engine).preemptions()

    storm, preempted = asyncio.run(main())
    streams = storm.streams
    recomputer = Recomputer({})
    for label in sorted({label for stream in streams for era in stream.eras for label in era.kv} - {UNKNOWN}):
        recomputer.add_model(label, storm.module(label))
    verdict = judge(streams, recomputer, TOLERANCE)
    several = [stream for stream in streams if len(set(stream.cached_kv)) > 1]
    again = sum(len(stream.eras) > 1 for stream in streams)
    with capsys.disabled():
        print(
            f"\npolicies of {family}: {verdict}; {verdict.mixed} over KV of several snapshots; {len(streams)} streams, "
            f"{len(several)} with cached KV of several, {again} whose KV was computed again; {preempted} preemptions, "
            f"{storm.crossed} choices crossed a swap of their adapter, {len(recomputer.snapshots)} labels"
        )
    found = {"tokens": verdict.checked, "worst": verdict.worst, "wrong": len(verdict.wrong)}
    found |= {"labels": len(recomputer.snapshots), "over_several_snapshots": verdict.mixed}
    computed_again(family, **found, preemptions=preempted)
    assert not verdict.wrong, str(verdict)
    assert UNKNOWN not in {name for stream in streams for era in stream.eras for name in era.kv}
    storm.check_ages()
    assert verdict.mixed > verdict.checked // 10
    assert preempted > 0
    assert again > 0
    assert storm.crossed > 0
    assert any(stream.request.policy for stream in several)
