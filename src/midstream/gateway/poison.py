"""Requests that replicas were lost with: which of them are tried again, and which are refused as the probable cause.

Owns: what is remembered of such requests, as digests, per tenant; no I/O.
Always holds: a request is shown to LOSSES_MAX replicas at most that are then lost with it, and to LOSSES_ALONE if it alone was
lost with both; after that it is refused for KEPT_S. What is answered is forgotten. The memory is bounded, per tenant and in
all. Equal requests count as one, and so do several losses with one life of a replica.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

LOSSES_ALONE = 2  # lives of replicas, when no other request was lost as often, with one of the same
LOSSES_MAX = 3  # in any company: several requests go from one lost replica to the next together, and one of them is the cause
LARGE_BYTES = (
    256 * 2**10
)  # the largest request of a replica that fell silent is the cause, if it has as much to read
KEPT_S = 600.0
PER_TENANT_MAX = 64
ALL_MAX = 1024


class Key(NamedTuple):
    """A request, whoever sends it again."""

    tenant: str
    size: int
    digest: bytes


class Life(NamedTuple):
    """A replica from one start of its engine to the next."""

    replica: str
    boot: str


@dataclass(slots=True)
class _Suspect:
    at: float
    lost: set[Life] = field(default_factory=set)
    refused: bool = False


class Suspects:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[Key, _Suspect] = OrderedDict()  # the one that was lost last comes last
        self._sizes: Counter[tuple[str, int]] = (
            Counter()
        )  # of the requests that are known: others need no digest

    def __repr__(self) -> str:
        return (
            f"Suspects({len(self._known)} requests, {sum(s.refused for s in self._known.values())} refused)"
        )

    def find(self, tenant: str, target: bytes, body: bytes) -> Key | None:
        """The key of a request that is known; None: no replica was lost with it lately."""
        if not self._sizes or not self._sizes[tenant, len(body)]:
            return None
        key = key_of(tenant, target, body)
        suspect = self._known.get(key)
        if suspect is None:
            return None
        if self._clock() - suspect.at > KEPT_S:
            self.forget(key)
            return None
        return key

    def refuses(self, key: Key) -> bool:
        suspect = self._known.get(key)
        return suspect is not None and suspect.refused

    def lost(self, key: Key, lives: Collection[Life], *, company: bool, obvious: bool = False) -> bool:
        """These replicas were lost with it. Whether it is refused from now on.

        company: other requests that were lost before were lost with this one. obvious: nothing else can have been the cause.
        """
        suspect = self._known.get(key)
        if suspect is None:
            suspect = self._known[key] = _Suspect(self._clock())
            self._sizes[key.tenant, key.size] += 1
        self._known.move_to_end(key)
        suspect.at = self._clock()
        suspect.lost.update(lives)
        losses = len(suspect.lost)
        enough = losses >= LOSSES_ALONE and not (company or self._others(key, suspect.lost))
        suspect.refused = suspect.refused or obvious or enough or losses >= LOSSES_MAX
        self._bound(key.tenant)
        return suspect.refused

    def forget(self, key: Key) -> None:
        """It was answered."""
        if self._known.pop(key, None) is not None:
            self._sizes[key.tenant, key.size] -= 1
            if not self._sizes[key.tenant, key.size]:
                del self._sizes[key.tenant, key.size]

    def _others(self, key: Key, lives: set[Life]) -> bool:
        """Whether another request that was lost as often was lost with one of the same, in whichever order they are told."""
        return any(
            other != key and len(suspect.lost) >= LOSSES_ALONE and not suspect.lost.isdisjoint(lives)
            for other, suspect in self._known.items()
        )

    def _bound(self, tenant: str) -> None:
        of_tenant = [key for key in self._known if key.tenant == tenant]
        for key in of_tenant[: max(0, len(of_tenant) - PER_TENANT_MAX)]:
            self.forget(key)
        while len(self._known) > ALL_MAX:
            self.forget(next(iter(self._known)))


def key_of(tenant: str, target: bytes, body: bytes) -> Key:
    digest = blake2b(target.partition(b"?")[0] + b"\n", digest_size=16)
    digest.update(body)
    return Key(tenant, len(body), digest.digest())
