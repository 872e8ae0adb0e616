"""How many minutes each tier of the tests takes: `make test-fast`, `make test`, and each share that CI may add (.ci/run).

    python benchmarks/tier_minutes.py [--runs test-fast test ...] [--write]

The environments are installed first and do not count. Each run is one `make`, of an idle machine. Reported per run: minutes by
the clock, CPU minutes of its processes that ended in order, CPU minutes of the whole machine meanwhile, and pytest's counts.
Prints JSON. --write: also to benchmarks/results/tiers.json, where runs that were not chosen keep their last row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from engine import machine_busy_s
from hardware import RESULTS, provenance, write_result

ROOT = Path(__file__).parents[1]
TIERS = ("test-fast", "test")
#: What the targets would install while they are measured.
ENVIRONMENTS = (
    *("setup", "setup-fireworks", "setup-harness", "setup-tinker", "SDKS=0.38 0.36 0.24"),
    *("setup-vllm", "setup-package", "setup-skyrl", ".venv-docs/.installed"),
)
#: The end of a pytest run, such as "=== 3 failed, 812 passed, 5 deselected in 84.02s (0:01:24) ===".
SUMMARY = re.compile(r"^=* ?((?:\d+ \w+, )*\d+ \w+) in [\d.]+s(?: \([\d:]+\))?(?: =+)?$", re.MULTILINE)
COUNT = re.compile(r"(\d+) (\w+)")
#: Pytest has these words with and without a plural.
SINGULAR = {"errors": "error", "warnings": "warning"}


def shares(ci: str) -> list[str]:
    """The words of each `make` of which CI runs one, as the script `ci` lists them."""
    listed = re.search(r"^shares=\((.*?)^\)", ci, flags=re.MULTILINE | re.DOTALL)
    assert listed is not None, "the script lists no shares"
    return re.findall(r'"(.+)"', listed[1])


def counts(log: str) -> dict[str, int]:
    """How many tests passed, were skipped and so on, of all pytest runs in the log together."""
    found = Counter[str]()
    for summary in SUMMARY.findall(log):
        for number, word in COUNT.findall(summary):
            found[SINGULAR.get(word, word)] += int(number)
    return dict(found)


def measured(run: str) -> dict[str, Any]:
    """One `make` with the words of `run`."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        began, busy = time.monotonic(), machine_busy_s()
        process = subprocess.Popen(["make", *run.split()], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        wall_s, machine_s = time.monotonic() - began, machine_busy_s() - busy
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        said = log.read()
    if process.returncode:
        print(said[-5000:], file=sys.stderr)
    return {
        "run": run,
        "exit": process.returncode,
        "wall_min": minutes(wall_s),
        "cpu_min": minutes(used.ru_utime + used.ru_stime),
        "machine_cpu_min": minutes(machine_s),
        "tests": counts(said),
    }


def minutes(seconds: float) -> float:
    return round(seconds / 60, 2)


def merged(older: list[dict[str, Any]], rows: list[dict[str, Any]], known: list[str]) -> list[dict[str, Any]]:
    """The newest row of each known run, in their order."""
    by_run = {row["run"]: row for row in (*older, *rows)}
    return [by_run[run] for run in known if run in by_run]


def main() -> int:
    known = [*TIERS, *shares((ROOT / ".ci" / "run").read_text())]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", default=known, choices=known)
    parser.add_argument("--write", action="store_true", help="also to benchmarks/results/tiers.json")
    options = parser.parse_args()
    subprocess.run(["make", *ENVIRONMENTS], cwd=ROOT, stdout=sys.stderr, check=True)
    path, older = RESULTS / "tiers.json", []
    if options.write and path.exists():
        older = json.loads(path.read_text())["rows"]
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for run in options.runs:
        about = provenance(processes=os.environ.get("TEST_PROCESSES", "2"))
        rows.append(measured(run) | {"at": about["at"], "commit": about["commit"]})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        result = {**about, "rows": merged(older, rows, known)}
        if options.write:
            write_result("tiers", result)
    print(json.dumps(result, indent=2))
    return 1 if any(row["exit"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
