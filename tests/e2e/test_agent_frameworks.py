"""Agent frameworks as they are, with nothing but a base URL: their tool loops leave exact traces.

The model is untrained. Its calls are forced, and what it says is noise, which tokenizers cut otherwise than it was sampled.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from exact_traces import exact_turns
from serving import Server
from tiers import variant

VENV = Path(__file__).parents[2] / ".venv-harness"
SCRIPT = Path(__file__).with_name("agent_frameworks.py")


def run(framework: str, server: Server) -> dict[str, Any]:
    if not (VENV / ".installed").exists():
        pytest.fail("the agent frameworks are not installed in .venv-harness: run `make setup-harness`")
    done = subprocess.run(
        [VENV / "bin" / "python", SCRIPT, framework, f"{server.url}/sessions/{framework}/v1", "tiny-moe"],
        capture_output=True,
        text=True,
        timeout=300,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.variant
@pytest.mark.parametrize(
    "framework",
    ["openai-agents", *map(variant, ("openai-agents-responses", "pydantic-ai", "pydantic-ai-messages"))],
)
def test_a_frameworks_tool_loop_leaves_an_exact_trace(server: Server, framework: str) -> None:
    said = run(framework, server)
    assert said["looks"]
    turns, _ = exact_turns(server, framework)
    assert len(turns) >= len(said["said"]) >= 4
