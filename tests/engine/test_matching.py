"""The scheduler over KV that is only written down: what a sequence reads is what was computed on what it reads.

A slot holds a chain: the KV before it, its token, the epoch that computed it. So a block behind another block than the one it
was computed on is seen at once, whatever the model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiers import examples, of_tier

from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.embedded import scheduler as module
from midstream.engine.embedded.blocks import HISTORIES_MAX, BlockPool, Prefix
from midstream.engine.embedded.scheduler import Scheduler, Sequence
from midstream.engine.embedded.track import Track

SIZE = 2
# The chain before, token, epoch.
Chain = tuple[int | None, int, int]


def new_scheduler(blocks: int, *, batch: int = 64) -> Scheduler:
    return Scheduler(
        BlockPool(blocks, SIZE),
        max_batch_tokens=batch,
        max_prefill_tokens=batch,
        max_running=4,
        scored=lambda block, offset, epoch: False,
        on_allocate=lambda block: None,
    )


def sequence(
    prompt: SequenceOf[int],
    *,
    max_tokens: int = 1,
    age_max: int | None = None,
    salt: bytes = b"",
    track: Track | None = None,
) -> Sequence:
    request = GenerateRequest(
        request_id="r",
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        kv_age_max=age_max,
        salt=salt,
    )
    return Sequence(request, 0, track=track)


def best_chain(scheduler: Scheduler, seq: Sequence) -> list[Prefix]:
    """What a sequence should find, by looking at every chain there is: the longest, then the youngest."""
    size = scheduler.pool.block_size
    age = seq.request.kv_age_max
    track = seq.track or scheduler.track

    def chains(prefix: Prefix, number: int) -> list[list[Prefix]]:
        tokens = seq.tokens[number * size : (number + 1) * size]
        found: list[list[Prefix]] = [[]]
        for child in (
            prefix.children.get(module.array("i", tokens).tobytes(), ()) if len(tokens) == size else ()
        ):
            young = number or age is None or track.age(child.epochs[0]) <= age
            if young and child.epochs[-1] <= track.epoch:
                found += [[child, *rest] for rest in chains(child, number + 1)]
        return found

    return max(
        chains(scheduler.pool.root(seq.request.salt), 0), key=lambda c: (len(c), [p.epochs for p in c])
    )


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = new_scheduler(12, batch=5)
        self.chains: list[Chain] = []
        # Of each chain there ever was.
        self.ids: dict[Chain, int] = {}
        # Which chain each holds the end of.
        self.slots: dict[int, int] = {}
        self.asked: list[Sequence] = []
        # By policy. Each has a salt of its own, and a track; "" has the scheduler's.
        self.policies = {"": self.scheduler.track, "other": Track(0)}
        # The newest commit, and whose it is.
        self.newest = 0
        self.owner = {0: {"", "other"}}

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        max_tokens=st.integers(1, 6),
        age_max=st.sampled_from([None, None, 0, 1]),
        policy=st.sampled_from(["", "", "other"]),
        pinned=st.booleans(),
    )
    def ask(self, prompt: list[int], max_tokens: int, age_max: int | None, policy: str, pinned: bool) -> None:
        track = self.policies[policy]
        if pinned:
            track = track.fixed_at(track.epoch)
        seq = sequence(prompt, max_tokens=max_tokens, age_max=age_max, salt=policy.encode(), track=track)
        if self.scheduler.check_fits(seq.request) is None:
            self.asked.append(seq)
            self.scheduler.add(seq)

    @rule(policy=st.sampled_from(["", "other"]))
    def swap(self, policy: str) -> None:
        self.newest += 1
        self.policies[policy].commit(self.newest)
        self.owner[self.newest] = {policy}

    @rule(steps=st.integers(1, 6), sampled=st.integers(0, 1))
    def step(self, steps: int, sampled: int) -> None:
        for _ in range(steps):
            for work in self.scheduler.plan():
                self.compute(work.seq, work.write_from, work.last)
                for own, holder in self.scheduler.advance(work):
                    assert self.content(own) == self.content(holder), "a block of other content stands for it"
                if work.last == len(work.seq.tokens):
                    work.seq.tokens.append(sampled)
                    if work.seq.generated >= work.seq.request.sampling.max_tokens:
                        self.scheduler.remove(work.seq)
                        self.asked.remove(work.seq)

    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        if self.asked:
            seq = self.asked.pop(which % len(self.asked))
            self.scheduler.remove(seq)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=2, max_size=12),
        age_max=st.sampled_from([None, 0, 1]),
        policy=st.sampled_from(["", "other"]),
        back=st.integers(0, 2),
    )
    def match(self, prompt: list[int], age_max: int | None, policy: str, back: int) -> None:
        track = self.policies[policy]
        if back:
            own = [epoch for epoch, owners in self.owner.items() if policy in owners]
            track = track.fixed_at(own[-min(back, len(own))])
        seq = sequence(prompt, age_max=age_max, salt=policy.encode(), track=track)
        assert self.scheduler.match(seq) == best_chain(self.scheduler, seq)

    @invariant()
    def every_sequence_reads_one_chain(self) -> None:
        for seq in self.scheduler.running:
            before: int | None = None
            for position in range(seq.computed):
                chain = self.slots[self.slot(seq, position)]
                assert self.chains[chain][:2] == (before, seq.tokens[position]), (
                    "KV on other KV than it was computed on"
                )
                before = chain
                epoch = self.chains[chain][2]
                assert seq.request.salt.decode() in self.owner[epoch], "KV of another policy's weights"
                if seq.track is not None and seq.track.fixed:
                    assert epoch <= seq.track.epoch, "KV of later weights than a pinned request has"

    @invariant()
    def the_tree_says_what_is_in_its_blocks(self) -> None:
        self.scheduler.pool.check()
        for prefix in self.scheduler.pool.indexed():
            before = None
            path = [prefix]
            while path[0].parent is not None and path[0].parent.parent is not None:
                path.insert(0, path[0].parent)
            for place in path:
                tokens = module.array("i", place.tokens)
                for offset, (token, epoch) in enumerate(zip(tokens, place.epochs, strict=True)):
                    before = self.ids[before, token, epoch]
                    chain = self.slots[place.block * SIZE + offset]
                    assert chain == before, "a block is not what it is told to be"

    @invariant()
    def heads_outlive_tails(self) -> None:
        order = list(self.scheduler.pool._loose)
        for at, block in enumerate(order):
            prefix = self.scheduler.pool._prefix[block]
            assert prefix is not None
            below = [child.block for children in prefix.children.values() for child in children]
            assert not set(below) & set(order[at:]), "a head is evicted before its tail"

    def compute(self, seq: Sequence, first: int, last: int) -> None:
        for position in range(first, last):
            before = self.slots[self.slot(seq, position - 1)] if position else None
            key = (before, seq.tokens[position], seq.now)
            if key not in self.ids:
                self.ids[key] = len(self.chains)
                self.chains.append(key)
            self.slots[self.slot(seq, position)] = self.ids[key]

    def slot(self, seq: Sequence, position: int) -> int:
        return seq.blocks[position // SIZE] * SIZE + position % SIZE

    def content(self, block: int) -> list[int]:
        return [self.slots[block * SIZE + offset] for offset in range(SIZE)]


class Thorough(SchedulerMachine):
    """Looks at every chain, so that what it finds is the best."""

    def __init__(self) -> None:
        super().__init__()
        self._bound, module.SEARCH_MAX = module.SEARCH_MAX, 1000

    def teardown(self) -> None:
        module.SEARCH_MAX = self._bound


TestScheduler = Thorough.TestCase
TestScheduler.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


#: Namespaces of a long run: a policy's requests of one tenant. Policies share a track, tenants do not share KV.
TENANTS, POLICIES = ("a", "b"), 6
STEPS = of_tier(fast=5_000, test=30_000, all=1_000_000)
STEPS_OF_ONE = 10_000


class Long(SchedulerMachine):
    """Many namespaces over few blocks, driven by a seed instead of Hypothesis."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.scheduler = new_scheduler(40, batch=9)
        tracks = [Track(0) for _ in range(POLICIES)]
        self.policies = {f"{tenant}/{n}": track for n, track in enumerate(tracks) for tenant in TENANTS}
        self.owner = {0: set(self.policies)}
        #: Sequences that have begun, and how many of them found KV.
        self.begun: dict[int, Sequence] = {}
        self.found = 0
        #: Whose request computed each slot.
        self.writers: dict[int, bytes] = {}

    def compute(self, seq: Sequence, first: int, last: int) -> None:
        if id(seq) not in self.begun:
            self.begun[id(seq)] = seq
            self.found += first > 0
        super().compute(seq, first, last)
        self.writers |= {self.slot(seq, position): seq.request.salt for position in range(first, last)}

    def something(self) -> None:
        policy = self.random.choice(list(self.policies))
        kind = self.random.random()
        prompt = [self.random.randrange(2) for _ in range(self.random.randint(2, 14))]
        age = self.random.choice([None, None, None, 0, 1])
        if kind < 0.45 and len(self.asked) < 8:
            pinned = self.random.random() < 0.1
            self.ask(
                prompt=prompt, max_tokens=self.random.randint(1, 6), age_max=age, policy=policy, pinned=pinned
            )
        elif kind < 0.93:
            self.step(steps=1, sampled=self.random.randrange(2))
        elif kind < 0.95:
            self.abort(which=self.random.randrange(20))
        elif kind < 0.96:
            # Both of its namespaces have the new weights.
            self.newest += 1
            self.policies[policy].commit(self.newest)
            self.owner[self.newest] = {f"{tenant}/{policy.partition('/')[2]}" for tenant in TENANTS}
        self.every_sequence_reads_one_chain()
        for seq in self.scheduler.running:
            for position in range(seq.computed):
                assert self.writers[self.slot(seq, position)] == seq.request.salt, "KV of another tenant"

    def books(self) -> None:
        self.the_tree_says_what_is_in_its_blocks()
        self.heads_outlive_tails()


