"""The calls to an SGLang server beside its requests: pause, load, flush, abort, checksums."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from midstream.engine.servers.chunks import error_text
from midstream.engine.servers.switching import ServerRefused, load_s
from midstream.http.call import CallFailed, call

#: For calls that the server answers at once.
CALL_S_MAX = 10.0
#: What SGLang does between two steps waits for the running one, at worst that of a long prompt.
STEP_S_MAX = 60.0
#: Checksums read all weights.
CHECKSUM_S_MAX = 300.0
#: Answers of the scheduler between the pause and the switch. /pause_generation is answered before the scheduler knows of it.
#: The first answer comes after all tokens that were sampled; by the second one, all of them were written.
BARRIER = 2


class SglangControl:
    """held_up: entered while a call holds up the scheduler, with the most seconds."""

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

    async def pause(self) -> None:
        """Between two steps. Requests and their KV stay.

        Returns when nothing is computed any more and everything that was sampled has been sent.
        """
        await self._post("/pause_generation", {"mode": "in_place"}, STEP_S_MAX)
        for _ in range(BARRIER):
            await self.reach_scheduler(STEP_S_MAX)
        # In this turn of the loop, everything that is readable by now is read.
        await asyncio.sleep(0)

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False}, CALL_S_MAX)

    async def reach_scheduler(self, timeout_s: float) -> None:
        """Return when it has answered, which it does between two steps. Raises CallFailed if it does not."""
        answer = await call(self._url, "GET", "/server_info", None, timeout_s, self._headers)
        if answer.status != 200:
            raise CallFailed(f"/server_info answered {answer.status}: {error_text(answer.body)}")

    async def reload(self, directory: Path) -> None:
        """Load weights from files. Only in a pause, or before anything runs. Cached KV stays."""
        seconds = await asyncio.to_thread(load_s, directory, self._load_s_max)
        body = {"model_path": str(directory), "flush_cache": False, "abort_all_requests": False}
        with self._held_up(seconds):
            await self._post("/update_weights_from_disk", body, STEP_S_MAX + seconds)

    async def set_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        await self._post("/update_weight_version", body, CALL_S_MAX)

    async def version(self, timeout_s: float) -> str | None:
        """The version of the weights, as the server reports it."""
        answer = await call(self._url, "GET", "/model_info", None, timeout_s, self._headers)
        version = _read(answer.body).get("weight_version") if answer.status == 200 else None
        if answer.status != 200:
            raise ServerRefused(f"/model_info answered {answer.status}: {error_text(answer.body)}")
        return version if isinstance(version, str) else None

    async def flush(self) -> None:
        """Forget all cached KV. SGLang refuses that while it has requests."""
        await self._post("/flush_cache", None, STEP_S_MAX)

    async def abort(self, name: str) -> None:
        """The request of this name ends between two steps, if it is there, and its KV is free."""
        await self._post("/abort_request", {"rid": name}, CALL_S_MAX)

    async def checksum(self) -> str:
        """Of the weights as the server holds them."""
        with self._held_up(CHECKSUM_S_MAX):
            answer = await self._post("/weights_checker", {"action": "checksum"}, CHECKSUM_S_MAX)
        found = _read(answer).get("per_engine_checksum")
        if not isinstance(found, str) or not found:
            raise ServerRefused("/weights_checker gave no per_engine_checksum")
        return found

    async def _post(self, path: str, body: object, timeout_s: float) -> bytes:
        data = b"" if body is None else json.dumps(body).encode()
        answer = await call(self._url, "POST", path, data, timeout_s, self._headers)
        if answer.status != 200:
            raise ServerRefused(f"{path} answered {answer.status}: {error_text(answer.body)}", answer.status)
        return answer.body


def _read(body: bytes) -> dict[str, Any]:
    """Raises CallFailed."""
    try:
        found = json.loads(body)
    except ValueError as error:
        raise CallFailed(f"no JSON: {body[:200]!r}") from error
    if not isinstance(found, dict):
        raise CallFailed(f"no JSON object: {body[:200]!r}")
    return found
