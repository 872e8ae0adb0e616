"""A storm of policies: signals all the time, deletions, pinned requests and kills, while clients sample all of them.

Every response is judged: its labels are snapshots of its own policy, and its log-probabilities those of the adapter that the
label names. A request may fail only by an error that says to ask again, or that its policy is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from recompute import Recomputer
from serving import Server, serve
from test_failover import engine, itself, running
from test_policies_served import HOT_LOAD, Adapters
from test_session_storm import Said, of_response
from tiers import of_tier

POLICIES = of_tier(fast=8, test=32, all=32)
ADAPTERS = 10
WORKERS = 16
SECONDS = of_tier(fast=5, test=20, all=120)
SIGNAL_S, DELETE_S, KILL_S = 0.1, 2.0, 6.0
#: What makes it a storm. On a slow machine it lasts longer, until all of this has happened.
SIGNALS, KILLS, ANSWERS = POLICIES, int(SECONDS // (2 * KILL_S)), SECONDS
#: Where starting takes longer than the pause between two kills, nothing would serve any more.
ANSWERS_BETWEEN_KILLS = 4
SECONDS_MAX = 10 * SECONDS + 60
RETRYABLE = frozenset((409, 425, 429, 503))
TOLERANCE = 1e-4


@dataclass
class Answer:
    policy: str
    said: Said
    pinned: str | None = None

    @property
    def labels(self) -> set[str]:
        """What sampled its tokens, and what computed the KV that they stand on."""
        kv = {span["snapshot"] for _, spans in self.said.parts for span in spans}
        return {*self.said.labels, *kv}


@dataclass
class Storm:
    server: Server
    http: httpx.AsyncClient
    random: random.Random
    begun: float
    #: By policy, what was ever signalled for it.
    signalled: dict[str, set[str]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def over(self) -> bool:
        lasted = asyncio.get_running_loop().time() - self.begun
        return lasted > SECONDS_MAX or (lasted > SECONDS and self.happened())

    def happened(self) -> bool:
        counts = self.counts
        enough = counts["signal 200"] >= SIGNALS and counts["kill"] >= KILLS
        return enough and counts["answered"] >= ANSWERS


async def pause(storm: Storm, seconds: float) -> None:
    """The pace of a storm; nothing waits for it."""
    left = storm.begun + SECONDS_MAX - asyncio.get_running_loop().time()
    await asyncio.sleep(max(0.0, min(seconds, left)))


async def trainer(storm: Storm) -> None:
    numbers = itertools.count()
    while not storm.over():
        number = next(numbers)
        policy = f"p{number if number < POLICIES else storm.random.randrange(POLICIES)}"
        identity = f"v{storm.random.randrange(ADAPTERS)}"
        storm.signalled.setdefault(policy, set()).add(identity)
        body = {"identity": identity, "policy": policy}
        answer = await storm.http.post(HOT_LOAD, json=body)
        storm.counts[f"signal {answer.status_code}"] += 1
        if answer.status_code not in (200, *RETRYABLE):
            storm.wrong.append(f"signal: {answer.status_code} {answer.text}")
        if number >= POLICIES:
            await pause(storm, SIGNAL_S)


async def deleter(storm: Storm) -> None:
    path = f"/v1/{storm.server.deployment}/policies"
    while not storm.over():
        await pause(storm, DELETE_S)
        answer = await storm.http.delete(f"{path}/p{storm.random.randrange(POLICIES)}")
        storm.counts[f"delete {answer.status_code}"] += 1
        if answer.status_code not in (200, 404, *RETRYABLE):
            storm.wrong.append(f"delete: {answer.status_code} {answer.text}")


async def killer(storm: Storm) -> None:
    for number in itertools.count():
        answered = storm.counts["answered"]
        await pause(storm, KILL_S)
        while storm.counts["answered"] < answered + ANSWERS_BETWEEN_KILLS and not storm.over():
            await pause(storm, SIGNAL_S)
        if storm.over():
            return
        find = engine if number % 3 else itself
        # It may be on its way up from the last one.
        with contextlib.suppress(ProcessLookupError):
            if pid := running(storm.server, find).get(f"replica-{number % 2}"):
                os.kill(pid, signal.SIGKILL)
                storm.counts["kill"] += 1


async def client(storm: Storm) -> None:
    while not storm.over():
        policy = f"p{storm.random.randrange(POLICIES)}"
        prompt = [storm.random.randrange(200) for _ in range(storm.random.randrange(4, 20))]
        answer = Answer(policy, Said((policy, ""), prompt))
        if storm.random.random() < 0.15 and storm.signalled.get(policy):
            answer.pinned = storm.random.choice(sorted(storm.signalled[policy]))
        try:
            await ask(storm, answer)
        except (httpx.TransportError, KeyError) as error:
            storm.wrong.append(f"{policy}: {error!r}")


async def ask(storm: Storm, answer: Answer) -> None:
    model = answer.policy if answer.pinned is None else f"{answer.policy}@{answer.pinned}"
    body = {
        "model": model,
        "prompt": answer.said.prompt,
        "max_tokens": storm.random.choice((6, 12, 60)),
        "temperature": 1.0,
        "seed": storm.random.randrange(1000),
        "logprobs": True,
        "include_routing_matrix": True,
        "perf_metrics_in_response": True,
        "stream": storm.random.random() < 0.5,
    }
    async with storm.http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode()
            storm.counts[f"refused {response.status_code}"] += 1
            lost = response.status_code == 422 and "lost" in text
            if response.status_code not in (404, 409, 503) and not lost:
                storm.wrong.append(f"{model}: {response.status_code} {text}")
            return
        async for event in events_of(response, streamed=body["stream"]):
            if "error" in event:
                storm.counts["cut"] += 1
                return
            answer.said.take(event)
            assert event["model"].partition("@")[0].rpartition("/")[2] == answer.policy
    storm.answers.append(answer)
    storm.counts["answered"] += 1


async def events_of(response: httpx.Response, *, streamed: bool) -> AsyncIterator[dict[str, Any]]:
    if not streamed:
        yield json.loads(await response.aread())
        return
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def by_whom(adapters: Adapters, said: Said) -> str:
    """For each adapter that any of the answer's log-probabilities is of: which of them are, as 1."""
    told, ids, start = torch.tensor(said.logprobs), [*said.prompt, *said.tokens], len(said.prompt) - 1
    own = {
        name: ((told - adapters.logprobs(name, ids)[start:]).abs() < TOLERANCE).int().tolist()
        for name in (*adapters.made, "base")
    }
    return ", ".join(f"{name}: {''.join(map(str, of))}" for name, of in own.items() if any(of))


