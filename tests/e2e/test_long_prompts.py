"""No prompt takes a replica down or away from others: what is too long is refused, and nothing was started anew for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import serve

MOST = "this model's maximum context length is 4096 tokens, and "
LONG = {
    "21 MB of text": ("/v1/completions", {"prompt": "ab " * 7_000_000}, "prompt", "21000000 bytes of text"),
    "1 MB of text": ("/v1/completions", {"prompt": "ab " * 333_000}, "prompt", "999000 bytes of text"),
    "a million tokens": ("/v1/completions", {"prompt": [97] * 1_000_000}, "prompt", "1000000 tokens"),
    "100,000 messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi there"}] * 100_000},
        "messages",
        "100000 messages",
    ),
    "a long message": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "ab " * 7_000_000}]},
        "messages[0].content",
        "20999999 bytes of text",
    ),
}


@pytest.mark.variant
def test_what_cannot_fit_the_context_is_refused_and_every_process_goes_on(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[embedded]\nsilence_s_max = 5\n")
    with (
        serve(tmp_path / "state", "--config", str(config), "--no-tinker") as server,
        httpx.Client(timeout=60) as client,
    ):
        before = sorted(server.children())
        for path, fields, where, size in LONG.values():
            answer = client.post(server.url + path, json={"model": server.model, "max_tokens": 1, **fields})
            assert answer.status_code == 400, answer.text
            message = answer.json()["error"]["message"]
            assert message.startswith(f"{where}: {MOST}")
            assert size in message
        replicas: set[Any] = set()
        for _ in range(4):
            short = client.post(
                server.url + "/v1/completions", json={"model": server.model, "prompt": "hi", "max_tokens": 1}
            )
            assert short.status_code == 200
            replicas.add(short.headers["x-midstream-replica"])
        assert replicas == {"replica-0", "replica-1"}
        assert sorted(server.children()) == before
