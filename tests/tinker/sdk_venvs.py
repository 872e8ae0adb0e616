"""The venvs that hold the real SDKs, and scripts run in them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiers import variant

ROOT = Path(__file__).parents[2]
API_KEY = "tml-key-of-acme"
#: A base model that the servers of these tests know by this name.
ALIAS = "Qwen/Qwen3-8B-Base"
#: By version, newest first.
VENVS = {"0.38": ".venv-tinker", "0.36": ".venv-tinker36", "0.24": ".venv-tinker24"}
VERSIONS = tuple(VENVS)
#: As parameters: the older ones are variants.
SDKS = (VERSIONS[0], *map(variant, VERSIONS[1:]))
#: Of a test that takes a minute: what all versions say and read is shown by shorter ones.
NEWEST_AND_OLDEST = (VERSIONS[0], variant(VERSIONS[-1]))


def sdk_python(version: str) -> Path:
    venv = ROOT / VENVS[version]
    if not (venv / ".installed").exists():
        pytest.fail(f"tinker {version} is not installed in {venv.name}: run `make setup-tinker`")
    return venv / "bin" / "python"


def run_sdk(version: str, script: Path, told: dict[str, Any], timeout_s: float = 400) -> Any:
    """What a script prints as JSON, run by the Python that has the real SDK of that version."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER", "PYTHON", "HF_"))}
    done = subprocess.run(
        [sdk_python(version), "-W", "ignore", script],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**inherited, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    )
    assert done.returncode == 0, f"{script.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)
