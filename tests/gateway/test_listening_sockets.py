"""What connections to the public port have from the sockets that listen there."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from midstream.core.probes import PROBE_S
from midstream.http.listening import listening_sockets


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_is_silent_is_seen_to_be_alive(loop: object) -> None:
    """A plain answer may take an hour, in which no byte passes. A NAT in between would forget the connection by then, and
    nobody would notice: the client would wait, and the server would generate for a client that died."""

    async def main() -> list[int]:
        made: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set_result(transport)

        [listening] = await listening_sockets("127.0.0.1", 0)
        server = await asyncio.get_running_loop().create_server(Accepted, sock=listening)
        with socket.create_connection(listening.getsockname()):
            transport = await made
            own = transport.get_extra_info("socket")
            found = [
                own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
            ]
            transport.close()
        server.close()
        return found

    with asyncio.Runner(loop_factory=loop) as runner:  # type: ignore[arg-type]
        alive, idle_s, between_s = runner.run(main())
    assert alive == 1
    assert idle_s == between_s == PROBE_S
    # Of the common ones, the shortest that a cloud's network has.
    assert idle_s < 240
