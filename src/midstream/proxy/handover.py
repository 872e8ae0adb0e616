"""How the listening sockets of a gateway process pass to its successor, while both run.

Owns: the private Unix socket on which a process offers them, and its protocol.
Always holds: a listening socket is open in one of the two at every moment, so no connection that waits in it is lost. The
process continues to accept until its successor has said that it accepts, too; if the successor dies before, nothing has
changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Callable, Sequence

from midstream.http.appserver import socket_directory

HANDOVER_SOCKET = "handover.sock"
SOCKETS_MAX = 64
MESSAGE_BYTES_MAX = 2**16
ANSWER_S = 10.0
_OFFERED, _TAKEN = b"sockets\n", b"taken\n"


class Offer:
    """Made in the event loop it runs in."""

    def __init__(self, sockets: Callable[[], Sequence[socket.socket]]) -> None:
        self._sockets = sockets
        self._directory = socket_directory(HANDOVER_SOCKET)
        self.path = str(self._directory / HANDOVER_SOCKET)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self.path)
        self._listener.listen()

    def __repr__(self) -> str:
        return f"Offer({self.path})"

    async def taken(self) -> None:
        """Returns once a successor accepts connections on the sockets. This process need accept no more."""
        loop = asyncio.get_running_loop()
        while True:
            asking, _ = await loop.sock_accept(self._listener)
            with asking, contextlib.suppress(OSError, TimeoutError):
                socket.send_fds(asking, [_OFFERED], [sock.fileno() for sock in self._sockets()])
                asking.setblocking(False)
                async with asyncio.timeout(ANSWER_S):
                    if await loop.sock_recv(asking, len(_TAKEN)) == _TAKEN:
                        return

    def close(self) -> None:
        """Idempotent."""
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Taken:
    """What was taken over: close() or confirm() it."""

    def __init__(self, asking: socket.socket, sockets: list[socket.socket]) -> None:
        self._asking = asking
        self.sockets = sockets

    def close(self) -> None:
        """Not taken over after all."""
        for sock in (self._asking, *self.sockets):
            sock.close()

    def confirm(self) -> None:
        """This process accepts from the sockets: their last owner need not do so any more. Raises OSError when it is gone."""
        with self._asking:
            self._asking.sendall(_TAKEN)


async def take_over(path: str) -> Taken:
    """The sockets offered at `path`. Raises OSError if there are none."""
    return await asyncio.to_thread(_take_over, path)


def _take_over(path: str) -> Taken:
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        asking.settimeout(ANSWER_S)
        asking.connect(path)
        _, descriptors, _, _ = socket.recv_fds(asking, MESSAGE_BYTES_MAX, SOCKETS_MAX)
        if not descriptors:
            raise ConnectionError(f"{path} offers no socket")
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        return Taken(asking, sockets)
    except BaseException:
        asking.close()
        raise
