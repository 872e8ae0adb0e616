"""Trajectories of streamed turns, and weights that change while they run.

Owns: one run of the rollout in `make bench-vllm`: turns as streams, what is read out of each, swaps at shares of the turns.
Always holds: a turn counts when its stream ended whole, with exactly the tokens asked for and, where weights are labelled,
labels in the order of the swaps; any other is a failure, told with its reason, and ends its trajectory. Lengths depend on the
workload alone; ids and session keys are other ones in each run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen import Stream, events
from rollout_load import VOCABULARY, Plan, TurnFailed, session_key

from midstream.client import SnapshotPublisher, snapshot_of

HOST = "127.0.0.1"
TURN_S_MAX = 300.0


@dataclass(frozen=True)
class Target:
    """Where a turn is sent."""

    port: int
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    # More body fields.
    extra: dict[str, Any] = field(default_factory=dict)


#: (place of the trajectory, its session key) -> where its next turn goes.
Route = Callable[[int, str], Target]


@dataclass(frozen=True)
class Turn:
    """What came of one turn. Tokens; seconds."""

    # In its trajectory, from 0.
    number: int
    prompt: int
    cached: int
    ids: list[int]
    # Snapshots and how many tokens in a row each made.
    labels: list[tuple[str | None, int]]
    # From the request's first byte to the last token.
    latency_s: float
    # Between tokens.
    gaps_s: list[float]

    @property
    def crossed(self) -> int:
        """Tokens behind the first swap in this turn."""
        return sum(count for _, count in self.labels[1:])


class Progress:
    """How many turns are over, for whoever waits for some."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._ended = False
        self._waiting: list[tuple[int, asyncio.Event]] = []

    def add(self) -> None:
        self.done += 1
        self._wake()

    def end(self) -> None:
        """No more turns come."""
        self._ended = True
        self._wake()

    async def reached(self, turns: int) -> None:
        """Return when so many are over, or no more come."""
        event = asyncio.Event()
        self._waiting.append((turns, event))
        self._wake()
        await event.wait()

    def _wake(self) -> None:
        for wanted, event in self._waiting:
            if self._ended or self.done >= wanted:
                event.set()


@dataclass
class Driven:
    turns: list[Turn] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    swaps: list[dict[str, Any]] = field(default_factory=list)


def request(target: Target, prompt: Sequence[int], answer: int) -> bytes:
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": answer,
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    encoded = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}:{target.port}\r\ncontent-type: application/json\r\n"
    )
    lines = "".join(f"{name}: {value}\r\n" for name, value in target.headers.items())
    return f"{head}{lines}content-length: {len(encoded)}\r\n\r\n".encode() + encoded


async def ask(target: Target, data: bytes) -> Stream:
    """A stream that is over, whole or not. Raises TurnFailed."""
    loop = asyncio.get_running_loop()
    stream = Stream(data, loop.create_future())
    try:
        transport, _ = await loop.create_connection(lambda: stream, HOST, target.port)
        try:
            stream.send()
            async with asyncio.timeout(TURN_S_MAX):
                await stream.done
        finally:
            transport.abort()
    except (OSError, TimeoutError) as error:
        raise TurnFailed(f"the stream had no end: {error!r}") from error
    return stream


def read_turn(
    number: int, sent: float, times: list[float], reads: list[bytes], prompt: int, asked: int
) -> Turn:
    """Raises TurnFailed unless the stream is whole and has `asked` tokens on a prompt of so many."""
    ids: list[int] = []
    arrived: list[float] = []
    labels: list[str | None] = []
    usage: dict[str, Any] | None = None
    last = b""
    try:
        for at, last in events(times, reads):
            if last == b"[DONE]":
                continue
            chunk = json.loads(last)
            if "error" in chunk:
                raise TurnFailed(f"the stream failed: {chunk['error']}")
            usage = chunk.get("usage") or usage
            new = [i for choice in chunk["choices"] for i in choice.get("token_ids") or ()]
            ids += new
            arrived += [at] * len(new)
            labels += [snapshot_of(chunk["model"])] * len(new)
    except ValueError as error:
        raise TurnFailed(str(error)) from error
    if last != b"[DONE]" or usage is None:
        raise TurnFailed("the stream ended without [DONE] or without its usage")
    if len(ids) != asked or usage["prompt_tokens"] != prompt:
        raise TurnFailed(
            f"asked for {asked} tokens on {prompt}, got {len(ids)} on {usage['prompt_tokens']} of the prompt"
        )
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    runs = [(label, len(list(group))) for label, group in itertools.groupby(labels)]
    gaps = [b - a for a, b in itertools.pairwise(arrived)]
    return Turn(number, prompt, cached, ids, runs, arrived[-1] - sent, gaps)


