"""Minutes of tiers: what CI's shares are, and what pytest says at its end."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hardware import RESULTS
from tier_minutes import ENVIRONMENTS, TIERS, counts, merged, shares

ROOT = Path(__file__).parents[2]

LOG = """\
tests/engine/test_blocks.py::test_books_in_3s PASSED
=================== short test summary info ===================
FAILED tests/a.py::test_one - AssertionError: 5 passed in the morning
= 1 failed, 812 passed, 30 skipped, 5 deselected, 2 warnings in 1234.56s (0:20:34) =
make[1]: Leaving directory
"""


def test_the_shares_of_ci_are_read_from_its_script() -> None:
    found = shares((ROOT / ".ci" / "run").read_text())
    assert len(found) == len(set(found)) == 6
    assert found[0].split()[0] == "test-vllm"
    assert all(word.startswith(("test-", "SHARE=")) for share in found for word in share.split())
    with pytest.raises(AssertionError, match="no shares"):
        shares("make test\n")


def test_what_was_measured_are_tiers_and_shares_that_there_are() -> None:
    """tests/test_size.py holds the minutes."""
    measured = [row["run"] for row in json.loads((RESULTS / "tiers.json").read_text())["rows"]]
    known = [*TIERS, *shares((ROOT / ".ci" / "run").read_text())]
    assert [run for run in known if run in measured] == measured
    assert measured[: len(TIERS)] == list(TIERS)


def test_no_environment_is_installed_while_a_run_is_measured() -> None:
    def installed(*words: str) -> set[str]:
        # As on a fresh machine.
        planned = ["make", "-n", "-B", *words]
        done = subprocess.run(planned, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        return set(re.findall(r"-m venv (\S+)", done.stdout))

    runs = (*TIERS, *shares((ROOT / ".ci" / "run").read_text()))
    needed = set[str]().union(*(installed(*run.split()) for run in runs))
    assert needed - installed(*ENVIRONMENTS) == set()
    assert ".venv-vllm" in needed


def test_the_counts_are_those_of_pytests_last_line() -> None:
    assert counts(LOG) == {"failed": 1, "passed": 812, "skipped": 30, "deselected": 5, "warning": 2}


def test_the_counts_of_several_pytest_runs_are_added_up() -> None:
    quiet = "7 passed, 1 warning in 0.52s\n"
    assert counts(LOG + quiet + "1 error in 59.99s\n") == {
        "failed": 1,
        "passed": 819,
        "skipped": 30,
        "deselected": 5,
        "warning": 3,
        "error": 1,
    }
    assert counts("make: *** [Makefile:183: test-fast] Error 2\n") == {}


def test_runs_that_were_not_measured_keep_their_last_row() -> None:
    def row(run: str, wall_min: float) -> dict[str, Any]:
        return {"run": run, "wall_min": wall_min}

    known = [*TIERS, "test-vllm"]
    older = [row("test-vllm", 5.0), row("test", 20.0), row("test-of-old", 9.0)]
    assert merged(older, [row("test", 19.0), row("test-fast", 3.0)], known) == [
        row("test-fast", 3.0),
        row("test", 19.0),
        row("test-vllm", 5.0),
    ]
