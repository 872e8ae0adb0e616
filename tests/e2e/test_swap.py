"""Hot load end to end: files in the bucket, a signal, streams that cross the swap, every label recomputed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import DEVICE, Server, on_device, serve, words_of
from transformers import AutoModelForCausalLM

from midstream.client import SnapshotFailed, SnapshotPublisher, snapshot_of
from midstream.client.decode import decode_routing_matrix
from midstream.client.replay import RouterTap

ATTEMPTS = 4
# Nats, of a float32 model.
TOLERANCE = 1e-4 if DEVICE == "cpu" else 1e-3


@pytest.fixture(scope="module")
def server(trained: Server) -> Server:
    return trained


@pytest.fixture
def publisher(server: Server) -> Iterator[SnapshotPublisher]:
    with SnapshotPublisher(server.url, server.bucket.as_uri()) as made:
        yield made


def put(server: Server, identity: str, checkpoint: Path) -> None:
    """What a trainer without our client does: a Hugging Face directory in the bucket."""
    shutil.copytree(checkpoint, server.bucket / identity)


def spoil(checkpoint: Path, name: str, row: int) -> None:
    """One row of a tensor is NaN. Prompts without its token do not show it."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors[name][row] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


class Rollout(threading.Thread):
    """One stream: its token ids, logprobs and labels; `started` is set at its first token."""

    def __init__(
        self, server: Server, prompt: list[int], seed: int, max_tokens: int, session: str, snapshot: str = ""
    ) -> None:
        """snapshot: the one that it is pinned to."""
        super().__init__()
        self.server, self.prompt, self.seed = server, prompt, seed
        self.model = f"{server.model}@{snapshot}" if snapshot else server.model
        self.max_tokens, self.session = max_tokens, session
        self.started = threading.Event()
        # Generated: id, logprob, label.
        self.tokens: list[tuple[int, float, str]] = []
        # Of input positions 0.., prompt included.
        self.routes: list[np.ndarray] = []
        self.finish: str | None = None
        self.replica = ""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._stream()
        except openai.OpenAIError as error:
            self.error = error
        finally:
            self.started.set()

    def _stream(self) -> None:
        extra = {"logprobs": True, "include_routing_matrix": True, "echo": True, "ignore_eos": True}
        with openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="k", max_retries=0) as client:
            raw = client.completions.with_raw_response.create(
                model=self.model,
                prompt=self.prompt,
                max_tokens=self.max_tokens,
                seed=self.seed,
                stream=True,
                extra_body=extra,
                extra_headers={"x-multi-turn-session-id": self.session},
            )
            self.replica = raw.headers["x-midstream-replica"]
            for chunk in raw.parse():
                for choice in chunk.choices:
                    self._take(chunk.model, choice)

    def _take(self, model: str, choice: Any) -> None:
        label = snapshot_of(model)
        assert label is not None
        for entry in choice.logprobs.content if choice.logprobs else ():
            if entry.get("routing_matrix"):
                self.routes.append(decode_routing_matrix(entry["routing_matrix"], top_k=2))
            if entry["sampling_logprob"] is None:
                # An echoed prompt token.
                continue
            self.tokens.append((entry["token_id"], entry["logprob"], label))
            self.started.set()
        self.finish = choice.finish_reason or self.finish


def recompute(rollout: Rollout, models: dict[str, Any]) -> list[float]:
    """Each token's logprob under the snapshot it is labelled with; earlier positions keep the KV they were given.

    The KV of a position is made by the pass that consumes it, so token j's is made under the label of token j + 1. Routes
    are replayed: where two experts are within a rounding of a tie, another batch may choose the other one.
    """
    ids = rollout.prompt + [token for token, _, _ in rollout.tokens]
    labels = [label for _, _, label in rollout.tokens]
    routes = torch.from_numpy(np.stack(rollout.routes).astype(np.int64))
    assert len(routes) == len(ids) - 1
    expected: list[float] = []
    cache, position, start = None, 0, 0
    while start < len(labels):
        end = start
        while end < len(labels) and labels[end] == labels[start]:
            end += 1
        # The passes that gave tokens start..end-1 ran positions < stop.
        stop = len(rollout.prompt) + end - 1
        model, tap = models[labels[start]]
        with torch.no_grad(), tap.forcing(routes[position:stop]):
            output = model(torch.tensor([ids[position:stop]]), past_key_values=cache, use_cache=True)
        logprobs = output.logits[0, start - end :].log_softmax(-1)
        targets = torch.tensor(ids[stop - (end - start) + 1 : stop + 1])
        expected += logprobs.gather(1, targets[:, None])[:, 0].tolist()
        cache, position, start = output.past_key_values, stop, end
    return expected


