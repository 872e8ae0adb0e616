"""A few rounds of tests/soak/vllmkills.py, in which nothing is found. Its own process ends with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "soak" / "vllmkills.py"


@pytest.mark.variant
def test_nothing_is_wrong_when_processes_are_killed_and_stopped_in_phases_of_a_swap(
    vllm_python: Path,
) -> None:
    """Of a swap by files and of a trainer's calls: stops that end in half of the phases, and one deadly strike each."""
    seeds = ["--seeds", "2:6,10:14,18:19,28:29"]
    done = subprocess.run([sys.executable, str(PROGRAM), *seeds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "'rounds': 10" in done.stdout
