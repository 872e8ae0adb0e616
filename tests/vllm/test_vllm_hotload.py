"""Hot loads under 32 streams over two vLLM servers: every token is what its label says, and caches are the policies'."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import torch
from recompute import Recomputer
from safetensors.torch import load_file, save_file
from vllm_bed import BLOCK, DEADLINE_S, Bed, load, logprobs_of, needs_provenance, needs_staging
from vllm_streams import (
    Stream,
    coming,
    expected_logprobs,
    held,
    kept_up,
    on_their_way,
    random_prompt,
    under_way,
)

from midstream.client import SnapshotFailed, SnapshotPublisher
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.base import StagingFailed
from midstream.engine.servers.process import NAME
from midstream.engine.servers.switching import Unchanged, switch
from midstream.engine.vllm import protocol
from midstream.engine.vllm.beside import WorkerWeights
from midstream.engine.vllm.swap import Control

STREAMS = 32
# Of a stream: the least and the most, so that they do not end together.
TOKENS = (400, 1200)
# Streams of each replica, at least, that have tokens of both sides of a swap, over all swaps.
CROSSING = 6
# Of those who ask what is cached.
PROMPT = 5 * BLOCK + 3
CACHED = 5 * BLOCK
TOLERANCE = (
    # Nats, in float32, of every token: what was measured is 6e-6; another weight or token makes 0.1.
    1e-4
)

#: Requests that vLLM for CPUs runs at once, at most, and how many are sent.
RUNNING_MAX, WAITING = 256, 656

# By the session that cached it, by a new one.
Cached = tuple[int, int]


def changed(checkpoint: Path, target: Path) -> Path:
    """As a training step leaves it: few tensors are others, and enough for every answer to be another."""
    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if (
            name == "lm_head.weight"
            or ".layers.2.mlp.experts.3." in name
            or name.endswith("1.self_attn.v_proj.weight")
        ):
            weights[name] = weights[name] + 0.1 * torch.randn(
                weights[name].shape, generator=torch.manual_seed(7)
            )
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


Spans = list[tuple[str, int, int]]


@dataclass
class Answer:
    """What was said to a prompt."""

    ids: list[int]
    logprobs: list[float]
    kv: Spans
    cached: int

    TOKENS: ClassVar[int] = 8

    @classmethod
    def of(cls, bed: Bed, prompt: list[int], session: str) -> Answer:
        """A new session goes where the prompt was last."""
        body = {"model": bed.model, "prompt": prompt, "max_tokens": cls.TOKENS, "ignore_eos": True}
        body |= {"logprobs": True, "perf_metrics_in_response": True}
        headers = {"x-multi-turn-session-id": session, "x-midstream-follow-prefix": "1"}
        with bed.http() as http:
            answer = http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        entries = choice["logprobs"]["content"]
        kv = [(span["snapshot"], span["start"], span["end"]) for span in choice["kv_snapshots"]]
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        ids = [*prompt, *(entry["token_id"] for entry in entries)]
        return cls(ids, [entry["logprob"] for entry in entries], kv, cached)

    def error(self, recomputer: Recomputer) -> float:
        """By how much a number is off, at most."""
        kv = [snapshot for snapshot, start, end in self.kv for _ in range(start, end)]
        made, first = recomputer.passes(self.ids[:-1], kv).logprobs, len(self.ids) - len(self.logprobs)
        there = range(first, len(self.ids))
        off = [float(made[at - 1, self.ids[at]]) - self.logprobs[at - first] for at in there]
        return max(map(abs, off))


class Askers:
    """Prompts that a session cached before a swap. home: where it stays."""

    def __init__(self, bed: Bed, session: str, home: str) -> None:
        self._bed = bed
        self._session = session
        self._home = home
        self._seen, self._unseen = (random_prompt(f"{session} {i}", PROMPT) for i in range(2))
        for prompt in (self._seen, self._unseen):
            assert [self._ask(prompt, session) for _ in range(2)] == [(0, home), (CACHED, home)]

    def after(self) -> Cached:
        seen, replica = self._ask(self._seen, self._session)
        assert replica == self._home
        end, number = time.monotonic() + DEADLINE_S, 0
        # A new one begins where its key hashes to, load permitting. What the other replica computes changes nothing at home.
        while (there := self._ask(self._unseen, f"{self._session} new {number}"))[1] != self._home:
            number += 1
            assert time.monotonic() < end, f"none of {number} new sessions came to {self._home}"
        return seen, there[0]

    def _ask(self, prompt: list[int], session: str) -> tuple[int, str]:
        """How much was cached, and where."""
        body = {"model": self._bed.model, "prompt": prompt, "max_tokens": 1}
        with self._bed.http() as http:
            answer = http.post("/v1/completions", json=body, headers={"x-multi-turn-session-id": session})
        assert answer.status_code == 200, answer.text
        cached = int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        return cached, answer.headers["x-midstream-replica"]


def in_a_row(names: Sequence[str]) -> list[Sequence[str]]:
    """Every run of names that follow each other."""
    return [names[i:j] for i in range(len(names)) for j in range(i + 1, len(names) + 1)]


@pytest.fixture(scope="module")
def checkpoints(
    checkpoint: Path, weights: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """What is served at first, and what is published over it, in their order."""
    one = weights(1)
    two = changed(one, tmp_path_factory.mktemp("trained") / "two")
    return {"begin": checkpoint, "full-1": one, "delta-2": two, "full-3": weights(3)}


def test_32_streams_cross_three_hot_loads_and_every_token_is_of_its_label(
    bed: Bed, checkpoints: dict[str, Path]
) -> None:
    cached: dict[str, Cached] = {}
    kinds: list[str] = []
    models = {name: load(directory) for name, directory in checkpoints.items()}
    with SnapshotPublisher(bed.server.url, bed.server.bucket.as_uri()) as publisher:
        publisher.publish("begin", checkpoints["begin"])

        def publish() -> None:
            for name, policy, kind in (
                ("full-1", "all", "full"),
                ("delta-2", "new_session", "delta"),
                ("full-3", "none", "full"),
            ):
                with held(bed.server.url, bed.model, name) as home:
                    askers = Askers(bed, name, home)
                    done = publisher.publish(name, checkpoints[name], reset_prompt_cache=policy, kind=kind)
                    kinds.append(done.kind)
                    cached[policy] = askers.after()

        streams = asyncio.run(
            kept_up(bed.server.url, bed.model, coming("crossing", TOKENS), STREAMS, publish)
        )
    assert kinds == ["full", "delta", "full"]
    assert cached == {"all": (0, 0), "new_session": (CACHED, 0), "none": (CACHED, CACHED)}
    broken = [
        (s.session, s.error, s.finish, len(s.tokens), s.done) for s in streams if not s.whole or s.resumed
    ]
    assert broken == []
    assert {stream.replica for stream in streams} == {"replica-0", "replica-1"}
    order = list(checkpoints)
    assert [s.labels for s in streams if s.labels not in in_a_row(order)] == [], "each once, in their order"
    crossed: Counter[str] = Counter()
    for before, name in pairwise(order):
        there = Counter(stream.replica for stream in streams if {before, name} <= set(stream.labels))
        # All streams of a replica may have just ended at one of its switches.
        assert there, name
        crossed += there
    assert set(crossed) == {"replica-0", "replica-1"}, crossed
    assert min(crossed.values()) >= CROSSING, crossed
    for stream in streams:
        off = np.abs(np.subtract([t[1] for t in stream.tokens], expected_logprobs(stream, models)))
        assert off.max() <= TOLERANCE, (stream.session, stream.labels, off.argmax(), off.max())


def test_a_snapshot_that_vllm_would_load_otherwise_serves_no_token(
    bed: Bed, checkpoints: dict[str, Path]
) -> None:
    with SnapshotPublisher(bed.server.url, bed.server.bucket.as_uri()) as publisher:
        before = {replica.snapshot for replica in publisher.snapshots.status().replicas}
        place = bed.server.bucket / "two-heads"
        shutil.copytree(checkpoints["full-3"], place)
        weights = load_file(place / "model.safetensors")
        save_file({"lm_head.weight": -weights["lm_head.weight"]}, place / "value_head.safetensors")
        publisher.snapshots.signal("two-heads")
        with pytest.raises(SnapshotFailed, match=r"value_head\.safetensors"):
            publisher.snapshots.wait_until_ready("two-heads", timeout_s=120)
        assert {replica.snapshot for replica in publisher.snapshots.status().replicas} == before == {"full-3"}
    stream = Stream(random_prompt(99, 30), 8, "after a failure")
    asyncio.run(under_way(bed.server.url, bed.model, [stream], 1, lambda: None))
    assert stream.whole
    assert stream.labels == ["full-3"]
    numbers = [logprob for _, logprob, _ in stream.tokens]
    assert numbers == pytest.approx(logprobs_of(load(checkpoints["full-3"]), stream.ids)[29:], abs=TOLERANCE)


def test_streams_go_on_with_the_old_weights_when_vllm_fails_to_load_new_ones(
    bed: Bed, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Behind the replica's back, since it refuses what vLLM could not load: the server gets a tensor nobody knows."""
    bad = tmp_path / "bad"
    shutil.copytree(checkpoints["begin"], bad)
    save_file({"no.such.tensor": torch.zeros(3)}, bad / "zz.safetensors")
    switched: list[str] = []

    def fail_to_load() -> None:
        for replica in ("replica-0", "replica-1"):
            control = Control(bed.server_url(replica), "", 120.0)
            load, back = (partial(control.reload, directory) for directory in (bad, checkpoints["full-3"]))
            loading = switch(control, load, back, "never", lambda: switched.append("never"))
            with pytest.raises(Unchanged, match="named 'no'"):
                asyncio.run(loading)

    def both(streams: Sequence[Stream]) -> bool:
        return all(on_their_way(streams, replica) for replica in ("replica-0", "replica-1"))

    failing = coming("failing load", (200, 400))
    streams = asyncio.run(kept_up(bed.server.url, bed.model, failing, 8, fail_to_load, both))
    assert [(s.session, s.error, len(s.tokens)) for s in streams if not s.whole] == []
    assert switched == []
    model = load(checkpoints["full-3"])
    for stream in streams:
        assert stream.labels == ["full-3"]
        expected = logprobs_of(model, stream.ids)[len(stream.prompt) - 1 :]
        off = np.abs(np.subtract([logprob for _, logprob, _ in stream.tokens], expected))
        assert off.max() <= TOLERANCE, (stream.session, off.argmax(), off.max())


