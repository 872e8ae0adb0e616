"""Checks that every floating-point number of a snapshot's files is finite. No torch.

Always holds: files are only read. A refusal names the first tensor, in the order of files and of their bytes, the index of its
first bad number, the number and the file. It is the same on every machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from midstream.core.errors import SnapshotError, SnapshotNotFinite
from midstream.snapshots.arc2.files import Cancelled, read
from midstream.snapshots.layout import FileLayout, TensorSpec, read_file_layout
from midstream.snapshots.messages import shown

#: Read at a time, by each thread. Fits the cache of a core.
PIECE_BYTES = 2**18
#: Small tensors are checked together, up to so many bytes.
GROUP_BYTES = 16 * 2**20
THREADS_MAX = 4


@dataclass(frozen=True)
class _Float:
    """How the bits of a number show that it is not finite. bits: of one number.

    first: the bits of the least number without a sign that is not finite. Those above it are not finite either, and the same
    holds with the sign bit set. infinite: whether `first` is infinity. signed: whether there is a sign bit.
    """

    bits: int
    first: int
    infinite: bool = True
    signed: bool = True


#: Formats that have numbers which are not finite. F8_E4M3 is the variant without infinity.
_FLOATS: Mapping[str, _Float] = {
    "F64": _Float(64, 0x7FF0 << 48),
    "F32": _Float(32, 0x7F80 << 16),
    "C64": _Float(32, 0x7F80 << 16),
    "BF16": _Float(16, 0x7F80),
    "F16": _Float(16, 0x7C00),
    "F8_E5M2": _Float(8, 0x7C),
    "F8_E4M3": _Float(8, 0x7F, infinite=False),
    "F8_E8M0": _Float(8, 0xFF, infinite=False, signed=False),
}


def check_finite(
    directory: Path, files: Mapping[str, FileLayout], *, cancelled: Cancelled = lambda: False
) -> None:
    """Read the tensors of `files`, which lie in `directory`. files: the layout of each safetensors file by name.

    Returns early when `cancelled` is true. Raises SnapshotNotFinite, SnapshotCorrupt when a file became shorter,
    SnapshotError when one cannot be read.
    """
    stopped = False
    groups = list(_groups(files))
    count = max(1, min(THREADS_MAX, os.cpu_count() or 1, len(groups)))
    with ThreadPoolExecutor(count, "finite") as threads:
        work = partial(_first_problem, directory, stop=lambda: stopped or cancelled())
        try:
            for problem in threads.map(work, groups):
                if problem is not None:
                    raise SnapshotNotFinite(problem)
        finally:
            stopped = True


@dataclass(frozen=True)
class _Part:
    """A tensor, and where it lies in its file."""

    name: str
    spec: TensorSpec
    begin: int
    end: int


def _groups(files: Mapping[str, FileLayout]) -> Iterator[tuple[str, list[_Part]]]:
    """Neighbours in a file, with the file's name."""
    for file in sorted(files):
        layout = files[file]
        group: list[_Part] = []
        for name, (begin, end) in sorted(layout.ranges.items(), key=lambda item: item[1]):
            if layout.tensors[name].dtype in _FLOATS:
                group.append(_Part(name, layout.tensors[name], begin, end))
            if group and end - group[0].begin >= GROUP_BYTES:
                yield file, group
                group = []
        if group:
            yield file, group


def _first_problem(directory: Path, group: tuple[str, list[_Part]], *, stop: Cancelled) -> str | None:
    """What is wrong with the first of these tensors that has a bad number; None if none has."""
    file, parts = group
    buffer = np.empty(PIECE_BYTES, np.uint8)
    try:
        with (directory / file).open("rb", buffering=0) as opened:
            for part in parts:
                found = _first_bad(opened.fileno(), part, buffer, stop)
                if found is not None:
                    return _described(part, *found)
    except OSError as error:
        raise SnapshotError(f"{shown(file)}: cannot be read: {error.strerror or error}") from error
    return None


def _first_bad(file: int, part: _Part, buffer: np.ndarray, stop: Cancelled) -> tuple[int, int] | None:
    """(place in the tensor, bits) of its first number that is not finite."""
    size = _FLOATS[part.spec.dtype].bits // 8
    at = part.begin
    while at < part.end and not stop():
        piece = buffer[: min(len(buffer), part.end - at)]
        read(file, piece.data, at)
        found = first_bad(part.spec.dtype, piece)
        if found is not None:
            return (at - part.begin) // size + found[0], found[1]
        at += len(piece)
    return None


