"""Which bytes a snapshot's name meant, load after load of one boot, and how earlier ones are told once it means others. Pure.

Always holds: two loads have one label only if their files are the same, byte for byte as far as that is known. What is loaded
last under a name has the name itself. A label never stands for two contents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from midstream.core.types import BASE_SNAPSHOT, Desired, SnapshotContent
from midstream.replica.swap.table import SwapMachine

#: Of KV of which nobody knows what computed it.
UNKNOWN = "?"


class Meanings:
    def __init__(self) -> None:
        #: By name: a digest of the files, and the generation of the first signal for which they were loaded.
        self._known: dict[str, tuple[bytes, int]] = {BASE_SNAPSHOT: (_digest(()), 0)}

    def __repr__(self) -> str:
        return f"Meanings({len(self._known)} names)"

    def commit(
        self, desired: Desired, found: Sequence[SnapshotContent], machine: SwapMachine
    ) -> list[tuple[str, str]]:
        """Name and new label of what was committed before, as this is committed now. found: what the files are that `desired`
        does not state."""
        renamed = []
        if machine.distrusted:
            # Its check failed, or replicas did not agree.
            renamed.append((machine.serving, UNKNOWN))
            self._known.pop(machine.serving, None)
        name, digest = desired.snapshot, _digest(_contents(desired, found))
        asked = desired.signalled or desired.generation
        before, generation = self._known.get(name, (digest, asked))
        if before != digest:
            # No identity has an @.
            renamed.append((name, f"{name}@{generation}"))
            generation = asked
        self._known[name] = digest, generation
        return renamed


def _contents(desired: Desired, found: Sequence[SnapshotContent]) -> tuple[object, ...]:
    known = {(one.snapshot, one.fingerprint): one.files for one in found}
    return tuple(
        (link.snapshot, link.content or known.get((link.snapshot, link.fingerprint)) or link.fingerprint)
        for link in desired.files
    )


def _digest(contents: Sequence[object]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(contents), digest_size=16).digest()
