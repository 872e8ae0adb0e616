"""The network between simulated processes: listeners and connections.

Always holds: the bytes of one direction arrive in order, cut into pieces anywhere. Between connections, nothing has an order.
What a process wrote before it died may still arrive; then the other end sees the connection end or break. As in a real loop, a
protocol is told that its connection is lost in a callback of its own, behind what its data woke; one that closes hears no more.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from simloop import PROCESS, SimLoop
from simprocess import Process

#: Bytes under way in one direction, above which the writer is asked to pause.
HIGH_WATER = 64 * 2**10
MTU = 1400


@dataclass
class Weather:
    """How the network is now. latency_s: the most that a piece takes; cut: how often a piece is cut further."""

    latency_s: float = 0.002
    cut: float = 0.2
    #: Connections between these two processes' names carry nothing until then.
    stalled: dict[frozenset[str], float] | None = None


class SimSocket:
    """An address to listen on."""

    family = socket.AF_INET

    def __init__(self, address: Any) -> None:
        self._address = address
        self.closed = False

    def getsockname(self) -> Any:
        return self._address

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.closed = True


class EndSocket:
    """What a protocol may ask of a connection's socket."""

    family = socket.AF_INET

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 2

    def setsockopt(self, *_: Any) -> None:
        pass

    def fileno(self) -> int:
        return -1


_SOCKET = EndSocket()


class Listener:
    """What create_server returns."""

    def __init__(self, network: Network, factory: Callable[[], Any], address: Any, sock: Any) -> None:
        self.network = network
        self.factory = factory
        self.address = address
        self.sock = sock
        self.context = contextvars.copy_context()
        self.process: Process = PROCESS.get()
        self.sockets = (sock,)

    def close(self) -> None:
        self.network.unlisten(self)

    def is_serving(self) -> bool:
        return self in self.network.listeners.get(self.address, ())

    async def wait_closed(self) -> None:
        pass


class Network:
    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self._rng = rng
        self.weather = Weather()
        self.listeners: dict[Any, list[Listener]] = {}
        self._ports = 20000
        #: Of each process, in the order in which they were made.
        self._of: dict[Process, dict[SimTransport, None]] = {}

    def free_port(self) -> int:
        self._ports += 1
        return self._ports

    def listen(self, factory: Callable[[], Any], address: Any, sock: Any) -> Listener:
        key = _key(address)
        listener = Listener(self, factory, key, sock)
        self.listeners.setdefault(key, []).append(listener)
        return listener

    def listeners_at(self, port: int) -> int:
        """How many live processes listen on it."""
        there = (listener.process for listener in self.listeners.get(_key(("", port)), ()))
        return len({process for process in there if process.alive})

    def unlisten(self, listener: Listener) -> None:
        there = self.listeners.get(listener.address, [])
        if listener in there:
            there.remove(listener)
        if listener.sock is not None:
            listener.sock.close()

    async def connect(self, factory: Callable[[], Any], address: Any) -> tuple[Any, Any]:
        """Raises ConnectionRefusedError."""
        await asyncio.sleep(self.delay())
        there = [one for one in self.listeners.get(_key(address), ()) if one.process.alive]
        if not there:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens on {address}")
        listener = there[self._rng.randrange(len(there))]
        near = SimTransport(self, PROCESS.get(), contextvars.copy_context())
        far = SimTransport(self, listener.process, listener.context.copy())
        near.other, far.other = far, near
        protocol = factory()
        near.set_protocol(protocol)

        def accept() -> None:
            far.set_protocol(listener.factory())
            far.get_protocol().connection_made(far)
            far.arrive()

        self.loop.call_soon(accept, context=far.context)
        protocol.connection_made(near)
        return near, protocol

    def delay(self) -> float:
        return self._rng.random() * self.weather.latency_s

    def chance(self, share: float) -> bool:
        return self._rng.random() < share

    def between(self, least: int, most: int) -> int:
        return self._rng.randint(least, most)

    def joined(self, transport: SimTransport) -> None:
        self._of.setdefault(transport.process, {})[transport] = None

    def left(self, transport: SimTransport) -> None:
        self._of.get(transport.process, {}).pop(transport, None)

    def calm(self) -> None:
        """No connection is stalled any more: also what is under way on one arrives."""
        self.weather.stalled = None
        for transports in self._of.values():
            for transport in transports:
                transport.hasten()
                # Its process may have died, and have written that.
                transport.other.hasten()

    def connections(self, process: Process) -> list[SimTransport]:
        return list(self._of.get(process, ()))

    def died(self, process: Process) -> None:
        """Its sockets are closed by the system."""
        for listeners in list(self.listeners.values()):
            for listener in [one for one in listeners if one.process is process]:
                self.unlisten(listener)
        for transport in self.connections(process):
            transport.process_died(breaks=self.chance(0.5))
        self._of.pop(process, None)


_END, _RESET = object(), object()


