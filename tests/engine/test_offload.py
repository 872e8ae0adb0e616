"""The second tier of the KV cache: with it, a small cache does what a large one does, bit for bit, and computes as little."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_matching as matching
from adapter_helpers import ATTENTION, MLP, adapted, write_adapter
from engine_helpers import Collected, needs_compiler, offload_of, request, run
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from msgspec.structs import replace
from test_claims import BLOCK, prompt_of
from test_claims import Bed as ClaimsBed
from tiers import examples
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.core.errors import ConfigError
from midstream.core.types import GenerateRequest
from midstream.engine.embedded.blocks import BlockPool
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.engine import EmbeddedEngine
from midstream.engine.embedded.offload import MEASURED, RETRY, SHARE_MIN, CopyPrice, Offload
from midstream.engine.embedded.scheduler import Scheduler
from midstream.replica.namespaces import Namespaces, cache_salt


def nothing(source: int, target: int) -> None:
    pass


class Tiered(matching.Thorough):
    """The scheduler before a pool of 11 blocks and a second tier of 8, whose content is moved as the engine would move it."""

    def __init__(self) -> None:
        super().__init__()
        first = self.scheduler.pool.total + 1
        self.offload = Offload(first, 8, move=self.move, merge=nothing)
        self.scheduler.pool = BlockPool(first, matching.SIZE, self.offload)
        self.scheduler.claims._pool = self.scheduler.pool

    def move(self, source: int, target: int) -> None:
        for offset in range(matching.SIZE):
            self.slots[target * matching.SIZE + offset] = self.slots.pop(source * matching.SIZE + offset)

    @rule(policy=st.sampled_from(["", "other"]))
    def abandon(self, policy: str) -> None:
        self.scheduler.pool.drop_offloaded(lambda epoch: policy in self.owner[epoch])

    @rule(tokens=st.integers(1, 4))
    def price(self, tokens: int) -> None:
        """Of a copied token, computed ones. Dearer ones are not copied, and cheaper ones more of a step."""
        self.offload.price = CopyPrice()
        self.offload.price.computed(tokens, 1.0)
        self.offload.price.copied(2, 1.0)

    @invariant()
    def what_is_still_to_be_copied_stands_behind_what_is_there(self) -> None:
        for seq in self.scheduler.running:
            for place in seq.ahead[:-1]:
                assert place.parent in seq.ahead
            if seq.ahead and seq.path:
                assert seq.ahead[-1].parent is seq.path[-1]
        ahead = {place.block for seq in self.scheduler.running for place in seq.ahead}
        assert set(self.offload._pinned) <= ahead, "what nothing waits for is pinned"


TestTiered = Tiered.TestCase
TestTiered.settings = hypothesis_settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


class Bed(ClaimsBed):
    """A second tier besides."""

    def __init__(self, blocks: int, offloaded: int, **more: Any) -> None:
        super().__init__(blocks, **more)
        self.offload = Offload(blocks + 1, offloaded, move=nothing, merge=nothing)
        before = self.scheduler
        self.pool = BlockPool(blocks + 1, BLOCK, self.offload)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=256,
            max_prefill_tokens=64,
            max_running=8,
            scored=lambda block, offset, epoch: False,
            on_allocate=lambda block: None,
            clock=lambda: self.now,
        )
        self.scheduler.track = before.track


def turns(bed: ClaimsBed, *, sessions: int, turns: int) -> int:
    """As test_claims.computed_in: how many tokens of prompts were computed."""
    computed = 0
    for turn in range(turns):
        for session in range(sessions):
            bed.now += 0.1
            prompt = prompt_of(session, 16 + 8 * turn)
            computed += bed.turn(f"s{session}", prompt, returns_s=0.1 * sessions)
    return computed


def test_sessions_that_do_not_fit_compute_each_token_once_where_the_second_tier_has_room() -> None:
    shape = {"sessions": 8, "turns": 8}
    ideal = 8 * 72
    assert turns(ClaimsBed(86), **shape) == 1048
    with_room = Bed(86, 100)
    assert turns(with_room, **shape) == ideal
    kv = with_room.kv()
    assert (kv.restored_tokens > 0, kv.dropped_tokens, kv.again_tokens) == (True, 0, 0)
    assert (kv.offload_total, kv.capacity_tokens) == (100, 186 * BLOCK)
    with_room.offload.price.computed(1, 1.0)
    with_room.offload.price.copied(1, 1.5)
    assert with_room.kv().capacity_tokens == 86 * BLOCK, "sessions were let in for a tier that is too slow"
    assert ideal < turns(Bed(86, 20), **shape) < 1048


def test_what_an_ended_session_had_alone_is_not_offloaded_and_goes_first_where_it_was() -> None:
    bed = Bed(12, 6)
    bed.turn("ends", prompt_of(0, 16))
    bed.turn("stays", prompt_of(1, 16))
    # Takes 10 blocks: 2 are free, and the others come from both sessions.
    bed.turn("", prompt_of(2, 39))
    assert len(bed.offload) == 6
    bed.scheduler.end_session("ends")
    before = bed.offload.dropped
    bed.turn("", prompt_of(3, 12))
    assert bed.turn("stays", prompt_of(1, 17)) == 1, "a live session's KV went before that of one that ended"
    assert bed.offload.dropped > before
    bed = Bed(12, 6)
    bed.turn("ends", prompt_of(0, 16))
    bed.scheduler.end_session("ends")
    bed.turn("", prompt_of(2, 39))
    assert len(bed.offload) == 0


def test_a_long_restore_is_spread_over_steps_and_a_stream_goes_on_meanwhile() -> None:
    bed = Bed(120, 120)
    bed.turn("long", prompt_of(0, 400))
    bed.turn("", prompt_of(1, 440))
    stream = bed.begin("", prompt_of(2, 4))
    bed.step()
    assert stream.generated == 1
    again = bed.begin("long", prompt_of(0, 401))
    given = 0
    while again.generated == 0:
        bed.step()
        given += 1
        if stream.generated < 4:
            assert stream.generated == 1 + given, "a stream stood still"
        if stream.generated == 4 and stream in bed.scheduler.running:
            bed.scheduler.remove(stream)
    # 64 tokens of a step with a decode, and 256 of another.
    assert given >= 3
    assert again.cached_tokens == 400
    bed.scheduler.remove(again)
    bed.check()


def test_what_goes_while_it_is_waited_for_is_computed() -> None:
    bed = Bed(120, 120)
    bed.turn("long", prompt_of(0, 400))
    bed.turn("", prompt_of(1, 440))
    again = bed.begin("long", prompt_of(0, 441))
    bed.step()
    assert again.ahead
    bed.pool.drop_offloaded(lambda epoch: True)
    computed = 0
    while again.generated == 0:
        computed += bed.step()
    assert 0 < (again.cached_tokens or 0) < 400
    assert computed == 441 - (again.cached_tokens or 0)
    bed.scheduler.remove(again)
    bed.check()


def test_copies_that_become_slow_hold_a_step_up_for_few_blocks() -> None:
    bed = Bed(120, 120)
    bed.turn("long", prompt_of(0, 400))
    bed.turn("", prompt_of(1, 440))
    price = bed.offload.price
    price.computed(1000, 1.0)
    for _ in range(50):
        price.copied(BLOCK, 1e-6)

    def cold(source: int, target: int) -> None:
        if source > bed.pool.total:
            price.copied(BLOCK, 0.1)

    # By what was measured, a step may copy all.
    bed.offload.move = cold
    again = bed.begin("long", prompt_of(0, 401))
    bed.step()
    assert 0 < bed.offload.restored < 10
    bed.scheduler.remove(again)
    bed.check()


def test_a_copy_that_is_made_to_measure_again_is_short() -> None:
    bed = Bed(120, 120)
    bed.turn("long", prompt_of(0, 400))
    bed.turn("", prompt_of(1, 440))
    bed.offload.price.computed(4, 1.0)
    bed.offload.price.copied(4, 20.0)
    bed.offload.price._refused = RETRY - 1
    again = bed.begin("long", prompt_of(0, 401))
    while again.generated == 0:
        bed.step()
    assert 0 < bed.offload.restored <= MEASURED
    bed.scheduler.remove(again)
    bed.check()


def test_a_copy_that_costs_more_than_computing_is_seldom_made() -> None:
    price = CopyPrice()
    assert price.worth()
    price.copied(16, 1.0)
    assert (price.worth(), price.share) == (True, 1.0), "nothing was computed yet"
    price.computed(16, 0.5)
    assert price.share == 2.0
    assert [price.worth() for _ in range(2 * RETRY)].count(True) == 2
    for _ in range(50):
        price.copied(16, 0.001)
    assert price.worth()
    assert SHARE_MIN <= price.share < 0.1


Salt = Callable[[tuple[str, str] | None], bytes]
FLIPS: tuple[tuple[Any, int | None], ...] = (
    ("none", None),
    ("none", 0),
    ("none", 1),
    ("new_session", None),
    ("all", None),
)
VOCABULARY = 128


class Twin:
    """One engine after the other is asked the same. What it says is `said`."""

    def __init__(self, core: EngineCore, staged: dict[str, Path], seed: int) -> None:
        self.core, self.staged = core, staged
        self.rng = random.Random(seed)
        self.namespaces = {"": Namespaces(), "lora": Namespaces()}
        self.said: list[Any] = []
        self.computed = 0
        self.histories: dict[str, list[int]] = {}
        trunk = [self.rng.randrange(VOCABULARY) for _ in range(64)]
        self.trunks = [trunk, trunk[:32] + [self.rng.randrange(VOCABULARY) for _ in range(64)]]

    def turn(self, number: int) -> None:
        rng = self.rng
        policy, session = rng.choice(["", "", "lora"]), rng.choice(["a", "b", "c", "d", "e", "f"])
        key = f"{policy}/{session}"
        before = self.histories.get(key) or rng.choice(self.trunks)[: rng.randrange(20, 97)]
        prompt = [*before, *[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))]][-200:]
        echo = rng.choice((0, 0, len(prompt), rng.randrange(len(prompt))))
        sampled = {"temperature": rng.choice((0.0, 1.0)), "max_tokens": rng.randrange(1, 24)}
        namespaces = self.namespaces[policy]
        salt = cache_salt(namespaces.admit(("", session)), "", "", policy or "base")
        asked = request(
            f"r{number}", prompt, echo=echo, seed=number, n=rng.choice((1, 1, 2)), salt=salt, **sampled
        )
        asked = replace(
            asked,
            policy=policy,
            session=key,
            returns_s=rng.choice((0.0, 5.0)),
            kept_s=30.0,
            kv_age_max=namespaces.kv_age_max,
            want_kv_snapshots=True,
        )
        found = run(self.core, [asked])
        self.histories[key] = [*prompt, *[t.token_id for t in found[f"r{number}", 0].tokens]]
        self.said += [self.numbers(each) for each in found.values()]
        first = found[f"r{number}", 0]
        self.computed += len(prompt) - (first.cached or 0)

    def swap(self, number: int) -> None:
        policy, (reset, age) = self.rng.choice(["", "lora"]), self.rng.choice(FLIPS)
        staged = self.core.stage(
            self.rng.choice(list(self.staged.values())) if not policy else self.staged["lora"]
        )
        self.core.set_staged(staged, policy)
        self.core.commit(f"{policy}step-{number}", policy)
        self.namespaces[policy].commit(reset, age)
        if reset == "all":
            self.core.abandon_kv(policy)

    def numbers(self, found: Collected) -> Any:
        assert found.error is None
        rows = [
            (t.token_id, t.logprob, t.sampling_logprob, t.snapshot, t.route, t.near_tie)
            for t in (*found.prompt, *found.tokens)
        ]
        return rows, found.cached, found.kv, found.finish


def lora(base: Path, place: Path) -> Path:
    module = AutoModelForCausalLM.from_pretrained(base)
    write_adapter(adapted(module, 3, r=4, target_modules=[*ATTENTION, *MLP]), place / "lora")
    return place / "lora"


@pytest.mark.parametrize(
    ("kernels", "to", "count"), [("native", "memory", 70), ("native", "disk", 70), ("torch", "memory", 25)]
)
def test_a_small_cache_with_a_second_tier_says_what_a_large_one_says_bit_for_bit(
    tmp_path: Path, tiny_model: Callable[..., Path], kernels: str, to: Any, count: int
) -> None:
    """Over evictions, swaps of each cache policy, adapters, and echoes of prompts. And it computes no token more."""
    needs_compiler(kernels)
    base, other = tiny_model(), tiny_model(seed=1)
    staged = {"base": base, "other": other, "lora": lora(base, tmp_path)}
    twins = []
    for tokens, memory in ((65536, None), (480, "64MiB"), (480, None)):
        asked = EngineSettings(
            kernels=kernels, kv_cache_tokens=tokens, kv_offload_memory=memory, kv_offload_to=to
        )
        twin = Twin(EngineCore(base, asked, tmp_path), staged, seed=11)
        if memory is not None:
            offload_of(twin.core)
        twin.core.set_staged(twin.core.stage(staged["lora"]), "lora")
        twin.core.commit("lora-0", "lora")
        for number in range(count):
            twin.turn(number)
            if number % 9 == 8:
                twin.swap(number)
        twins.append(twin)
    large, tiered, small = twins
    for number, (one, two) in enumerate(zip(large.said, tiered.said, strict=True)):
        assert one == two, f"choice {number} differs"
    kv = tiered.core.stats().kv
    assert kv.restored_tokens > 100, f"little was restored: {kv}"
    assert large.computed == tiered.computed < small.computed
    assert len({name for _, _, spans, _ in tiered.said for name, _, _ in spans}) > 2
    assert not any(path.suffix == "" and path.is_file() for path in tmp_path.iterdir())


def asked(name: str, prompt: list[int], salt: bytes = b"") -> GenerateRequest:
    return replace(request(name, prompt, echo=0, max_tokens=2, salt=salt), want_kv_snapshots=True)


def test_a_restored_block_of_another_snapshot_is_found_by_the_engines_own_check(
    tiny_model: Callable[..., Path],
) -> None:
    """The fault is planted: what is copied back is another block than the one that the tree names."""
    core = EngineCore(tiny_model(), EngineSettings(kv_cache_tokens=160, kv_offload_memory="1MiB"))
    prompts = [random.Random(n).choices(range(VOCABULARY), k=100) for n in range(3)]
    run(core, [asked("base", prompts[0])])
    core.set_staged(core.stage(tiny_model(seed=1)))
    core.commit("s1")
    run(core, [asked("s1", prompts[1])])
    run(core, [asked("more", prompts[2])])
    offload = offload_of(core)
    wrong, right = sorted(offload._kept)[-1], offload.move
    offload.move = lambda source, target: right(wrong if source > core.pool.total else source, target)
    with pytest.raises(AssertionError, match="was not computed by the weights"):
        run(core, [asked("again", prompts[0])])


def test_an_engine_process_keeps_what_it_evicts_in_a_file_and_copies_it_back(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    prompts = [random.Random(n).choices(range(VOCABULARY), k=100) for n in range(3)]

    async def says(engine: EmbeddedEngine, name: str, prompt: list[int]) -> Any:
        events = [event async for event in engine.generate(asked(name, prompt))]
        kv = [event.kv_snapshots for event in events if event.kv_snapshots]
        cached = next(event.cached_tokens for event in events if event.cached_tokens is not None)
        return [(t.token_id, t.logprob) for event in events for t in event.tokens], kv, cached

    async def main() -> None:
        told = EngineSettings(kv_cache_tokens=160, kv_offload_memory="1MiB", kv_offload_to="disk")
        engine = EmbeddedEngine(tiny_model(), told, tmp_path)
        await engine.start()
        try:
            first = [await says(engine, f"a{n}", prompt) for n, prompt in enumerate(prompts)]
            again = [await says(engine, f"b{n}", prompt) for n, prompt in enumerate(prompts)]
            assert [each[:2] for each in again] == [each[:2] for each in first]
            assert again[0][2] == 96, "the first is copied back whatever the machine measured"
            restored = engine.stats().kv.restored_tokens
            assert restored > 0
            engine.abandon_kv()
            last = await says(engine, "c", prompts[0])
            assert last[2] < 96, "what was abandoned came back"
            assert engine.stats().kv.restored_tokens == restored
        finally:
            await engine.close()

    asyncio.run(main())
    assert os.listdir(tmp_path) == []


def test_a_tier_of_less_than_a_block_and_a_folder_without_room_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="kv_offload_memory 1KiB: a block of the KV cache has"):
        EngineCore(tiny_model(), EngineSettings(kv_cache_tokens=160, kv_offload_memory="1KiB"))
    told = EngineSettings(kv_cache_tokens=160, kv_offload_memory="1MiB", kv_offload_to="disk")
    with pytest.raises(ConfigError, match=r"kv_offload_memory: .* bytes in .*nowhere"):
        EngineCore(tiny_model(), told, tmp_path / "nowhere")
    EngineCore(tiny_model(), told, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("size", "to"),
    [("100000000GiB", "memory"), ("99999999999999GiB", "memory"), ("99999999999999GiB", "disk")],
)
def test_a_tier_that_no_machine_has_memory_for_is_refused_by_name(
    tiny_model: Callable[..., Path], tmp_path: Path, size: str, to: Any
) -> None:
    told = EngineSettings(kv_cache_tokens=160, kv_offload_memory=size, kv_offload_to=to)
    with pytest.raises(ConfigError, match=r"kv_offload_memory: \d+ bytes"):
        EngineCore(tiny_model(), told, tmp_path)
    assert os.listdir(tmp_path) == []
