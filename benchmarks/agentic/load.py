"""The client: all trajectories of a trace at once, as text of one character per token.

Owns: what is sent for a trace, and the sending of it. Other routers refuse prompts of token ids, and some place requests by
their text, so prompts are text; filters (agentic/fleet.py) make it ids again before a replica.
Always holds: lengths and waits are the trace's, so every run does the same work. The ids that the environment adds depend on
the run's name, so no run finds what another one cached. A turn that is refused, or whose connection is lost, is sent again,
and counted; any other answer than the tokens asked for ends the run.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_load import SENT, VOCABULARY, Connections, TurnFailed, session_key
from vllm_turns import Progress

from agentic.books import Served
from agentic.trace import Trace

#: The character of token 0; the others follow. All take two bytes.
FIRST_CHARACTER = 0x100
CHARACTERS = [chr(FIRST_CHARACTER + token) for token in range(1024)]
#: Answers that say: not now. A lost connection counts as one.
LATER = (425, 429, 502, 503, 504)
RETRY_S, RETRIES_MAX = 0.25, 240


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(CHARACTERS.__getitem__, ids))


def ids_of(text: str) -> list[int]:
    return [ord(character) - FIRST_CHARACTER for character in text]


def asked(body: bytes) -> bytes:
    """A request as a replica gets it: ids for text, and no field that a router put in."""
    fields = json.loads(body)
    kept = {name: fields[name] for name in SENT if name in fields}
    kept |= {"prompt": ids_of(fields["prompt"]), "ignore_eos": True, "return_token_ids": True}
    return json.dumps(kept, separators=(",", ":")).encode()


def answered(headers: Mapping[str, str], body: bytes, replica: str = "") -> bytes:
    """An answer as the client gets it: text for ids. The replica's name is its id, which every router passes on."""
    fields = json.loads(body)
    (choice,) = fields["choices"]
    short = {
        "id": replica or headers["x-midstream-replica"],
        "object": "text_completion",
        "created": 0,
        "model": "m",
        "choices": [
            {"index": 0, "text": text_of(choice["token_ids"]), "finish_reason": "length", "logprobs": None}
        ],
        "usage": fields["usage"],
    }
    return json.dumps(short, separators=(",", ":"), ensure_ascii=False).encode()


class Content:
    """The ids of a run. name: of the run."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    def prompt(self, place: int) -> list[int]:
        """The first one of a trajectory: what all share, then the rest of its group's prompt."""
        one, shared = self._trace.trajectories[place], self._trace.shared_len
        return self._drawn("shared", shared) + self._drawn(f"group-{one.group}", one.prompt_len - shared)

    def observation(self, place: int, turn: int, count: int) -> list[int]:
        return self._drawn(f"{place}-{turn}", count)

    def _drawn(self, part: str, count: int) -> list[int]:
        return random.Random(f"{self._name}/{part}").choices(range(VOCABULARY), k=count)


@dataclass
class Run:
    """What came of one run. Seconds of one clock."""

    began_s: float
    turns: list[Served] = field(default_factory=list)
    # When each trajectory was over, by its place.
    over_s: dict[int, float] = field(default_factory=dict)
    # Turns that were sent again, by the reason.
    again: dict[str, int] = field(default_factory=dict)
    # Replicas whose processes died, and when.
    lost: list[tuple[str, float]] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return max(self.over_s.values()) - self.began_s


class Client:
    """Sends a trace to `port`. keys: names the trajectories' sessions. ended: awaited with the key of each that is over."""

    def __init__(
        self,
        trace: Trace,
        content: Content,
        port: int,
        keys: str,
        progress: Progress,
        ended: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._trace, self._content, self._port, self._keys = trace, content, port, keys
        self._progress, self._ended = progress, ended
        self.run = Run(time.perf_counter())

    async def drive(self) -> Run:
        """Raises TurnFailed."""
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(len(self._trace.trajectories)):
                    group.create_task(self._trajectory(place))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        finally:
            self._progress.end()
        return self.run

    async def _trajectory(self, place: int) -> None:
        key, connections = session_key(self._keys, place), Connections()
        prompt: list[int] = []
        try:
            for number, step in enumerate(self._trace.trajectories[place].plan):
                await asyncio.sleep(step.pause_s)
                prompt += (
                    self._content.observation(place, number, step.added)
                    if number
                    else self._content.prompt(place)
                )
                prompt += await self._turn(connections, place, key, prompt, step.answer, number)
                self._progress.add()
        finally:
            await connections.close()
        self.run.over_s[place] = time.perf_counter()
        if self._ended is not None:
            await self._ended(key)

    async def _turn(
        self, connections: Connections, place: int, key: str, prompt: list[int], answer: int, number: int
    ) -> list[int]:
        body = _request(prompt, answer, seed=1000 * place + number)
        # HAProxy and vllm-router look into the first one, smg and sglang-router into the second.
        headers = {"x-session-id": key, "x-smg-routing-key": key}
        began_s = time.perf_counter()
        for _ in range(RETRIES_MAX):
            try:
                status, told, response = await connections.exchange(
                    "POST", self._port, "/v1/completions", headers, body
                )
            except TurnFailed:
                status, told, response = 0, {}, b""
            if status and status not in LATER:
                break
            reason = str(status) if status else "connection lost"
            self.run.again[reason] = self.run.again.get(reason, 0) + 1
            await asyncio.sleep(float(told.get("retry-after", RETRY_S)))
        served, ids = _read(status, response, place, len(prompt), answer, began_s)
        self.run.turns.append(served)
        return ids


def _request(prompt: Sequence[int], answer: int, seed: int) -> bytes:
    body = {
        "model": "m",
        "prompt": text_of(prompt),
        "max_tokens": answer,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
    }
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _read(
    status: int, body: bytes, place: int, prompt: int, wanted: int, began_s: float
) -> tuple[Served, list[int]]:
    """Raises TurnFailed."""
    if status != 200:
        raise TurnFailed(f"a turn was answered {status}: {body[:500].decode(errors='replace')}")
    fields: dict[str, Any] = json.loads(body)
    ids, usage = ids_of(fields["choices"][0]["text"]), fields["usage"]
    if (len(ids), usage["prompt_tokens"]) != (wanted, prompt):
        raise TurnFailed(
            f"asked for {wanted} tokens on {prompt}, got {len(ids)} on {usage['prompt_tokens']} of the prompt"
        )
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Served(place, fields["id"], began_s, time.perf_counter(), prompt, cached, len(ids)), ids
