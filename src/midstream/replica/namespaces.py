"""Prompt-cache namespaces: which cached prefixes a request may reuse. Pure.

A namespace is a number that goes into the salt of a request's cache. Swaps decide what happens to it:

    all          a new namespace for everyone; sessions forget the one they had
    new_session  a new namespace for sessions not seen before; known sessions stay in theirs
    none         nothing changes

Always holds: KV is shared only between requests of equal salt, and a salt is equal only for equal namespace, tenant,
isolation key and model. A request keeps the salt it was admitted with. Pins are bounded: the least recently used session
is forgotten first and then counts as new.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from midstream.types import ResetPromptCache

SESSIONS_MAX = 100_000

Session = tuple[
    str, str
]  # tenant ("" for the only one) and session key: equal keys of two tenants are two sessions


class Namespaces:
    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions_max = sessions_max
        self._current = 0
        self._pins: OrderedDict[Session, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"Namespaces(current={self._current}, sessions={len(self._pins)})"

    def admit(self, session: Session | None) -> int:
        """The namespace of a request being admitted; pins its session. Without a session it is like a new one."""
        if session is None:
            return self._current
        namespace = self._pins.setdefault(session, self._current)
        self._pins.move_to_end(session)
        if len(self._pins) > self._sessions_max:
            self._pins.popitem(last=False)
        return namespace

    def commit(self, policy: ResetPromptCache) -> None:
        """A snapshot was switched to."""
        if policy == "none":
            return
        self._current += 1
        if policy == "all":
            self._pins.clear()


def cache_salt(namespace: int, tenant: str, isolation_key: str, model: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in (str(namespace), tenant, isolation_key, model):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
