"""The scheduler: which sequence computes which positions in the next step.

Owns: the waiting queue, the running set, each sequence's blocks and its place in the prefix cache. Imports no torch.
Always holds:
- The tokens of a sequence are its prompt and its generated tokens. KV is valid for positions 0..computed-1, in blocks of its
  own or shared ones.
- Sequences with one token to compute (decodes) go first, so a long prompt never keeps a stream out of a step. Prefills share
  the rest of the token budget in the order in which they were admitted, beside a decode at most `max_prefill_tokens` of it. So
  a long prompt never makes a stream's step long.
- Waiting sequences are admitted by priority, those of equal priority in arrival order.
- An urgent prefill goes before all others. Beside a decode it runs in small pieces, and every step has room for a piece: at
  most `URGENT_TOKENS` above the budget.
- When blocks run out, a running sequence is preempted: the youngest that has not crossed a swap, if there is one. Its blocks
  are released, its tokens stay, and it computes them again later. Nothing already reported changes.
- A sequence of a session leaves a claim on its blocks (claims.py). So they are evicted after those of sessions that ended.
- A sequence reuses a chain of blocks, each of which was computed on the one before. It offers its own blocks behind the very
  blocks that it read. Epochs never fall along a chain, so KV is as old as its first position.
- Of a chain that it reuses, a sequence copies back what lies in the second tier (offload.py), within the budget of its steps.
  It computes once that is done. What goes from there meanwhile, it computes.
- While it is frozen, only urgent sequences are computed. The others keep their blocks, unless an urgent one needs them.
- An admitted sequence can always finish: `check_fits` refuses a request that could outgrow the pool.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from midstream.core.types import GenerateRequest, TopLogprob
from midstream.engine.claims import Claims, Return, SaltParts
from midstream.engine.embedded import restores
from midstream.engine.embedded.blocks import NO_BLOCK, BlockPool, OutOfBlocks, Prefix
from midstream.engine.embedded.track import Track

if TYPE_CHECKING:
    from midstream.engine.embedded.limits import TokenFollower

#: Tokens of an urgent prefill in a step with decodes. A swap's canary must not hold up the streams that crossed the swap.
URGENT_TOKENS = 8

#: Cached blocks to look at for a prompt that was computed under several weights, per block of the prompt.
SEARCH_MAX = 4

#: Bytes of a packed token.
WIDTH = array("i").itemsize


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of one request.

    leader: the first choice of the same request, which is prefilled first so that its blocks can be shared.
    track: the weights that it runs under; None: those of the scheduler's own track.
    path: the places of its leading full blocks in the prefix cache. ahead: those behind them that it may reuse too, once they
    are copied back; the next one stands last. written: of its own KV, spans of equal epoch, as (first
    position, epoch). packed: its tokens in the form in which they are matched.
    cursor: the next position to run. It is below `computed` only to get the logits there again.
    cached_tokens, queued_s: set at the first admission. last_sampled: of the newest generated token, raw logprob, snapshot,
    route and router tie. prompt_tops: alternatives of prompt tokens and their own ranks, until they are announced.
    epoch: of the weights that computed its first own KV. reported_epoch: the epoch in which the source of its KV was last
    reported; -1: not since it was admitted. renames: of labels, how many it knows of. announced: its first event, with
    cached_tokens and prompt records, was made.
    """

    request: GenerateRequest
    index: int
    leader: Sequence | None = None
    track: Track | None = None
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    path: list[Prefix] = field(default_factory=list)
    ahead: list[Prefix] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    packed: bytes = b""
    computed: int = 0
    cursor: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    queued_s: float = 0.0
    cached_tokens: int | None = None
    last_sampled: tuple[float, int, bytes | None, int] | None = None
    prompt_tops: dict[int, tuple[tuple[TopLogprob, ...], int]] = field(default_factory=dict)
    epoch: int = 0
    reported_epoch: int = -1
    renames: int = 0
    announced: bool = False
    done: bool = False
    matcher: TokenFollower | None = None
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.emitted_of(self.index)]
        self.prompt_len = len(self.request.prompt)

    @property
    def now(self) -> int:
        """The commit that its next step takes."""
        assert self.track is not None, f"{self.request.request_id} is with no scheduler"
        return self.track.epoch

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def first_scored(self) -> int:
        """The first token position that needs a prompt record from a pass of its own. Position 0 needs none."""
        if self.announced or not self.request.prompt_records:
            return self.prompt_len
        return max(1, self.prompt_len - self.request.prompt_records)


