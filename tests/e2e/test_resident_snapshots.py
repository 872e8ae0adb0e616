"""Snapshots that stay loaded, on a real server: what is pinned to each runs through later swaps, which wait for nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, on_device, serve
from test_failover_across_swaps import Seams, all_run, kill
from test_policies_served import Adapters, checked, sample
from test_policies_served import load as load_policy
from test_swap import TOLERANCE, Rollout, load, put, recompute
from tiers import variant

from midstream.client import SnapshotPublisher, snapshot_of
from midstream.core.types import ResetPromptCache

ATTEMPTS = 4
TOKENS, POSITIONS = 5500, 8192


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, make: Callable[..., Path]) -> Iterator[Server]:
    """A swap that waited for a pinned request would end it at once."""
    place = tmp_path_factory.mktemp("served")
    options = ("--replicas", "1", "--resident-snapshots", "3", "--pin-drain-s", "0", "--no-tinker")
    with serve(place / "state", "--model", str(make()), *options, *on_device(place)) as running:
        yield running


@pytest.fixture(scope="module")
def make(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """tiny_model with room for streams that outlast all swaps."""
    return partial(tiny_model, max_positions=POSITIONS)


@pytest.fixture
def publisher(server: Server) -> Iterator[SnapshotPublisher]:
    with SnapshotPublisher(server.url, server.bucket.as_uri()) as made:
        yield made


class Signals:
    """Snapshots of this server, each of a seed of its own, and the models that recompute their tokens."""

    def __init__(self, server: Server, publisher: SnapshotPublisher, make: Callable[..., Path]) -> None:
        self.server, self.publisher, self.make = server, publisher, make
        self.models: dict[str, Any] = {}

    def prepare(self, identity: str, seed: int) -> None:
        """Write it, and load the model that recomputes its tokens."""
        put(self.server, identity, self.make(seed=seed))
        self.models[identity] = load(self.make(seed=seed))

    def next(self, identity: str, seed: int, reset: ResetPromptCache = "all") -> None:
        """It serves."""
        if identity not in self.models:
            self.prepare(identity, seed)
        self.publisher.snapshots.signal(identity, reset)
        status = self.publisher.snapshots.wait_until_ready(identity, timeout_s=150)
        assert [row.snapshot for row in status.replicas] == [identity]


def completion(server: Server, model: str, prompt: list[int], **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 3, "logprobs": True, "temperature": 0, **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_a_stream_pinned_to_each_of_three_snapshots_runs_through_the_swaps_that_follow(
    server: Server, publisher: SnapshotPublisher, make: Callable[..., Path]
) -> None:
    signals = Signals(server, publisher, make)
    for attempt in range(ATTEMPTS):
        names = [f"s{attempt}-{number}" for number in range(5)]
        streams: list[Rollout] = []
        # Nothing but swaps takes time while streams run.
        for seed, name in enumerate(names):
            signals.prepare(name, seed + 1)
        for seed, name in enumerate(names):
            signals.next(name, seed + 1)
            if seed < 3:
                prompt = list(f"Pinned {attempt}.{seed} goes".encode())
                streams.append(Rollout(server, prompt, seed, TOKENS, f"p-{name}", name))
            elif seed == 3:
                streams.append(Rollout(server, list(b"Nobody"), seed, TOKENS, f"free-{attempt}"))
            if seed < 4:
                streams[-1].start()
                streams[-1].started.wait()
        alive = [stream.is_alive() for stream in streams]
        for stream in streams:
            stream.join()
        *pinned, free = streams
        for name, stream in zip(names, pinned, strict=False):
            assert stream.error is None
            assert (len(stream.tokens), stream.finish) == (TOKENS, "length")
            assert {label for _, _, label in stream.tokens} == {name}
        if all(alive):
            # Otherwise one of them was through before the last swap.
            break
    assert all(alive)
    assert set(names[3:]) == {label for _, _, label in free.tokens}
    for stream in streams:
        logprobs = [logprob for _, logprob, _ in stream.tokens]
        assert logprobs == pytest.approx(recompute(stream, signals.models), abs=TOLERANCE)


@pytest.mark.parametrize("reset", ["all", variant("none")])
def test_who_asks_for_an_older_snapshot_gets_it_and_reads_no_kv_of_another_one(
    server: Server, publisher: SnapshotPublisher, make: Callable[..., Path], reset: ResetPromptCache
) -> None:
    signals = Signals(server, publisher, make)
    prompt = list(range(5, 69))
    names = [f"{reset}-{number}" for number in range(4)]
    for seed, name in enumerate(names):
        signals.next(name, seed + 1, reset)
        # Its KV is there for those who may read it.
        assert completion(server, server.model, prompt).status_code == 200

    def asked(name: str) -> tuple[list[float], list[float], int]:
        """The log-probabilities, told and computed again, and how much of the prompt was cached."""
        answer = completion(server, f"{server.model}@{name}", prompt, perf_metrics_in_response=True)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert snapshot_of(answer.json()["model"]) == name
        assert {span["snapshot"] for span in choice["kv_snapshots"]} == {name}
        entries = choice["logprobs"]["content"]
        rollout = Rollout(server, prompt, 0, 3, "")
        rollout.tokens = [(entry["token_id"], entry["logprob"], name) for entry in entries]
        module, _ = signals.models[name]
        ids = [*prompt, *(token for token, _, _ in rollout.tokens)]
        expected = plain(module, ids)[len(prompt) - 1 :]
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return [logprob for _, logprob, _ in rollout.tokens], expected, cached

    for name in names[1:3]:
        told, expected, cached = asked(name)
        assert told == pytest.approx(expected, abs=TOLERANCE)
        assert cached == 0
        told, expected, cached = asked(name)
        assert told == pytest.approx(expected, abs=TOLERANCE)
        assert cached > 0
    if reset == "all":
        # Nobody else reads what was computed for those.
        newest = completion(server, server.model, [*prompt, 1], perf_metrics_in_response=True).json()
        assert {span["snapshot"] for span in newest["choices"][0]["kv_snapshots"]} == {names[3]}
    gone = completion(server, f"{server.model}@{names[0]}", prompt)
    assert (gone.status_code, gone.headers["retry-after"]) == (409, "1")
    assert gone.json()["error"]["code"] == "snapshot_not_served"
    assert f"snapshot {names[0]!r}" in gone.json()["error"]["message"]
    row = {"replica": "replica-0", "snapshot": names[3], "stage": "idle", "resident": names[1:3]}
    assert gone.json()["serving"] == [row]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        headers = {"x-midstream-snapshot": names[2], "x-midstream-max-staleness": "1"}
        ask = client.completions.create
        label = ask(model=server.model, prompt="a", max_tokens=1, extra_headers=headers).model
        assert snapshot_of(label) == names[2]
        headers = {"x-midstream-snapshot": names[1], "x-midstream-max-staleness": "1"}
        with pytest.raises(openai.ConflictError, match="at most 1 snapshots behind"):
            ask(model=server.model, prompt="a", max_tokens=1, extra_headers=headers)


@pytest.mark.variant
def test_an_older_snapshot_of_a_policy_is_served_beside_its_newest(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    adapters = Adapters(tiny_model())
    prompt = list(range(40))
    for seed in range(4):
        adapters.put(server, f"adapter-{seed}", seed)
        load_policy(server, f"adapter-{seed}", "learner")
    for seed in (1, 2, 3):
        answer = sample(server, f"learner@adapter-{seed}", prompt)
        assert snapshot_of(answer.model) == f"adapter-{seed}"
        checked(adapters, answer, f"adapter-{seed}", prompt)
    with pytest.raises(openai.ConflictError, match="adapter-0"):
        sample(server, "learner@adapter-0", prompt)


@pytest.mark.variant
def test_a_pinned_stream_whose_replica_is_killed_goes_on_where_its_snapshot_stays(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = str(tiny_model(dtype="bfloat16", max_positions=6100))
    options = ("--model", model, "--replicas", "2", "--resident-snapshots", "2", "--pin-drain-s", "0")
    with (
        serve(tmp_path / "state", *options) as two,
        SnapshotPublisher(two.url, two.bucket.as_uri()) as publisher,
    ):
        for attempt in range(ATTEMPTS):
            all_run(two)
            old, new = f"old-{attempt}", f"new-{attempt}"
            for seed, identity in enumerate((old, new)):
                put(two, identity, tiny_model(seed=seed + 1, dtype="bfloat16", max_positions=6100))
            publisher.snapshots.signal(old)
            publisher.snapshots.wait_until_ready(old, timeout_s=150)
            stream = Seams(two, {"x-midstream-snapshot": old}, 6000).begin()
            publisher.snapshots.signal(new)
            publisher.snapshots.wait_until_ready(new, timeout_s=150)
            kill(two, stream.replica)
            stream.join()
            assert (stream.error, stream.done, stream.labels) == (None, True, [old] * 6000)
            if stream.seams:
                # Otherwise it was through before.
                break
        assert [(seam["from"], seam["exact"]) for seam in stream.seams] == [(stream.replica, True)]


def plain(module: Any, ids: list[int]) -> list[float]:
    """Of each token from the second on."""
    import torch

    with torch.no_grad():
        logprobs = module(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
