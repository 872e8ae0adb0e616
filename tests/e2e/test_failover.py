"""Replicas that are killed, stopped or lose their engine under streams: every client gets what it would have got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from serving import Server, descendants, serve, words_of

STREAMS = 32
TOKENS = 300
FEW = 8
AGENTS = 64
#: Of a replica whose engine is killed under them.
IN_FLIGHT = 8
# Tokens of few streams: they are faster.
LONG = 1000
ATTEMPTS = 4
NAMES = ("replica-0", "replica-1", "replica-2")
# Chunks of every stream that have come when something happens.
UNDER_WAY = 12
# Of a busy machine.
DEADLINE_S = 400.0
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "parameters": {"type": "object", "properties": {"to": {"enum": ["a", "b"]}}},
        },
    }
]
WORDS = {"type": "array", "items": {"enum": ["x", "yy"]}, "minItems": 99}
SCHEMA = {"name": "w", "schema": {"type": "object", "properties": {"words": WORDS}, "required": ["words"]}}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("failover") / "state", "--replicas", "3", "--no-tinker") as running:
        yield running


def bodies(model: str, count: int = STREAMS) -> list[tuple[str, dict[str, Any]]]:
    """A request of every kind, again and again with another seed."""
    completions, chat = "/v1/completions", "/v1/chat/completions"
    messages = [{"role": "user", "content": "Which way?"}]
    scored = {"logprobs": True, "include_routing_matrix": True, "return_token_ids": True}
    masked = {"logprobs": True, "return_sampling_mask": True}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (completions, {"prompt": "Once upon a time", **scored}),
        (completions, {"prompt": ["abc", "de"], "n": 2, "top_k": 9, "echo": True, **scored, **masked, "top_logprobs": 2}),
        (chat, {"messages": messages, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, **masked}),
        (completions, {"prompt": "Stop", "stop": ["zq", "qz"], "presence_penalty": 0.4, "perf_metrics_in_response": True}),
        (chat, {"messages": messages, "tools": TOOLS, "tool_choice": "required", **scored, **masked}),
        (chat, {"messages": messages, "response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
        (chat, {"messages": messages, "stream_options": {"include_usage": True}, "n": 2}),
        (completions, {"prompt": list(range(65, 97)), "min_p": 0.01, "raw_output": True, "echo_last": 4}),
    ]  # fmt: skip
    tokens = TOKENS if count > FEW else LONG
    found = []
    for number in range(count):
        path, body = kinds[number % len(kinds)]
        free = "tools" not in body and "response_format" not in body
        fixed = {"model": model, "stream": True, "seed": number, "max_tokens": tokens, "ignore_eos": free}
        found.append((path, {**fixed, **body}))
    return found


@dataclass
class Stream:
    path: str
    body: dict[str, Any]
    replica: str = ""
    events: list[Any] = field(default_factory=list)
    text: str = ""
    resumed: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    async def run(self, http: httpx.AsyncClient, moved: Callable[[], None] = lambda: None) -> None:
        headers = {"x-session-id": f"stream {self.body.get('seed')}"}
        async with http.stream("POST", self.path, json=self.body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            self.replica = answer.headers["x-midstream-replica"]
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    self.complete = True
                elif line.startswith("data: "):
                    self._take(json.loads(line.removeprefix("data: ")))
                    moved()

    def _take(self, event: Any) -> None:
        """As comparable: less what is random, or a time, or about caches."""
        assert not self.complete
        assert "error" not in event, event
        # Equal prompts of one session are branches of it, and say so, too.
        if seam := event.pop("midstream", {}).get("resumed"):
            self.resumed.append(seam)
        for name in ("id", "created", "perf_metrics"):
            event.pop(name, None)
        if "usage" in event:
            del event["usage"]["prompt_tokens_details"]
        for choice in event["choices"]:
            for call in choice.get("delta", {}).get("tool_calls", ()):
                del call["id"]
        self.events.append(event)

    def by_choice(self) -> dict[int, list[Any]]:
        """Choices of several prompts overtake each other, so which one ends last, and tells the usage, may differ."""
        found: dict[int, list[Any]] = {}
        usage = [event.pop("usage") for event in self.events if "usage" in event]
        for event in self.events:
            for choice in event["choices"]:
                found.setdefault(choice["index"], []).append(event)
        return {**found, -1: usage}


async def whole(http: httpx.AsyncClient, model: str, count: int = STREAMS) -> list[dict[int, list[Any]]]:
    """What undisturbed streams say."""
    streams = [Stream(*body) for body in bodies(model, count)]
    await asyncio.gather(*(stream.run(http) for stream in streams))
    assert all(stream.complete for stream in streams)
    assert not any(stream.resumed for stream in streams)
    return [stream.by_choice() for stream in streams]


def itself(replica: int) -> int:
    return replica


def engine(replica: int) -> int:
    """Its other child, once there was a grammar to compile, is not the engine."""
    (found,) = (pid for pid in descendants(replica) if "midstream.engine.embedded.loop" in words_of(pid))
    return found


async def disturbed(
    http: httpx.AsyncClient,
    server: Server,
    happen: Callable[[int], None],
    count: int = STREAMS,
    find: Callable[[int], int] = itself,
    end: Callable[[], None] = lambda: None,
) -> tuple[list[Stream], str]:
    """The same streams, and the replica to which something happened once all were under way.

    happen: is given what find made of the replica's pid before there were streams, which go on while one looks.
    end: of what happened. It happens again while it came too late for every stream: on a busy machine a replica may have said
    all by the time that this process has read a little of it.
    """
    for _ in range(ATTEMPTS):
        pids = await processes(server, find)
        streams = [Stream(*body) for body in bodies(server.model, count)]
        lost = await disturbed_once(http, streams, lambda name: happen(pids[name]))  # noqa: B023
        end()
        if any(stream.resumed for stream in streams):
            break
        await until_all_serve(http)
    return streams, lost


async def disturbed_once(
    http: httpx.AsyncClient, streams: list[Stream], happen: Callable[[str], None]
) -> str:
    """The replica to which it happened, if it did before the last stream ended."""
    under_way = asyncio.Event()

    def moved() -> None:
        if all(stream.complete or len(stream.events) >= UNDER_WAY for stream in streams):
            under_way.set()

    whole = asyncio.gather(*(stream.run(http, moved) for stream in streams))
    waits = asyncio.create_task(under_way.wait())
    await asyncio.wait([waits, whole], return_when=asyncio.FIRST_COMPLETED)
    waits.cancel()
    lost = ""
    if not whole.done():
        lost = min(streams, key=lambda stream: (stream.complete, len(stream.events))).replica
        happen(lost)
    await whole
    return lost


@asynccontextmanager
async def run(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with (
        asyncio.timeout(DEADLINE_S),
        httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, limits=limits, trust_env=False) as http,
    ):
        await until_all_serve(http)
        yield http


async def until_all_serve(http: httpx.AsyncClient) -> None:
    """As many requests without a session as there are replicas go to each of them."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        health = (await http.get("/health")).json()
        if all(replica["ready"] for replica in health["replicas"]) and len(health["replicas"]) == 3:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"not all replicas serve: {health}")


