"""What midstream's scheduler of vLLM says of KV, beside a pool of blocks whose every slot says what computed it, and over what.

The scheduler under it is of the form of vLLM's: it caches full blocks by their tokens alone, finds any of several that are
equal, preempts, evicts, and computes prompts in pieces. Here a step may be over when the next one has begun.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from midstream.engine.vllm.arguments import WORKER_DIR
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import ANY_AGE, KV

SIZE, BLOCKS, PIECE = 3, 12, 4


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """As vLLM imports it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(WORKER_DIR))
        yield importlib.import_module("midstream_vllm_provenance")


@dataclass(eq=False)
class Block:
    block_id: int
    key: Any = None
    users: int = 0
    # Of each slot: the epoch, the token, and the same of the slot before.
    slots: list[Any] = field(default_factory=lambda: [None] * SIZE)


@dataclass(eq=False)
class Asked:
    request_id: str
    tokens: list[int]
    prompt: int
    wanted: int
    age_max: int = ANY_AGE
    told: bool = True
    policy: str = ""
    num_computed_tokens: int = 0
    blocks: list[Block] = field(default_factory=list)
    full: int = 0
    found: int = 0
    # In steps that are not over.
    in_flight: int = 0

    @property
    def sampling_params(self) -> Any:
        asks = self.told or self.age_max != ANY_AGE
        return SimpleNamespace(extra_args={KV: (int(self.told), self.age_max)} if asks else None)

    @property
    def lora_request(self) -> Any:
        return SimpleNamespace(lora_name=f"{self.policy}@1.b") if self.policy else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def block_hashes(self) -> list[tuple[Any, ...]]:
        of = (self.policy,) if self.policy else ()
        return [(*of, *self.tokens[:end]) for end in range(SIZE, len(self.tokens) + 1, SIZE)]

    def is_finished(self) -> bool:
        return self.num_output_tokens >= self.wanted


class Pool:
    def __init__(self) -> None:
        self.free = [Block(i) for i in range(BLOCKS)]
        self.cached_block_hash_to_block = SimpleNamespace(_cache={})

    def take(self) -> Block:
        block = self.free.pop(0)
        self._forget(block)
        block.slots = [None] * SIZE
        return block

    def _forget(self, block: Block) -> None:
        cache = self.cached_block_hash_to_block._cache
        found = cache.pop(block.key, None)
        if isinstance(found, dict):
            found.pop(block.block_id)
            if found:
                cache[block.key] = found
        block.key = None

    def cache_full_blocks(
        self, *, request: Asked, blocks: list[Block], num_cached_blocks: int, num_full_blocks: int
    ) -> None:
        cache = self.cached_block_hash_to_block._cache
        for number in range(num_cached_blocks, num_full_blocks):
            block, key = blocks[number], (request.block_hashes[number], 0)
            block.key = key
            known = cache.get(key)
            if known is None:
                cache[key] = block
            else:
                several = known if isinstance(known, dict) else {known.block_id: known}
                cache[key] = several | {block.block_id: block}


class FullAttentionSpec:
    non_causal = False


class FullAttentionManager:
    block_size = SIZE

    def __init__(self) -> None:
        self.kv_cache_spec: Any = FullAttentionSpec()


class UnitaryKVCacheCoordinator:
    def __init__(self) -> None:
        self.single_type_managers = [FullAttentionManager()]

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int) -> Any:
        raise AssertionError("blocks would be found whatever they were computed over")


class Manager:
    def __init__(self) -> None:
        self.block_pool, self.coordinator = Pool(), UnitaryKVCacheCoordinator()

    def get_computed_blocks(self, request: Asked) -> Any:
        found, count, _ = self.coordinator.find_longest_cache_hit(
            request.block_hashes, len(request.tokens) - 1
        )
        return found[0], count, 0


