"""A CUDA device without one: no operation of a step mixes devices, and what is asked of a machine that has none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import request, run
from families import FAMILIES, write_model
from pretended_cuda import DevicesMixed, OnDevice, PretendedCuda, placed
from tiers import few_fast
from torch.utils._python_dispatch import TorchDispatchMode

from midstream.core.config import EngineSettings
from midstream.core.errors import ConfigError
from midstream.engine.embedded import device, loading
from midstream.engine.embedded.core import EngineCore

SETTINGS = EngineSettings(max_batch_tokens=48, kv_cache_tokens=2048, device="cuda")
SAMPLINGS = [
    {"temperature": 0.0},
    {"top_p": 0.8, "top_k": 20, "min_p": 0.02},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1, "logit_bias": {5: 2.0}},
    {},
]


@pytest.mark.parametrize("family", few_fast(FAMILIES, "qwen3-moe", "gpt-oss"))
def test_no_step_and_no_hot_load_mixes_devices(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda _: False)
    monkeypatch.setattr(loading, "_placed", placed)
    # Transformers asks.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    first, second = (write_model(family, tmp_path / str(seed), seed) for seed in (0, 1))
    with PretendedCuda():
        core = EngineCore(first, SETTINGS)
        assert all(isinstance(tensor, OnDevice) for _, tensor in core.weights())
        asked = [
            request(f"r{i}", range(2 + i, 40 + 3 * i), seed=i, max_tokens=10, n=2, **sampling)
            for i, sampling in enumerate(SAMPLINGS)
        ]
        staged = core.stage(second)

        def swap(step: int) -> None:
            if step == 5:
                core.set_staged(staged)
                core.commit("second")

        got = run(core, asked, swap)
        assert core.snapshot == "second"
    assert {len(choice.tokens) for choice in got.values()} == {10}


def test_the_pretended_device_refuses_what_a_device_refuses() -> None:
    with PretendedCuda():
        there, here = torch.zeros(2, device="cuda"), torch.zeros(2)
        assert there.device.type == "cuda"
        with pytest.raises(DevicesMixed, match=r"^add: "):
            there.add(here)
        with pytest.raises(DevicesMixed, match=r"^numpy of a tensor that is on cuda:0$"):
            there.numpy()
        assert there.cpu().numpy().tolist() == (there + here.to("cuda") + 0.0).tolist() == [0.0, 0.0]


def test_a_device_that_this_pytorch_does_not_have_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"^embedded\.device cuda:1: PyTorch \S+ is built without CUDA$"):
        EngineCore(tmp_path / "nothing", EngineSettings(device="cuda:1"))
    with pytest.raises(ConfigError, match=r"^embedded\.device 'gpu': expected cpu or cuda, "):
        EngineCore(tmp_path / "nothing", EngineSettings(device="gpu"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"^embedded\.device cuda: PyTorch \S+ sees no CUDA device$"):
        EngineCore(tmp_path / "nothing", EngineSettings(device="cuda"))


def test_on_a_device_no_step_builds_a_plan_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Almost every step of an engine has a shape that was never seen. The flag is PyTorch's own."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        device.use_device("cpu")
        assert torch.backends.cuda.cudnn_sdp_enabled()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        device.use_device("cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class Placed(TorchDispatchMode):
    """Notes the dtype of every matrix that is copied to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.is_meta and result.ndim > 1:
            self.dtypes.append(result.dtype)
        return result


def test_a_snapshot_is_never_on_the_device_in_float32(tmp_path: Path) -> None:
    """It is read in float32. In that, it would take twice its room beside the serving model. The device here is `meta`."""
    directory = write_model("qwen2", tmp_path)
    settings = EngineSettings(dtype="bfloat16", kernels="torch", kv_cache_tokens=512)
    serving = EngineCore(directory, settings).runner.model
    with Placed() as seen:
        loading._read_beside(serving, directory, EngineSettings(device="meta"))
    matrices = [name for name, (shape, _) in serving.shapes.items() if len(shape) > 1]
    assert seen.dtypes == [torch.bfloat16] * len(matrices)