async def processes(server: Server, find: Callable[[int], int]) -> dict[str, int]:
    """By replica, once all run: what was killed a moment ago may still be missing."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if len(found := running(server, find)) == len(NAMES):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"not all replicas run: {found}")


def running(server: Server, find: Callable[[int], int]) -> dict[str, int]:
    found = {}
    for pid in server.children():
        # It has no engine now.
        with contextlib.suppress(ValueError):
            words = words_of(pid)
            found |= {name: find(pid) for name in NAMES if name in words}
    return found


def assert_all_went_on(streams: list[Stream], expected: list[dict[int, list[Any]]], lost: str) -> None:
    for stream, undisturbed in zip(streams, expected, strict=False):
        assert stream.complete
        assert stream.by_choice() == undisturbed
        assert all(seam["from"] == lost and seam["exact"] for seam in stream.resumed)
    assert any(stream.resumed for stream in streams)


async def test_a_killed_replicas_streams_go_on_elsewhere_token_for_token(served: Server) -> None:
    async with run(served) as http:
        expected = await whole(http, served.model)
        path, body = bodies(served.model)[0]
        body = {**body, "stream": False}
        plain = (await http.post(path, json=body)).json()["choices"]
        asked: list[asyncio.Task[httpx.Response]] = []

        def kill(pid: int) -> None:
            asked.extend(asyncio.create_task(http.post(path, json=body)) for _ in range(6))
            os.kill(pid, signal.SIGKILL)

        streams, lost = await disturbed(http, served, kill)
        assert_all_went_on(streams, expected, lost)
        assert not any(stream.resumed for stream in streams if stream.replica != lost)
        for answer in await asyncio.gather(*asked):
            assert answer.json()["choices"] == plain


@pytest.mark.variant
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_of_a_dead_or_hung_engine_go_on_elsewhere(served: Server, how: signal.Signals) -> None:
    async with run(served) as http:
        expected = await whole(http, served.model, FEW)

        def kill(pid: int) -> None:
            os.kill(pid, how)

        streams, lost = await disturbed(http, served, kill, FEW, engine)
        assert_all_went_on(streams, expected, lost)


class Agent:
    """A session that calls tools, without streaming. It lives on a replica from its first turn on."""

    def __init__(self, http: httpx.AsyncClient, model: str, number: int) -> None:
        self._http = http
        self._headers = {"x-session-id": f"agent {number}"}
        self._body = {"model": model, "tools": TOOLS, "tool_choice": "required", "max_tokens": TOKENS}
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": f"Which way, {number}?"}]
        self.replicas: list[str] = []

    async def turn(self) -> None:
        body = {**self._body, "messages": self._messages, "seed": len(self.replicas)}
        answer = await self._http.post("/v1/chat/completions", json=body, headers=self._headers)
        assert answer.status_code == 200, answer.text
        self.replicas.append(answer.headers["x-midstream-replica"])
        said = answer.json()["choices"][0]["message"]
        made = said.get("tool_calls") or ()
        calls = [{"role": "tool", "tool_call_id": call["id"], "content": "a wall"} for call in made]
        self._messages = [*self._messages[:1], said, *calls]


async def in_flight(http: httpx.AsyncClient, replica: str) -> int:
    rows = (await http.get("/health")).json()["replicas"]
    return next(int(row["in_flight"]) for row in rows if row["name"] == replica)


async def test_no_client_of_a_known_session_sees_that_an_engine_died(served: Server) -> None:
    async with run(served) as http:
        agents = [Agent(http, served.model, number) for number in range(AGENTS)]
        for _ in range(ATTEMPTS):
            pids = await processes(served, engine)
            await asyncio.gather(*(agent.turn() for agent in agents))
            homes = [agent.replicas[-1] for agent in agents]
            lost = max(NAMES, key=homes.count)
            turns = asyncio.gather(*(agent.turn() for agent in agents))
            while await in_flight(http, lost) < IN_FLIGHT and not turns.done():
                continue
            under_way = not turns.done()
            os.kill(pids[lost], signal.SIGKILL)
            await turns
            moved = [a for a, home in zip(agents, homes, strict=True) if home == lost != a.replicas[-1]]
            # On a busy machine all may have ended before.
            if under_way and moved:
                break
            await until_all_serve(http)
        assert moved
        await asyncio.gather(*(agent.turn() for agent in agents))


@pytest.mark.variant
async def test_streams_of_a_replica_that_does_not_answer_any_more_go_on_elsewhere(served: Server) -> None:
    async with run(served) as http:
        expected = await whole(http, served.model, FEW)
        stopped: list[int] = []

        def stop(pid: int) -> None:
            stopped.append(pid)
            os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            while stopped:
                os.kill(stopped.pop(), signal.SIGCONT)

        try:
            streams, lost = await disturbed(http, served, stop, FEW, end=go_on)
            assert_all_went_on(streams, expected, lost)
        finally:
            go_on()


@pytest.mark.variant
async def test_an_unseeded_stream_keeps_the_seed_it_was_given(served: Server) -> None:
    async with run(served) as http:
        body = {
            "model": served.model,
            "prompt": "By chance",
            "max_tokens": LONG,
            "stream": True,
            "ignore_eos": True,
        }
        # See disturbed().
        for _ in range(ATTEMPTS):
            stream, seed = await killed_under(served, http, body)
            if stream.resumed:
                break
            await until_all_serve(http)
        assert len(stream.resumed) == 1
        again = Stream(stream.path, {**body, "seed": seed})
        await again.run(http)
        assert again.by_choice() == stream.by_choice()


async def killed_under(served: Server, http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Stream, int]:
    """A stream whose replica is killed once it is under way, and its seed as the gateway tells it."""
    stream, raw, seeds = Stream("/v1/completions", body), list[str](), list[int]()
    pids = await processes(served, itself)
    async with http.stream("POST", stream.path, json=body) as answer:
        stream.replica = answer.headers["x-midstream-replica"]
        async for line in answer.aiter_lines():
            raw.append(line)
            if line.startswith(": m {") and "seed" in line:
                seeds.append(json.loads(line.removeprefix(": m "))["seed"])
            if line.startswith("data: {"):
                stream._take(json.loads(line.removeprefix("data: ")))
                if len(stream.events) == UNDER_WAY:
                    os.kill(pids[stream.replica], signal.SIGKILL)
    assert raw[-2] == "data: [DONE]"
    return stream, seeds[0]
