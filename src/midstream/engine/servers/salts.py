"""The cache_salt of each request: requests of one salt share the server's cached KV. Pure.

midstream's scheduler knows how old each block is, and is told with each request how old it may be. So a cache namespace has one
salt (`lasting`). vLLM's own scheduler does not say how old cached KV is. With it a namespace keeps its salt only while nothing
under it can be older than a request allows. Then it gets a new salt, and its cache begins empty (`of`).

Always holds: KV found under a salt was computed since this server started, for the same namespace. Under one of `of` it was
computed at most `age_max` switches ago.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

#: Namespaces that are remembered. A namespace that was forgotten begins with an empty cache.
NAMESPACES_MAX = 100_000


class Salts:
    """boot: random bytes, so that requests never find what an earlier boot left in the server's cache."""

    def __init__(self, boot: bytes, namespaces_max: int = NAMESPACES_MAX) -> None:
        self._boot = boot
        # Of each namespace, the epoch in which its salt was first used.
        self._began: OrderedDict[bytes, int] = OrderedDict()
        self._namespaces_max = namespaces_max

    def lasting(self, namespace: bytes) -> str:
        """Its first half says whose KV it is, as that of `namespace` does."""
        owner = namespace[: len(namespace) // 2]
        return "".join(
            hashlib.blake2b(self._boot + part, digest_size=16).hexdigest() for part in (owner, namespace)
        )

    def of(
        self, namespace: bytes, now: int, age_max: int | None, *, passing: bool = False
    ) -> tuple[str, bool]:
        """The salt, and whether all KV that can be found under it is of epoch `now`.

        age_max: in switches; None allows any age. passing: the bound is this request's alone, so the salt of its namespace
        does not change.
        """
        began = self._began.get(namespace, now)
        if age_max is not None and now - began > age_max:
            began = now
        if not passing:
            self._began[namespace] = began
            self._began.move_to_end(namespace)
            if len(self._began) > self._namespaces_max:
                self._began.popitem(last=False)
        digest = hashlib.blake2b(self._boot + began.to_bytes(8, "little") + namespace, digest_size=16)
        return digest.hexdigest(), began == now
