"""One supervised child process: its start, its restarts, its end, and what is said between it and the supervisor.

Owns: what is asked of a child wherever it runs (`Supervised`), and the one on this machine (`Child`).
Always holds: a child that dies after it was ready is started again, on the same port if that can be, with a growing pause;
a port that nobody names is chosen by the child as it begins to listen, so nobody takes it in between; neither a child nor what
it started outlives stop(), nor does what one that died had started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from midstream.launch.child import LINE_BYTES_MAX, Accepting, Listening

logger = logging.getLogger(__name__)

RESTART_PAUSE_S_MIN = 0.1
RESTART_PAUSE_S_MAX = 10.0
TAKE_OVER_S = 60.0  # a successor that does not serve by then is given up
RETIRE_GRACE_S = 30.0  # beyond its own bound, for what it ends then to be ended
LOOPBACK = "127.0.0.1"


class StartFailed(Exception):
    """A child could not start; the message is its own."""


class HostUnwell(StartFailed):
    """Not for what it is: its host, or what leads there, is not well. That may pass, so it is a wait and not a failure."""


def ignore(_why: str) -> None:
    pass


def _unheard(_pid: int, _line: bytes | None) -> None:
    pass


class Supervised(ABC):
    """One supervised process, here or elsewhere."""

    name: str
    host: str  # where it listens, as this machine reaches it, from when it started first
    port: int = 0
    place: str | None = None  # where it runs, e.g. "node 10.0.0.7"; None: this machine
    #: Gets what a replaced process says, by its pid: first what it said last before, and None when it has ended.
    on_retiring: Callable[[int, bytes | None], None] = staticmethod(_unheard)

    @property
    def url(self) -> str:
        """Without a path: where it listened last, in plain HTTP."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    @abstractmethod
    def running(self) -> bool:
        """There is a process, which may be starting or ending."""

    @abstractmethod
    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        """Returns when the child listens. Raises StartFailed, HostUnwell where another host might do.

        on_waiting: told what it cannot be started without yet, if that is something that may still come.
        """

    @abstractmethod
    async def ended(self) -> str:
        """How the one that started last ended, when it has; nothing of it is left then that could be ended."""

    @abstractmethod
    def tell(self, message: msgspec.Struct) -> None:
        """Say something to the child, if it is there; one that has ended is told again when it starts."""

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Ask it to end, kill it when it does not."""

    @abstractmethod
    def kill(self) -> None:
        """End it, and whatever it started, at once."""

    async def replace(self, drain_s: float) -> None:
        """Start another one that takes its place; returns when that one serves. The old one finishes what it has, in `drain_s`.

        Raises StartFailed: the old one goes on then.
        """
        raise StartFailed(f"{self.name} cannot be replaced where it runs")

    @abstractmethod
    def renew(self) -> None:
        """It could not be started again: try otherwise next time."""

    async def supervise(
        self,
        on_restart: Callable[[str | None], None] = lambda why: None,
        on_waiting: Callable[[str], None] = ignore,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Start it again whenever it ends; runs until cancelled.

        on_restart: called after each attempt, with why it failed, None when it did not. on_waiting: as that of start(), and
        told why a host is unwell. on_ended: called when it has ended, before the first attempt.
        """
        loop = asyncio.get_running_loop()
        pause_s = RESTART_PAUSE_S_MIN
        while True:
            started_at = loop.time()
            how = await self.ended()
            if loop.time() - started_at > RESTART_PAUSE_S_MAX:
                pause_s = RESTART_PAUSE_S_MIN  # it was well for a while
            logger.error("%s %s; starting it again", self.name, how)
            on_ended()
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RESTART_PAUSE_S_MAX)
                try:
                    await self.start(on_waiting)
                except HostUnwell as error:
                    logger.warning("%s; trying again in %.1f s", error, pause_s)
                    on_waiting(str(error))
                except StartFailed as error:
                    logger.error("%s; trying again in %.1f s", error, pause_s)
                    on_restart(str(error))
                    self.renew()
                else:
                    on_restart(None)
                    break


