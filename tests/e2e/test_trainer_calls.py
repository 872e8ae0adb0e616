"""Unmodified trainers' control calls against a real server under streams, in the order in which their clients send them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from labelled_stream import Stream, completion
from serving import Server, words_of

HELD_AT_ONCE = {"x-fireworks-hot-load-drain-timeout": "0"}
WAIT_S = 150.0


@pytest.fixture(scope="module")
def server(trained: Server) -> Server:
    return trained


def post(server: Server, path: str, body: Any = None, **query: str) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, params=query, timeout=700)


def get(server: Server, path: str) -> Any:
    return httpx.get(f"{server.url}{path}", timeout=60).raise_for_status().json()


def streams(server: Server, count: int, max_tokens: int) -> list[Stream]:
    made = [Stream(server, seed, max_tokens) for seed in range(count)]
    for stream in made:
        stream.start()
    for stream in made:
        stream.started.wait()
    return made


def is_held(server: Server) -> bool:
    """Whether a new request would wait, on each of several replicas."""
    body = completion(server, 1, 1)
    found = {
        httpx.post(f"{server.url}/v1/completions", json=body, headers=HELD_AT_ONCE, timeout=60).status_code
        for _ in range(6)
    }
    assert found in ({200}, {425})
    return found == {425}


def ledger(server: Server) -> dict[str, Any]:
    told: dict[str, Any] = get(server, f"/v1/{server.deployment}/ledger")
    return told


def prime_rl_update(server: Server, weight_dir: Path) -> httpx.Response:
    """The calls of prime-rl's update_weights in filesystem mode, pause and resumption around it."""
    post(server, "/pause", mode="keep", clear_cache="false").raise_for_status()
    try:
        (weight_dir / "NCCL_READY").touch()
        body = {"weight_dir": weight_dir.as_posix(), "version_uid": None}
        return post(server, "/update_weights", body).raise_for_status()
    finally:
        post(server, "/resume").raise_for_status()


