"""The checksums by which trainers name the bytes of a tensor: which there are, and the packages that compute them.

Always holds: a checksum is lower-case hexadecimal text. The packages are imported when a delta needs one, so that a replica
without such deltas needs none of them.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from midstream.core.errors import SnapshotError
from midstream.core.extras import advice
from midstream.snapshots.arc2.blob import adler32


class Checksum(Protocol):
    """Takes bytes in order."""

    def update(self, data: memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._sum = 1

    def update(self, data: memoryview) -> None:
        self._sum = adler32(data, self._sum)

    def hexdigest(self) -> str:
        return f"{self._sum:08x}"


def _of(package: str, name: str) -> Callable[[], Checksum]:
    def fresh() -> Checksum:
        try:
            kind: Any = getattr(importlib.import_module(package), name)
        except ImportError as error:
            raise SnapshotError(f"its kind of checksum {advice([package])}") from error
        checksum: Checksum = kind()
        return checksum

    return fresh


#: By the name that the files have for it.
CHECKSUMS: Mapping[str, Callable[[], Checksum]] = {
    "xxh3-128": _of("xxhash", "xxh3_128"),
    "blake3": _of("blake3", "blake3"),
    "adler32": _Adler32,
    "sha256": hashlib.sha256,
}
