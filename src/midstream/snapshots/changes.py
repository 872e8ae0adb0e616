"""What a delta changes in its parent, as one record, whichever format it has. Pure.

Always holds: a DeltaChanges names every tensor of the parent once, with the file and the place that it has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from midstream.snapshots.layout import FileLayout

#: How a blob says what is new: the XOR with the old bytes, by zlib or by zstd, or the bytes that differ and where they are.
Encoding = Literal["arc_v1", "arc_v2", "overwrite"]


class ChangedTensor(NamedTuple):
    """file, blob: the delta's file, and where in it the bytes lie. algorithm, checksum: of the new bytes (checksums.py).

    size, dtype, shape: what the format says of the tensor; None where it says nothing.
    """

    file: str
    blob: tuple[int, int]
    encoding: Encoding
    algorithm: str
    checksum: str
    size: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


class RebuiltTensor(NamedTuple):
    """A tensor of the parent, with its file and its place in that, and how the delta changes it; None: not at all."""

    name: str
    file: str
    dtype: str
    where: tuple[int, int]
    change: ChangedTensor | None


class DeltaChanges(NamedTuple):
    """layouts: of the parent's weights files. not_of_result: files of the delta that say what is in it."""

    layouts: Mapping[str, FileLayout]
    tensors: list[RebuiltTensor]
    not_of_result: tuple[str, ...] = ()


def changes_of(
    layouts: Mapping[str, FileLayout], changed: Mapping[str, ChangedTensor], *not_of_result: str
) -> DeltaChanges:
    """layouts: of the parent's weights files. changed: by tensor."""
    tensors = [
        RebuiltTensor(name, file, spec.dtype, layout.ranges[name], changed.get(name))
        for file, layout in layouts.items()
        for name, spec in layout.tensors.items()
    ]
    return DeltaChanges(layouts, tensors, not_of_result)
