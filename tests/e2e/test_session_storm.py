"""A session storm: chats with tools, edits and sub-agents, while a snapshot is signalled every second and replicas are killed.

What clients are told and what is exported is checked to the end. A turn begins with its parent's very tokens, or says that it
is a branch. Every log-probability, of responses and of records, is recomputed with the snapshots that are named for it. A
request that fails says so, by an error after which its client asks again, and gets its answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from recompute import OWN_ROUTE, Passes, Recomputer
from serving import Server, serve
from test_exact_sessions import TOOLS
from test_failover import engine, itself, running
from test_swap_storm import HOT_LOAD, Trainer, events
from tiers import of_tier

from midstream.client import snapshot_of
from midstream.client.decode import decode_routing_matrix
from midstream.client.journal import gaps_in, read_records, traces_of

REPLICAS = of_tier(fast=2, test=2, all=3)
WORKERS = 24
#: Tokens of an answer, at most: some outlast a swap or two.
LENGTHS = (32, 128, 400)
#: So few that streams are preempted.
KV_CACHE = "16MiB"
#: Every fourth one is of an engine, which takes no turn with it.
KILLS, SWAPS = of_tier(fast=3, test=3, all=12), of_tier(fast=18, test=18, all=60)
#: Between two kills, or two signals, at least.
KILL_S, SWAP_S = 2.5, 1.0
#: What a replica sent before its end is read by then.
READ_S = 1.0
#: Of a log-probability.
ERROR = 1e-4
#: Answers that tell a client to ask again, and the end of a stream that cannot go on.
RETRYABLE = frozenset((409, 425, 429, 503))
POISON = "request_lost_replicas"
CUT = "failed in the middle of the response"

Spans = list[dict[str, Any]]


@dataclass
class Said:
    """A response, with what its client sends back. at: the session and its agent."""

    at: tuple[str, str]
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list, repr=False)
    #: Of the KV: until which token, and what computed it.
    parts: list[tuple[int, Spans]] = field(default_factory=list)
    content: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    branch: dict[str, Any] | None = None
    resumed: bool = False
    done: bool = False
    error: Any = None
    ended_at: float = 0.0
    #: All tokens of the agent's turn before, unless the history was edited behind it.
    parent: list[int] | None = None

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        seam, label = event.get("midstream") or {}, snapshot_of(event["model"])
        self.branch, self.resumed = seam.get("branch", self.branch), self.resumed or "resumed" in seam
        self.prompt = self.prompt or event.get("prompt_token_ids") or []
        for choice in event["choices"]:
            entries = (choice.get("logprobs") or {}).get("content") or []
            self.tokens += [entry["token_id"] for entry in entries]
            self.logprobs += [entry["logprob"] for entry in entries]
            self.routes += routes_of(entry["routing_matrix"] for entry in entries)
            self.labels += [label or ""] * len(entries)
            self.parts += [
                (one["tokens"], one["kv_snapshots"]) for one in choice.get("earlier_kv_snapshots", ())
            ]
            if "kv_snapshots" in choice:
                self.parts.append((len(self.tokens), choice["kv_snapshots"]))
            if "snapshots" in choice:
                self.labels, self.done = spread(choice["snapshots"]), True
            self._take_message(choice.get("delta") or choice.get("message") or {})

    def _take_message(self, part: dict[str, Any]) -> None:
        self.content += part.get("content") or ""
        for number, call in enumerate(part.get("tool_calls") or ()):
            known = self.calls.setdefault(call.get("index", number), {"id": "", "name": "", "arguments": ""})
            known["id"] = call.get("id") or known["id"]
            for name in ("name", "arguments"):
                known[name] += call["function"].get(name) or ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What follows in the conversation: the answer, and the results of its calls."""
        calls = [
            {
                "id": one["id"],
                "type": "function",
                "function": {"name": one["name"], "arguments": respaced(one)},
            }
            for one in self.calls.values()
        ]
        answer = {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})
        return [answer, *({"role": "tool", "tool_call_id": one["id"], "content": "a wall"} for one in calls)]


def respaced(call: dict[str, str]) -> str:
    return json.dumps(json.loads(call["arguments"]), indent=1)


