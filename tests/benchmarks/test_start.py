"""`make first-token` starts a server, and its parts add up."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.variant

ROOT = Path(__file__).parents[2]
SAID = re.compile(
    r"first token ([\d.]+) s after the command: installed in ([\d.]+) s, "
    r"ready ([\d.]+) s after that, a token (\d+) ms later\n"
)


def test_the_first_token_is_measured_from_the_command_on() -> None:
    begun = time.time() - 100
    command = [sys.executable, str(ROOT / "benchmarks" / "start.py"), "--since", str(begun)]
    said = SAID.fullmatch(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert said is not None
    whole_s, installed_s, ready_s, token_ms = (float(one) for one in said.groups())
    assert 100 <= installed_s < whole_s <= time.time() - begun
    assert abs(whole_s - installed_s - ready_s - token_ms / 1000) < 0.2
    assert token_ms > 0
