"""The scores of cached tokens, kept so that an echo from the cache equals one that is computed. Imports no torch.

Owns: per KV slot, four values of the pass that scored the token at that position: its raw logprob, its snapshot, its route,
and whether a router's choice was a near tie. The pass over position p - 1 scores the token at position p. The weights of the
route's experts are behind these in its row, where the engine keeps them (ModelRunner).
Always holds: the four are written together, so a logprob is never paired with the route or the label of another pass. A slot
that gets a new owner has no score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from midstream.core.types import GenerateRequest

NO_SNAPSHOT = -1


class ScoreStore:
    """Snapshots are ordinals. route_bytes: as ModelRunner has it; 0 on a dense model."""

    def __init__(self, blocks: int, block_size: int, route_bytes: int) -> None:
        slots = blocks * block_size
        self._size, self.route_bytes = block_size, route_bytes
        self._logprob = np.zeros(slots, dtype=np.float32)
        self._snapshot = np.full(slots, NO_SNAPSHOT, dtype=np.int32)
        self._router_tie = np.zeros(slots, dtype=np.uint8)
        self._route = np.zeros((slots, route_bytes), dtype=np.uint8)

    def write(
        self,
        slots: np.ndarray,
        logprobs: np.ndarray,
        routes: np.ndarray | None,
        snapshots: np.ndarray | int,
        router_ties: np.ndarray | int = 0,
    ) -> None:
        """logprobs: [len(slots)]. routes: [len(slots), route_bytes] uint8, None on a dense model.

        snapshots, router_ties (0 or 1): one value for all slots, or one for each.
        """
        self._logprob[slots] = logprobs
        self._snapshot[slots] = snapshots
        self._router_tie[slots] = router_ties
        if routes is not None:
            self._route[slots] = routes

    def routes_of(self, packed: bytes) -> np.ndarray:
        """An array [tokens, route_bytes] of routes as `read` returns them, joined."""
        return np.frombuffer(packed, dtype=np.uint8).reshape(-1, self._route.shape[1])

    def read(self, slot: int) -> tuple[float, int, bytes | None, int]:
        """(logprob, snapshot, route, router tie). The snapshot is NO_SNAPSHOT where nothing was scored."""
        route = self._route[slot].tobytes() if self._route.shape[1] else None
        return float(self._logprob[slot]), int(self._snapshot[slot]), route, int(self._router_tie[slot])

    def write_read(
        self, slots: Sequence[int], scores: Sequence[tuple[float, int, bytes | None, int]]
    ) -> None:
        """scores: as `read` returns them, at least one."""
        logprobs, ordinals, routes, ties = zip(*scores, strict=True)
        at = np.array(slots)
        self._logprob[at], self._snapshot[at], self._router_tie[at] = logprobs, ordinals, ties
        if routes[0] is not None:
            self._route[at] = self.routes_of(b"".join(routes))

    def rows(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Logprobs, routes, snapshots and router ties, as `write` takes them."""
        return self._logprob[slots], self._route[slots], self._snapshot[slots], self._router_tie[slots]

    def complete(self, block: int, first_offset: int, snapshot: int) -> bool:
        """Whether the block's tokens from that offset on were all scored under `snapshot`."""
        start = block * self._size
        return bool((self._snapshot[start + first_offset : start + self._size] == snapshot).all())

    def forget(self, block: int) -> None:
        start = block * self._size
        self._snapshot[start : start + self._size] = NO_SNAPSHOT

    def move(self, source: int, target: int) -> None:
        """What is kept for a block is from now on kept for another, and nothing for the first."""
        ours, theirs = (slice(at * self._size, (at + 1) * self._size) for at in (source, target))
        for rows in (self._logprob, self._snapshot, self._router_tie, self._route):
            rows[theirs] = rows[ours]
        self._snapshot[ours] = NO_SNAPSHOT

    def merge(self, source: int, target: int) -> None:
        """As `move`, but what `target`, a block of equal content, has stays."""
        first = target * self._size
        lacks = np.flatnonzero(self._snapshot[first : first + self._size] == NO_SNAPSHOT)
        ours, theirs = source * self._size + lacks, first + lacks
        for rows in (self._logprob, self._snapshot, self._router_tie, self._route):
            rows[theirs] = rows[ours]
        self.forget(source)

    def copy(self, source: int, target: int, snapshot: int) -> None:
        """Copy the scores of `source` under `snapshot` to `target`, a block of equal content."""
        offsets = np.flatnonzero(self._snapshot[source * self._size : (source + 1) * self._size] == snapshot)
        ours, theirs = source * self._size + offsets, target * self._size + offsets
        self._logprob[theirs] = self._logprob[ours]
        self._snapshot[theirs] = snapshot
        self._router_tie[theirs] = self._router_tie[ours]
        self._route[theirs] = self._route[ours]


def weights_of(route: bytes | None, expert_bytes: int) -> bytes | None:
    """What stands behind the experts in a row of ModelRunner, if anything does."""
    return None if route is None else route[expert_bytes:] or None


class ShownRoute(TypedDict):
    route: bytes | None
    router_weights: bytes | None


def shown(route: bytes | None, expert_bytes: int, request: GenerateRequest) -> ShownRoute:
    """Of such a row, what the request asks for."""
    return {
        "route": route[:expert_bytes] if route and request.want_routes else None,
        "router_weights": weights_of(route, expert_bytes) if request.want_router_weights else None,
    }