def test_prime_rls_order_of_calls_under_streams_gives_a_named_snapshot_and_true_labels(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    assert httpx.get(f"{server.url}/liveness", timeout=60).status_code == 200
    before = get(server, "/weight_info")["weight_version"]
    directory = server.bucket / "run_default" / "broadcasts" / "step_5"
    directory.mkdir(parents=True)
    # Weights alone, as it writes them.
    shutil.copy(tiny_model(seed=1) / "model.safetensors", directory)
    (directory / "STABLE").touch()
    running = streams(server, 4, 3500)
    told = prime_rl_update(server, directory).json()
    name = told["weight_version"]
    assert name.startswith("update-")
    assert name.endswith("-step_5")
    for stream in running:
        stream.join()
        assert (len(stream.ids), stream.finish) == (3500, "length")
        assert list(dict.fromkeys(stream.labels)) == [before, name]
    assert ledger(server)["desired_snapshot_identity"] == name
    assert get(server, "/weight_info") == {"weight_version": name}
    # A retry of the same call, and another directory.
    assert prime_rl_update(server, directory).json()["weight_version"] == name
    shutil.copytree(directory, directory.with_name("step_6"))
    shutil.copy(tiny_model(seed=2) / "model.safetensors", directory.with_name("step_6"))
    assert prime_rl_update(server, directory.with_name("step_6")).json()["weight_version"] > name


def test_slimes_order_of_calls_serves_the_version_it_names_and_keeps_partial_samples(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    version_dir = server.bucket / "weight_v000100"
    running = streams(server, 3, 3500)
    post(server, "/pause_generation", {}).raise_for_status()
    for stream in running:
        stream.join()
        assert stream.finish == "abort"
        assert 0 < len(stream.ids) == stream.usage < 3500
    assert httpx.get(f"{server.url}/flush_cache", timeout=60).status_code == 200
    shutil.copytree(tiny_model(seed=3), version_dir)
    told = post(
        server, "/update_weights_from_disk", {"model_path": str(version_dir), "weight_version": "100"}
    ).json()
    assert (told["success"], told["num_paused_requests"]) == (True, 0)
    shutil.rmtree(version_dir)
    post(server, "/continue_generation", {}).raise_for_status()
    assert get(server, "/get_weight_version") == {"weight_version": "100"}
    assert get(server, "/model_info")["weight_version"] == "100"
    after = Stream(server, 7, 5)
    after.run()
    assert after.labels == ["100"] * 5
    assert "100" in [row["identity"] for row in ledger(server)["snapshots"]]


def test_a_kept_stream_says_what_an_undisturbed_one_says_and_newcomers_wait(server: Server) -> None:
    undisturbed = Stream(server, 0, 3000)
    undisturbed.run()
    (kept,) = streams(server, 1, 3000)
    assert post(server, "/pause", mode="keep").json() == {"status": "paused"}
    assert get(server, "/is_paused") == {"is_paused": True, "mode": "keep"}
    assert is_held(server)
    newcomer = Stream(server, 0, 3000)
    newcomer.start()
    assert kept.finish is None
    assert post(server, "/resume").json() == {"status": "resumed"}
    assert get(server, "/is_paused") == {"is_paused": False, "mode": None}
    kept.join()
    newcomer.join()
    assert kept.ids == undisturbed.ids == newcomer.ids
    assert (kept.finish, newcomer.status) == ("length", 200)


def test_a_pause_that_waits_is_answered_when_the_last_request_has_ended(server: Server) -> None:
    running = streams(server, 3, 1500)
    post(server, "/pause", mode="wait").raise_for_status()
    assert all(row["in_flight"] == 0 for row in get(server, "/health")["replicas"])
    assert is_held(server)
    post(server, "/resume").raise_for_status()
    for stream in running:
        stream.join()
        assert (len(stream.ids), stream.finish) == (1500, "length")
    assert not is_held(server)


def test_abort_requests_ends_the_named_ones_with_what_they_have(server: Server) -> None:
    whole = Stream(server, 21, 3000)
    whole.run()
    named, other = Stream(server, 21, 3000, "sample-21"), Stream(server, 22, 3000, "sample-22")
    for stream in (named, other):
        stream.start()
    for stream in (named, other):
        stream.started.wait()
    assert post(server, "/abort_requests", {"request_ids": ["sample-21", "unknown"]}).json()["aborted"] == 1
    for stream in (named, other):
        stream.join()
    assert (named.finish, other.finish) == ("abort", "length")
    assert 0 < len(named.ids) < 3000
    assert named.ids == whole.ids[: len(named.ids)]
    running = streams(server, 2, 3500)
    assert post(server, "/abort_request", {"rid": "", "abort_all": True}).json() == {"aborted": 2}
    for stream in running:
        stream.join()
        assert stream.finish == "abort"


def test_a_pause_outlives_a_replica_and_a_gateway(server: Server) -> None:
    (kept,) = streams(server, 1, 3500)
    post(server, "/pause", mode="keep").raise_for_status()
    boots = {row["replica"]: row["boot"] for row in replicas(server)}
    os.kill(process_of(server, kept.replica), signal.SIGKILL)
    server.process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + WAIT_S
    while any(
        row["boot"] in (None, *boots.values()) for row in replicas(server) if row["replica"] == kept.replica
    ):
        assert time.monotonic() < deadline
    while get(server, "/health")["usable_replicas"] < len(boots):
        assert time.monotonic() < deadline
    assert get(server, "/is_paused")["is_paused"]
    assert is_held(server)
    assert kept.finish is None
    post(server, "/resume").raise_for_status()
    kept.join()
    assert (len(kept.ids), kept.finish) == (3500, "length")


def replicas(server: Server) -> list[dict[str, Any]]:
    return [row["midstream"] for row in get(server, "/hot_load/v1/models/hot_load")["replicas"]]


def process_of(server: Server, name: str) -> int:
    (found,) = [pid for pid in server.children() if name in words_of(pid)]
    return found
