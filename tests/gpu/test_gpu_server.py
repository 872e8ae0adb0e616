"""A server whose engines compute on a device: a full snapshot and a delta under streams, each token recomputed on the CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import Server, on_device, serve
from test_swap import Rollout, load, recompute

from midstream.client import SnapshotPublisher

STREAMS, TOKENS, ATTEMPTS = 8, 3000, 4


@pytest.fixture(scope="module")
def server(
    device: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("served")
    with serve(
        place / "state", "--replicas", "1", "--model", str(tiny_model()), *on_device(place)
    ) as running:
        yield running


def trained(checkpoint: Path, target: Path, seed: int) -> Path:
    """As a training step leaves it: few tensors are others."""
    shutil.copytree(checkpoint, target)
    file = target / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name == "lm_head.weight" or name.endswith("1.self_attn.v_proj.weight"):
            noise = torch.randn(weights[name].shape, generator=torch.manual_seed(seed))
            weights[name] = weights[name] + 0.1 * noise
    save_file(weights, file, metadata={"format": "pt"})
    return target


def test_streams_cross_a_full_snapshot_and_a_delta_and_every_token_is_what_its_label_says(
    server: Server, tiny_model: Callable[..., Path], tmp_path: Path, figure: Callable[..., None]
) -> None:
    before, before_model = "base", load(tiny_model())
    with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
        for attempt in range(ATTEMPTS):
            full, delta = f"full-{attempt}", f"delta-{attempt}"
            directories = [tiny_model(seed=attempt + 1)]
            directories.append(trained(directories[0], tmp_path / delta, attempt))
            rollouts = [
                Rollout(server, list(f"Rollout {attempt}.{i}".encode()), i, TOKENS, f"session-{attempt}-{i}")
                for i in range(STREAMS)
            ]
            for rollout in rollouts:
                rollout.start()
            for rollout in rollouts:
                rollout.started.wait()
            swaps = []
            for name, directory in zip((full, delta), directories, strict=True):
                published = publisher.publish(name, directory, kind=name.partition("-")[0])
                assert published.kind == name.partition("-")[0]
                (replica,) = publisher.snapshots.status().replicas
                swaps.append(replica.last_swap)
            for rollout in rollouts:
                rollout.join()
            models = {before: before_model} | {
                name: load(directory) for name, directory in zip((full, delta), directories, strict=True)
            }
            if all({label for _, _, label in rollout.tokens} == set(models) for rollout in rollouts):
                # Otherwise a stream was through before the last swap.
                break
            before, before_model = delta, models[delta]
    figure(swaps=swaps)
    for rollout in rollouts:
        assert (rollout.error, len(rollout.tokens), rollout.finish) == (None, TOKENS, "length")
        labels = [label for _, _, label in rollout.tokens]
        assert labels == sorted(labels, key=list(models).index), "a label went backwards"
        assert set(labels) == set(models), "this stream did not cross both"
        logprobs = [logprob for _, logprob, _ in rollout.tokens]
        assert logprobs == pytest.approx(recompute(rollout, models), abs=1e-3)
