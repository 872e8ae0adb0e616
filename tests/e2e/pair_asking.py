"""Asks a server for rows of features, and says what is wrong with an answer by itself and beside others.

Owns: how a row is asked, and what must hold of each answer, of its twin in the other form, and of its turn in the trace.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from feature_pairs import LENGTHS, PLAIN, STOP_IDS, STOPS, Names, Row, Talk, body_for, common, path_of
from pair_answers import TAKE, Said, Told, take_line

RETRYABLE = frozenset((409, 425, 429, 503))
ROUNDING = 1e-4


@dataclass
class Asked:
    row: Row
    session: str | None
    stream: bool
    body: dict[str, Any]
    status: int = 0
    param: str | None = None
    message: str = ""
    said: Said = field(default_factory=Said)


def talk_of(seed: int) -> Talk:
    rng = random.Random(seed)
    words = " ".join("".join(rng.choices("abcdefghij", k=rng.randint(1, 7))) for _ in range(12))
    return Talk([*words.encode()], words, [{"role": "user", "content": words}])


class Asker:
    def __init__(self, http: httpx.AsyncClient, names: Names, store: str) -> None:
        self._http, self._names, self.store = http, names, store
        self.counts = Counter[str]()
        #: Is called with each line of a stream.
        self.on_token: Callable[[], None] = lambda: None

    async def ask(self, row: Row, seed: int, name: str) -> Asked:
        """The row's request, behind the turns that it needs before it."""
        session = None if row["session"] == "none" else name
        talk = talk_of(seed)
        headers = {"x-midstream-failover": row["failover"], "x-midstream-records": row["kept"]}
        headers |= {} if session is None else {"x-multi-turn-session-id": session}
        if row["records"] == "files":
            headers["x-fireworks-r3-store-id"] = self.store
        if row["session"] in ("second", "branch"):
            same = {name: row[name] for name in ("wire", "model", "cache")}
            before = PLAIN | same | {"how": "whole"}
            first = await self._sent(before, seed + 1, session, headers, talk)
            if first.status != 200:
                return first
            talk.go_on(first.said.choice(0), " and more?", edited=row["session"] == "branch")
        return await self._sent(row, seed, session, headers, talk)

    async def traces(self, session: str) -> list[dict[str, Any]]:
        answer = await self._http.get(f"/sessions/{session}/trace")
        assert answer.status_code == 200, (session, answer.text)
        found: list[dict[str, Any]] = answer.json()["traces"]
        return found

    async def _sent(
        self, row: Row, seed: int, session: str | None, headers: dict[str, str], talk: Talk
    ) -> Asked:
        body = body_for(row, common(row, self._names, seed), talk)
        stream = row["how"] == "stream"
        if stream and row["wire"] in ("chat", "completions", "text", "vllm", "vllm text"):
            body["stream_options"] = {"include_usage": True}
        asked = Asked(row, session, stream, body)
        for _ in range(200):
            await self._once(asked, headers)
            if asked.status not in RETRYABLE:
                break
            self.counts[f"again {asked.status}"] += 1
            await asyncio.sleep(0.1)
        return asked

    async def _once(self, asked: Asked, headers: dict[str, str]) -> None:
        wire, asked.said = asked.row["wire"], Said()
        request = self._http.stream("POST", path_of(wire), json=asked.body, headers=headers)
        async with request as answer:
            asked.param, asked.message = None, ""
            asked.status = answer.status_code
            if answer.status_code != 200:
                error = json.loads(await answer.aread())["error"]
                asked.param, asked.message = error.get("param"), error["message"]
            elif asked.stream:
                try:
                    async for line in answer.aiter_lines():
                        take_line(asked.said, wire, line)
                        self.on_token()
                except httpx.RemoteProtocolError:
                    # The end of a stream with an error is a cut.
                    if asked.said.error is None:
                        raise
            else:
                TAKE[wire](asked.said, json.loads(await answer.aread()))
                asked.said.done = True


def faults_of(asked: Asked, decode: Callable[[list[int]], str]) -> list[str]:
    """What contradicts the request or itself."""
    row, said = asked.row, asked.said
    if said.error is not None:
        return [f"error {said.error}"]
    found = [] if said.done else ["no end"]
    wanted = int(row["n"]) * int(row["prompts"])
    if sorted(said.choices) != list(range(wanted)):
        found.append(f"choices {sorted(said.choices)}")
    for told in said.choices.values():
        found += [f"choice {told.index}: {fault}" for fault in _faults(row, told, decode)]
    return found


