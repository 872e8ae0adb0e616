"""CPU kernels: Llama-like decoders and plain sampling in a few C++ functions, compiled once per machine.

The surface towards engine/embedded and snapshots is what this module exports, and nothing else:
- `CpuDecoder` copies the weights of a Hugging Face module and runs batches over a paged KV cache of its own.
- `CpuSampler` draws tokens from unmodified logits and scores given tokens. `RowMasks` gets what it drew each one from.
- `mapped_module` builds the module of a snapshot over its files in memory, so that CpuDecoder packs from there.
- `Skeletons` keeps that module, without its weights, for the next snapshot of an equal configuration.
- `Spare` keeps the memory of a released model for the next one.
- `KernelsUnavailable` says why a model or a machine cannot use the kernels. The embedded engine then uses PyTorch.
- `asked_level` is the processor level that the environment asks for.
- `range_digests` computes SHA-256 of LANES ranges of a file at a time. The snapshots use it, too.
- `GROUP`: the block size of the KV cache must be a multiple of this.

Always holds: this package imports nothing else of midstream. What it takes from the engine has the forms of port.py. What needs
torch is imported when it is asked for: processes without torch use the digests.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from midstream_kernels.build import KernelsUnavailable, asked_level
from midstream_kernels.digests import LANES, range_digests

if TYPE_CHECKING:
    from midstream_kernels.checkpoint import Skeletons, mapped_module
    from midstream_kernels.decoder import GROUP, CpuDecoder, Pieces
    from midstream_kernels.memory import Spare
    from midstream_kernels.sampler import CpuSampler, RowMasks

_WITH_TORCH = {
    "checkpoint": ("Skeletons", "mapped_module"),
    "decoder": ("GROUP", "CpuDecoder", "Pieces"),
    "memory": ("Spare",),
    "sampler": ("CpuSampler", "RowMasks"),
}

__all__ = [
    "GROUP",
    "LANES",
    "CpuDecoder",
    "CpuSampler",
    "KernelsUnavailable",
    "Pieces",
    "RowMasks",
    "Skeletons",
    "Spare",
    "asked_level",
    "mapped_module",
    "range_digests",
]


def __getattr__(name: str) -> Any:
    for module, names in _WITH_TORCH.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
