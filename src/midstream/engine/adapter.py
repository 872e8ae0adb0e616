"""The numbers of a LoRA adapter, read from its verified files, in the form that every decoder takes.

Always holds: nothing is unpickled. What is read fits the base model (snapshots/adapter.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from midstream.core.errors import SnapshotIncompatible
from midstream.snapshots.adapter import ADAPTER_WEIGHTS_FILE, AdaptedMap, read_adapter
from midstream.snapshots.layout import read_spec
from midstream.snapshots.messages import shown


@dataclass(frozen=True)
class LowRank:
    """What is added to a linear map: `b @ a`. The scaling is in b.

    a: [rank, inputs], b: [outputs, rank], both in the model's dtype. Of a map that holds all experts: [experts, rank, inputs],
    [experts, outputs, rank]. Both are in memory of their own, not in the file.
    """

    a: torch.Tensor
    b: torch.Tensor


#: By the path of the module, as snapshots/adapter.py names it.
LowRanks = Mapping[str, LowRank]


def load_adapter(directory: Path, base_directory: Path, dtype: torch.dtype) -> LowRanks:
    """The adapter in `directory` of the model in `base_directory`. Raises SnapshotError."""
    base = read_spec(base_directory)
    spec = read_adapter(directory, base)
    tensors = load_file(directory / ADAPTER_WEIGHTS_FILE)
    for name, own in spec.copies.items():
        with safe_open(base_directory / base.tensors[own].file, "pt") as file:
            if not torch.equal(file.get_tensor(own).to(tensors[name].dtype), tensors[name]):
                raise SnapshotIncompatible(
                    f"tensor {shown(name)} is not the base model's: only LoRA is served"
                )
    return {module: _low_rank(found, tensors, dtype) for module, found in spec.maps.items()}


def _low_rank(found: AdaptedMap, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> LowRank:
    a, b = tensors[found.a], tensors[found.b]
    if found.experts:
        a = a.reshape(found.experts, found.rank, -1)
        # In PEFT's tensor the experts alternate within the rank.
        b = b.reshape(-1, found.rank, found.experts).permute(2, 0, 1)
    if found.turned:
        a, b = b.mT, a.mT
    b = b.float() * found.scaling
    # The tensors as read are mapped from the file, which may be the trainer's own (store/links.py): a later write would serve.
    return LowRank(a.to(dtype, copy=True).contiguous(), b.to(dtype, copy=True).contiguous())