def test_streams_notice_nothing_of_weights_that_fail_or_are_given_up_while_workers_stage_them(
    bed: Bed, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Behind the replica's back, with calls of the kind that it makes itself."""
    needs_staging(bed)
    bad = tmp_path / "bad"
    shutil.copytree(checkpoints["begin"], bad)
    save_file({"no.such.tensor": torch.zeros(3)}, bad / "zz.safetensors")

    async def stage(replica: str) -> None:
        workers = WorkerWeights(Control(bed.server_url(replica), "", 120.0), 120.0)
        with pytest.raises(StagingFailed, match="named 'no'"):
            await workers.next().load(bad)
        older, newer = workers.next(), workers.next()
        async with asyncio.TaskGroup() as group:
            given_up = group.create_task(older.load(checkpoints["begin"]))
            await asyncio.sleep(0)
            given_up.cancel()
        await newer.load(checkpoints["full-1"])
        # It comes late, and is not for the newer one.
        await older.drop()
        await newer.load(checkpoints["full-1"])
        await newer.drop()

    def stage_at_both() -> None:
        for replica in ("replica-0", "replica-1"):
            asyncio.run(stage(replica))

    streams = asyncio.run(
        kept_up(bed.server.url, bed.model, coming("staged in vain", (200, 400)), 8, stage_at_both)
    )
    assert [(s.session, s.error, len(s.tokens)) for s in streams if not s.whole] == []
    model = load(checkpoints["full-3"])
    for stream in streams:
        assert stream.labels == ["full-3"]
        expected = logprobs_of(model, stream.ids)[len(stream.prompt) - 1 :]
        off = np.abs(np.subtract([logprob for _, logprob, _ in stream.tokens], expected))
        assert off.max() <= TOLERANCE, (stream.session, off.argmax(), off.max())


def test_weights_that_a_trainer_pushes_cross_the_streams_of_vllm_with_true_labels(
    bed: Bed, checkpoints: dict[str, Path]
) -> None:
    trained = checkpoints["full-1"]
    with SnapshotPublisher(bed.server.url, to="push") as publisher:

        def push() -> None:
            publisher.publish("pushed", dict(load_file(trained / "model.safetensors")))

        streams = asyncio.run(kept_up(bed.server.url, bed.model, coming("pushing", (200, 400)), 8, push))
    assert [(s.session, s.error, len(s.tokens)) for s in streams if not s.whole] == []
    order = ["full-3", "pushed"]
    assert [s.labels for s in streams if s.labels not in in_a_row(order)] == []
    assert any(s.labels == order for s in streams)
    with SnapshotPublisher(bed.server.url, bed.server.bucket.as_uri()) as publisher:
        # What the next tests begin with.
        publisher.snapshots.signal("full-3")
        publisher.snapshots.wait_until_ready("full-3", timeout_s=DEADLINE_S)
    models = {"full-3": load(checkpoints["full-3"]), "pushed": load(trained)}
    for stream in streams:
        off = np.abs(np.subtract([t[1] for t in stream.tokens], expected_logprobs(stream, models)))
        assert off.max() <= TOLERANCE, (stream.session, stream.labels, off.argmax(), off.max())


def test_streams_that_are_kept_through_prime_rls_calls_go_on_and_every_token_is_of_its_label(
    bed: Bed, weights: Callable[[int], Path]
) -> None:
    """The update is answered in the pause, and the weights are proved in it, too, where the server can."""
    target = bed.server.bucket / "kept"
    shutil.copytree(weights(4), target)

    def update() -> None:
        with bed.http() as http:
            assert http.post("/pause?mode=keep&clear_cache=false").status_code == 200
            answer = http.post("/update_weights", json={"weight_dir": str(target)})
            assert answer.status_code == 200, answer.text
            rows = http.get("/hot_load/v1/models/hot_load").json()["replicas"]
            proved = [row["readiness"] and row["loading_state"]["stage"] == "done" for row in rows]
            assert all(proved) == ("frozen_check" in bed.card["features"]), rows
            assert http.post("/resume").status_code == 200

    ran = [Stream(random_prompt(f"kept {i}", 40), 1200, f"kept {i}", seed=i) for i in range(8)]
    before = "before-the-pause"
    with SnapshotPublisher(bed.server.url, bed.server.bucket.as_uri()) as publisher:
        publisher.publish(before, weights(3))
    asyncio.run(under_way(bed.server.url, bed.model, ran, 5, update))
    with bed.http() as http:
        after = http.get("/weight_info").json()["weight_version"]
    assert all(stream.whole for stream in ran), [stream.error for stream in ran]
    assert any(stream.labels == [before, after] for stream in ran)
    models = {before: load(weights(3)), after: load(target)}
    for stream in ran:
        off = np.abs(
            np.subtract([number for _, number, _ in stream.tokens], expected_logprobs(stream, models))
        )
        assert off.max() <= TOLERANCE, (stream.session, off.max())


def test_answers_are_computed_over_the_kv_that_they_name_whatever_the_cache_policy(
    bed: Bed, weights: Callable[[int], Path]
) -> None:
    needs_provenance(bed.card["why"])
    made = {f"kv-{number}": weights(number % 4) for number in range(6)}
    names = list(made)
    answers: list[Answer] = []

    def ask(prompt: list[int], session: str) -> tuple[int, Spans]:
        answers.append(Answer.of(bed, prompt, session))
        return answers[-1].cached, answers[-1].kv

    found, end = CACHED, PROMPT + Answer.TOKENS - 1
    with SnapshotPublisher(bed.server.url, bed.server.bucket.as_uri()) as publisher:
        publisher.publish(names[0], made[names[0]], reset_prompt_cache="all")
        oldest = random_prompt("kv oldest", PROMPT)
        assert ask(oldest, "kv oldest") == (0, [(names[0], 0, end)])
        policies: list[Any] = ["none", "new_session", {"max_age": 1}, {"max_age": 3}, "all"]
        for (before, now), policy in zip(pairwise(names), policies, strict=True):
            prompt, session = random_prompt(f"kv {now}", PROMPT), f"kv {now}"
            assert ask(prompt, session) == (0, [(before, 0, end)])
            publisher.publish(now, made[now], reset_prompt_cache=policy)
            kept, anew = (found, [(before, 0, found), (now, found, end)]), (0, [(now, 0, end)])
            assert ask(prompt, session) == (anew if policy == "all" else kept), policy
            alike = ask(prompt, f"{session} new")
            assert alike[1] == (anew if policy in ("all", "new_session") else kept)[1], policy
            if policy == {"max_age": 1}:
                # It is three swaps old.
                assert ask(oldest, "kv oldest") == anew
    recomputer = Recomputer(made)
    worst = max(answer.error(recomputer) for answer in answers)
    assert worst <= TOLERANCE


async def test_a_check_goes_before_the_requests_that_wait_in_vllm(bed: Bed) -> None:
    """At a replica's own server, which is given more than it runs at once. Their lengths differ, so they end one by one."""

    def body(number: int, **more: Any) -> bytes:
        sampling = SamplingParams(max_tokens=40 + number, temperature=0.0)
        asked = GenerateRequest(
            request_id="r", prompt=tuple(random_prompt(f"waits {number}", 20)), sampling=sampling, **more
        )
        scored = {"prompt_logprobs": 0, "max_tokens": 1} if asked.urgent else {}
        return protocol.body(asked, 0, model=NAME, salt="", stream=False, by_priority=True, **scored)

    limits = httpx.Limits(max_connections=None)
    url, headers = bed.server_url("replica-0"), {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, limits=limits, headers=headers) as http:
        asked = [asyncio.create_task(http.post(protocol.PATH, content=body(i))) for i in range(WAITING)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        ended = [one.result().status_code for one in asked if one.done()]
        assert set(ended) == {200}
        answer = await http.post(protocol.PATH, content=body(0, urgent=True))
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["prompt_logprobs"]) == 20
        # Behind all that waited, it would have begun when all but those that ran had ended.
        assert sum(one.done() for one in asked) < WAITING - RUNNING_MAX
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)
