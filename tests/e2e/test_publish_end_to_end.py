"""Publishing to a real server: full and delta snapshots from a shell, and what status and ledger then say."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import safetensors.torch
import torch
from serving import Server, command

from midstream.client import SnapshotPublisher


def run(server: Server, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        command(*arguments, "--server", server.url), capture_output=True, text=True, timeout=170
    )
    return done.returncode, done.stdout, done.stderr


def test_a_delta_published_from_a_shell_serves_the_very_weights_of_its_checkpoint(
    published: Server, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Scored by the server, the same snapshot sent as a delta and sent whole must be the same to the last bit."""
    first = tiny_model(seed=31, dtype="bfloat16")
    second = tmp_path / "changed"
    second.mkdir()
    for file in first.iterdir():
        if file.is_file() and not file.name.startswith("."):
            (second / file.name).write_bytes(file.read_bytes())
    tensors = safetensors.torch.load_file(first / "model.safetensors")
    torch.manual_seed(0)
    for name, values in tensors.items():
        tensors[name] = torch.where(torch.rand(values.shape) < 0.02, values * 1.5, values)
    safetensors.torch.save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    work = ("--work-dir", str(tmp_path / "work"))

    code, out, err = run(published, "publish", str(first), "--identity", "shell-0", *work)
    assert (code, "shell-0: full" in out) == (0, True), err
    code, out, err = run(published, "publish", str(second), "--identity", "shell-1", *work)
    assert (code, "shell-1: a delta on shell-0" in out) == (0, True), err
    as_delta = scores(published)
    code, out, err = run(published, "publish", str(second), "--identity", "shell-2", "--full", *work)
    assert (code, "shell-2: full" in out) == (0, True), err
    assert scores(published) == as_delta

    code, out, _ = run(published, "status", "--json")
    assert code == 0
    assert [row["snapshot"] for row in json.loads(out)["replicas"]] == ["shell-2", "shell-2"]
    code, out, _ = run(published, "ledger")
    rows = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
    assert rows["shell-1"][1:4] == ["delta", "shell-0", "all"]
    assert rows["shell-2"][1] == "full"
    assert rows["shell-2"][-1] == "desired"
    assert all(f"replica-{i}" in rows["shell-1"] for i in (0, 1))


def scores(server: Server) -> list[float]:
    body = {"model": "any", "prompt": list(range(20, 60)), "max_tokens": 0, "echo": True, "logprobs": True}
    (model,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    answer = httpx.post(f"{server.url}/v1/completions", json=body | {"model": model["id"]}, timeout=60)
    answer.raise_for_status()
    return [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]


def test_after_the_ledger_is_reset_the_publisher_goes_on_with_a_full_snapshot(
    published: Server, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = tiny_model(seed=32, dtype="bfloat16")
    with SnapshotPublisher(published.url, published.bucket.as_uri(), work_dir=tmp_path / "work") as publisher:
        assert publisher.publish("reset-0", checkpoint).kind == "full"
        assert publisher.publish("reset-1", checkpoint).kind == "delta"
        (name,) = [row["name"] for row in publisher.server.deployments.all()]
        httpx.delete(f"{published.url}/v1/{name}/ledger", timeout=60).raise_for_status()
        assert publisher.publish("reset-2", checkpoint).kind == "full"
        assert publisher.publish("reset-3", checkpoint).kind == "delta"
