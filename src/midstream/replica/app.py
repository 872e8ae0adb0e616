"""What each path of a replica's port does: inference, report, events, sessions, desired snapshot, hints.

Owns: the mapping between HTTP exchanges (http/http1.py) and replica/service.py, and nothing else.
Always holds: a request without the right token is refused before its body. Every error has the one shape of core/errors.py.
The head of a stream is sent with its first event, so an earlier error has its own status. A stream that fails later ends
with an error event and without [DONE]. A client that disconnects ends its generation at once, streaming or not.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from midstream.core.decoding import message_of
from midstream.core.errors import (
    AnotherBoot,
    MidstreamError,
    NotFound,
    ReplicaUnavailable,
    StreamGivenUp,
    Unauthorized,
)
from midstream.core.headers import (
    HEADER_BOOT,
    HEADER_DEPLOYMENT,
    HEADER_IGNORED_FIELDS,
    HEADER_MOVED,
    HEADER_POLICY,
    HEADER_TOKEN,
)
from midstream.core.price import RoomOffer
from midstream.core.responses import ResponseAsked
from midstream.core.resumption import HEADER_FAILOVER, HEADER_RESUMABLE, PATH_RESUME, given_up, read_resume
from midstream.core.sessions import SessionsAsked, SessionsReport
from midstream.core.traces import RewardAsked
from midstream.core.tracing import SpanRecord, Tracer
from midstream.core.transfer import TRANSFER_PATH
from midstream.core.types import Desired, Hint, Pause, PolicyEnd
from midstream.core.wires import PREFIX, WIRES, WirePath, wire_of
from midstream.http.budget import Budget, BudgetBounds
from midstream.http.http1 import ClientConnection, Exchange
from midstream.http.message import Request
from midstream.replica import control_answers
from midstream.replica.control import TakenExchange, TraceExchange, TransferExchange, TurnsExchange
from midstream.replica.earlier import PATH_TAKEN, PATH_TURNS, EarlierTurns
from midstream.replica.exchange import (
    Answer,
    FailedExchange,
    InstantExchange,
    Outbox,
    TaskExchange,
    line_of,
)
from midstream.replica.kv_exchange import KvExchange
from midstream.replica.kv_travel import PATH_KV
from midstream.replica.peer_files import FILES_PREFIX, PeerFileExchange
from midstream.replica.replica import Replica
from midstream.replica.request.unknown import header_value
from midstream.replica.response.generation import Generation
from midstream.replica.service import Service
from midstream.replica.sessions import Feed, Sessions
from midstream.replica.spans import ClientLeft, request_span
from midstream.replica.wire.base import TextCall
from midstream.replica.wire.table import GENERATING, TEXT_CALLS, wire_to_resume

log = logging.getLogger(__name__)

#: The shares of several gateways.
UNFINISHED_BODY_BYTES_MAX = 2**30
#: Changes closer together than this share one line of the event stream, but for the end of a load.
REPORT_GAP_S = 0.05
REPORT_AT_LEAST_EVERY_S = 1.0
#: Sessions are reported sooner: another gateway may soon get the session's next turn.
SESSIONS_GAP_S = 0.005
_TOKEN, _BOOT = HEADER_TOKEN.encode(), HEADER_BOOT.encode()
OF_SESSIONS = "a question about sessions"
#: Makes the exchange of a request.
Serves = Callable[[Request, ClientConnection], Exchange]
_NO_TURNS = msgspec.json.encode(Sessions().trajectories())

#: Of a stream's rest: only its gateway reads why it does not begin.
RESUMED = WirePath("resumed", "Answers the rest of a stream.", True)


class MethodNotAllowed(MidstreamError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self._allowed = allowed

    def headers(self) -> dict[str, str]:
        return {"allow": self._allowed}


class ReplicaApp:
    """The http1.Service of one replica, which the caller starts and closes. token: what a caller must send; "": nothing."""

    def __init__(self, replica: Replica, token: str = "") -> None:
        self.draining = False
        self.budget = Budget(BudgetBounds(unfinished_body_bytes=UNFINISHED_BODY_BYTES_MAX))
        self.clients: dict[ClientConnection, None] = {}
        self._all_left = asyncio.Event()
        self._all_left.set()
        self._token = token.encode()
        self._replica = replica
        replica.earlier = EarlierTurns(replica.trees, token)
        replica.travel.speak(token)
        outbox = Outbox()
        #: By path: the method, and what makes the exchange.
        self._routes: dict[bytes, tuple[bytes, Serves]] = {
            **{path.encode(): (b"GET", serves) for path, serves in _asked(replica).items()},
            **{path.encode(): (b"POST", serves) for path, serves in _controlled(replica).items()},
            **{path.encode(): (b"POST", _inference(replica, wire, outbox)) for path, wire in WIRES.items()},
        }
        self._routes[PATH_RESUME.encode()] = (
            b"POST",
            lambda request, client: ResumeExchange(request, client, replica, RESUMED, outbox),
        )

    def __repr__(self) -> str:
        return f"ReplicaApp({len(self.clients)} connections)"

    def connected(self, client: ClientConnection) -> None:
        self.clients[client] = None
        self._all_left.clear()

    def disconnected(self, client: ClientConnection) -> None:
        self.clients.pop(client, None)
        if not self.clients:
            self._all_left.set()

    async def all_left(self) -> None:
        """Wait until no client connection is open."""
        await self._all_left.wait()

    def check_head(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> None:
        if self._token and not hmac.compare_digest(headers.get(_TOKEN, b""), self._token):
            raise Unauthorized("this replica answers its gateway only")

    def refused(self, error: MidstreamError, request: Request | None, client: ClientConnection) -> None:
        log.debug("refused: %s", error)
        wire = None if request is None else wire_of(request.target.partition(b"?")[0])
        if wire is not None:
            error.shape = wire.errors

    def exchange(self, request: Request, client: ClientConnection) -> Exchange:
        path = request.target.partition(b"?")[0]
        if path.startswith(FILES_PREFIX) and request.method in (b"GET", b"HEAD"):
            return PeerFileExchange(request, client, self._replica.source.chains)
        if path.startswith(b"/replica/") and not self._replica.had_boot(request.first.get(_BOOT)):
            raise AnotherBoot("the replica restarted after this call was sent to it; retry this request")
        method, make = self._routes.get(path, (request.method, _nothing_here))
        if method != request.method:
            error = MethodNotAllowed(f"{line_of(request)}: Method Not Allowed", method.decode())
            return FailedExchange(request, client, error)
        return make(request, client)


class InferenceExchange(TaskExchange):
    def __init__(
        self, request: Request, client: ClientConnection, replica: Replica, wire: WirePath, outbox: Outbox
    ) -> None:
        super().__init__(request, client)
        self._replica = replica
        self._outbox = outbox
        self._wire = wire
        self._generation: Generation | None = None
        # Where spans are exported: when the request came, and the error it got.
        self._came_s = 0.0 if replica.tracer is None else replica.clock()
        # What it failed by, of its span. Never the error itself: that holds its frames, those hold the decoded body, and this
        # exchange among them.
        self._failed: type[MidstreamError] | None = None
        self._headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in request.first.items()}
        self._fixed = {
            "x-request-id": self._headers.get("x-request-id") or uuid.uuid4().hex,
            "fireworks-backend-host": replica.name,
            HEADER_DEPLOYMENT: replica.names.deployment,
        }
        if wire.errors == "anthropic":
            # As its clients look for it.
            self._fixed["request-id"] = self._fixed["x-request-id"]

    def start(self) -> None:
        tracer = self._replica.tracer
        run = self._run() if tracer is None else self._traced(tracer)
        self._task = asyncio.get_running_loop().create_task(run)

    async def _traced(self, tracer: Tracer) -> None:
        try:
            await self._run()
        except asyncio.CancelledError:
            self._failed = self._failed or ClientLeft
            raise
        finally:
            tracer.record(self._span(), self._headers)

    def _span(self) -> SpanRecord:
        now_s, replica = self._replica.clock(), self._replica
        times = (self._came_s, now_s, now_s - replica.monotonic())
        made = self._generation
        return request_span(self._wire.name, self._headers, replica.name, made, self._failed, times)

    async def _answer(self) -> None:
        policy, boot = self._headers.get(HEADER_POLICY, ""), self._headers.get(HEADER_BOOT)
        earlier, moved = self._replica.earlier, HEADER_MOVED in self._headers
        if moved or earlier.fetching:
            await earlier.bring(self._headers)
        with self._replica.serves(policy, boot) as service:
            async with self._admitted(service) as generation:
                self._generation = generation
                if moved:
                    earlier.let_in(self._headers)
                self._fixed.update(generation.timings.waited)
                if generation.ignored:
                    self._fixed[HEADER_IGNORED_FIELDS] = header_value(generation.ignored)
                if generation.checked.stream:
                    await generation.stream(self)
                    self._end()
                else:
                    data = await generation.plain()
                    self._whole(200, data, generation.headers(done=True))

    def _admitted(self, service: Service) -> AbstractAsyncContextManager[Generation]:
        return service.admitted(GENERATING[self._wire.name], self._request.body, self._headers)

    @property
    def _of_gateway(self) -> bool:
        return HEADER_BOOT in self._headers or HEADER_RESUMABLE in self._headers

    def _fail(self, error: MidstreamError) -> None:
        """A gateway's stream is broken off: the gateway resumes it on another replica or ends it, and counts what was lost with
        the request. If the replica gives the stream up, the gateway learns so and counts no loss."""
        self._failed = type(error)
        error.shape = self._wire.errors
        if self._started and self._of_gateway and isinstance(error, ReplicaUnavailable):
            unwritten = self._outbox.take(self._client)
            if isinstance(error, StreamGivenUp) and self._generation and self._generation.resumable:
                self._client.end_short(unwritten + self._framed(given_up()))
            else:
                self._client.reset()
        else:
            super()._fail(error)

    def write(self, data: bytes) -> None:
        """Events of the stream; the head goes out with the first of them."""
        if self._started:
            # As _framed: each token passes here.
            framed = data if self._request.http10 else b"%x\r\n%b\r\n" % (len(data), data)
            self._outbox.add(self._client, framed)
            return
        fixed = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        # Else nginx keeps events back until it has some KiB of them.
        fixed["x-accel-buffering"] = "no"
        assert self._generation is not None
        if self._generation.resumable:
            fixed[HEADER_RESUMABLE] = "1"
        elif HEADER_RESUMABLE in self._headers:
            # The client sees that a loss would end it.
            fixed[HEADER_FAILOVER] = "off"
        self._begin({**fixed, **self._generation.headers(done=False)}, data)

    def client_gone(self) -> None:
        self._outbox.take(self._client)
        super().client_gone()

    def cut(self, reason: str) -> None:
        self._failed = ReplicaUnavailable
        self._outbox.take(self._client)
        super().cut(reason)

    def _unwritten(self) -> bytes:
        return self._outbox.take(self._client)


class TextExchange(TaskExchange):
    """A question about text that the replica's tokenizer or chat template answers."""

    def __init__(
        self, request: Request, client: ClientConnection, replica: Replica, wire: WirePath, call: TextCall
    ) -> None:
        super().__init__(request, client)
        self._replica, self._wire, self._call = replica, wire, call

    async def _answer(self) -> None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in self._request.first.items()}
        with self._replica.serves(headers.get(HEADER_POLICY, ""), headers.get(HEADER_BOOT)) as service:
            answer = await self._call.answer(service, self._request.body, headers)
            self._whole(200, msgspec.json.encode(answer), {})

    def _fail(self, error: MidstreamError) -> None:
        error.shape = self._wire.errors
        super()._fail(error)


