"""The calls to an engine's server beside its requests, as far as servers share them: those of a switch, and their errors."""

from __future__ import annotations

import abc
import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from midstream.core.http_answer import HttpAnswer
from midstream.engine.servers.chunks import error_text
from midstream.http.call import CallFailed, call

#: For calls that the server answers at once.
CALL_S_MAX = 10.0
#: What a server does between two steps waits for the running one, at worst that of a long prompt. Once the server serves,
#: watch.py ends one that hangs.
STEP_S_MAX = 60.0
#: A load of files may take a fixed time, and the time to read them from a slow disk.
LOAD_S, LOAD_BYTES_PER_S = 8.0, 50e6


class ServerRefused(Exception):
    """The server answered a call with an error status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServerControl(abc.ABC):
    """The control endpoints of one server. held_up: entered while a call holds up the engine, with the most seconds."""

    #: Where it reports the version of its weights.
    VERSION_PATH = ""

    def __init__(
        self,
        url: str,
        headers: str,
        load_s_max: float,
        held_up: Callable[[float], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._url = url
        self._headers = headers
        self._load_s_max = load_s_max
        self._held_up = held_up

    @abc.abstractmethod
    async def pause(self) -> None:
        """Pause between two steps. Requests and their KV stay.

        Returns when nothing is computed any more and everything that was sampled has been sent and read.
        """

    @abc.abstractmethod
    async def resume(self) -> None: ...

    @abc.abstractmethod
    async def reload(self, directory: Path) -> None:
        """Load the weights again, from files. Only in a pause, or before anything runs. Cached KV stays."""

    @abc.abstractmethod
    async def set_version(self, version: str) -> None: ...

    async def version(self, timeout_s: float) -> str | None:
        """The version of the weights, as the server reports it."""
        answer = await self._get(self.VERSION_PATH, timeout_s)
        if answer.status != 200:
            raise ServerRefused(f"{self.VERSION_PATH} answered {answer.status}: {error_text(answer.body)}")
        version = read_object(answer.body).get("weight_version")
        return version if isinstance(version, str) else None

    async def _load(self, path: str, body: object, directory: Path, step_s_max: float = 0.0) -> None:
        """step_s_max: how long the running step may take first."""
        seconds = await asyncio.to_thread(load_s, directory, self._load_s_max)
        with self._held_up(seconds):
            await self._post(path, body, step_s_max + seconds)

    async def _get(self, path: str, timeout_s: float) -> HttpAnswer:
        return await call(self._url, "GET", path, None, timeout_s, self._headers)

    async def _post(self, path: str, body: object, timeout_s: float) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        answer = await call(self._url, "POST", path, data, timeout_s, self._headers)
        if answer.status != 200:
            where = path.partition("?")[0]
            raise ServerRefused(f"{where} answered {answer.status}: {error_text(answer.body)}", answer.status)
        return answer.body


def load_s(directory: Path, load_s_max: float) -> float:
    """How long a server may take to load the files of `directory`."""
    size = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
    return min(load_s_max, LOAD_S + size / LOAD_BYTES_PER_S)


def read_object(body: bytes) -> dict[str, Any]:
    """Raises CallFailed."""
    try:
        found = json.loads(body)
    except ValueError as error:
        raise CallFailed(f"no JSON: {body[:200]!r}") from error
    if not isinstance(found, dict):
        raise CallFailed(f"no JSON object: {body[:200]!r}")
    return found
