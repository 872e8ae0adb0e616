"""Runs scripts in the venv of the real Fireworks client, makes checkpoints and deltas, and scores tokens with Hugging Face."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import Server
from transformers import AutoModelForCausalLM

from midstream.client.decode import decode_routing_matrix
from midstream.client.replay import RouterTap

API_KEY = "fw-key-of-acme"
VENV = Path(__file__).parents[2] / ".venv-fireworks"
SCRIPTS = Path(__file__).parent / "client"
WEIGHTS = "model.safetensors"
# Experts per token of the built-in model.
TOP_K = 2


@dataclass
class Endpoint:
    """A running server and what the client is told of it."""

    server: Server

    @property
    def bucket(self) -> Path:
        return self.server.bucket

    def run(
        self, script: str, *, timeout_s: float = 350, env: dict[str, str] | None = None, **arguments: Any
    ) -> Any:
        """What `client/SCRIPT.py` prints as JSON, run by the Python that has the real client."""
        told = {
            "url": self.server.url,
            "api_key": API_KEY,
            "model": self.server.model,
            "deployment": self.server.deployment.rpartition("/")[2],
            **arguments,
        }
        return run_script(script, told, timeout_s, env or {})


def run_script(script: str, arguments: dict[str, Any], timeout_s: float, env: dict[str, str]) -> Any:
    python = VENV / "bin" / "python"
    if not (VENV / ".installed").exists():
        pytest.fail(
            "the real Fireworks client is not installed in .venv-fireworks: run `make setup-fireworks`"
        )
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("FIREWORKS", "PYTHON"))
    }
    done = subprocess.run(
        [python, SCRIPTS / f"{script}.py"],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=inherited | env,
    )
    assert done.returncode == 0, f"{script} failed:\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


def nudged(parent: Path, out: Path, seed: int) -> Path:
    """A copy of a checkpoint with 2 % of each tensor's values changed a little, as a training step does."""
    shutil.copytree(parent, out)
    generator = torch.Generator().manual_seed(seed)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        for tensor in tensors.values():
            changed = torch.rand(tensor.shape, generator=generator) < 0.02
            tensor[changed] = (tensor[changed] * 1.5 + 0.01).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return out


def sharded(whole: Path, out: Path, shards: int) -> Path:
    """A copy of a one-file checkpoint in `shards` files with an index."""
    shutil.copytree(whole, out)
    tensors = load_file(out / WEIGHTS)
    (out / WEIGHTS).unlink()
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({t: tensors[t] for t in tensors if weight_map[t] == name}, out / name, {"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def reference_delta(parent: Path, child: Path, out: Path, compression: str) -> Path:
    """The delta that Fireworks' own package makes of two checkpoints."""
    program = [sys.executable, "-m", "fireworks_delta_compression.compression", "delta_compress_dirs"]
    subprocess.run(
        [*program, str(parent), str(child), str(out), compression],
        env={**os.environ, "PYTHONPATH": str(VENV / "reference")},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return out


def score(
    checkpoint: Path, tokens: list[int], routes: np.ndarray | None = None
) -> tuple[list[float], np.ndarray]:
    """(log-probability of each token after the first, routes [tokens - 1, moe_layers, top_k]) by a plain forward.

    routes: replayed when given, since over thousands of tokens some router comes within a rounding of a tie.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tap = RouterTap(model)
    forced = None if routes is None else torch.from_numpy(routes.astype(np.int64))
    with torch.no_grad(), tap.forcing(forced):
        logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return logprobs.tolist(), tap.taken.numpy()


def assert_served(sample: dict[str, Any], checkpoint: Path) -> None:
    """`sample`, a completion with echo and routes, is what `checkpoint` computes."""
    tokens = sample["full_tokens"]
    logprobs, routes = score(checkpoint, tokens)
    assert sample["inference_logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert np.array_equal(np.sort(routes_of(sample)), np.sort(routes))


def routes_of(sample: dict[str, Any]) -> np.ndarray:
    """[positions, moe_layers, top_k]"""
    return np.stack([decode_routing_matrix(matrix, top_k=TOP_K) for matrix in sample["routing_matrices"]])
