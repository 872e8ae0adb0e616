"""Simulated processes: their starts, signals and ends, and the channel between a supervisor and its children.

A process is a context: all callbacks made in it belong to it. Killing it forgets its callbacks and closes its connections; its
tasks never run again, and nothing of them is cleaned up.
"""

from __future__ import annotations

import asyncio
import contextvars
import signal
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from simloop import PROCESS, SimLoop

from midstream.core.pulse import Pulse

#: Of what a child and its supervisor say to each other.
PIPE_S = 0.001


class Process:
    """wall_offset_s: of its clock. keep: what must not be collected, so that nothing of a dead process is cleaned up."""

    def __init__(self, name: str, pid: int = 0) -> None:
        self.name, self.pid = name, pid
        self.alive, self.stopped = True, False
        self.parked: list[asyncio.Handle] = []
        self.handlers: dict[int, tuple[Callable[..., object], tuple[Any, ...], contextvars.Context]] = {}
        self.wall_offset_s = 0.0
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        self.transport: ChildTransport | None = None
        self.engine: Any = None
        self.full_disk = False

    def __repr__(self) -> str:
        return f"{self.name}[{self.pid}]"


#: By module: the type of its settings, what it runs, and the errors that it may tell its supervisor.
Programs = dict[str, tuple[type[Any], Callable[[Any, Any], Coroutine[Any, Any, None]]]]


class Processes:
    def __init__(self, loop: SimLoop, programs: Programs, told: tuple[type[Exception], ...]) -> None:
        self.loop = loop
        self.programs = programs
        self.told = told
        self.by_pid: dict[int, Process] = {}
        self._pid = 100
        #: Dead processes' tasks stay as they are.
        self._graves: list[Any] = []
        self.on_death: Callable[[Process], None] = lambda process: None
        #: Exit codes that nobody asked for.
        self.crashed: list[str] = []

    def alive(self) -> list[Process]:
        return [process for process in self.by_pid.values() if process.alive]

    def named(self, name: str) -> Process | None:
        """The one that was started last."""
        return next((one for one in reversed(self.alive()) if one.name == name), None)

    def execute(self, protocol_factory: Callable[[], Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
        # python -m midstream.core.child MODULE NAME
        module, name = args[3], args[4]
        self._pid += 1
        process = Process(name, self._pid)
        self.by_pid[process.pid] = process
        protocol = protocol_factory()
        process.transport = transport = ChildTransport(self, process, protocol)
        protocol.connection_made(transport)
        kind, serve = self.programs[module]
        channel = SimChannel(self, process)
        transport.channel = channel
        main = self._main(process, kind, serve, channel)
        self._graves.append(self.loop.create_task(main, name=name, context=process.context))
        return transport, protocol

    async def _main(self, process: Process, kind: type[Any], serve: Any, channel: SimChannel) -> None:
        code = 1
        try:
            await serve(msgspec.json.decode(await channel.line(), type=kind), channel)
            code = 0
        except self.told as error:
            if channel.answered:
                self.crashed.append(f"{process} ended: {error!r}")
            else:
                from midstream.core.supervision import Listening

                channel.send(Listening(error=str(error)))
        # Whatever it is ends the process.
        except BaseException as error:  # noqa: BLE001
            self.crashed.append(f"{process} crashed: " + "".join(traceback.format_exception(error)))
        self.end(process, code)

    def signal(self, process: Process, number: int) -> None:
        if not process.alive:
            return
        if number == signal.SIGKILL:
            self.end(process, -number)
        elif number == signal.SIGSTOP:
            process.stopped = True
            self.loop.park(process)
        elif number == signal.SIGCONT:
            process.stopped = False
            self.loop.unpark(process)
        elif number in process.handlers:
            callback, args, context = process.handlers[number]
            self.loop.call_soon(callback, *args, context=context.copy())
        else:
            self.end(process, -number)

    def end(self, process: Process, code: int) -> None:
        if not process.alive:
            return
        process.alive = False
        self.loop.forget(process)
        self.on_death(process)
        self.loop.network.died(process)
        transport = process.transport
        if transport is not None:
            transport.ended(code)

    def killpg(self, pid: int, number: int) -> None:
        process = self.by_pid.get(pid)
        if process is None or not process.alive:
            raise ProcessLookupError(pid)
        self.signal(process, number)


class SimChannel:
    """A child's end, as http/channel.Channel."""

    def __init__(self, processes: Processes, process: Process) -> None:
        self._processes, self._process = processes, process
        self.answered = False
        self.pulse = Pulse(process.name)
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._text = b""

    def feed(self, data: bytes) -> None:
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._lines.put_nowait(line)

    def end(self) -> None:
        self._lines.put_nowait(b"")

    async def line(self) -> bytes:
        return await self._lines.get()

    def send(self, message: msgspec.Struct) -> None:
        self.answered = True
        assert self._process.transport is not None
        self._process.transport.said(msgspec.json.encode(message) + b"\n")

    async def stop_requested(self, on_line: Callable[[bytes], None] = lambda line: None) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

        async def read() -> None:
            while line := await self.line():
                on_line(line)

        orphaned, asked = asyncio.create_task(read()), asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait((orphaned, asked), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            orphaned.cancel()
            asked.cancel()


class ChildTransport(asyncio.SubprocessTransport):
    """What create_subprocess_exec gets. Lives in the supervisor's process."""

    channel: SimChannel

    def __init__(self, processes: Processes, process: Process, protocol: Any) -> None:
        super().__init__()
        self._processes, self._process, self._protocol = processes, process, protocol
        self._loop = processes.loop
        self._context = contextvars.copy_context()
        self._code: int | None = None
        self._waiters: list[asyncio.Future[int]] = []
        self._input = ChildInput(self)
        self._output = ChildOutput()
        self._last = 0.0

    def get_pid(self) -> int:
        return self._process.pid

    def get_returncode(self) -> int | None:
        return self._code

    def get_pipe_transport(self, fd: int) -> Any:
        return {0: self._input, 1: self._output}.get(fd)

    def is_closing(self) -> bool:
        return self._code is not None

    def close(self) -> None:
        pass

    def send_signal(self, signal: int) -> None:
        if self._code is not None:
            raise ProcessLookupError
        self._processes.signal(self._process, signal)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def _wait(self) -> int:
        if self._code is not None:
            return self._code
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        code: int = await waiter
        return code

    # -- between the two

    def _soon(self, call: Callable[..., object], *args: Any) -> None:
        """In the supervisor's process, after all that was said before."""
        self._last = max(self._last, self._loop.now + PIPE_S)
        self._loop.call_at(self._last, call, *args, context=self._context.copy())

    def said(self, data: bytes) -> None:
        self._soon(self._protocol.pipe_data_received, 1, data)

    def told(self, data: bytes) -> None:
        if self._process.alive:
            self._loop.call_later(PIPE_S, self.channel.feed, data, context=self._process.context.copy())

    def ended(self, code: int) -> None:
        self._soon(self._protocol.pipe_connection_lost, 1, None)
        self._soon(self._gone, code)

    def _gone(self, code: int) -> None:
        self._code = code
        self._protocol.process_exited()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.cancelled():
                waiter.set_result(code)


class ChildInput(asyncio.WriteTransport):
    def __init__(self, child: ChildTransport) -> None:
        super().__init__()
        self._child = child

    def write(self, data: Any) -> None:
        self._child.told(bytes(data))

    def is_closing(self) -> bool:
        return self._child._code is not None

    def close(self) -> None:
        pass


class ChildOutput(asyncio.ReadTransport):
    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass
