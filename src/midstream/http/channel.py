"""A child process of the supervisor: its end of the channel to the supervisor, and the main function of every such process.

Owns: the child's standard input and output.
Always holds: settings arrive as the first line of standard input, never in argv or the environment, where others could read a
key. The supervisor keeps that pipe open. Its end means that the supervisor is gone, so the child stops too. Only messages go to
the original standard output; printed text goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import msgspec
import uvloop

from midstream.core import logs
from midstream.core.errors import ConfigError, SnapshotError
from midstream.core.pulse import Pulse
from midstream.core.supervision import ChildSpec, Listening, SpareWaits

logger = logging.getLogger(__name__)

LINE_BYTES_MAX = 16 * 2**20
#: How long streams may continue after a request to stop.
STOP_GRACE_S = 10.0

Spec = TypeVar("Spec", bound=ChildSpec)
T = TypeVar("T")


class StdioChannel:
    """The child's end. Made once, before anything else uses standard input or output."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = os.dup(1)
        os.dup2(2, 1)
        #: A message was sent.
        self.answered = False
        #: Of the event loop that the process serves in. Whoever serves starts it.
        self.pulse = Pulse("")

    def receive(self, kind: type[T]) -> T:
        """The settings. Blocks. Raises EOFError if the supervisor is gone, and msgspec.DecodeError."""
        if not (line := sys.stdin.buffer.readline()):
            raise EOFError("the supervisor is gone")
        return msgspec.json.decode(line, type=kind)

    def say_waiting(self) -> None:
        """That the settings may come. Only a spare child says it."""
        self._write(SpareWaits())

    def send(self, message: msgspec.Struct) -> None:
        """Blocks. A message that no supervisor is left to read is discarded."""
        self.answered = True
        self._write(message)

    def _write(self, message: msgspec.Struct) -> None:
        line = msgspec.json.encode(message) + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._fd, line) :]

    async def stop_requested(self, on_line: Callable[[bytes], None] = lambda line: None) -> None:
        """Returns on SIGTERM, on SIGINT, or when the supervisor is gone. on_line: gets each line that the supervisor sends."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), cast("Any", sys.stdin.buffer).raw
        )
        orphaned = asyncio.create_task(_read_lines(reader, on_line))
        asked = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((orphaned, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            orphaned.cancel()
            asked.cancel()
            transport.close()


async def _read_lines(reader: asyncio.StreamReader, on_line: Callable[[bytes], None]) -> None:
    while line := await reader.readline():
        on_line(line)


def run_child(
    name: str,
    kind: type[Spec],
    serve: Callable[[Spec, StdioChannel], Coroutine[Any, Any, None]],
    failures: tuple[type[Exception], ...] = (),
    around: Callable[[Spec], AbstractContextManager[None]] = lambda spec: contextlib.nullcontext(),
    *,
    spare: bool = False,
) -> int:
    """The main function of a child process: its exit code.

    name: in log lines, where the settings have none. failures: errors that are expected, beside ConfigError, SnapshotError and
    OSError. One that keeps the child from starting is reported to the supervisor; a later one is logged.
    around: entered before the event loop is made, and left when the loop's tasks and threads have ended.
    spare: it says that it waits for its settings. If they never come, it ends without an error.
    """
    expected: tuple[type[Exception], ...] = (ConfigError, SnapshotError, OSError, *failures)
    channel = StdioChannel()
    if spare:
        channel.say_waiting()
    try:
        spec = channel.receive(kind)
    except EOFError:
        return 0
    channel.pulse = Pulse(spec.name or name)
    fields = {"replica": spec.name} if spec.name else {}
    logs.configure(
        spec.name or name, logs.Logging(level=spec.log_level, format=spec.log_format, fields=fields)
    )
    raise_file_limit()
    try:
        with around(spec), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(spec, channel))
    except expected as error:
        if channel.answered:
            logger.exception("the process ends")
        else:
            channel.send(Listening(error=str(error)))
        return 1
    return 0


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this user have: each stream takes two descriptors in a gateway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
