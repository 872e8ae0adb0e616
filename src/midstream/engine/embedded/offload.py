"""The second tier of the KV cache: blocks that the pool has evicted, until they are copied back. Imports no torch.

Owns: the numbers of its blocks, which follow those of the pool; the order in which they go; what a copied token costs.
Always holds:
- Each of its blocks is free, or holds a place of the pool's tree that has no other block. `BlockPool.check` proves it.
- What was moved here last goes last, but for what an ended session had alone: that goes first. So a tail goes before its head.
- What a sequence waits for is pinned and does not go for others. What comes meanwhile and finds no room goes instead.
- What is here is found by the pool's own search, so no rule of namespaces, ages, policies or pins knows of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

#: What was measured before counts so much less with each new measurement.
FADING = 0.9
#: Of the occasions on which copying seems dearer than computing, one in so many is taken to measure again.
RETRY = 32
#: Blocks that are copied on such an occasion. `FADING` forgets most of what was before them.
MEASURED = 16
#: A copied token costs at least this share of a computed one, so a step has a bound on the tokens that it copies.
SHARE_MIN = 1 / 64


class CopyPrice:
    """What it costs to copy a token's KV back, as a share of computing it. Both are measured; until then it is a whole one."""

    def __init__(self) -> None:
        self._copied = self._computed = (0.0, 0.0)
        self._refused = 0

    def __repr__(self) -> str:
        return f"CopyPrice({self.share:.3f})"

    def copied(self, tokens: int, seconds: float) -> None:
        self._copied = _faded(self._copied, tokens, seconds)

    def stepped(self, sizes: Sequence[int], seconds: float) -> None:
        """A step computed pieces of these sizes. Where most of them are decodes, it says little of what a prompt costs."""
        tokens = sum(sizes)
        if tokens >= 4 * len(sizes):
            self.computed(tokens, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        self._computed = _faded(self._computed, tokens, seconds)

    @property
    def share(self) -> float:
        (copied, copied_s), (computed, computed_s) = self._copied, self._computed
        if not copied or not computed or not computed_s:
            return 1.0
        return max(SHARE_MIN, (copied_s / copied) / (computed_s / computed))

    def worth(self) -> bool:
        """Whether to copy what is here rather than to compute it."""
        if self.share <= 1.0:
            return True
        self._refused += 1
        return self._refused % RETRY == 0


def _faded(before: tuple[float, float], tokens: int, seconds: float) -> tuple[float, float]:
    return before[0] * FADING + tokens, before[1] * FADING + seconds


class Offload:
    """first: the number of its first block. move(source, target): copy all that is kept for a block, from tier to tier.
    merge(source, target): of that, only what `target`, a block of equal content, lacks."""

    def __init__(
        self,
        first: int,
        blocks: int,
        *,
        move: Callable[[int, int], None],
        merge: Callable[[int, int], None],
        price: CopyPrice | None = None,
    ) -> None:
        self.first, self.total = first, blocks
        self.move, self.merge = move, merge
        self.price = price or CopyPrice()
        self._free = list(range(first + blocks - 1, first - 1, -1))
        # What goes next stands first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        # How many sequences wait for each of these.
        self._pinned: dict[int, int] = {}
        # Of each session, the blocks that it alone had, and the session of such a block.
        self._alone: dict[str, dict[int, None]] = {}
        self._session: dict[int, str] = {}
        #: Blocks that were copied back, and blocks that went from here without.
        self.restored = self.dropped = 0

    def __repr__(self) -> str:
        return f"Offload({len(self)} of {self.total}, {self.restored} restored, {self.dropped} dropped)"

    def __len__(self) -> int:
        return len(self._kept) + len(self._pinned)

    def __contains__(self, block: int) -> bool:
        return block in self._kept or block in self._pinned

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def pinned(self) -> int:
        return len(self._pinned)

    def next_to_go(self) -> int | None:
        """The block whose place goes next; None: they are all pinned."""
        return next(iter(self._kept), None)

    def take(self, session: str) -> int:
        """A free block. session: that alone had what it will hold, or ""."""
        block = self._free.pop()
        self._kept[block] = None
        if session:
            self._session[block] = session
            self._alone.setdefault(session, {})[block] = None
        return block

    def give_back(self, block: int) -> None:
        if self._pinned.pop(block, None) is None:
            del self._kept[block]
        self._free.append(block)
        session = self._session.pop(block, None)
        if session is not None:
            blocks = self._alone[session]
            del blocks[block]
            if not blocks:
                del self._alone[session]

    def touch(self, block: int) -> None:
        if block in self._kept:
            self._kept.move_to_end(block)

    def pin(self, block: int) -> None:
        self._kept.pop(block, None)
        self._pinned[block] = self._pinned.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        """Passed over if it came here since it was pinned."""
        if block in self._pinned:
            self._pinned[block] -= 1
            if not self._pinned[block]:
                del self._pinned[block]
                self._kept[block] = None

    def end(self, session: str) -> None:
        """The session is over: what it alone had is the next to go, its tail first."""
        for block in reversed(self._alone.get(session, ())):
            if block in self._kept:
                self._kept.move_to_end(block, last=False)

    def check(self) -> None:
        free, kept = set(self._free), {*self._kept, *self._pinned}
        assert len(kept) == len(self), "a block of the second tier is pinned, and goes"
        assert len(free) == len(self._free), "a block of the second tier is free twice"
        assert free.isdisjoint(kept), "a block of the second tier is in two states"
        assert len(free) + len(kept) == self.total, f"blocks lost: {self!r}"
        alone = {block for blocks in self._alone.values() for block in blocks}
        assert alone == set(self._session) <= kept, "a session has blocks that are not in the second tier"
