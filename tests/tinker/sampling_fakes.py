"""A gateway that answers as it is told, and what Sampling needs around it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from listening import stop_listening
from training_fakes import FakePolicies

from midstream_tinker.adapters import SamplerAdapters
from midstream_tinker.completion import Completions
from midstream_tinker.futures import Futures
from midstream_tinker.sampling import Sampling
from midstream_tinker.store import SamplingSession, Store
from midstream_tinker.types import Served

TENANT = "tenant"
DEPLOYMENT = "accounts/acme/deployments/policy"
SERVED = Served(names=("accounts/acme/models/tiny", "Qwen/Qwen3-8B-Base"), directory="/models/tiny")


@dataclass
class Reply:
    """What the fake gateway does with one request. cut: break the connection instead."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False


@dataclass
class Asked:
    """One request as it came: headers by lower-case name."""

    headers: dict[str, str]
    body: dict[str, Any]


Answering = Callable[[Asked], "Awaitable[Reply]"]


class FakeGateway:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self.asked: list[Asked] = []
        self.open = 0
        # A client broke off while its request was being served.
        self.left = asyncio.Event()
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            asked = await _request(reader)
            self.asked.append(asked)
            answering = asyncio.ensure_future(self._answering(asked))
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                self.left.set()
                return
            gone.cancel()
            reply = answering.result()
            if not reply.cut:
                writer.write(_response(reply))
                await writer.drain()
        finally:
            self.open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def fake_gateway(answering: Answering) -> AsyncIterator[FakeGateway]:
    gateway = FakeGateway(answering)
    server = await asyncio.start_server(gateway._serve, "127.0.0.1", 0, backlog=1024)
    gateway.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield gateway
    finally:
        stop_listening(server)


async def _request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    assert head[0] == "POST /v1/completions HTTP/1.1"
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:]) if name}
    return Asked(headers, json.loads(await reader.readexactly(int(headers["content-length"]))))


def _response(reply: Reply) -> bytes:
    body = json.dumps(reply.body).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
    return f"HTTP/1.1 {reply.status} X\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body


def error(status: int, message: str, **more: Any) -> Reply:
    return Reply(status, {"error": {"message": message, "code": "x", "param": None}, **more})


def entry(
    token_id: int, logprob: float, sampling: float | None, top: list[tuple[int, float]] | None = None
) -> Any:
    return {
        "token": "x",
        "bytes": [120],
        "logprob": logprob,
        "sampling_logprob": sampling,
        "text_offset": 0,
        "token_id": token_id,
        "top_logprobs": [{"token": "x", "bytes": [120], "token_id": t, "logprob": p} for t, p in top or []],
    }


def completion(asked: Asked, *tokens: int, snapshot: str = "base") -> Reply:
    """As many choices as were asked for, each of `tokens`, with log-probabilities -1, -2, ..."""
    choice = {
        "text": "",
        "finish_reason": "length",
        "logprobs": {"content": [entry(t, -9.0, -1.0 - i) for i, t in enumerate(tokens)]},
        "snapshots": [{"snapshot": snapshot, "start": 0, "end": len(tokens)}],
    }
    body = {
        "choices": [{**choice, "index": index} for index in range(asked.body["n"])],
        "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
    }
    return Reply(200, body, {"X-Midstream-Replica": "replica-1", "x-midstream-route-reason": "prefix"})


@dataclass
class Front:
    sampling: Sampling
    futures: Futures
    store: Store
    session_id: str
    policies: FakePolicies

    def sampling_session(self, **weights: Any) -> SamplingSession:
        """A new one, of the base weights if nothing else is said."""
        given = {"base_model": SERVED.names[0], "policy": "exact", "snapshot": "base", **weights}
        seq = len(self.store.sampling_sessions(TENANT, self.session_id))
        return self.store.create_sampling_session(TENANT, self.session_id, seq, **given)


@contextlib.asynccontextmanager
async def front(
    gateway_url: str, directory: Path, served: Served = SERVED, **limits: Any
) -> AsyncIterator[Front]:
    """Sampling against a gateway, its pauses skipped (they only yield)."""

    async def no_pause(_: float) -> None:
        await asyncio.sleep(0)

    policies = FakePolicies()
    store, futures = Store(directory / "tinker.db"), Futures()
    completions = Completions(gateway_url, sleep=no_pause, **limits)
    sampling = Sampling(
        gateway_url=gateway_url,
        deployment=DEPLOYMENT,
        served=served,
        futures=futures,
        store=store,
        adapters=SamplerAdapters(policies, 2),
        completions=completions,
    )
    session = store.create_session(TENANT)
    try:
        yield Front(sampling, futures, store, session.id, policies)
    finally:
        await sampling.close()
        store.close()
