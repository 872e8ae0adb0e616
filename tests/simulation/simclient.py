"""The users of a simulated server: rollout clients, a trainer, an operator. What they are answered is checked on the spot."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from simengine import expected

#: A request or a turn takes so long at most, or is given up.
PATIENCE_S = 40.0
#: Statuses that say "not now".
RETRYABLE = frozenset((408, 409, 425, 429, 500, 502, 503, 504))


class Broken(Exception):
    """An answer that its client cannot use; it may ask again."""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def exchange(
    port: int, method: str, path: str, body: Any = None, headers: Sequence[tuple[str, str]] = ()
) -> Answer:
    """One request over a connection of its own, its response read whole. Raises Broken."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await _sent(port, method, path, body, headers)
            try:
                status, found = await _head(reader)
                return Answer(status, found, b"".join([piece async for piece in _body(reader, found)]))
            finally:
                writer.close()
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        raise Broken(repr(error)) from error


async def _sent(
    port: int, method: str, path: str, body: Any, headers: Sequence[tuple[str, str]]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: sim", "connection: close", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(lines[0].split()[1])
    return status, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        yield await reader.readexactly(int(headers.get("content-length", "0")))


@dataclass
class Turn:
    """What one request was answered."""

    prompt: list[int]
    labels: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[bytes | None] = field(default_factory=list)
    kv: list[tuple[str, int, int]] | None = None
    earlier: list[tuple[int, list[tuple[str, int, int]]]] = field(default_factory=list)
    finish: str | None = None
    done: bool = False
    resumed: list[dict[str, Any]] = field(default_factory=list)
    error: Any = None
    cached: int = 0
    replica: str = ""

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        if isinstance(seam := event.get("midstream"), dict) and "resumed" in seam:
            self.resumed.append(seam["resumed"])
        label = event["model"].rpartition("@")[2]
        for choice in event["choices"]:
            entries = (choice.get("logprobs") or {}).get("content") or []
            for entry in entries:
                self.tokens.append(entry["token_id"])
                self.logprobs.append(entry["logprob"])
                route = entry.get("routing_matrix")
                self.routes.append(None if route is None else base64.b64decode(route))
                self.labels.append(label)
            self.finish = choice.get("finish_reason") or self.finish
            if "kv_snapshots" in choice:
                self.kv = _spans(choice["kv_snapshots"])
            self.earlier += [(e["tokens"], _spans(e["kv_snapshots"])) for e in choice.get("earlier_kv_snapshots", ())]
        usage = event.get("usage") or {}
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached)


def _spans(spans: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(span["snapshot"], span["start"], span["end"]) for span in spans]


class Wrong(Exception):
    """An invariant does not hold."""


class Oracle:
    """What may be true of an answer. weights: of each snapshot name, all that it ever meant."""

    def __init__(self) -> None:
        self.weights: dict[str, int] = {}
        #: Names in the order of their first signal that was acknowledged or may have been.
        self.checked_tokens = 0

    def check(self, turn: Turn, max_tokens: int) -> None:
        """Of a response that came to its end. Raises Wrong."""
        if len(turn.tokens) != max_tokens or turn.finish != "length":
            raise Wrong(f"{len(turn.tokens)} of {max_tokens} tokens, finish {turn.finish}: {turn}")
        if turn.kv is None:
            raise Wrong(f"no kv_snapshots: {turn}")
        strange = {label for label in turn.labels} - set(self.weights)
        if strange:
            raise Wrong(f"labels that nobody signalled: {strange}")
        self._check_numbers(turn, 0, turn.earlier, turn.kv)

    def _check_numbers(
        self, turn: Turn, begin: int, earlier: list[tuple[int, list[tuple[str, int, int]]]], kv: list[tuple[str, int, int]]
    ) -> None:
        parts = [*earlier, (len(turn.tokens), kv)]
        first = begin
        tokens = turn.prompt + turn.tokens
        for until, spans in parts:
            found = expected(tokens[: len(turn.prompt) + until], len(turn.prompt), turn.labels, spans, self.weights.__getitem__)
            for number in range(first, until):
                logprob, route = found[number]
                if turn.logprobs[number] != logprob or turn.routes[number] not in (None, route):
                    raise Wrong(
                        f"token {number} is not what {turn.labels[number]} over {spans} computes: "
                        f"{turn.logprobs[number]} instead of {logprob}; {turn}"
                    )
            first = until
            self.checked_tokens += 0
        self.checked_tokens += len(turn.tokens)


