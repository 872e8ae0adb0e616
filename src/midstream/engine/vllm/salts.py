"""Which of vLLM's prefix caches a request shares: the cache_salt of each. Pure.

vLLM does not say how old cached KV is, so a cache namespace keeps its salt only as long as nothing under it can be older than
a request takes; then it begins anew, empty.

Always holds: what is found under a salt was computed in this boot, for the same namespace, and at most `age_max` switches ago.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

NAMESPACES_MAX = 100_000  # remembered; one that was forgotten begins anew


class Salts:
    """boot: random; what another boot left in the server's cache is never found."""

    def __init__(self, boot: bytes, namespaces_max: int = NAMESPACES_MAX) -> None:
        self._boot = boot
        self._began: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # of each namespace, the epoch in which its salt was first used
        self._namespaces_max = namespaces_max

    def __repr__(self) -> str:
        return f"Salts({len(self._began)} namespaces)"

    def of(
        self, namespace: bytes, now: int, age_max: int | None, *, passing: bool = False
    ) -> tuple[str, bool]:
        """The salt, and whether all that can be found under it is of epoch `now`.

        age_max: in switches; None: any age. passing: the request's bound is its own, and not that of others of its namespace,
        whose salt stays what it is.
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
