"""What a session's trace must be, when a client kept its history: one path of exact turns, with true log-probabilities."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
from serving import Server


def exact_turns(server: Server, session: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The session's turns and the tokens of their one path; each log-probability is computed again."""
    [trace] = httpx.get(f"{server.url}/sessions/{session}/trace").json()["traces"]
    tokens: list[int] = []
    told: list[tuple[int, float]] = []
    for turn in trace["turns"]:
        assert (turn["parent"], turn.get("branch")) == (turn["turn"] - 1, None)
        assert turn["added"]
        tokens += turn["added"]
        told += enumerate(turn["logprobs"], len(tokens))
        tokens += turn["token_ids"]
    body = {"model": server.model, "prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 0}
    [scored] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"]
    logprobs = scored["logprobs"]["token_logprobs"]
    assert np.allclose([logprobs[at] for at, _ in told], [value for _, value in told], atol=1e-4)
    return trace["turns"], tokens
