"""The gateway process's network side: the public port, the control app behind it, and their shutdown.

Owns: the listening socket, the client connections' timeouts, the pools, and the private socket of the control app.
Always holds: after close() nothing of it is left open; a response that is cut at shutdown is seen to be cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.core.config import GatewaySettings
from midstream.fleet.registry import Deployments
from midstream.http.appserver import AppServer, socket_directory
from midstream.http.http1 import ClientConnection
from midstream.http.listening import LISTEN_BACKLOG, listening_sockets
from midstream.http.message import ConnectionLimits
from midstream.http.tls import HANDSHAKE_S, server_tls
from midstream.http.upstream import UpstreamPool, pool_to
from midstream.proxy.metrics import GatewayMetrics
from midstream.proxy.proxy import Pools, Proxy
from midstream.proxy.service import GatewayService

TIMEOUT_CHECK_S = 0.5
# How long an idle connection stays open for one more request when the process is replaced.
RETIRING_IDLE_S = 5.0
CONTROL_SOCKET = "control.sock"


@dataclass(frozen=True)
class Timeouts:
    """unreachable_s: how long a replica may be unheard of before the requests on it are given up."""

    head_s: float = 30.0
    body_window_s: float = 30.0
    retiring_idle_s: float = RETIRING_IDLE_S
    unreachable_s: float = 10.0


DEFAULT_TIMEOUTS = Timeouts()


class Gateway:
    """Serves the public port. Made in the event loop it runs in; their `replicas.run()` are the caller's to run."""

    def __init__(
        self,
        settings: GatewaySettings,
        deployments: Deployments,
        metrics: GatewayMetrics,
        control_app: Any,
        *,
        front_path: str | None = None,
        replica_token: str | None = None,
        replica_ca: str | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """`control_app`: an ASGI app, usually api.app.control_app(...).

        front_path: the Unix socket of the Tinker front; None: there is none.

        Raises ConfigError when the certificate or its key cannot be used.
        replica_token: the secret that replicas ask for. replica_ca: signs the certificates of
        those with an https URL; None: what the system trusts.
        """
        self._loop = asyncio.get_running_loop()
        self._limits = ConnectionLimits(
            max_body_bytes=settings.max_body_bytes,
            max_header_bytes=settings.max_header_bytes,
            keep_alive_s=settings.keep_alive_s,
            head_timeout_s=timeouts.head_s,
            min_body_rate=settings.min_body_rate,
            body_window_s=timeouts.body_window_s,
        )
        self._control = AppServer(control_app, str(socket_directory(CONTROL_SOCKET) / CONTROL_SOCKET))
        self.control_path = self._control.path
        self._retiring_idle_s = timeouts.retiring_idle_s
        self._shares_port = settings.workers > 1
        self._connect_timeout_s = settings.connect_timeout_s
        self._replica_ca = replica_ca
        self.proxy = Proxy(
            settings,
            deployments,
            metrics,
            Pools(
                self._tcp_pool,
                self._unix_pool(self.control_path),
                None if front_path is None else self._unix_pool(front_path),
            ),
            replica_token=replica_token,
            unreachable_s=timeouts.unreachable_s,
        )
        self.service = GatewayService(settings, self.proxy)
        self._tls = server_tls("gateway", settings.tls_cert, settings.tls_key)
        # The sockets that it listens on.
        self.sockets: list[socket.socket] = []
        # Calls that end the listening.
        self._listening: list[Callable[[], None]] = []
        self._timeouts: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Gateway({len(self.service.clients)} connections, {len(self.proxy.upstreams)} replicas)"

    async def start(self, host: str, port: int, taken: Sequence[socket.socket] = ()) -> int:
        """Listen; returns the port. taken: sockets that listen there already. Raises OSError when it cannot listen there."""
        try:
            sockets = taken or await listening_sockets(host, port, shared=self._shares_port)
            self.sockets = list(sockets)
            for sock in sockets:
                self._listening.append(sock.close)
            for sock in sockets:
                self._listening.append(await self._listen(sock))
            await self._control.start()
        except BaseException:
            await self.close()
            raise
        self._timeouts = asyncio.create_task(self._check_timeouts(), name="client timeouts")
        actual: int = sockets[0].getsockname()[1]
        return actual

    async def _listen(self, sock: socket.socket) -> Callable[[], None]:
        tls = self._tls
        server = await self._loop.create_server(
            functools.partial(ClientConnection, self.service, self._limits, self._loop),
            sock=sock,
            backlog=LISTEN_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
        )
        return server.close

    def _stop_listening(self) -> None:
        for stop in reversed(self._listening):
            stop()
        self._listening.clear()
        self.sockets = []

    async def drain(self, seconds: float) -> None:
        """Stop accepting, close idle connections, and let responses under way finish for up to `seconds`."""
        self._stop_listening()
        self.service.draining = True
        for client in list(self.service.clients):
            client.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.service.all_left()

    async def retire(self, seconds: float) -> None:
        """Another process listens on the sockets now: finish what this one has, within `seconds`.

        Connections may be used once more; each closes after its next response, or when it stays idle.
        """
        self._stop_listening()
        self.service.draining = True
        for client in list(self.service.clients):
            client.retire(self._retiring_idle_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.service.all_left()

    async def close(self) -> None:
        """End everything now. Idempotent; after drain() it cuts what did not finish."""
        self.service.draining = True
        self._stop_listening()
        for client in list(self.service.clients):
            client.cut("the gateway is shutting down")
        with contextlib.suppress(TimeoutError):
            # Time for the last bytes to leave.
            async with asyncio.timeout(1.0):
                await self.service.all_left()
        for client in list(self.service.clients):
            client.reset()
        self.proxy.close()
        if self._timeouts is not None:
            self._timeouts.cancel()
            await asyncio.gather(self._timeouts, return_exceptions=True)
        await self._control.stop()
        shutil.rmtree(Path(self.control_path).parent, ignore_errors=True)

    async def _check_timeouts(self) -> None:
        while True:
            await asyncio.sleep(TIMEOUT_CHECK_S)
            now = self._loop.time()
            self.proxy.check_replicas(now)
            for client in list(self.service.clients):
                client.check_deadline(now)

    def _unix_pool(self, path: str) -> UpstreamPool:
        connect = functools.partial(self._loop.create_unix_connection, path=path)
        return UpstreamPool(connect, self._connect_timeout_s)

    def _tcp_pool(self, url: str) -> UpstreamPool:
        return pool_to(url, self._replica_ca, self._connect_timeout_s)
