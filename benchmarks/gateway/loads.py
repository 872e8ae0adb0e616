"""The requests that every router gets, byte for byte the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What the OpenAI SDK sends, with the session's key in the headers that the routers look into.
HEAD = (
    "POST {path} HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n"
    "Accept: application/json\r\nContent-Type: application/json\r\nUser-Agent: OpenAI/Python 3.52.0\r\n"
    "X-Stainless-Lang: python\r\nX-Stainless-Package-Version: 3.52.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\n"
    "X-Stainless-Runtime: CPython\r\nAuthorization: Bearer none\r\nx-stainless-retry-count: 0\r\n"
    "X-Session-ID: trajectory-KKKKKKKK\r\nX-SMG-Routing-Key: trajectory-KKKKKKKK\r\nContent-Length: {length}\r\n\r\n"
)
IDS = 16 * 1024
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class LoadShape:
    """mode: as in load.c, and `rate` for a fixed one. counter: what of the mocks is divided by. opening_s: how much longer
    a stream is made for the time in which all are opened."""

    name: str
    body: str
    connections: int
    mode: str
    counter: str
    interval_s: float = 0.0
    rate: float = 0.0
    opening_s: float = 0.0


SHAPES = (
    LoadShape("1 KB", "1k", 64, "seconds", "requests"),
    LoadShape("64 KB", "64k", 64, "seconds", "requests"),
    LoadShape("16k ids", "ids", 64, "seconds", "requests"),
    LoadShape("paced", "stream", 256, "hold", "chunks", interval_s=0.02),
    LoadShape("burst", "stream", 64, "seconds", "chunks"),
    LoadShape("latency", "1k", 64, "seconds", "requests", rate=1000.0),
)
BURST_CHUNKS = 500


def _chat(size: int, **more: Any) -> bytes:
    """A chat request of `size` bytes."""

    def body(text: str) -> bytes:
        messages = [
            {"role": "system", "content": "You solve the task step by step."},
            {"role": "user", "content": text},
        ]
        fields = {"model": "m", "messages": messages, "max_tokens": 128, "temperature": 1.0, **more}
        return json.dumps(fields, separators=(",", ":")).encode()

    missing = size - len(body(""))
    return body(("token " * (missing // 6 + 1))[:missing])


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body of each request."""
    ids = [i * 7919 % 150_000 for i in range(IDS)]
    completion = {"model": "m", "prompt": ids, "max_tokens": 128, "temperature": 1.0}
    return {
        "1k": (CHAT, _chat(1024)),
        "64k": (CHAT, _chat(64 * 1024)),
        "ids": (COMPLETION, json.dumps(completion, separators=(",", ":")).encode()),
        "stream": (CHAT, _chat(1024, stream=True)),
    }


def write(folder: Path) -> dict[str, Path]:
    """The whole requests as files, by name."""
    files = {}
    for name, (path, body) in bodies().items():
        files[name] = folder / f"{name}.request"
        files[name].write_bytes(HEAD.format(path=path, length=len(body)).encode() + body)
    return files
