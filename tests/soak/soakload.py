"""The clients of a real server: rollouts in turns, hostile ones, and the trainer that publishes all the while.

Always holds: what a rollout client asks for in its turns follows from one of few scripts, so that equal histories come again
and the oracle can look them up. What an answer may be depends on whether anything had befallen the server in its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import simclient
from s3server import S3Server
from simclient import Broken, Oracle, Rollout, Turn, Wrong, exchange
from simtrainer import HOT_LOAD, Trainer, Weights
from soakoracle import RealOracle

#: What the rollouts do is one of so many scripts, so equal prompts come again and again.
SCRIPTS = 12
CHATS = ("Which way?", "Tell me a story about a fox and a hen.")
#: The only answers that a client may get in place of tokens, while the server meets with something.
DOCUMENTED = frozenset((409, 422, 425, 429, 503))
DEPLOYMENT = "/v1/accounts/local/deployments/default"
POLICIES: tuple[Any, ...] = ("all", "new_session", "none", None, {"max_age": 1}, {"max_age": 0})
FORMS = ("full", "delta", "delta", "delta", "hinted", "late", "torn", "again")
#: Replicas have a snapshot by then, on a busy machine and from a slow bucket.
READY_S = 150.0


class Client(Rollout):
    """calm_since: whether nothing has befallen the server since then. transition: what swaps are now, and since when."""

    def __init__(
        self,
        name: str,
        port: int,
        oracle: RealOracle,
        counts: Counter[str],
        trainer: Publisher,
        calm_since: Callable[[float], bool],
        found: list[str],
    ) -> None:
        super().__init__(name, port, random.Random(name), oracle, self._note, lambda: None)
        self._real, self._counts, self._trainer, self._found = oracle, counts, trainer, found
        #: For what must not follow from the script.
        self._chance = random.Random(f"{name} chance")
        #: When the trajectory began: what befell the server since then may have moved the session.
        self._begun = 0.0
        self._sessionless = False
        self.undisturbed = lambda: calm_since(self._begun)

    def _note(self, what: str) -> None:
        self._counts[what] += 1

    async def run(self) -> None:
        for number in itertools.count():
            if self.over:
                return
            self._rng = random.Random(self._chance.randrange(SCRIPTS))
            self._begun = asyncio.get_running_loop().time()
            self._sessionless = self._chance.random() < 0.08
            try:
                await self._trajectory(f"{self.name}-{number}")
            except Wrong as error:
                self._found.append(f"{self.name}: {error}")
                await asyncio.sleep(1.0)

    def request(self, session: str, ids: list[int]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        body, headers = super().request(session, ids)
        body["max_tokens"] = self._rng.choice((8, 24, 48, 96))
        body["temperature"] = self._rng.choice((0.0, 1.0))
        failover = self._rng.choice(("exact", "exact", "any", "off"))
        headers.append(("x-midstream-failover", failover))
        if self._rng.random() < 0.15:
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": self._rng.choice(CHATS)}]
        # One that was lost with two replicas is refused for ten minutes: no other one is to be taken for it.
        if self._sessionless:
            headers = [one for one in headers if one[0] != "x-multi-turn-session-id"]
            body["seed"] = self._chance.getrandbits(40)
        else:
            body["user"] = f"{session} {self._chance.getrandbits(40)}"
        chance = self._chance.random()
        if chance < 0.17 and self._trainer.served:
            version = "snapshot" if chance < 0.04 else "min-snapshot"
            headers += [(f"x-midstream-{version}", self._trainer.served), ("x-midstream-snapshot-wait", "20")]
        return body, headers

    async def ask(self, body: dict[str, Any], headers: Any = ()) -> Turn:
        if self._chance.random() < 0.03:
            # It leaves in the middle.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._chance.random() * 6.0):
                    await self.ask_once(body, headers)
            raise Broken("the client left")
        turn = await super().ask(body, headers)
        synchronous = self._trainer.synchronous_since
        if turn.error is None and turn.done:
            crossed = len(set(turn.labels)) > 1 and not turn.resumed
            if crossed and synchronous is not None and turn.begun_at > synchronous:
                raise Wrong(f"several snapshots in a stream of a synchronous deployment: {turn}")
            asked = (body["max_tokens"], body["seed"], body["temperature"], "messages" in body)
            self._real.check_drawn(turn, asked)
        turn.greedy = body["temperature"] == 0.0
        # Nothing keeps its requests together.
        turn.pinned = turn.pinned or self._sessionless
        return turn

    def _refused(self, status: int, text: bytes, *, pinned: bool) -> Exception:
        code = json.loads(text)["error"]["code"]
        told = f"status {status} {code}"
        in_season = {409} if pinned else set[int]()
        if self._trainer.swaps_synchronously(self._begun):
            in_season.add(425)
        allowed = in_season if self.undisturbed() else DOCUMENTED
        if status not in allowed:
            return Wrong(f"{told}, and nothing had happened: {text[:400]!r}")
        return Broken(told)


class S3Bucket:
    """The simulated bucket's way to put objects, into a real one. keep: snapshots that stay there."""

    def __init__(self, server: S3Server) -> None:
        self._server = server

    def put(self, url: str, data: bytes, _: float) -> None:
        parts = urlsplit(url)
        self._server.put(parts.netloc, unquote(parts.path).lstrip("/"), data)


