"""The calls to a vLLM server that change what it serves, and what they leave behind when one fails.

Always holds: when `switch` returns, the new weights serve under the new version; when it raises Unchanged, the old ones do,
under the old version; after anything else nobody knows, and the server has to be ended. Nothing is sampled between the first
call and the last.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from midstream.httpcall import CallFailed, call

logger = logging.getLogger(__name__)

CALL_S_MAX = 30.0  # for what answers at once
PAUSE_S_MAX = 300.0  # a pause waits for the step that runs: a long prompt's, at worst
#: Round trips through vLLM's API process and its engine between the pause and the switch: every chunk that the API process had
#: to write when the pause returned was written before it answers the first; the second is for those who doubt it.
BARRIER = 2


class Unchanged(Exception):
    """The switch failed, and what served before serves again."""


class Control:
    """The control endpoints of one server."""

    def __init__(self, url: str, headers: str, load_s_max: float) -> None:
        self._url = url
        self._headers = headers
        self._load_s_max = load_s_max

    def __repr__(self) -> str:
        return f"Control({self._url})"

    async def pause(self, *, clear_cache: bool = False) -> None:
        """Between two steps; requests and their KV stay. Returns when nothing is computed and everything sampled was sent."""
        clear = "true" if clear_cache else "false"
        await self._post(f"/pause?mode=keep&clear_cache={clear}", None, PAUSE_S_MAX)
        for _ in range(BARRIER):
            status, body = await call(self._url, "GET", "/is_paused", None, CALL_S_MAX, self._headers)
            if status != 200 or _read(body).get("is_paused") is not True:
                raise CallFailed(f"vLLM says it is paused, and then {status} {body[:200]!r}")
        await asyncio.sleep(0)  # what is readable by now is read in this turn of the loop

    async def version(self, timeout_s: float) -> str | None:
        """Of the weights, by the server's word."""
        status, body = await call(self._url, "GET", "/weight_info", None, timeout_s, self._headers)
        if status != 200:
            raise Refused(f"/weight_info answered {status}: {_message(body)}")
        said = _read(body).get("weight_version")
        return said if isinstance(said, str) else None

    async def resume(self) -> None:
        await self._post("/resume", None, CALL_S_MAX)

    async def reload(self, directory: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._post("/collective_rpc", body, self._load_s_max)

    async def set_version(self, version: str) -> None:
        await self._post("/update_weight_version", {"new_version": version}, CALL_S_MAX)

    async def reset_cache(self) -> None:
        await self._post("/reset_prefix_cache", None, CALL_S_MAX)

    async def _post(self, path: str, body: object, timeout_s: float) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        status, answer = await call(self._url, "POST", path, data, timeout_s, self._headers)
        if status != 200:
            raise Refused(f"{path.partition('?')[0]} answered {status}: {_message(answer)}")


class Refused(Exception):
    """The server answered a call, and not with success."""


async def switch(
    control: Control,
    new: Path,
    old: Path,
    version: str,
    on_switch: Callable[[], None],
    *,
    resume: bool = True,
) -> None:
    """Load the weights of `new` between two steps. Raises Unchanged; CallFailed, Refused: the server is in doubt.

    on_switch: called when everything that was sampled before has arrived, and nothing can be sampled any more until it returns.
    resume: whether steps go on after it.
    """
    await control.pause()
    try:
        await control.reload(new)
    except Refused as error:
        logger.warning("vLLM could not load %s; going back to %s: %s", new, old, error)
        await control.reload(old)  # without it the next step would fail: the weights are half unloaded
        if resume:
            await control.resume()
        raise Unchanged(f"vLLM could not load the snapshot: {error}") from error
    await control.set_version(version)
    on_switch()
    if resume:
        await control.resume()


def _read(body: bytes) -> dict[str, Any]:
    """Raises CallFailed."""
    try:
        found = json.loads(body)
    except ValueError as error:
        raise CallFailed(f"no JSON: {body[:200]!r}") from error
    if not isinstance(found, dict):
        raise CallFailed(f"no JSON object: {body[:200]!r}")
    return found


def _message(answer: bytes) -> str:
    """vLLM's word for what went wrong."""
    try:
        found = json.loads(answer)
    except ValueError:
        return answer[:500].decode("utf-8", "replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
