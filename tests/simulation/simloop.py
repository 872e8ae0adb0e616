"""An event loop on a simulated clock, shared by the simulated processes.

Owns: what runs next. Each callback belongs to a process (by its context); a process's own callbacks run in their order, and of
several processes that have something to do at one moment any may be next: the seed says which.
Always holds: nothing of a dead process runs. Callbacks of a stopped process wait until it goes on. Time passes only when no
process has anything to do. Work that is given to threads runs here, at a later moment. It runs in one piece, unless what it
calls pauses it.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from simnet import Network
    from simprocess import Process, Processes

#: The process that a callback belongs to.
PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")
#: Work in a thread takes up to so many seconds.
THREAD_S = 0.004


class HistoryTooLong(Exception):
    """More happened than a history may have."""


_numbers = itertools.count()


class _Numbered:
    """Hashed by a number, so that sets of them have the same order in each run."""

    _number: int

    def __hash__(self) -> int:
        return self._number


class _Future(_Numbered, asyncio.Future[Any]):
    def __init__(self, **given: Any) -> None:
        self._number = next(_numbers)
        super().__init__(**given)


class _Task(_Numbered, asyncio.Task[Any]):
    def __init__(self, *given: Any, **more: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*given, **more)


class SimLoop(asyncio.AbstractEventLoop):
    """network, processes: set by the world that owns this."""

    network: Network
    processes: Processes

    def __init__(self, rng: random.Random, steps_max: int = 3_000_000) -> None:
        self.now = 0.0
        self.steps = 0
        self._steps_max = steps_max
        self._rng = rng
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = itertools.count()
        #: Processes that have callbacks to run, and theirs.
        self._busy: list[Process] = []
        self._ready: dict[Process, deque[asyncio.Handle]] = {}
        #: What no process foresaw.
        self.unforeseen: list[str] = []
        #: Threads' work that was paused. It is kept, as nothing of a dead process is cleaned up.
        self._paused: list[greenlet] = []

    # -- the run

    def run_until(self, done: Callable[[], bool], until: float) -> bool:
        """Until `done()`, or until that time. Whether it is done. Raises HistoryTooLong."""
        while not done():
            if not self._busy:
                if not self._timers or self._timers[0][0] > until:
                    self.now = max(self.now, until)
                    return done()
                self._wake_timers()
                continue
            self.steps += 1
            if self.steps > self._steps_max:
                raise HistoryTooLong(f"{self.steps} steps by {self.now:.3f} s")
            self._run_one()
        return True

    def _wake_timers(self) -> None:
        self.now = max(self.now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self.now:
            _, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                self._add(handle)

    def _run_one(self) -> None:
        busy = self._busy
        at = self._rng.randrange(len(busy)) if len(busy) > 1 else 0
        process = busy[at]
        waiting = self._ready[process]
        handle = waiting.popleft()
        if not waiting:
            busy[at] = busy[-1]
            busy.pop()
        if not handle.cancelled():
            handle._run()

    def _add(self, handle: asyncio.Handle) -> None:
        process: Process = handle._context[PROCESS]
        if process.stopped:
            process.parked.append(handle)
            return
        if not process.alive:
            return
        waiting = self._ready.get(process)
        if waiting is None:
            waiting = self._ready[process] = deque()
        if not waiting:
            self._busy.append(process)
        waiting.append(handle)

    def forget(self, process: Process) -> None:
        """It is dead: nothing of it runs any more."""
        if self._ready.pop(process, None):
            self._busy.remove(process)

    def park(self, process: Process) -> None:
        """It is stopped: what it has to do waits."""
        waiting = self._ready.pop(process, None)
        if waiting:
            self._busy.remove(process)
            process.parked.extend(waiting)

    def unpark(self, process: Process) -> None:
        parked, process.parked = process.parked, []
        for handle in parked:
            if not handle.cancelled():
                self._add(handle)

    # -- what asyncio asks for

    def time(self) -> float:
        return self.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context or contextvars.copy_context())
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + max(0.0, delay), callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context or contextvars.copy_context())
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        return _Task(coro, loop=self, name=None if name is None else str(name), context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        result = self.create_future()

        def work() -> None:
            if result.cancelled():
                return
            try:
                value = func(*args)
            # As in a thread.
            except Exception as error:  # noqa: BLE001
                if not result.cancelled():
                    result.set_exception(error)
            else:
                if not result.cancelled():
                    result.set_result(value)

        self.call_later(self._rng.random() * THREAD_S, _in_thread, work)
        return result

    def pause(self, seconds: float) -> None:
        """Lets so much time pass for the work of a thread. What is no such work goes on at once."""
        thread = getcurrent()
        if thread.parent is None:
            return
        self._paused.append(thread)
        self.call_later(seconds, thread.switch)
        thread.parent.switch()

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def get_task_factory(self) -> None:
        return None

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        who = PROCESS.get(None)
        self.unforeseen.append(
            f"{who}: {context.get('message')}: {_shown(error)} {context.get('task') or ''}"
        )

    async def shutdown_asyncgens(self) -> None:
        pass

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        PROCESS.get().handlers[sig] = (callback, args, contextvars.copy_context())

    def remove_signal_handler(self, sig: int) -> bool:
        return PROCESS.get().handlers.pop(sig, None) is not None

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        import socket

        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host or "127.0.0.1", int(port or 0)))]

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        return self.network.listen(protocol_factory, sock.getsockname(), sock)

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        return await self.network.connect(protocol_factory, (host, port))

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        return await self.network.connect(protocol_factory, path)

    async def subprocess_exec(self, protocol_factory: Any, *args: Any, **_: Any) -> Any:
        return self.processes.execute(protocol_factory, args)

    async def sock_accept(self, sock: Any) -> Any:
        """Listening sockets are not handed over here."""
        await self.create_future()


def _in_thread(work: Callable[[], None]) -> None:
    thread = greenlet(work)
    thread.gr_context = contextvars.copy_context()
    thread.switch()


def _shown(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))