def load(checkpoint: Path) -> tuple[Any, RouterTap]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return model, RouterTap(model)


def test_streams_cross_swaps_and_every_token_is_what_its_label_says(
    server: Server, publisher: SnapshotPublisher, tiny_model: Callable[..., Path]
) -> None:
    seeds = {i: load(tiny_model(seed=i)) for i in (1, 2)}
    put(server, "swap-before", tiny_model())
    publisher.snapshots.signal("swap-before")
    publisher.snapshots.wait_until_ready("swap-before", timeout_s=150)
    before, before_model = "swap-before", load(tiny_model())
    for attempt in range(ATTEMPTS):
        first, second = (f"swap-{attempt}-{i}" for i in (1, 2))
        models = {before: before_model, first: seeds[1], second: seeds[2]}
        rollouts = cross(server, publisher, attempt, {first: tiny_model(seed=1), second: tiny_model(seed=2)})
        assert {rollout.replica for rollout in rollouts} == {"replica-0", "replica-1"}
        for rollout in rollouts:
            assert rollout.error is None
            assert (len(rollout.tokens), rollout.finish) == (3500, "length")
            labels = [label for _, _, label in rollout.tokens]
            assert labels == sorted(labels, key=list(models).index), "a label went backwards"
        if all({label for _, _, label in rollout.tokens} == set(models) for rollout in rollouts):
            # Otherwise a stream was through before the last swap.
            break
        before, before_model = second, seeds[2]
    for rollout in rollouts:
        assert {label for _, _, label in rollout.tokens} == set(models), (
            "this stream did not cross both swaps"
        )
    # One of each replica: it takes 2 s of a core.
    for replica in ("replica-0", "replica-1"):
        for rollout in [each for each in rollouts if each.replica == replica][:1]:
            logprobs = [logprob for _, logprob, _ in rollout.tokens]
            assert logprobs == pytest.approx(recompute(rollout, models), abs=TOLERANCE)


def cross(
    server: Server, publisher: SnapshotPublisher, attempt: int, snapshots: dict[str, Path]
) -> list[Rollout]:
    """Streams that began before these snapshots were signalled, one after the other."""
    for identity, checkpoint in snapshots.items():
        put(server, identity, checkpoint)
    rollouts = [
        Rollout(server, list(f"Rollout {attempt}.{i} goes".encode()), i, 3500, f"cross-{attempt}-{i}")
        for i in range(8)
    ]
    for rollout in rollouts:
        rollout.start()
    for rollout in rollouts:
        rollout.started.wait()
    for identity in snapshots:
        publisher.snapshots.signal(identity)
        status = publisher.snapshots.wait_until_ready(identity, timeout_s=150)
        assert [r.snapshot for r in status.replicas] == [identity] * 2
    for rollout in rollouts:
        rollout.join()
    return rollouts


def serving_now(publisher: SnapshotPublisher) -> set[str | None]:
    return {replica.snapshot for replica in publisher.snapshots.status().replicas}


def test_perf_metrics_say_which_snapshots_computed_the_kv(
    server: Server, publisher: SnapshotPublisher, tiny_model: Callable[..., Path]
) -> None:
    prompt = list(b"a prompt that is cached before the swap and continued after it ")[:48]
    body = {"model": server.model, "prompt": prompt, "max_tokens": 8, "perf_metrics_in_response": True}
    body |= {"ignore_eos": True, "user": "provenance"}

    def spans() -> list[tuple[str, int, int]]:
        (choice,) = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
        return [(span["snapshot"], span["start"], span["end"]) for span in choice["kv_snapshots"]]

    (before,) = serving_now(publisher)
    assert before is not None
    assert spans() == [(before, 0, 55)]
    put(server, "provenance", tiny_model(seed=9))
    publisher.snapshots.signal("provenance", reset_prompt_cache="none")
    publisher.snapshots.wait_until_ready("provenance", timeout_s=150)
    assert spans() == [(before, 0, 48), ("provenance", 48, 55)]


