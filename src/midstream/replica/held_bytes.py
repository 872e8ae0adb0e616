"""How many bytes the record files of a deployment have, as one process knows it: by a listing, and by what it wrote since.

Always holds: a file counts once, however its write and a listing fall together.
"""

from __future__ import annotations

import threading
from collections import Counter


class HeldBytes:
    """Any thread may call it. One listing is under way at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        # By name: how many writes of it are under way.
        self._writing = Counter[str]()
        # Of files that the last listing may lack: their bytes, by name.
        self._since: dict[str, int] = {}
        # Names that were being written when a listing had them.
        self._listed: set[str] = set()
        # Since the listing that is under way began.
        self._meanwhile: dict[str, int] = {}
        self._seen: set[str] = set()

    def __repr__(self) -> str:
        return f"HeldBytes({self.total})"

    @property
    def total(self) -> int:
        with self._lock:
            return self._total

    def begin(self, name: str) -> None:
        """A file's write begins. `end` has to follow."""
        with self._lock:
            self._writing[name] += 1

    def end(self, name: str, size: int | None) -> None:
        """size: None if it failed."""
        with self._lock:
            if size is not None:
                self._meanwhile[name] = size
                if name not in self._since and name not in self._listed:
                    self._since[name] = size
                    self._total += size
            self._writing[name] -= 1
            if not self._writing[name]:
                del self._writing[name]
                self._listed.discard(name)

    def begin_listing(self) -> None:
        with self._lock:
            self._meanwhile, self._seen = {}, set()

    def listed(self, name: str) -> None:
        with self._lock:
            if name in self._writing or name in self._meanwhile:
                self._seen.add(name)

    def end_listing(self, size: int) -> None:
        """size: of all files that the listing had."""
        with self._lock:
            self._since = {name: own for name, own in self._meanwhile.items() if name not in self._seen}
            self._listed = {name for name in self._seen if name in self._writing}
            self._total = size + sum(self._since.values())
