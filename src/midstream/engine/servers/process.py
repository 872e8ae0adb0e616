"""The process of an engine's server that this one starts, or a running server that it attaches to.

Owns: the start of the server, noticing its end, its log.
Always holds: when close() returns, a server that was started here is gone, with every process below it. The same holds soon
after this process has ended in any way (keeper.py). An attached server is left running. `wait_ended` returns once, when the
server has ended by itself.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec

from midstream.core.http_answer import NotThatAnswer
from midstream.core.server_settings import ServerSettings
from midstream.engine.servers import keeper
from midstream.engine.servers.chunks import error_of
from midstream.http.call import CallFailed, NotListening, call

logger = logging.getLogger(__name__)

#: Of the model, at a server that is started here.
NAME = "midstream"
#: For a server that was asked to end.
STOP_GRACE_S = 4.0
#: For the operating system to end killed processes.
GONE_S_MAX = 30.0
HEALTH_POLL_S = 1.0
#: An attached server is gone when nothing listens there so many times. Another one may be on its way.
GONE = 3
START_POLL_S = 0.25
#: While a server loads its model, it is said so often what is waited for.
SAY_S = 15.0
#: For an answer of the server's API process alone.
ANSWER_S_MAX = 10.0
#: For the first answer of a server, which may compile kernels.
FIRST_S_MAX = 300.0
#: For calls that are made once. vLLM computes /openapi.json for seconds when it is asked for the first time.
INSPECT_S_MAX = 60.0
#: What stands for the status of /health when there is none.
NO_ANSWER, NOBODY = 0, -1
#: The status of /health when the engine is dead. The server itself ends some seconds later.
ENGINE_DEAD = 503
LOG_LINES = 15
LOG_BYTES = 64 * 2**10


class ServerFailed(Exception):
    """The server did not start, or lacks something that midstream needs.

    The message ends with the last lines of the log of a server that was started here.
    """


class _Report(msgspec.Struct, frozen=True):
    """A line from the keeper."""

    pid: int | None = None
    error: str | None = None
    code: int | None = None


class OpenApi(msgspec.Struct, frozen=True):
    paths: dict[str, msgspec.Raw]


class ServerProcess(abc.ABC):
    """url: of a running server to attach to, instead of starting one. gpus: that it may use; () lets the engine choose.

    log: the file for the server's output; None is the standard error of this process.
    """

    #: The engine, and its section of the settings.
    WHO, SECTION = "the server", ""
    #: What answers 200 while the server lives, and what says that it has begun to serve.
    LIVES, SERVES = "/health", "/health"
    #: The environment variable in which its user sets its key.
    KEY = ""

    def __init__(
        self,
        model_dir: Path,
        settings: ServerSettings,
        *,
        url: str | None,
        gpus: tuple[int, ...] = (),
        log: Path | None,
    ) -> None:
        self._model_dir = model_dir
        self._settings = settings
        self._gpus = gpus
        self._attached = url is not None
        self._log = log
        self._python = settings.python or sys.executable
        self._keeper: asyncio.subprocess.Process | None = None
        # The processes below the keeper with their start times.
        self._descendants: dict[int, int] = {}
        # Keeps other processes from the server's port.
        self._port: socket.socket | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._exit: asyncio.Future[str] | None = None
        self._ended: asyncio.Future[str] | None = None
        self.url = (url or "").rstrip("/")
        self.pid: int | None = None
        self.version = ""
        self.max_model_len = 0
        self.on_cpu = False
        # Requests may have priorities.
        self.by_priority = False
        # It says which weights it has. Older versions of vLLM do not.
        self.names_weights = True

    def __repr__(self) -> str:
        kind = "attached" if self._attached else f"pid={self.pid}"
        return f"{type(self).__name__}({self.url or 'not started'}, {kind})"

    @property
    def headers(self) -> str:
        """Header lines for every call, with their line ends: the key, if the user has set one for the server."""
        key = self._settings.env.get(self.KEY, os.environ.get(self.KEY, ""))
        # As the bytes of its UTF-8, which a header line holds as they are.
        return f"authorization: Bearer {key.encode().decode('latin-1')}\r\n" if key else ""

    @property
    def is_stopped(self) -> bool:
        """Whether a process of it was stopped, by SIGSTOP or a terminal. Of an attached server this is not known."""
        return any(keeper.is_stopped(pid, start) for pid, start in self._descendants.items())

    @abc.abstractmethod
    async def _spawn(self) -> None:
        """Start the server (`_run`)."""

    @abc.abstractmethod
    async def _inspect(self) -> None:
        """Find out what the server is and has. Raises ServerFailed when it lacks something."""

    async def start(self) -> None:
        """Start or attach. Returns when the server is healthy and has what is needed. Raises ServerFailed, ConfigError."""
        await self.close()
        try:
            if self._attached:
                check_url(self.SECTION, self.url)
            else:
                await self._spawn()
            try:
                async with asyncio.timeout(self._settings.load_s_max):
                    await self._healthy()
            except TimeoutError as error:
                what = f"{self.WHO} at {self.url}" if self._attached else self.WHO
                limit = f"{self._settings.load_s_max:g} s ({self.SECTION}.load_s_max)"
                raise self._failed(f"{what} was not ready within {limit}") from error
            await self._inspect()
            self._descendants = await asyncio.to_thread(_descendants, self._keeper)
        except BaseException:
            # This includes cancellation: nothing is left running.
            self.kill()
            await self.close()
            raise
        self._ended = asyncio.get_running_loop().create_future()
        self._watchers.append(asyncio.create_task(self._watch_health(), name=f"{self.WHO}'s health"))
        if self._exit is not None:
            self._exit.add_done_callback(lambda ended: self._end(ended.result()))

    async def wait_ended(self) -> str:
        """Wait until the server has ended by itself or has been silent for too long. Returns the reason.

        Only after start(). Never returns after close(), which ends the rest of the server.
        """
        if self._ended is None:
            raise RuntimeError("the server is not running")
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Kill the server without waiting for its end; close() waits. An attached server keeps running."""
        stdin = None if self._keeper is None else self._keeper.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.close()

    async def close(self) -> None:
        """Ask the server to end, and kill it if it does not. Returns when nothing of it is left.

        Idempotent; start() may follow.
        """
        watchers, self._watchers = self._watchers, []
        for task in watchers:
            task.cancel()
        keeper_process, self._keeper = self._keeper, None
        self._exit, self._ended, self.pid = None, None, None
        descendants, self._descendants = self._descendants, {}
        if self._port is not None:
            self._port.close()
            self._port = None
        if keeper_process is not None:
            self._stopping = asyncio.create_task(_stop(keeper_process, descendants), name=f"{self.WHO}'s end")
        if self._stopping is not None:
            # The task continues if this call is cancelled, and the next call waits for it.
            await asyncio.shield(self._stopping)

    def _take_port(self) -> int:
        self._port = _reserve()
        port: int = self._port.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return port

    async def _run(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the server under a keeper. Raises ServerFailed."""
        with _log_file(self._log) as log:
            self._keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(keeper.__file__)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        spec = {"command": command, "env": env, "grace_s": STOP_GRACE_S}
        self._keeper.stdin.write(msgspec.json.encode(spec) + b"\n")
        started = await _report(self._keeper.stdout)
        if started.pid is None:
            why = started.error or "its keeper ended"
            raise ServerFailed(
                f"{self.WHO} cannot be started ({self.SECTION}.python is {self._python}): {why}"
            )
        self.pid = started.pid
        logger.info(
            "%s is starting (pid %s, log %s); that may take minutes", self.WHO, self.pid, self._log or "here"
        )
        self._exit = asyncio.get_running_loop().create_future()
        watch = self._watch_exit(self._keeper.stdout, self._exit)
        self._watchers.append(asyncio.create_task(watch, name=f"{self.WHO}'s exit"))

    async def _healthy(self) -> None:
        """Return when the server answers 200. Raises ServerFailed if it ends instead, or is closed meanwhile."""
        loop = asyncio.get_running_loop()
        began = logged_at = loop.time()
        while True:
            if (now := loop.time()) - logged_at >= SAY_S:
                logged_at = now
                logger.info("%s", self._waits_for(now - began))
            if self._exit is not None and self._exit.done():
                raise self._failed(f"{self._exit.result()} before it was ready")
            if not self._attached and self._keeper is None:
                raise self._failed("closed before it was ready")
            if await self.health(path=self.SERVES) == 200:
                return
            if self._exit is None:
                await asyncio.sleep(START_POLL_S)
            else:
                await asyncio.wait([self._exit], timeout=START_POLL_S)

    def _waits_for(self, waited_s: float) -> str:
        limit = (
            f"{waited_s:.0f} s so far, {self._settings.load_s_max:g} s at most ({self.SECTION}.load_s_max)"
        )
        if self._attached:
            return f"waiting for the {self.WHO} server at {self.url} to answer {self.SERVES}: {limit}"
        last = [] if self._log is None else _last_lines(self._log)[-1:]
        return "; ".join(
            [
                f"waiting for {self.WHO} to load the model: {limit}",
                *(f"its log says: {line}" for line in last),
            ]
        )

    async def health(self, timeout_s: float = ANSWER_S_MAX, path: str = "") -> int:
        """The status of what says that it lives; NO_ANSWER, or NOBODY if nothing listens there."""
        try:
            answer = await call(self.url, "GET", path or self.LIVES, None, timeout_s, self.headers)
        except NotListening:
            return NOBODY
        except CallFailed:
            return NO_ANSWER
        return answer.status

    async def ask(
        self, path: str, body: bytes, timeout_s: float, refused: type[Exception] = CallFailed
    ) -> bytes:
        """The answer to one request, whole. Raises CallFailed, and `refused` for an error status."""
        answer = await call(self.url, "POST", path, body, timeout_s, self.headers)
        if answer.status != 200:
            raise refused(error_of(self.WHO, answer.status, answer.body))
        return answer.body

    async def _get(self, path: str, kind: type[Any], hint: str = "", timeout_s: float = INSPECT_S_MAX) -> Any:
        where = f"the {self.WHO} server at {self.url}: GET {path}"
        try:
            answer = await call(self.url, "GET", path, None, timeout_s, self.headers)
        except CallFailed as error:
            raise self._failed(f"{where}: {error}") from error
        if answer.status == 401:
            raise self._failed(f"{where}: the server needs a key: set {self.KEY} in {self.SECTION}.env")
        if answer.status != 200:
            raise self._failed(f"{where}: status {answer.status}{'; ' * bool(hint)}{hint}")
        try:
            return answer.read(kind)
        except NotThatAnswer as error:
            raise self._failed(f"{where}: not the answer of a {self.WHO} server: {error}") from error

    async def _watch_exit(self, stdout: asyncio.StreamReader, exited: asyncio.Future[str]) -> None:
        code = (await _report(stdout)).code
        exited.set_result(f"{self.WHO} ended with code {'unknown' if code is None else code}")

    async def _watch_health(self) -> None:
        loop = asyncio.get_running_loop()
        answered_at, silence_s, dead, gone = loop.time(), self._settings.silence_s_max, 0, 0
        while True:
            await asyncio.sleep(min(HEALTH_POLL_S, silence_s / 4))
            status = await self.health(min(ANSWER_S_MAX, silence_s / 2))
            if status == 200:
                answered_at = loop.time()
            elif loop.time() - answered_at >= silence_s:
                # The server was asked just now, so it was not our own loop that stood still.
                break
            dead = dead + 1 if status == ENGINE_DEAD else 0
            if dead == 2 and not self._attached:
                # Before an attached server, a proxy may give this answer.
                self._end(f"{self.WHO} said that its engine is dead ({self.LIVES} {status})")
                return
            gone = gone + 1 if status == NOBODY else 0
            if gone == GONE and self._attached:
                self._end(f"nothing listens at {self.url} any more")
                return
        self._end(
            f"{self.WHO} did not answer {self.LIVES} for {silence_s:g} s ({self.SECTION}.silence_s_max)"
        )

    def _end(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)
        # Its remaining processes serve no request, so close() need not ask them to end.
        self.kill()

    def _failed(self, why: str) -> ServerFailed:
        if self._attached:
            return ServerFailed(why)
        if self._log is None:
            return ServerFailed(f"{why}; its log is above")
        lines = "\n".join(_last_lines(self._log))
        return ServerFailed(f"{why}; the last of {self._log}:\n{lines}")


def check_url(section: str, url: str) -> None:
    """Raises ServerFailed unless `url` is a valid URL to attach to."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ServerFailed(f"{section}.urls: expected http://HOST:PORT, got {url}")


def _reserve() -> socket.socket:
    """A socket bound to a free loopback port. No other process gets it, but the server, which reuses addresses, can listen."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


@contextlib.contextmanager
def _log_file(log: Path | None) -> Iterator[IO[bytes] | None]:
    """The file for the server's output. The log of the server before is kept beside it, once."""
    if log is None:
        yield None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_name(log.name + ".1"))
    with log.open("ab") as file:
        yield file


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError as error:
        return [f"(it cannot be read: {error})"]


