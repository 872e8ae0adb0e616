"""Which sequence computes which positions in the next step.

Owns: the waiting queue, the running set, each sequence's blocks and its place in the prefix cache. No torch.
Always holds:
- A sequence's tokens are prompt + generated; KV is valid for positions 0..computed-1, in its own blocks or shared ones.
- Sequences with one token to compute (decode) go first, so a long prompt never keeps a stream out of a step; what is
  left of the token budget goes to prefills in arrival order, beside a decode at most `max_prefill_tokens` of it, so that
  a long prompt never makes a stream's step long either. An urgent prefill goes before all others, in small pieces beside a
  decode, for which there is room in every step: at most `URGENT_TOKENS` above the budget.
- When blocks run out a running sequence is preempted, the youngest that has not crossed a swap if there is one: its
  blocks are released, its tokens stay, and it recomputes later. Nothing already reported changes.
- A sequence reuses a chain of blocks each of which was computed on the one before, and offers its own blocks behind the
  very ones it read. Epochs never fall along a chain, so KV is as old as its first position.
- An admitted sequence can always finish: a request that could outgrow the pool is refused by `check_fits`.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from midstream.engine.embedded.blocks import NO_BLOCK, BlockPool, OutOfBlocks, Prefix
from midstream.types import GenerateRequest, TopLogprob

if TYPE_CHECKING:
    from midstream.engine.embedded.constraint import Matcher

#: Of an urgent prefill beside decodes: a swap's canary must not hold up the streams that crossed it.
URGENT_TOKENS = 8

#: Blocks looked at for a prompt that was computed under several weights, per block that it has.
SEARCH_MAX = 4

WIDTH = array("i").itemsize  # of a token, packed


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of one request."""

    request: GenerateRequest
    index: int
    leader: Sequence | None = (
        None  # the first choice of the same request; prefilled first, so that its blocks are shared
    )
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    path: list[Prefix] = field(default_factory=list)  # places of its leading full blocks in the prefix cache
    written: list[tuple[int, int]] = field(
        default_factory=list
    )  # of its own KV: first position, epoch from there on
    packed: bytes = b""  # its tokens as they are matched
    computed: int = 0
    cursor: int = 0  # next position to run; below `computed` only to get logits there again
    arrived: float = field(default_factory=time.perf_counter)
    queued_s: float = 0.0  # until first admission
    cached_tokens: int | None = None  # set at first admission
    last_sampled: tuple[float, int, bytes | None, int] | None = (
        None  # of the last generated token: raw logprob, snapshot, route, router tie
    )
    prompt_tops: dict[int, tuple[TopLogprob, ...]] = field(
        default_factory=dict
    )  # alternatives, until announced
    epoch: int = 0  # of the weights its first own KV was computed under
    told_epoch: int = -1  # when its KV provenance was last reported; -1: not since it was admitted
    announced: bool = False  # the event with cached_tokens and prompt records is out
    done: bool = False
    matcher: Matcher | None = None  # what its next tokens must match
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.emitted_of(self.index)]
        self.prompt_len = len(self.request.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def first_scored(self) -> int:
        """The first token position that needs a prompt record from a pass of its own (position 0 has none)."""
        if self.announced or not self.request.prompt_records:
            return self.prompt_len
        return max(1, self.prompt_len - self.request.prompt_records)


class Work(NamedTuple):
    """Compute positions first..last-1 of a sequence; those below `write_from` already have KV and write to scratch."""

    seq: Sequence
    first: int
    last: int
    write_from: int

    @property
    def size(self) -> int:
        return self.last - self.first


class Scheduler:
    """scored(block, first_offset) tells whether the block's prompt scores from that offset on can be reused now."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_prefill_tokens: int,
        max_running: int,
        scored: Callable[[int, int], bool],
        on_allocate: Callable[[int], None],
    ) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.epoch = 0  # raised at every swap
        self._alike = (0,) * pool.block_size
        self._budget = max_batch_tokens
        self._prefill_budget = max_prefill_tokens
        self._max_running = max_running
        self._scored = scored
        self._on_allocate = on_allocate

    def __repr__(self) -> str:
        return f"Scheduler(running={len(self.running)}, waiting={len(self.waiting)}, {self.pool!r})"

    def check_fits(self, request: GenerateRequest) -> str | None:
        """Why the request can never run, or None."""
        if len(request.emitted) not in (0, request.n) or not request.choices:
            return "what was emitted must be told of every choice, and one must be unfinished"
        for tokens in filter(None, request.emitted):
            if len(tokens) > request.sampling.max_tokens:
                return f"{len(tokens)} tokens were emitted of at most {request.sampling.max_tokens}"
        longest = len(request.prompt) + request.sampling.max_tokens
        blocks = -(-longest // self.pool.block_size)
        if blocks <= self.pool.total:
            return None
        capacity = self.pool.total * self.pool.block_size
        return f"prompt plus max_tokens is {longest} tokens, but the KV cache holds {capacity}"

    def add(self, sequence: Sequence) -> None:
        if sequence.request.urgent:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Finish or abort: the sequence leaves and its blocks are released."""
        sequence.done = True
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def plan(self) -> list[Work]:
        """The next step's work, decodes first. Allocates blocks, may preempt and admit."""
        waiting = len(self.waiting)
        decodes: list[Work] = []
        prefills: list[Work] = []
        budget = self._budget
        unfinished = []  # prefills
        for seq in tuple(self.running):
            if len(seq.tokens) - seq.cursor > 1:
                unfinished.append(seq)
            elif budget > 0 and self._has_room(seq, 1):
                decodes.append(_work(seq, 1))
                budget -= 1
        if decodes:
            budget = min(budget, self._prefill_budget)
        if len(self.waiting) == waiting and self._admit_urgent():
            unfinished.append(self.running[-1])
            waiting -= 1
        for seq in sorted(unfinished, key=lambda seq: not seq.request.urgent):
            allowed = max(budget, URGENT_TOKENS) if seq.request.urgent else budget
            size = min(allowed, _piece(seq, beside=decodes))
            if size > 0 and self._has_room(seq, size):
                (decodes if size == 1 else prefills).append(_work(seq, size))
                budget = max(0, budget - size)
        preempted = len(self.waiting) > waiting
        while budget > 0 and self.waiting and not preempted:
            seq = self.waiting[0]
            if len(self.running) >= self._max_running or not self._admit(seq):
                break
            size = min(budget, _piece(seq, beside=decodes))
            budget -= size
            (decodes if size == 1 else prefills).append(_work(seq, size))
        works = decodes + prefills
        return [w for w in works if w.seq.blocks] if preempted else works

    def _admit_urgent(self) -> bool:
        """One that waits, also beside as many as may run."""
        return bool(self.waiting) and self.waiting[0].request.urgent and self._admit(self.waiting[0])

    def advance(self, work: Work) -> list[tuple[int, int]]:
        """Note that the work is done. Returns (own block, holder) for full blocks whose content another block holds."""
        seq, size = work.seq, self.pool.block_size
        seq.cursor = work.last
        if work.last > seq.computed:
            if not seq.written or seq.written[-1][1] != self.epoch:
                seq.written.append((seq.computed, self.epoch))
            seq.computed = work.last
        duplicates: list[tuple[int, int]] = []
        for number in range(len(seq.path), seq.computed // size):
            if seq.path and not seq.path[-1].kept:
                duplicates += self._offer_again(seq)
            tokens = array("i", seq.tokens[number * size : (number + 1) * size]).tobytes()
            duplicates += self._offer(seq, tokens, self._epochs(seq, number))
        return duplicates

    def _offer(self, seq: Sequence, tokens: bytes, epochs: tuple[int, ...]) -> list[tuple[int, int]]:
        """Offer the next full block of `seq` to the prefix cache; returns it with its holder when that is another block."""
        parent = seq.path[-1] if seq.path else self.pool.root(seq.request.salt)
        own = seq.blocks[len(seq.path)]
        prefix = self.pool.index(own, parent, tokens, epochs)
        seq.path.append(prefix)
        return [] if prefix.block in (own, NO_BLOCK) else [(own, prefix.block)]

    def _offer_again(self, seq: Sequence) -> list[tuple[int, int]]:
        """Of the blocks that the next one stands on, some are not in the prefix cache any more; the sequence has them still."""
        kept = len(seq.path)
        while kept and not seq.path[kept - 1].kept:
            kept -= 1
        gone, seq.path = seq.path[kept:], seq.path[:kept]
        duplicates: list[tuple[int, int]] = []
        for at, place in enumerate(gone):
            duplicates += self._offer(seq, place.tokens, place.epochs)
            if not seq.path[-1].kept:  # then nothing behind it is
                seq.path += gone[at + 1 :]
                break
        return duplicates

    def _epochs(self, seq: Sequence, number: int) -> tuple[int, ...]:
        """Under which weights each position of a block of its own was computed."""
        size = self.pool.block_size
        first, last = number * size, (number + 1) * size
        start, epoch = seq.written[-1]
        if start <= first:
            if self._alike[0] != epoch:
                self._alike = (epoch,) * size
            return self._alike  # one object for nearly all blocks
        epochs: list[int] = []
        for at, (start, epoch) in enumerate(seq.written):
            end = seq.written[at + 1][0] if at + 1 < len(seq.written) else last
            epochs += [epoch] * (min(end, last) - max(start, first))
        return tuple(epochs)

    def _admit(self, seq: Sequence) -> bool:
        leader = seq.leader
        if leader is not None and not leader.done and leader.computed < leader.prompt_len:
            return False
        shared = self._match(seq)
        for prefix in shared:
            self.pool.retain(prefix.block)
        needed = -(-len(seq.tokens) // self.pool.block_size) - len(shared)
        if needed > self.pool.available:
            for prefix in reversed(shared):
                self.pool.release(prefix.block)
            return False
        self.waiting.popleft()
        self.running.append(seq)
        seq.epoch, seq.told_epoch = self.epoch, -1
        seq.blocks = [prefix.block for prefix in shared] + [self._allocate() for _ in range(needed)]
        seq.path = shared
        seq.computed = len(shared) * self.pool.block_size
        seq.cursor = seq.computed
        again = seq.computed > 0 and (
            seq.computed == len(seq.tokens) or seq.first_scored <= seq.computed < seq.prompt_len
        )
        if again:
            seq.cursor -= 1  # its logits are needed, its KV is there
        if seq.cached_tokens is None:
            seq.queued_s = time.perf_counter() - seq.arrived
            seq.cached_tokens = min(seq.computed, seq.prompt_len)
        return True

    def _match(self, seq: Sequence) -> list[Prefix]:
        """The longest chain of cached blocks this sequence may use; of several as long the youngest.

        Where one forks, the youngest branch is walked to its end, and then the others, the last fork first; what is walked
        besides the first chain is bounded.
        """
        if seq.request.prompt_records and seq.request.top_logprobs and not seq.announced:
            return []  # alternatives for prompt tokens are not kept with the blocks
        size = self.pool.block_size
        levels = len(seq.tokens) // size
        if len(seq.packed) != levels * size * WIDTH:
            seq.packed = array("i", seq.tokens[: levels * size]).tobytes()
        packed, width = seq.packed, size * WIDTH
        scored_from = seq.first_scored // size if seq.first_scored < seq.prompt_len else levels
        best: list[Prefix] = []
        path: list[Prefix] = []
        forks: list[tuple[int, Prefix]] = []  # branches not walked yet: blocks before it, its first block
        prefix, left = self.pool.root(seq.request.salt), SEARCH_MAX * levels
        while True:
            before = len(path)
            for number in range(before, levels):
                found = prefix.children.get(packed[number * width : (number + 1) * width])
                if found is None:
                    break
                if len(found) > 1 or number == 0 or number >= scored_from:
                    found = [each for each in found if self._usable(seq, each, number)]
                    if not found:
                        break
                    forks += [(number, other) for other in found[:0:-1]]
                prefix = found[0]
                path.append(prefix)
            if len(path) > len(best):
                best = path
            left -= len(path) - before
            if not forks or len(best) == levels or left <= 0:
                return best
            before, prefix = forks.pop()
            path = [*path[:before], prefix]

    def _usable(self, seq: Sequence, prefix: Prefix, number: int) -> bool:
        """Whether it may be block `number` of the sequence; that the blocks before it may is known."""
        age_max = seq.request.kv_age_max
        if number == 0 and age_max is not None and self.epoch - prefix.epochs[0] > age_max:
            return False
        size = self.pool.block_size
        wanted = max(seq.first_scored - number * size, 0)
        end = min(seq.prompt_len - number * size, size)
        return wanted >= end or self._scored(prefix.block, wanted)

    def _allocate(self) -> int:
        block = self.pool.allocate()
        self._on_allocate(block)
        return block

    def _has_room(self, seq: Sequence, size: int) -> bool:
        """Make room for `size` more positions, preempting younger sequences if need be; False: `seq` was preempted, now or for
        one before it (only then a running sequence holds no block)."""
        if not seq.blocks:
            return False
        while len(seq.blocks) * self.pool.block_size < seq.cursor + size:
            try:
                seq.blocks.append(self._allocate())
            except OutOfBlocks:
                victim = self._victim()
                self._preempt(victim)
                if victim is seq:
                    return False
        return True

    def _victim(self) -> Sequence:
        """The youngest whose KV is all of the current weights, since recomputing changes nothing there; else the youngest."""
        current = [seq for seq in self.running if seq.epoch == self.epoch]
        return (current or self.running)[-1]

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.last_sampled = None  # over KV that may be another when it is computed again
        urgent = sum(1 for other in self.waiting if other.request.urgent)  # they come first
        self.waiting.insert(0 if seq.request.urgent else urgent, seq)

    def _release(self, seq: Sequence) -> None:
        for number in reversed(range(len(seq.blocks))):  # the tail of a prefix is evicted before its head
            self.pool.release(seq.blocks[number])
            if number < len(seq.path):
                self.pool.touch(seq.path[number])
        seq.blocks, seq.path, seq.written = [], [], []
        seq.computed = seq.cursor = 0


def _piece(seq: Sequence, beside: list[Work]) -> int:
    """How much of what is left of a prefill may go into a step beside these decodes, budgets aside."""
    left = len(seq.tokens) - seq.cursor
    return min(left, URGENT_TOKENS) if beside and seq.request.urgent else left


def _work(seq: Sequence, size: int) -> Work:
    return Work(seq, seq.cursor, seq.cursor + size, seq.computed)
