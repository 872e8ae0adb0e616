"""What large bodies took of a server's memory is given back, whether they were served, refused or left unfinished."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serving import Server, serve, words_of

MB = 2**20
#: What the bodies below take while they are read is more than four times as much.
KEPT_MAX_MB = 40.0
DEADLINE_S = 120.0
CONTEXT = 65_536


def rss_mb(server: Server) -> dict[str, float]:
    """Of the gateway and of the replica."""
    found = {}
    for pid in server.children():
        words = words_of(pid)
        for role in ("gateway", "replica"):
            if f"midstream.launch.{role}" in words:
                size = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
                assert size is not None
                found[role] = int(size[1]) / 1024
    return found


def given_back(server: Server, before: dict[str, float]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        now = rss_mb(server)
        if all(mb <= before[role] + KEPT_MAX_MB for role, mb in now.items()):
            return
        assert time.monotonic() < deadline, f"MB before {before}, and now {now}"
        time.sleep(0.1)


@pytest.mark.variant
def test_what_large_bodies_took_is_given_back(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model(layers=1, hidden=64, experts=2, max_positions=CONTEXT))
    options = ("--model", model, "--replicas", "1", "--no-tinker")
    with (
        serve(tmp_path / "state", *options) as server,
        httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http,
    ):

        def ask(path: str, **fields: Any) -> int:
            return http.post(path, json={"model": server.model, "max_tokens": 1, **fields}).status_code

        assert ask("/v1/completions", prompt="x") == 200
        before = rss_mb(server)
        for _ in range(3):
            assert ask("/v1/completions", prompt=["abc de " * 14_000] * 300) == 400
        given_back(server, before)
        messages = [{"role": "user", "content": "x"}] * 30_000
        for _ in range(3):
            assert ask("/v1/chat/completions", messages=messages) == 400
        given_back(server, before)
        assert ask("/v1/completions", prompt="x", metadata={"note": "y" * 40 * MB}) == 200
        given_back(server, before)
        begun = [begin(server, MB) for _ in range(300)]
        for unfinished in begun:
            unfinished.close()
        given_back(server, before)


def begin(server: Server, size: int) -> socket.socket:
    """A request of whose body so much has been sent, and the rest never will be."""
    made = socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 80))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {2 * size}\r\n\r\n"
    body = json.dumps({"prompt": "z" * size}).encode()
    made.sendall(head.encode() + body)
    return made