def first_bad(dtype: str, data: np.ndarray) -> tuple[int, int] | None:
    """(place, bits) of the first number in `data` that is not finite; None if all are finite.

    dtype: as safetensors names it. data: uint8, whole little-endian numbers.
    """
    kind = _FLOATS[dtype]
    unsigned = data.view(f"<u{kind.bits // 8}")
    if not len(unsigned):
        return None
    sign = 1 << (kind.bits - 1)
    # Read with a sign, numbers that have their sign bit set are negative: each largest value is of one half.
    over = unsigned.max() >= (kind.first | sign if kind.signed else kind.first)
    if not over and kind.signed:
        over = data.view(f"<i{kind.bits // 8}").max() >= kind.first
    if not over:
        return None
    size = unsigned & unsigned.dtype.type(sign - 1) if kind.signed else unsigned
    place = int(np.argmax(size >= kind.first))
    return place, int(unsigned[place])


def shows_finite(layout: FileLayout, largest: Mapping[int, int]) -> bool:
    """Whether the largest words of a file show that all its numbers are finite. False: they do not show it, and it may be.

    They show it of BF16 and F32, and of F16 without the header, some of whose words are larger. Those of other tensors may be,
    too.

    largest: of all words of the file, little-endian and without their highest bit, by how many bits they have.
    """
    for name, spec in layout.tensors.items():
        kind = _FLOATS.get(spec.dtype)
        if kind is None:
            continue
        # Of a tensor that begins inside a word, numbers are no words.
        whole = layout.ranges[name][0] % (kind.bits // 8) == 0
        if not (kind.signed and whole and largest.get(kind.bits, kind.first) < kind.first):
            return False
    return True


def parts_show_finite(file: Path, parts: Mapping[int, Mapping[int, int]]) -> bool:
    """As `shows_finite`. parts: the largest words of each part of the file, by where it begins; empty where nobody looked for
    them."""
    if not parts or not all(parts.values()):
        return False
    try:
        layout = read_file_layout(file)
        if any(spec.dtype == "F16" for spec in layout.tensors.values()):
            parts = _without_header(file, layout, parts)
    except (SnapshotError, OSError):
        # Its reader says what is wrong.
        return False
    return shows_finite(layout, {bits: max(part[bits] for part in parts.values()) for bits in (16, 32)})


def _without_header(
    file: Path, layout: FileLayout, parts: Mapping[int, Mapping[int, int]]
) -> dict[int, Mapping[int, int]]:
    """The parts, with those 16-bit words alone that lie behind the header. A part without the header is not read."""
    # Where words begin, from the beginning of the file on.
    start = layout.data_start + layout.data_start % 2
    end = min((begin for begin in parts if begin >= start), default=None)
    words = np.fromfile(file, "<u2", -1 if end is None else (end - start) // 2, offset=start)
    behind = int((words & 0x7FFF).max(initial=0))
    return {begin: part if begin >= start else {**part, 16: behind} for begin, part in parts.items()}


def all_finite(dtype: str, data: np.ndarray) -> bool:
    """Whether no number in `data`, as in `first_bad`, is infinite or NaN. dtype: also one that has no such numbers."""
    return dtype not in _FLOATS or (
        len(data) % (_FLOATS[dtype].bits // 8) == 0 and first_bad(dtype, data) is None
    )


def _described(part: _Part, place: int, bits: int) -> str:
    kind = _FLOATS[part.spec.dtype]
    negative = kind.signed and bits >> (kind.bits - 1)
    infinite = kind.infinite and bits & ((1 << (kind.bits - 1)) - 1) == kind.first
    number = ("-infinity" if negative else "infinity") if infinite else "NaN"
    # A complex number is two floating-point ones.
    place = place // 2 if part.spec.dtype == "C64" else place
    index = [int(i) for i in np.unravel_index(place, part.spec.shape)] if part.spec.shape else []
    return f"tensor {shown(part.name)} is {number} at index {index} ({shown(part.spec.file)})"
