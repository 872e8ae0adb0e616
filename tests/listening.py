"""How a fake server of the tests ends, so that no connection is lost without a word.

asyncio's server forgets a connection that it accepted in the turn before `close`: no handler gets it, and the garbage
collector complains of its socket in whichever test runs then.
"""

from __future__ import annotations

import asyncio
import socket


def stop_listening(server: asyncio.Server) -> None:
    """Refuse connections from now on. A connection that was accepted before gets its handler in the next turn."""
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
        listener.shutdown(socket.SHUT_RDWR)
    loop.call_soon(server.close)
