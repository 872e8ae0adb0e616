"""The sockets of a port: one for each address of its host.

Always holds: where one cannot be made, none is left open. A connection that is silent for long is probed, so that no network
forgets it, and a peer that died is noticed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from midstream.core.probes import PROBED

LISTEN_BACKLOG = 4096
#: How getaddrinfo is asked for the addresses to listen at.
PASSIVE: Mapping[str, int] = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}


async def listening_sockets(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """A listening socket for each address of `host`, all on one port. Raises OSError.

    shared: with other processes of this user, which the system gives their parts of the connections.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, **PASSIVE)
    return bound_sockets(found, port, shared=shared, listens=True)


def bound_sockets(
    addresses: Iterable[tuple[Any, ...]], port: int, *, shared: bool = False, listens: bool = False
) -> list[socket.socket]:
    """A socket for each address, all on one port. Raises OSError.

    addresses: as getaddrinfo gives them with PASSIVE. port: 0 for any free one. shared: as in `listening_sockets`.
    """
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, address in addresses:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            for option in ((socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), *PROBED):
                sock.setsockopt(*option)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], port, *address[2:]))
            if listens:
                sock.listen(LISTEN_BACKLOG)
            port = sock.getsockname()[1]
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets
