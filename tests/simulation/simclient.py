"""The users of a simulated server: rollout clients, a trainer, an operator. What they are answered is checked on the spot."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from simengine import expected

#: A request or a turn takes so long at most, or is given up.
PATIENCE_S = 40.0
#: Statuses that say "not now".
RETRYABLE = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
#: Headers that ask for a version.
VERSIONS = frozenset(("x-midstream-snapshot", "x-midstream-min-snapshot"))
#: The code of an error that nobody foresaw.
INTERNAL = "internal_error"
#: What the engine says of a request for what it does not have. A replica sends it none.
UNKNOWN = "no such weights"


class Broken(Exception):
    """An answer that its client cannot use; it may ask again."""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


async def exchange(
    port: int, method: str, path: str, body: Any = None, headers: Sequence[tuple[str, str]] = ()
) -> Answer:
    """One request over a connection of its own, its response read whole. body: bytes, or of JSON. Raises Broken."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await _sent(port, method, path, body, headers)
            try:
                status, found = await _head(reader)
                answer = Answer(status, found, b"".join([piece async for piece in _body(reader, found)]))
                if status == 500:
                    raise Wrong(f"{method} {path} is answered {answer}: {body}")
                return answer
            finally:
                writer.close()
    except TimeoutError as error:
        raise Wrong(f"{method} {path} hangs: {body}") from error
    except (OSError, asyncio.IncompleteReadError) as error:
        raise Broken(repr(error)) from error


async def _sent(
    port: int,
    method: str,
    path: str,
    body: Any,
    headers: Sequence[tuple[str, str]],
    kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None,
    *,
    stays: bool = False,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = kept or await asyncio.open_connection("127.0.0.1", port)
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: sim", f"content-length: {len(data)}"]
    lines += [] if stays else ["connection: close"]
    lines += [f"{name}: {value}" for name, value in headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(lines[0].split()[1])
    return status, {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])
    }


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
    #: Why it went there, as the gateway says.
    route: str = ""
    pinned: bool = False
    #: Asked for at temperature 0.
    greedy: bool = False
    begun_at: float = 0.0
    ended_at: float = 0.0
    #: Of records by reference: what names a file, and the sampled tokens, which the answer has itself.
    reference: dict[str, Any] | None = None
    in_files: dict[str, Any] | None = None
    masks_in_files: dict[str, Any] | None = None
    sampled: list[int] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        if not self.prompt:
            # Of a chat, whose tokens the server knows first.
            told = [event, *event["choices"]]
            self.prompt = next((ids for one in told if (ids := one.get("prompt_token_ids"))), [])
        if isinstance(seam := event.get("midstream"), dict) and "resumed" in seam:
            self.resumed.append(seam["resumed"])
        self.reference = event.get("record_reference", self.reference)
        label = event["model"].rpartition("@")[2]
        for choice in event["choices"]:
            entries = (choice.get("logprobs") or {}).get("content") or []
            for entry in entries:
                self.tokens.append(entry["token_id"])
                self.logprobs.append(entry["logprob"])
                route = entry.get("routing_matrix")
                self.routes.append(None if route is None else base64.b64decode(route))
                self.labels.append(label)
            self.sampled += choice.get("token_ids") or ()
            if choice.get("logprobs") is None:
                self.labels += [label] * (len(self.sampled) - len(self.labels))
            self.in_files = choice.get("routing_references", self.in_files)
            self.masks_in_files = choice.get("sampling_mask_references", self.masks_in_files)
            self.finish = choice.get("finish_reason") or self.finish
            if "kv_snapshots" in choice:
                self.kv = _spans(choice["kv_snapshots"])
            self.earlier += [
                (e["tokens"], _spans(e["kv_snapshots"])) for e in choice.get("earlier_kv_snapshots", ())
            ]
        usage = event.get("usage") or {}
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached)


def _spans(spans: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(span["snapshot"], span["start"], span["end"]) for span in spans]


