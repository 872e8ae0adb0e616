"""A snapshot's tensors where its files lie in memory, put into the model's places: no byte is copied before it is packed.

Always holds: what is assembled has every parameter of the served model, of its shape and dtype, and no tensor of the files is
left over; whatever is not as simple as that is left to transformers (None). The files do not change while they are mapped:
they are in a directory of the replica's own, or in that of the base model, which nobody may write to while it is served.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from midstream.engine.embedded.attention import IMPLEMENTATION
from midstream.engine.embedded.fused import FAMILIES, Pieces
from midstream.engine.embedded.memory import PAGE, give_back
from midstream.snapshots.layout import read_file_layout, read_spec

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
ALIGNED = 4

#: A tensor of one expert in a checkpoint: its layer's experts, its number, which of its maps.
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
MAPS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class MappedCheckpoint:
    """tensors: None when a file holds what cannot be used where it lies. Raises SnapshotError, OSError."""

    def __init__(self, directory: Path) -> None:
        self._mappings: list[tuple[int, int]] = []
        self.tensors: dict[str, torch.Tensor] | None = {}
        for file in sorted({spec.file for spec in read_spec(directory).tensors.values()}):
            self._map(directory / file)

    def _map(self, path: Path) -> None:
        layout = read_file_layout(path)
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # private, and nobody writes
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._mappings.append((whole.data_ptr(), len(whole)))
        for name, spec in layout.tensors.items():
            begin, end = layout.ranges[name]
            dtype = DTYPES.get(spec.dtype)
            if dtype is None or begin % ALIGNED or begin == end:
                self.tensors = None
            if self.tensors is None:
                return
            assert dtype is not None
            self.tensors[name] = torch.frombuffer(
                memory, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin
            ).view(spec.shape)

    def close(self) -> None:
        """Its tensors must not be read any more."""
        self.tensors = None
        for address, size in self._mappings:
            give_back(address, -(-size // PAGE) * PAGE)
        self._mappings = []


def assembled(
    directory: Path, tensors: dict[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> tuple[Any, Pieces] | None:
    """The module of `directory` over `tensors`, and the pieces of those of its parameters that stay on the meta device.

    dtypes: what each parameter must have. None: this needs transformers' own loading.
    """
    config = AutoConfig.from_pretrained(directory)
    with torch.device(
        "meta"
    ):  # float32 is the default dtype already: no step on another thread sees a change
        module = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=IMPLEMENTATION
        )
    if type(module).__name__ not in FAMILIES or getattr(config, "quantization_config", None) is not None:
        return None
    module.model.rotary_emb = type(module.model.rotary_emb)(config=module.config)
    found = _by_parameter(tensors)
    places: dict[int, torch.nn.Parameter] = {}
    pieces: Pieces = {}
    for name, parameter in module.named_parameters():
        parts = found.pop(name, None)
        if parts is None or not _fit(parts, parameter, dtypes.get(name)):
            return None
        if len(parts) == 1 and parts[0].shape == parameter.shape:
            value = parts[0]
        else:
            pieces[name], value = parts, torch.empty_like(parameter, dtype=dtypes[name])
        places[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
    if found or any(buffer.is_meta for buffer in module.buffers()):
        return None
    for part in module.modules():  # a tied parameter has several places
        for leaf, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            part.register_parameter(leaf, places[id(parameter)])
    module.generation_config = None
    return module.eval(), pieces


def _by_parameter(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Tensors under the names of the module's parameters; those of experts as the parts of all experts' together."""
    found: dict[str, list[torch.Tensor]] = {}
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        match = EXPERT.fullmatch(name)
        if match is None:
            found[name] = [tensor]
        else:
            layer, number, kind = match[1], int(match[2]), match[3]
            experts.setdefault(layer, {}).setdefault(number, {})[MAPS.get(kind, kind)] = tensor
    for layer, by_number in experts.items():
        maps = [by_number[number] for number in sorted(by_number)]
        if sorted(by_number) == list(range(len(maps))) and all(len(m) == 3 for m in maps):
            found[f"{layer}.gate_up_proj"] = [m[kind] for m in maps for kind in ("gate_proj", "up_proj")]
            found[f"{layer}.down_proj"] = [m["down_proj"] for m in maps]
    return found


def _fit(parts: list[torch.Tensor], parameter: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """The parts have the parameter's dtype and, one below the other, its shape."""
    if any(part.dtype != dtype for part in parts):
        return False
    if len(parts) == 1 and parts[0].shape == parameter.shape:
        return True
    experts, rows, width = parameter.shape if parameter.ndim == 3 else (0, 0, 0)
    each = len(parts) // experts if experts and len(parts) % experts == 0 else 0
    return each > 0 and all(part.shape == (rows // each, width) for part in parts) and rows % each == 0