def judge(storm: Storm, adapters: Adapters) -> int:
    """How many answers were recomputed."""
    recomputer = Recomputer({})
    for name, model in adapters.made.items():
        recomputer.add_model(name, model)
    checked = 0
    for answer in storm.answers:
        labels = answer.labels
        assert labels <= storm.signalled[answer.policy], (answer, storm.signalled[answer.policy])
        if answer.pinned is not None:
            assert set(answer.said.labels) <= {answer.pinned}, answer
        storm.counts["crossed"] += len(labels) > 1
        if answer.said.tokens:
            wrong = of_response(answer.said).wrong(recomputer)
            assert wrong is None, (answer, wrong, by_whom(adapters, answer.said))
            checked += 1
    return checked


#: Of a replica. Of the fewer, policies come and go all the time.
@pytest.mark.variant
@pytest.mark.parametrize("places", [256, 12])
def test_a_storm_of_policies_fails_nothing_and_every_label_is_borne_out(
    tmp_path: Path, tiny_model: Callable[..., Path], places: int
) -> None:
    base = tiny_model(dtype="float32")
    adapters = Adapters(base)

    async def main(server: Server) -> Storm:
        for number in range(ADAPTERS):
            adapters.put(server, f"v{number}", number)
        limits = httpx.Limits(max_connections=WORKERS + 4)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
            storm = Storm(server, http, random.Random(7), asyncio.get_running_loop().time())
            await asyncio.gather(
                trainer(storm), deleter(storm), killer(storm), *(client(storm) for _ in range(WORKERS))
            )
            return storm

    options = ("--replicas", "2", "--resident-policies", str(places))
    with serve(tmp_path / "state", "--model", str(base), *options) as server:
        storm = asyncio.run(main(server))
    assert not storm.wrong, (storm.wrong[:5], len(storm.wrong), storm.counts)
    checked = judge(storm, adapters)
    print(dict(storm.counts), f"recomputed={checked}")
    assert storm.happened(), storm.counts
    assert checked >= ANSWERS
    if SECONDS <= 20 and places > POLICIES:
        # A policy that comes is waited for. These are of moments when both replicas were down or an engine died.
        assert storm.counts["refused 503"] <= storm.counts["answered"] / 10
