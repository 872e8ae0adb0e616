"""A proxy that makes a well-behaved endpoint break one promise: what a row says then shows that the row can fail."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
_PASSED_ON = ("content-type", "retry-after", "x-request-id", "x-midstream-replica")


class Fault:
    """Breaks nothing; what a subclass overrides, it breaks."""

    # Whether [DONE] is passed on.
    done = True

    def request(self, path: str, headers: dict[str, str], body: Json) -> Response | None:
        """Change `headers` and `body` in place; a response is the answer, and nothing is asked upstream."""
        return None

    def answer(self, request: Json, body: Json) -> None:
        """Change the body of a plain completion or chat with status 200, in place."""

    def other(self, method: str, path: str, body: Json) -> None:
        """Change the body of a 200 of any other path, in place."""

    def chunk(self, request: Json, chunk: Json, memory: Json) -> None:
        """Change a stream's chunk in place; `memory` is the stream's own, empty at its beginning."""

    def named(self, path: str, event: Json, memory: Json) -> list[Json]:
        """The events to send instead of a stream's named one, which `type` names; `memory` is the stream's own."""
        return [event]

    def error(self, path: str, body: Json) -> Json:
        """The body to send instead of an error's."""
        return body

    def response(self, status: int, headers: dict[str, str]) -> int:
        """Change `headers` in place; the status to answer with."""
        return status


class _Proxy:
    def __init__(self, upstream: str, fault: Fault) -> None:
        self._upstream, self._fault = upstream, fault
        self._http: httpx.AsyncClient | None = None

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=256)
        async with httpx.AsyncClient(base_url=self._upstream, timeout=120, limits=limits) as self._http:
            yield

    async def handle(self, request: Request) -> Response:
        assert self._http is not None
        headers = {
            n: v for n, v in request.headers.items() if n not in ("host", "content-length", "connection")
        }
        raw = await request.body()
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            body = None
        if isinstance(body, dict):
            made_up = self._fault.request(request.url.path, headers, body)
            if made_up is not None:
                return made_up
            raw = json.dumps(body).encode() if raw else raw
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        asked = self._http.build_request(request.method, path, content=raw, headers=headers)
        response = await self._http.send(asked, stream=True)
        passed = {n: v for n, v in response.headers.items() if n in _PASSED_ON or n.startswith("fireworks-")}
        status = self._fault.response(response.status_code, passed)
        if "event-stream" in passed.get("content-type", ""):
            events = self._events(response, request.url.path, body or {})
            return StreamingResponse(events, status, passed)
        data = await response.aread()
        await response.aclose()
        if status == 200 and "json" in passed.get("content-type", ""):
            answer = json.loads(data)
            if request.url.path.endswith("/completions"):
                self._fault.answer(body or {}, answer)
            else:
                self._fault.other(request.method, request.url.path, answer)
            data = json.dumps(answer).encode()
        elif "json" in passed.get("content-type", ""):
            data = json.dumps(self._fault.error(request.url.path, json.loads(data))).encode()
        return Response(data, status, passed)

    async def _events(self, response: httpx.Response, path: str, request: Json) -> AsyncIterator[bytes]:
        memory: Json = {}
        rest = b""
        try:
            async for received in response.aiter_raw():
                *events, rest = (rest + received).split(b"\n\n")
                for event in events:
                    if event == DONE.strip():
                        if self._fault.done:
                            yield DONE
                    elif event.startswith(b"data: "):
                        chunk = json.loads(event.removeprefix(b"data: "))
                        self._fault.chunk(request, chunk, memory)
                        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
                    elif event.startswith(b"event: "):
                        told = json.loads(event.partition(b"\ndata: ")[2])
                        for sent in self._fault.named(path, told, memory):
                            yield f"event: {sent['type']}\ndata: {json.dumps(sent)}\n\n".encode()
        finally:
            await response.aclose()


@contextlib.contextmanager
def tampering(upstream: str, fault: Fault) -> Iterator[str]:
    """The address of a proxy in front of `upstream` that has `fault`."""
    proxy = _Proxy(upstream, fault)
    methods = ["GET", "POST", "PATCH", "DELETE"]
    app = Starlette(routes=[Route("/{path:path}", proxy.handle, methods=methods)], lifespan=proxy.lifespan)
    config = uvicorn.Config(app, port=0, log_level="critical", http="h11", ws="none", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the proxy did not start"
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