class Child(Supervised):
    """One supervised process on this machine."""

    def __init__(
        self,
        name: str,
        module: str,
        spec: msgspec.Struct,
        *,
        host: str = LOOPBACK,
        python: str | None = None,
        on_line: Callable[[bytes], None] | None = None,
        greeting: Callable[[], msgspec.Struct] | None = None,
        movable: bool = False,
    ) -> None:
        """spec: its settings; a `port` of 0 is a free one, the same one whenever it is started again. host: where the child
        listens. python: its interpreter, this process's if None. on_line: gets what the child says after it has answered.
        greeting: what it is told whenever it has started.

        movable: another free port will do after it could not be started again, as its own may be somebody else's by now.
        """
        self.name = name
        self.host = host
        self._python = python or sys.executable
        self._module = module
        self._spec = spec
        self._on_line = on_line
        self._greeting = greeting
        self._movable = movable
        self._port_before = 0  # that it chose, to be taken again; 0: none, or the settings name it
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._said: bytes | None = None  # by the process that runs now, last
        self._answered = False  # the process that runs now has said where it listens
        self.offer: str | None = None  # where that process offers its sockets to a successor
        self._replacing: asyncio.Future[None] | None = None
        self._next: asyncio.subprocess.Process | None = None  # that is to take over
        self._next_answered = False
        self._retiring: dict[asyncio.subprocess.Process, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"Child({self.name}, pid={self._process.pid if self._process else None}, port={self.port})"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        self._answered = False
        self._said = None
        self._process = await self._create()
        self._is_up(await self._ask(self._process, self._spec_now()))
        self._listening = self._listen_to(self._process)
        if self._greeting is not None:
            self.tell(self._greeting())

    async def replace(self, drain_s: float) -> None:
        old, offer = self._process, self.offer
        if old is None or offer is None or not self.running or self._replacing is not None:
            raise StartFailed(f"{self.name} is not running, or is being replaced")
        self._replacing = asyncio.get_running_loop().create_future()
        try:
            self._next = process = await self._create()
            spec = msgspec.structs.replace(self._spec, port=self.port, takes_over=offer)
            try:
                answer = await self._ask(process, spec)
                said = await self._taken_over(process)
            except BaseException:  # also when the server stops meanwhile
                await self._end(process)
                raise
            listening = self._listening
            if self._said is not None:
                self.on_retiring(old.pid, self._said)
            self._process, self._next, self._said = process, None, None
            self._is_up(answer)
            for line in said:
                self._hear(line)
            self._listening = self._listen_to(process)
            retiring = self._retire(old, listening, drain_s + RETIRE_GRACE_S)
            self._retiring[old] = asyncio.create_task(retiring, name=f"{self.name}, replaced")
        finally:
            self._next = None
            self._next_answered = False
            self._replacing.set_result(None)
            self._replacing = None

    async def _create(self) -> asyncio.subprocess.Process:
        """Raises StartFailed."""
        try:
            return await asyncio.create_subprocess_exec(
                self._python,
                "-m",
                self._module,
                self.name,  # for whoever reads the process list
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone
                limit=LINE_BYTES_MAX,
            )
        except OSError as error:
            raise StartFailed(f"{self.name} cannot be started: {error}") from error

    async def _ask(self, process: asyncio.subprocess.Process, spec: msgspec.Struct) -> Listening:
        """What a new process answers to its settings. Raises StartFailed; it has ended then."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        line = await process.stdout.readline()
        try:
            return _answer(self.name, line)
        except StartFailed:
            await self._end(process)
            raise

    def _is_up(self, answer: Listening) -> None:
        self._answered = True
        self.port = answer.port
        self.offer = answer.offer
        if getattr(self._spec, "port", None) == 0:
            self._port_before = self.port

    async def _taken_over(self, process: asyncio.subprocess.Process) -> list[bytes]:
        """Until a new process, which has answered, says that it serves; what else it said. Raises StartFailed."""
        self._next_answered = True
        if self._greeting is not None:
            self._write(process, self._greeting())
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                return await self._accepting(process)
        except TimeoutError as error:
            raise StartFailed(f"{self.name} did not take over in {TAKE_OVER_S:g} s") from error

    async def _accepting(self, process: asyncio.subprocess.Process) -> list[bytes]:
        """Until it says so; what it said before. Raises StartFailed when it ends before."""
        assert process.stdout is not None
        said: list[bytes] = []
        while line := await process.stdout.readline():
            with contextlib.suppress(msgspec.DecodeError):
                msgspec.json.decode(line, type=Accepting)
                return said
            said.append(line)
        raise StartFailed(f"{self.name} ended before it took over; its log says why")

    async def _retire(
        self, process: asyncio.subprocess.Process, listening: asyncio.Task[None] | None, seconds: float
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            logger.warning("%s, replaced, did not end within %.0f s; killing it", self.name, seconds)
        finally:
            await self._end(process)
            if listening is not None:
                await listening
            self.on_retiring(process.pid, None)
            del self._retiring[process]

    def tell(self, message: msgspec.Struct) -> None:
        if self._process is not None and self._answered:
            self._write(self._process, message)
        if self._next is not None and self._next_answered:
            self._write(self._next, message)
        for process in self._retiring:
            self._write(process, message)

    def _write(self, process: asyncio.subprocess.Process, message: msgspec.Struct) -> None:
        if process.returncode is None:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(message) + b"\n")

    def kill(self) -> None:
        for process in (self._process, self._next, *self._retiring):
            if process is not None and process.returncode is None:
                _kill_all_of(process)

    def _listen_to(self, process: asyncio.subprocess.Process) -> asyncio.Task[None] | None:
        if self._on_line is None:
            return None
        assert process.stdout is not None
        return asyncio.create_task(self._listen(process, process.stdout))

    async def _listen(self, process: asyncio.subprocess.Process, stdout: asyncio.StreamReader) -> None:
        while line := await stdout.readline():
            if process is self._process:
                self._hear(line)
            elif process in self._retiring:
                self.on_retiring(process.pid, line)

    def _hear(self, line: bytes) -> None:
        """Of the process that runs now."""
        self._said = line
        if self._on_line is not None:
            self._on_line(line)

    async def ended(self) -> str:
        while True:
            process = self._process
            assert process is not None
            code = await process.wait()
            if self._replacing is not None:
                await asyncio.wait((self._replacing,))
            if process is self._process:  # otherwise another one has its place
                _kill_all_of(process)
                return f"(pid {process.pid}) ended with code {code}"

    def renew(self) -> None:
        if self._movable:
            self._port_before = 0

    def _spec_now(self) -> msgspec.Struct:
        return (
            msgspec.structs.replace(self._spec, port=self._port_before) if self._port_before else self._spec
        )

    async def stop(self, grace_s: float) -> None:
        every = [self._process, self._next, *self._retiring]
        await asyncio.gather(*(self._stop(process, grace_s) for process in every if process is not None))
        await asyncio.gather(*self._retiring.values())

    async def _stop(self, process: asyncio.subprocess.Process, grace_s: float) -> None:
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            logger.warning("%s did not end within %.0f s; killing it", self.name, grace_s)
        await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        _kill_all_of(process)
        await process.wait()


def _kill_all_of(process: asyncio.subprocess.Process) -> None:
    """It and whatever it started: a child is the leader of a process group of its own, which outlives it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _answer(name: str, line: bytes) -> Listening:
    """A child's answer. Raises StartFailed when it gives another one, or none."""
    if not line:
        raise StartFailed(f"{name} ended while starting; its log says why")
    try:
        answer = msgspec.json.decode(line, type=Listening)
    except msgspec.DecodeError as error:
        raise StartFailed(f"{name} said {line[:200]!r} instead of where it listens") from error
    if answer.error is not None:
        raise StartFailed(f"{name}: {answer.error}")
    return answer
