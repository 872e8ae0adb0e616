"""What a result must say about where it came from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def provenance(**configuration: Any) -> dict[str, Any]:
    """Hardware, commit, versions and configuration of a run."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    code = [
        ":/",
        ":(exclude,top)benchmarks/results",
        ":(exclude,top)docs/benchmarks.md",
    ]  # not what benchmarks write
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--", *code], capture_output=True, text=True, check=False
    )
    versions = {}
    for package in ("midstream", "torch", "transformers", "uvloop", "httptools", "openai"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()},
        "commit": commit.stdout.strip() + ("+uncommitted" if dirty.stdout.strip() else ""),
        "versions": {"python": platform.python_version(), **versions},
        "configuration": configuration,
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path
