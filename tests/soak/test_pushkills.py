"""A few rounds of real pushes in which a process is killed or stopped, and nothing is found. Its own process ends with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = 8


@pytest.mark.variant
@pytest.mark.timeout(1800)
def test_nothing_is_wrong_when_processes_are_killed_and_stopped_amid_pushes() -> None:
    program = Path(__file__).with_name("pushkills.py")
    done = subprocess.run(
        [sys.executable, str(program), "--rounds", str(ROUNDS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert ": struck" in done.stdout
