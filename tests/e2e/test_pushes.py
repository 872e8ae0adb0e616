"""Weights pushed by a trainer straight into a real server's replicas, under streams, and what happens when somebody dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from labelled_stream import Stream, completion
from safetensors.numpy import load_file as load_arrays
from serving import Server, descendants, serve, words_of

from midstream.client import PublishError, SnapshotPublisher

WAIT_S = 150.0


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def server(trained: Server) -> Server:
    return trained


def tensors(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(directory / "model.safetensors"))


def sampled(
    server: Server, seed: int = 1, *, check: bool = True
) -> tuple[str, list[int], list[float]] | None:
    """The label, the ids and the log-probabilities of an answer. None: it was refused, and need not be answered."""
    body = completion(server, seed, 24, logprobs=True, raw_output=True)
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
    if not check and response.is_error:
        return None
    answer = response.raise_for_status().json()
    choice = answer["choices"][0]
    numbers = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return answer["model"].partition("@")[2], choice["token_ids"], numbers


def label_of(server: Server) -> str:
    found = sampled(server)
    assert found is not None
    return found[0]


def answered_by(server: Server, seed: int) -> str:
    body = completion(server, seed, 1)
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S).raise_for_status()
    return str(answer.headers["x-midstream-replica"])


def serving(server: Server, snapshot: str) -> int:
    """How many replicas there are, if all of them serve it; else 0."""
    with SnapshotPublisher(server.url, f"file://{server.bucket}") as publisher:
        found = publisher.snapshots.status().replicas
    return len(found) if all(one.ready and one.snapshot == snapshot for one in found) else 0


def replica_pids(server: Server) -> list[int]:
    return [pid for pid in descendants(server.process.pid) if "midstream.launch.replica" in words_of(pid)]


def has_open(pid: int, directory: Path) -> bool:
    """Whether the process has a file of this directory open."""
    opened = [entry.resolve() for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return any(path.is_relative_to(directory) for path in opened)


def wait_for(what: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


def test_pushed_weights_serve_with_true_labels_and_the_numbers_of_the_same_files(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    trained = tiny_model(seed=1)
    before = label_of(server)
    ran, over = list[Stream](), threading.Event()

    def one_after_another(seed: int) -> None:
        """So one runs at the switch, however long the load takes."""
        while not over.is_set():
            stream = Stream(server, seed, 3500)
            ran.append(stream)
            stream.start()
            stream.join()

    lanes = [threading.Thread(target=one_after_another, args=(seed,)) for seed in range(4)]

    def begin(phase: str) -> None:
        """When the tensors are there, and nothing serves them yet."""
        if phase == "loading":
            for lane in lanes:
                lane.start()
            wait_for(lambda: len(ran) >= len(lanes), "the streams did not begin")
            for stream in ran[: len(lanes)]:
                stream.started.wait()

    with SnapshotPublisher(server.url, to="push") as publisher:
        published = publisher.publish("pushed-1", tensors(trained), on_phase=begin)
    assert (published.identity, published.kind) == ("pushed-1", "push")
    found = sampled(server)
    assert found is not None
    assert found[0] == "pushed-1"
    over.set()
    for lane in lanes:
        lane.join()
    seen = [list(dict.fromkeys(stream.labels)) for stream in ran]
    assert [(len(one.ids), one.finish, one.usage) for one in ran] == [(3500, "length", 3500)] * len(ran)
    assert [before, "pushed-1"] in seen
    assert all(labels in ([before], [before, "pushed-1"], ["pushed-1"]) for labels in seen), seen
    with SnapshotPublisher(server.url, f"file://{server.bucket}") as publisher:
        publisher.publish("filed-1", trained, kind="full")
    assert sampled(server) == ("filed-1", *found[1:])


def test_pushed_weights_are_in_the_bucket_and_a_replica_that_starts_later_has_them(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    trained = tiny_model(seed=2)
    with SnapshotPublisher(server.url, to="push") as publisher:
        publisher.publish("pushed-2", tensors(trained))
    kept = server.bucket / "pushed-2"
    wait_for((kept / "midstream.manifest.json").exists, "the bucket never got the pushed weights")
    expected, found = (load_arrays(place / "model.safetensors") for place in (trained, kept))
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)
    told = sampled(server)
    # A new replica has nothing but the bucket.
    body = {"minReplicaCount": 3, "maxReplicaCount": 3}
    place, mask = (
        f"{server.url}/v1/{server.deployment}",
        {"updateMask": "min_replica_count,max_replica_count"},
    )
    httpx.patch(place, params=mask, json=body, timeout=WAIT_S).raise_for_status()
    wait_for(lambda: serving(server, "pushed-2") == 3, "the third replica never served the pushed weights")
    answered = {answered_by(server, seed) for seed in range(64)}
    assert answered == {"replica-0", "replica-1", "replica-2"}
    # Then those that have it die. A request that met the death of two would be refused from then on.
    dying = {*replica_pids(server)}
    for pid in dying:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len({*replica_pids(server)} - dying) == 3, "the replicas were not started again")
    wait_for(lambda: serving(server, "pushed-2") == 3, "what served before does not serve again")
    assert sampled(server) == told
    httpx.patch(place, params=mask, json={"minReplicaCount": 2, "maxReplicaCount": 2}).raise_for_status()
    wait_for(lambda: serving(server, "pushed-2") == 2, "the third replica stays, or another is not back")


def test_what_does_not_fit_is_refused_by_name_and_the_next_push_works(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    good = tensors(tiny_model(seed=3))
    before = sampled(server)
    name = next(name for name, tensor in good.items() if tensor.dim() == 2)
    with SnapshotPublisher(server.url, to="push") as publisher:
        with pytest.raises(PublishError, match=name):
            publisher.publish("bad-shape", good | {name: good[name][1:].clone()})
        with pytest.raises(PublishError, match=name):
            publisher.publish("bad-number", good | {name: good[name] * float("nan")})
        with pytest.raises(PublishError, match=name):
            publisher.publish("missing", {other: good[other] for other in good if other != name})
        assert sampled(server) == before
        publisher.publish("pushed-3", good)
    assert label_of(server) == "pushed-3"


DYING = """
    import os, sys
    from safetensors.torch import load_file
    from midstream.client import SnapshotPublisher, push

    def dies(*_):
        os._exit(7)

    with SnapshotPublisher(sys.argv[1], to="push") as publisher:
        publisher.publish("whole", dict(load_file(sys.argv[2])))
        print("pushed", flush=True)
        push.TrainerGroup.send = dies
        publisher.publish("half", dict(load_file(sys.argv[2])))
