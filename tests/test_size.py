"""How large the house is: lines by package, names that mean several things, files and calls of a request, minutes of tests.

Each number is a bound. Lower it when there is less. A change that needs more raises it here, and says why in docs/decisions/.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from source import PACKAGES, modules, nodes

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

LINES_MAX = {
    "api": 6600,
    "apidocs": 5,
    "client": 5930,
    "commands": 3370,
    "core": 5770,
    "dashboard": 5,
    "engine": 19415,
    "fleet": 6675,
    "http": 2855,
    "integrations": 1235,
    "launch": 4240,
    "ledger": 3580,
    "midstream": 155,
    "midstream_kernels": 1935,
    "midstream_tinker": 7435,
    "models": 255,
    "proxy": 4620,
    "replica": 21050,
    "snapshots": 6905,
    "transfer": 1165,
    "verify": 4730,
}
#: Class names that stand in more than one module. A name that begins with an underscore is its module's own.
NAMES_TWICE_MAX = 0
#: `make walk` measures them (benchmarks/walk.py).
FILES_MAX = {"chat": 72, "tinker sample": 99, "hot load": 120}
#: Calls of midstream's Python functions in a gateway per request, as `make calls` counts them, and two for
#: what the event loop does beside requests.
CALLS_MAX = {"turn": 52, "turn, session in a header": 47, "without a session": 50, "streamed chat": 94}
#: The same per chunk of a stream. Of a burst, a read has 8 chunks.
CHUNK_CALLS_MAX = {"paced": 2.2, "burst": 0.5}
#: Likewise in a replica, per token of a stream with log-probabilities.
TOKEN_CALLS_MAX = {
    "embedded, 1 stream": 16,
    "embedded, 16 streams": 9,
    "vllm, 1 stream": 22,
    "vllm, 16 streams": 17,
}
#: Calls of Python functions in an engine per step of decoding (benchmarks/engine_calls.py).
STEP_CALLS_MAX = {"1 stream": 59, "16 streams": 143}
#: Of two quiet cores, as `make bench-tiers` measured them (benchmarks/results/tiers.json). "share": of the longest part of CI.
MINUTES_MAX = {"test-fast": 4.1, "test": 15.7, "share": 14.5}


def package_of(module: Path) -> str:
    """A package inside midstream, or the building beside it."""
    package, *inside = module.relative_to(PACKAGES[0].parent).parts
    return inside[0] if package == "midstream" and len(inside) > 1 else package


def test_no_package_has_more_lines_than_it_may() -> None:
    lines = Counter[str]()
    for module in modules():
        lines[package_of(module)] += len(module.read_text().splitlines())
    assert lines.keys() == LINES_MAX.keys()
    more = {name: count for name, count in lines.items() if count > LINES_MAX[name]}
    assert more == {}, "raise the bound in the open, or write less"


def test_no_more_names_mean_several_things() -> None:
    counts = Counter[str]()
    for module in modules():
        names = {node.name for node in nodes(module) if isinstance(node, ast.ClassDef)}
        counts.update(name for name in names if not name.startswith("_"))
    twice = sorted(name for name, count in counts.items() if count > 1)
    assert len(twice) <= NAMES_TWICE_MAX, twice


def test_no_two_modules_of_the_tests_have_one_name() -> None:
    """pytest collects neither of two then, and the whole run ends. An import finds the one that comes first."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    repeated = {name for name, count in names.items() if count > 1}
    assert repeated <= {"conftest.py", "__init__.py"}


def test_a_request_passes_no_more_files_than_it_may() -> None:
    walks = json.loads((RESULTS / "walk.json").read_text())["walks"]
    assert {name: walk["files"] for name, walk in walks.items() if walk["files"] > FILES_MAX[name]} == {}
    assert walks.keys() == FILES_MAX.keys()


def calls_of(script: str) -> dict[str, Any]:
    """The counts do not depend on the machine."""
    command = [sys.executable, str(RESULTS.parent / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(counted: dict[str, Any], most: dict[str, float]) -> None:
    counts = {name: calls["of midstream"] for name, calls in counted.items()}
    assert counts.keys() == most.keys()
    assert {name: count for name, count in counts.items() if count > most[name]} == {}


def test_a_gateway_calls_no_more_functions_per_request_or_chunk_than_it_may() -> None:
    found = calls_of("calls.py")
    check(found["per request"], CALLS_MAX)
    check(found["per chunk"], CHUNK_CALLS_MAX)


def test_a_replica_calls_no_more_functions_per_token_than_it_may() -> None:
    check(calls_of("replica_calls.py")["per token"], TOKEN_CALLS_MAX)


def test_an_engine_calls_no_more_functions_per_step_than_it_may() -> None:
    check(calls_of("engine_calls.py")["per step"], STEP_CALLS_MAX)


def test_no_tier_takes_more_minutes_than_it_may() -> None:
    minutes = {
        row["run"]: row["wall_min"] for row in json.loads((RESULTS / "tiers.json").read_text())["rows"]
    }
    most = {run: MINUTES_MAX.get(run, MINUTES_MAX["share"]) for run in minutes}
    assert {run: taken for run, taken in minutes.items() if taken > most[run]} == {}
