"""The block pool under random use: books balance, content never changes hands unnoticed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from midstream.engine.embedded.blocks import BlockPool, OutOfBlocks, block_hash, root_hash


class PoolMachine(RuleBasedStateMachine):
    """Model: who holds how many references, and what content each indexed block was filled with."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=6, block_size=4)
        self.references: dict[int, int] = {}
        self.content: dict[bytes, int] = {}

    @rule(target=held)
    def allocate(self) -> int:
        in_use = sum(1 for count in self.references.values() if count)
        if in_use == self.pool.total:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate()
            return 0
        block = self.pool.allocate()
        assert block != 0
        assert not self.references.get(block), "a block in use was given out"
        self.content = {digest: b for digest, b in self.content.items() if b != block}
        self.references[block] = 1
        return block

    @rule(block=held, tokens=st.integers(0, 3), born=st.integers(0, 2))
    def index(self, block: int, tokens: int, born: int) -> None:
        if not self.references.get(block) or block in self.content.values():
            return
        digest = block_hash(root_hash(b""), [tokens] * 4)
        if digest not in self.content or self.pool.born(self.content[digest]) < born:
            self.content[digest] = block
        assert self.pool.index(block, digest, born) == self.content[digest]
        assert self.pool.born(self.content[digest]) >= born

    @rule(tokens=st.integers(0, 3), target=held)
    def share(self, tokens: int) -> int:
        digest = block_hash(root_hash(b""), [tokens] * 4)
        block = self.pool.lookup(digest)
        assert block == self.content.get(digest)
        if block is None:
            return 0
        self.pool.retain(block)
        self.references[block] = self.references.get(block, 0) + 1
        return block

    @rule(block=consumes(held))
    def release(self, block: int) -> None:
        if self.references.get(block):
            self.pool.release(block)
            self.references[block] -= 1

    @precondition(lambda self: self.content)
    @rule()
    def evict_all(self) -> None:
        for block in [self.pool.allocate() for _ in range(self.pool.available)]:
            self.pool.release(block)
        self.content = {digest: block for digest, block in self.content.items() if self.references.get(block)}

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert self.pool.used == sum(1 for count in self.references.values() if count)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_cached_block_unused_for_longest_is_evicted_first() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    blocks = [pool.allocate() for _ in range(3)]
    digests = [block_hash(root_hash(b""), [i, i]) for i in range(3)]
    for block, digest in zip(blocks, digests, strict=True):
        pool.index(block, digest)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    assert pool.allocate() == blocks[1]
    assert [pool.lookup(d) for d in digests] == [blocks[0], None, blocks[2]]


def test_a_younger_block_of_equal_content_is_found_in_place_of_the_older() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    digest = block_hash(root_hash(b""), [1, 2])
    old, young, as_young = (pool.allocate() for _ in range(3))
    assert pool.index(old, digest, born=3) == old
    pool.release(old)
    assert pool.index(young, digest, born=4) == young
    assert pool.index(as_young, digest, born=4) == young
    assert (pool.lookup(digest), pool.available, repr(pool)) == (
        young, 1, "BlockPool(used=2, cached=0, free=1, total=3)",
    )  # fmt: skip
    pool.check()


def test_a_hash_depends_on_salt_parent_and_every_token() -> None:
    base = block_hash(root_hash(b"a"), [1, 2])
    assert base != block_hash(root_hash(b"b"), [1, 2])
    assert base != block_hash(root_hash(b"a"), [2, 1])
    assert block_hash(base, [1, 2]) != base
    assert base == block_hash(root_hash(b"a"), [1, 2])
