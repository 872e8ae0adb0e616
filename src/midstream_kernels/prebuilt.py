"""Kernels that a wheel brings compiled: for which processors, with which flags, and whether this processor runs one of them.

Owns: the processor levels, the compiler's flags, and the manifest beside the libraries.
Always holds:
- A library is used only when it was compiled from exactly the source that is installed beside it, and is undamaged.
- Of the libraries that this processor can run, the first of `LEVELS` is used.
- `MIDSTREAM_KERNELS_LEVEL` names another level than the fastest one. It is used, or nothing is.
- This file imports the standard library alone: setup.py runs it by its path to compile a wheel's libraries.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: Of every library, wherever it is compiled. What decides its numbers is here; only -march is added.
#: -ffp-contract=fast, GCC's default, makes clang fuse the same products and sums.
FLAGS = ["-O3", "-std=c++17", "-pthread", "-fno-math-errno", "-ffp-contract=fast", "-fno-strict-aliasing"]
FLAGS += ["-shared", "-fPIC", "-w"]
#: The environment variable that names a level for tests and benchmarks, such as AVX2's on a processor with AVX-512.
ASKED = "MIDSTREAM_KERNELS_LEVEL"
MANIFEST = "manifest.json"
BUILD_TIMEOUT_S = 600.0

_V2 = "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"


@dataclass(frozen=True)
class Level:
    """machine: as platform.machine() says. needs: what the system's processor list has to show, separated by blanks."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: str


#: The fastest first. The kernels have code of their own for AVX-512 and for its bfloat16 products.
LEVELS = (
    Level("x86-64-v4-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), f"{_V4} avx512_bf16"),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("x86-64-v2", "x86_64", ("-march=x86-64-v2",), _V2),
    Level("armv8-a", "aarch64", ("-march=armv8-a",), "asimd fp"),
)


def source_digest(source: Path) -> str:
    """SHA-256 of the file `source` and the headers beside it."""
    digest = hashlib.sha256()
    for file in sorted([*source.parent.glob("*.h"), source]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def features() -> frozenset[str]:
    """The instruction sets of this processor, by the names of /proc/cpuinfo. Empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    sets = [
        frozenset(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))
    ]
    return frozenset.intersection(*sets) if sets else frozenset()


def choose(available: Collection[str], machine: str, features: frozenset[str]) -> str | None:
    """The name of the fastest level in `available` for a processor that has these features; None when none fits."""
    fitting = (level for level in LEVELS if level.machine == machine and level.name in available)
    return next((level.name for level in fitting if features.issuperset(level.needs.split())), None)


def asked() -> Level | None:
    """The level that the environment asks for. Raises ValueError when there is no such level or the processor lacks it."""
    name = os.environ.get(ASKED)
    if not name:
        return None
    names = [level.name for level in LEVELS if level.machine == platform.machine()]
    if name not in names:
        raise ValueError(f"{ASKED}={name}: the levels of this machine are {', '.join(names)}")
    if choose([name], platform.machine(), features()) is None:
        raise ValueError(f"{ASKED}={name}: this processor lacks its instructions")
    return next(level for level in LEVELS if level.name == name)


def load(source: Path, directory: Path) -> ctypes.CDLL | None:
    """The library in `directory` for `source` and this processor; None when there is none that can be used.

    Raises ValueError as `asked`.
    """
    level = asked()
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", directory / MANIFEST, error)
        return None
    if manifest["source"] != source_digest(source):
        logger.warning("%s was changed after its libraries were compiled, so they are not used", source)
        return None
    available = [name for name in manifest["libraries"] if level is None or name == level.name]
    name = choose(available, platform.machine(), features())
    if name is None:
        logger.info("none of the compiled kernels fits this processor: %s", ", ".join(manifest["libraries"]))
        return None
    file = directory / f"{source.stem}-{name}.so"
    try:
        if hashlib.sha256(file.read_bytes()).hexdigest() != manifest["libraries"][name]:
            raise OSError("its bytes are not those of the release")
        library = ctypes.CDLL(str(file))
    except OSError as error:
        logger.warning("%s cannot be used: %s", file, error)
        return None
    logger.info("kernels: %s, compiled with this release by %s", name, manifest["compiler"])
    return library


def compile_all(source: Path, directory: Path, machine: str, compiler: str) -> None:
    """Compile every level of `machine` into `directory`, with the manifest. Raises OSError, subprocess.SubprocessError."""
    directory.mkdir(parents=True, exist_ok=True)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    libraries = {}
    for level in _levels_of(machine):
        file = directory / f"{source.stem}-{level.name}.so"
        command = [compiler, *FLAGS, *level.flags, "-s", str(source), "-o", str(file)]
        subprocess.run(command, check=True, timeout=BUILD_TIMEOUT_S)
        libraries[level.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest: dict[str, Any] = {
        "source": source_digest(source),
        "compiler": version.splitlines()[0],
        "flags": FLAGS,
        "libraries": libraries,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _levels_of(machine: str) -> Iterable[Level]:
    levels = [level for level in LEVELS if level.machine == machine]
    if not levels:
        known = ", ".join(sorted({level.machine for level in LEVELS}))
        raise ValueError(f"{machine!r}: the kernels are compiled for {known}")
    return levels