class SimTransport(asyncio.Transport):
    """One end of a connection."""

    other: SimTransport

    def __init__(self, network: Network, process: Process, context: contextvars.Context) -> None:
        super().__init__()
        self._network = network
        self._loop = network.loop
        self.process = process
        self.context = context
        self._protocol: Any = None
        self._closing = self._lost = self._eof_sent = False
        self._paused = False
        self._writer_paused = False
        #: What this end wrote that has not arrived: bytes, or how it ends. And the time of the last arrival.
        self._under_way: deque[tuple[float, Any]] = deque()
        self._bytes_under_way = 0
        self._last_arrival = 0.0
        #: What has arrived and was not taken yet.
        self._inbox: deque[Any] = deque()
        network.joined(self)

    def __repr__(self) -> str:
        return f"SimTransport({self.process.name}, {'closing' if self._closing else 'open'})"

    # -- what protocols call

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": _SOCKET, "peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(
            name, default
        )

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not self._paused

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        if self._inbox:
            self._loop.call_soon(self.arrive, context=self.context)

    def write(self, data: Any) -> None:
        if self._lost or self._eof_sent or not data:
            return
        data = bytes(data)
        self._bytes_under_way += len(data)
        while data:
            size = len(data)
            if size > 1 and self._network.chance(self._network.weather.cut):
                size = self._network.between(1, min(size, MTU))
            piece, data = data[:size], data[size:]
            self._send(piece)
        if self._bytes_under_way > HIGH_WATER and not self._writer_paused and not self._closing:
            self._writer_paused = True
            self._protocol.pause_writing()

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._eof_sent and not self._lost:
            self._eof_sent = True
            self._send(_END)

    def get_write_buffer_size(self) -> int:
        return self._bytes_under_way

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self.write_eof()
        self._lose_soon(None)

    def abort(self) -> None:
        self._closing = True
        if self._lost:
            return
        self._under_way.clear()
        self._send(_RESET)
        self._lose_soon(None)

    # -- the way to the other end

    def _send(self, what: Any) -> None:
        network, weather = self._network, self._network.weather
        at = max(self._last_arrival, self._loop.now + network.delay())
        if weather.stalled:
            at = max(at, weather.stalled.get(frozenset((self.process.name, self.other.process.name)), 0.0))
        self._last_arrival = at
        self._under_way.append((at, what))
        self._loop.call_at(at, self.other.take, context=self.other.context)

    def hasten(self) -> None:
        """What is under way arrives within the network's latency, in its order."""
        latest = self._loop.now + self._network.delay()
        if self._under_way and self._under_way[-1][0] > latest:
            self._under_way = deque((min(at, latest), what) for at, what in self._under_way)
            self._last_arrival = latest
            self._loop.call_at(latest, self.other.take, context=self.other.context)

    def take(self) -> None:
        """Called in the other end's process: what has come by now."""
        sender = self.other
        now = self._loop.now
        while sender._under_way and sender._under_way[0][0] <= now:
            self._inbox.append(sender._under_way.popleft()[1])
        self.arrive()

    def arrive(self) -> None:
        """Hand on what has arrived."""
        while self._inbox and not self._lost and self._protocol is not None:
            first = self._inbox[0]
            if isinstance(first, bytes):
                if self._paused:
                    return
                self._take_bytes()
            elif first is _RESET:
                self._inbox.clear()
                self._closing = True
                self._lose_soon(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
            else:
                if self._paused:
                    return
                self._inbox.popleft()
                if not self._closing and not self._guard(self._protocol.eof_received):
                    self.close()

    def _take_bytes(self) -> None:
        pieces = [cast("bytes", self._inbox.popleft())]
        while self._inbox and isinstance(self._inbox[0], bytes) and not self._network.chance(0.3):
            pieces.append(cast("bytes", self._inbox.popleft()))
        data = b"".join(pieces)
        sender = self.other
        sender._bytes_under_way -= len(data)
        if sender._writer_paused and sender._bytes_under_way <= HIGH_WATER // 4 and not sender._lost:
            sender._writer_paused = False
            self._loop.call_soon(sender._protocol.resume_writing, context=sender.context)
        if not self._closing:
            self._guard(self._protocol.data_received, data)

    def _guard(self, call: Callable[..., Any], *args: Any) -> Any:
        """As a loop does: an exception of a protocol ends its connection."""
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001
            self._loop.call_exception_handler({"message": f"protocol: {call}", "exception": error})
            self.abort()
            return True

    # -- the end

    def _lose_soon(self, error: Exception | None) -> None:
        self._loop.call_soon(self._lose, error, context=self.context)

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self._network.left(self)
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def process_died(self, *, breaks: bool) -> None:
        """What it wrote may still arrive; if the connection breaks, up to any byte."""
        if self._lost:
            return
        self._lost = self._closing = True
        if breaks:
            self._cut()
        if not self._eof_sent or breaks:
            self._send(_RESET if breaks else _END)

    def _cut(self) -> None:
        for _ in range(self._network.between(0, len(self._under_way))):
            self._under_way.pop()
        if self._under_way and isinstance(self._under_way[-1][1], bytes):
            at, last = self._under_way.pop()
            if kept := last[: self._network.between(0, len(last))]:
                self._under_way.append((at, kept))


def _key(address: Any) -> Any:
    if isinstance(address, tuple):
        return int(address[1])
    return address
