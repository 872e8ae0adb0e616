"""The real renderers client, through which verifiers and prime-rl generate, against a running server."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from serving import Server

VENV = Path(__file__).parents[2] / ".venv-harness"
SCRIPT = Path(__file__).with_name("renderers_client.py")


def test_the_renderers_client_takes_the_answers(server: Server) -> None:
    if not (VENV / ".installed").exists():
        pytest.fail("the real renderers client is not installed in .venv-harness: run `make setup-harness`")
    routes = {"return_routed_experts": "raw", "routed_experts_prompt_start": 2}
    masks = {"top_p": 0.8, "return_sampling_mask": True}
    asked: list[dict[str, Any]] = [{"max_tokens": 8, "seed": 1, **more} for more in ({}, routes, masks)]
    model = server.state_dir / "models" / "tiny-moe"
    done = subprocess.run(
        [VENV / "bin" / "python", SCRIPT, server.url, server.model, str(model), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["max_prompt_len"] == 4096
    plain, routed, masked = said["answers"]
    body = {
        "prompt": plain["prompt_ids"],
        "max_tokens": 8,
        "seed": 1,
        "logprobs": 0,
        "return_token_ids": True,
    }
    (choice,) = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    for one in (plain, routed):
        assert one["completion_ids"] == choice["token_ids"]
        assert np.allclose(one["completion_logprobs"], choice["logprobs"]["token_logprobs"], atol=1e-5)
        assert one["finish_reason"] == choice["finish_reason"]
    told = routed["routed_experts"]
    rows = len(plain["prompt_ids"]) + len(plain["completion_ids"]) - 1 - 2
    assert (told["start"], told["shape"][0], told["dtype"]) == (2, rows, "uint8")
    assert len(base64.b64decode(told["data"])) == np.prod(told["shape"])
    assert plain["sampling_mask"] is None
    assert len(masked["sampling_mask"]) == len(masked["completion_ids"])
    for ids, token in zip(masked["sampling_mask"], masked["completion_ids"], strict=True):
        assert token in ids
        assert ids == sorted(set(ids))
