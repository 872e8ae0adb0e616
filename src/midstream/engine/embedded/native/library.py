"""The compiled kernels: built once per machine from the C++ beside this file, then loaded.

Owns: finding a compiler, the cache of built libraries, the C signatures. No torch.
Always holds: a library is found under a name made of its source, compiler and processor, so it never runs on a machine it
was not built for and an edited kernel is always rebuilt; it appears in the cache whole or not at all; it is never loaded
from a directory that other users can write to.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent
MAIN = "kernels.cpp"
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-pthread",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-shared",
    "-fPIC",
    "-w",
)
BUILD_TIMEOUT_S = 300.0

_POINTER, _SIZE, _INT, _FLOAT = c_void_p, c_int64, c_int, c_float
SIGNATURES: dict[str, list[type]] = {
    "pack": [_POINTER, _POINTER, _SIZE, _SIZE, _POINTER],
    "linear": [_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT, _POINTER, _SIZE, _INT],
    "rms_norm": [_POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _FLOAT, _POINTER, _INT],
    "prepare": [
        *(_POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _SIZE),
        *(_POINTER, _POINTER, _POINTER, _POINTER, _INT),
    ],
    "attention": [
        *(_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER),
        *(_SIZE, _FLOAT, _INT),
    ],
    "moe": [
        *(
            _POINTER,
            _POINTER,
            _POINTER,
            _POINTER,
            _SIZE,
            _SIZE,
            _SIZE,
            _SIZE,
            _SIZE,
            _INT,
            _POINTER,
            _POINTER,
        ),
        *(_SIZE, _INT),
    ],
    "sample": [
        *(_POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_SIZE, _POINTER, _POINTER, _INT),
    ],
}


class NoCompiler(Exception):
    """The kernels cannot be built here; the message says why."""


class Kernels:
    """The kernels for one element type: `suffix` is "bf16" or "f32"."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        for name, arguments in SIGNATURES.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(name)


@cache
def kernels(suffix: str) -> Kernels:
    """Raises NoCompiler."""
    return Kernels(load_library(), suffix)


@cache
def load_library() -> ctypes.CDLL:
    compiler = _compiler()
    name = f"kernels-{_key(compiler)}.so"
    try:
        return _kept(compiler, _cache_dir() / name)
    except (
        OSError,
        RuntimeError,
    ) as error:  # a read-only disk, no home directory, a disk that allows no programs
        logger.warning("the CPU kernels cannot be kept and are compiled at each start: %s", error)
    try:
        with tempfile.TemporaryDirectory() as directory:  # what is loaded outlives its file
            return _built(compiler, Path(directory) / name)
    except OSError as error:
        raise NoCompiler(f"the kernels could not be built: {error}") from error


def _kept(compiler: str, target: Path) -> ctypes.CDLL:
    """Raises OSError, NoCompiler."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = target.parent.stat()
    if hasattr(os, "getuid") and (state.st_uid not in (0, os.getuid()) or state.st_mode & 0o022):
        raise PermissionError(f"{target.parent} can be written by others, who could put anything there")
    if target.exists():
        try:
            return ctypes.CDLL(str(target))
        except OSError as error:  # a disk that was full, a machine that went down
            logger.warning("%s is built again: %s", target, error)
    return _built(compiler, target)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NoCompiler("no C++ compiler was found (CXX, c++, g++, clang++)")


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "midstream"


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for file in sorted([*SOURCE.glob("*.h"), SOURCE / MAIN]):
        digest.update(file.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    for part in (version, " ".join(FLAGS).encode(), platform.machine().encode(), _processor()):
        digest.update(part)
    return digest.hexdigest()[:20]


def _processor() -> bytes:
    """What tells one processor's instruction set from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(
        sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))})
    )


def _built(compiler: str, target: Path) -> ctypes.CDLL:
    """Compile `target` and load it. Raises OSError, NoCompiler."""
    logger.info("compiling the CPU kernels, once on this machine: %s", target)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        built = Path(directory) / target.name
        command = [compiler, *FLAGS, str(SOURCE / MAIN), "-o", str(built)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise NoCompiler(f"the kernels could not be built: {error}") from error
        if done.returncode:
            raise NoCompiler(f"{compiler} failed: {done.stderr.strip()[-400:]}")
        built.replace(target)
    return ctypes.CDLL(str(target))