def test_a_snapshot_that_fails_verification_serves_no_token(
    server: Server, publisher: SnapshotPublisher, tiny_model: Callable[..., Path]
) -> None:
    before = serving_now(publisher)
    put(server, "short", tiny_model(seed=5))
    weights = server.bucket / "short" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    publisher.snapshots.signal("short")
    with pytest.raises(SnapshotFailed, match=r"model\.safetensors"):
        publisher.snapshots.wait_until_ready("short", timeout_s=150)
    put(server, "wider", tiny_model(seed=5, hidden=192))
    publisher.snapshots.signal("wider")
    with pytest.raises(SnapshotFailed, match="hidden_size"):
        publisher.snapshots.wait_until_ready("wider", timeout_s=150)
    put(server, "nan", tiny_model(seed=5))
    spoil(server.bucket / "nan", "model.embed_tokens.weight", 250)
    publisher.snapshots.signal("nan")
    with pytest.raises(SnapshotFailed, match=r"embed_tokens\.weight is NaN at index \[250, 0\]"):
        publisher.snapshots.wait_until_ready("nan", timeout_s=150)
    assert serving_now(publisher) == before
    after = Rollout(server, [1, 2, 3], 0, 5, "after-failure")
    after.run()
    assert {label for _, _, label in after.tokens} == before
    # The same identity may be put right and asked for again.
    shutil.rmtree(server.bucket / "short")
    put(server, "short", tiny_model(seed=5))
    publisher.snapshots.signal("short")
    publisher.snapshots.wait_until_ready("short", timeout_s=150)
    assert serving_now(publisher) == {"short"}


def test_files_overwritten_under_the_same_name_are_loaded_when_that_is_said(
    server: Server, publisher: SnapshotPublisher, tiny_model: Callable[..., Path]
) -> None:
    def greedy() -> list[int]:
        body = {"model": server.model, "prompt": [7, 8, 9], "max_tokens": 6, "temperature": 0}
        asked = {**body, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    said = []
    for seed in (10, 11):
        if seed == 11:
            shutil.rmtree(server.bucket / "overwritten")
        put(server, "overwritten", tiny_model(seed=seed))
        publisher.snapshots.signal("overwritten", overwrite=seed == 11)
        publisher.snapshots.wait_until_ready("overwritten", timeout_s=150)
        # Without a session: both replicas answer.
        said.append([greedy() for _ in range(4)])
    assert all(answer == said[0][0] for answer in said[0])
    assert all(answer == said[1][0] for answer in said[1])
    assert said[0][0] != said[1][0]


def test_a_killed_replica_comes_back_on_the_current_snapshot_and_only_its_sessions_move(
    server: Server, publisher: SnapshotPublisher, tiny_model: Callable[..., Path]
) -> None:
    put(server, "before-kill", tiny_model(seed=6))
    publisher.snapshots.signal("before-kill")
    publisher.snapshots.wait_until_ready("before-kill", timeout_s=150)

    def homes() -> dict[str, str]:
        found = {}
        for i in range(12):
            rollout = Rollout(server, list(b"placed"), i, 2, f"home-{i}")
            rollout.run()
            assert rollout.error is None
            assert {label for _, _, label in rollout.tokens} == {"before-kill"}
            found[rollout.session] = rollout.replica
        return found

    placed = homes()
    assert set(placed.values()) == {"replica-0", "replica-1"}
    long = Rollout(server, list(b"A stream that its replica leaves"), 1, 4000, next(iter(placed)))
    long.start()
    long.started.wait()
    victim = long.replica
    os.kill(process_of(server, victim), signal.SIGKILL)
    long.join()
    assert (len(long.tokens), long.finish, long.error) == (4000, "length", None)
    publisher.snapshots.wait_until_ready("before-kill", timeout_s=150)
    again = homes()
    assert all(again[s] == r for s, r in placed.items() if r != victim)
    assert {f"cross-{i}" for i in range(12)}.isdisjoint(again)


def process_of(server: Server, name: str) -> int:
    """The pid of a supervised child, which carries its name on its command line."""
    (found,) = [pid for pid in server.children() if name in words_of(pid)]
    return found


def test_a_stop_lets_streams_finish_and_a_restarted_server_goes_on_with_the_snapshot_of_its_ledger(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    arguments = ("--replicas", "1", "--model", str(tiny_model()), *on_device(tmp_path))
    with serve(tmp_path / "state", *arguments) as server:
        put(server, "kept", tiny_model(seed=7))
        with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
            publisher.snapshots.signal("kept")
            publisher.snapshots.wait_until_ready("kept", timeout_s=150)
        rollout = Rollout(server, [9, 9], 0, 900, "last")
        rollout.start()
        rollout.started.wait()
        children = server.children()
        # Gateway, Tinker front, replica, engine.
        assert len(children) == 4
        assert server.stop() == 0
        rollout.join()
        assert rollout.error is None
        assert (len(rollout.tokens), rollout.finish) == (900, "length")
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        assert "Traceback" not in server.log.read_text()
    with serve(tmp_path / "state", *arguments) as server:
        body = {"model": server.model, "prompt": "hello", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert json.loads(answer.content)["model"] == f"{server.model}@kept"
        # As Ctrl-C in a terminal.
        assert server.stop(signal.SIGINT) == 0