class Storm:
    def __init__(self, server: Server, http: httpx.AsyncClient) -> None:
        self._server, self._http = server, http
        self.over = asyncio.Event()
        self.said: list[Said] = []
        self.counts = Counter[str]()
        self.killed_at = 0.0

    # -- clients

    async def worker(self, number: int) -> None:
        """Session after session, until the storm is over."""
        rng, sessions = random.Random(number), 0
        while not self.over.is_set():
            sessions += 1
            key = f"s-{number}-{sessions}"
            names = ["main"] if rng.random() < 0.5 else ["main", "sub 1", "sub 2"]
            async with asyncio.TaskGroup() as group:
                for name in names:
                    seed = rng.getrandbits(40)
                    group.create_task(self._agent((key, name), random.Random(seed)))

    async def _agent(self, at: tuple[str, str], rng: random.Random) -> None:
        messages = [{"role": "system", "content": f"You are {at[1]}."}, {"role": "user", "content": "Begin."}]
        tools = rng.random() < 0.5
        ends: list[tuple[int, Said]] = []
        for number in range(rng.randint(2, 5)):
            if self.over.is_set() and number > 1:
                return
            if ends and rng.random() < 0.15:
                edited = rng.randrange(len(ends))
                messages[ends[edited][0]]["content"] += "!"
                del ends[edited:]
            body: dict[str, Any] = {"messages": messages, "max_tokens": rng.choice(LENGTHS)}
            if tools:
                required = rng.random() < 0.4
                body |= {"tools": TOOLS, "tool_choice": "required" if required else "auto"}
                body["max_tokens"] = 80 if required else body["max_tokens"]
            answers = any(message["role"] == "assistant" for message in messages)
            whole = bool(ends) and ends[-1][0] == max(
                i for i, message in enumerate(messages) if message["role"] == "assistant"
            )
            said = await self._asked(at, body, rng)
            if whole:
                last = ends[-1][1]
                said.parent = [*last.prompt, *last.tokens]
            elif answers:
                assert said.branch is not None, f"an edited history is no branch: {said}"
            ends.append((len(messages), said))
            messages = [*messages, *said.messages, {"role": "user", "content": f"And {number}?"}]

    async def _asked(self, at: tuple[str, str], body: dict[str, Any], rng: random.Random) -> Said:
        """The whole answer; the client asks again as often as it is told to."""
        body |= {"model": self._server.model, "seed": rng.getrandbits(40), "stream": rng.random() < 0.7}
        body |= {"logprobs": True, "include_routing_matrix": True, "return_token_ids": True}
        body["perf_metrics_in_response"] = True
        headers = {"x-session-id": at[0], "x-midstream-failover": rng.choice(("exact", "any"))}
        while True:
            said = Said(at)
            why = await self._answered(said, body, headers)
            if not why:
                said.ended_at = asyncio.get_running_loop().time()
                self.counts["resumed"] += said.resumed
                self.said.append(said)
                return said
            self.counts[why] += 1
            await asyncio.sleep(0.1)

    async def _answered(self, said: Said, body: dict[str, Any], headers: dict[str, str]) -> str:
        """Why there is no answer; empty: it is whole."""
        request = self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers)
        async with request as answer:
            if answer.status_code != 200:
                told = json.loads(await answer.aread())
                assert answer.status_code in RETRYABLE or told["error"]["code"] == POISON, told
                # Perhaps it was the request that took two replicas with it. Another one of the same turn was not there.
                body["seed"] += told["error"]["code"] == POISON
                return f"{answer.status_code} {told['error']['code']}"
            if not body["stream"]:
                try:
                    said.take(json.loads(await answer.aread()))
                except httpx.TransportError:
                    # Its replica was lost while it was being read.
                    return "a response was cut"
                return ""
            try:
                async for event in events(answer):
                    for line in event.split(b"\n"):
                        if line == b"data: [DONE]":
                            said.done = True
                        elif line.startswith(b"data: "):
                            said.take(json.loads(line[6:]))
            except httpx.RemoteProtocolError:
                # The end of a stream with an error is a cut.
                assert said.error is not None, f"a stream was cut without a word: {said}"
        if said.error is None:
            assert said.done, f"a stream ended without its end: {said}"
            return ""
        assert CUT in said.error["message"] or said.error["code"] == POISON, said.error
        return "a stream could not go on"

    # -- what befalls the server

    async def kills(self) -> None:
        rng = random.Random(0)
        for number in range(KILLS):
            await asyncio.sleep(KILL_S)
            usable = await self._usable(2)
            pids = running(self._server, engine if number % 4 == 1 else itself)
            victim = rng.choice([name for name in usable if name in pids])
            os.kill(pids[victim], signal.SIGKILL)
            self.counts["kills"] += 1
            await self._usable(0, without=victim)
            # What is answered from now on is not of a replica that is gone.
            self.killed_at = asyncio.get_running_loop().time()
        await self._usable(REPLICAS)

    async def _usable(self, count: int, without: str | None = None) -> list[str]:
        """The replicas that serve, once they are so many, and that one is not among them."""
        while True:
            rows = (await self._http.get("/health")).json()["replicas"]
            names = [row["name"] for row in rows if row["usable"]]
            if len(names) >= count and without not in names:
                return names
            await asyncio.sleep(0.02)

    async def swaps(self, trainer: Trainer) -> None:
        for step in range(SWAPS):
            begun = asyncio.get_running_loop().time()
            await trainer.publish(step)
            await asyncio.sleep(max(0.0, begun + SWAP_S - asyncio.get_running_loop().time()))