def test_no_block_crosses_policies_versions_or_tenants_over_many_steps() -> None:
    found = 0
    for seed in range(max(1, STEPS // STEPS_OF_ONE)):
        machine = Long(seed)
        for number in range(min(STEPS, STEPS_OF_ONE)):
            machine.something()
            if number % 100 == 0:
                machine.books()
        machine.books()
        found += machine.found
    # KV was found again, and taken from others all the time.
    assert found > STEPS / 20


def computed(scheduler: Scheduler, prompt: SequenceOf[int], *, age_max: int | None = None) -> Sequence:
    seq = sequence(prompt, age_max=age_max)
    scheduler.add(seq)
    for work in scheduler.plan():
        scheduler.advance(work)
    scheduler.remove(seq)
    return seq


def matched(scheduler: Scheduler, prompt: SequenceOf[int], *, age_max: int | None = None) -> list[Prefix]:
    return scheduler.match(sequence(prompt, age_max=age_max, track=scheduler.track))


def epochs(found: SequenceOf[Prefix]) -> list[int]:
    return [prefix.epochs[0] for prefix in found]


def test_the_longest_chain_is_found_and_of_equally_long_ones_the_youngest() -> None:
    scheduler = new_scheduler(65)
    computed(scheduler, range(8))
    scheduler.track.commit(1)
    computed(scheduler, range(4), age_max=0)
    scheduler.track.commit(2)
    assert epochs(matched(scheduler, range(8))) == [0, 0, 0, 0]
    assert epochs(matched(scheduler, range(5))) == [1, 1]
    assert epochs(matched(scheduler, range(8), age_max=1)) == [1, 1]
    assert epochs(matched(scheduler, range(8), age_max=0)) == []


def test_a_request_pinned_to_a_resident_snapshot_finds_no_kv_of_later_weights() -> None:
    scheduler = new_scheduler(65)
    computed(scheduler, range(4))
    scheduler.track.commit(1)
    computed(scheduler, range(8), age_max=0)
    pinned = sequence(range(8), track=scheduler.track.fixed_at(0))
    assert epochs(scheduler.match(pinned)) == [0, 0]
    assert epochs(matched(scheduler, range(8))) == [1, 1, 1, 1]
    other = new_scheduler(65)
    other.track.commit(1)
    computed(other, range(8))
    assert other.match(sequence(range(8), track=Track(0, fixed=True))) == []


@pytest.mark.parametrize(("bound", "found"), [(1, 63), (4, 64)])
def test_the_search_for_a_longer_chain_is_bounded(
    monkeypatch: pytest.MonkeyPatch, bound: int, found: int
) -> None:
    """The chain that is tried last is the longest; the one before is a block shorter, and the first another."""
    monkeypatch.setattr(module, "SEARCH_MAX", bound)
    scheduler = new_scheduler(513, batch=1000)
    for epoch, blocks in enumerate((64, 63, 62)):
        if epoch:
            scheduler.track.commit(epoch)
        computed(scheduler, range(blocks * SIZE), age_max=0)
    match = matched(scheduler, range(64 * SIZE))
    assert len(match) == found


def test_blocks_behind_one_that_was_evicted_are_offered_again_with_it() -> None:
    """A stream computed its prompt beside another with the same: the blocks that are found are the other's, and go first."""
    scheduler = new_scheduler(11)
    other, stream = sequence(range(4)), sequence(range(4), max_tokens=9)
    for seq in (other, stream):
        scheduler.add(seq)
    for work in scheduler.plan():
        scheduler.advance(work)
    assert [place.block for place in stream.path] == other.blocks
    scheduler.remove(other)
    taken = [scheduler.pool.allocate() for _ in range(scheduler.pool.available)]
    assert not stream.path[0].kept
    for block in taken:
        scheduler.pool.release(block)
    for token in (4, 5):
        stream.tokens.append(token)
        for work in scheduler.plan():
            scheduler.advance(work)
    assert [place.block for place in stream.path] == stream.blocks
    assert [place.block for place in matched(scheduler, range(6))] == stream.blocks
    scheduler.pool.check()


def test_a_stream_whose_first_block_is_older_than_all_that_are_kept_offers_nothing() -> None:
    scheduler = new_scheduler(65)
    stream = sequence(range(2), max_tokens=9)
    scheduler.add(stream)
    (work,) = scheduler.plan()
    scheduler.advance(work)
    for epoch in range(1, HISTORIES_MAX + 1):
        scheduler.track.commit(epoch)
        computed(scheduler, range(2), age_max=0)
    assert not stream.path[0].kept
    for token in (2, 3, 4, 5):
        stream.tokens.append(token)
        for work in scheduler.plan():
            assert scheduler.advance(work) == []
    assert not any(place.kept for place in stream.path)
    assert epochs(matched(scheduler, range(6))) == [HISTORIES_MAX]
    scheduler.pool.check()
