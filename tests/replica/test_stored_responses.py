"""The store of responses: its bytes are those of what it holds, whatever is deleted while it is continued."""

from __future__ import annotations

import random

import pytest

from midstream.replica.stored import Stored, StoredResponses


def live(store: StoredResponses) -> int:
    """Bytes of all that is held, or that something held continues."""
    nodes = {id(node): node for one in store._held.values() for node in one.line}
    return sum(node.size for node in nodes.values())


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_of_all_that_is_held(seed: int) -> None:
    rng = random.Random(seed)
    store = StoredResponses("r", bytes_max=20_000)
    under_way: list[Stored | None] = [None]
    for number in range(400):
        action = rng.random()
        if action < 0.5:
            # It was found when its request began, and may be gone by now.
            before = rng.choice(under_way)
            store.keep("t", Stored(f"resp_{number}", before, None, b"[]", b"x" * rng.randrange(2000)))
        elif action < 0.8 and len(store):
            tenant, key = rng.choice(list(store._held))
            under_way.append(store.find(tenant, key))
        elif len(store):
            store.delete(*rng.choice(list(store._held)))
        assert store.size == live(store) <= 20_000
    for key in list(store._held):
        store.delete(*key)
    assert store.size == 0
