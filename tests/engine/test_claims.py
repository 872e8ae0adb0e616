"""What sessions hold between their turns: books that balance, the order of eviction, and how much less is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tiers import examples

from midstream.core.kv import KvStats
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.claims import BRANCHES_MAX, SPARE, Claims, Return, SaltParts, SessionClaim
from midstream.engine.embedded.blocks import HISTORIES_MAX, BlockPool, Prefix
from midstream.engine.embedded.scheduler import Scheduler, Sequence
from midstream.replica.namespaces import cache_salt

BLOCK = 4


class Bed:
    """A scheduler whose sequences are advanced by hand. computed: positions of prompts that were computed, by session."""

    def __init__(self, blocks: int, max_running: int = 8) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(
            BlockPool(blocks + 1, BLOCK),
            max_batch_tokens=256,
            max_prefill_tokens=64,
            max_running=max_running,
            scored=lambda block, offset, epoch: False,
            on_allocate=lambda block: None,
            clock=lambda: self.now,
        )
        self.pool = self.scheduler.pool
        self.number = 0

    def begin(self, session: str, prompt: tuple[int, ...], **more: Any) -> Sequence:
        self.number += 1
        request = GenerateRequest(
            request_id=str(self.number),
            prompt=prompt,
            sampling=SamplingParams(max_tokens=4),
            session=session,
            **{"returns_s": 1.0, "kept_s": 10.0, **more},
        )
        sequence = Sequence(request, 0)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> int:
        """One step; how many positions were computed."""
        works = self.scheduler.plan()
        for work in works:
            self.scheduler.advance(work)
            if work.last == len(work.seq.tokens):
                work.seq.tokens.append(0)
        return sum(work.size for work in works)

    def turn(self, session: str, prompt: tuple[int, ...], **more: Any) -> int:
        """A whole turn of one token; how many positions of its prompt were computed."""
        sequence = self.begin(session, prompt, **more)
        computed = 0
        while sequence.generated == 0:
            computed += self.step()
        self.scheduler.remove(sequence)
        self.check()
        return computed

    def kv(self) -> KvStats:
        claims = self.scheduler.claims
        return self.pool.kv(claims.missing, claims.needed_again)

    def check(self) -> None:
        self.pool.check()
        kv, claims = self.kv(), list(self.scheduler.claims)
        assert kv.used + kv.held + kv.loose + kv.free == kv.total
        assert kv.missing == sum(claim.blocks - len(claim.path) for claim in claims)
        kept = {place.block for claim in claims for place in claim.path if place.kept}
        assert kv.held <= len(kept)


def prompt_of(session: int, tokens: int) -> tuple[int, ...]:
    """Nothing of it is shared with other sessions."""
    return tuple(1000 * (session + 1) + at for at in range(tokens))


def computed_in(*, sessions: int, turns: int, blocks: int, claimed: bool) -> int:
    """Sessions take turns one after the other. Each begins with 16 tokens and gets 8 more in each turn."""
    bed = Bed(blocks)
    computed = 0
    for turn in range(turns):
        for session in range(sessions):
            bed.now += 0.1
            name = f"s{session}" if claimed else ""
            computed += bed.turn(name, prompt_of(session, 16 + 8 * turn), returns_s=0.1 * sessions)
    return computed


def test_sessions_that_do_not_fit_compute_much_less_again_than_with_lru() -> None:
    """Eight sessions, whose last turns have 72 tokens each: 576 tokens, and the cache has 346."""
    shape = {"sessions": 8, "turns": 8}
    ideal = computed_in(**shape, blocks=1000, claimed=True)
    assert ideal == computed_in(**shape, blocks=1000, claimed=False) == 8 * 72
    assert computed_in(**shape, blocks=86, claimed=False) == 1992
    assert computed_in(**shape, blocks=86, claimed=True) == 1048


def test_what_a_session_that_ended_had_alone_is_evicted_first() -> None:
    bed = Bed(12)
    bed.turn("ends", prompt_of(0, 16))
    bed.turn("", prompt_of(1, 16))
    bed.scheduler.claims.end("ends")
    bed.turn("", prompt_of(2, 16))
    bed.turn("", prompt_of(3, 12))
    assert bed.turn("", prompt_of(1, 17)) == 1
    assert bed.turn("", prompt_of(0, 17)) == 17


def test_a_prompt_that_several_sessions_share_outlives_the_first_of_them() -> None:
    bed = Bed(12)
    shared = prompt_of(9, 16)
    bed.turn("first", (*shared, 1, 2, 3, 4))
    assert bed.turn("second", (*shared, 5, 6, 7, 8)) == 4
    bed.scheduler.claims.end("first")
    bed.scheduler.claims.end("second")
    # Six blocks are free, and what each had alone makes two more.
    bed.turn("", prompt_of(1, 32))
    assert bed.turn("third", (*shared, 9, 9, 9, 9)) == 4


def test_a_session_that_is_overdue_gives_way_before_one_that_is_not() -> None:
    bed = Bed(9)
    bed.turn("slow", prompt_of(0, 16), kept_s=60.0)
    bed.now = 1.0
    bed.turn("silent", prompt_of(1, 16), kept_s=5.0)
    bed.now = 10.0
    bed.turn("new", prompt_of(2, 16))
    assert bed.kv().evicted_tokens == 12
    assert bed.turn("slow", prompt_of(0, 17)) == 1
    assert bed.kv().again_tokens == 0
    # The last block of the silent one went for the slow one's last token.
    assert bed.turn("silent", prompt_of(1, 17)) == 17
    assert bed.kv().again_tokens == 16


def test_of_those_that_are_expected_the_last_gives_way() -> None:
    bed = Bed(9)
    bed.turn("late", prompt_of(0, 16), returns_s=8.0)
    bed.turn("soon", prompt_of(1, 16), returns_s=2.0)
    bed.turn("new", prompt_of(2, 16))
    assert bed.turn("soon", prompt_of(1, 17)) == 1


def test_claims_pin_nothing() -> None:
    """Sessions that never end and never come back held a whole server up (sglang#28891)."""
    bed = Bed(8)
    for session in range(20):
        bed.turn(f"s{session}", prompt_of(session, 16), kept_s=1e9)
    assert bed.turn("", prompt_of(77, 27)) == 27
    assert bed.kv().evicted_tokens >= 18 * 16


def test_sequences_that_share_a_long_prefix_and_do_not_fit_all_end() -> None:
    """32 requests with a common prefix, admitted together into a pool that cannot carry them all (mstar#307)."""
    bed = Bed(96, max_running=32)
    shared = prompt_of(0, 59 * BLOCK)
    sequences = [bed.begin(f"s{i}", (*shared, *prompt_of(i + 1, 6))) for i in range(32)]
    for _ in range(2000):
        bed.step()
        for sequence in sequences:
            if sequence.generated >= 4 and not sequence.done:
                bed.scheduler.remove(sequence)
        bed.pool.check()
    assert all(sequence.done for sequence in sequences)
    bed.check()


def test_agents_that_take_turns_under_one_key_keep_both_histories() -> None:
    """A main agent of 28k tokens and one beside it evicted each other at each turn (vllm-mlx#541)."""
    bed = Bed(40)
    for turn in range(4):
        grown = 16 + 8 * turn
        assert bed.turn("both", prompt_of(0, grown)) == (16 if turn == 0 else 8)
        assert bed.turn("both", prompt_of(1, grown)) == (16 if turn == 0 else 8)
    assert len(list(bed.scheduler.claims)) == 2


def test_of_a_branch_too_many_the_beginning_goes_last() -> None:
    bed = Bed(4 * (BRANCHES_MAX + 1) + 1)
    for branch in range(BRANCHES_MAX + 1):
        bed.turn("s", prompt_of(branch, 16))
    # One block is free.
    bed.turn("", prompt_of(77, 8))
    assert bed.turn("", prompt_of(0, 17)) == 5


def test_a_history_that_was_rewritten_gives_way_before_the_new_one() -> None:
    """Compaction leaves a long history that does not come back (sglang#24656)."""
    bed = Bed(16)
    bed.turn("s", prompt_of(0, 32), kept_s=5.0)
    bed.now = 6.0
    bed.turn("s", prompt_of(1, 16), kept_s=5.0)
    bed.turn("other", prompt_of(2, 28))
    assert bed.turn("s", prompt_of(1, 17)) == 1


def test_what_a_session_had_under_a_namespace_before_is_free_at_its_next_turn() -> None:
    bed = Bed(14)
    bed.turn("s", prompt_of(0, 32), salt=cache_salt(0, "", "", "m"), kept_s=1e9)
    # Of an agent beside it, which has its own key.
    bed.turn("s", prompt_of(0, 8), salt=cache_salt(0, "", "other", "m"), kept_s=1e9)
    assert bed.turn("s", prompt_of(0, 16), salt=cache_salt(1, "", "", "m")) == 16
    # Four blocks of the new namespace and two of the other key. The eight others are free or loose.
    kv = bed.kv()
    assert (kv.held, kv.missing, kv.evicted_tokens) == (6, 0, 0)


@pytest.mark.parametrize("parts", [("", "key", "m"), ("", "", "a policy")], ids=["isolation key", "policy"])
def test_a_session_that_alternates_keeps_what_it_has_under_each_salt(parts: tuple[str, str, str]) -> None:
    """The cache is full: what a claim gives up is evicted at once, before what no session has."""
    bed = Bed(18)
    salts = cache_salt(3, "", "", "m"), cache_salt(0, *parts)
    for turn in range(3):
        grown = 16 + 4 * turn
        for salt in salts:
            computed = bed.turn("s", prompt_of(0, grown), salt=salt, kept_s=1e9)
            assert computed == (16 if turn == 0 else 4)
            bed.turn("", prompt_of(10 * turn + salts.index(salt), 28))
    assert bed.kv().again_tokens == 0


def test_a_preempted_sequence_finds_its_blocks_if_nothing_else_needs_them() -> None:
    bed = Bed(8)
    old, young = bed.begin("old", prompt_of(0, 15)), bed.begin("young", prompt_of(1, 15))
    for _ in range(4):
        bed.step()
    while not (old.generated >= 4 and young.generated >= 4):
        bed.step()
        for one in (old, young):
            if one.generated >= 4 and not one.done:
                bed.scheduler.remove(one)
    bed.check()


def test_what_is_given_up_next_is_found_without_a_look_at_all_sessions() -> None:
    """With a key each and no end, an hour leaves up to 100,000, and each turn looked at all of them."""

    class Blind(Claims[Prefix]):
        def __iter__(self) -> Iterator[SessionClaim[Prefix]]:
            raise AssertionError("it looks at all claims")

    bed = Bed(20)
    bed.scheduler.claims = Blind(bed.pool)
    for n in range(60):
        sequence = bed.begin(f"s{n % 30}", prompt_of(n % 30, 12 + n // 30))
        while sequence.generated == 0:
            bed.step()
        bed.scheduler.remove(sequence)
        bed.now += 1.0
        bed.pool.check()
    # As many lines as there are claims, however many turns there were.
    for _ in range(300):
        sequence = bed.begin("s0", prompt_of(0, 13))
        while sequence.generated == 0:
            bed.step()
        bed.scheduler.remove(sequence)
    assert bed.scheduler.claims.entries <= 4 * 31 + 2 * SPARE


@pytest.mark.parametrize("follows", ["a turn", "an end", "others"])
def test_a_held_block_that_leaves_the_tree_is_free_once_and_claimed_no_more(follows: str) -> None:
    """A later history of the same tokens takes its place, and all behind it leaves too."""
    pool = BlockPool(16, BLOCK)
    claims = Claims(pool)
    pool.on_need = lambda: claims.give_up(0.0)

    def chain(epoch: int, length: int) -> list[Prefix]:
        path = [pool.root(b"")]
        for at in range(length):
            path.append(pool.index(pool.allocate(), path[-1], bytes([at]), (epoch,) * BLOCK))
        return path[1:]

    def over(path: list[Prefix]) -> None:
        for place in reversed(path):
            pool.release(place.block)

    oldest = chain(0, 4)
    claims.add("s", SaltParts.of(b""), oldest, Return(1.0, 10.0), 0.0)
    over(oldest)
    assert pool.held == 4
    for epoch in range(1, HISTORIES_MAX + 1):
        over(chain(epoch, 1))
        pool.check()
    assert not any(place.kept for place in oldest)
    assert (pool.held, pool.loose, pool.available) == (0, HISTORIES_MAX, 15)
    if follows == "a turn":
        claims.take_up("s", SaltParts.of(b""), [], 4)
    if follows == "an end":
        claims.end("s")
    assert sorted(pool.allocate() for _ in range(15)) == [*range(1, 16)]
    pool.check()
    assert claims.needed_again == (4 if follows == "a turn" else 0)


def test_single_turns_leave_no_claims() -> None:
    bed = Bed(20)
    for n in range(30):
        bed.turn(f"s{n}", prompt_of(n, 12), kept_s=0.0)
    kv = bed.kv()
    assert (kv.held, kv.evicted_tokens, list(bed.scheduler.claims)) == (0, 0, [])


class ClaimsMachine(RuleBasedStateMachine):
    """Turns of sessions that share beginnings, with ends, preemptions and a clock, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.bed = Bed(10, max_running=3)
        self.running: list[Sequence] = []

    @rule(
        session=st.integers(0, 5),
        family=st.integers(0, 1),
        shared=st.integers(0, 2),
        tokens=st.integers(1, 14),
        kept_s=st.sampled_from([0.5, 5.0]),
    )
    def begin(self, session: int, family: int, shared: int, tokens: int, kept_s: float) -> None:
        if len(self.running) < 6:
            prompt = (*prompt_of(50 + family, shared * BLOCK), *prompt_of(session, tokens))
            name = "" if session == 5 else f"s{session}"
            self.running.append(self.bed.begin(name, prompt, kept_s=kept_s))

    @rule()
    def step(self) -> None:
        self.bed.now += 0.2
        self.bed.step()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.bed.scheduler.remove(sequence)

    @rule(session=st.integers(0, 4))
    def end(self, session: int) -> None:
        self.bed.scheduler.claims.end(f"s{session}")

    @invariant()
    def books(self) -> None:
        self.bed.check()
        claims = list(self.bed.scheduler.claims)
        by_session: dict[str, int] = {}
        for claim in claims:
            assert not claim.over
            by_session[claim.session] = by_session.get(claim.session, 0) + 1
        assert max(by_session.values(), default=0) <= BRANCHES_MAX
        for sequence in self.running:
            if len(sequence.tokens) > 20:
                self.running.remove(sequence)
                self.bed.scheduler.remove(sequence)

    def teardown(self) -> None:
        for sequence in self.running:
            self.bed.scheduler.remove(sequence)
        for session in range(5):
            self.bed.scheduler.claims.end(f"s{session}")
        kv = self.bed.kv()
        self.bed.check()
        assert (kv.used, kv.held, kv.missing) == (0, 0, 0)


ClaimsMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestClaims = ClaimsMachine.TestCase


@pytest.mark.parametrize("blocks", [4, 5, 9])
def test_a_turn_that_needs_the_whole_cache_runs(blocks: int) -> None:
    bed = Bed(blocks)
    bed.turn("small", prompt_of(0, 8))
    assert bed.turn("large", prompt_of(1, blocks * BLOCK - 1)) == blocks * BLOCK - 1
