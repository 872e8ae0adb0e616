"""Messages between a process and a child that it started: the one channel of the engine and of the trainer process.

Owns: the framing, both ends of the socket pair, starting the child and waiting for its end.
Always holds: a frame is a little-endian uint32 length and that many bytes of MessagePack; nothing is pickled. A message that
cannot be read closes the link, because nothing after it can be trusted. A child ends by itself when its socket closes.
"""

from __future__ import annotations

import asyncio
import logging
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import msgspec

from midstream.core import child

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 2**32 - 1
STOP_GRACE_S = 5.0

_encoder = msgspec.msgpack.Encoder()
Message = TypeVar("Message")
AnyLink = TypeVar("AnyLink", bound="Link[Any]")


def frame(message: object) -> bytearray:
    """Raises ValueError when the message is longer than a frame can say."""
    # Encoded behind its header: a large message is not copied again.
    framed = bytearray(HEADER.size)
    _encoder.encode_into(message, framed, HEADER.size)
    size = len(framed) - HEADER.size
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"{type(message).__name__} of {size} bytes is over the {MAX_FRAME_BYTES} of a frame")
    HEADER.pack_into(framed, 0, size)
    return framed


class Frames(Generic[Message]):
    """Cuts what arrives on a socket into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def whole(self, data: bytes) -> Message | None:
        """The message that `data` is. None where it is not just one: it is to be fed. Raises msgspec.DecodeError."""
        size = len(data) - HEADER.size
        if self._buffer or size < 0 or HEADER.unpack_from(data)[0] != size:
            return None
        return self._decoded(data[HEADER.size :])

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes. Raises msgspec.DecodeError."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as buffer:
                body = bytes(buffer[HEADER.size : end])
            del self._buffer[:end]
            yield self._decoded(body)

    def _decoded(self, body: bytes) -> Message:
        try:
            return self._decoder.decode(body)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(f"{error}") from error


class Unexpected(Exception):
    """The child said something that no command asked for."""


class Link(asyncio.Protocol, Generic[Message]):
    """The parent's end: each message reaches `received` in the turn of the loop that read it.

    `lost` is set once the socket is closed, by either side.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self.transport: asyncio.Transport
        self.lost = asyncio.Event()
        self._frames = Frames(decoder)

    def received(self, message: Message) -> None:
        """Raises Unexpected for a message that no command asked for."""
        raise NotImplementedError

    def send(self, message: object) -> None:
        """Raises ValueError when the message is too long."""
        self.transport.write(frame(message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            # Most reads have just one.
            message = self._frames.whole(data)
            if message is not None:
                self.received(message)
                return
            for message in self._frames.feed(data):
                self.received(message)
        except (msgspec.DecodeError, Unexpected):
            logger.exception("a child process sent a message that cannot be understood; closing its socket")
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


@dataclass(frozen=True)
class StartedChild:
    """A child that was started and has no link yet. sock: this process's end."""

    process: subprocess.Popen[bytes]
    sock: socket.socket

    async def linked(self, link: Callable[[], AnyLink]) -> AnyLink:
        """Gives it a link. If that fails, the child is killed."""
        self.sock.setblocking(False)
        try:
            _, made = await asyncio.get_running_loop().create_connection(link, sock=self.sock)
        except BaseException:
            # A cancellation, too, leaves no process running.
            self.process.kill()
            self.sock.close()
            raise
        return made


def begin(module: str, *, beside: bool = False) -> StartedChild:
    """Run `module` as a child, with the number of its end of the socket as the only argument.

    beside: it imports with the lowest priority.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", child.__name__),
                *([child.BESIDE] if beside else []),
                *(module, str(theirs.fileno())),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # This process's own standard output may be somebody's protocol.
            stdout=sys.stderr,
        )
    return StartedChild(process, ours)


async def spawn(module: str, link: Callable[[], AnyLink]) -> tuple[subprocess.Popen[bytes], AnyLink]:
    """Begin a child and give it a link."""
    begun = begin(module)
    return begun.process, await begun.linked(link)


async def ended(process: subprocess.Popen[bytes], name: str) -> int:
    """The exit code of a child after its socket was closed. It should end by itself, and is killed if it does not."""
    try:
        return await asyncio.to_thread(process.wait, STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        logger.warning("%s process %s did not end in %s s; killing it", name, process.pid, STOP_GRACE_S)
        process.kill()
        return await asyncio.to_thread(process.wait)


class Disconnected(Exception):
    """The parent closed its end."""


class Channel(Generic[Message]):
    """The child's end: blocking, with a way to take only what has arrived."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._sock = sock
        self._frames = Frames(decoder)

    @classmethod
    def of_child(cls, decoder: msgspec.msgpack.Decoder[Message]) -> Channel[Message]:
        """That of this process, which `spawn` started. From now on its parent alone decides when it ends."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        return cls(socket.socket(fileno=int(sys.argv[1])), decoder)

    def send(self, message: object) -> None:
        try:
            self._sock.sendall(frame(message))
        except OSError as error:
            raise Disconnected from error

    def receive(self, timeout_s: float | None) -> Iterator[Message]:
        """Messages that have arrived; waits up to timeout_s (None: until one comes) for the first."""
        if select.select([self._sock], [], [], timeout_s)[0]:
            try:
                data = self._sock.recv(1 << 20)
            except OSError as error:
                # The parent died and had not read everything.
                logger.info("the socket broke, its other end is gone (%s); ending", error)
                raise Disconnected from error
            if not data:
                raise Disconnected
            yield from self._frames.feed(data)
