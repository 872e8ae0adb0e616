"""What a sequence reuses from the second tier of the KV cache: found, pinned and copied back in pieces. Imports no torch.

The scheduler calls it where there is a second tier.
Always holds: a sequence reads a place only once it is in the pool. A sequence restores the chain of blocks behind those that it
has. If the second tier drops one of them meanwhile, the chain ends before it.
"""

from __future__ import annotations

import math
from typing import Protocol

from midstream.engine.embedded.blocks import BlockPool, Prefix
from midstream.engine.embedded.offload import MEASURED


class Restoring(Protocol):
    """As scheduler.Sequence has them."""

    blocks: list[int]
    path: list[Prefix]
    ahead: list[Prefix]


def split(pool: BlockPool, chain: list[Prefix]) -> tuple[list[Prefix], list[Prefix]]:
    """Of a chain, what can be read at once, and behind it what has to be copied back first, if that is worth it. To measure
    again what seems too dear, a little of it will do."""
    offload = pool.offload
    assert offload is not None
    first = next((at for at, prefix in enumerate(chain) if pool.offloaded(prefix)), len(chain))
    if first == len(chain) or not offload.price.worth():
        return chain[:first], []
    return chain[:first], chain[first:] if offload.price.share <= 1.0 else chain[first : first + MEASURED]


def pin(pool: BlockPool, places: list[Prefix], *, pinned: bool = True) -> None:
    """Keep what a sequence waits for in the second tier, or let go of it."""
    assert pool.offload is not None
    for prefix in filter(pool.offloaded, places):
        (pool.offload.pin if pinned else pool.offload.unpin)(prefix.block)


def restore(pool: BlockPool, seq: Restoring, budget: int) -> int:
    """Copy back what the budget of prompt tokens pays for, and return how much of it that took. All is there once `ahead` is
    empty. Each block is paid at the price that its own copy has changed: a file may lie on the disk from here on."""
    offload = pool.offload
    assert offload is not None
    left = float(budget)
    while seq.ahead and left > 0:
        prefix, own = seq.ahead.pop(), seq.blocks[len(seq.path)]
        if not prefix.kept:
            # All behind it went with it.
            seq.ahead.clear()
            break
        if pool.offloaded(prefix):
            pool.restore(prefix, own)
            left -= pool.block_size * offload.price.share
        else:
            pool.retain(prefix.block)
            seq.blocks[len(seq.path)] = prefix.block
            pool.release(own)
        seq.path.append(prefix)
    return min(budget, math.ceil(budget - left))


def let_go(pool: BlockPool, seq: Restoring) -> None:
    """The sequence is about to release its blocks. Places that it has a copy of get that one."""
    pin(pool, seq.ahead, pinned=False)
    for prefix, block in zip(seq.path, seq.blocks, strict=False):
        if pool.offloaded(prefix):
            pool.adopt(prefix, block)
