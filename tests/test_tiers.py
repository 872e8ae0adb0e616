"""What each tier runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def collected(tier: str, folder: str) -> set[str]:
    """The files of which the tier runs a test."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--tier={tier}",
        folder,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return {Path(line.partition("::")[0]).name for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.slow
def test_a_trainer_of_others_runs_in_no_tier_but_all() -> None:
    """Whatever is installed: a recipe takes minutes."""
    fast, everything = (collected(tier, "tests/recipes") for tier in ("fast", "all"))
    assert {"test_trl.py", "test_art.py"} <= everything
    assert not {"test_trl.py", "test_art.py"} & fast
    # What needs no trainer runs at once.
    assert "test_trl_server.py" in fast
