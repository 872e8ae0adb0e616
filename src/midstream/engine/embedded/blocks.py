"""Paged KV bookkeeping: which block holds what, who uses it, and which may be reused.

Owns the block table of one engine: reference counts, the prefix-cache index, eviction order. No torch; the tensors
live in runner.py and are addressed by slot = block * block_size + offset.

Always holds:
- Block 0 is never given out. Its slot 0 pads reads and is never written, so it stays zero; writes that must not count go
  to its slot 1, which is never read.
- Every other block is in exactly one state: in use (references > 0), cached (references 0, reachable by its hash) or
  free (no hash). used + cached + free = total; `check()` proves it.
- A block's hash covers the salt and every token from position 0 to its end, so equal hash means equal prefix in an
  equal namespace. A block is indexed only when all its slots are computed, and never changes afterwards. Of two blocks of
  equal content the younger is the one that is found.
- Eviction takes the cached block unused for longest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

PAD_SLOT = 0
SCRATCH_SLOT = 1


class OutOfBlocks(Exception):
    """No block is free or evictable; the caller must wait or preempt."""


def root_hash(salt: bytes) -> bytes:
    """The parent hash of a namespace's first block."""
    return hashlib.blake2b(salt, digest_size=16, person=b"midstream-root").digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block given its parent's: 128 bits, so a collision is not a case to handle."""
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


class BlockPool:
    """Blocks 1..num_blocks-1 of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2 or block_size < 2:
            raise ValueError(f"needs 2 blocks of 2 tokens at least, got {num_blocks} of {block_size}")
        self.block_size = block_size
        self.total = num_blocks - 1
        self._references = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._born = [0] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # references 0, hashed; oldest use first

    def __repr__(self) -> str:
        return f"BlockPool(used={self.used}, cached={len(self._cached)}, free={len(self._free)}, total={self.total})"

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out, cached ones included."""
        return len(self._free) + len(self._cached)

    def allocate(self) -> int:
        """A block with one reference and unspecified content. Raises OutOfBlocks."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise OutOfBlocks
        self._references[block] = 1
        return block

    def lookup(self, digest: bytes) -> int | None:
        """The block indexed under `digest`, or None. Takes no reference."""
        return self._by_hash.get(digest)

    def retain(self, block: int) -> None:
        """Take one more reference on an in-use or cached block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference; the last one leaves the block cached if it is indexed, else free."""
        assert self._references[block] > 0, f"block {block} released too often"
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._hash[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def born(self, block: int) -> int:
        """What `index` was told of a block that can be found."""
        return self._born[block]

    def index(self, block: int, digest: bytes, born: int = 0) -> int:
        """Make a fully computed block reachable by `digest`; returns the block that now answers for it.

        born: the commits before the oldest KV that the block's own stands on. That is an earlier block when one of equal
        content, as young as this one, was indexed first; `block` then stays private. An older one is not found any more.
        """
        holder = self._by_hash.get(digest)
        if holder is not None:
            if holder == block or self._born[holder] >= born:
                return holder
            self._forget(holder)
            if holder in self._cached:
                del self._cached[holder]
                self._free.append(holder)
        self._by_hash[digest] = block
        self._hash[block] = digest
        self._born[block] = born
        return block

    def check(self) -> None:
        """Assert that the books balance."""
        free, cached = set(self._free), set(self._cached)
        used = {b for b in range(1, self.total + 1) if self._references[b] > 0}
        assert len(free) == len(self._free), "a block is free twice"
        for left, right in ((free, cached), (free, used), (cached, used)):
            assert left.isdisjoint(right), "a block is in two states"
        assert len(free) + len(cached) + len(used) == self.total, f"blocks lost: {self!r}"
        assert all(self._hash[b] is None for b in free), "a free block is still indexed"
        assert all(self._hash[b] is not None for b in cached), "a cached block has no hash"
        assert all(self._hash[b] == h for h, b in self._by_hash.items()), (
            "the index points at another content"
        )

    def _forget(self, block: int) -> None:
        digest = self._hash[block]
        if digest is not None:
            del self._by_hash[digest]
            self._hash[block] = None
