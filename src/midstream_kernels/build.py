"""The C++ library of the kernels: what the wheel brought, or compiled once per machine; loaded with its signatures.

Always holds:
- A library of the wheel (prebuilt.py) wins. It has the same numbers as one compiled here, is as fast, and needs no compiler.
- A library that is compiled here is kept in the user's cache directory. Its name is a hash of its source, compiler and
  processor. So it never runs on a machine it was not built for, and edited source is always compiled again.
- `MIDSTREAM_KERNELS_LEVEL` compiles for that level (prebuilt.py) and not for the whole processor.
- The log names the level of what runs, wherever it was compiled.
- A library appears in the cache whole or not at all. It is never loaded from a directory that other users can write to.
- Of processes that start together, one compiles.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from midstream_kernels import prebuilt

logger = logging.getLogger(__name__)

FLAGS = [*prebuilt.FLAGS, "-march=native"]
BUILD_TIMEOUT_S = 300.0
#: Beside the directory of the source: the libraries of a wheel. A checkout has none.
LIBRARIES = "libraries"


class KernelsUnavailable(Exception):
    """This machine cannot build the kernels, or they cannot run the model. The message says why."""


def asked_level() -> prebuilt.Level | None:
    """The level that MIDSTREAM_KERNELS_LEVEL names. Raises KernelsUnavailable when this machine cannot run it."""
    try:
        return prebuilt.asked()
    except ValueError as error:
        raise KernelsUnavailable(str(error)) from error


@cache
def load(source: Path) -> ctypes.CDLL:
    """The library of the file `source`, which may include the headers beside it. Raises KernelsUnavailable."""
    level = asked_level()
    if (brought := prebuilt.load(source, source.parent.parent / LIBRARIES)) is not None:
        return brought
    library = _compiled(source, _flags(level))
    logger.info("kernels: %s, compiled on this machine", level.name if level else _fastest() or "native")
    return library


def found(source: Path) -> ctypes.CDLL | None:
    """The library of `source`, if `load` would compile nothing; else None. Raises KernelsUnavailable."""
    place = _place(source)
    if not isinstance(place, Path):
        return place
    try:
        if not place.exists():
            return None
        _check_owner(place.parent)
        return ctypes.CDLL(str(place))
    except OSError:
        return None


@cache
def _place(source: Path) -> ctypes.CDLL | Path | None:
    """What the wheel brought, or where the library is kept once it is compiled. None: nowhere. Raises KernelsUnavailable."""
    level = asked_level()
    if (brought := prebuilt.load(source, source.parent.parent / LIBRARIES)) is not None:
        return brought
    try:
        return _target(source, _compiler(), _flags(level))
    except RuntimeError:
        # No home directory.
        return None


def _flags(level: prebuilt.Level | None) -> list[str]:
    return FLAGS if level is None else [*prebuilt.FLAGS, *level.flags]


def _target(source: Path, compiler: str, flags: Sequence[str]) -> Path:
    """Where it is kept. Raises RuntimeError without a home directory."""
    return _cache_dir() / f"{source.stem}-{_key(compiler, source, flags)}.so"


def _fastest() -> str | None:
    """The level whose instructions a library for this very processor has at least."""
    return prebuilt.choose([one.name for one in prebuilt.LEVELS], platform.machine(), prebuilt.features())


def _compiled(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """The library of this machine: kept, or compiled for this process. Raises KernelsUnavailable."""
    compiler = _compiler()
    try:
        return _kept([compiler, *flags], source, _target(source, compiler, flags))
    except (OSError, RuntimeError) as error:
        # A read-only disk, no home directory, or a disk that allows no programs.
        logger.warning("%s cannot be kept once built and is compiled at each start: %s", source.name, error)
    try:
        # A loaded library outlives its file.
        with tempfile.TemporaryDirectory() as directory:
            return _built([compiler, *flags], source, Path(directory) / f"{source.stem}.so")
    except OSError as error:
        raise KernelsUnavailable(f"{source.name} could not be built: {error}") from error


def _kept(compile_with: Sequence[str], source: Path, target: Path) -> ctypes.CDLL:
    """Raises OSError, KernelsUnavailable."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(target.parent)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(target))
    with _alone(target.parent):
        if target.exists():
            try:
                return ctypes.CDLL(str(target))
            except OSError as error:
                # The disk was full, or the machine went down while it was written.
                logger.warning("%s is built again: %s", target, error)
        return _built(compile_with, source, target)


def _check_owner(directory: Path) -> None:
    """Raises PermissionError, OSError."""
    state = directory.stat()
    if hasattr(os, "getuid") and (state.st_uid not in (0, os.getuid()) or state.st_mode & 0o022):
        raise PermissionError(f"other users can write to {directory} and could put anything there")


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """The engines of a server start together: one of them compiles, and the others wait and load what it kept."""
    held = os.open(directory, os.O_RDONLY)
    try:
        # A file system without locks costs no more than several compilations.
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise KernelsUnavailable("no C++ compiler was found (CXX, c++, g++, clang++)")


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "midstream"


def _key(compiler: str, source: Path, flags: Sequence[str]) -> str:
    digest = hashlib.sha256(prebuilt.source_digest(source).encode())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    for part in (version, " ".join(flags).encode(), platform.machine().encode(), _processor()):
        digest.update(part)
    return digest.hexdigest()[:20]


def _processor() -> bytes:
    """What tells the instruction sets of two processors apart."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({x for x in lines if x.startswith((b"flags", b"Features", b"model name"))}))


def _built(compile_with: Sequence[str], source: Path, target: Path) -> ctypes.CDLL:
    """Compile `target` and load it. compile_with: the compiler and its flags. Raises OSError, KernelsUnavailable."""
    logger.info("compiling %s, once on this machine: %s", source.name, target)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        built = Path(directory) / target.name
        command = [*compile_with, str(source), "-o", str(built)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise KernelsUnavailable(f"{source.name} could not be built: {error}") from error
        if done.returncode:
            raise KernelsUnavailable(f"{compile_with[0]} failed: {done.stderr.strip()[-400:]}")
        built.replace(target)
    return ctypes.CDLL(str(target))


SOURCE = Path(__file__).parent / "kernels" / "kernels.cpp"

#: Letters of the signatures: P pointer, S int64, I int, F float.
C_TYPES: dict[str, Any] = {"P": ctypes.c_void_p, "S": ctypes.c_int64, "I": ctypes.c_int, "F": ctypes.c_float}
SIGNATURES = {
    "pack": "PPSSP",
    "linear": "PPPSSSIPSI",
    "rms_norm": "PPPSSFPI",
    "forward": "PFFFPPPSPPPPSPPSPPPPPI",
    "lora": "PSSPPSPSSPSI",
    "sample": "PSSPPPPFPPPPSPPPPI",
}


@cache
def kernels(suffix: str) -> SimpleNamespace:
    """The kernels of one element type, "bf16" or "f32". Raises KernelsUnavailable."""
    library, functions = load(SOURCE), {}
    for name, signature in SIGNATURES.items():
        function = library[f"{name}_{suffix}"]
        function.argtypes = [C_TYPES[letter] for letter in signature]
        function.restype = ctypes.c_int64 if name == "forward" else None
        functions[name] = function
    return SimpleNamespace(**functions)
