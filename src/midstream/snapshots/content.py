"""The content of a snapshot: size and digest of each of its files. The manifest in the bucket says it.

A file's digest is the SHA-256 of the SHA-256 digests (32 bytes each) of its parts of 16 MiB, in order. So parts are digested
in parallel while they are copied, and an interrupted copy loses nothing.

Always holds: a content names every snapshot file of a directory once, sorted by name. The manifest is not one of them. A
manifest that is not understood as a whole is an error. Two contents have the same fingerprint only if they are equal.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import SnapshotCorrupt
from midstream.core.types import Content, FileContent
from midstream.snapshots.messages import shown
from midstream_kernels import LANES, range_digests

MANIFEST_FILE = "midstream.manifest.json"
MANIFEST_BYTES_MAX = 16 * 2**20
PART_BYTES = 16 * 2**20
_READ_BYTES = 2**20
_DIGEST_CHARS = 64
_SHORTER = "a file became shorter while it was read"
#: Begins the fingerprint of files that are known by their content, not by what a bucket lists.
_BY_CONTENT = "content:"


Part = TypeVar("Part")


class ReadPart(NamedTuple):
    """largest: of its words, as RangeDigest has it. Empty: not looked for."""

    digest: bytes
    largest: Mapping[int, int]


class _File(msgspec.Struct, frozen=True):
    name: str
    size: int
    digest: str


class _Manifest(msgspec.Struct, frozen=True):
    format: Literal["midstream.manifest.v1"]
    digest: Literal["sha256 of the sha256 of each 16 MiB"]
    files: tuple[_File, ...]


def in_groups(parts: Sequence[Part]) -> list[Sequence[Part]]:
    """Parts that one thread digests together."""
    return [parts[at : at + LANES] for at in range(0, len(parts), LANES)]


def part_digests(file: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The digest of each range of an open file, from its first byte to behind its last. Raises SnapshotCorrupt, OSError."""
    return [part.digest for part in read_parts(file, ranges)]


def read_parts(file: int, ranges: Sequence[tuple[int, int]]) -> list[ReadPart]:
    """As `part_digests`, with what else the pass shows."""
    try:
        found = range_digests(file, ranges)
    except EOFError:
        raise SnapshotCorrupt(_SHORTER) from None
    if found is None:
        return [ReadPart(part_digest(file, *each), {}) for each in ranges]
    return [ReadPart(*each) for each in found]


def part_digest(file: int, begin: int, end: int) -> bytes:
    """As `part_digests`, of one range."""
    whole = hashlib.sha256()
    buffer = memoryview(bytearray(min(_READ_BYTES, max(1, end - begin))))
    while begin < end:
        count = os.preadv(file, [buffer[: min(len(buffer), end - begin)]], begin)
        if count == 0:
            raise SnapshotCorrupt(_SHORTER)
        whole.update(buffer[:count])
        begin += count
    return whole.digest()


def combined(parts: Iterable[bytes]) -> str:
    """The digest of a file from the digests of its parts, in order."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def file_content(path: Path, *, known: Mapping[int, bytes] = MappingProxyType({})) -> FileContent:
    """The content of one file. known: digests of whole parts of it, by where they begin. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        ranges = part_ranges(size)
        unknown = [each for each in ranges if each[0] not in known]
        found = dict(zip(unknown, part_digests(file.fileno(), unknown), strict=True))
    parts = (known[each[0]] if each[0] in known else found[each] for each in ranges)
    return FileContent(path.name, size, combined(parts))


def part_ranges(size: int) -> list[tuple[int, int]]:
    """Where the parts of a file of this size lie."""
    return [(at, min(at + PART_BYTES, size)) for at in range(0, size, PART_BYTES)]


def directory_content(directory: Path, names: Iterable[str]) -> Content:
    """The content of these files of `directory`, digested in parallel. Raises OSError."""
    with ThreadPoolExecutor(os.cpu_count() or 1, "digests") as threads:
        return tuple(threads.map(lambda name: file_content(directory / name), sorted(names)))


def content_fingerprint(content: Content) -> str:
    """The fingerprint of a snapshot that is known by this content alone."""
    files = sorted((file.name, file.size, file.digest) for file in content)
    return _BY_CONTENT + hashlib.sha256(msgspec.json.encode(files)).hexdigest()


def by_content(fingerprint: str | None) -> bool:
    """Whether a snapshot with this fingerprint is known by its content, whatever its bucket lists. None: not known at all."""
    return fingerprint is not None and fingerprint.startswith(_BY_CONTENT)


def difference(expected: Content, found: Content) -> str | None:
    """How the first file that differs does so; None if none does."""
    before, now = ({file.name: file for file in content} for content in (expected, found))
    return _other_names(before, now) or next(
        (
            f"{shown(name)} has the digest {now[name].digest} instead of {file.digest}"
            for name, file in before.items()
            if now[name].digest != file.digest
        ),
        None,
    )


def size_difference(expected: Content, sizes: Mapping[str, int]) -> str | None:
    """Like `difference`, by names and sizes alone."""
    return _other_names(
        {file.name: file for file in expected},
        {name: FileContent(name, size, "") for name, size in sizes.items()},
    )


def _other_names(before: Mapping[str, FileContent], now: Mapping[str, FileContent]) -> str | None:
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            return f"{shown(name)} is missing"
        if name not in before:
            return f"{shown(name)} is there, and was not one of its files"
        if now[name].size != before[name].size:
            return f"{shown(name)} has {now[name].size} bytes instead of {before[name].size}"
    return None


def encode_manifest(content: Content) -> bytes:
    files = tuple(_File(file.name, file.size, file.digest) for file in content)
    manifest = _Manifest("midstream.manifest.v1", "sha256 of the sha256 of each 16 MiB", files)
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def parse_manifest(data: bytes) -> Content:
    """Raises SnapshotCorrupt."""
    try:
        files = msgspec.json.decode(data, type=_Manifest).files
    except NOT_JSON as error:
        raise SnapshotCorrupt(f"{MANIFEST_FILE}: is no manifest: {shown(str(error))}") from None
    names = [file.name for file in files]
    if len(set(names)) != len(names):
        raise SnapshotCorrupt(f"{MANIFEST_FILE}: names a file twice")
    for file in files:
        plain = len(file.digest) == _DIGEST_CHARS and set(file.digest) <= set("0123456789abcdef")
        if not plain or file.size < 0:
            raise SnapshotCorrupt(f"{MANIFEST_FILE}: {shown(file.name)} has no digest and size")
    return tuple(FileContent(f.name, f.size, f.digest) for f in sorted(files, key=lambda f: f.name))