class Signals(Trainer):
    """It waits for nobody, and sends whole what cannot be a delta: a replica was killed while it loaded the one before."""

    async def _signal(self, body: dict[str, Any], whole: Path) -> None:
        answer = await self.http.post(HOT_LOAD, json=body)
        if "publish a full snapshot" in answer.text:
            place = self.server.bucket / body["identity"]
            shutil.rmtree(place)
            shutil.copytree(whole, place)
            del body["incremental_snapshot_metadata"]
            answer = await self.http.post(HOT_LOAD, json=body)
        assert answer.status_code == 200, answer.text

    async def _ready(self, identity: str) -> None:
        pass


async def storm(server: Server, scratch: Path, models: list[Path]) -> tuple[Storm, dict[str, Path], Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits, trust_env=False) as http:
        made, trainer = Storm(server, http), Signals(server, http, scratch, models)
        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(made.worker(number))
            await asyncio.gather(made.kills(), made.swaps(trainer))
            made.over.set()
        traces = {}
        for key in sorted({said.at[0] for said in made.said}):
            answer = await http.get(f"/sessions/{key}/trace")
            if answer.status_code != 404:
                assert answer.status_code == 200, answer.text
                traces[key] = answer.json()["traces"]
    return made, trainer.checkpoints, traces


# -- what must be true


