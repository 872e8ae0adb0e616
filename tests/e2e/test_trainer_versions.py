"""Disk deltas of Miles and SkyRL against a real server: by their trainers' calls, and by a signal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from labelled_stream import Stream
from safetensors.numpy import load_file, save_file
from serving import Server
from trainer_writers import write_miles, write_skyrl


@pytest.fixture(scope="module")
def server(trained: Server) -> Server:
    return trained


def post(server: Server, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=700)


def said(server: Server, label: str) -> list[int]:
    """What the weights that serve now say, under the label that they must have."""
    stream = Stream(server, 5, 40)
    stream.run()
    assert stream.labels == [label] * 40
    return stream.ids


def test_versions_of_both_trainers_serve_what_full_snapshots_do_and_bad_ones_never_do(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    tensors = [load_file(tiny_model(seed=seed) / "model.safetensors") for seed in range(3)]
    wanted = {}
    for seed in (1, 2, 0):
        # As whole snapshots first, the one that the trainers begin with last.
        shutil.copytree(tiny_model(seed=seed), server.bucket / f"whole-{seed}")
        body = {
            "model_path": str(server.bucket / f"whole-{seed}"),
            "weight_version": "0" if seed == 0 else f"whole-{seed}",
        }
        post(server, "/update_weights_from_disk", body).raise_for_status()
        wanted[seed] = said(server, body["weight_version"])
    updates = server.bucket / "updates"
    pull = {"source_dir": str(updates), "local_checkpoint_dir": "/nvme/local"}
    # Miles: one of each encoding, pulled together.
    write_miles(updates / "weight_v000001", tensors[0], tensors[1], 1, encoding="overwrite")
    write_miles(updates / "weight_v000002", tensors[1], tensors[2], 2)
    told = post(server, "/pull_weights", pull | {"target_version": 2}).json()
    assert (told["success"], told["weight_version"]) == (True, "2")
    assert said(server, "2") == wanted[2]
    # A planted checksum: the answer names file and tensor, and the old weights serve.
    third = write_miles(updates / "weight_v000003", tensors[2], tensors[1], 3, files=1)
    (file,) = third.glob("*.safetensors")
    save_file(load_file(file), file, dict.fromkeys(load_file(file), "00000001"))
    refused = post(server, "/pull_weights", pull | {"target_version": 3})
    assert (refused.status_code, refused.json()["success"]) == (400, False)
    assert f"{file.name}: " in refused.json()["message"]
    assert "checksum" in refused.json()["message"]
    assert said(server, "2") == wanted[2]
    # Another parent: the delta says so, before it is applied.
    shutil.rmtree(third)
    write_miles(third, tensors[2], tensors[1], 3, base_version="000001")
    refused = post(server, "/pull_weights", pull | {"target_version": 3})
    assert refused.status_code == 400
    assert "stands on version 1, and its parent here is weight_v000002" in refused.json()["message"]
    # The right one, by the signal that any client has.
    shutil.rmtree(third)
    write_skyrl(server.bucket / "sync" / "delta-00000003", tensors[2], tensors[1], 3)
    signal = {
        "identity": "3",
        "incremental_snapshot_metadata": {
            "previous_snapshot_identity": "2",
            "compression_format": "skyrl_delta",
        },
    }
    where = {"x-fireworks-hot-load-source-url": (server.bucket / "sync" / "delta-00000003").as_uri()}
    taken = httpx.post(f"{server.url}/hot_load/v1/models/hot_load", json=signal, headers=where, timeout=60)
    assert (taken.status_code, taken.json()["kind"]) == (200, "delta")
    fetch = {"target_version": 3, "sync_dir": str(server.bucket / "sync")}
    assert post(server, "/fetch_weights", fetch).json() == {"status": "ok", "weight_version": "3"}
    assert said(server, "3") == wanted[1]
    demand_versions(server)


def demand_versions(server: Server) -> None:
    """What stitch's trainers ask of an external rollout service, while version 3 serves."""

    def generate(**version: int | None) -> httpx.Response:
        params = {"max_new_tokens": 3, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "sampling_params": params, "weight_version": version}
        return post(server, "/generate", body)

    for demand in ({"min_version": 2, "exact_version": None}, {"exact_version": 3}, {"min_version": 0}, {}):
        meta = generate(**demand).raise_for_status().json()["meta_info"]
        assert (meta["weight_version"], meta["weight_version_start"], meta["weight_version_end"]) == (
            "3",
            3,
            3,
        )
    openai = {"model": server.model, "max_tokens": 2, "weight_version": {"min_version": 3}}
    chat = post(server, "/v1/chat/completions", openai | {"messages": [{"role": "user", "content": "Go"}]})
    plain = post(server, "/v1/completions", openai | {"prompt": [5, 6], "stream": False})
    for answer in (chat, plain):
        told = answer.raise_for_status().json()
        assert (told["weight_version_start"], told["weight_version_end"]) == (3, 3)
    assert (
        "weight_version_start" not in post(server, "/v1/completions", {"prompt": [5], "max_tokens": 1}).json()
    )
    # A version that went is refused at once, and says that a retry may help.
    refused = generate(exact_version=2)
    told = refused.json()
    assert (refused.status_code, refused.headers["retry-after"]) == (409, "1")
    assert (told["type"], told["target_version"], told["applied"]) == ("WeightVersionNotReady", 2, 3)
    assert (told["error"]["code"], told["error"]["message"]) == ("snapshot_not_served", told["message"])
    for wrong, field in (
        ({"min_version": -1}, "weight_version.min_version"),
        ({"max_version": 1}, "weight_version.max_version"),
    ):
        refused = generate(**wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