class Publisher:
    """Signals one snapshot after another, of every form, with every cache policy, under both transitions."""

    def __init__(
        self,
        port: int,
        server: S3Server,
        url: str,
        weights: Weights,
        oracle: Oracle,
        rng: random.Random,
        counts: Counter[str],
        calm_since: Callable[[float], bool],
        found: list[str],
    ) -> None:
        self._port, self._rng, self._oracle, self._counts = port, rng, oracle, counts
        self._calm_since, self._found = calm_since, found
        self._trainer = Trainer(
            port,
            S3Bucket(server),
            url,
            weights,
            oracle,
            rng,
            lambda _: None,
            self._note,  # type: ignore[arg-type]
        )
        self.over = False
        #: The newest snapshot that all replicas served.
        self.served = ""
        self.swaps = 0
        #: Since when every swap that can meet a request is a synchronous one; None: they are not.
        self.synchronous_since: float | None = None
        #: What was asked for last.
        self._synchronous = False
        #: Times between which some swap may be a synchronous one.
        self._periods: list[list[float]] = []

    def _note(self, what: str) -> None:
        self._counts[what] += 1

    def swaps_synchronously(self, since: float) -> bool:
        """Whether a swap since then may have been a synchronous one."""
        return any(end >= since for _, end in self._periods)

    async def run(self, pause_s: float) -> None:
        clock = asyncio.get_running_loop().time
        for number in itertools.count():
            if self.over:
                return
            if number % 6 == 4:
                await self._change_transition(synchronous=not self._synchronous)
            form = "full" if number < 2 else self._rng.choice(FORMS)
            value = {"weights": self._rng.randrange(4), "policy": self._rng.choice(POLICIES)}
            begun, before = clock(), len(self._oracle.signals)
            try:
                await self._trainer.signal({**value, "again": form == "again", "form": form})
                if form != "torn" and len(self._oracle.signals) > before:
                    await self._ready(self._oracle.signals[-1].snapshot, begun)
            except Wrong as error:
                self._found.append(f"trainer: {error}")
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))

    async def _change_transition(self, *, synchronous: bool) -> None:
        clock = asyncio.get_running_loop().time
        path = f"{DEPLOYMENT}?updateMask=hotLoadTransitionType"
        body = {"hotLoadTransitionType": "SYNC" if synchronous else "ASYNC"}
        if synchronous:
            # Also when its answer is lost.
            self._periods.append([clock(), float("inf")])
        self._synchronous, self.synchronous_since = synchronous, None
        with contextlib.suppress(Broken):
            answer = await exchange(self._port, "PATCH", path, body)
            self._note(f"transition: {body['hotLoadTransitionType'].lower()} {answer.status}")
            if answer.status != 200:
                self._synchronous = not synchronous
                return
            for period in () if synchronous else self._periods:
                # A swap that has begun may still be on its way.
                period[1] = min(period[1], clock() + READY_S)

    async def _ready(self, identity: str, begun: float) -> None:
        clock = asyncio.get_running_loop().time
        while not self.over:
            with contextlib.suppress(Broken):
                rows = (await exchange(self._port, "GET", HOT_LOAD)).json().get("replicas", ())
                if rows and all(
                    row["readiness"] and row["current_snapshot_identity"] == identity for row in rows
                ):
                    self.served = identity
                    self.swaps += 1
                    if self._synchronous and self.synchronous_since is None:
                        # The swaps that were asked for before are over.
                        self.synchronous_since = clock()
                    return
            if self._calm_since(begun) and clock() - begun > READY_S:
                self._found.append(f"{identity} is not served {READY_S:g} s after its signal: {rows}")
                return
            if clock() - begun > 2 * READY_S:
                return
            await asyncio.sleep(0.3)