def check_labels(turn: Turn, order: Sequence[str]) -> None:
    """Raises TurnFailed unless the turn's labels are of `order` and in it."""
    labels = [label for label, _ in turn.labels]
    if any(label not in order for label in labels):
        raise TurnFailed(f"labels {labels}, although only {list(order)} served")
    places = [order.index(label) for label in labels if label is not None]
    if places != sorted(places):
        raise TurnFailed(f"labels {labels} are not in the order of the swaps")


async def drive(
    all_plans: Sequence[Plan], run: str, route: Route, progress: Progress, order: Sequence[str]
) -> Driven:
    """All trajectories at once, each turn when the one before it is over. run: names it; order: snapshots that may serve, in
    the order of their swaps; (): tokens have no labels."""
    driven = Driven()
    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for place, plan in enumerate(all_plans):
                group.create_task(_trajectory(place, plan, run, route, progress, order, driven))
    finally:
        progress.end()
    driven.wall_s = time.perf_counter() - began
    return driven


async def _trajectory(
    place: int,
    plan: Plan,
    run: str,
    route: Route,
    progress: Progress,
    order: Sequence[str],
    driven: Driven,
) -> None:
    key = session_key(run, place)
    rng = random.Random(key)
    prompt: list[int] = []
    for number, step in enumerate(plan):
        await asyncio.sleep(step.pause_s)
        prompt += rng.choices(range(VOCABULARY), k=step.added)
        target = route(place, key)
        data = request(target, prompt, step.answer)
        try:
            stream = await ask(target, data)
            turn = read_turn(number, stream.sent, stream.times, stream.reads, len(prompt), step.answer)
            if order:
                check_labels(turn, order)
        except TurnFailed as error:
            driven.failures.append(f"trajectory {place}, turn {number}: {error}")
            return
        driven.turns.append(turn)
        prompt += turn.ids
        progress.add()


def swap_points(turns: int, swaps: int) -> list[int]:
    """After how many of `turns` each swap is signalled: evenly, none at the start or the end."""
    return [turns * (i + 1) // (swaps + 1) for i in range(swaps)]


async def swap(
    publisher: SnapshotPublisher, identities: Sequence[str], policy: Any, progress: Progress
) -> list[dict[str, Any]]:
    """Signal snapshots that lie in the bucket, each at its share of the turns and after the one before it serves everywhere.

    What the replicas and the clock say of each. Raises what the publisher raises.
    """
    made = []
    for identity, point in zip(identities, swap_points(progress.total, len(identities)), strict=True):
        await progress.reached(point)
        began = time.perf_counter()
        await asyncio.to_thread(publisher.snapshots.signal, identity, policy)
        status = await asyncio.to_thread(publisher.snapshots.wait_until_ready, identity, poll_s=0.05)
        own = [replica.last_swap or {} for replica in status.replicas]
        if any(timing.get("snapshot") != identity for timing in own):
            raise RuntimeError(f"replicas tell of other swaps than the one to {identity}: {own}")
        made.append(
            {
                "signalled_after_turns": point,
                # Of them all: less than all, or the swap came too late.
                "ready_before_turns": progress.done,
                "signal_to_ready_s": round(time.perf_counter() - began, 3),
                **{
                    name: [round(timing[name], 3) for timing in own]
                    for name in ("pause_ms", "streams_crossed")
                },
            }
        )
    return made
