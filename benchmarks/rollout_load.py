"""Trajectories as a trainer runs them: turns whose prompt is all that was said before and what the environment answered.

Owns: what is sent, when, what it would cost at best, and the sending of it. Prompts and answers are token ids.
Always holds: lengths and pauses depend on the workload alone, so every run does the same work; ids depend on the run too, so no
run finds what another one cached. A turn that is not answered 200 with exactly the tokens asked for fails the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Tokens that are cached together.
BLOCK = 16
# Prompts draw ids below this: no special tokens.
VOCABULARY = 256
SENT = ("model", "prompt", "max_tokens", "temperature", "seed", "ignore_eos", "return_token_ids")


class TurnFailed(Exception):
    """A turn was not answered as asked."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Ranges are inclusive, in tokens; all drawn evenly. pause_s: the environment's part before each later turn, seconds."""

    trajectories: int = 64
    turns: int = 8
    # Of the first prompt.
    first: tuple[int, int] = (256, 768)
    # New tokens of a turn.
    answer: tuple[int, int] = (32, 128)
    # What the environment adds to the next prompt.
    observation: tuple[int, int] = (64, 256)
    pause_s: tuple[float, float] = (0.0, 0.2)
    seed: int = 5


@dataclass(frozen=True)
class TurnPlan:
    # Tokens that the prompt has beyond the last prompt and its answer.
    added: int
    answer: int
    pause_s: float


# One trajectory.
Plan = Sequence[TurnPlan]


def plans(workload: Workload) -> list[Plan]:
    rng = random.Random(workload.seed)
    return [
        [
            TurnPlan(
                added=rng.randint(*(workload.observation if turn else workload.first)),
                answer=rng.randint(*workload.answer),
                pause_s=rng.uniform(*workload.pause_s) if turn else 0.0,
            )
            for turn in range(workload.turns)
        ]
        for _ in range(workload.trajectories)
    ]


def ideal_prefill(all_plans: Sequence[Plan], block: int = 1) -> int:
    """Prompt tokens that must be computed when every trajectory finds all of its own that was computed before.

    Each token once, and the last token of an answer, which was drawn but never an input, with the turn after it. With a
    `block`, what was computed is found in whole blocks only.
    """
    total = 0
    for plan in all_plans:
        said = found = 0
        for turn in plan:
            prompt = said + turn.added
            total += prompt - found
            said = prompt + turn.answer
            found = (said - 1) // block * block
    return total


@dataclass(frozen=True)
class Turn:
    """What came of one turn. Tokens; seconds from the request's first byte to the response's last."""

    prompt: int
    cached: int
    answer: int
    latency_s: float


@dataclass(frozen=True)
class Driven:
    turns: list[Turn]
    wall_s: float


class Connections:
    """Kept connections of one trajectory, one per port: plain HTTP/1.1 requests in turn."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def post(self, port: int, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Status and body. Raises TurnFailed when the connection is lost."""
        status, _, answer = await self.exchange("POST", port, path, headers, body)
        return status, answer

    async def exchange(
        self, method: str, port: int, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body. Raises TurnFailed when the connection is lost, which is not used again."""
        try:
            return await self._exchange(method, port, path, headers, body)
        except (OSError, asyncio.IncompleteReadError) as error:
            if (lost := self._open.pop(port, None)) is not None:
                lost[1].close()
            raise TurnFailed(f"a connection was lost: {error!r}") from error

    async def _exchange(
        self, method: str, port: int, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if port not in self._open:
            self._open[port] = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = self._open[port]
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n{lines}"
        )
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status, *answered = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        given = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in answered)}
        answer = await _body(reader, given)
        if given.get("connection", "").lower() == "close":
            del self._open[port]
            writer.close()
        return int(status.split()[1]), given, answer

    async def close(self) -> None:
        for _, writer in self._open.values():
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", 0)))
    parts = []
    while size := int((await reader.readline()).partition(b";")[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readline()
    return b"".join(parts)


#: (place of the trajectory, its session key) -> port of the next turn and headers to send with it.
Route = Callable[[int, str], tuple[int, dict[str, str]]]


async def drive(all_plans: Sequence[Plan], run: str, route: Route) -> Driven:
    """All trajectories at once, each turn when the one before it is over. run: names the run; its ids and keys are its own.

    Raises TurnFailed.
    """
    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_trajectory(place, plan, run, route))
                for place, plan in enumerate(all_plans)
            ]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    wall_s = time.perf_counter() - started
    return Driven([turn for task in tasks for turn in task.result()], wall_s)


def session_key(run: str, place: int) -> str:
    return f"{run}-trajectory-{place}"


async def _trajectory(place: int, plan: Plan, run: str, route: Route) -> list[Turn]:
    key = session_key(run, place)
    rng = random.Random(key)
    prompt: list[int] = []
    turns = []
    connections = Connections()
    try:
        for number, step in enumerate(plan):
            await asyncio.sleep(step.pause_s)
            prompt += rng.choices(range(VOCABULARY), k=step.added)
            body = _request(prompt, step.answer, seed=place * len(plan) + number)
            port, headers = route(place, key)
            sent = time.perf_counter()
            status, answer = await connections.post(port, "/v1/completions", headers, body)
            ids, turn = read_answer(status, answer, len(prompt), step.answer, time.perf_counter() - sent)
            turns.append(turn)
            prompt += ids
    finally:
        await connections.close()
    return turns


def _request(prompt: Sequence[int], answer: int, seed: int) -> bytes:
    body = dict(zip(SENT, ("m", prompt, answer, 1.0, seed, True, True), strict=True))
    return json.dumps(body, separators=(",", ":")).encode()


def read_answer(
    status: int, body: bytes, prompt: int, asked: int, latency_s: float
) -> tuple[list[int], Turn]:
    """The answer's token ids, and what is to be counted. Raises TurnFailed."""
    if status != 200:
        raise TurnFailed(f"a turn was answered {status}: {body[:500].decode(errors='replace')}")
    answer: dict[str, Any] = json.loads(body)
    ids, usage = answer["choices"][0].get("token_ids"), answer["usage"]
    if ids is None:
        raise TurnFailed("the answer has no token ids: return_token_ids did not reach the replica")
    if len(ids) != asked or usage["prompt_tokens"] != prompt:
        raise TurnFailed(
            f"asked for {asked} tokens on {prompt}, got {len(ids)} on {usage['prompt_tokens']} of the prompt"
        )
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return ids, Turn(prompt, cached, len(ids), latency_s)
