"""A streamed completion that is read to its end in a thread: its tokens, and the label of each."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
from serving import Server


class Stream(threading.Thread):
    """One streamed completion: its ids, the label of each, and how it ended."""

    def __init__(self, server: Server, seed: int, max_tokens: int, request_id: str = "") -> None:
        super().__init__()
        self.started = threading.Event()
        self.ids: list[int] = []
        self.labels: list[str] = []
        self.finish: str | None = None
        self.status = 0
        self.replica = ""
        self.usage = 0
        self._url = f"{server.url}/v1/completions"
        self._body = completion(server, seed, max_tokens) | {
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._headers = {"x-request-id": request_id} if request_id else {}

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=self._body, headers=self._headers, timeout=300
            ) as answer:
                self.status, self.replica = answer.status_code, answer.headers.get("x-midstream-replica", "")
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[6:]))
        finally:
            self.started.set()

    def _take(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            new = choice.get("token_ids") or []
            self.ids += new
            self.labels += [chunk["model"].partition("@")[2]] * len(new)
            self.finish = choice["finish_reason"] or self.finish
            if new:
                self.started.set()
        self.usage = (chunk.get("usage") or {}).get("completion_tokens", self.usage)


def completion(server: Server, seed: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a request that ends with its last token, and no sooner."""
    prompt = list(f"Rollout {seed} goes".encode())
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "seed": seed}
    return body | {"ignore_eos": True, "return_token_ids": True} | fields
