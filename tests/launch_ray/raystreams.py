"""Streams through a server on a Ray cluster, and what happens under them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from raycluster import RayServer

TOKENS = 2000
STREAMS = 16
# Events of every stream that have come when something happens.
UNDER_WAY = 8


@dataclass
class Stream:
    number: int
    sessions: str
    replica: str = ""
    text: str = ""
    tokens: int = 0
    events: int = 0
    resumed: bool = False
    error: Any = None
    complete: bool = False

    async def run(self, http: httpx.AsyncClient, moved: Callable[[], None]) -> None:
        body = {"model": "tiny-moe", "prompt": "Once", "stream": True, "seed": self.number}
        body |= {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        headers = {"x-session-id": f"{self.sessions} {self.number}"}
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            self.replica = answer.headers["x-midstream-replica"]
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    self.complete = True
                elif line.startswith("data: "):
                    self._take(json.loads(line.removeprefix("data: ")))
                moved()

    def _take(self, event: dict[str, Any]) -> None:
        self.events += 1
        self.resumed |= "resumed" in event.get("midstream", {})
        self.error = event.get("error", self.error)
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.tokens += len(choice.get("token_ids") or ())


async def streamed(
    server: RayServer,
    happen: Callable[[list[Stream]], None] | None = None,
    sessions: str = "stream",
    gateway: int = 0,
) -> list[Stream]:
    """Streams at once; `happen` while all of them run. sessions: what their names begin with."""
    streams = [Stream(number, sessions) for number in range(STREAMS)]
    under_way = asyncio.Event()

    def moved() -> None:
        if all(stream.events >= UNDER_WAY or stream.complete for stream in streams):
            under_way.set()

    async with httpx.AsyncClient(base_url=server.urls[gateway], timeout=300.0, trust_env=False) as http:
        running = asyncio.gather(*(stream.run(http, moved) for stream in streams))
        if happen is not None:
            await asyncio.wait(
                (running, asyncio.create_task(under_way.wait())), return_when="FIRST_COMPLETED"
            )
            assert not any(stream.complete for stream in streams), "all were to be under way"
            await asyncio.to_thread(happen, streams)
        await running
    return streams


def ask(server: RayServer, session: str, gateway: int = 0) -> httpx.Response:
    url = f"{server.urls[gateway]}/v1/completions"
    body = {"model": "tiny-moe", "prompt": "abc", "max_tokens": 4}
    answer = server.http.post(url, json=body, headers={"x-session-id": session})
    return answer.raise_for_status()
