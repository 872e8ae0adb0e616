"""Requests that replicas were lost with: which of them are tried again, and which are refused as the probable cause.

Owns: what is remembered of such requests, as digests, per tenant; no I/O.
Always holds: at most LOSSES_MAX replicas see a request and are then lost with it. If it was lost with two of them alone,
LOSSES_ALONE is the bound. After that the request is refused for KEPT_S. An answered request is forgotten. The memory is
bounded, per tenant and in all. Equal requests count as one, and so do several losses with one life of a replica.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from midstream.core.errors import RequestLostReplicas
from midstream.http.message import Request

logger = logging.getLogger(__name__)

# Replicas' lives that one request may cost, when no other request was lost with one of them as often.
LOSSES_ALONE = 2
# The same in any company: several requests move together from one lost replica to the next, and one of them is the cause.
LOSSES_MAX = 3
# The largest request of a replica that fell silent is the cause, if it has so many bytes to read.
LARGE_BYTES = 256 * 2**10
KEPT_S = 600.0
PER_TENANT_MAX = 64
ALL_MAX = 1024


class Key(NamedTuple):
    """A request, the same one when it is sent again."""

    tenant: str
    size: int
    digest: bytes


class ReplicaBoot(NamedTuple):
    """A replica from one start of its engine to the next."""

    replica: str
    boot: str


@dataclass(slots=True)
class _Suspect:
    at: float
    lost: set[ReplicaBoot] = field(default_factory=set)
    refused: bool = False


class Suspects:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # In the order of the last loss.
        self._known: OrderedDict[Key, _Suspect] = OrderedDict()
        #: Lengths of the known requests: a request of another length needs no digest. Empty: none is known.
        self.sizes: Counter[tuple[str, int]] = Counter()

    def __repr__(self) -> str:
        return (
            f"Suspects({len(self._known)} requests, {sum(s.refused for s in self._known.values())} refused)"
        )

    def find(self, tenant: str, target: bytes, body: bytes) -> Key | None:
        """The key of a request that is known; None: no replica was lost with it lately."""
        if not self.sizes or not self.sizes[tenant, len(body)]:
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

    def lost(self, key: Key, lives: Collection[ReplicaBoot], *, company: bool, obvious: bool = False) -> bool:
        """These replicas were lost with it. Whether it is refused from now on.

        company: other requests that were lost before were lost with this one. obvious: nothing else can have been the cause.
        """
        suspect = self._known.get(key)
        if suspect is None:
            suspect = self._known[key] = _Suspect(self._clock())
            self.sizes[key.tenant, key.size] += 1
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
            self.sizes[key.tenant, key.size] -= 1
            if not self.sizes[key.tenant, key.size]:
                del self.sizes[key.tenant, key.size]

    def _others(self, key: Key, lives: set[ReplicaBoot]) -> bool:
        """True if another request that was lost as often shares one of these lives, in whichever order losses are reported."""
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


class Losses:
    """The replicas that were lost with one request, now and when it came before. key: its own, where it is known already."""

    __slots__ = ("_lives", "_request", "_suspects", "_tenant", "key")

    def __init__(self, suspects: Suspects, tenant: str, request: Request, key: Key | None = None) -> None:
        self._suspects, self._tenant, self._request = suspects, tenant, request
        self.key = key
        self._lives: frozenset[ReplicaBoot] = frozenset()

    @classmethod
    def known(cls, suspects: Suspects, tenant: str, request: Request) -> Losses | None:
        """The losses of a request that came before and lost replicas. Raises RequestLostReplicas when it is refused."""
        key = suspects.find(tenant, request.target, request.body)
        if key is None:
            return None
        if suspects.refuses(key):
            raise _refusal()
        return cls(suspects, tenant, request, key)

    def add(
        self, life: ReplicaBoot, beside: Iterable[Losses], *, begun: bool, obvious: bool
    ) -> RequestLostReplicas | None:
        """Another replica was lost with it; the error, if it was probably the cause.

        beside: of other requests on that replica. begun: its stream had begun: then it is a suspect only once a second replica
        was lost with it. obvious: no other request on the replica can be the cause.
        """
        self._lives |= {life}
        if begun and len(self._lives) < LOSSES_ALONE:
            return None
        if self.key is None:
            self.key = key_of(self._tenant, self._request.target, self._request.body)
        company = any(other.key != self.key for other in beside)
        if not self._suspects.lost(self.key, self._lives, company=company, obvious=obvious):
            return None
        logger.error(
            "%s was lost with a request of %d bytes of tenant %r; it is refused from now on",
            life.replica,
            len(self._request.body),
            self._tenant,
        )
        return _refusal()

    def answered(self) -> None:
        """The request got an answer that is no refusal."""
        if self.key is not None:
            self._suspects.forget(self.key)


def is_the_largest(tenant: str, request: Request, others: Iterable[tuple[str, Request]]) -> bool:
    """It has much to read, and all others have less, but for those that are equal to it. others: tenant and request each."""
    size, asked = len(request.body), (tenant, request.target, request.body)
    return size >= LARGE_BYTES and all(
        len(other.body) < size or (by, other.target, other.body) == asked for by, other in others
    )


def _refusal() -> RequestLostReplicas:
    return RequestLostReplicas(
        f"replicas were lost while they worked on this request; it is not tried again within {KEPT_S:g} s"
    )


def key_of(tenant: str, target: bytes, body: bytes) -> Key:
    digest = blake2b(target.partition(b"?")[0] + b"\n", digest_size=16)
    digest.update(body)
    return Key(tenant, len(body), digest.digest())