class Wrong(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Signal:
    """One that was acknowledged. policy: all, new_session or none. age_max: its bound for the age of cached KV."""

    generation: int
    snapshot: str
    policy: str
    age_max: int | None = None


class Oracle:
    """What may be true of an answer. weights: of each snapshot name. synchronous: streams end before a swap.

    unsure: names of signals whose answers were lost, so that nothing is known of their order.
    """

    def __init__(self, *, synchronous: bool = False) -> None:
        self.weights: dict[str, int] = {}
        self.signals: list[Signal] = []
        self.unsure: set[str] = set()
        self.checked_tokens = 0
        #: Replicas that were seen ready on something that was signalled.
        self.left_base: set[str] = set()
        self._synchronous = synchronous
        #: Whether no process has met with anything: then a replica's name stands for one boot.
        self.undisturbed: Callable[[], bool] = lambda: False
        #: Whether the ledger may have been deleted: the base weights may then come behind any snapshot.
        self.forgotten = False
        #: By replica and snapshot, when it last came to serve there: again, where the replica fell back meanwhile.
        self.committed_at: Mapping[tuple[str, str], float] = {}
        #: When an answer first showed that a replica serves a snapshot.
        self._served_at: dict[tuple[str, str], float] = {}

    def forget(self) -> None:
        """The ledger is about to be deleted."""
        self.forgotten = True

    def signals_begin(self, name: str) -> None:
        """A signal of this snapshot is going to be sent."""

    def acknowledged(self, now: float) -> None:
        """The signal was taken."""

    def lost(self) -> None:
        """What came of a signal is not known."""

    def generations(self, snapshot: str) -> tuple[int, int] | None:
        """The first and the last of a snapshot; None where they are not known."""
        if snapshot == "base":
            return None if self.forgotten else (0, 0)
        found = [signal.generation for signal in self.signals if signal.snapshot == snapshot]
        return (min(found), max(found)) if found and snapshot not in self.unsure else None

    def check(self, turn: Turn, max_tokens: int, *, routes: bool = False) -> None:
        """Of a response that came to its end. Raises Wrong."""
        self.check_part(turn, max_tokens)
        if routes and None in turn.routes:
            raise Wrong(f"a token without the route that was asked for: {turn}")
        if len(turn.tokens) != max_tokens or turn.finish != "length":
            raise Wrong(f"{len(turn.tokens)} of {max_tokens} tokens, finish {turn.finish}: {turn}")
        if turn.kv is None:
            raise Wrong(f"no kv_snapshots: {turn}")
        self._check_numbers(turn, [*turn.earlier, (len(turn.tokens), turn.kv)])
        self.checked_tokens += len(turn.tokens)

    def check_part(self, turn: Turn, max_tokens: int) -> None:
        """Of a response that broke off somewhere, or is whole. Raises Wrong."""
        if len(turn.tokens) > max_tokens:
            raise Wrong(f"{len(turn.tokens)} tokens, at most {max_tokens} were asked for: {turn}")
        strange = set(turn.labels) - set(self.weights)
        if strange:
            raise Wrong(f"labels that nobody signalled: {strange}")
        self._check_order(turn)

    def _check_order(self, turn: Turn) -> None:
        for before, after in itertools.pairwise(turn.labels):
            one, other = self.generations(before), self.generations(after)
            if before != after and one and other and one[0] >= other[1]:
                raise Wrong(f"{before} {one} is followed by {after} {other}: {turn}")
        if self._synchronous and len(set(turn.labels)) > 1 and not turn.resumed:
            raise Wrong(f"several snapshots in a stream of a synchronous deployment: {turn}")

    def certain(self, turn: Turn) -> bool:
        """Whether the request came after the switch to the snapshot that served it: not before, to wait for it there."""
        served = turn.replica, turn.labels[0]
        since = self._served_at.setdefault(served, turn.ended_at)
        return turn.begun_at > max(since, self.committed_at.get(served, 0.0)) and not turn.resumed

    def check_reuse(self, turn: Turn, begun: str | None) -> None:
        """That cached KV was computed since the last signal that forbade what was before it.

        begun: the first label of the session, where that is certain. Raises Wrong.
        """
        served = self.generations(turn.labels[0])
        if not self.certain(turn) or turn.kv is None or served is None:
            return
        session = None if begun is None else self.generations(begun)
        for snapshot, start, _ in turn.kv:
            computed = self.generations(snapshot)
            if start >= turn.cached or computed is None or snapshot == turn.labels[0]:
                continue
            for signal in self.signals:
                after = computed[1] < signal.generation <= served[0]
                new = session is not None and session[0] >= signal.generation
                if after and (signal.policy == "all" or (signal.policy == "new_session" and new)):
                    raise Wrong(
                        f"KV of {snapshot} {computed} is reused under {turn.labels[0]} in spite of {signal}: {turn}"
                    )
            self._check_age(turn, snapshot, computed[1], served[0])

    def _check_age(self, turn: Turn, computed_under: str, computed: int, served: int) -> None:
        """That the reused KV is no more commits old than the signal of what serves allows. Raises Wrong."""
        signals = [signal for signal in self.signals if signal.snapshot == turn.labels[0]]
        if len(signals) != 1 or (most := signals[0].age_max) is None:
            return
        seen = [name for replica, name in self._served_at if replica == turn.replica]
        known = [found for name in seen if (found := self.generations(name)) is not None]
        commits = sum(computed < first and last <= served for first, last in known)
        commits = commits if self.undisturbed() else 1
        if commits > most:
            raise Wrong(
                f"KV of {computed_under} is {commits} commits old, at most {most} are allowed: {turn}"
            )

    def expected_of(
        self, turn: Turn, until: int, spans: list[tuple[str, int, int]]
    ) -> list[tuple[float, bytes, bytes]]:
        """Logprob, route and mask of its first tokens, up to `until`, over KV computed as `spans` say."""
        tokens, first = (turn.prompt + turn.tokens)[: len(turn.prompt) + until], len(turn.prompt)
        return expected(tokens, first, turn.labels, spans, self.weights.__getitem__)

    def _check_numbers(self, turn: Turn, parts: list[tuple[int, list[tuple[str, int, int]]]]) -> None:
        first = 0
        for until, spans in parts:
            found = self.expected_of(turn, until, spans)
            for number in range(first, until):
                logprob, route, _ = found[number]
                if turn.logprobs[number] != logprob or turn.routes[number] not in (None, route):
                    raise Wrong(
                        f"token {number} is not what {turn.labels[number]} over {spans} computes: "
                        f"{turn.logprobs[number]} instead of {logprob}; {turn}"
                    )
            first = until


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
        self.model = "sim"
        #: What half of its trajectories begin with.
        self.opening: list[int] = []
        #: Whether no process that serves, and no connection, has met with anything in this history.
        self.undisturbed: Callable[[], bool] = lambda: False
        #: What has come of the newest response.
        self._part: Turn | None = None
        #: A connection that is kept for the next request.
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self) -> None:
        number = 0
        while not self.over:
            number += 1
            await self._trajectory(f"{self.name}-{number}")

    async def _trajectory(self, session: str) -> None:
        ids = [self._rng.randint(1, 249) for _ in range(self._rng.randint(1, 24))]
        if self.opening and self._rng.random() < 0.5:
            ids = [*self.opening, *ids]
        begun, replica = None, ""
        for number in range(self._rng.randint(1, 4)):
            if self.over:
                return
            turn = await self._turn(session, ids)
            if turn is None:
                # As clients do that were refused.
                await asyncio.sleep(0.1 + self._rng.random() * 0.4)
                return
            if turn.route == "priced":
                self._count("turn: moved, as that cost less than to wait")
            if not replica or turn.route == "priced":
                replica = turn.replica
            if number == 0 and self._oracle.certain(turn):
                begun = turn.labels[0]
            self._oracle.check_reuse(turn, begun)
            if turn.replica != replica and not turn.pinned and self.undisturbed():
                raise Wrong(
                    f"session {session} went from {replica} to {turn.replica}, and nothing had happened to it"
                )
            ids = [*ids, *turn.tokens, *(self._rng.randint(1, 249) for _ in range(self._rng.randint(0, 6)))]
            await asyncio.sleep(self._rng.random() * 0.3)
        if self._rng.random() < 0.2:
            await self._close(session)

    async def _close(self, session: str) -> None:
        try:
            answer = await exchange(self._port, "DELETE", f"/v1/sessions/{session}")
        except Broken as error:
            self._count(f"close: {str(error)[:60]}")
        else:
            self._count(f"close: {answer.status}")

    def request(self, session: str, ids: list[int]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Body and headers of the session's next turn, behind these tokens."""
        most = self._rng.randint(1, 24)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": most,
            "logprobs": True,
            "return_token_ids": True,
        }
        body |= {"perf_metrics_in_response": True, "ignore_eos": True, "seed": self._rng.randint(0, 2**40)}
        body |= {"include_routing_matrix": self._rng.random() < 0.5, "stream": self._rng.random() < 0.8}
        body["temperature"] = 1.0
        headers = [("x-multi-turn-session-id", session)]
        pin = self._pin()
        if pin is not None:
            headers += [("x-midstream-snapshot", pin), ("x-midstream-snapshot-wait", "2")]
        return body, headers

    async def _turn(self, session: str, ids: list[int]) -> Turn | None:
        body, headers = self.request(session, ids)
        most, pin = body["max_tokens"], dict(headers).get("x-midstream-snapshot")
        left_base = set(self._oracle.left_base)
        try:
            turn = await self.ask(body, headers)
        except Broken as error:
            if self._part is not None:
                self._oracle.check_part(self._part, most)
            self._count(f"turn: {str(error)[:60]}")
            return None
        if turn.error is not None:
            self._oracle.check_part(turn, most)
            unforeseen = turn.error["code"] == INTERNAL or UNKNOWN in turn.error["message"]
            if self.undisturbed() or unforeseen:
                raise Wrong(f"a stream ended with an error: {turn}")
            self._count(f"turn: error {turn.error.get('code')}")
            return None
        self._oracle.check(turn, most, routes=body["include_routing_matrix"])
        base = "base" in turn.labels and not self._oracle.forgotten
        if base and turn.replica in left_base and not turn.resumed:
            raise Wrong(f"the base weights serve again: {turn}")
        if pin is not None and set(turn.labels) != {pin} and not turn.resumed:
            raise Wrong(f"pinned to {pin}: {turn.labels}")
        self._count(
            "turn: whole"
            + (", resumed" if turn.resumed else "")
            + (", crossed" if len(set(turn.labels)) > 1 else "")
        )
        return turn

    async def ask(self, body: dict[str, Any], headers: Sequence[tuple[str, str]] = ()) -> Turn:
        """Raises Broken."""
        if self._rng.random() < 0.03:
            # It leaves in the middle.
            try:
                async with asyncio.timeout(self._rng.random() * 0.2):
                    await self.ask_once(body, headers)
            except TimeoutError:
                pass
            raise Broken("the client left")
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.ask_once(body, headers)
        except TimeoutError as error:
            raise Wrong(f"a request hangs: {body} {self._part}") from error

    async def ask_once(self, body: dict[str, Any], headers: Sequence[tuple[str, str]]) -> Turn:
        clock = asyncio.get_running_loop().time
        prompt, path = (
            list(body.get("prompt", ())),
            "/v1/completions" if "prompt" in body else "/v1/chat/completions",
        )
        turn = Turn(prompt, begun_at=clock(), pinned=any(name in VERSIONS for name, _ in headers))
        self._part = turn
        kept, self._kept = self._kept, None
        stays = self._rng.random() < 0.7
        try:
            reader, writer = await _sent(self._port, "POST", path, body, headers, kept, stays=stays)
        except OSError as error:
            raise self._lost(error) from error
        whole = False
        try:
            status, found = await _head(reader)
            turn.replica = found.get("x-midstream-replica", "")
            turn.route = found.get("x-midstream-route-reason", "")
            if status != 200:
                text = b"".join([piece async for piece in _body(reader, found)])
                raise self._refused(status, text, pinned=turn.pinned)
            if body["stream"]:
                await self._read_stream(reader, found, turn)
            else:
                self._read_plain(b"".join([piece async for piece in _body(reader, found)]), turn)
            whole = stays and found.get("connection") != "close"
        except (OSError, asyncio.IncompleteReadError) as error:
            if turn.error is None:
                raise self._lost(error) from error
        finally:
            if whole:
                self._kept = (reader, writer)
            else:
                writer.close()
        turn.ended_at = clock()
        return turn

    def _lost(self, error: Exception) -> Exception:
        if self.undisturbed():
            return Wrong(f"a connection was lost, and nothing had happened: {error!r}")
        return Broken(type(error).__name__)

    def _refused(self, status: int, text: bytes, *, pinned: bool) -> Exception:
        told = json.loads(text)["error"]
        code = INTERNAL if UNKNOWN in told["message"] else told["code"]
        # A policy may be there no more, or not yet.
        expected = RETRYABLE | {422} | ({404} if self.model != "sim" else set())
        refused = status not in expected or (status == 409 and not pinned)
        if refused or code == INTERNAL or (self.undisturbed() and status >= 500):
            return Wrong(f"status {status}: {text[:400]!r}")
        return Broken(f"status {status} {code}")

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
                        turn.take(msgspec.json.decode(line[6:]))
        if not turn.done and turn.error is None:
            raise Wrong(f"a response that is whole without its end: {turn}")

    def _read_plain(self, body: bytes, turn: Turn) -> None:
        answer = msgspec.json.decode(body)
        turn.take(answer)
        spans = [span for choice in answer["choices"] for span in choice.get("snapshots", ())]
        if spans:
            turn.labels = [span["snapshot"] for span in spans for _ in range(span["start"], span["end"])]
        turn.done = True
