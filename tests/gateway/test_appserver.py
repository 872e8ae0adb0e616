"""The end of an app behind a Unix socket."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from midstream.http.appserver import AppServer


async def test_who_connected_before_the_end_is_answered_before_the_app_ends() -> None:
    happened: list[str] = []

    async def answer(request: Request) -> Response:
        await asyncio.sleep(0)
        happened.append("answered")
        return PlainTextResponse("here")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        happened.append("ended")

    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as client:
        server = AppServer(Starlette(routes=[Route("/", answer)], lifespan=lifespan), f"{directory}/app.sock")
        await server.start()
        # In one step of the loop: it has not accepted the connection when it is told to end.
        client.connect(server.path)
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        await server.stop()
        client.setblocking(False)
        told = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        assert told.endswith(b"here")
        assert happened == ["answered", "ended"]


async def test_an_app_that_nobody_asks_ends() -> None:
    with tempfile.TemporaryDirectory() as directory:
        server = AppServer(Starlette(), f"{directory}/app.sock")
        await server.start()
        await server.stop()
        with socket.socket(socket.AF_UNIX) as client:
            assert client.connect_ex(server.path) != 0