def _faults(row: Row, told: Told, decode: Callable[[list[int]], str]) -> list[str]:
    found = []
    count = len(told.ids)
    if told.finish is None:
        found.append("no finish")
    if row["scores"] == "only":
        return found + ([f"{count} tokens"] if count else [])
    # The context of the tiny model ends somewhere: `length` is then not LENGTHS.
    most = LENGTHS[row["length"]]
    if not (told.finish in ("dead_end", ["dead_end", None]) or 1 <= count <= most):
        found.append(f"{count} tokens of {most}")
    if told.logprobs and len(told.logprobs) != count:
        found.append(f"{len(told.logprobs)} logprobs of {count} tokens")
    for name in ("sampling", "routes", "weights", "masks", "labels"):
        column = getattr(told, name)
        if column and len(column) != count:
            found.append(f"{len(column)} {name} of {count} tokens")
    inline = count > 0 and row["numbers"] in ("content", "top") and row["records"] not in ("reference",)
    if inline and not told.logprobs:
        found.append("no logprobs")
    if (
        row["records"] in ("routes", "weights")
        and inline
        and row["wire"] not in ("sglang",)
        and not told.routes
    ):
        found.append("no routes")
    if row["records"] == "weights" and inline and not told.weights:
        found.append("no weights")
    if row["records"] == "masks" and inline and not told.masks:
        found.append("no masks")
    if row["numbers"] == "top" and inline and len(told.tops) != count:
        found.append(f"{len(told.tops)} tops")
    if told.kv is None:
        found.append("no kv")
    elif told.kv[-1]["end"] != len(told.prompt or ()) + max(0, count - 1):
        found.append(f"kv to {told.kv[-1]['end']} of {len(told.prompt or ())} + {count}")
    if row["form"] in ("free", "no call") and row["wire"] != "vllm":
        found += _text_faults(row, told, decode)
    return found


def _text_faults(row: Row, told: Told, decode: Callable[[list[int]], str]) -> list[str]:
    whole = decode(told.ids)
    shown = told.text
    if told.echoed or row["scores"] in ("echo", "echo_last"):
        return []
    if row["stop"] in ("string", "included") and any(stop in whole for stop in STOPS):
        if row["limit"] != "min_tokens":
            end = min(
                whole.index(stop) + (len(stop) if row["stop"] == "included" else 0)
                for stop in STOPS
                if stop in whole
            )
            if shown != whole[:end]:
                return [f"text {shown!r} of {whole!r}, cut at {end}"]
        return []
    if row["stop"] == "ids" and told.ids and told.ids[-1] in STOP_IDS:
        whole = decode(told.ids[:-1])
    return [] if shown == whole else [f"text {shown!r} of {whole!r}"]


COMPARED = (
    "ids", "text", "thinking", "calls", "finish", "echoed", "prompt", "labels", "masks", "routes", "raw",
    "offsets", "sequence_routes",
)  # fmt: skip


def differences(one: Asked, other: Asked) -> list[str]:
    """Between a whole answer and a stream of the same request."""
    found = []
    if (one.status, one.param) != (other.status, other.param):
        return [f"statuses {one.status} {one.param}, {other.status} {other.param}"]
    if one.status != 200:
        return []
    if one.row["wire"] != "sglang" and _counts(one.said.usage) != _counts(other.said.usage):
        found.append(f"usage {one.said.usage} whole, {other.said.usage} streamed")
    if one.said.branch != other.said.branch:
        found.append(f"branch {one.said.branch} whole, {other.said.branch} streamed")
    for index in {*one.said.choices, *other.said.choices}:
        first, second = one.said.choice(index), other.said.choice(index)
        if {*first.labels} != {*second.labels}:
            continue
        for name in COMPARED:
            a, b = getattr(first, name), getattr(second, name)
            if name == "echoed":
                a, b = _shown(a), _shown(b)
            if name == "calls":
                a, b = _parsed(a), _parsed(b)
            if a != b:
                found.append(f"choice {index}: {name} {a!r} whole, {b!r} streamed")
        for name in ("logprobs", "sampling"):
            a, b = getattr(first, name), getattr(second, name)
            near = len(a) == len(b) and all(
                (x is None) == (y is None) and (x is None or abs(x - y) < ROUNDING)
                for x, y in zip(a, b, strict=True)
            )
            if not near:
                found.append(f"choice {index}: {name} {a} whole, {b} streamed")
    return found


def _counts(usage: Any) -> Any:
    """But for what came from the cache."""
    if not usage:
        return usage
    read = usage.get("cache_read_input_tokens") or 0
    counts = {name: count for name, count in usage.items() if isinstance(count, int) and "cache" not in name}
    return counts | ({"input_tokens": counts["input_tokens"] + read} if "input_tokens" in counts else {})


def _parsed(calls: list[tuple[str, str]]) -> list[Any]:
    return [(name, json.loads(arguments) if arguments else None) for name, arguments in calls]


def _shown(echoed: list[Any]) -> list[tuple[Any, float]]:
    found = [(e["token_id"], e["logprob"]) if isinstance(e, dict) else e for e in echoed]
    return [(token, round(logprob or 0.0, 3)) for token, logprob in found]
