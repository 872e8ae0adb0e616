"""Paged KV bookkeeping: the content of each block, its users, and which blocks may be reused.

Owns the block table of one engine: reference counts, the tree of cached prefixes, eviction order. Imports no torch. The
tensors live in the model's cache (model_runner.py) and are addressed by slot = block * block_size + offset.

The KV at a position depends on the weights that computed it and on all KV before it. So a cached block is a place in a tree
(`Prefix`): below exactly the block that it was computed on, under its tokens and the epoch that computed each of them. Tokens
that were computed under several weights have several places side by side.

Always holds:
- Block 0 is never given out. Its slot 0 pads reads and is never written, so it stays zero. Writes that must not count go to
  its slot 1, which is never read.
- Every other block is in exactly one state: in use (references > 0), held (references 0, in the tree, claimed), loose
  (references 0, in the tree, not claimed) or free (not in the tree). used + held + loose + free = total; `check()` proves it.
- A block enters the tree when all its slots are computed, and its content never changes while it is there. An equal path
  (salt, tokens and epochs from position 0 on) means equal KV, and a path has one block.
- Every block in the tree can be reached from its root: a block that is removed takes all blocks below with it.
- Eviction takes the loose block that was unused for longest, and those that only an ended session had before that. A held block
  is evicted once its claims are given up (claims.py).
- Where there is a second tier (offload.py), what is evicted is moved there, but for what only an ended session had. Its place
  stays in the tree, with a block that no sequence reads. So the tree has each place once, in one of the two tiers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from midstream.core.kv import KvStats
from midstream.engine.embedded.offload import Offload

PAD_SLOT = 0
SCRATCH_SLOT = 1
NO_BLOCK = -1
ROOT_BLOCK = 0

#: Places for the same tokens below one block. The oldest goes first: most bounds on the age of KV exclude it already.
HISTORIES_MAX = 4


class OutOfBlocks(Exception):
    """No block is free or evictable. The caller must wait or preempt."""


@dataclass(eq=False, slots=True)
class Prefix:
    """A place in the tree: KV of all positions up to the end of one block.

    tokens: of the block, as bytes; of a root, the salt. epochs: of the weights that computed each of its positions.
    block: the block that holds it, or NO_BLOCK when the place is not in the tree. children: by their tokens, the youngest
    first.
    """

    parent: Prefix | None
    tokens: bytes
    epochs: tuple[int, ...] = ()
    block: int = NO_BLOCK
    children: dict[bytes, list[Prefix]] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        return self.block != NO_BLOCK


class BlockPool:
    """Blocks 1..num_blocks-1 of `block_size` tokens each. offload: the second tier, whose blocks have the next numbers."""

    def __init__(self, num_blocks: int, block_size: int, offload: Offload | None = None) -> None:
        if num_blocks < 2 or block_size < 2:
            raise ValueError(f"needs 2 blocks of 2 tokens at least, got {num_blocks} of {block_size}")
        self.block_size = block_size
        self.total = num_blocks - 1
        self.offload = offload
        if offload is not None:
            assert offload.first == num_blocks, f"{offload!r} does not follow {num_blocks} blocks"
            num_blocks += offload.total
        self._references = [0] * num_blocks
        # The place of each block that is in the tree.
        self._prefix: list[Prefix | None] = [None] * num_blocks
        # By salt, the roots that have a place below them.
        self._roots: dict[bytes, Prefix] = {}
        self._free = list(range(self.total, 0, -1))
        # The least recently used block comes first.
        self._loose: OrderedDict[int, None] = OrderedDict()
        self._held: set[int] = set()
        # Claims on each block, the session of the last one, and whether those of several sessions were there.
        self._claims = [0] * num_blocks
        self._claimant = [""] * num_blocks
        self._shared = bytearray(num_blocks)
        # Loose blocks that only an ended session had.
        self._ended: set[int] = set()
        #: Is called when held blocks are the only ones left, and gives up claims until one is loose.
        self.on_need: Callable[[], None] = lambda: None
        #: Blocks that were evicted while a session claimed them.
        self.evicted = 0
        #: Blocks that another engine computed.
        self.travelled = 0

    def __repr__(self) -> str:
        counts = f"used={self.used}, held={self.held}, loose={self.loose}, free={len(self._free)}"
        return f"BlockPool({counts}, total={self.total})"

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out, cached ones included."""
        return len(self._free) + len(self._loose) + len(self._held)

    @property
    def held(self) -> int:
        """Cached blocks that sessions claim between their turns."""
        return len(self._held)

    @property
    def loose(self) -> int:
        """Cached blocks that no session claims."""
        return len(self._loose)

    @property
    def gives(self) -> bool:
        """Whether `allocate` can give out a block without taking it from a session."""
        return bool(self._free or self._loose)

    def kv(self, missing: int, needed_again: int) -> KvStats:
        """missing, needed_again: of the claims, in blocks. Each step passes here, so it calls nothing."""
        size, held, loose, offload = self.block_size, len(self._held), len(self._loose), self.offload
        stats = KvStats(
            block_tokens=size,
            total=self.total,
            used=self.total - len(self._free) - held - loose,
            held=held,
            loose=loose,
            missing=missing,
            evicted_tokens=self.evicted * size,
            again_tokens=needed_again * size,
            travelled_tokens=self.travelled * size,
        )
        if offload is None:
            return stats
        return msgspec.structs.replace(
            stats,
            offload_total=offload.total if offload.price.share <= 1.0 else 0,
            offloaded=len(offload),
            restored_tokens=offload.restored * size,
            dropped_tokens=offload.dropped * size,
        )

    def allocate(self) -> int:
        """A block with one reference and unspecified content. Raises OutOfBlocks."""
        if not self._free and not self._loose and self._held:
            self.on_need()
            # What was given up is taken from a session.
            self.evicted += 1
        if self._free:
            block = self._free.pop()
        elif self._loose:
            block, _ = self._loose.popitem(last=False)
            prefix = self._prefix[block]
            assert prefix is not None
            if self.offload is None or not self._demote(prefix, self.offload):
                self._remove(prefix)
        else:
            raise OutOfBlocks
        self._references[block] = 1
        return block

    def root(self, salt: bytes) -> Prefix:
        """The place above the first blocks of a namespace."""
        return self._roots.get(salt) or Prefix(None, salt)

    def retain(self, block: int) -> None:
        """Take one more reference on an in-use or cached block."""
        if self._references[block] == 0:
            self._loose.pop(block, None)
            self._held.discard(block)
            self._ended.discard(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference. A block without references is cached if it is in the tree, else free."""
        assert self._references[block] > 0, f"block {block} released too often"
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._prefix[block] is None:
            self._free.append(block)
        elif self._claims[block]:
            self._held.add(block)
        else:
            self._loose[block] = None

    def touch(self, prefix: Prefix) -> None:
        """Mark the place as used just now, even if its user has a copy of the block."""
        if prefix.block in self._loose:
            self._loose.move_to_end(prefix.block)
        elif self.offload is not None:
            self.offload.touch(prefix.block)

    def offloaded(self, prefix: Prefix) -> bool:
        """Whether the place is in the second tier, so that no sequence can read its block."""
        return prefix.block > self.total

    def restore(self, prefix: Prefix, block: int) -> None:
        """Copy an offloaded place into `block`, which is in use and in no place. That is its block from now on."""
        assert self.offload is not None
        self.offload.move(prefix.block, block)
        self.offload.restored += 1
        self._lift(prefix, block)

    def adopt(self, prefix: Prefix, block: int) -> None:
        """As `restore`, where `block` has the content already."""
        assert self.offload is not None
        self.offload.merge(prefix.block, block)
        self._lift(prefix, block)

    def end(self, session: str) -> None:
        """The session is over: what it alone has in the second tier goes first."""
        if self.offload is not None:
            self.offload.end(session)

    def drop_offloaded(self, drops: Callable[[int], bool]) -> None:
        """Remove what is in the second tier and was computed, at its end, in an epoch that `drops` accepts."""
        for prefix in self._prefix[self.total + 1 :]:
            if prefix is not None and prefix.kept and drops(prefix.epochs[-1]):
                self._remove(prefix)

    def claim(self, prefix: Prefix, session: str) -> None:
        """The session claims the place, which is kept. It may have other claims on it."""
        block = prefix.block
        self._claims[block] += 1
        if self._claimant[block] not in ("", session):
            self._shared[block] = True
        self._claimant[block] = session
        if block in self._loose:
            del self._loose[block]
            self._held.add(block)
            self._ended.discard(block)

    def unclaim(self, prefix: Prefix, *, ended: bool = False) -> None:
        """Drop one claim on a place that is kept. ended: with its session; if no other session had it, it is evicted next."""
        block = prefix.block
        assert self._claims[block] > 0, f"block {block} is not claimed"
        self._claims[block] -= 1
        if block in self._held and not self._claims[block]:
            self._held.remove(block)
            self._loose[block] = None
            if ended and not self._shared[block]:
                self._loose.move_to_end(block, last=False)
                self._ended.add(block)

    def index(self, block: int, parent: Prefix, tokens: bytes, epochs: tuple[int, ...]) -> Prefix:
        """Offer a fully computed block for reuse. Returns its place, which another block of equal content may hold already.

        The place is not kept when its parent is not, or when there are HISTORIES_MAX younger places beside it. `block` then
        stays private.
        """
        if parent.parent is None:
            parent = self._roots.get(parent.tokens, parent)
        elif not parent.kept:
            return Prefix(parent, tokens, epochs)
        siblings = parent.children.get(tokens, [])
        # The index of the first sibling that is older.
        older = 0
        for sibling in siblings:
            if sibling.epochs == epochs:
                if sibling.block > self.total:
                    self.adopt(sibling, block)
                return sibling
            if sibling.epochs < epochs:
                break
            older += 1
        prefix = Prefix(parent, tokens, epochs)
        if older == HISTORIES_MAX:
            return prefix
        assert self._prefix[block] is None, f"block {block} is in the tree already"
        if len(siblings) == HISTORIES_MAX:
            self._remove(siblings[-1])
        if parent.parent is None:
            parent.block = ROOT_BLOCK
            self._roots[parent.tokens] = parent
        parent.children.setdefault(tokens, siblings).insert(older, prefix)
        prefix.block = block
        self._prefix[block] = prefix
        return prefix

    def indexed(self) -> Iterator[Prefix]:
        """All places that hold a block, in either tier."""
        return (prefix for prefix in self._prefix if prefix is not None)

    def check(self) -> None:
        """Assert that the books balance."""
        free, loose, held = set(self._free), set(self._loose), self._held
        cached = loose | held
        used = {b for b in range(1, self.total + 1) if self._references[b] > 0}
        behind = range(self.total + 1, len(self._prefix))
        assert len(free) == len(self._free), "a block is free twice"
        for left, right in ((free, cached), (free, used), (cached, used), (loose, held)):
            assert left.isdisjoint(right), "a block is in two states"
        assert len(free) + len(cached) + len(used) == self.total, f"blocks lost: {self!r}"
        assert all(self._prefix[b] is None for b in free), "a free block is still in the tree"
        assert all(self._prefix[b] is not None for b in cached), "a cached block is not in the tree"
        assert all(self._claims[b] > 0 for b in held), "a block is held for no session"
        assert not any(self._claims[b] for b in free | loose), "a session's block is loose or free"
        assert self._ended <= loose, "a block of an ended session is not loose"
        assert not any(self._references[b] or self._claims[b] for b in behind), "an offloaded block is in use"
        if self.offload is not None:
            self.offload.check()
            held_behind = {b for b in behind if self._prefix[b] is not None}
            assert held_behind == {b for b in behind if b in self.offload}, "the tiers disagree"
        self._check_tree()

    def _check_tree(self) -> None:
        assert all(root.children for root in self._roots.values()), "a namespace is kept for nothing"
        found = 0
        parents = list(self._roots.values())
        while parents:
            parent = parents.pop()
            for tokens, siblings in parent.children.items():
                histories = [prefix.epochs for prefix in siblings]
                assert 0 < len(siblings) <= HISTORIES_MAX, "too many places for the same tokens, or none"
                assert histories == sorted(set(histories), reverse=True), "not the youngest first, each once"
                for prefix in siblings:
                    assert self._prefix[prefix.block] is prefix, "the tree points at another content"
                    assert prefix.parent is parent, "a place is below another parent"
                    assert prefix.tokens == tokens, "a place is under other tokens"
                found += len(siblings)
                parents += siblings
        assert found == sum(1 for _ in self.indexed()), "a block cannot be reached from its root"

    def _demote(self, prefix: Prefix, offload: Offload) -> bool:
        """Move an evicted place to the second tier; False if it has to go. Its block is the caller's then."""
        if prefix.block in self._ended or not offload.total:
            return False
        if offload.full:
            oldest = offload.next_to_go()
            if oldest is None:
                return False
            gone = self._prefix[oldest]
            assert gone is not None
            self._remove(gone)
            if not prefix.kept:
                # It stood on that one.
                return True
        block = prefix.block
        host = offload.take("" if self._shared[block] else self._claimant[block])
        offload.move(block, host)
        self._give(prefix, host)
        return True

    def _lift(self, prefix: Prefix, block: int) -> None:
        assert self.offload is not None
        host = prefix.block
        assert self._prefix[block] is None, f"block {block} is in the tree already"
        self._give(prefix, block)
        self.offload.give_back(host)

    def _give(self, prefix: Prefix, block: int) -> None:
        """A place gets another block, and what is known of its sessions goes with it."""
        before, prefix.block = prefix.block, block
        self._prefix[before], self._prefix[block] = None, prefix
        self._claimant[block], self._claimant[before] = self._claimant[before], ""
        self._shared[block], self._shared[before] = self._shared[before], False

    def _remove(self, prefix: Prefix) -> None:
        """Take a place and all places below it out of the tree. Their blocks become free if they are not in use."""
        parent = prefix.parent
        assert parent is not None
        siblings = parent.children[prefix.tokens]
        siblings.remove(prefix)
        if not siblings:
            del parent.children[prefix.tokens]
            if parent.parent is None and not parent.children:
                del self._roots[parent.tokens]
        gone = [prefix]
        while gone:
            place = gone.pop()
            for below in place.children.values():
                gone += below
            block, place.block, place.children = place.block, NO_BLOCK, {}
            self._prefix[block] = None
            self._shared[block], self._claimant[block] = False, ""
            self.evicted += block in self._held
            self._claims[block] = 0
            self._ended.discard(block)
            if block > self.total:
                assert self.offload is not None
                self.offload.give_back(block)
                self.offload.dropped += 1
            if block in self._loose or block in self._held:
                self._loose.pop(block, None)
                self._held.discard(block)
                self._free.append(block)