class Scheduler:
    """Runs what it is given, all requests at once, and preempts the last of them."""

    return_sampling_mask = False

    def __init__(self) -> None:
        self.kv_cache_manager = Manager()
        self.vllm_config = SimpleNamespace(speculative_config=None)
        self.requests: dict[str, Asked] = {}
        self.running: list[Asked] = []
        self.waiting: list[Asked] = []
        self.preempted = 0
        # Epochs, and the policy whose adapter alone is another one; "" for all weights.
        self.began: list[tuple[int, str]] = []

    @property
    def pool(self) -> Pool:
        return self.kv_cache_manager.block_pool

    def schedule(self) -> Any:
        work: dict[str, int] = {}
        for request in list(self.running):
            if request in self.running and self._has_room(request, work):
                work[request.request_id] = self._size(request)
        while self.waiting and not self._admit(self.waiting[0], work):
            pass
        for name, count in work.items():
            request = self.requests[name]
            self._fill(request, count)
            request.num_computed_tokens += count
            request.in_flight += 1
        return SimpleNamespace(num_scheduled_tokens=work, samples=self._sampled(work))

    def _sampled(self, work: dict[str, int]) -> list[str]:
        return [n for n in work if self.requests[n].num_computed_tokens >= len(self.requests[n].tokens)]

    def _size(self, request: Asked) -> int:
        return max(min(len(request.tokens) - request.num_computed_tokens, PIECE), 0)

    def _has_room(self, request: Asked, work: dict[str, int]) -> bool:
        size = self._size(request)
        if not size:
            return False
        while len(request.blocks) * SIZE < request.num_computed_tokens + size:
            while not self.pool.free:
                victim = self.running[-1]
                work.pop(victim.request_id, None)
                self._preempt(victim)
                if victim is request:
                    return False
            request.blocks.append(self.pool.take())
        return True

    def _admit(self, request: Asked, work: dict[str, int]) -> bool:
        """True if no other one is to be looked at."""
        if request.in_flight:
            return True
        found, count, _ = self.kv_cache_manager.get_computed_blocks(request)
        needed = -(-min(count + PIECE, len(request.tokens)) // SIZE) - len(found)
        unused = [block for block in found if not block.users]
        if needed > len(self.pool.free) - len(unused):
            return True
        for block in unused:
            self.pool.free.remove(block)
        for block in found:
            block.users += 1
        request.blocks, request.full, request.num_computed_tokens = list(found), len(found), count
        request.found = count
        if request.age_max != ANY_AGE:
            later = self.epochs(request)
            ages = [sum(e > self.value(request, p)[0] for e in later) for p in range(count)]
            assert max(ages, default=0) <= request.age_max
        self.waiting.remove(request)
        self.running.append(request)
        assert self._has_room(request, work)
        work[request.request_id] = self._size(request)
        return False

    def _fill(self, request: Asked, count: int) -> None:
        for position in range(request.num_computed_tokens, request.num_computed_tokens + count):
            block = request.blocks[position // SIZE]
            before = self.value(request, position - 1) if position else None
            block.slots[position % SIZE] = (self.epochs(request)[-1], request.tokens[position], before)
            block.users = max(block.users, 1)
        full = (request.num_computed_tokens + count) // SIZE
        self.pool.cache_full_blocks(
            request=request, blocks=request.blocks, num_cached_blocks=request.full, num_full_blocks=full
        )
        request.full = max(request.full, full)

    def epochs(self, request: Asked) -> list[int]:
        """That began for all, or for its policy."""
        return [epoch for epoch, policy in self.began if policy in ("", request.policy)]

    def value(self, request: Asked, position: int) -> Any:
        return request.blocks[position // SIZE].slots[position % SIZE]

    def _release(self, request: Asked) -> None:
        for block in reversed(request.blocks):
            block.users -= 1
            if block.users <= 0:
                block.users = 0
                self.pool.free.append(block)
        request.blocks, request.full, request.num_computed_tokens = [], 0, 0

    def _preempt(self, request: Asked) -> None:
        self.preempted += 1
        self.running.remove(request)
        self._release(request)
        self.waiting.insert(0, request)

    def update_from_output(self, step: Any, values: dict[str, int]) -> Any:
        outputs = []
        for name, token in values.items():
            request = self.requests[name]
            request.tokens.append(token)
            outputs.append(SimpleNamespace(request_id=name, new_token_ids=[token], new_sampling_mask=None))
            if request.is_finished():
                (self.running if request in self.running else self.waiting).remove(request)
                self._release(request)
                del self.requests[name]
        return {0: SimpleNamespace(outputs=outputs)}


class Core:
    scheduler: Any

    def set_weight_version(self, version: str) -> None:
        self.version = version


@dataclass
class Seen:
    """What a request was told. now: spans that hold for its next token."""

    now: tuple[tuple[int, int], ...] = ()
    tellings: int = 0


class World:
    """A scheduler with a history, and the steps that are not over: each with what it computed before its tokens."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        core = type("EngineCore", (Core,), {})
        fields = SimpleNamespace(__struct_fields__=("new_sampling_mask",))
        modules = {
            module.CORE: SimpleNamespace(EngineCore=core),
            module.OUTPUT: SimpleNamespace(EngineCoreOutput=fields),
            module.LISTS: SimpleNamespace(SamplingMaskLists=lambda ids: [ids.tolist()]),
            "vllm.v1.core.kv_cache_utils": SimpleNamespace(
                make_block_hash_with_group_id=lambda key, group: (key, group)
            ),
        }
        for name, stub in modules.items():
            monkeypatch.setitem(sys.modules, name, stub)
        self.scheduler = module.telling(Scheduler)()
        assert self.scheduler.midstream_history is not None
        self.core = core()
        self.core.scheduler = self.scheduler
        self.seen: dict[str, Seen] = {}
        self.requests: dict[str, Asked] = {}
        self.steps: deque[tuple[Any, dict[str, Any]]] = deque()
        self.checked = self.changed = 0
        self.name(0)

    def name(self, epoch: int, policy: str = "") -> None:
        """In a pause: all steps are over."""
        while self.steps:
            self.finish()
        self.scheduler.began.append((epoch, policy))
        self.core.set_weight_version(f"{epoch} {policy}:step" if policy else f"{epoch}:step-{epoch}")

    def ask(self, prompt: list[int], **more: Any) -> Asked:
        name = f"r{len(self.requests)}"
        asked = Asked(name, list(prompt), len(prompt), **{"wanted": 1, **more})
        self.requests[name] = self.scheduler.requests[name] = asked
        self.scheduler.waiting.append(asked)
        self.seen[name] = Seen()
        return asked

    def begin(self) -> None:
        step = self.scheduler.schedule()
        computed = {}
        for name in step.samples:
            request = self.requests[name]
            last = request.num_computed_tokens - 1
            computed[name] = (last, self.scheduler.value(request, last))
        self.steps.append((step, computed))

    def finish(self) -> None:
        step, computed = self.steps.popleft()
        for name in step.num_scheduled_tokens:
            self.requests[name].in_flight -= 1
        tokens = {n: (sum(self.requests[n].tokens) * 7 + 1) % 3 for n in computed}
        outputs = self.scheduler.update_from_output(step, tokens)
        for output in outputs[0].outputs:
            name, request = output.request_id, self.requests[output.request_id]
            seen = self.seen[name]
            if output.new_sampling_mask is not None:
                before, *flat = output.new_sampling_mask[0]
                assert before == request.num_output_tokens - 1
                seen.now = tuple(zip(flat[::2], flat[1::2], strict=True))
                seen.tellings += 1
            if request.told:
                self._check(request, seen, *computed[name])

    def _check(self, request: Asked, seen: Seen, last: int, value: Any) -> None:
        """What the spans say is what the slots say."""
        expected, epochs = None, iter([*seen.now, (None, last + 1)])
        (epoch, start), following = next(epochs), next(epochs)
        assert start == 0
        for position in range(last + 1):
            if position == following[1]:
                epoch, following = following[0], next(epochs)
            expected = (epoch, request.tokens[position], expected)
        assert value == expected
        self.checked += 1
        self.changed += len(seen.now) > 1


POLICIES = ("", "red", "blue")
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 5), st.integers(2, 16), st.integers(-1, 3)),
        st.tuples(st.just("begin"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("finish"), st.just(0), st.just(0), st.just(0)),
        st.tuples(st.just("name"), st.integers(0, 5), st.just(0), st.just(0)),
    ),
    max_size=120,
)


def run(world: World, ops: list[tuple[str, int, int, int]]) -> None:
    epoch = 0
    for what, family, size, age in ops:
        if what == "ask":
            # Prompts that begin alike.
            tokens = [*range(10, 10 + size - family % 2), *[family] * (family % 2)]
            policy = POLICIES[family % 3]
            world.ask(tokens, wanted=1 + size, age_max=age, told=family != 3, policy=policy)
        elif what == "begin" and len(world.steps) < 2:
            world.begin()
        elif what == "finish" and world.steps:
            world.finish()
        elif what == "name":
            epoch += 1
            world.name(epoch, POLICIES[family % 3])
    while world.scheduler.requests:
        if world.steps:
            world.finish()
        world.begin()


@given(OPS)
@settings(max_examples=examples(60), deadline=None)
def test_what_is_told_is_what_computed_every_position(module: Any, ops: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(World(module, monkeypatch), ops)


def test_many_requests_over_many_switches_and_preemptions(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(3)
    world = World(module, monkeypatch)
    ops: list[tuple[str, int, int, int]] = []
    for _ in range(900):
        what = chance.choices(("ask", "begin", "finish", "name"), (2, 8, 8, 1))[0]
        ops.append((what, chance.randrange(6), chance.randrange(2, 17), chance.choice((-1, -1, 0, 1, 2))))
    run(world, ops)
    assert world.scheduler.preempted > 20
    assert world.changed > 100
    assert world.checked > 400
    assert not world.scheduler.midstream_history._fresh


def served(world: World, asked: Asked) -> tuple[tuple[int, int], ...]:
    """What its first token was told."""
    while asked.request_id in world.scheduler.requests:
        world.begin()
        world.finish()
    return world.seen[asked.request_id].now


def test_cached_blocks_are_used_until_they_are_too_old(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = World(module, monkeypatch), list(range(10, 18))
    assert served(world, world.ask(prompt)) == ((0, 0),)
    world.name(1)
    # The last block is not full, so it is computed.
    assert served(world, world.ask(prompt, age_max=1)) == ((0, 0), (1, 6))
    world.name(2)
    assert served(world, world.ask(prompt, age_max=1)) == ((2, 0),)
    # Both are cached. Of chains of one length, the youngest is taken, and an older one where it is longer.
    assert served(world, world.ask(prompt)) == ((2, 0),)
    world.name(3)
    assert served(world, world.ask([*prompt, 1, 2, 3, 4], age_max=1)) == ((2, 0), (3, 6))
    assert served(world, world.ask(prompt, age_max=0)) == ((3, 0),)


def test_a_block_is_used_only_behind_those_that_it_was_computed_over(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, prompt = World(module, monkeypatch), list(range(10, 17))
    first = world.ask(prompt)
    served(world, first)
    cache = world.scheduler.pool.cached_block_hash_to_block._cache
    cache.pop((tuple(prompt[:3]), 0)).key = None
    world.name(1)
    # Another block of the first tokens, of new weights. The second one of the old weights still is there, and does not fit.
    assert served(world, world.ask(prompt[:4])) == ((1, 0),)
    assert (tuple(prompt[:6]), 0) in cache
    assert served(world, world.ask(prompt)) == ((1, 0),)


def test_weights_that_others_named_are_of_no_epoch(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = World(module, monkeypatch), list(range(10, 18))
    history = world.scheduler.midstream_history
    told = []
    for name in ("theirs", "others"):
        world.core.set_weight_version(name)
        told.append(history.epoch_of(None))
    assert len({*told, 0}) == 3
    assert max(told) < 0
    world.scheduler.began.append((told[1], ""))
    assert served(world, world.ask(prompt)) == ((told[1], 0),)


def test_a_switch_of_a_policy_is_one_of_its_own_requests_alone(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, prompt = World(module, monkeypatch), list(range(10, 18))
    streams = {policy: world.ask(prompt, wanted=4, policy=policy) for policy in POLICIES}
    for request in streams.values():
        while not request.num_output_tokens:
            world.begin()
            world.finish()
    world.name(1, "red")
    world.name(2)
    world.name(3, "blue")
    told = {policy: served(world, request) for policy, request in streams.items()}
    starts = {policy: spans[1][1] for policy, spans in told.items()}
    assert told == {
        "": ((0, 0), (2, starts[""])),
        "red": ((0, 0), (2, starts["red"])),
        "blue": ((0, 0), (3, starts["blue"])),
    }
    # An age is a count of switches that concern it.
    assert served(world, world.ask(prompt, age_max=1)) == ((0, 0), (2, 6))
    for age_max, expected in ((2, ((0, 0), (2, 6))), (1, ((2, 0),))):
        assert served(world, world.ask(prompt, age_max=age_max, policy="red")) == expected
    world.name(4, "red")
    assert served(world, world.ask(prompt, age_max=0)) == ((2, 0),)
    assert served(world, world.ask(prompt, age_max=0, policy="red")) == ((4, 0),)


def test_the_policies_whose_switches_are_remembered_are_bounded(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(module, monkeypatch)
    monkeypatch.setattr(module, "POLICIES_MAX", 2)
    for epoch, policy in enumerate(("red", "blue", "red", "green"), start=1):
        world.name(epoch, policy)
    history = world.scheduler.midstream_history
    asked = [Asked("r", [1], 1, 1, policy=policy) for policy in ("red", "green", "blue", "")]
    assert [history.epoch_of(each) for each in asked] == [3, 4, 0, 0]
    # Another one begins to count, and none of these is of its.
    world.name(0)
    assert [history.epoch_of(each) for each in asked] == [0] * 4


@pytest.mark.parametrize(
    "lacks",
    [
        "manager",
        "latents",
        "sees",
        "two",
        "coordinator",
        "replay",
        "speculates",
        "pool",
        "hidden",
        "form",
        "masks",
    ],
)
def test_a_scheduler_that_is_not_understood_is_vllms(
    module: Any, monkeypatch: pytest.MonkeyPatch, lacks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(Scheduler):
        def __init__(self) -> None:
            super().__init__()
            coordinator = self.kv_cache_manager.coordinator
            managers = coordinator.single_type_managers
            match lacks:
                case "manager":
                    managers[0] = type("SlidingWindowManager", (FullAttentionManager,), {})()
                case "latents":
                    managers[0].kv_cache_spec = type("MLAAttentionSpec", (FullAttentionSpec,), {})()
                case "sees":
                    managers[0].kv_cache_spec.non_causal = True
                case "two":
                    managers += managers
                case "coordinator":
                    coordinator.__class__ = type("HybridKVCacheCoordinator", (UnitaryKVCacheCoordinator,), {})
                case "replay":
                    self.prefix_replay_tokens = 128
                case "pool":
                    self.pool.cached_block_hash_to_block._cache = None
                case "form":
                    self.pool.cache_full_blocks = lambda request, **more: None  # type: ignore[method-assign]
                case "hidden":
                    del self.pool.cached_block_hash_to_block
                case "speculates":
                    self.vllm_config.speculative_config = object()
                case _:
                    self.return_sampling_mask = True

    World(module, monkeypatch)
    other = module.telling(Other)()
    assert other.midstream_history is None
    assert other.kv_cache_manager.coordinator.find_longest_cache_hit.__name__ == "find_longest_cache_hit"
    assert "does not say which weights computed KV" in capsys.readouterr().out
    other.running, other.waiting = [], []
    step = other.schedule()
    assert other.update_from_output(step, {})[0].outputs == []
    core = sys.modules[module.CORE].EngineCore()
    core.scheduler = other
    core.set_weight_version("1:step-1")


def test_a_version_without_a_place_for_it_keeps_its_scheduler(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    World(module, monkeypatch)
    older = SimpleNamespace(EngineCoreOutput=SimpleNamespace(__struct_fields__=("request_id",)))
    monkeypatch.setitem(sys.modules, module.OUTPUT, older)
    assert module.telling(Scheduler) is Scheduler
    assert "new_sampling_mask" in capsys.readouterr().out


def test_the_age_of_blocks_is_that_of_the_first_position_behind_them(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(module, monkeypatch)
    stream = world.ask([10, 11], wanted=10)
    world.begin()
    world.finish()
    # In the first block.
    world.name(1)
    assert served(world, stream) == ((0, 0), (1, 2))
    assert world.seen[stream.request_id].tellings == 2
    assert served(world, world.ask(stream.tokens, age_max=0)) == ((1, 0),)
    assert served(world, world.ask(stream.tokens, age_max=0)) == ((1, 0),)
    world.name(2)
    assert served(world, world.ask(stream.tokens, age_max=1)) == ((1, 0), (2, 9))


def test_what_changes_while_a_step_runs_is_told_with_the_next_one(module: Any) -> None:
    history, asked = module.KvHistory(SIZE), Asked("r", [1, 2, 3], 1, 9)
    history.switch("0:base", ())
    history.admit(asked, (), 0)
    one, two = ({"r": 1} for _ in range(2))
    history.scheduled(one, one)
    # It is preempted, and finds KV of other weights.
    history.admit(asked, ((7, 0),), 2)
    told = []
    for step in (one, two):
        if step is two:
            history.scheduled(two, two)
        output = SimpleNamespace(request_id="r", new_token_ids=[4])
        told.append(history.tell(output, history.told(step)["r"]).tolist())
    assert told == [[1, 0, 0], [1, 7, 0, 0, 2]]
    history.scheduled(one, one)
    assert history.told(one) == {}


def test_of_many_equal_blocks_the_last_ones_are_looked_at(module: Any) -> None:
    pool, count = Pool(), module.EQUAL_MAX + 3
    cache = pool.cached_block_hash_to_block._cache
    cache["many"], cache["one"] = {i: Block(i) for i in range(count)}, Block(7)
    assert [block.block_id for block in module._named(pool, "many")] == list(range(count - 1, 2, -1))
    assert [block.block_id for block in module._named(pool, "one")] == [7]
    assert module._named(pool, "none") == ()
