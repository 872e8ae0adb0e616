"""What is told of KV, token by token: a storm of equal and branching prompts, swaps of every cache policy, and every record
computed again in plain transformers over exactly the KV that it is said to stand on.

STORM_TOKENS=20000 in the environment is the long form: so many tokens of each storm.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import DEVICES, offload_of, request
from families import FAMILIES, write_model
from kv_claims import Stream, Verdict, judge
from msgspec.structs import replace
from recompute import Recomputer
from tiers import few_fast

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest, GenerationEvent
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.loading import LoadedModel
from midstream.engine.embedded.scheduler import Sequence as Running
from midstream.replica.namespaces import Namespaces, cache_salt

TOKENS = int(os.environ.get("STORM_TOKENS", "500"))
# Of a logprob, nats.
ERROR = {"cpu": 2e-4, "cuda": 1e-3}
# Requests at a time.
OPEN = 8
POLICIES: tuple[tuple[Any, int | None], ...] = (
    *[("none", None)] * 4,
    *[("none", 0)] * 2,
    ("none", 2),
    ("new_session", None),
    ("all", None),
)


class Storm:
    """Requests to one engine at a time, whose weights change between steps."""

    def __init__(self, core: EngineCore, models: Sequence[LoadedModel], seed: int) -> None:
        self.core, self.models = core, models
        self.rng = random.Random(seed)
        # Which model each snapshot is.
        self.serving = {"base": 0}
        self.namespaces = Namespaces()
        self.streams: list[Stream] = []
        self.open: dict[tuple[str, int], Stream] = {}
        self.preempted = self.moved = 0
        #: Per turn.
        self.swaps = 0.12
        self.trunks = [[self.rng.randrange(128) for _ in range(96)] for _ in range(2)]
        self._count_preemptions(core)

    def _count_preemptions(self, core: EngineCore) -> None:
        preempt = core.scheduler._preempt

        def counted(sequence: Running) -> None:
            self.preempted += 1
            preempt(sequence)

        core.scheduler._preempt = counted  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return (
            f"Storm({len(self.streams)} streams, {len(self.serving)} snapshots, {self.preempted} preemptions)"
        )

    def run(self, tokens: int) -> None:
        while sum(len(stream.tokens) for stream in self.streams) < tokens:
            self.turn()
        self.end()

    def checkpoints(self, directories: Sequence[Path]) -> dict[str, Path]:
        return {snapshot: directories[model] for snapshot, model in self.serving.items()}

    def take_over(self, lost: Storm, *, exact: bool) -> int:
        """Go on with the streams of an engine that is lost; how many."""
        requests: dict[str, list[Stream]] = {}
        for (name, _), stream in lost.open.items():
            requests.setdefault(name, []).append(stream)
        for streams in requests.values():
            request = streams[0].request
            ids = {stream.index: tuple(r.token_id for r in stream.tokens) for stream in streams}
            self.moved += 1
            asked = replace(
                request,
                request_id=f"moved{self.moved}",
                emitted=tuple(ids.get(index) for index in range(request.n)),
                prompt_records=0 if any(ids.values()) else request.prompt_records,
                kv_age_max=0 if exact else None,
            )
            self.add(asked)
        return len(lost.open)

    def turn(self) -> None:
        if len(self.open) < OPEN and self.rng.random() < 0.5:
            self.ask()
        if self.rng.random() < self.swaps:
            self.commit()
        self.step()

    def end(self) -> None:
        while not self.core.idle:
            self.step()
        self.core.check()

    def step(self) -> None:
        self._take(self.core.step())

    def ask(self) -> None:
        rng = self.rng
        prompt = self.prompt()
        session = rng.choice([None, ("", "a"), ("", "b"), ("", "c")])
        plain = request(
            f"r{len(self.streams)}",
            prompt,
            n=rng.choice((1, 1, 1, 3)),
            seed=rng.randrange(3),
            temperature=rng.choice((0.0, 1.0)),
            max_tokens=rng.randrange(1, 30),
            echo=rng.choice((0, 0, 0, len(prompt), rng.randrange(len(prompt) + 1))),
            salt=cache_salt(self.namespaces.admit(session), "", "", "model"),
        )
        kept = replace(plain, want_router_weights=self.core.info().card.has("router_weights"))
        self.add(replace(kept, kv_age_max=self.namespaces.kv_age_max, want_kv_snapshots=True))

    def prompt(self) -> list[int]:
        """The beginning of a trunk, at times with a branch of its own; or what a stream became."""
        rng = self.rng
        if self.streams and rng.random() < 0.3:
            ids = rng.choice(self.streams[-20:]).ids[:110]
            return ids[: rng.randrange(1, len(ids) + 1)]
        trunk = rng.choice(self.trunks)[: rng.choice((16, 32, 48, 64, 80, 96, rng.randrange(1, 96)))]
        return trunk + [rng.randrange(2)] * rng.choice((0, 0, 5, 20))

    def add(self, asked: GenerateRequest) -> None:
        for index in asked.choices:
            stream = Stream(asked, index)
            self.streams.append(stream)
            self.open[asked.request_id, index] = stream
        self._take(self.core.add(asked))

    def commit(self) -> None:
        policy, age = self.rng.choice(POLICIES)
        model = self.rng.randrange(len(self.models))
        self.namespaces.commit(policy, age)
        snapshot = f"step-{len(self.serving)}"
        self.serving[snapshot] = model
        self.core.set_staged(self.models[model])
        self.core.commit(snapshot)

    def _take(self, outputs: Sequence[tuple[str, GenerationEvent]]) -> None:
        for name, event in outputs:
            stream = self.open[name, event.index]
            stream.take(event)
            if stream.over:
                del self.open[name, event.index]


# The last two: three models, the first of which serves.
Made = tuple[EngineCore, list[LoadedModel], list[Path]]
# Of a family, on a device. The last: settings besides.
Engines = Callable[..., Made]


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    written: dict[str, list[Path]] = {}

    def make(family: str, kv_tokens: int, device: str, **more: Any) -> Made:
        if family not in written:
            written[family] = [write_model(family, tmp_path / str(seed), seed) for seed in range(3)]
        directories = written[family]
        settings = EngineSettings(
            max_batch_tokens=64, max_running=OPEN, kv_cache_tokens=kv_tokens, device=device, **more
        )
        core = EngineCore(directories[0], settings, tmp_path)
        return core, [core.stage(directory) for directory in directories], directories

    return make


FAST = ("qwen3-moe", "deepseek-v3")
#: Family, tokens of KV, seed. A small cache has preemptions and KV of several snapshots, with each family.
STORMS = [
    *(
        pytest.param(family, 320, 3, id=f"{family}-small", marks=() if family in FAST else pytest.mark.slow)
        for family in FAMILIES
    ),
    *(
        pytest.param(
            family,
            8192,
            4,
            id=f"{family}-roomy",
            marks=pytest.mark.slow if family in (*FAST, "gpt-oss") else pytest.mark.variant,
        )
        for family in FAMILIES
    ),
]


@pytest.mark.parametrize(("family", "kv_tokens", "seed"), STORMS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.timeout(3600)
def test_every_record_is_borne_out_over_the_kv_it_is_said_to_stand_on(
    device: str, family: str, kv_tokens: int, seed: int, engines: Engines
) -> None:
    core, models, directories = engines(family, kv_tokens, device)
    storm = Storm(core, models, seed)
    storm.run(TOKENS)
    verdict = judge(storm.streams, Recomputer(storm.checkpoints(directories)), ERROR[device])
    print(f"{family}, {kv_tokens} tokens of KV: {verdict}; {storm!r}")
    assert not verdict.wrong, str(verdict)
    assert any(len(set(stream.cached_kv)) > 1 for stream in storm.streams), "no reuse of KV of two snapshots"
    assert bool(storm.preempted) == (kv_tokens == 320)


@pytest.mark.parametrize("family", few_fast(["qwen3-moe", "deepseek-v3", "gpt-oss"], "qwen3-moe"))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.timeout(3600)
def test_every_record_is_borne_out_over_kv_that_was_evicted_and_copied_back(
    device: str, family: str, engines: Engines
) -> None:
    """A second tier of about the size of the cache, so that blocks go from there, too. At times all is dropped there."""
    core, models, directories = engines(family, 320, device, kv_offload_memory="512KiB")
    offload_of(core)
    storm = Storm(core, models, seed=6)
    storm.swaps = 0.04
    while sum(len(stream.tokens) for stream in storm.streams) < 2 * TOKENS:
        storm.turn()
        if storm.rng.random() < 0.004:
            core.abandon_kv("")
    storm.end()
    verdict = judge(storm.streams, Recomputer(storm.checkpoints(directories)), ERROR[device])
    kv = core.stats().kv
    print(f"{family}, {kv}: {verdict}; {storm!r}")
    assert not verdict.wrong, str(verdict)
    assert storm.preempted
    assert kv.restored_tokens > 100
    assert kv.dropped_tokens > 0


def test_a_block_copied_back_into_the_place_of_another_is_found(engines: Engines) -> None:
    """The fault is planted: labels and scores are right, and keys and values are of another block, of any namespace."""
    core, models, directories = engines("qwen3-moe", 320, "cpu", kv_offload_memory="512KiB")
    storm = Storm(core, models, seed=6)
    storm.swaps = 0.04
    offload = offload_of(core)
    move = offload.move

    def mixed_up(source: int, target: int) -> None:
        move(source, target)
        if source > core.pool.total:
            planes = core.runner.cache.planes(core.pool.total + 1)
            for plane in planes:
                plane[target] = plane[1 + target % core.pool.total]

    offload.move = mixed_up
    storm.run(3 * TOKENS)
    verdict = judge(storm.streams, Recomputer(storm.checkpoints(directories)), ERROR["cpu"])
    assert verdict.wrong


@pytest.mark.parametrize("family", few_fast(["qwen3-moe", "mistral", "deepseek-v3", "gpt-oss"], "qwen3-moe"))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.timeout(3600)
def test_streams_that_go_on_on_another_engine_are_borne_out_there(
    device: str, family: str, engines: Engines
) -> None:
    """One that has a history of its own in its cache. Every second engine that is lost demands exactness."""
    there, models, directories = engines(family, 8192, device)
    storm = Storm(there, models, seed=7)
    recomputer = Recomputer({})
    verdict, moved, count = Verdict(), 0, 0
    while verdict.checked < TOKENS:
        storm.run(100)
        here, own, _ = engines(family, 8192, device)
        lost = Storm(here, own, seed=100 + count)
        for _ in range(40):
            lost.turn()
        count += 1
        moved += storm.take_over(lost, exact=bool(count % 2))
        storm.end()
        recomputer.add(storm.checkpoints(directories))
        verdict.add(judge(storm.streams, recomputer, ERROR[device]))
        storm.streams.clear()
    print(f"{family}: {verdict}; {moved} streams moved; {storm!r}")
    assert moved > 0
    assert not verdict.wrong, str(verdict)
