"""What midstream's scheduler of vLLM holds for sessions, beside a pool of blocks of the form of vLLM's: a line of free blocks,
counts of users, and a cache by keys of tokens. What is held, loose and free is counted again from the blocks themselves.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiers import examples

from midstream.engine.servers.salts import Salts
from midstream.engine.vllm.arguments import WORKER_DIR
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import LOOK, SESSION
from midstream.replica.namespaces import cache_salt

SIZE = 2


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """As vLLM imports it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(WORKER_DIR))
        yield importlib.import_module("midstream_vllm_kv")


@dataclass(eq=False)
class Block:
    block_id: int
    block_hash: Any = None
    users: int = 0

    @property
    def ref_cnt(self) -> int:
        """As vLLM calls it."""
        return self.users


class Line:
    """As vLLM's FreeKVCacheBlockQueue."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.line = list(blocks)
        self.num_free_blocks = len(self.line)

    def popleft_n(self, count: int) -> list[Block]:
        taken, self.line = self.line[:count], self.line[count:]
        assert len(taken) == count, "vLLM would run into the end of its line"
        self.num_free_blocks -= count
        return taken

    def remove(self, block: Block) -> None:
        self.line.remove(block)
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[Block]) -> None:
        self.line += blocks
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        self.line[:0] = blocks
        self.num_free_blocks += len(blocks)


class Pool:
    """As vLLM's BlockPool, whose first block is given to nobody."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks + 1
        self.blocks = [Block(i) for i in range(blocks + 1)]
        self.blocks[0].users = 1
        self.free_block_queue = Line(self.blocks[1:])

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_new_blocks(self, count: int) -> list[Block]:
        assert count <= self.get_num_free_blocks()
        taken = self.free_block_queue.popleft_n(count)
        for block in taken:
            assert block.users == 0
            block.block_hash, block.users = None, 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.users:
                self.free_block_queue.remove(block)
            block.users += 1

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.users -= 1
        over = [block for block in blocks if not block.users]
        self.free_block_queue.prepend_n([b for b in over if b.block_hash is None])
        self.free_block_queue.append_n([b for b in over if b.block_hash is not None])

    def cached(self, key: Any) -> Block | None:
        return next((block for block in self.blocks if block.block_hash == key), None)

    def evict_blocks(self, numbers: set[int]) -> None:
        for number in numbers:
            self.blocks[number].block_hash = None

    def reset_prefix_cache(self) -> bool:
        if self.get_num_free_blocks() != len(self.blocks) - 1:
            return False
        for block in self.blocks:
            block.block_hash = None
        return True


@dataclass(eq=False)
class Asked:
    request_id: str
    tokens: tuple[int, ...]
    session: str = ""
    returns_s: float = 1.0
    kept_s: float = 10.0
    cache_salt: str | None = None
    lora_request: Any = None
    finished: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def sampling_params(self) -> Any:
        told = (self.session, self.returns_s, self.kept_s)
        return SimpleNamespace(extra_args={SESSION: told} if self.session else None)

    @property
    def keys(self) -> list[Any]:
        return [(self.cache_salt, self.tokens[:end]) for end in range(SIZE, len(self.tokens) + 1, SIZE)]

    def is_finished(self) -> bool:
        return self.finished