class StepWork(msgspec.Struct, frozen=True, eq=False):
    """Compute positions first..last-1 of a sequence. Those below `write_from` have KV already and write to scratch.

    epoch: of the weights that compute it, which change only between steps.
    """

    seq: Sequence
    first: int
    last: int
    write_from: int
    epoch: int

    @property
    def size(self) -> int:
        return self.last - self.first


class Scheduler:
    """scored(block, first_offset, epoch) says whether the block's prompt scores from that offset on can be reused under these
    weights. track: of sequences that have none of their own."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_tokens: int,
        max_prefill_tokens: int,
        max_running: int,
        scored: Callable[[int, int, int], bool],
        on_allocate: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.claims: Claims[Prefix] = Claims(pool)
        pool.on_need = lambda: self.claims.give_up(clock())
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.track = Track(0)
        self.frozen = False
        self._alike = (0,) * pool.block_size
        self._budget = max_batch_tokens
        self._prefill_budget = max_prefill_tokens
        self._max_running = max_running
        self._scored = scored
        self._on_allocate = on_allocate
        self._clock = clock

    def __repr__(self) -> str:
        return f"Scheduler(running={len(self.running)}, waiting={len(self.waiting)}, {self.pool!r})"

    @property
    def busy(self) -> bool:
        """Whether `plan` may find work."""
        first = (*self.running, *([self.waiting[0]] if self.waiting else []))
        return any(seq.request.urgent for seq in first) if self.frozen else bool(first)

    def check_fits(self, request: GenerateRequest) -> str | None:
        """The reason why the request can never run, or None."""
        if len(request.emitted) not in (0, request.n) or not request.choices:
            return "emitted must have an entry for every choice, and one choice must be unfinished"
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
        if sequence.track is None:
            sequence.track = self.track
        if sequence.request.urgent:
            self.waiting.appendleft(sequence)
        elif not self.waiting or _rank(self.waiting[-1]) <= _rank(sequence):
            self.waiting.append(sequence)
        else:
            at = next(i for i, other in enumerate(self.waiting) if _rank(other) > _rank(sequence))
            self.waiting.insert(at, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out and release its blocks."""
        sequence.done = True
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def plan(self) -> list[StepWork]:
        """The work of the next step, decodes first. Allocates blocks; may preempt and admit sequences."""
        waiting = len(self.waiting)
        decodes: list[StepWork] = []
        prefills: list[StepWork] = []
        budget, block_size = self._budget, self.pool.block_size
        # Running sequences in prefill.
        unfinished = []
        for seq in tuple(self.running):
            if self.frozen and not seq.request.urgent:
                continue
            if seq.ahead or len(seq.tokens) - seq.cursor > 1:
                unfinished.append(seq)
            elif budget > 0 and (seq.cursor < len(seq.blocks) * block_size or self._has_room(seq, 1)):
                decodes.append(_work(seq, 1))
                budget -= 1
        if decodes:
            budget = min(budget, self._prefill_budget)
        if waiting and len(self.waiting) == waiting and self._admit_urgent():
            unfinished.append(self.running[-1])
            waiting -= 1
        for seq in sorted(unfinished, key=lambda seq: not seq.request.urgent):
            allowed = max(budget, URGENT_TOKENS) if seq.request.urgent else budget
            allowed, copied = self._restore(seq, allowed)
            size = min(allowed, _piece(seq, beside=decodes))
            if size > 0 and self._has_room(seq, size):
                (decodes if size == 1 else prefills).append(_work(seq, size))
                copied += size
            budget = max(0, budget - copied)
        preempted = len(self.waiting) > waiting
        while budget > 0 and self.waiting and not preempted:
            seq = self.waiting[0]
            if self.frozen and not seq.request.urgent:
                break
            if len(self.running) >= self._max_running or not self._admit(seq):
                break
            budget, _ = self._restore(seq, budget)
            size = min(budget, _piece(seq, beside=decodes))
            budget -= size
            if size > 0:
                (decodes if size == 1 else prefills).append(_work(seq, size))
        works = decodes + prefills
        return [w for w in works if w.seq.blocks] if preempted else works

    def _admit_urgent(self) -> bool:
        """Admit an urgent request if one is the first to wait, even above the limit of running sequences."""
        if not self.waiting[0].request.urgent:
            return False
        while not self._admit(self.waiting[0]):
            if not self.frozen or not self.running:
                return False
            # Nothing that stands still ends and makes room.
            self._preempt(self._victim())
        return True

    def advance(self, work: StepWork) -> list[tuple[int, int]]:
        """Record that the work is done. Returns (own block, holder) for full blocks if another block holds the same content."""
        seq, size = work.seq, self.pool.block_size
        seq.cursor = work.last
        if work.last > seq.computed:
            if not seq.written or seq.written[-1][1] != work.epoch:
                seq.written.append((seq.computed, work.epoch))
            seq.computed = work.last
        duplicates: list[tuple[int, int]] = []
        for number in range(len(seq.path), seq.computed // size):
            if seq.path and not seq.path[-1].kept:
                duplicates += self._offer_again(seq)
            tokens = array("i", seq.tokens[number * size : (number + 1) * size]).tobytes()
            duplicates += self._offer(seq, tokens, self._epochs(seq, number))
        return duplicates

    def _offer(self, seq: Sequence, tokens: bytes, epochs: tuple[int, ...]) -> list[tuple[int, int]]:
        """Offer the next full block of `seq` to the prefix cache. Returns it with its holder if that is another block."""
        parent = seq.path[-1] if seq.path else self.pool.root(seq.request.salt)
        own = seq.blocks[len(seq.path)]
        prefix = self.pool.index(own, parent, tokens, epochs)
        seq.path.append(prefix)
        return [] if prefix.block in (own, NO_BLOCK) else [(own, prefix.block)]

    def _offer_again(self, seq: Sequence) -> list[tuple[int, int]]:
        """Offer blocks again that the next block stands on and that have left the prefix cache. The sequence still has them."""
        kept = len(seq.path)
        while kept and not seq.path[kept - 1].kept:
            kept -= 1
        gone, seq.path = seq.path[kept:], seq.path[:kept]
        duplicates: list[tuple[int, int]] = []
        for at, place in enumerate(gone):
            duplicates += self._offer(seq, place.tokens, place.epochs)
            if not seq.path[-1].kept:
                # Then nothing behind it is kept.
                seq.path += gone[at + 1 :]
                break
        return duplicates

    def _epochs(self, seq: Sequence, number: int) -> tuple[int, ...]:
        """The epoch of each position in a block that the sequence computed itself."""
        size = self.pool.block_size
        first, last = number * size, (number + 1) * size
        start, epoch = seq.written[-1]
        if start <= first:
            if self._alike[0] != epoch:
                self._alike = (epoch,) * size
            # One object serves nearly all blocks.
            return self._alike
        epochs: list[int] = []
        for at, (start, epoch) in enumerate(seq.written):
            end = seq.written[at + 1][0] if at + 1 < len(seq.written) else last
            epochs += [epoch] * (min(end, last) - max(start, first))
        return tuple(epochs)

    def _admit(self, seq: Sequence) -> bool:
        leader = seq.leader
        if leader is not None and not leader.done and leader.computed < leader.prompt_len:
            return False
        shared = self.match(seq)
        ahead: list[Prefix] = []
        if self.pool.offload is not None:
            shared, ahead = restores.split(self.pool, shared)
        for prefix in shared:
            self.pool.retain(prefix.block)
        needed = -(-len(seq.tokens) // self.pool.block_size) - len(shared)
        if needed > self.pool.available:
            for prefix in reversed(shared):
                self.pool.release(prefix.block)
            return False
        if seq.request.session:
            levels = len(seq.tokens) // self.pool.block_size
            self.claims.take_up(seq.request.session, SaltParts.of(seq.request.salt), shared + ahead, levels)
        if ahead:
            restores.pin(self.pool, ahead)
        self.waiting.popleft()
        self.running.append(seq)
        seq.blocks = [prefix.block for prefix in shared] + [self.allocate() for _ in range(needed)]
        seq.path, seq.ahead, seq.epoch = shared, ahead[::-1], seq.now
        if not ahead:
            self._begin(seq)
        return True

    def _restore(self, seq: Sequence, budget: int) -> tuple[int, int]:
        """Restore what the sequence may reuse, and begin it once all is there. What is left of the budget for computing, and
        what this took."""
        if not seq.ahead:
            return budget, 0
        spent = restores.restore(self.pool, seq, budget)
        if seq.ahead:
            return 0, budget
        self._begin(seq)
        return budget - spent, spent

    def _begin(self, seq: Sequence) -> None:
        """All that an admitted sequence reuses is in its blocks. It computes from there on."""
        seq.epoch, seq.reported_epoch = seq.now, -1
        seq.computed = seq.cursor = len(seq.path) * self.pool.block_size
        again = seq.computed > 0 and (
            seq.computed == len(seq.tokens) or seq.first_scored <= seq.computed < seq.prompt_len
        )
        if again:
            # The logits of this position are needed; its KV is there.
            seq.cursor -= 1
        if seq.cached_tokens is None:
            seq.queued_s = time.perf_counter() - seq.arrived
            seq.cached_tokens = min(seq.computed, seq.prompt_len)

    def match(self, seq: Sequence) -> list[Prefix]:
        """The longest chain of cached blocks that this sequence may use. Among equally long chains, the youngest.

        At a fork, the youngest branch is walked to its end, and then the other branches, the last fork first. The number of
        blocks walked besides the first chain is bounded.
        """
        if seq.request.prompt_records and seq.request.top_logprobs and not seq.announced:
            # Alternatives of prompt tokens are not kept with the blocks.
            return []
        size = self.pool.block_size
        levels = len(seq.tokens) // size
        if len(seq.packed) != levels * size * WIDTH:
            seq.packed = array("i", seq.tokens[: levels * size]).tobytes()
        packed, width = seq.packed, size * WIDTH
        scored_from = seq.first_scored // size if seq.first_scored < seq.prompt_len else levels
        best: list[Prefix] = []
        path: list[Prefix] = []
        # Branches not walked yet: the number of blocks before the branch, and its first block.
        forks: list[tuple[int, Prefix]] = []
        prefix, left = self.pool.root(seq.request.salt), SEARCH_MAX * levels
        fixed = seq.track is not None and seq.track.fixed
        while True:
            before = len(path)
            for number in range(before, levels):
                found = prefix.children.get(packed[number * width : (number + 1) * width])
                if found is None:
                    break
                if len(found) > 1 or number == 0 or number >= scored_from or fixed:
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
        """Whether `prefix` may be block `number` of the sequence, given that the blocks before it may be used."""
        track, age_max = seq.track, seq.request.kv_age_max
        assert track is not None
        if number == 0 and age_max is not None and track.age(prefix.epochs[0]) > age_max:
            return False
        if prefix.epochs[-1] > track.epoch:
            # Later weights computed it, and the sequence stays with its own.
            return False
        size = self.pool.block_size
        wanted = max(seq.first_scored - number * size, 0)
        end = min(seq.prompt_len - number * size, size)
        return wanted >= end or self._scored(prefix.block, wanted, track.epoch)

    def allocate(self) -> int:
        block = self.pool.allocate()
        self._on_allocate(block)
        return block

    def _has_room(self, seq: Sequence, size: int) -> bool:
        """Make room for `size` more positions, by preempting younger sequences if necessary.

        False if `seq` itself was preempted, now or for a sequence before it. Only then a running sequence holds no block.
        """
        if not seq.blocks:
            return False
        while len(seq.blocks) * self.pool.block_size < seq.cursor + size:
            try:
                seq.blocks.append(self.allocate())
            except OutOfBlocks:
                victim = self._victim()
                self._preempt(victim)
                if victim is seq:
                    return False
        return True

    def _victim(self) -> Sequence:
        """The youngest sequence with KV of the current weights alone, since computing it again changes nothing.

        Where there is none, the youngest sequence.
        """
        current = [seq for seq in self.running if seq.epoch == seq.now]
        return (current or self.running)[-1]

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq, expected_s=0.0)
        # It was sampled over KV that may differ when it is computed again.
        seq.last_sampled = None
        # It goes before all that wait, but for urgent requests and those of a lower priority number.
        before = sum(1 for other in self.waiting if _rank(other) < _rank(seq))
        self.waiting.insert(before, seq)

    def end_session(self, session: str) -> None:
        """The session is over: what it had alone is the first to be evicted, in both tiers."""
        self.claims.end(session)
        self.pool.end(session)

    def _release(self, seq: Sequence, expected_s: float | None = None) -> None:
        request = seq.request
        if self.pool.offload is not None:
            restores.let_go(self.pool, seq)
        if request.session and seq.path and request.kept_s:
            expected_s = request.returns_s if expected_s is None else expected_s
            returns = Return(expected_s, request.kept_s)
            self.claims.add(request.session, SaltParts.of(request.salt), seq.path, returns, self._clock())
        # In this order, the tail of a prefix is evicted before its head.
        for number in reversed(range(len(seq.blocks))):
            self.pool.release(seq.blocks[number])
            if number < len(seq.path):
                self.pool.touch(seq.path[number])
        seq.blocks, seq.path, seq.ahead, seq.written = [], [], [], []
        seq.computed = seq.cursor = 0


def _rank(seq: Sequence) -> tuple[bool, int]:
    """The place in the waiting queue: urgent requests, then those of a lower priority number."""
    return not seq.request.urgent, seq.request.priority


def _piece(seq: Sequence, beside: list[StepWork]) -> int:
    """Tokens of an unfinished prefill that may go into a step beside these decodes, budgets aside."""
    left = len(seq.tokens) - seq.cursor
    return min(left, URGENT_TOKENS) if beside and seq.request.urgent else left


def _work(seq: Sequence, size: int) -> StepWork:
    return StepWork(seq, seq.cursor, seq.cursor + size, seq.computed, seq.now)