class Rollout:
    """A client with one trajectory after another, each a session of several turns."""

    def __init__(
        self,
        name: str,
        port: int,
        rng: random.Random,
        oracle: Oracle,
        count: Callable[[str], None],
        pins: Callable[[], str | None],
    ) -> None:
        self.name, self._port, self._rng = name, port, rng
        self._oracle = oracle
        self._count = count
        self._pin = pins
        self.over = False

    async def run(self) -> None:
        number = 0
        while not self.over:
            number += 1
            await self._trajectory(f"{self.name}-{number}")

    async def _trajectory(self, session: str) -> None:
        ids = [self._rng.randint(1, 249) for _ in range(self._rng.randint(1, 24))]
        for _ in range(self._rng.randint(1, 4)):
            if self.over:
                return
            turn = await self._turn(session, ids)
            if turn is None:
                return
            ids = [*ids, *turn.tokens, *(self._rng.randint(1, 249) for _ in range(self._rng.randint(0, 6)))]
            await asyncio.sleep(self._rng.random() * 0.3)

    async def _turn(self, session: str, ids: list[int]) -> Turn | None:
        most = self._rng.randint(1, 24)
        body: dict[str, Any] = {"model": "sim", "prompt": ids, "max_tokens": most, "logprobs": True, "return_token_ids": True}
        body |= {"perf_metrics_in_response": True, "ignore_eos": True, "seed": self._rng.randint(0, 2**40)}
        body |= {"include_routing_matrix": self._rng.random() < 0.5, "stream": self._rng.random() < 0.8}
        body["temperature"] = 1.0
        headers = [("x-multi-turn-session-id", session)]
        pin = self._pin()
        if pin is not None:
            headers += [("x-midstream-snapshot", pin), ("x-midstream-snapshot-wait", "2")]
        try:
            turn = await self.ask(body, headers)
        except Broken as error:
            self._count(f"turn: {str(error)[:60]}")
            return None
        if turn.error is not None:
            self._count(f"turn: error {turn.error.get('code')}")
            return None
        self._oracle.check(turn, most)
        if pin is not None and set(turn.labels) != {pin} and not turn.resumed:
            raise Wrong(f"pinned to {pin}: {turn.labels}")
        self._count("turn: whole" + (", resumed" if turn.resumed else "") + (", crossed" if len(set(turn.labels)) > 1 else ""))
        return turn

    async def ask(self, body: dict[str, Any], headers: Sequence[tuple[str, str]] = ()) -> Turn:
        """Raises Broken."""
        if self._rng.random() < 0.03:
            # It leaves in the middle.
            try:
                async with asyncio.timeout(self._rng.random() * 0.2):
                    await self._ask(body, headers)
            except TimeoutError:
                pass
            raise Broken("the client left")
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._ask(body, headers)
        except TimeoutError as error:
            raise Broken(f"no answer within {PATIENCE_S:g} s") from error

    async def _ask(self, body: dict[str, Any], headers: Sequence[tuple[str, str]]) -> Turn:
        turn = Turn(list(body["prompt"]))
        try:
            reader, writer = await _sent(self._port, "POST", "/v1/completions", body, headers)
            try:
                status, found = await _head(reader)
                turn.replica = found.get("x-midstream-replica", "")
                if status != 200:
                    text = b"".join([piece async for piece in _body(reader, found)])
                    if status not in RETRYABLE and status != 422:
                        raise Wrong(f"status {status}: {text[:400]!r}")
                    raise Broken(f"status {status} {json.loads(text)['error']['code']}")
                if body["stream"]:
                    await self._read_stream(reader, found, turn)
                else:
                    self._read_plain(b"".join([piece async for piece in _body(reader, found)]), turn)
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Broken(type(error).__name__) from error
        return turn

    async def _read_stream(self, reader: asyncio.StreamReader, headers: dict[str, str], turn: Turn) -> None:
        rest = b""
        async for piece in _body(reader, headers):
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                for line in event.split(b"\n"):
                    if line == b"data: [DONE]":
                        turn.done = True
                    elif line.startswith(b"data: "):
                        if turn.done:
                            raise Wrong(f"an event behind the end: {line!r}")
                        turn.take(json.loads(line[6:]))
        if not turn.done and turn.error is None:
            raise Wrong(f"a response that is whole without its end: {turn}")

    def _read_plain(self, body: bytes, turn: Turn) -> None:
        answer = json.loads(body)
        turn.take(answer)
        spans = [span for choice in answer["choices"] for span in choice.get("snapshots", ())]
        if spans:
            turn.labels = [span["snapshot"] for span in spans for _ in range(span["start"], span["end"])]
        turn.done = True
