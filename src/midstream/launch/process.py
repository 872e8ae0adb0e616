"""One supervised child process: its start, its restarts, its end, and its conversation with the supervisor.

Owns: the interface of a child wherever it runs (`Supervised`), and the child on this machine (`Child`).
Always holds:
- A child that dies after it was ready is started again, on the same port if that is possible, with a growing pause.
- Without a port in its settings the child chooses one as it begins to listen, so no other process takes it in between.
- Neither a child nor a process that it started outlives stop(). The processes of a dead child end before its restart.
- The last lines of a child are heard before its end is reported.
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
from dataclasses import dataclass

import msgspec

from midstream.core import child
from midstream.core.retry import Backoff
from midstream.core.supervision import Accepting, Listening, SpareWaits
from midstream.http.channel import LINE_BYTES_MAX

logger = logging.getLogger(__name__)

#: Before a child that has ended is started again, and before one that could not be started is tried again.
RESTARTS = Backoff(first_s=0.1, last_s=10.0)
STARTS = Backoff(first_s=0.2, last_s=10.0)
#: A successor that does not serve by then is given up.
TAKE_OVER_S = 60.0
#: Beyond its own time limit, for a replaced process to end what it ends then.
RETIRE_GRACE_S = 30.0
#: For the last lines of a process that has ended to be read.
LAST_LINES_S = 1.0
#: A child that is killed so often while it starts finds no memory here, or is not wanted.
KILLS_MAX = 10
#: For a process to end after its streams have.
KILL_AFTER_S = 5.0
LOOPBACK = "127.0.0.1"


class StartFailed(Exception):
    """A child could not start; the message is its own."""


class HostUnwell(StartFailed):
    """The host of a child, or the way to it, is not well, or somebody killed it. That may pass: a wait and not a failure."""


class Killed(HostUnwell):
    """Somebody killed the child while it started."""


@dataclass(frozen=True)
class ChildMessages:
    """on_line: gets each line that the child says after its answer. Where it runs elsewhere, one that was not the newest for
    long may be left out. greeting: the message that a child gets whenever it has started.
    """

    on_line: Callable[[bytes], None] | None = None
    greeting: Callable[[], msgspec.Struct] | None = None


#: No messages in either direction.
SILENT = ChildMessages()


def ignore(_why: str) -> None:
    pass


def _unheard(_pid: int, _line: bytes | None) -> None:
    pass


class Supervised(ABC):
    """One supervised process, here or elsewhere."""

    name: str
    #: Where it listens, as this machine reaches it, once it has started.
    host: str
    port: int = 0
    #: Where it runs, e.g. "node 10.0.0.7"; None: this machine.
    place: str | None = None
    #: Gets what a replaced process says, by its pid: first the last line that it said before, and None when it has ended.
    on_retiring: Callable[[int, bytes | None], None] = staticmethod(_unheard)

    @property
    def url(self) -> str:
        """The URL at which it listened last, without a path, in plain HTTP."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether there is a process. It may be starting or ending."""

    @abstractmethod
    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        """Returns when the child listens. Raises StartFailed, HostUnwell where another host might do.

        on_waiting: gets the reason while the start waits for something that may still come.
        """

    async def begin(self) -> None:
        """The first start. A host that is not well is waited for, or another one. Raises StartFailed."""
        failures = kills = 0
        while True:
            try:
                return await self.start(lambda why: logger.warning("%s", why))
            except HostUnwell as error:
                kills = kills + 1 if isinstance(error, Killed) else 0
                if kills == KILLS_MAX:
                    raise StartFailed(f"{error}, {kills} times in a row") from error
                failures += 1
                pause_s = STARTS.pause_s(failures)
                logger.warning("%s; trying again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)

    @abstractmethod
    async def ended(self) -> str:
        """Waits until the process that started last has ended; says how. No process of its group is left then."""

    @abstractmethod
    def tell(self, message: msgspec.Struct) -> None:
        """Send a message to the child, if it is there. One that has ended gets its greeting when it starts."""

    @abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill it when it does not."""

    @abstractmethod
    def kill(self) -> None:
        """End it, and whatever it started, at once."""

    async def replace(self, drain_s: float) -> None:
        """Start a process that takes its place; returns when that one serves. The old one finishes its requests in `drain_s`.

        Raises StartFailed: the old one then stays.
        """
        raise StartFailed(f"{self.name} cannot be replaced where it runs")

    @abstractmethod
    def renew(self) -> None:
        """Try otherwise at the next start, since it could not be started again."""

    async def supervise(
        self,
        on_restart: Callable[[str | None], None] = lambda why: None,
        on_waiting: Callable[[str], None] = ignore,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Start it again whenever it ends; runs until cancelled.

        on_restart: called after each attempt, with the reason if it failed, else None. on_waiting: as that of start(); it also
        gets the reason why a host is unwell. on_ended: called when the process has ended, before the first attempt.
        """
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            started_at = loop.time()
            how = await self.ended()
            # It was well for a while.
            if loop.time() - started_at > RESTARTS.last_s:
                failures = 0
            logger.error("%s %s; starting it again", self.name, how, extra={"child": self.name})
            on_ended()
            while True:
                failures += 1
                await asyncio.sleep(RESTARTS.pause_s(failures))
                pause_s = RESTARTS.pause_s(failures + 1)
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


class ChildProcess:
    """One process of a child, from its start to its end."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self.process = process
        #: It can read messages: it has answered.
        self.answered = False
        #: Where it offers its listening sockets to a successor.
        self.offer: str | None = None
        #: The last line that it said after its answer.
        self.last_line: bytes | None = None
        self._input, self._output = process.stdin, process.stdout
        self._listening: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def waits(self) -> bool:
        """Of a spare process: returns once it waits for its settings, or False if it ended before."""
        try:
            msgspec.json.decode(await self._output.readline(), type=SpareWaits)
        except msgspec.DecodeError:
            return False
        return True

    async def ask(self, spec: msgspec.Struct) -> Listening:
        """Send the settings, and return the answer. Raises StartFailed, and HostUnwell when it was killed; the process has
        ended then."""
        self._input.write(msgspec.json.encode(spec) + b"\n")
        line = await self._output.readline()
        if not line and await self._was_killed():
            await self.end()
            raise Killed(f"{self.name} was killed while it started")
        try:
            answer = _answer(self.name, line)
        except StartFailed:
            await self.end()
            raise
        self.answered, self.offer = True, answer.offer
        return answer

    async def _was_killed(self) -> bool:
        """True if it was killed from outside, as by a host that is short of memory. Its own faults end it in other ways."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_LINES_S):
                await self.process.wait()
        return self.process.returncode == -signal.SIGKILL

    async def accepting(self) -> list[bytes]:
        """Waits for Accepting, for at most TAKE_OVER_S; returns the lines before it. Raises StartFailed."""
        lines: list[bytes] = []
        try:
            async with asyncio.timeout(TAKE_OVER_S):
                while line := await self._output.readline():
                    with contextlib.suppress(msgspec.DecodeError):
                        msgspec.json.decode(line, type=Accepting)
                        return lines
                    lines.append(line)
        except TimeoutError as error:
            raise StartFailed(f"{self.name} did not take over in {TAKE_OVER_S:g} s") from error
        raise StartFailed(f"{self.name} ended before it took over; its log says why")

    def listen(self, hear: Callable[[ChildProcess, bytes], None]) -> None:
        """From now on `hear` gets each line that it says."""
        self._listening = asyncio.create_task(self._listen(hear), name=f"{self.name} says")

    async def _listen(self, hear: Callable[[ChildProcess, bytes], None]) -> None:
        while line := await self._output.readline():
            hear(self, line)

    def tell(self, message: msgspec.Struct) -> None:
        if self.answered and self.running:
            self._input.write(msgspec.json.encode(message) + b"\n")

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill it when it does not."""
        if not self.running:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        await self.wait(grace_s)
        await self.end()

    async def wait(self, seconds: float, what: str = "") -> None:
        """Wait until it ends by itself, for so many seconds at most."""
        try:
            async with asyncio.timeout(seconds):
                await self.process.wait()
        except TimeoutError:
            logger.warning("%s%s did not end within %.0f s; killing it", self.name, what, seconds)

    async def end(self) -> None:
        """Kill it and whatever it started; returns when it has ended."""
        self.kill()
        await self.process.wait()

    def kill(self) -> None:
        """A child leads a process group of its own, which outlives it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def last_lines(self) -> None:
        """Wait until what it said before it ended is heard. Another process may hold its output open: LAST_LINES_S at most."""
        if self._listening is not None:
            await asyncio.wait((self._listening,), timeout=LAST_LINES_S)
            self._listening.cancel()


class Child(Supervised):
    """One supervised process on this machine."""

    def __init__(
        self,
        name: str,
        module: str,
        spec: msgspec.Struct,
        conversation: ChildMessages = SILENT,
        *,
        host: str = LOOPBACK,
        python: str | None = None,
        movable: bool = False,
        spare: Callable[[], ChildProcess | None] = lambda: None,
    ) -> None:
        """spec: its settings; a `port` of 0 is a free one, the same one whenever it is started again. host: where the child
        listens. python: its interpreter, this process's if None.

        movable: another free port will do after it could not be started again, as its own may be somebody else's by now.
        spare: gives a process that waits for settings of this kind, if there is one.
        """
        self.name = name
        self.host = host
        self._python = python or sys.executable
        self._module = module
        self._spec = spec
        self._on_line, self._greeting = conversation.on_line, conversation.greeting
        self._movable = movable
        self._spare = spare
        #: The port that it chose, to be taken again. 0: none, or the settings name it.
        self._port_before = 0
        self._life: ChildProcess | None = None
        #: The process that is to take over, and a future that is done once it has, or has failed to.
        self._next: ChildProcess | None = None
        self._replacing: asyncio.Future[None] | None = None
        self._retiring: dict[ChildProcess, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"Child({self.name}, pid={self.pid}, port={self.port})"

    @property
    def pid(self) -> int | None:
        """The id of the process that was started last; None before the first."""
        return None if self._life is None else self._life.pid

    @property
    def running(self) -> bool:
        return self._life is not None and self._life.running

    @property
    def offer(self) -> str | None:
        """The path at which the running process offers its listening sockets to a successor."""
        return None if self._life is None else self._life.offer

    async def start(self, on_waiting: Callable[[str], None] = ignore) -> None:
        spec = self._spec
        if self._port_before:
            spec = msgspec.structs.replace(spec, port=self._port_before)
        self._life = life = await self._create()
        self._is_up(life, await life.ask(spec))
        if self._greeting is not None:
            life.tell(self._greeting())

    async def replace(self, drain_s: float) -> None:
        old = self._life
        if old is None or old.offer is None or not old.running or self._replacing is not None:
            raise StartFailed(f"{self.name} is not running, or is being replaced")
        self._replacing = asyncio.get_running_loop().create_future()
        try:
            self._next = life = await self._create()
            spec = msgspec.structs.replace(self._spec, port=self.port, takes_over=old.offer)
            try:
                answer = await life.ask(spec)
                if self._greeting is not None:
                    life.tell(self._greeting())
                lines = await life.accepting()
            except BaseException:
                # Also when the server stops meanwhile: only this call knows the new process.
                await life.end()
                raise
            if old.last_line is not None:
                self.on_retiring(old.pid, old.last_line)
            self._life, self._next = life, None
            retiring = self._retire(old, drain_s + RETIRE_GRACE_S)
            self._retiring[old] = asyncio.create_task(retiring, name=f"{self.name}, replaced")
            for line in lines:
                self._hear(life, line)
            self._is_up(life, answer)
        finally:
            self._next = None
            self._replacing.set_result(None)
            self._replacing = None

    async def _create(self) -> ChildProcess:
        """Raises StartFailed."""
        if (life := self._spare()) is None:
            return await new_process(self.name, self._module, self._python)
        logger.info("%s takes the spare process (pid %d)", self.name, life.pid)
        life.name = self.name
        return life

    def _is_up(self, life: ChildProcess, answer: Listening) -> None:
        self.port = answer.port
        if getattr(self._spec, "port", None) == 0:
            self._port_before = self.port
        if self._on_line is not None:
            life.listen(self._hear)

    def _hear(self, life: ChildProcess, line: bytes) -> None:
        life.last_line = line
        if life in self._retiring:
            self.on_retiring(life.pid, line)
        elif life is self._life and self._on_line is not None:
            self._on_line(line)

    async def _retire(self, life: ChildProcess, seconds: float) -> None:
        try:
            await life.wait(seconds, ", replaced,")
        finally:
            await life.end()
            await life.last_lines()
            self.on_retiring(life.pid, None)
            del self._retiring[life]

    def tell(self, message: msgspec.Struct) -> None:
        for life in self._lives():
            life.tell(message)

    def kill(self) -> None:
        for life in self._lives():
            if life.running:
                life.kill()

    def _lives(self) -> list[ChildProcess]:
        """The process that runs, the one that is to take over, and those that finish their requests."""
        return [life for life in (self._life, self._next, *self._retiring) if life is not None]

    async def ended(self) -> str:
        while True:
            life = self._life
            assert life is not None
            code = await life.process.wait()
            if self._replacing is not None:
                await asyncio.wait((self._replacing,))
            # Otherwise a successor has its place.
            if life is self._life:
                life.kill()
                await life.last_lines()
                return f"(pid {life.pid}) ended with code {code}"

    def renew(self) -> None:
        if self._movable:
            self._port_before = 0

    async def stop(self, grace_s: float) -> None:
        await asyncio.gather(*(life.stop(grace_s) for life in self._lives()))
        await asyncio.gather(*self._retiring.values())


async def new_process(name: str, module: str, python: str = sys.executable) -> ChildProcess:
    """Start a process for a child. name: for people who read the process list. Raises StartFailed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", child.__name__, module, name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C reaches the supervisor alone.
            start_new_session=True,
            limit=LINE_BYTES_MAX,
        )
    except OSError as error:
        raise StartFailed(f"{name} cannot be started: {error}") from error
    return ChildProcess(name, process)


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
