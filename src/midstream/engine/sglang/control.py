"""The calls to an SGLang server beside its requests: pause, load, flush, abort, checksums."""

from __future__ import annotations

import asyncio
from pathlib import Path

from midstream.engine.servers.chunks import error_text
from midstream.engine.servers.control import CALL_S_MAX, STEP_S_MAX, ServerControl, ServerRefused, read_object
from midstream.http.call import CallFailed

#: Checksums read all weights.
CHECKSUM_S_MAX = 300.0
#: Answers of the scheduler between the pause and the switch. /pause_generation is answered before the scheduler knows of it.
#: The first answer comes after all tokens that were sampled; by the second one, all of them were written.
BARRIER = 2


class SglangControl(ServerControl):
    VERSION_PATH = "/model_info"

    async def pause(self) -> None:
        await self._post("/pause_generation", {"mode": "in_place"}, STEP_S_MAX)
        for _ in range(BARRIER):
            await self.reach_scheduler(STEP_S_MAX)
        # In this turn of the loop, everything that is readable by now is read.
        await asyncio.sleep(0)

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False}, CALL_S_MAX)

    async def reach_scheduler(self, timeout_s: float) -> None:
        """Return when it has answered, which it does between two steps. Raises CallFailed if it does not."""
        answer = await self._get("/server_info", timeout_s)
        if answer.status != 200:
            raise CallFailed(f"/server_info answered {answer.status}: {error_text(answer.body)}")

    async def reload(self, directory: Path) -> None:
        body = {"model_path": str(directory), "flush_cache": False, "abort_all_requests": False}
        await self._load("/update_weights_from_disk", body, directory, STEP_S_MAX)

    async def set_version(self, version: str) -> None:
        body = {"new_version": version, "abort_all_requests": False}
        await self._post("/update_weight_version", body, CALL_S_MAX)

    async def flush(self) -> None:
        """Forget all cached KV. SGLang refuses that while it has requests, and has one for a moment behind its answer."""
        await self._post(f"/flush_cache?timeout={CALL_S_MAX}", None, STEP_S_MAX)

    async def abort(self, name: str) -> None:
        """The request of this name ends between two steps, if it is there, and its KV is free."""
        await self._post("/abort_request", {"rid": name}, CALL_S_MAX)

    async def checksum(self) -> str:
        """Of the weights as the server holds them."""
        with self._held_up(CHECKSUM_S_MAX):
            answer = await self._post("/weights_checker", {"action": "checksum"}, CHECKSUM_S_MAX)
        found = read_object(answer).get("per_engine_checksum")
        if not isinstance(found, str) or not found:
            raise ServerRefused("/weights_checker gave no per_engine_checksum")
        return found
