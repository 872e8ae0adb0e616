"""Which bytes a snapshot's name meant, load after load of one boot, and the labels of earlier ones once it means others. Pure.

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
        self._known: dict[str, tuple[str, int]] = {BASE_SNAPSHOT: (_digest(()), 0)}
        #: The same once the switch that was announced has been made.
        self._next = self._known

    def __repr__(self) -> str:
        return f"Meanings({len(self._known)} names)"

    def files(self, name: str) -> str:
        """What the name means here, comparable between replicas; "": it was not loaded in this boot."""
        return self._known.get(name, ("", 0))[0]

    def coming(self, name: str) -> str:
        """As `files`, once the switch that was announced has been made."""
        return self._next.get(name, ("", 0))[0]

    def switching(
        self, desired: Desired, found: Sequence[SnapshotContent], machine: SwapMachine
    ) -> list[tuple[str, str]]:
        """Name and new label of what was committed before, for the switch to `desired`. found: what the files are that it does
        not state."""
        renamed, known = [], dict(self._known)
        if machine.distrusted:
            # Its check failed, or replicas did not agree.
            renamed.append((machine.serving, UNKNOWN))
            known.pop(machine.serving, None)
        name, digest = desired.snapshot, _digest(_contents(desired, found))
        asked = desired.signalled or desired.generation
        before, generation = known.get(name, (digest, asked))
        if before != digest:
            # No identity has an @.
            renamed.append((name, f"{name}@{generation}"))
            generation = asked
        known[name] = digest, generation
        self._next = known
        return renamed

    def switched(self) -> None:
        """The switch that was announced last has been made. What the engine reported before it is of the files before it."""
        self._known = self._next


def _contents(desired: Desired, found: Sequence[SnapshotContent]) -> tuple[object, ...]:
    known = {(one.snapshot, one.fingerprint): one.files for one in found}
    return tuple(
        (link.snapshot, link.content or known.get((link.snapshot, link.fingerprint)) or link.fingerprint)
        for link in desired.files
    )


def _digest(contents: Sequence[object]) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(contents), digest_size=12).hexdigest()