@dataclass
class Numbers:
    """Of an answer, as a response or a record tells them. parts: until which token, and the snapshot of each position's KV."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    labels: list[str]
    routes: list[np.ndarray] = field(repr=False)
    parts: list[tuple[int, list[str]]] = field(repr=False)

    def agrees(self, other: Numbers) -> bool:
        same = (self.labels, self.parts) == (other.labels, other.parts)
        return same and np.allclose(self.logprobs, other.logprobs, atol=1e-5, rtol=0)

    def wrong(self, recomputer: Recomputer) -> str | None:
        first, last = 0, len(self.prompt) - 1
        for until, kv in self.parts:
            labels, again = self.labels[first:until], dict[int, str]()
            if not labels:
                continue
            if kv[last + first] != labels[0] and (first == 0 or len(self.parts) > 1):
                # All KV was there: only the pass over the last token is of what served then.
                again = {last + first: labels[0]}
            if kv[last + first + len(again) : last + until] != labels[len(again) :]:
                return f"a label is not of the pass that gave the token: {self}"
            if (off := self._off(recomputer, first, until, kv, again)) > ERROR:
                return f"logprobs {first} to {until} are off by {off}: {self}"
            first = until
        return None

    def _off(
        self, recomputer: Recomputer, first: int, until: int, kv: list[str], again: dict[int, str]
    ) -> float:
        """By how much the numbers of these tokens differ at most, with whichever expert of a tie."""
        ids, row = [*self.prompt, *self.tokens[:until]], len(self.prompt) - 1 + first
        said, targets = np.array(self.logprobs[first:until]), torch.tensor(ids[row + 1 :])[:, None]
        own = np.full_like(self.routes[0], OWN_ROUTE, dtype=np.int64)
        forced = torch.from_numpy(np.stack([*[own] * row, *self.routes[first:until]]).astype(np.int64))
        # There are two passes over such a position, each with a route of its own.
        forced[[*again]] = OWN_ROUTE
        found: list[float] = []

        def fits(passes: Passes) -> bool:
            made = passes.logprobs[row:].gather(1, targets)[:, 0].numpy()
            found.append(float(np.abs(said - made).max()))
            return found[-1] <= ERROR

        recomputer.first_that(fits, ids[:-1], kv, again=again, forced=forced)
        return min(found)


def spread(spans: Spans) -> list[str]:
    """The snapshot of each position."""
    return [span["snapshot"] for span in spans for _ in range(span["start"], span["end"])]


def routes_of(given: Iterable[Any]) -> list[np.ndarray]:
    return [decode_routing_matrix(one, top_k=2) for one in given]


def of_response(said: Said) -> Numbers:
    parts = [(until, spread(kv)) for until, kv in said.parts]
    return Numbers(said.prompt, said.tokens, said.logprobs, said.labels, said.routes, parts)


def of_records(turns: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, ...], Numbers | None, Any]]:
    """Of each turn of a tree, all its tokens, its numbers where its replica knows them, and why it is a branch."""
    tokens = {0: list[int]()}
    for turn in turns:
        prompt, sampled = tokens[turn["parent"]] + turn["added"], turn["token_ids"]
        tokens[turn["turn"]] = prompt + sampled
        numbers = None
        if turn["logprobs"] is not None:
            parts = [(one["tokens"], spread(one["kv_snapshots"])) for one in turn["earlier_kv_snapshots"]]
            parts.append((len(sampled), spread(turn["kv_snapshots"])))
            labels, routes = spread(turn["snapshots"]), routes_of(turn["routing_matrix"])
            numbers = Numbers(prompt, sampled, turn["logprobs"], labels, routes, parts)
        yield (*prompt, *sampled), numbers, turn["branch"]


def check_histories(said: list[Said]) -> None:
    """Every turn begins with the tokens of the one before it, or is a branch."""
    kinds = Counter[str]()
    for one in said:
        begins = one.parent is not None and one.prompt[: len(one.parent)] == one.parent
        assert begins or one.parent is None or one.branch is not None, f"other tokens, and no branch: {one}"
        kinds["continued" if begins else one.branch["why"] if one.branch else "first"] += 1
    assert kinds["continued"] > kinds["unknown"] > 0
    assert kinds["edited"] > 0


def check_records(made: Storm, records: list[dict[str, Any]], traces: Any, recomputer: Recomputer) -> None:
    """Records tell what responses told, traces what records tell, and every number is that of its label."""
    recorded, live = dict[Any, list[tuple[Numbers | None, Any]]](), 0
    for kept in traces_of(records):
        trees = [tree["turns"] for tree in kept["traces"]]
        assert not any(tree["orphans"] for tree in kept["traces"])
        for told in traces.get(kept["id"], ()):
            assert told["turns"] in trees
            live += 1
        for tokens, numbers, branch in itertools.chain.from_iterable(map(of_records, trees)):
            recorded.setdefault((kept["id"], tokens), []).append((numbers, branch))
            if numbers is not None:
                assert (wrong := numbers.wrong(recomputer)) is None, wrong
    assert live
    for said in made.said:
        found = recorded.get((said.at[0], (*said.prompt, *said.tokens)), [])
        assert found or said.ended_at < made.killed_at + READ_S, f"no record of {said}"
        told = of_response(said)
        if not any(numbers is not None and numbers.agrees(told) for numbers, _ in found):
            # Who recorded it got some of it from another replica, or was lost with the record.
            assert all(numbers is None for numbers, _ in found), f"other numbers than {told}"
            assert (wrong := told.wrong(recomputer)) is None, wrong
        assert said.resumed or not found or said.branch in [branch for _, branch in found], said


MODES = {
    "async": (),
    "sync": ("--transition", "sync"),
    "two gateways": ("--gateway-workers", "2", "--swap-order", "one-by-one"),
}


@pytest.mark.timeout(1800)
@pytest.mark.variant
@pytest.mark.parametrize("mode", ["async", "sync", "two gateways"])
def test_a_session_storm_loses_nothing_and_every_number_is_borne_out(
    tmp_path: Path, tiny_model: Callable[..., Path], mode: str
) -> None:
    fulls = [tiny_model(seed=10 + i) for i in range(SWAPS // 6)]
    url = (tmp_path / "kept").as_uri()
    options = ("--model", str(tiny_model()), "--replicas", str(REPLICAS), "--no-tinker", *MODES[mode])
    options += ("--records", url, "--kv-cache-memory", KV_CACHE)
    with serve(tmp_path / "state", *options) as server:
        made, checkpoints, traces = asyncio.run(storm(server, tmp_path, fulls))
        assert server.stop() == 0
    records = list(read_records(url))
    assert gaps_in(records) == 0
    check_histories(made.said)
    recomputer = Recomputer({"base": tiny_model(), **checkpoints}, attention="sdpa")
    check_records(made, records, traces, recomputer)
    assert made.counts["kills"] == KILLS
    assert made.counts["resumed"] > 0, "no stream went on elsewhere"
    crossed = sum(len(set(said.labels)) > 1 and not said.resumed for said in made.said)
    assert crossed == 0 if mode == "sync" else crossed > WORKERS
    assert mode == "sync" or not made.counts["425 snapshot_transition"]
    assert len({label for said in made.said for label in said.labels}) > SWAPS // 6
