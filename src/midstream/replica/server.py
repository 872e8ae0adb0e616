"""A replica's listening socket and the connections it accepted.

Always holds: after close() nothing of it is left open; a response that is cut by close() is seen to be cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from functools import partial

from midstream.http.http1 import ClientConnection
from midstream.http.message import ConnectionLimits
from midstream.http.tls import HANDSHAKE_S
from midstream.replica.app import ReplicaApp
from midstream.replica.replica import Replica

#: The gateway's limits are the ones that are set, and it decides when its connections end. Bodies that are still arriving, one
#: or many, are bounded here, too (app.py), and so is the time that one may take.
LIMITS = ConnectionLimits(max_body_bytes=sys.maxsize, max_header_bytes=2**20, keep_alive_s=3600)
TIMEOUT_CHECK_S = 0.5
CLOSE_GRACE_S = 1.0


class ReplicaServer:
    """Made in the event loop it runs in. Takes over `sock`, which listens."""

    def __init__(
        self, replica: Replica, sock: socket.socket, token: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        """tls: with it the socket speaks HTTPS only."""
        self._app = ReplicaApp(replica, token)
        self._sock = sock
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._timeouts: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"ReplicaServer({self._app!r})"

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            partial(ClientConnection, self._app, LIMITS, loop),
            sock=self._sock,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
        )
        self._timeouts = asyncio.create_task(self._check_timeouts(), name="client timeouts")

    async def close(self) -> None:
        """Stop accepting; responses under way have a moment to end by themselves. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._app.draining = True
        for client in list(self._app.clients):
            client.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_GRACE_S):
                await self._app.all_left()
        for client in list(self._app.clients):
            client.cut("the replica is shutting down")
        if self._timeouts is not None:
            self._timeouts.cancel()
            await asyncio.gather(self._timeouts, return_exceptions=True)

    async def _check_timeouts(self) -> None:
        while True:
            await asyncio.sleep(TIMEOUT_CHECK_S)
            now = asyncio.get_running_loop().time()
            for client in list(self._app.clients):
                client.check_deadline(now)