async def _report(stdout: asyncio.StreamReader) -> _Report:
    line = await stdout.readline()
    return msgspec.json.decode(line, type=_Report) if line else _Report()


def _descendants(process: asyncio.subprocess.Process | None) -> dict[int, int]:
    """Every process below the keeper, with its start time."""
    pids = [] if process is None else keeper.descendants(process.pid)
    return {pid: start for pid in pids if (start := keeper.started_at(pid)) is not None}


async def _stop(process: asyncio.subprocess.Process, descendants: dict[int, int]) -> None:
    """Return when the keeper has ended, and so nothing of the server is left.

    descendants: processes to kill if the keeper itself was killed.
    """
    assert process.stdin is not None
    # It is closing if the server was killed.
    if not process.stdin.is_closing():
        with contextlib.suppress(OSError):
            process.stdin.write(b"end\n")
            await process.stdin.drain()
    try:
        async with asyncio.timeout(STOP_GRACE_S + GONE_S_MAX):
            await process.wait()
            if process.returncode != 0:
                await _end_orphans(descendants)
    except TimeoutError:
        logger.error("processes of the server were killed and have not ended; giving up")
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    process.stdin.close()


async def _end_orphans(descendants: dict[int, int]) -> None:
    while left := [pid for pid, start in descendants.items() if keeper.started_at(pid) == start]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(keeper.ROUND_S)
