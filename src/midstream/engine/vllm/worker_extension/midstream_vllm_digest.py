"""A digest of the weights that a worker of vLLM computes with, made piece by piece between steps.

What a layer on a CPU computes with may be packed for its kernel, where no parameter has it. Such a layer is asked for its
weights: with inputs of a single 1, its own kernel gives them, one after the other. So their digest does not depend on how they
are packed. Experts that are packed are parameters, and are digested as they lie. `kind` says by what they were packed.

Always holds: weights are read between steps alone, as a kernel may not be called twice at a time. Nothing is changed. A
digest finds accidents, not forgeries.
"""

from __future__ import annotations

import hashlib
import importlib
import platform
import time
from collections.abc import Iterator
from typing import Any

import torch

#: Words that one checksum is of. Their factors are odd, so that every change of a single word is seen, and differ, so that
#: words that change places are seen.
CHUNK = 1 << 16
FACTOR = 2 * 2654435761 % 2**32
#: Words of a piece, after which the time is looked at, and multiplications of one for a packed layer.
PIECE, PRODUCTS = 64 * CHUNK, 1 << 30
ROWS_MIN, ROWS_MAX = 16, 256
#: What decides how a CPU's kernels pack weights.
CPU_FLAGS = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")


class WeightsDigest:
    """model: whose weights it reads, as they are when each piece is read."""

    def __init__(self, model: Any) -> None:
        self._whole = hashlib.blake2b(digest_size=16)
        self._kind = hashlib.blake2b(digest_size=8)
        self._bytes = 0
        self._pieces = self._all(model)
        self._on_cpu = False

    @torch.inference_mode()
    def go_on(self, seconds: float) -> dict[str, Any] | None:
        """Read for about so long. What the weights are once all are read, and None before."""
        end = time.monotonic() + seconds
        for piece in self._pieces:
            self._add(piece)
            if time.monotonic() >= end:
                return None
        return {"kind": self._kind_of_all(), "digest": self._whole.hexdigest(), "bytes": self._bytes}

    def _all(self, model: Any) -> Iterator[torch.Tensor]:
        # A layer for adapters says that it has whatever the one has that it is wrapped around.
        packed = {
            name: layer
            for name, layer in model.named_modules()
            if hasattr(layer, "cpu_linear") and "base_layer" not in layer._modules
        }
        for name, layer in sorted(packed.items()):
            yield from self._of_packed(name, layer)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, tensor in sorted(tensors.items()):
            self._name(name, tensor.dtype, tuple(tensor.shape))
            self._on_cpu |= tensor.device.type == "cpu"
            words = _words(tensor.detach())
            yield from (words[at : at + PIECE] for at in range(0, len(words), PIECE))

    def _of_packed(self, name: str, layer: Any) -> Iterator[torch.Tensor]:
        self._on_cpu = True
        weight, outputs, inputs = layer.weight, _size(layer, "output"), _size(layer, "input")
        self._name(name, weight.dtype, outputs, inputs)
        # Of all calls. For each number of rows the kernel is prepared again.
        rows = max(ROWS_MIN, min(ROWS_MAX, PRODUCTS // (inputs * outputs)))
        for first in range(0, inputs, rows):
            count = min(rows, inputs - first)
            ones = torch.zeros(rows, inputs, dtype=weight.dtype)
            ones[torch.arange(count), torch.arange(first, first + count)] = 1.0
            found = layer.cpu_linear(ones, weight, None)[:count]
            # Kernels differ in the sign of a zero, and in whether they know numbers below the normal ones.
            yield _words(found.masked_fill(found.abs() < torch.finfo(found.dtype).tiny, 0.0))

    def _name(self, *parts: object) -> None:
        said = " ".join(map(str, parts)).encode() + b"\n"
        self._whole.update(said)
        self._kind.update(said)

    def _add(self, words: torch.Tensor) -> None:
        self._bytes += 4 * len(words)
        end = len(words) // CHUNK * CHUNK
        for part in (words[:end].view(-1, CHUNK), words[end:].view(1, -1)):
            factors = (torch.arange(part.shape[1], device=part.device) * FACTOR | 1).to(torch.int32)
            sums = (part * factors).sum(-1, dtype=torch.int64)
            self._whole.update(sums.cpu().numpy().astype("<i8").tobytes())

    def _kind_of_all(self) -> str:
        kind = self._kind.copy()
        versions = [importlib.import_module("vllm").__version__, torch.__version__]
        if self._on_cpu:
            versions += [platform.machine(), torch.backends.cpu.get_cpu_capability()]
            versions += [str(getattr(torch.cpu, flag, bool)()) for flag in CPU_FLAGS]
        kind.update("\n".join(versions).encode())
        return f"vllm-{kind.hexdigest()}"


def _size(layer: Any, side: str) -> int:
    """Inputs or outputs of a linear layer on this rank. Where each rank has all, there is no size per partition."""
    if layer.weight.dim() == 2:
        return int(layer.weight.shape[side == "input"])
    size = getattr(layer, f"{side}_size_per_partition", None) or getattr(layer, f"{side}_size")
    return int(size)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as words of 32 bits, filled up with zeros."""
    data = tensor.reshape(-1).contiguous().view(torch.uint8)
    if len(data) % 4 or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (0, -len(data) % 4)).clone()
    return data.view(torch.int32)
