"""The checksums by which deltas name the bytes of a tensor: which there are, and the packages that compute them.

Always holds: a checksum is lower-case hexadecimal text, except for ARC2's, which is decimal. The packages are imported when a
delta needs one, so that a replica without such deltas needs none of them.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from midstream.core.errors import SnapshotError
from midstream.core.extras import advice
from midstream.snapshots.arc2.blob import adler32

#: Adler-32 as ARC2 writes it.
ARC_ADLER32 = "arc adler32"


class Checksum(Protocol):
    """Takes bytes in order."""

    def update(self, data: memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    """form: of the number."""

    def __init__(self, form: str = "08x") -> None:
        self._sum, self._form = 1, form

    def update(self, data: memoryview) -> None:
        self._sum = adler32(data, self._sum)

    def hexdigest(self) -> str:
        return format(self._sum, self._form)


def _of(package: str, name: str) -> Callable[[], Checksum]:
    def fresh() -> Checksum:
        try:
            kind: Any = getattr(importlib.import_module(package), name)
        except ImportError as error:
            raise SnapshotError(f"its kind of checksum {advice([package])}") from error
        checksum: Checksum = kind()
        return checksum

    return fresh


#: By the name that the files of trainers have for it.
CHECKSUMS: Mapping[str, Callable[[], Checksum]] = {
    "xxh3-128": _of("xxhash", "xxh3_128"),
    "blake3": _of("blake3", "blake3"),
    "adler32": _Adler32,
    ARC_ADLER32: partial(_Adler32, "d"),
    "sha256": hashlib.sha256,
}
