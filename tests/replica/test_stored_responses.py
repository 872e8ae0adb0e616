"""The store of responses: its bytes are those of what it holds, whatever is deleted while it is continued."""

from __future__ import annotations

import random
import sys
import threading

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


def test_a_thread_may_look_for_responses_while_others_come_and_go() -> None:
    """A long body is read in a thread. The loop failed as it dropped the oldest response, after the answer had been made."""
    count = 40
    store = StoredResponses("r", bytes_max=count * 1024)
    for number in range(count):
        store.keep("t", Stored(f"resp_{number}", None, None, b"", b""))
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for tenant, key in list(store._held):
                store.find(tenant, key)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=look)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for number in range(count, 20_000):
            store.keep("t", Stored(f"resp_{number}", None, None, b"", b""))
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert (len(store), store.size) == (count, count * 1024)
