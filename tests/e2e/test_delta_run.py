"""A run of a trainer's disk deltas against a real server: longer than a chain may be, with a replica that joins late."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from labelled_stream import Stream
from safetensors.numpy import load_file, save_file
from serving import Server, on_device, serve
from trainer_writers import write_miles

CHAIN_MAX, REBASE, STEPS = 8, 2, 10


@pytest.fixture
def server(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Server]:
    config = tmp_path / "server.toml"
    config.write_text(f"[gateway]\nchain_max = {CHAIN_MAX}\nchain_rebase = {REBASE}\n")
    options = ("--model", str(tiny_model()), "--config", str(config), "--no-tinker")
    if on_device(tmp_path):
        pytest.skip("one configuration file")
    with serve(tmp_path / "state", *options) as running:
        yield running


def post(server: Server, path: str, body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=700)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ledger(server: Server) -> dict[str, Any]:
    found = httpx.get(f"{server.url}/v1/{server.deployment}/ledger", timeout=60).raise_for_status().json()
    return {row["identity"]: row for row in found["snapshots"]}


def said(server: Server, label: str) -> list[int]:
    stream = Stream(server, 5, 40)
    stream.run()
    assert stream.labels == [label] * 40
    return stream.ids


def steps(begin: Path, updates: Path) -> Iterator[dict[str, Any]]:
    """The tensors of each version, whose delta is there. Few values change, as in training."""
    rng, tensors = np.random.default_rng(5), load_file(begin / "model.safetensors")
    for version in range(1, STEPS + 1):
        after = {name: array.copy() for name, array in tensors.items()}
        for name in sorted(tensors)[:3]:
            flat = after[name].reshape(-1)
            flat[rng.integers(0, flat.size, 4)] *= flat.dtype.type(1.5)
        write_miles(updates / f"weight_v{version:06d}", tensors, after, version, files=1)
        tensors = after
        yield tensors


@pytest.mark.variant
def test_a_run_goes_on_past_the_bound_of_chains(server: Server, tiny_model: Callable[..., Path]) -> None:
    begin, updates = tiny_model(), server.bucket / "updates"
    shutil.copytree(begin, server.bucket / "0")
    post(server, "/update_weights_from_disk", {"model_path": str(server.bucket / "0"), "weight_version": "0"})
    trained: list[dict[str, Any]] = [{}]
    for version, tensors in enumerate(steps(begin, updates), 1):
        trained.append(tensors)
        pull = {"source_dir": str(updates), "target_version": version}
        assert post(server, "/pull_weights", pull)["weight_version"] == str(version)
        # An engine that reloads what it pulled asks by the number alone, whatever the snapshot's files are by now.
        reload = {"model_path": "/nvme/local", "weight_version": str(version)}
        assert post(server, "/update_weights_from_disk", reload)["weight_version"] == str(version)
        if version % REBASE == 0:
            waits_for_full_files(server, str(version))
    found = ledger(server)
    assert max(len(row["chain"]) for row in found.values()) <= CHAIN_MAX
    whole = {name: row["full_url"] for name, row in found.items() if row["full_url"] is not None}
    assert len(whole) >= STEPS // CHAIN_MAX
    for name, url in whole.items():
        put = load_file(Path(url.removeprefix("file://")) / "model.safetensors")
        assert put.keys() == trained[int(name)].keys()
        assert all(np.array_equal(put[tensor], trained[int(name)][tensor]) for tensor in put)
    for name, url in whole.items():
        if not found[name]["full_needed"]:
            shutil.rmtree(url.removeprefix("file://"))
    served = said(server, str(STEPS))
    joins_with_the_newest_whole_files(server)
    assert said(server, str(STEPS)) == served
    # What an independent rebuild serves: the trainer's own tensors, as a full snapshot.
    full = shutil.copytree(begin, server.bucket / "independent")
    save_file(trained[-1], full / "model.safetensors", {"format": "pt"})
    post(server, "/update_weights_from_disk", {"model_path": str(full), "weight_version": "independent"})
    assert said(server, "independent") == served


def waits_for_full_files(server: Server, version: str) -> None:
    """A trainer whose steps take a tenth of a second is faster than replicas are asked for full files, once in a second."""
    while ledger(server)[version]["full_url"] is None:
        assert server.process.poll() is None
        time.sleep(0.2)


def joins_with_the_newest_whole_files(server: Server) -> None:
    """One more replica makes the version of one whole snapshot and of the deltas since."""
    before = made_of(server)
    count = len(before) + 1
    url = f"{server.url}/v1/{server.deployment}"
    scaled = httpx.patch(url, json={"minReplicaCount": count, "maxReplicaCount": count}, timeout=60)
    assert scaled.status_code == 200, scaled.text
    pull = {"source_dir": str(server.bucket / "updates"), "target_version": STEPS}
    while len(replicas(server)) < count:
        assert server.process.poll() is None
        # The cores are for the replica that starts.
        time.sleep(0.2)
    post(server, "/pull_weights", pull)
    (joined,) = made_of(server).keys() - before.keys()
    assert 1 <= made_of(server)[joined] <= CHAIN_MAX + 1


def replicas(server: Server) -> list[Any]:
    rows = httpx.get(f"{server.url}/hot_load/v1/models/hot_load", timeout=60).raise_for_status().json()
    return [row for row in rows["replicas"] if row["current_snapshot_identity"] == str(STEPS)]


def made_of(server: Server) -> dict[str, int]:
    """Of how many links each replica has made the last version."""
    return {
        path.parents[1].name: len(json.loads(path.read_bytes()))
        for path in (server.state_dir / "snapshots").rglob(".content.json")
        if path.parent.name.startswith(f"{STEPS}-")
    }
