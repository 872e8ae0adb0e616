"""A small exact engine: each of its numbers tells which weights computed it, on which tokens, over whose KV.

KV of a position is a number made of the KV before it, its token and the weights that computed it. A token, its logprob and its
route are made of the newest KV and the weights of the step. So a wrong label, a lost or doubled token, and KV that is not what
it is said to be all give other numbers than `expected`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from siminplace import BACKEND, InPlace
from simreceiver import Receivers

from midstream.core.kv import KvStats
from midstream.core.types import (
    BASE_SNAPSHOT,
    EngineCard,
    EngineStats,
    GenerateRequest,
    GenerationEvent,
    ModelInfo,
    SwapTiming,
    TokenRecord,
)
from midstream.engine.base import AtOnce, Engine, EngineDied, Slot, StagingFailed
from midstream.engine.request_events import RequestEvents
from midstream.engine.step import mask_of

#: So few that sessions wait for one another.
KV_BLOCKS = 20
_MASK = 2**64 - 1
VOCAB = 250
#: Positions of one block of KV.
BLOCK = 4
CONTEXT = 512
EXPERTS, LAYERS, TOP_K = 8, 1, 2
FEATURES = tuple(name for name in EngineCard().features if name not in ("grammars", "logit_bias"))


def mixed(state: int, value: int) -> int:
    state = ((state ^ value) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
    return state ^ (state >> 31)


def weights_of(files: Iterable[tuple[str, bytes]]) -> int:
    """What the weights of these files are called in KV. files: name and bytes of each."""
    digest = hashlib.sha256()
    for name, data in sorted(files):
        if name.endswith(".safetensors"):
            digest.update(hashlib.sha256(data).digest())
    return int.from_bytes(digest.digest()[:8], "big")


def kv_after(kv: int, token: int, weights: int) -> int:
    return mixed(mixed(kv, token + 1), weights)


def drawn(kv: int, weights: int, seed: int, choice: int, position: int) -> int:
    return 1 + mixed(mixed(mixed(kv, weights ^ 1), seed & _MASK), choice * 100_003 + position) % (VOCAB - 1)


def scored(kv: int, weights: int, token: int) -> float:
    """Exact in binary and in JSON."""
    return -(mixed(mixed(kv, weights ^ 2), token) % 8192) / 1024 - 1 / 1024


def routed(kv: int, weights: int) -> bytes:
    found = mixed(kv, weights ^ 3)
    first = found % EXPERTS
    return bytes((first, (first + 1 + (found >> 8) % (EXPERTS - 1)) % EXPERTS))


def masked(kv: int, weights: int, token: int) -> bytes:
    """What a draw was from: the token and others, of a number that now and then makes bits shorter than ids."""
    found = mixed(kv, weights ^ 4)
    step, count = 1 + found % 16, (found >> 8) % 24
    return mask_of(np.unique(np.array([token, *(range(token % step, VOCAB, step))][: count + 1])))


class Load(NamedTuple):
    """Weights that serve, or did. commits: how many there were before it, of its policy."""

    snapshot: str
    weights: int
    commits: int


@dataclass
class Choice:
    """One choice that runs. slot: of its policy. kv: of each position that has one, and who computed it. fixed: the load that
    it is pinned to."""

    request: GenerateRequest
    choice: int
    slot: SimSlot
    tokens: list[int]
    events: RequestEvents
    kv: list[int] = field(default_factory=list)
    by: list[tuple[str, int]] = field(default_factory=list)
    made: int = 0
    begun: bool = False
    told: tuple[tuple[str, int, int], ...] = ()
    fixed: Load | None = None

    @property
    def load(self) -> Load:
        return self.fixed or self.slot.load

    def spans(self) -> tuple[tuple[str, int, int], ...]:
        found: list[tuple[str, int, int]] = []
        for position, (snapshot, _) in enumerate(self.by):
            if found and found[-1][0] == snapshot:
                found[-1] = (snapshot, found[-1][1], position + 1)
            else:
                found.append((snapshot, position, position + 1))
        return tuple(found)


class SimSlot(Slot):
    """What one policy serves. load: before its first commit, that of the start."""

    proves_staged = True

    def __init__(self, engine: SimEngine, policy: str, load: Load) -> None:
        self._engine = engine
        self.policy = policy
        self.load = load
        #: Besides those that run: what serves, and what stays.
        self.held: dict[str, Load] = {load.snapshot: load}
        self._retained: frozenset[str] = frozenset()
        self._staged: tuple[str, int] | None = None

    async def stage(self, snapshot: str, directory: Path) -> None:
        self._engine.check()
        self._staged = None
        await asyncio.sleep(self._engine.slow_s(0.3))
        await self._engine.awake()
        self._engine.check()
        if self._engine.chance(self._engine.staging_fails):
            raise StagingFailed("the staged files could not be placed")
        self._staged = (snapshot, of_directory(directory))

    def staged_there(self, snapshot: str, weights: int) -> None:
        """The engine has them already."""
        self._staged = (snapshot, weights)

    def drop_staged(self) -> None:
        self._staged = None

    async def commit(self, snapshot: str) -> SwapTiming:
        self._engine.check()
        await asyncio.sleep(self._engine.slow_s(0.02))
        await self._engine.awake()
        self._engine.check()
        if self._staged is None or self._staged[0] != snapshot:
            raise StagingFailed(f"{snapshot} is not staged")
        self.load = Load(*self._staged, self.load.commits + 1)
        self.held[snapshot] = self.load
        self._engine.committed(snapshot)
        self._staged = None
        self._free()
        self._engine.slots.setdefault(self.policy, self)
        return SwapTiming(snapshot=snapshot, pause_ms=1.0, streams_crossed=self._engine.running_of(self))

    def retain(self, snapshots: Collection[str]) -> None:
        self._retained = frozenset(snapshots)
        self._free()

    def _free(self) -> None:
        kept = {self.load.snapshot, *self._retained}
        self.held = {name: load for name, load in self.held.items() if name in kept}

    async def weights_digest(self) -> str | None:
        self._engine.check()
        await asyncio.sleep(self._engine.slow_s(0.05))
        await self._engine.awake()
        self._engine.check()
        return f"sim:{self.load.weights:x}"


class SimEngine(Engine):
    """chance(share): whether something that happens so often happens now. slow_s(most): how long something takes.

    slots: of the policies that serve; "" is the deployment's own.
    """

    proves_staged = True

    def __init__(
        self, model_dir: Path, chance: Callable[[float], bool], slow_s: Callable[[float], float]
    ) -> None:
        self._model_dir = model_dir
        self.chance, self.slow_s = chance, slow_s
        self._alive = False
        self._own = SimSlot(self, "", Load(BASE_SNAPSHOT, 0, 0))
        self.slots: dict[str, SimSlot] = {}
        self._running: list[Choice] = []
        #: By salt and tokens, of whole blocks: KV, who computed it, and after how many commits.
        self._cached: dict[tuple[bytes, tuple[int, ...]], tuple[list[int], list[tuple[str, int]]]] = {}
        self._paused = False
        self._taking: InPlace | None = None
        self._work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None
        self._on_death: list[Callable[[str], Awaitable[None]]] = []
        self._generated = self._steps = self._prompted = self._reused = 0
        self.staging_fails = 0.0
        #: It does nothing before that time.
        self.stalled_until = 0.0
        #: Whether a stream that it is to go on with costs it its life, before the first event.
        self.killed_by: Callable[[GenerateRequest], bool] = lambda request: False
        #: Told as a snapshot comes to serve.
        self.committed: Callable[[str], None] = lambda snapshot: None

    # -- the port

    async def start(self) -> ModelInfo:
        await asyncio.sleep(self.slow_s(0.2))
        self._alive, self._paused = True, False
        if self._taking is not None:
            self._taking.began()
        base = Load(BASE_SNAPSHOT, of_directory(self._model_dir), self._own.load.commits)
        self._own = SimSlot(self, "", base)
        self.slots = {"": self._own}
        self._cached.clear()
        self._running.clear()
        self._stepping = asyncio.create_task(self._step_on(), name="engine")
        return ModelInfo(
            max_model_len=CONTEXT,
            vocab_size=VOCAB,
            moe_layers=LAYERS,
            top_k=TOP_K,
            num_experts=EXPERTS,
            card=self._card(),
        )

    def _card(self) -> EngineCard:
        card = EngineCard(kind="sim", features=FEATURES)
        taking = self._taking
        return card if taking is None else replace(card, weight_transfer=BACKEND, ranks=taking.ranks)

    def takes_in_place(
        self, ranks: int, receivers: Receivers, piece_bytes: int, killed: Callable[[], None]
    ) -> None:
        """Before its first start. killed: is called when its fence kills it."""
        self._taking = InPlace(self, ranks, receivers, piece_bytes, killed)
        self.in_place = self._taking.fence
        # What a trainer wrote cannot be scored before it serves.
        self.proves_staged = False

    def overwrite(self, written: int) -> None:
        """What serves is a mixture from now on."""
        load = self._own.load
        self._own.load = load._replace(weights=mixed(load.weights, written))

    def wake(self) -> None:
        self._work.set()

    async def close(self) -> None:
        self._alive = False
        if self._taking is not None:
            self._taking.ended("the engine is gone")
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
            self._stepping = None
        self._end_all()

    async def die(self, reason: str) -> None:
        """By itself, as a crashed engine does."""
        if self._alive:
            await self.close()
            for callback in self._on_death:
                await callback(reason)

    def slot(self, policy: str) -> Slot:
        return SimSlot(self, policy, Load(BASE_SNAPSHOT, 0, 0))

    def end_policy(self, policy: str) -> None:
        self.slots.pop(policy, None)

    @property
    def running(self) -> list[GenerateRequest]:
        return [one.request for one in self._running]

    def running_of(self, slot: SimSlot) -> int:
        return sum(one.slot is slot for one in self._running)

    async def generate(
        self, request: GenerateRequest, at_once: AtOnce | None = None
    ) -> AsyncIterator[GenerationEvent]:
        if not self._alive:
            raise EngineDied("the engine is not there")
        life = self._own
        if request.policy:
            # An engine is another process. What is said to it waits for the step that it is at, and some steps are long.
            await asyncio.sleep(self.slow_s(1.0 if self.chance(0.1) else 0.02))
            if not self._alive or self._own is not life:
                raise EngineDied("the engine is gone")
        slot = self.slots.get(request.policy)
        fixed = None if slot is None or request.snapshot is None else slot.held.get(request.snapshot)
        if slot is None or (request.snapshot is not None and fixed is None):
            yield GenerationEvent(error=f"no such weights: {request.policy}@{request.snapshot}")
            return
        if request.emitted and self.killed_by(request):
            await self.die("the stream that it was to go on with killed it")
            raise EngineDied("the engine is gone")
        events = RequestEvents(request, at_once)
        mine = [
            Choice(request, choice, slot, [*request.prompt, *request.emitted_of(choice)], events, fixed=fixed)
            for choice in request.choices
        ]
        for sequence in mine:
            sequence.made = len(request.emitted_of(sequence.choice))
        self._running += mine
        self._work.set()
        try:
            while (event := await events.next()) is not None:
                yield event
        finally:
            self._running = [one for one in self._running if one not in mine]

    def end_choice(self, request_id: str, index: int) -> None:
        for one in list(self._running):
            if one.request.request_id == request_id and one.choice == index:
                self._running.remove(one)
                one.events.put(GenerationEvent(index=index, finish="abort"))

    async def stage(self, snapshot: str, directory: Path) -> None:
        taking = self._taking
        if taking is not None and (file := taking.holds(directory)) is not None:
            found = taking.weights(file)
            # Others are of no snapshot.
            self._own.staged_there(snapshot, 1 if found is None else found)
        else:
            await self._own.stage(snapshot, directory)

    def drop_staged(self) -> None:
        self._own.drop_staged()

    async def commit(self, snapshot: str) -> SwapTiming:
        if self._taking is None:
            return await self._own.commit(snapshot)
        async with self._taking.lock:
            timing = await self._own.commit(snapshot)
            self._taking.switched()
            return timing

    def unfit(self, snapshot: str) -> None:
        if self._taking is not None:
            self._taking.fence.give_up_written(f"{snapshot} could not be switched to")

    def retain(self, snapshots: Collection[str]) -> None:
        self._own.retain(snapshots)

    async def weights_digest(self) -> str | None:
        return await self._own.weights_digest()

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._work.set()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            kv=KvStats(block_tokens=16, total=KV_BLOCKS),
            prompt_tokens=self._prompted,
            cached_prompt_tokens=self._reused,
            generated_tokens=self._generated,
            steps=self._steps,
        )

    def on_death(self, callback: Callable[[str], Awaitable[None]]) -> None:
        self._on_death.append(callback)

    # -- steps

    @property
    def _stands_still(self) -> bool:
        return self._paused or (self._taking is not None and self._taking.still)

    async def awake(self) -> None:
        """It goes on when it does not stand still."""
        loop = asyncio.get_running_loop()
        # Calm weather may end it early, so it is polled.
        while loop.time() < self.stalled_until:  # noqa: ASYNC110
            await asyncio.sleep(min(0.5, self.stalled_until - loop.time() + 0.001))

    def check(self) -> None:
        if not self._alive:
            raise EngineDied("the engine is gone")

    def _end_all(self) -> None:
        running, self._running = self._running, []
        for sequence in running:
            sequence.events.fail(EngineDied("the engine is gone"))

    async def _step_on(self) -> None:
        while True:
            if self._stands_still or not self._running:
                self._work.clear()
                await self._work.wait()
                continue
            await asyncio.sleep(0.004 + self.slow_s(0.012))
            await self.awake()
            if not self._stands_still:
                self._steps += 1
                for sequence in list(self._running):
                    self._step(sequence)

    def _step(self, one: Choice) -> None:
        request, load = one.request, one.load
        prompt: tuple[TokenRecord, ...] | None = None
        cached: int | None = None
        if not one.begun:
            one.begun = True
            cached, prompt = self._read_prompt(one)
        records: tuple[TokenRecord, ...] = ()
        finish = None
        if one.made < request.sampling.max_tokens:
            self._compute(one, len(one.tokens))
            records = (self._draw(one),)
        if one.made >= request.sampling.max_tokens:
            finish = "length"
            self._running.remove(one)
            self._keep(one)
        kv = None
        if request.want_kv_snapshots:
            spans = one.spans()
            grown = one.told and spans[:-1] == one.told[:-1] and spans[-1][:2] == one.told[-1][:2]
            if not grown or finish:
                kv = spans
            one.told = spans
        one.events.put(
            GenerationEvent(
                index=one.choice,
                tokens=records,
                prompt=prompt,
                cached_tokens=cached,
                queued_s=0.0 if cached is not None else None,
                finish=finish,  # type: ignore[arg-type]
                kv_snapshots=kv,
            )
        )
        assert load == one.load

    def _read_prompt(self, one: Choice) -> tuple[int, tuple[TokenRecord, ...] | None]:
        """Cached positions, and the records of the prompt's last tokens where they are asked for."""
        request = one.request
        reused = 0
        wanted = request.prompt_records
        for count in range((len(one.tokens) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            if count > len(request.prompt) - wanted - 1 and wanted:
                continue
            found = self._cached.get((request.salt, tuple(one.tokens[:count])))
            if found is not None and self._young(one, found[1], request.kv_age_max):
                one.kv, one.by = list(found[0]), list(found[1])
                reused = count
                break
        self._prompted += len(request.prompt)
        self._reused += reused
        prompt = None
        if wanted:
            prompt = self._score_prompt(one, wanted)
        return min(reused, len(request.prompt)), prompt

    def _young(self, one: Choice, by: Sequence[tuple[str, int]], most: int | None) -> bool:
        now = one.load.commits
        return all(at <= now and (most is None or now - at <= most) for _, at in by)

    def _score_prompt(self, one: Choice, wanted: int) -> tuple[TokenRecord, ...]:
        records = []
        count = len(one.request.prompt)
        for position in range(count - wanted, count):
            token = one.tokens[position]
            if position == 0:
                records.append(TokenRecord(token, 0.0, None, one.load.snapshot))
                continue
            self._compute(one, position)
            records.append(self._record(one, position, token, None))
        return tuple(records)

    def _compute(self, one: Choice, count: int) -> None:
        """KV of the first `count` positions."""
        kv, load = one.kv[-1] if one.kv else 0, one.load
        for position in range(len(one.kv), count):
            kv = kv_after(kv, one.tokens[position], load.weights)
            one.kv.append(kv)
            one.by.append((load.snapshot, load.commits))

    def _draw(self, one: Choice) -> TokenRecord:
        position, weights = len(one.tokens), one.load.weights
        token = drawn(one.kv[-1], weights, one.request.sampling.seed, one.choice, position)
        record = self._record(one, position, token, scored(one.kv[-1], weights, token))
        one.tokens.append(token)
        one.made += 1
        self._generated += 1
        return record

    def _record(self, one: Choice, position: int, token: int, sampling: float | None) -> TokenRecord:
        kv, load = one.kv[position - 1], one.load
        route = routed(kv, load.weights) if one.request.want_routes else None
        wants = sampling is not None and one.request.want_masks
        mask = masked(kv, load.weights, token) if wants else None
        return TokenRecord(token, scored(kv, load.weights, token), sampling, load.snapshot, route, mask=mask)

    def _keep(self, one: Choice) -> None:
        for count in range(BLOCK, len(one.kv) + 1, BLOCK):
            key = (one.request.salt, tuple(one.tokens[:count]))
            self._cached[key] = (one.kv[:count], one.by[:count])


def of_directory(directory: Path) -> int:
    return weights_of((file.name, file.read_bytes()) for file in directory.iterdir())


def expected(
    tokens: Sequence[int],
    first: int,
    labels: Sequence[str],
    spans: Iterable[tuple[str, int, int]],
    weights: Callable[[str], int],
) -> list[tuple[float, bytes, bytes]]:
    """Logprob, route and mask of the tokens from `first` on, whose labels are these, over KV computed as `spans` say."""
    by = [snapshot for snapshot, start, end in spans for _ in range(start, end)]
    kv, found = 0, []
    for position in range(len(tokens)):
        if position >= first:
            of = weights(labels[position - first])
            token = tokens[position]
            found.append((scored(kv, of, token), routed(kv, of), masked(kv, of, token)))
        if position < len(by):
            kv = kv_after(kv, tokens[position], weights(by[position]))
    return found
