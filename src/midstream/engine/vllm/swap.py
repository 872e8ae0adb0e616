"""The calls to a vLLM server that switch its weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from midstream.engine.servers.chunks import error_text
from midstream.engine.servers.control import CALL_S_MAX, STEP_S_MAX, ServerControl, ServerRefused, read_object
from midstream.http.call import CallFailed, call

#: Round trips through vLLM's API process and its engine, between the pause and the switch. Before it answers the first one, the
#: API process has written every chunk that it had to write when the pause returned. The second one is for safety.
BARRIER = 2


class Control(ServerControl):
    """versions: the server names its weights. One of an older vLLM does not."""

    VERSION_PATH = "/weight_info"

    def __init__(
        self,
        url: str,
        headers: str,
        load_s_max: float,
        held_up: Callable[[float], AbstractContextManager[None]] = lambda _: nullcontext(),
        *,
        versions: bool = True,
    ) -> None:
        super().__init__(url, headers, load_s_max, held_up)
        self._versions = versions

    async def pause(self, *, clear_cache: bool = False) -> None:
        await self.stop(clear_cache=clear_cache)
        await self.read_all()

    async def stop(self, *, clear_cache: bool = False) -> None:
        """As `pause`. What was sampled may not have been read yet."""
        clear = "true" if clear_cache else "false"
        await self._post(f"/pause?mode=keep&clear_cache={clear}", None, STEP_S_MAX)

    async def read_all(self, within_s: float | None = None) -> None:
        """In a pause: returns when everything that was sampled has been read. Raises CallFailed.

        within_s: of each of its calls, where vLLM carries out another one first.
        """
        for _ in range(BARRIER):
            answer = await self._get("/is_paused", CALL_S_MAX if within_s is None else within_s)
            if answer.status != 200 or read_object(answer.body).get("is_paused") is not True:
                raise CallFailed(f"vLLM says it is paused, and then {answer.status} {answer.body[:200]!r}")
        # In this turn of the loop, everything that is readable by now is read.
        await asyncio.sleep(0)

    async def ranks(self) -> int:
        """Workers that take part in a trainer's group: tensor x pipeline x data parallel."""
        answer = await self._get("/get_world_size", CALL_S_MAX)
        size = read_object(answer.body).get("world_size")
        if answer.status != 200 or not isinstance(size, int):
            raise ServerRefused(f"/get_world_size answered {answer.status}: {answer.body[:200]!r}")
        return size

    async def resume(self) -> None:
        await self._post("/resume", None, CALL_S_MAX)

    async def reload(self, directory: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._load("/collective_rpc", body, directory)

    async def set_version(self, version: str) -> None:
        if self._versions:
            await self._post("/update_weight_version", {"new_version": version}, CALL_S_MAX)

    async def load_adapter(self, name: str, directory: Path, *, in_place: bool = False) -> None:
        """vLLM reads the files of `directory` between two steps, and perhaps again later.

        in_place: it has other files of this name, under which requests may run. Only in a pause.
        """
        body: dict[str, Any] = {"lora_name": name, "lora_path": str(directory)}
        if in_place:
            body["load_inplace"] = True
        await self._load("/v1/load_lora_adapter", body, directory, STEP_S_MAX)

    async def unload_adapter(self, name: str) -> None:
        """No new request can name it; those that run continue."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name}, CALL_S_MAX)

    async def reach_workers(self, timeout_s: float) -> None:
        """Return when all workers have answered, which they do between two steps. Raises CallFailed if they do not."""
        body = json.dumps({"method": "check_health"}).encode()
        await call(self._url, "POST", "/collective_rpc", body, timeout_s, self._headers)

    async def transfer(self, path: str, body: object, within_s: float) -> None:
        """A call of weight transfer, in which the workers may wait for the trainer."""
        with self._held_up(within_s):
            await self._post(path, body, within_s)

    async def ask_workers(
        self, method: str, arguments: Mapping[str, Any], within_s: float, *, holds_up: bool = True
    ) -> list[Any]:
        """What each worker answers to a method of the worker extension. holds_up: it may take longer than a step."""
        data = json.dumps({"method": method, "kwargs": arguments}).encode()
        with self._held_up(within_s) if holds_up else nullcontext():
            answer = await call(self._url, "POST", "/collective_rpc", data, within_s, self._headers)
        if answer.status != 200:
            said = error_text(answer.body)
            raise ServerRefused(f"{method} answered {answer.status}: {said}", answer.status)
        results = read_object(answer.body).get("results")
        if not isinstance(results, list):
            raise CallFailed(f"{method}: no results: {answer.body[:200]!r}")
        return results