@dataclass(eq=False)
class Bed:
    """Requests that are computed at once. computed: tokens, by the id of a request."""

    module: Any
    blocks: int
    now: float = 0.0
    blocks_of: dict[str, list[Block]] = field(default_factory=dict)
    running: dict[str, Asked] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.pool = Pool(self.blocks)
        claims = self.module.claims_module()
        self.holdings = self.module.KvHoldings(self.pool, SIZE, self.blocks_of, claims, lambda: self.now)

    def begin(self, tokens: Sequence[int], session: str = "", **more: Any) -> Asked | None:
        """None: there is no room. As in vLLM, the last token is always computed."""
        self.number += 1
        asked = Asked(f"r{self.number}", tuple(tokens), session, **more)
        found: list[Block] = []
        for key in asked.keys[: (len(tokens) - 1) // SIZE]:
            block = self.pool.cached(key)
            if block is None:
                break
            found.append(block)
        needed = -(-len(tokens) // SIZE) - len(found)
        if needed > self.pool.get_num_free_blocks() - sum(block.users == 0 for block in found):
            return None
        self.pool.touch(found)
        before = self.loose_and_free()
        new = self.pool.get_new_blocks(needed)
        # A session loses nothing while anything else can be had.
        assert self.pool_evicted() == 0 or len(new) > before
        self.blocks_of[asked.request_id] = found + new
        self.holdings.begins(asked, len(found) * SIZE)
        self.running[asked.request_id] = asked
        return asked

    def pool_evicted(self) -> int:
        """By the last request."""
        evicted = self.holdings.look()["evicted_tokens"]
        last, self.seen = getattr(self, "seen", 0), evicted
        return int(evicted - last)

    def loose_and_free(self) -> int:
        look = self.holdings.look()
        return int(look["total"] - look["used"] - look["held"])

    def leave(self, asked: Asked, *, finished: bool = True) -> None:
        blocks = self.blocks_of[asked.request_id]
        for block, key in zip(blocks, asked.keys, strict=False):
            # Of equal blocks vLLM keeps all.
            block.block_hash = key
        asked.finished = finished
        self.holdings.leaves(asked)
        del self.blocks_of[asked.request_id], self.running[asked.request_id]
        self.pool.free_blocks(blocks[::-1])

    def turn(self, tokens: Sequence[int], session: str = "", **more: Any) -> int:
        """How many blocks were computed."""
        asked = self.begin(tokens, session, **more)
        assert asked is not None
        kept = [block.block_hash is not None for block in self.blocks_of[asked.request_id]]
        self.leave(asked)
        self.check()
        return kept.count(False)

    def check(self) -> None:
        """What it says is what the blocks are."""
        look = self.holdings.look()
        claimed = {place.block for claim in self.holdings._claims for place in claim.path if place.kept}
        blocks = self.pool.blocks[1:]
        idle = [block for block in blocks if not block.users]
        held = [block for block in idle if block in claimed]
        cached = [block for block in idle if block.block_hash is not None]
        assert look["total"] == len(blocks)
        assert look["used"] == len(blocks) - len(idle)
        assert look["held"] == len(held)
        assert look["loose"] == len(cached) - len(held)
        line = self.pool.free_block_queue.line
        assert len(set(line)) == len(line)
        assert set(line) <= set(idle)
        aside = {*self.holdings._line._held.values(), *self.holdings._line._ended.values()}
        assert aside | set(line) == set(idle)
        assert aside.isdisjoint(line)


def tokens_of(session: int, count: int) -> tuple[int, ...]:
    """Nothing of it is shared with other sessions."""
    return tuple(1000 * (session + 1) + at for at in range(count))


def test_what_a_session_holds_is_found_by_its_next_turn_and_given_up_at_its_end(module: Any) -> None:
    bed = Bed(module, 10)
    first = bed.begin(tokens_of(0, 5), "s")
    assert first is not None
    assert bed.holdings.look() == {
        "block_tokens": 2,
        "total": 10,
        "used": 3,
        "held": 0,
        "loose": 0,
        "missing": 0,
        "evicted_tokens": 0,
        "again_tokens": 0,
    }
    bed.leave(first)
    assert bed.holdings.look()["held"] == 2
    # Four positions are found. The block of the fifth was not full.
    assert bed.turn(tokens_of(0, 9), "s") == 3
    assert (bed.holdings.look()["held"], bed.holdings.look()["loose"]) == (4, 0)
    look = bed.holdings.look(["s", "unknown"])
    assert (look["used"], look["held"], look["loose"]) == (0, 0, 4)
    bed.check()


def test_the_order_of_eviction(module: Any) -> None:
    """Blocks without content, what an ended session had alone, what nobody claims, and claims."""
    bed = Bed(module, 12)
    bed.turn(tokens_of(0, 4))
    bed.turn(tokens_of(1, 4), "lives")
    bed.turn(tokens_of(2, 4), "ends")
    bed.holdings.look(["ends"])
    for needed, gone in ((6, []), (2, [2]), (2, [0]), (2, [1])):
        filling = bed.begin(tokens_of(9, 2 * needed))
        assert filling is not None
        bed.check()
        left = {i for i in range(3) if bed.pool.cached((None, tokens_of(i, 4)[:2]))}
        assert left.isdisjoint(gone)
        assert {0, 1, 2} - left >= set(gone)
    assert bed.holdings.look()["evicted_tokens"] == 4
    assert bed.begin(tokens_of(8, 2)) is None


def test_what_is_expected_last_goes_first_and_from_its_tail(module: Any) -> None:
    bed = Bed(module, 9)
    bed.turn(tokens_of(0, 6), "late", returns_s=9.0)
    bed.turn(tokens_of(1, 6), "soon", returns_s=1.0)
    assert bed.turn(tokens_of(2, 8), kept_s=0.0) == 4
    look = bed.holdings.look()
    assert (look["evicted_tokens"], look["missing"], look["held"]) == (2, 1, 5)
    assert bed.turn(tokens_of(1, 7), "soon") == 1
    # It computes the block again that it lost, and the new one.
    assert bed.turn(tokens_of(0, 7), "late") == 2
    assert bed.holdings.look()["again_tokens"] == 2


def test_a_session_gives_up_what_it_had_in_a_namespace_before_and_keeps_that_of_other_keys(
    module: Any,
) -> None:
    bed, salts = Bed(module, 20), Salts(b"boot")
    turns: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({"salt": (0, "", "m")}, (2, 0)),
        ({"salt": (1, "", "m")}, (2, 2)),
        ({"salt": (1, "key", "m")}, (4, 2)),
        ({"salt": (0, "", "red"), "lora": "red@1.step"}, (6, 2)),
        ({"salt": (0, "", "red"), "lora": "red@2.step"}, (6, 4)),
        ({"salt": (1, "", "m")}, (6, 4)),
    ]
    for number, (more, (held, loose)) in enumerate(turns):
        namespace, key, model = more["salt"]
        salt = salts.lasting(cache_salt(namespace, "", key, model))
        adapter = SimpleNamespace(lora_name=more["lora"]) if "lora" in more else None
        tokens = tokens_of(1 if number == 5 else number, 5)
        bed.turn(tokens, "s", cache_salt=salt, lora_request=adapter)
        assert (bed.holdings.look()["held"], bed.holdings.look()["loose"]) == (held, loose), number


def test_a_prompt_that_several_sessions_had_outlives_one_of_them(module: Any) -> None:
    bed = Bed(module, 8)
    shared = tokens_of(9, 4)
    bed.turn((*shared, 1, 2), "a")
    assert bed.turn((*shared, 3, 4), "b") == 1
    bed.holdings.look(["a", "b"])
    # Four blocks are free, and two were one session's alone.
    bed.turn(tokens_of(1, 12))
    assert bed.turn((*shared, 5, 6)) == 1


def test_of_what_an_ended_session_had_the_beginning_goes_last(module: Any) -> None:
    """Another session of its group may come for it, and finds nothing behind a block that is gone."""
    bed = Bed(module, 6)
    bed.turn(tokens_of(0, 8), "ends")
    bed.holdings.look(["ends"])
    # Two blocks are free.
    bed.turn(tokens_of(1, 6), kept_s=0.0)
    assert bed.turn(tokens_of(0, 9)) == 2


def test_sessions_that_share_a_prompt_share_its_places(module: Any) -> None:
    """Thousands of sessions with a long prompt had millions, and each step of Python's collector took a second."""
    bed = Bed(module, 8)
    shared = tokens_of(9, 8)
    for session in range(3):
        bed.turn((*shared, session, session), f"s{session}")
    places = {id(place): place for claim in bed.holdings._claims for place in claim.path}
    assert sorted(place.block.block_id for place in places.values()) == [*range(1, 8)]
    # What a block has next is another one.
    bed.holdings.look([f"s{session}" for session in range(3)])
    bed.turn(tokens_of(1, 16), "next")
    (claim,) = bed.holdings._claims
    assert not places.keys() & {id(place) for place in claim.path}


def test_a_request_that_was_preempted_is_held_as_if_it_came_back_at_once(module: Any) -> None:
    bed = Bed(module, 6)
    bed.turn(tokens_of(0, 4), "other", returns_s=0.5)
    asked = bed.begin(tokens_of(1, 4), "s", returns_s=60.0)
    assert asked is not None
    bed.leave(asked, finished=False)
    bed.check()
    assert bed.turn(tokens_of(2, 6)) == 3
    assert bed.turn(tokens_of(1, 5), "s") == 1
    assert bed.turn(tokens_of(0, 5), "other") > 1


def test_a_session_whose_next_turn_never_comes_holds_nothing(module: Any) -> None:
    bed = Bed(module, 6)
    bed.turn(tokens_of(0, 4), "s", kept_s=0.0)
    assert (bed.holdings.look()["held"], bed.holdings.look()["loose"]) == (0, 2)


def test_a_cache_that_is_cleared_holds_nothing(module: Any) -> None:
    bed = Bed(module, 6)
    bed.turn(tokens_of(0, 4), "s")
    bed.turn(tokens_of(1, 4), "over")
    bed.holdings.look(["over"])
    running = bed.begin(tokens_of(2, 2))
    assert running is not None
    assert not bed.pool.reset_prefix_cache()
    assert bed.holdings.look()["held"] == 2
    bed.leave(running)
    assert bed.pool.reset_prefix_cache()
    look = bed.holdings.look()
    assert (look["used"], look["held"], look["loose"], look["missing"]) == (0, 0, 0, 0)
    bed.check()
    assert bed.turn(tokens_of(0, 12), "s") == 6


def test_a_block_whose_content_vllm_took_away_is_held_for_nobody(module: Any) -> None:
    """vLLM does so with blocks that could not be loaded."""
    bed = Bed(module, 4)
    bed.turn(tokens_of(0, 4), "s")
    asked = bed.begin(tokens_of(0, 5), "s")
    assert asked is not None
    again = bed.begin(tokens_of(0, 5), "s")
    assert again is not None
    bed.leave(asked)
    for block in bed.blocks_of[again.request_id]:
        block.block_hash = None
    bed.holdings.leaves(again)
    bed.pool.free_blocks(bed.blocks_of.pop(again.request_id)[::-1])
    # All of them can be used, for the same content, too.
    assert bed.turn(tokens_of(1, 8)) == 4
    other = bed.begin(tokens_of(0, 8), "u")
    assert other is not None
    (claim,) = bed.holdings._claims
    for place in claim.path:
        place.block.block_hash = place.key
    bed.holdings.look(["s"])
    bed.leave(other)
    assert bed.holdings.look()["held"] == 4
    assert bed.turn(tokens_of(2, 8), "v") == 4


@pytest.mark.parametrize("whose", ["claimed", "of an ended session", "of nobody", "in use"])
def test_a_block_whose_content_vllm_takes_away_while_nobody_uses_it_is_not_lost(
    module: Any, whose: str
) -> None:
    bed = Bed(module, 8)
    session = "" if whose == "of nobody" else "s"
    bed.turn(tokens_of(0, 8), session)
    bed.turn(tokens_of(1, 4), "other")
    if whose == "of an ended session":
        bed.holdings.look(["s"])
    using = bed.begin(tokens_of(0, 9), "") if whose == "in use" else None
    gone = bed.pool.cached((None, tokens_of(0, 8)[:4]))
    assert gone is not None
    bed.pool.evict_blocks({gone.block_id, 8})
    bed.check()
    look = bed.holdings.look()
    if whose in ("claimed", "in use"):
        # What it had behind that is of no use to it.
        assert (look["missing"], look["held"]) == (3, 3 if whose == "claimed" else 2)
    if using is not None:
        bed.leave(using)
        bed.check()
    # Each block can be used, and is used once.
    filling = bed.begin(tokens_of(9, 16))
    assert filling is not None
    assert len({block.block_id for block in bed.blocks_of[filling.request_id]}) == 8
    bed.check()


def test_a_block_that_several_sessions_had_is_one_sessions_alone_with_its_next_content(module: Any) -> None:
    bed = Bed(module, 4)
    for session in ("a", "b"):
        bed.turn(tokens_of(0, 8), session)
    bed.holdings.look(["a", "b"])
    bed.turn(tokens_of(1, 4))
    bed.turn(tokens_of(2, 4), "c")
    bed.holdings.look(["c"])
    # What it had alone goes first, though the other is older.
    bed.turn(tokens_of(3, 4), kept_s=0.0)
    assert bed.turn(tokens_of(1, 5)) == 1


class HeldForSessions(RuleBasedStateMachine):
    """Turns of three sessions and of none, on few blocks; some end, are preempted, or find what others had."""

    module: Any

    def __init__(self) -> None:
        super().__init__()
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.syspath_prepend(str(WORKER_DIR))
            self.bed = Bed(importlib.import_module("midstream_vllm_kv"), 9)

    @rule(
        trunk=st.integers(0, 2),
        count=st.integers(1, 14),
        branch=st.integers(0, 3),
        session=st.sampled_from(("", "a", "b", "c")),
        returns_s=st.sampled_from((0.0, 1.0, 5.0)),
        salt=st.sampled_from((None, None, "x")),
    )
    def begin(self, trunk: int, count: int, branch: int, session: str, returns_s: float, salt: Any) -> None:
        tokens = [*tokens_of(trunk, count), *range(branch)]
        self.bed.begin(tokens, session, returns_s=returns_s, cache_salt=salt)

    @precondition(lambda self: self.bed.running)
    @rule(which=st.integers(0, 99), finished=st.booleans())
    def leave(self, which: int, finished: bool) -> None:
        running = list(self.bed.running.values())
        self.bed.leave(running[which % len(running)], finished=finished)

    @rule(session=st.sampled_from(("a", "b", "c")))
    def end(self, session: str) -> None:
        self.bed.holdings.look([session])
        assert not [claim for claim in self.bed.holdings._claims if claim.session == session]

    @rule(seconds=st.sampled_from((0.5, 20.0)))
    def wait(self, seconds: float) -> None:
        self.bed.now += seconds

    @rule(numbers=st.sets(st.integers(1, 9), min_size=1, max_size=2))
    def evict(self, numbers: set[int]) -> None:
        self.bed.pool.evict_blocks(numbers)

    @rule()
    def reset(self) -> None:
        self.bed.pool.reset_prefix_cache()

    @invariant()
    def books_balance(self) -> None:
        self.bed.check()


TestHeldForSessions = HeldForSessions.TestCase
TestHeldForSessions.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


# -- in a scheduler


class FullAttentionSpec: ...


class FullAttentionManager:
    def __init__(self) -> None:
        self.kv_cache_spec: Any = FullAttentionSpec()
        self.block_size = SIZE
        self.req_to_blocks: dict[str, list[Block]] = {}


class Scheduler:
    """As much of vLLM's as is stood around. steps: what each next one begins and resumes."""

    def __init__(self) -> None:
        self.pool = Pool(8)
        self.managers: list[Any] = [FullAttentionManager()]
        coordinator = SimpleNamespace(single_type_managers=self.managers)
        self.kv_cache_manager = SimpleNamespace(coordinator=coordinator, block_pool=self.pool)
        self.requests: dict[str, Asked] = {}
        self.steps: list[tuple[dict[str, int], dict[str, int]]] = []
        self.freed: list[str] = []

    def schedule(self) -> Any:
        new, again = self.steps.pop(0)
        cached = SimpleNamespace(
            req_ids=["runs", *again],
            resumed_req_ids={*again},
            num_computed_tokens=[77, *again.values()],
        )
        begun = [SimpleNamespace(req_id=name, num_computed_tokens=found) for name, found in new.items()]
        return SimpleNamespace(scheduled_new_reqs=begun, scheduled_cached_reqs=cached)

    def _free_request_blocks(self, request: Asked) -> None:
        self.freed.append(request.request_id)
        blocks = self.managers[0].req_to_blocks.pop(request.request_id)
        self.pool.free_blocks(blocks[::-1])


def core_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    class EngineCore:
        scheduler: Any

        def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
            return [method, timeout, args, kwargs]

    monkeypatch.setitem(sys.modules, module.CORE, SimpleNamespace(EngineCore=EngineCore))
    return EngineCore


def test_a_scheduler_takes_up_claims_with_its_steps_and_answers_what_is_held(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(module, monkeypatch)()
    scheduler = core.scheduler = module.holding(Scheduler)()
    blocks_of = scheduler.managers[0].req_to_blocks
    asked = Asked("r", tokens_of(0, 5), "s")
    scheduler.requests["r"] = asked
    blocks = blocks_of["r"] = scheduler.pool.get_new_blocks(3)
    scheduler.steps = [({"r": 0}, {}), ({}, {"r": 4})]
    scheduler.schedule()
    for block, key in zip(blocks, asked.keys, strict=False):
        block.block_hash = key
    scheduler._free_request_blocks(asked)
    assert scheduler.freed == ["r"]
    (look,) = core.collective_rpc(LOOK, kwargs={"ended": []})
    assert (look["used"], look["held"], look["total"]) == (0, 2, 8)
    # It is resumed, and has its claim no more.
    scheduler.pool.touch(blocks[:2])
    blocks_of["r"] = blocks[:2]
    scheduler.schedule()
    assert not list(scheduler.midstream_holdings._claims)
    asked.finished = True
    scheduler._free_request_blocks(asked)
    assert core.collective_rpc(LOOK, kwargs={"ended": ["s"]})[0]["loose"] == 2
    # What is not ours is vLLM's, and another scheduler does not stand around it twice.
    assert core.collective_rpc("check_health", 3.0, (1,), {"a": 2}) == ["check_health", 3.0, (1,), {"a": 2}]
    hearing = type(core).collective_rpc
    module.holding(Scheduler)()
    assert type(core).collective_rpc is hearing


@pytest.mark.parametrize(
    ("lacks", "why"),
    [("kind", "another kind than full attention: SlidingWindowSpec"), ("two", "FullAttentionSpec, Full")],
)
def test_a_cache_of_another_kind_is_vllms_and_the_answer_says_why(
    module: Any, monkeypatch: pytest.MonkeyPatch, lacks: str, why: str
) -> None:
    class Other(Scheduler):
        def __init__(self) -> None:
            super().__init__()
            if lacks == "two":
                self.managers += self.managers
            else:
                self.managers[0].kv_cache_spec = type("SlidingWindowSpec", (), {})()

    core = core_of(module, monkeypatch)()
    scheduler = core.scheduler = module.holding(Other)()
    assert why in core.collective_rpc(LOOK, kwargs={"ended": []})[0]["why"]
    scheduler.steps = [({"r": 0}, {})]
    scheduler.schedule()
    scheduler.managers[0].req_to_blocks["r"] = scheduler.pool.get_new_blocks(1)
    scheduler._free_request_blocks(Asked("r", (1,), "s"))
    assert scheduler.pool.free_block_queue.popleft_n.__self__ is scheduler.pool.free_block_queue


def test_a_pool_of_another_form_is_vllms(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Scheduler):
        def __init__(self) -> None:
            super().__init__()
            del self.pool.free_block_queue

    core = core_of(module, monkeypatch)()
    core.scheduler = module.holding(Other)()
    assert "free_block_queue" in core.collective_rpc(LOOK, kwargs={"ended": []})[0]["why"]


def test_an_older_version_keeps_its_scheduler(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core_of(module, monkeypatch)
    older = type("Older", (), {"schedule": None})
    assert module.holding(older) is older
    monkeypatch.setattr(module, "CLAIMS", tmp_path / "nothing.py")
    monkeypatch.delitem(sys.modules, "midstream_claims", raising=False)
    assert module.holding(Scheduler) is Scheduler
    assert "midstream_claims" not in sys.modules
    said = capsys.readouterr().out
    assert "_free_request_blocks" in said
    assert "nothing.py" in said
