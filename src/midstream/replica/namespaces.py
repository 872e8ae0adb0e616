"""Prompt-cache namespaces: which cached prefixes a request may reuse. Pure.

A namespace is a number in the salt of a request's cache. The cache policy of a swap changes it:

    all          a new namespace for every request; sessions forget the one they had
    new_session  a new namespace for new sessions; known sessions stay in theirs
    none         nothing changes

A swap also says how many commits old reused KV may be while its snapshot serves (`kv_age_max`).

Always holds: KV is shared only between requests of equal salt. Salts are equal only for equal namespace, tenant, isolation
key and model. A request keeps the salt it was admitted with. The table is bounded: a session that was idle for `idle_s_max`
seconds is forgotten and counts as new; so is the least recently used one when there are too many.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable

from midstream.core.types import Desired, ResetPromptCache, Session

SESSIONS_MAX = 100_000
SESSION_IDLE_S_MAX = 3600.0


class Namespaces:
    """clock: seconds; only differences count."""

    def __init__(
        self,
        sessions_max: int = SESSIONS_MAX,
        idle_s_max: float = SESSION_IDLE_S_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions_max = sessions_max
        self._idle_s_max = idle_s_max
        self._clock = clock
        self._current = 0
        #: What began the newest namespace; "": the start.
        self.began = ""
        # What was switched to last, and the last reset since then.
        self._switched = self._reset = ""
        # The namespace of the last session that was closed and may come again. These go down, the others up.
        self._apart = 0
        #: How often all caches were reset without a switch.
        self.resets = 0
        # Namespace, last seen; oldest first.
        self._pins: OrderedDict[Session, tuple[int, float]] = OrderedDict()
        self.kv_age_max: int | None = None

    def __repr__(self) -> str:
        return f"Namespaces(current={self._current}, sessions={len(self._pins)})"

    def admit(self, session: Session | None) -> int:
        """The namespace of a request being admitted; pins its session. Without a session it is like a new one."""
        now = self._clock()
        if self._pins:
            self._forget_idle(now)
        if session is None:
            return self._current
        namespace, _ = self._pins.get(session, (self._current, now))
        self._pins[session] = namespace, now
        self._pins.move_to_end(session)
        if len(self._pins) > self._sessions_max:
            self._pins.popitem(last=False)
        return namespace

    @property
    def era(self) -> str:
        """Equal on two replicas where KV that what serves has computed is as fresh on both. So is older KV where `began` is
        equal, too."""
        return f"{self._switched} {self._reset}"

    def newest(self, session: Session) -> int | None:
        """The namespace of the session's next request, if that is the newest. Pins nothing."""
        namespace, _ = self._pins.get(session, (self._current, 0.0))
        return namespace if namespace == self._current else None

    def forget(self, session: Session) -> None:
        """From now on it is a new one, which finds nothing that is cached now.

        What it had alone, and what others have too, lie in one namespace: it finds neither.
        """
        self._apart -= 1
        self._pins[session] = self._apart, self._clock()
        self._pins.move_to_end(session)
        if len(self._pins) > self._sessions_max:
            self._pins.popitem(last=False)

    def reset(self, event: str = "") -> None:
        """Nothing that is cached is found again; the snapshot that serves, and its bound on ages, stay. event: names this reset
        on all replicas; "": on no other."""
        self._current += 1
        self.began = self._reset = event or uuid.uuid4().hex
        self.resets += 1
        self._pins.clear()

    def commit(self, policy: ResetPromptCache, kv_age_max: int | None = None, event: str = "") -> None:
        """A snapshot was switched to. event: names the signal on all replicas; "": the start."""
        self.kv_age_max, self._switched, self._reset = kv_age_max, event, ""
        self._forget_idle(self._clock())
        if policy == "none":
            return
        self._current += 1
        self.began = event
        if policy == "all":
            self._pins.clear()

    def _forget_idle(self, now: float) -> None:
        while self._pins:
            session, (_, seen) = next(iter(self._pins.items()))
            if now - seen <= self._idle_s_max:
                return
            del self._pins[session]


def event_of(desired: Desired) -> str:
    """Names a signal on all replicas."""
    return f"{desired.made}/{desired.generation}/{desired.reload}"


def cache_salt(namespace: int, tenant: str, isolation_key: str, model: str) -> bytes:
    """Two halves: whose KV it is, and the namespace."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (tenant, isolation_key, model):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest() + namespace.to_bytes(16, "little", signed=True)
