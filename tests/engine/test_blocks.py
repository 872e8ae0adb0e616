"""The block pool under random use: books balance, content never changes hands unnoticed, and a place has one path."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from tiers import examples

from midstream.engine.embedded.blocks import HISTORIES_MAX, NO_BLOCK, BlockPool, OutOfBlocks, Prefix

# Tokens and epochs, block by block.
Path = tuple[tuple[bytes, tuple[int, ...]], ...]


def path_of(prefix: Prefix) -> Path:
    if prefix.parent is None:
        return ((prefix.tokens, ()),)
    return (*path_of(prefix.parent), (prefix.tokens, prefix.epochs))


class PoolMachine(RuleBasedStateMachine):
    """Model: who holds how many references, and which block each path in the tree has."""

    held = Bundle("held")
    places = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=10, block_size=4)
        self.references: dict[int, int] = {}
        self.tree: dict[Path, int] = {}

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
        evicted = [path for path, holder in self.tree.items() if holder == block]
        for path in evicted:
            self.forget(path)
        self.references[block] = 1
        return block

    @rule(target=places, salt=st.sampled_from([b"a", b"b"]))
    def root(self, salt: bytes) -> Prefix:
        return self.pool.root(salt)

    @rule(target=places, parent=places, block=held, tokens=st.integers(0, 1), epoch=st.integers(0, 5))
    def index(self, parent: Prefix, block: int, tokens: int, epoch: int) -> Prefix:
        if not self.references.get(block) or block in self.tree.values():
            return parent
        epochs = (epoch,) * 4
        # One that was removed is so for good, whatever its path.
        attached = parent.parent is None or parent.kept
        assert parent.parent is None or not parent.kept or self.tree[path_of(parent)] == parent.block
        path = (*path_of(parent), (bytes([tokens]), epochs))
        beside = sorted(p for p in self.tree if p[:-1] == path[:-1] and p[-1][0] == path[-1][0])
        prefix = self.pool.index(block, parent, bytes([tokens]), epochs)
        if not attached:
            assert prefix.block == NO_BLOCK
        elif path in self.tree:
            assert prefix.block == self.tree[path]
        elif len(beside) == HISTORIES_MAX and path < beside[0]:
            assert prefix.block == NO_BLOCK
        else:
            if len(beside) == HISTORIES_MAX:
                self.forget(beside[0])
            assert prefix.block == block
            self.tree[path] = block
        return prefix

    @rule(place=places, target=held)
    def share(self, place: Prefix) -> int:
        if place.parent is None or not place.kept:
            return 0
        assert self.tree[path_of(place)] == place.block
        self.pool.retain(place.block)
        self.references[place.block] = self.references.get(place.block, 0) + 1
        return place.block

    @rule(place=places)
    def touch(self, place: Prefix) -> None:
        self.pool.touch(place)

    @rule(block=consumes(held))
    def release(self, block: int) -> None:
        if self.references.get(block):
            self.pool.release(block)
            self.references[block] -= 1

    @precondition(lambda self: self.tree)
    @rule()
    def evict_all(self) -> None:
        for block in [self.pool.allocate() for _ in range(self.pool.available)]:
            self.pool.release(block)
        for path, block in list(self.tree.items()):
            if not self.references.get(block):
                self.forget(path)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert self.pool.used == sum(1 for count in self.references.values() if count)
        assert {path_of(prefix): prefix.block for prefix in self.pool.indexed()} == self.tree

    def forget(self, gone: Path) -> None:
        """It and all below it."""
        self.tree = {path: block for path, block in self.tree.items() if path[: len(gone)] != gone}


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(80), stateful_step_count=50, deadline=None)


def test_the_cached_block_unused_for_longest_is_evicted_first() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    blocks = [pool.allocate() for _ in range(3)]
    places = [pool.index(block, pool.root(b""), bytes([block]), (0, 0)) for block in blocks]
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.touch(places[0])
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]
    assert [place.kept for place in places] == [False] * 3


def test_places_for_the_same_tokens_are_the_youngest_first_and_the_oldest_goes() -> None:
    pool = BlockPool(num_blocks=9, block_size=2)
    root = pool.root(b"")
    given = [(3, 3), (5, 5), (3, 4), (1, 2)]
    first, *others = [pool.index(pool.allocate(), root, b"x", epochs) for epochs in given]
    (siblings,) = root.children.values()
    assert [place.epochs for place in siblings] == [(5, 5), (3, 4), (3, 3), (1, 2)]
    below = pool.index(pool.allocate(), others[-1], b"y", (2, 2))
    assert not pool.index(pool.allocate(), root, b"x", (1, 1)).kept, "older than all there are"
    assert pool.index(pool.allocate(), root, b"x", (3, 3)) is first
    assert pool.index(pool.allocate(), root, b"x", (6, 6)).kept
    assert [place.epochs for place in siblings] == [(6, 6), (5, 5), (3, 4), (3, 3)]
    assert not below.kept, "its parent is gone"
    pool.check()


def test_a_salt_is_a_tree_of_its_own() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    one, other = (pool.index(pool.allocate(), pool.root(salt), b"x", (0, 0)) for salt in (b"a", b"b"))
    assert one is not other
    assert pool.root(b"a").children == {b"x": [one]}
    for place in (one, other):
        pool.release(place.block)
    assert pool.allocate() not in (one.block, other.block)
    pool.allocate()
    assert (one.kept, pool.root(b"a").children, pool.root(b"b").children) == (False, {}, {b"x": [other]})
