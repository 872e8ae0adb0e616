"""Running an EngineCore to the end, and what a plain Hugging Face forward says about the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from midstream.core.types import GenerateRequest, SamplingParams, TokenRecord
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.offload import CopyPrice, Offload
from midstream_kernels import KernelsUnavailable
from midstream_kernels.build import kernels as native_kernels

#: For parameters that need a CUDA device.
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = ("cpu", pytest.param("cuda", marks=GPU))


def needs_compiler(kernels: str) -> None:
    """Skip what needs the native kernels on a machine that cannot build them."""
    if kernels == "native":
        try:
            native_kernels("f32")
        except KernelsUnavailable as error:
            pytest.skip(str(error))


class EqualPrice(CopyPrice):
    """Copying is as dear as computing, however long it takes on this machine."""

    def copied(self, tokens: int, seconds: float) -> None:
        pass


def offload_of(core: EngineCore) -> Offload:
    """The second tier of its cache, which does not depend on times from now on."""
    offload = core.pool.offload
    assert offload is not None
    offload.price = EqualPrice()
    return offload


@dataclass
class Collected:
    tokens: list[TokenRecord] = field(default_factory=list)
    prompt: list[TokenRecord] = field(default_factory=list)
    cached: int | None = None
    # As told last.
    kv: list[tuple[str, int, int]] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None


def request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    seed: int = 0,
    echo: int | None = None,
    n: int = 1,
    salt: bytes = b"",
    **sampling: Any,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed, **sampling),
        n=n,
        salt=salt,
        want_routes=True,
        want_masks=True,
        prompt_records=len(prompt) if echo is None else echo,
    )


def run(
    core: EngineCore,
    requests: Sequence[GenerateRequest],
    after_step: Callable[[int], None] = lambda step: None,
) -> dict[tuple[str, int], Collected]:
    """Drive the core until it is idle; the block books must balance at the end."""
    results = {(r.request_id, i): Collected() for r in requests for i in range(r.n)}
    for r in requests:
        _collect(results, core.add(r))
    step = 0
    while not core.idle:
        _collect(results, core.step())
        step += 1
        after_step(step)
        assert step < 10_000, f"no end in sight: {core.scheduler!r}"
    core.check()
    return results


def _collect(results: dict[tuple[str, int], Collected], outputs: Any) -> None:
    for request_id, event in outputs:
        got = results[request_id, event.index]
        assert got.finish is None, "an event after the last one"
        got.tokens.extend(event.tokens)
        if event.prompt is not None:
            assert not got.prompt, "prompt records came twice"
            got.prompt.extend(event.prompt)
        got.cached = event.cached_tokens if event.cached_tokens is not None else got.cached
        got.kv = list(event.kv_snapshots or got.kv)
        got.finish, got.error = event.finish, event.error


@dataclass(frozen=True)
class Reference:
    """A plain transformers forward in float32, and the experts each router chose."""

    model: Any

    def __call__(self, tokens: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
        """log-probabilities [tokens, vocab] and routes [tokens, moe_layers, top_k]."""
        captured: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(lambda m, i, output: captured.append(output[2]))
            for module in self.model.modules()
            if type(module).__name__.endswith("TopKRouter")
        ]
        try:
            with torch.no_grad():
                logits = self.model(torch.tensor([list(tokens)])).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        routes = torch.stack(captured, dim=1).numpy().astype(np.uint8)
        return logits.float().log_softmax(-1), routes


def reference(directory: Path) -> Reference:
    return Reference(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())
