"""Runs a recipe of examples/ in the environment that has its trainer, against a real server, and reads what it prints.

Every recipe takes URL BUCKET BASE STEPS and prints a line per step: `step 3: reward 0.412, 0.88 snapshots behind`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from serving import Server

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"step (\d+): reward (\S+), (\S+) snapshots behind")
#: Settings of trainers and hubs that this machine's user may have.
FOREIGN = ("TINKER", "PYTHON", "HF_", "WANDB", "RAY_", "OPENAI", "ART_", "VLLM")


@dataclass(frozen=True)
class Step:
    number: int
    reward: float
    behind: float


def needs(name: str) -> pytest.MarkDecorator:
    """A test of the recipe is skipped where its environment is not installed (conftest.py)."""
    return pytest.mark.recipe(name)


def installed(name: str) -> bool:
    return (ROOT / ".venv-recipes" / name / ".installed").exists()


def run_recipe(
    name: str,
    server: Server,
    steps: int,
    *more: str,
    launcher: Sequence[str] = ("python",),
    timeout_s: float = 500,
) -> list[Step]:
    """The steps that `examples/NAME/train.py` printed on tiny-moe, in their order.

    more: arguments behind them. launcher: a program of the environment, with its options.
    """
    printed = printed_by(name, server, steps, *more, launcher=launcher, timeout_s=timeout_s)
    return steps_in(printed, steps)


def steps_in(printed: str, steps: int) -> list[Step]:
    found = [LINE.fullmatch(line.strip()) for line in printed.splitlines()]
    taken = [Step(int(line[1]), float(line[2]), float(line[3])) for line in found if line]
    assert [step.number for step in taken] == list(range(1, steps + 1)), printed[-4000:]
    return taken


def printed_by(
    name: str,
    server: Server,
    steps: int,
    *more: str,
    script: str = "train.py",
    launcher: Sequence[str] = ("python",),
    timeout_s: float = 500,
) -> str:
    """What `examples/NAME/SCRIPT` wrote to its standard output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    program, *options = launcher
    done = subprocess.run(
        [
            *(ROOT / ".venv-recipes" / name / "bin" / program, *options),
            ROOT / "examples" / name / script,
            *(server.url, server.bucket, server.state_dir / "models" / "tiny-moe", str(steps), *more),
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**kept, **offline},
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done.stdout
