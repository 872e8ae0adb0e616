"""Fake servers of the tests end without losing a connection."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest
from listening import stop_listening


@pytest.mark.parametrize("turns", range(6))
def test_a_connection_accepted_before_the_end_gets_its_handler(turns: int) -> None:
    """After any number of turns of the loop: the handler closes it, and the collector finds nothing open."""

    async def main() -> bytes:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        with socket.create_connection(address) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            stop_listening(server)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            client.setblocking(False)
            try:
                return await asyncio.get_running_loop().sock_recv(client, 1)
            except ConnectionResetError:
                return b""

    with warnings.catch_warnings(record=True) as lost:
        warnings.simplefilter("always")
        # What tests before this one left is not of this server.
        gc.collect()
        lost.clear()
        assert asyncio.run(main()) == b""
        gc.collect()
    assert [str(warning.message) for warning in lost] == []
