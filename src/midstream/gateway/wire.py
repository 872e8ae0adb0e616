"""An event loop whose connections are served by compiled code: bytes of plain requests and of their responses pass there.

Owns: the loop's selector, the transports of the connections it adopted, and the contract with native/wire.cpp.
Always holds:
- A protocol on a wire sees what it would see on another transport: what is not plain comes as bytes to data_received.
- Everything a protocol is told, it is told in the loop's thread and never from within a call of its own.
- Without a compiler nothing changes but the cost: loops are uvloop's then.

What a protocol on a wire is told beside what asyncio tells it:
    a client's: request_begun(target, first) -> int, body_grows(more) -> bool, raw_received(data) -> bool,
    request_received(target, first, lines, body)
    an upstream's, of a response that it let the wire relay: relay_ended(begun_now, reusable), relay_broken(reason),
    relay_left(data); its sink: relay_begun().
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import selectors
import socket
import struct
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import uvloop

from midstream.compiled import NoCompiler, load
from midstream.config import DataPath, GatewaySettings
from midstream.errors import ConfigError

SOURCE = Path(__file__).parent / "native" / "wire.cpp"
ACCEPTS_PER_TURN = 64
ACCEPT_AGAIN_S = 1.0  # after descriptors or memory ran out
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger(__name__)


def data_path(settings: GatewaySettings) -> DataPath:
    """What new_event_loop is to be asked for: encrypted connections are not a wire's."""
    return settings.data_path if settings.tls_cert is None else "python"


def new_event_loop(data_path: DataPath = "auto") -> asyncio.AbstractEventLoop:
    """The loop for a gateway. auto: a wire where there is a compiler. Raises ConfigError when `native` cannot be had."""
    if data_path != "python":
        try:
            return WireLoop()
        except NoCompiler as error:
            if data_path == "native":
                raise ConfigError(f"gateway.data_path is native: {error}") from error
            logger.warning("requests pass through Python, at several times the cost: %s", error)
    return uvloop.new_event_loop()


@cache
def _open() -> Any:
    if not hasattr(selectors, "EpollSelector"):
        raise NoCompiler("compiled connections need Linux")
    function = ctypes.PyDLL(load(SOURCE)._name).wire_open
    function.restype = ctypes.py_object
    function.argtypes = [ctypes.c_int, ctypes.py_object, ctypes.py_object]
    return function


