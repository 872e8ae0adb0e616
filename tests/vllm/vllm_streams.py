"""Rollouts as streams: what each said, token by token, and the numbers it should have said."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from vllm_bed import DEADLINE_S, until

from midstream.client import snapshot_of

#: Of a turn that holds a session. Two run side by side, and one of them is at its middle when the other one ends.
HELD_TOKENS = 1200


def random_prompt(seed: object, size: int) -> list[int]:
    return [random.Random(f"{seed} {i}").randint(20, 190) for i in range(size)]


@dataclass
class Stream:
    """One completion. tokens: id, logprob, label of each that was generated, in their order."""

    prompt: list[int]
    max_tokens: int
    session: str
    seed: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    replica: str = ""
    tokens: list[tuple[int, float, str]] = field(default_factory=list)
    finish: str | None = None
    error: Any = None
    resumed: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    ended: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt + [token for token, _, _ in self.tokens]

    @property
    def labels(self) -> list[str]:
        """Each snapshot once, in the order in which they came."""
        found: list[str] = []
        for _, _, label in self.tokens:
            if not found or found[-1] != label:
                found.append(label)
        return found

    @property
    def whole(self) -> bool:
        ended = self.done and self.error is None and self.finish == "length"
        return ended and len(self.tokens) == self.max_tokens

    async def run(self, http: httpx.AsyncClient, model: str, moved: Callable[[], None]) -> None:
        """moved: called at each event."""
        body = {"model": model, "prompt": self.prompt, "max_tokens": self.max_tokens, "seed": self.seed}
        body |= {"stream": True, "logprobs": True, "ignore_eos": True, "return_token_ids": True}
        headers = {"x-multi-turn-session-id": self.session, **self.headers}
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            self.replica = answer.headers["x-midstream-replica"]
            async for data in events(answer):
                if data == b"[DONE]":
                    assert not self.done
                    self.done = True
                else:
                    self._take(json.loads(data))
                    moved()
        self.ended = True
        moved()

    def _take(self, event: dict[str, Any]) -> None:
        assert not self.done
        assert self.error is None
        if "error" in event:
            self.error = event["error"]
            return
        if seam := event.get("midstream", {}).get("resumed"):
            self.resumed.append(seam)
        for choice in event["choices"]:
            assert self.finish is None, "something follows the end"
            entries = choice["logprobs"]["content"] if choice["logprobs"] else []
            assert [entry["token_id"] for entry in entries] == choice["token_ids"]
            label = snapshot_of(event["model"])
            assert label is not None
            self.tokens += [(entry["token_id"], entry["logprob"], label) for entry in entries]
            self.finish = choice["finish_reason"]


async def events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each event. A model that says any bytes says U+0085 too, where aiter_lines() ends a line."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ")


async def under_way(
    url: str, model: str, streams: Sequence[Stream], tokens: int, happen: Callable[[], Any]
) -> None:
    """Runs all streams to their ends; `happen` is called in a thread once each of them has so many tokens, or has ended."""
    begun = asyncio.Event()

    def moved() -> None:
        if all(stream.ended or len(stream.tokens) >= tokens for stream in streams):
            begun.set()

    async with asyncio.timeout(2 * DEADLINE_S), client(url) as http, asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.run(http, model, moved))
        await begun.wait()
        await asyncio.to_thread(happen)


def coming(name: str, tokens: tuple[int, int]) -> Iterator[Stream]:
    """New sessions without end; tokens: the least and the most of a stream, so that they do not end together."""
    for i in itertools.count():
        wanted = random.Random(f"{name} tokens {i}").randint(*tokens)
        yield Stream(random_prompt(f"{name} {i}", 20 + i % 100), wanted, f"{name} {i}", seed=i)


def on_their_way(streams: Sequence[Stream], replica: str) -> int:
    """How many of a replica's have ten tokens, and at least half of theirs still to come."""
    return sum(s.replica == replica and 10 <= len(s.tokens) <= s.max_tokens // 2 for s in streams)


async def kept_up(
    url: str,
    model: str,
    streams: Iterator[Stream],
    count: int,
    happen: Callable[[], Any],
    when: Callable[[Sequence[Stream]], bool] | None = None,
) -> list[Stream]:
    """Runs `count` streams at any time, the next for each that ended, until `happen`, called in a thread `when` the streams so
    far allow it (else once `count` of them have begun), has returned; then those under way to their ends. All that ran.

    However slow or fast the engine is beside `happen`, there are streams for it to happen to.
    """
    ran: list[Stream] = []
    begun, over = asyncio.Event(), asyncio.Event()
    ready = when or (lambda ran: sum(bool(stream.tokens) for stream in ran) >= count)

    def moved() -> None:
        if ready(ran):
            begun.set()

    async def one_after_the_other(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            stream = next(streams)
            ran.append(stream)
            await stream.run(http, model, moved)

    async with asyncio.timeout(2 * DEADLINE_S), client(url) as http, asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one_after_the_other(http))
        await begun.wait()
        try:
            await asyncio.to_thread(happen)
        finally:
            over.set()
    return ran


@contextlib.contextmanager
def held(url: str, model: str, session: str) -> Iterator[str]:
    """The home of a new session, which stays there meanwhile: a turn of it runs at any time, and it does not move then."""
    turns: list[Stream] = []
    begun, over = threading.Event(), threading.Event()

    async def one_after_the_other(http: httpx.AsyncClient, tokens: int, moved: Callable[[], None]) -> None:
        for number in itertools.count():
            prompt = random_prompt(f"{session} {tokens} {number}", 20)
            turns.append(Stream(prompt, HELD_TOKENS if number else tokens, session))
            await turns[-1].run(http, model, moved)

    async def run() -> None:
        async with client(url) as http, asyncio.TaskGroup() as group:
            tasks = []
            for tokens in (HELD_TOKENS // 2, HELD_TOKENS):
                moved = asyncio.Event()
                tasks.append(group.create_task(one_after_the_other(http, tokens, moved.set)))
                await moved.wait()
            begun.set()
            await asyncio.to_thread(over.wait)
            for task in tasks:
                task.cancel()

    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(asyncio.run, run())
        try:
            until(lambda: begun.is_set() or ran.done(), lambda: f"{session} does not begin")
            yield turns[0].replica
        finally:
            over.set()
            ran.result()
    assert {turn.replica for turn in turns if turn.replica} == {turns[0].replica}


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, limits=limits, trust_env=False)


def expected_logprobs(stream: Stream, models: dict[str, Any]) -> list[float]:
    """Of each token under the snapshot of its label; earlier positions keep the KV they were given.

    The KV of a position is made by the pass that consumes it, so token j's is made under the label of token j + 1.
    """
    ids, labels = stream.ids, [label for _, _, label in stream.tokens]
    expected: list[float] = []
    cache, position, start = None, 0, 0
    while start < len(labels):
        end = start
        while end < len(labels) and labels[end] == labels[start]:
            end += 1
        # The passes that gave tokens start..end-1 ran positions < stop.
        stop = len(stream.prompt) + end - 1
        with torch.no_grad():
            inputs = torch.tensor([ids[position:stop]])
            output = models[labels[start]](inputs, past_key_values=cache, use_cache=True)
        logprobs = output.logits[0, start - end :].log_softmax(-1)
        targets = torch.tensor(ids[stop - (end - start) + 1 : stop + 1])
        expected += logprobs.gather(1, targets[:, None])[:, 0].tolist()
        cache, position, start = output.past_key_values, stop, end
    return expected
