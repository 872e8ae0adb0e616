"""What a result must say about where it came from."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


@contextlib.contextmanager
def without_autogroups() -> Iterator[None]:
    """Within: processes share the cores, whatever session each is of; where this may not be set, as before.

    With autogroups, processes of the root control group are first weighed by session, and one of a session of its own was
    seen to wait seconds for a core beside vLLM's. What runs in a container or under systemd has no autogroup.
    """
    before = AUTOGROUPS.read_text() if AUTOGROUPS.exists() else ""
    try:
        if before:
            # Not root, or /proc/sys is read-only.
            with contextlib.suppress(OSError):
                AUTOGROUPS.write_text("0")
        yield
    finally:
        if before:
            # Not root, or /proc/sys is read-only.
            with contextlib.suppress(OSError):
                AUTOGROUPS.write_text(before)


def autogroups() -> bool:
    """Whether the kernel weighs sessions before processes."""
    return AUTOGROUPS.exists() and AUTOGROUPS.read_text().strip() != "0"


def provenance(**configuration: Any) -> dict[str, Any]:
    """Hardware, commit, versions and configuration of a run."""
    about = _cpuinfo()
    cpu = about.get("model name", platform.processor())
    # Not what benchmarks write.
    code = [
        ":/",
        ":(exclude,top)benchmarks/results",
        ":(exclude,top)docs/benchmarks.md",
    ]
    commit, dirty = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", *code)
    versions = {}
    for package in ("midstream", "torch", "transformers", "uvloop", "httptools", "openai"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "vectors": vectors(about.get("flags", "")),
            "system": platform.platform(),
        },
        "commit": (commit or "unknown") + ("+uncommitted" if dirty else ""),
        "versions": {"python": platform.python_version(), **versions},
        "configuration": configuration,
    }


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor."""
    first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def vectors(flags: str) -> str:
    """The widest vector instructions that the engine's kernels or PyTorch use. flags: as in /proc/cpuinfo."""
    has = flags.split()
    return next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in has), "")


def _git(*words: str) -> str:
    """What git says; nothing where there is no git, or no repository."""
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def commit_of(checkout: Path | None) -> str:
    """The commit that is checked out there."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def source_of(checkout: Path | None) -> dict[str, str]:
    """Environment of a process that runs that checkout's source instead of this one's, in the same Python environment."""
    assert checkout is not None
    return {"PYTHONPATH": str(checkout / "src")}


def write_result(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