class WireLoop(asyncio.SelectorEventLoop):
    """Raises NoCompiler."""

    _ready: Any  # of the base class
    _scheduled: Any
    _closed = True  # of the base class: until there is something to close

    def __init__(self) -> None:
        opened = _open()
        selector = _WireSelector()
        super().__init__(selector)
        self._wires: dict[int, WireTransport] = {}
        self.functions = opened(selector.fileno(), self._wire_lost, self._wire_failed)
        selector.serve(self)

    def adopt(self, sock: socket.socket, protocol: asyncio.BaseProtocol, rules: int = -1) -> WireTransport:
        """Serve a connected socket from now on; it belongs to the wire. `rules`: of rules(), for a client's."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        adopt = self.functions[1]
        transport = WireTransport(self, sock.fileno(), protocol)
        adopt(sock.fileno(), protocol, rules)
        self._wires[sock.detach()] = transport
        protocol.connection_made(transport)
        return transport

    def rules(
        self, dropped: Iterable[bytes], let_through: Iterable[bytes], head_bytes_max: int, body_bytes_max: int
    ) -> int:
        """For adopt(): header names, in lower case, that requests lose; of those that begin with `x-midstream-`, which are
        let through; and the sizes up to which a request is plain."""
        number: int = self.functions[-1](dropped, let_through, head_bytes_max, body_bytes_max)
        return number

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[WireTransport, asyncio.Protocol]:
        """As create_connection. Raises OSError."""
        failed: OSError | None = None
        try:  # an address needs no thread to look it up
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            found = await self.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, kind, proto, _, address in found:
            sock = socket.socket(family, kind, proto)
            try:
                sock.setblocking(False)
                await self.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                failed = error
            except BaseException:
                sock.close()
                raise
            else:
                protocol = factory()
                return self.adopt(sock, protocol), protocol
        raise failed or OSError(f"{host} has no address")

    def listen(
        self, sock: socket.socket, factory: Callable[[], asyncio.Protocol], rules: int
    ) -> Callable[[], None]:
        """Accept connections on a listening socket; returns how to end that, which closes the socket."""
        sock.setblocking(False)
        again: list[asyncio.TimerHandle] = []

        def accept() -> None:
            for _ in range(ACCEPTS_PER_TURN):
                try:
                    accepted, _ = sock.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    return
                except OSError as error:
                    if error.errno not in _SHORTAGES:
                        raise
                    logger.error("no connection can be accepted for a while: %s", error)
                    self.remove_reader(sock)
                    again[:] = [self.call_later(ACCEPT_AGAIN_S, self.add_reader, sock, accept)]
                    return
                self.adopt(accepted, factory(), rules)

        def end() -> None:
            for handle in again:
                handle.cancel()
            with contextlib.suppress(ValueError):
                self.remove_reader(sock)
            sock.close()

        self.add_reader(sock, accept)
        return end

    def close(self) -> None:
        if not self.is_closed() and not self.is_running():
            for transport in self._wires.values():
                transport.abort()
            self.functions[0](0.0, self._ready, self._scheduled)  # tells their protocols
        super().close()

    def _wire_lost(self, fd: int, error: int) -> None:
        transport = self._wires.pop(fd)
        try:
            transport.protocol.connection_lost(OSError(error, os.strerror(error)) if error else None)
        finally:
            transport.gone()

    def _wire_failed(self, error: Exception, trace: TracebackType | None) -> None:
        message = "a protocol on a wire failed"
        self.call_exception_handler({"message": message, "exception": error.with_traceback(trace)})


class _WireSelector(selectors.EpollSelector):
    """Waiting is the wire's: it serves its connections meanwhile."""

    _loop: WireLoop

    def serve(self, loop: WireLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self._loop
        ready = []
        for fd, events in loop.functions[0](timeout, loop._ready, loop._scheduled):
            key = self.get_map().get(fd)
            if key is None:  # what a protocol was told in the same turn had it unregistered
                continue
            wanted = selectors.EVENT_READ * bool(events & ~_OUT) | selectors.EVENT_WRITE * bool(events & ~_IN)
            if wanted & key.events:
                ready.append((key, wanted & key.events))
        return ready


_IN, _OUT = 1, 4  # EPOLLIN, EPOLLOUT


class WireTransport(asyncio.Transport):
    """One connection on a wire. It takes bytes and nothing else."""

    def __init__(self, loop: WireLoop, fd: int, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self.protocol: Any = protocol
        self._fd = fd
        (
            _,
            _,
            self._write,
            self._relay,
            self._relayed,
            self._leave,
            self._close,
            self._abort,
            self._write_eof,
            self._pause,
            self._pending,
            self._body_arrived,
            self._drop_body,
            self._close_after,
            _,
        ) = loop.functions
        self._closing = False

    def __repr__(self) -> str:
        return f"WireTransport({self._fd}{', closing' if self._closing else ''})"

    def gone(self) -> None:
        """There is no such connection any more."""
        self._fd = -1
        self._closing = True

    # -- asyncio's

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`wire`: this transport; nothing else is known."""
        return self if name == "wire" else default

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self._write(self._fd, data if type(data) is bytes else bytes(data))

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(parts))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._closing:
            self._write_eof(self._fd)

    def get_write_buffer_size(self) -> int:
        size: int = self._pending(self._fd) if self._fd >= 0 else 0
        return size

    def pause_reading(self) -> None:
        if self._fd >= 0:
            self._pause(self._fd, True)

    def resume_reading(self) -> None:
        if self._fd >= 0:
            self._pause(self._fd, False)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._close(self._fd)

    def abort(self) -> None:
        self._closing = True
        if self._fd >= 0:
            self._abort(self._fd)

    # -- a wire's

    def reset(self) -> None:
        """Abort so that the other side sees a broken connection."""
        if self._fd >= 0:
            sock = socket.socket(
                socket.AF_INET, socket.SOCK_STREAM, 0, fileno=self._fd
            )  # needs no new descriptor
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            finally:
                sock.detach()
        self.abort()

    def relay(
        self,
        client: WireTransport,
        sink: object,
        head: bytes,
        body: bytes,
        extra: bytes,
        *,
        keeps_marks: bool,
    ) -> None:
        """Send a request on this connection; pass a plain response to it on to `client`, with the header lines `extra`."""
        self._relay(self._fd, client._fd, sink, head, body, extra, keeps_marks)

    def relayed(self) -> tuple[bool, bool, bool, bool, bool, bool, bytes | None]:
        """Of the response being relayed: anything arrived, its head was passed on, it is chunked, an event stream; what was
        passed on ends within a chunk, ends at the end of an event; the marks (framing.h) of the events passed on."""
        state: tuple[bool, bool, bool, bool, bool, bool, bytes | None] = self._relayed(self._fd)
        return state

    def leave_relay(self) -> None:
        """The rest of the response is for nobody."""
        if self._fd >= 0:
            self._leave(self._fd)

    def body_arrived(self) -> int:
        """Bytes of the plain request's body under way; -1 when none is."""
        count: int = self._body_arrived(self._fd) if self._fd >= 0 else -1
        return count

    def drop_body(self) -> None:
        """The plain request under way is refused: what has come of its body is let go, what is to come means nothing."""
        if self._fd >= 0:
            self._drop_body(self._fd)

    def close_after(self) -> None:
        """The response under way, or the next, is the last: if it is relayed, its head says so."""
        if self._fd >= 0:
            self._close_after(self._fd)
