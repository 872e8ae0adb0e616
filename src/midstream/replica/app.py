"""The HTTP server of one replica: inference paths, report, events, desired snapshot.

Owns: the mapping between ASGI and replica/service.py, and nothing else.
Always holds: every error has the one shape of errors.py; the head of a stream is sent with its first event, so an error
before that has its own status; a stream that fails after it ends with an error event and without [DONE]; a client that
disconnects ends its generation at once, streaming or not.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from midstream.errors import InvalidRequest, MidstreamError, NotFound, ReplicaUnavailable
from midstream.replica.checked import Kind
from midstream.replica.encode import error_event
from midstream.replica.replica import Replica
from midstream.replica.service import Generation
from midstream.types import Desired

log = logging.getLogger(__name__)

REPORT_GAP_S = 0.05  # changes closer together than this share one line of the event stream
REPORT_AT_LEAST_EVERY_S = 1.0
_PREFIXES = ("/v1", "/inference/v1")
_JSON = "application/json"
_desired = msgspec.json.Decoder(Desired)


class MethodNotAllowed(MidstreamError):
    status = 405
    code = "method_not_allowed"


def create_app(replica: Replica) -> Starlette:
    """The replica must be started and closed by the caller."""
    routes = [
        Route("/health", _health(replica), methods=["GET"]),
        Route("/replica/report", _report(replica), methods=["GET"]),
        Route("/replica/events", _events(replica), methods=["GET"]),
        Route("/replica/desired", _post_desired(replica), methods=["POST"]),
    ]
    for prefix in _PREFIXES:
        chat, completion = InferenceEndpoint(replica, "chat"), InferenceEndpoint(replica, "completion")
        routes.append(Route(f"{prefix}/chat/completions", chat, methods=["POST"]))
        routes.append(Route(f"{prefix}/completions", completion, methods=["POST"]))
        routes.append(Route(f"{prefix}/models", _models(replica), methods=["GET"]))
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        HTTPException: _on_error,
        MidstreamError: _on_error,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


class InferenceEndpoint:
    """An ASGI app for one kind of request, so that nothing stands between the engine's events and `send`."""

    def __init__(self, replica: Replica, kind: Kind) -> None:
        self._replica = replica
        self._kind: Kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        exchange = _Exchange(
            send,
            {
                "x-request-id": request.headers.get("x-request-id") or uuid.uuid4().hex,
                "fireworks-backend-host": self._replica.name,
                "fireworks-deployment": self._replica.names.deployment,
            },
        )
        answer = asyncio.create_task(self._answer(exchange, request, body))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer_done = answer.done()
            for task in (answer, gone):
                task.cancel()
            await asyncio.wait((answer, gone))
        if answer_done:
            answer.result()

    async def _answer(self, exchange: _Exchange, request: Request, body: bytes) -> None:
        try:
            service = self._replica.service
            if service is None:
                raise ReplicaUnavailable("the engine is starting; retry this request")
            async with service.admitted(self._kind, body, request.headers) as generation:
                if generation.checked.stream:
                    await exchange.stream(generation)
                else:
                    data = await generation.plain()
                    await exchange.whole(200, data, generation.headers(done=True))
        except MidstreamError as error:
            await exchange.fail(error)
        except OSError:  # the connection broke under `send`
            log.debug("%s: the client went away", exchange.request_id)
        except Exception:  # a bug: the client still gets the one error shape and no stream ends silently
            log.exception("%s: unexpected failure", exchange.request_id)
            await exchange.fail(MidstreamError("internal error; see the replica's log"))


class _Exchange:
    """The response of one inference request, whichever way it goes. `fixed`: headers it has in any case."""

    def __init__(self, send: Send, fixed: dict[str, str]) -> None:
        self._send = send
        self._started = False
        self._fixed = fixed

    @property
    def request_id(self) -> str:
        return self._fixed["x-request-id"]

    async def whole(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        headers = {"content-type": _JSON, "content-length": str(len(data)), **headers}
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def stream(self, generation: Generation) -> None:
        async with aclosing(generation.stream()) as events:
            async for data in events:
                if not self._started:
                    fixed = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                    await self._start(200, {**fixed, **generation.headers(done=False)})
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: MidstreamError) -> None:
        if not self._started:
            await self.whole(error.status, msgspec.json.encode(error.body()), error.headers())
            return
        event = error_event(error.body())
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._started = True
        headers = headers | self._fixed
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Handler = Callable[[Request], Awaitable[Response]]


def _health(replica: Replica) -> Handler:
    async def health(_: Request) -> Response:
        if replica.ready:
            return _json(200, {"status": "ok"})
        raise ReplicaUnavailable("the engine is not ready")

    return health


def _models(replica: Replica) -> Handler:
    async def models(_: Request) -> Response:
        report = replica.report()
        model = {
            "id": replica.names.model,
            "object": "model",
            "created": 0,
            "owned_by": "midstream",
            "snapshot": report.snapshot,
        }
        return _json(200, {"object": "list", "data": [model]})

    return models


def _report(replica: Replica) -> Handler:
    async def report(_: Request) -> Response:
        return _json(200, replica.report())

    return report


def _events(replica: Replica) -> Handler:
    async def lines() -> AsyncIterator[bytes]:
        while not replica.closed:
            changed = asyncio.create_task(replica.changed(REPORT_AT_LEAST_EVERY_S))
            try:
                yield msgspec.json.encode(replica.report()) + b"\n"
                await asyncio.sleep(REPORT_GAP_S)
                await changed
            finally:
                changed.cancel()

    async def events(_: Request) -> Response:
        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return events


def _post_desired(replica: Replica) -> Handler:
    async def desired(request: Request) -> Response:
        try:
            wanted = _desired.decode(await request.body())
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"not a desired snapshot: {error}") from error
        replica.desire(wanted)
        return _json(202, replica.report())

    return desired


def _json(status: int, value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type=_JSON)


async def _on_error(request: Request, error: Exception) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})  # allow, with a 405
        kind = MethodNotAllowed if error.status_code == 405 else NotFound
        error = kind(f"{request.method} {request.url.path}: {error.detail}")
    assert isinstance(error, MidstreamError)
    return _json(error.status, error.body(), headers | error.headers())