"""


def test_a_trainer_that_dies_in_the_middle_changes_nothing_and_the_next_one_is_served(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    file = tiny_model(seed=4) / "model.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DYING), server.url, str(file)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "pushed\n"), done.stderr
    found = sampled(server)
    assert found is not None
    assert found[0] == "whole"
    with SnapshotPublisher(server.url, to="push") as publisher:
        publisher.publish("after", tensors(tiny_model(seed=4)))
    assert sampled(server) == ("after", *found[1:])


def test_a_second_trainers_group_is_refused_while_the_first_one_lives(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    weights = tensors(tiny_model(seed=5))
    with (
        SnapshotPublisher(server.url, to="push") as first,
        SnapshotPublisher(server.url, to="push") as second,
    ):
        first.publish("first", weights)
        with pytest.raises(PublishError, match="409"):
            second.publish("second", weights)
        assert label_of(server) == "first"
    with SnapshotPublisher(server.url, to="push") as third:
        third.publish("third", weights)
    assert label_of(server) == "third"


@pytest.mark.variant
def test_without_a_bucket_a_replica_that_lost_its_files_gets_them_from_another_one(
    tmp_path: Path, model: Path, tiny_model: Callable[..., Path]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[push]\nkeep = false\n")
    state = tmp_path / "state"
    with serve(
        state, "--model", str(model), "--replicas", "2", "--config", str(config), "--no-tinker"
    ) as own:
        with SnapshotPublisher(own.url, to="push") as publisher:
            publisher.publish("pushed", tensors(tiny_model(seed=6)))
        told = sampled(own)
        assert told is not None
        assert told[0] == "pushed"
        cache = state / "snapshots" / "replica-0"
        (lost,) = [pid for pid in replica_pids(own) if has_open(pid, cache)]
        for entry in [path for path in cache.iterdir() if path.is_dir()]:
            shutil.rmtree(entry)
        os.kill(lost, signal.SIGKILL)
        wait_for(lambda: any(cache.glob("pushed-*")), "the replica never got the pushed files again")
        wait_for(lambda: serving(own, "pushed") == 2, "the replica never served the pushed weights again")
        assert not (own.bucket / "pushed").exists()
        assert {answered_by(own, seed) for seed in range(64)} == {"replica-0", "replica-1"}
        # Every answer has the numbers of the pushed weights, whoever gives it.
        assert [sampled(own) for _ in range(6)] == [told] * 6
