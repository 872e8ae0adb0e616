"""The module of a snapshot over its files where they lie in memory: no byte is copied before it is packed.

Always holds:
- The module has every parameter of the serving model, with its shape and dtype, and no tensor of the files is left over.
  `mapped_module` gives None for anything less simple, and transformers then reads the snapshot.
- What is read of the files does not change while they are mapped. They lie in a directory of the replica, or in that of the
  base model, which nobody may write to while it is served. Of files that are being made, a tensor is read when it is there.
- A skeleton holds no tensor of a snapshot once its `with` block is left. Nothing changes the module's
  configuration.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from midstream_kernels.decoder import FAMILIES, Pieces
from midstream_kernels.memory import PAGE, give_back
from midstream_kernels.port import WeightsFile

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
ALIGNED = 4

#: The name of one expert's tensor in a checkpoint: the experts of a layer, the expert's number, the linear map.
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
MAPS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

Tensors = dict[str, torch.Tensor]


class Skeleton:
    """The module of one configuration, without weights: its parameters are on the meta device, except while it is filled."""

    def __init__(self, config: Any) -> None:
        self.config = config
        # Building changes the configuration.
        self.settings = _settings(config)
        # Float32 is the default dtype already, so a step on another thread sees no change of it.
        with torch.device("meta"):
            self.module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
        self.module.generation_config = None
        self.module.eval()
        # A tied parameter has several places.
        self._places = [
            (part, leaf, parameter)
            for part in self.module.modules()
            for leaf, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def fill(self, values: Mapping[int, torch.nn.Parameter]) -> None:
        """values: by the id of the parameter on the meta device."""
        for part, leaf, parameter in self._places:
            part.register_parameter(leaf, values[id(parameter)])

    def empty(self) -> None:
        """Let go of what it was filled with."""
        self.fill({id(parameter): parameter for _, _, parameter in self._places})


class Skeletons:
    """Keeps the last skeleton: the next snapshot has the same configuration, as a rule, and building a module takes the
    interpreter lock from the steps. Use it on one thread at a time."""

    def __init__(self) -> None:
        self._kept: Skeleton | None = None

    def of(self, config: Any) -> Skeleton:
        kept = self._kept
        if kept is None or kept.settings != _settings(config):
            kept = self._kept = Skeleton(config)
        return kept


def _settings(config: Any) -> tuple[type, dict[str, Any]]:
    """All that a configuration says, except for where it was read."""
    settings = config.to_dict()
    settings.pop("_name_or_path", None)
    return type(config), settings


@contextlib.contextmanager
def mapped_module(
    directory: Path,
    files: Mapping[str, WeightsFile],
    dtypes: Mapping[str, torch.dtype],
    skeletons: Skeletons,
) -> Iterator[tuple[Any, Pieces] | None]:
    """The module of `directory` over its mapped files, and the pieces of the parameters that stay on the meta device.

    files: its weights files by name. dtypes: the dtype that each parameter must have. Nothing may read the module after the
    `with` block. Raises OSError.
    """
    mappings: list[tuple[int, int]] = []
    skeleton: Skeleton | None = None
    try:
        tensors = _mapped(directory, files, mappings)
        if tensors is None:
            yield None
        else:
            skeleton = skeletons.of(AutoConfig.from_pretrained(directory))
            yield _assembled(skeleton, tensors, dtypes)
    finally:
        if skeleton is not None:
            skeleton.empty()
        for address, size in mappings:
            give_back(address, -(-size // PAGE) * PAGE)


def _mapped(
    directory: Path, files: Mapping[str, WeightsFile], mappings: list[tuple[int, int]]
) -> Tensors | None:
    """The tensors of all files; None when one cannot be used where it lies. Adds address and size of each mapping."""
    tensors: Tensors = {}
    for name, layout in sorted(files.items()):
        with (directory / name).open("rb") as file:
            # The mapping is private, and nobody writes to it.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        mappings.append((whole.data_ptr(), len(whole)))
        for tensor, spec in layout.tensors.items():
            begin, end = layout.ranges[tensor]
            dtype = DTYPES.get(spec.dtype)
            if dtype is None or begin % ALIGNED or begin == end:
                return None
            count = (end - begin) // dtype.itemsize
            tensors[tensor] = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(
                spec.shape
            )
    return tensors


def _assembled(
    skeleton: Skeleton, tensors: Tensors, dtypes: Mapping[str, torch.dtype]
) -> tuple[Any, Pieces] | None:
    module = skeleton.module
    if (
        type(module).__name__ not in FAMILIES
        or getattr(skeleton.config, "quantization_config", None) is not None
    ):
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
    for name, _ in module.named_parameters(remove_duplicate=False):
        # What is left of these is a copy of a tied tensor. The replica has seen that it is equal.
        found.pop(name, None)
    if found or any(buffer.is_meta for buffer in module.buffers()):
        return None
    skeleton.fill(places)
    return module, pieces


def _by_parameter(tensors: Tensors) -> dict[str, list[torch.Tensor]]:
    """The tensors under the names of the module's parameters. Tensors of single experts become parts of one parameter."""
    found: dict[str, list[torch.Tensor]] = {}
    experts: dict[str, dict[int, Tensors]] = {}
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
    """Whether the parts have the parameter's dtype and, one below the other, its shape."""
    if any(part.dtype != dtype for part in parts):
        return False
    if len(parts) == 1 and parts[0].shape == parameter.shape:
        return True
    experts, rows, width = parameter.shape if parameter.ndim == 3 else (0, 0, 0)
    each = len(parts) // experts if experts and len(parts) % experts == 0 else 0
    return each > 0 and all(part.shape == (rows // each, width) for part in parts) and rows % each == 0
