"""The trainer on a device: its steps are those of the CPU, and its checkpoints and weights leave it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from families import write_model
from trainer_helpers import base_of, logprobs, new_model, request, text

from midstream.core.config import EngineSettings
from midstream.engine.embedded.core import EngineCore
from midstream_tinker.trainer.checkpoints import export_weights, load_state, save_state
from midstream_tinker.trainer.types import AdamParams, LoraConfig

DATA = [
    text("A rollout of some bytes", weights=1.0),
    text("and a longer one, of another length", weights=0.5),
]


@pytest.mark.parametrize("rank", [0, 8])
def test_steps_on_the_device_are_those_of_the_cpu(device: str, rank: int, tmp_path: Path) -> None:
    directory = write_model("qwen3-moe", tmp_path)
    lora = LoraConfig(rank=rank, seed=3)
    reference = new_model(base_of(directory, dtype="float32"), lora)
    ours = new_model(base_of(directory, dtype="float32", device=device), lora)
    save_state(reference, tmp_path / "start", optimizer=False)
    load_state(ours, tmp_path / "start", optimizer=False)
    for _ in range(3):
        for model in (reference, ours):
            assert {parameter.device.type for parameter in model.trainable.values()} == {
                model.base.device.type
            }
        here, there = (model.forward_backward(request(DATA)) for model in (ours, reference))
        for got, expected in zip(logprobs(here), logprobs(there), strict=True):
            assert got == pytest.approx(expected, abs=2e-3)
        steps = [model.optim_step(AdamParams(learning_rate=1e-4)) for model in (ours, reference)]
        assert steps[0]["grad_norm:mean"] == pytest.approx(steps[1]["grad_norm:mean"], rel=1e-2)
    save_state(ours, tmp_path / "saved", optimizer=True)
    again = new_model(base_of(directory, dtype="float32", device=device), lora)
    load_state(again, tmp_path / "saved", optimizer=True)
    for model in (ours, again):
        model.forward_backward(request(DATA))
        model.optim_step(AdamParams(learning_rate=1e-4))
    for name, parameter in ours.trainable.items():
        assert torch.allclose(parameter, again.trainable[name], atol=1e-6), name
    export_weights(ours, tmp_path / "served")
    core = EngineCore(tmp_path / "served", EngineSettings(device=device, kv_cache_tokens=1024))
    assert np.isfinite([float(tensor.float().sum()) for _, tensor in core.weights()]).all()
