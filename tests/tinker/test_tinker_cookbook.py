"""tinker-cookbook's own RL loop against a running server, as examples/tinker_cookbook shows it. Run by `make test-cookbook`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from sdk_venvs import ROOT
from serving import serve

VENV = ROOT / ".venv-cookbook"


@pytest.mark.timeout(600)
@pytest.mark.skipif(not (VENV / ".installed").exists(), reason="run `make test-cookbook`")
def test_the_cookbooks_loop_learns(tmp_path: Path) -> None:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("TINKER", "PYTHON", "HF_"))
    }
    with serve(tmp_path / "state") as server:
        done = subprocess.run(
            [
                VENV / "bin" / "python",
                ROOT / "examples" / "tinker_cookbook" / "train.py",
                *("--url", server.url, "--tokenizer", tmp_path / "state" / "models" / "tiny-moe"),
                *("--steps", "9", "--log-path", tmp_path / "run"),
            ],
            capture_output=True,
            text=True,
            timeout=400,
            env={**inherited, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        ledger = server.log.read_text()
    line = done.stdout.splitlines()[-1]
    assert line.startswith("reward by step: "), line
    rewards = [float(reward) for reward in line.removeprefix("reward by step: ").split()]
    assert len(rewards) == 9
    assert max(rewards[:2]) < 0.2 < 0.5 < rewards[-1], rewards
    assert ledger.count("[sticky-routing] dispatch") == 9 * 64