class ResumeExchange(InferenceExchange):
    """A stream that another replica began, as a gateway knows."""

    @property
    def _of_gateway(self) -> bool:
        return True

    def _admitted(self, service: Service) -> AbstractAsyncContextManager[Generation]:
        resume = read_resume(self._request.body)
        wire = wire_to_resume(resume.path)
        # An error event in the stream is its client's.
        began_on = wire_of(resume.path.partition("?")[0].encode())
        assert began_on is not None
        self._wire = msgspec.structs.replace(self._wire, errors=began_on.errors)
        return service.admitted(wire, bytes(resume.body), self._headers, resume)


class EventsExchange(TaskExchange):
    """A line of JSON now and after every change, until the replica is closed: the report, and before it the
    changes of sessions, which are all sessions before the first report. A new session is sent in the same turn of the loop."""

    def __init__(self, request: Request, client: ClientConnection, replica: Replica) -> None:
        super().__init__(request, client)
        self._replica = replica
        self._trajectories = _NO_TURNS
        self._trajectories_at = float("-inf")
        self._feed: Feed | None = None
        self._telling = False

    async def _answer(self) -> None:
        replica, loop = self._replica, asyncio.get_running_loop()
        due, settled = loop.time(), replica.settled
        with replica.sessions.feed(self._session_begun) as feed:
            self._feed = feed
            await self._tell(msgspec.json.encode(SessionsReport(boot=replica.boot)) + b"\n")
            while not replica.closed and not feed.behind:
                # The end of a load is sent at once, since publishers wait for it.
                early = 0.0 if replica.settled != settled else due - loop.time()
                timeout_s = early if early > 0 else REPORT_AT_LEAST_EVERY_S
                changed = asyncio.create_task(replica.changed(timeout_s))
                try:
                    replica.sessions.sweep()
                    for line in replica.sessions.reports(feed):
                        await self._tell(line)
                    if early <= 0:
                        due, settled = loop.time() + REPORT_GAP_S, replica.settled
                        await self._tell(msgspec.json.encode(replica.report()) + b"\n")
                        await self._tell_trajectories()
                    await asyncio.sleep(SESSIONS_GAP_S)
                    await changed
                finally:
                    changed.cancel()
        self._feed = None
        if not self._started:
            raise ReplicaUnavailable("the replica is closed")
        self._end()

    def _session_begun(self) -> None:
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell_sessions)

    def _tell_sessions(self) -> None:
        self._telling = False
        ends = self._task.done() or self._task.cancelling()
        if self._feed is not None and self._started and self.writable and not ends:
            for line in self._replica.sessions.reports(self._feed):
                self._client.write(self._framed(line))

    async def _tell(self, line: bytes) -> None:
        if self._started:
            self._client.write(self._framed(line))
        else:
            self._begin({"content-type": "application/x-ndjson"}, line)
        if not self.writable:
            await self.drained()

    async def _tell_trajectories(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._trajectories_at < REPORT_AT_LEAST_EVERY_S:
            return
        line = msgspec.json.encode(self._replica.trajectories())
        if line != self._trajectories:
            self._trajectories, self._trajectories_at = line, now
            await self._tell(line + b"\n")


def _asked(replica: Replica) -> dict[str, Serves]:
    """By path, what a GET reads."""
    models = _at_once(lambda _: control_answers.models(replica))
    return {
        "/health": _at_once(lambda _: control_answers.health(replica)),
        "/replica/report": _at_once(lambda _: (200, replica.report())),
        "/replica/events": lambda request, client: EventsExchange(request, client, replica),
        "/v1/models": models,
        f"{PREFIX}/v1/models": models,
    }


def _controlled(replica: Replica) -> dict[str, Serves]:
    """By path, the calls of gateways and of other replicas."""

    def taking(kind: Any, what: str, answer: Callable[[Replica, Any], Answer]) -> Serves:
        return _taking(kind, what, replica, answer)

    def slow(make: Callable[[Request, ClientConnection, Replica], Exchange]) -> Serves:
        return lambda request, client: make(request, client, replica)

    return {
        "/replica/desired": taking(Desired, "a desired snapshot", control_answers.desire),
        "/replica/policy/end": taking(PolicyEnd, "the end of a policy", control_answers.end_policy),
        "/replica/sessions": taking(SessionsAsked, OF_SESSIONS, control_answers.sessions),
        "/replica/sessions/close": taking(SessionsAsked, OF_SESSIONS, control_answers.close_session),
        "/replica/responses": taking(ResponseAsked, "a question about a response", control_answers.response),
        "/replica/reward": taking(RewardAsked, "a reward", control_answers.reward),
        "/replica/abort": taking(tuple[str, ...] | None, "ids of requests", control_answers.abort),
        "/replica/reset_cache": _at_once(lambda asked: control_answers.reset_cache(replica, asked.body)),
        "/replica/hint": _noting(Hint, "a hint", replica.hint),
        "/replica/pause": _noting(Pause, "a pause", replica.pause),
        "/replica/offer": _noting(RoomOffer, "an offer", replica.budget.offered),
        "/replica/trace": slow(TraceExchange),
        PATH_TURNS: slow(TurnsExchange),
        PATH_TAKEN: slow(TakenExchange),
        PATH_KV: slow(KvExchange),
        TRANSFER_PATH: slow(TransferExchange),
    }


def _at_once(answer: Callable[[Request], Answer]) -> Serves:
    return lambda request, client: InstantExchange(request, client, answer)


def _taking(kind: Any, what: str, replica: Replica, answer: Callable[[Replica, Any], Answer]) -> Serves:
    """An endpoint whose body is a message of this kind, which refusals call `what`."""
    decoder = msgspec.json.Decoder(kind)
    return _at_once(lambda request: answer(replica, message_of(request.body, decoder, what)))


def _noting(kind: Any, what: str, note: Callable[[Any], None]) -> Serves:
    """Likewise, and nothing is to be answered."""
    decoder = msgspec.json.Decoder(kind)

    def noted(request: Request) -> Answer:
        note(message_of(request.body, decoder, what))
        return 202, {}

    return _at_once(noted)


def _inference(replica: Replica, wire: WirePath, outbox: Outbox) -> Serves:
    call = TEXT_CALLS.get(wire.name)
    if call is not None:
        return lambda request, client: TextExchange(request, client, replica, wire, call)
    return lambda request, client: InferenceExchange(request, client, replica, wire, outbox)


def _nothing_here(request: Request, client: ClientConnection) -> Exchange:
    return FailedExchange(request, client, NotFound(f"{line_of(request)}: Not Found"))
