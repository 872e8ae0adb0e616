"""A snapshot's directory on this machine: how it comes into its place, and what it notes of the files it was made from.

Always holds: a directory in place became visible by one rename. What it notes was written before, and says of each file
the name, the size and the time of its last change. A directory without its notes is not whole, whatever is in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.types import Content

#: Directories of this name are worthless once their process is gone.
TEMPORARY_PREFIX = ".moving-"
#: Which files a directory has: name, bytes and version of each.
LISTING_FILE = ".listing.json"
#: When each of those files was last written.
STAMPS_FILE = ".stamps.json"
#: The content of the full snapshot, then of each delta, that a directory was made from.
CONTENT_FILE = ".content.json"
#: There while nobody has asked whether the numbers are finite, which they are.
FINITE_FILE = ".finite"
_COPY_BYTES = 2**20
_NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EIO)

_Listing = list[tuple[str, int, str]]


def temporary_directory(parent: Path) -> Path:
    """A name in `parent` for a directory on its way; nothing is made."""
    return parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def move_into_place(temporary: Path, dest: Path) -> None:
    """Rename `temporary` to `dest`, and remove what was there. Raises OSError, and then leaves `dest` as it was."""
    old = Path(f"{temporary_directory(temporary.parent)}-old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(dest, old)
    try:
        os.rename(temporary, dest)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.rename(old, dest)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_listing(directory: Path, encoded: bytes) -> None:
    """Note in `directory` that it has the files of this encoded listing. Raises OSError."""
    names = [name for name, _, _ in msgspec.json.decode(encoded, type=_Listing)]
    stamps = {name: (directory / name).stat().st_mtime_ns for name in names}
    (directory / STAMPS_FILE).write_bytes(msgspec.json.encode(stamps))
    (directory / LISTING_FILE).write_bytes(encoded)


def write_own_listing(directory: Path, *, finite: bool = False) -> None:
    """Note in `directory` the files it has, which were made here and are in no bucket. finite: all their numbers were seen to
    be, as they were made. Raises OSError."""
    files = sorted((f.name, f.stat().st_size, "") for f in directory.iterdir() if f.is_file())
    write_listing(directory, msgspec.json.encode(files))
    if finite:
        note_finite(directory)


def note_finite(directory: Path) -> None:
    """All numbers in `directory` were seen to be finite in the pass that read or made them. Raises OSError."""
    (directory / FINITE_FILE).touch()


def made_finite(directory: Path) -> bool:
    """Whether numbers that were seen to be finite were just fetched or made. Says so once: later ones may be damaged."""
    try:
        (directory / FINITE_FILE).unlink()
    except OSError:
        return False
    return True


def is_whole(directory: Path, fingerprint: str | None, contents: Sequence[Content | None]) -> bool:
    """True if `directory` has every file that it noted, with the noted size and time.

    fingerprint: of the snapshot these files must be. contents: that the directory must be made from, link by link. None allows
    any, for each of them. No file is read, so damage by the disk is not seen.
    """
    if not _agree(contents, noted_contents(directory)):
        return False
    try:
        encoded = (directory / LISTING_FILE).read_bytes()
        if fingerprint is not None and hashlib.sha256(encoded).hexdigest() != fingerprint:
            return False
        stamps = msgspec.json.decode((directory / STAMPS_FILE).read_bytes(), type=dict[str, int])
        files = msgspec.json.decode(encoded, type=_Listing)
        found = [(name, size, (directory / name).stat()) for name, size, _ in files]
        return all((now.st_size, now.st_mtime_ns) == (size, stamps[name]) for name, size, now in found)
    except (OSError, KeyError, *NOT_JSON):
        return False


def forget_listing(directory: Path) -> None:
    """From now on `directory` is not whole. Raises OSError."""
    (directory / LISTING_FILE).unlink(missing_ok=True)


def note_contents(directory: Path, contents: Sequence[Content]) -> None:
    """Note what `directory` was made from: the content of the full snapshot, then of each delta. Raises OSError."""
    (directory / CONTENT_FILE).write_bytes(msgspec.json.encode(contents))


def noted_contents(directory: Path) -> tuple[Content, ...]:
    """The contents noted in `directory`; none if they cannot be read."""
    try:
        return msgspec.json.decode((directory / CONTENT_FILE).read_bytes(), type=tuple[Content, ...])
    except (OSError, *NOT_JSON):
        return ()


def _agree(expected: Sequence[Content | None], noted: Sequence[Content]) -> bool:
    if len(expected) != len(noted):
        return False
    return all(want is None or want == have for want, have in zip(expected, noted, strict=True))


def copy_some(source: int, target: int, position: int, end: int) -> int:
    """Copy some of the bytes from `position` to `end` to the same place. Returns how many; 0 if the source has ended."""
    try:
        # A file system that cannot do it may copy nothing instead of saying so.
        if hasattr(os, "copy_file_range") and (
            count := os.copy_file_range(source, target, end - position, position, position)
        ):
            return count
    except OSError as error:
        if error.errno not in _NO_KERNEL_COPY:
            raise
    piece = os.pread(source, min(end - position, _COPY_BYTES), position)
    return os.pwrite(target, piece, position) if piece else 0


def directory_bytes(directory: Path) -> int:
    """Bytes that the files in `directory` take on disk, at most. A file with holes takes less than its size."""
    total = 0
    # The directory may vanish meanwhile.
    with contextlib.suppress(OSError):
        for file in directory.iterdir():
            found = file.stat()
            total += min(found.st_size, found.st_blocks * 512) if file.suffix == ".part" else found.st_size
    return total


def linked_files(directory: Path) -> dict[tuple[int, int], int]:
    """The bytes of the files in `directory` that have other names, too, by device and inode."""
    # The directory may vanish meanwhile.
    with contextlib.suppress(OSError):
        stats = [file.stat() for file in directory.iterdir()]
        return {(one.st_dev, one.st_ino): one.st_size for one in stats if one.st_nlink > 1}
    return {}


def reserve(file: int, size: int) -> None:
    """Have the disk set aside room for `size` bytes of an open file. Nothing where a file system cannot. Raises OSError."""
    if _FALLOCATE is not None and _FALLOCATE(file, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))


def reserved_bytes(file: int) -> int:
    """Bytes of an open file that have their room on the disk."""
    return os.fstat(file).st_blocks * 512


def _fallocate() -> Any:
    """The system call itself: what the C library does where it is missing writes each block. None outside Linux."""
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None, use_errno=True).fallocate
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    return found


_FALLOCATE = _fallocate()