class Hostile:
    """Requests that no client should send. Each is refused, or its connection is closed; none costs another one anything."""

    def __init__(
        self,
        port: int,
        body_max: int,
        rng: random.Random,
        counts: Counter[str],
        calm_since: Callable[[float], bool],
        found: list[str],
    ) -> None:
        self._port, self._max, self._rng, self._counts = port, body_max, rng, counts
        self._calm_since, self._found = calm_since, found
        self.over = False

    async def run(self, pause_s: float) -> None:
        kinds = (
            self._declared, self._large, self._values, self._numbers, self._deep, self._malformed, self._schema, self._framing,
            self._left, self._slow, self._parts, self._sample, self._records,
        )  # fmt: skip
        for kind in itertools.cycle(kinds):
            if self.over:
                return
            await self._one(kind.__name__.strip("_"), *kind())
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))

    def _post(
        self, body: bytes, length: int | None = None, path: str = "/v1/completions", kind: str = "json"
    ) -> bytes:
        size = len(body) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nhost: soak\r\ncontent-type: application/{kind}\r\ncontent-length: {size}\r\n\r\n"
        return head.encode() + body

    # Each: what is sent, how long to wait before the connection is left, and bytes/s.
    def _declared(self) -> tuple[bytes, float, int]:
        return self._post(b"{", self._max + 1), 20.0, 0

    def _large(self) -> tuple[bytes, float, int]:
        return self._post(b'{"model": "sim", "prompt": "' + b"x" * (self._max - 64) + b'"}'), 60.0, 0

    def _values(self) -> tuple[bytes, float, int]:
        return self._post(b'{"model": "sim", "prompt": [' + b"1," * (self._max // 4) + b"1]}"), 60.0, 0

    def _numbers(self) -> tuple[bytes, float, int]:
        return self._post(b'{"model": "sim", "prompt": [' + b"1," * 1_000_000 + b"1]}"), 60.0, 0

    def _deep(self) -> tuple[bytes, float, int]:
        return self._post(b'{"model": "sim", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), 60.0, 0

    def _malformed(self) -> tuple[bytes, float, int]:
        return self._post(bytes(self._rng.randrange(256) for _ in range(2000))), 20.0, 0

    def _schema(self) -> tuple[bytes, float, int]:
        names = {
            f"p{self._rng.getrandbits(60):x}": {"type": "string", "pattern": "(a|b)*c{1,900}"}
            for _ in range(40)
        }
        schema = {"type": "object", "properties": names, "not": {}}
        body = {"model": "sim", "prompt": "x", "max_tokens": 1}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        return self._post(json.dumps(body).encode()), 60.0, 0

    def _framing(self) -> tuple[bytes, float, int]:
        return (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            20.0,
            0,
        )

    def _left(self) -> tuple[bytes, float, int]:
        return self._post(b"x" * (self._max // 2), self._max), 0.5, 0

    def _slow(self) -> tuple[bytes, float, int]:
        return self._post(b"x" * 40, 10_000), 45.0, 1

    def _parts(self) -> tuple[bytes, float, int]:
        """A million datums without anything, for a model that nobody knows."""
        body = b"\x0a\x01m\x10\x01" + b"\x1a\x00" * 1_000_000
        return self._post(body, path="/api/v1/forward_backward", kind="x-protobuf"), 60.0, 0

    def _sample(self) -> tuple[bytes, float, int]:
        tokens = b"1," * 1_000_000 + b"1"
        body = b'{"sampling_params":{},"prompt":{"chunks":[{"tokens":[' + tokens + b"]}]}}"
        return self._post(body, path="/api/v1/asample"), 60.0, 0

    def _records(self) -> tuple[bytes, float, int]:
        message = b'{"role": "user", "content": "x", "name": "n"},'
        body = b'{"model": "sim", "messages": [' + message * 100_000 + b"{}]}"
        return self._post(body, path="/v1/chat/completions"), 60.0, 0

    async def _one(self, kind: str, data: bytes, wait_s: float, rate: int) -> None:
        clock = asyncio.get_running_loop().time
        begun, writer = clock(), None
        try:
            async with asyncio.timeout(wait_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                answered = asyncio.create_task(reader.readline())
                try:
                    await self._write(writer, data, rate, answered)
                    line = await answered
                finally:
                    answered.cancel()
            status = int(line.split()[1]) if line else 0
        except OSError:
            # TimeoutError is one, too: the client leaves.
            status = 0
        finally:
            if writer is not None:
                writer.close()
        self._counts[f"hostile {kind}: {status or 'closed'}"] += 1
        allowed = status == 0 or 400 <= status < 500 or (status == 503 and not self._calm_since(begun))
        if not allowed:
            self._found.append(f"a hostile request ({kind}) is answered {status}")

    async def _write(
        self, writer: asyncio.StreamWriter, data: bytes, rate: int, answered: asyncio.Task[bytes]
    ) -> None:
        if not rate:
            writer.write(data)
            await writer.drain()
            return
        head, _, body = data.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        for at in range(0, len(body), rate):
            if answered.done():
                return
            writer.write(body[at : at + rate])
            await asyncio.sleep(1.0)


def patient(seconds: float) -> None:
    """A real server on a busy machine takes longer than a simulated one."""
    simclient.PATIENCE_S = seconds
