"""Writes weights as safetensors files: numpy arrays and torch tensors, without importing torch.

Always holds: names, shapes and values on disk are the caller's, after the cast. The caller's tensors are never changed. Weights
are on disk before the index that names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from midstream.snapshots.layout import file_header

Cast = Literal["bfloat16", "float32"]
MAX_SHARD_BYTES = 5 * 10**9

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16",
    "bfloat16": "BF16", "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_ITEM_BYTES = dict.fromkeys(("U64", "I64", "F64"), 8) | dict.fromkeys(("U32", "I32", "F32"), 4)
_ITEM_BYTES |= dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
_CAST_TO = {"bfloat16": "BF16", "float32": "F32"}
_FLOATING = ("F64", "F32", "F16", "BF16")
_TORCH_NAMES = {code: name for name, code in _NAMES.items()}
#: Where a model that torch.compile wrapped has the model itself. Its own state dict has other names.
COMPILED = "_orig_mod"


class SnapshotTensor:
    """One tensor of a snapshot. Its layout is known at once, its bytes are made when they are needed."""

    def __init__(self, name: str, value: Any, cast: Cast | None) -> None:
        self.name, self._value = name, value
        self.shape = tuple(int(n) for n in value.shape)
        own = _NAMES.get(getattr(value.dtype, "name", str(value.dtype).removeprefix("torch.")))
        if own is None:
            raise ValueError(f"tensor {name} has dtype {value.dtype}, which a snapshot cannot hold")
        self._cast = cast if own in _FLOATING and cast and _CAST_TO[cast] != own else None
        self.dtype = _CAST_TO[self._cast] if self._cast else own
        self.size = int(np.prod(self.shape, dtype=np.int64)) * _ITEM_BYTES.get(self.dtype, 1)

    @property
    def dtype_name(self) -> str:
        """The dtype, as torch names it."""
        return _TORCH_NAMES[self.dtype]

    @property
    def of_torch(self) -> bool:
        return hasattr(self._value, "detach")

    def over(self, raw: Any) -> Any:
        """These bytes as a torch tensor of this dtype and shape. raw: as `flat` gives them, aligned to the dtype."""
        import torch

        return raw.view(getattr(torch, self.dtype_name)).view(self.shape)

    def data(self) -> memoryview:
        raw = self.flat().cpu().numpy() if self.of_torch else self._numpy_bytes()
        if raw.nbytes != self.size:
            raise ValueError(f"tensor {self.name} has {raw.nbytes} bytes, {self.size} expected")
        result: memoryview = raw.data
        return result

    def flat(self) -> Any:
        """The bytes as a torch tensor of uint8 with one dimension, where the tensor is: the caller's own memory if that is
        contiguous and not cast."""
        import torch

        if not self.of_torch:
            raw = self._numpy_bytes()
            return torch.from_numpy(raw if raw.flags.writeable else raw.copy())
        tensor = self._value.detach()
        if self._cast:
            tensor = tensor.to(getattr(torch, self._cast))
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    def copy_to(self, place: Any) -> None:
        """Copy the bytes to `place`, a torch tensor of uint8 with as many. One pass casts, gathers and copies, where `place` is
        aligned to the dtype."""
        aligned = place.storage_offset() % _ITEM_BYTES.get(self.dtype, 1) == 0
        if self.size and aligned and self.of_torch:
            self.over(place).copy_(self._value.detach())
        else:
            place.copy_(self.flat())

    def _numpy_bytes(self) -> npt.NDArray[np.uint8]:
        array = np.ascontiguousarray(self._value).reshape(-1)
        if self._cast == "bfloat16":
            array = to_bfloat16_bits(array.astype(np.float32))
        elif self._cast == "float32":
            array = array.astype(np.float32)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        return array.view(np.uint8)


class TensorCopy:
    """Copies of tensors in memory, one set at a time. The memory stays for the next one: what was used before is faster."""

    def __init__(self) -> None:
        self._buffer: Any = None

    def take(self, tensors: Sequence[SnapshotTensor]) -> Any:
        """The bytes of all, one after the other, as a torch tensor of uint8. The copy before is over."""
        size = sum(tensor.size for tensor in tensors)
        if self._buffer is None or self._buffer.numel() != size:
            import torch

            self._buffer = None
            self._buffer = torch.empty(size, dtype=torch.uint8)
        at = 0
        for tensor in tensors:
            tensor.copy_to(self._buffer[at : at + tensor.size])
            at += tensor.size
        return self._buffer

    def forget(self) -> None:
        self._buffer = None


def to_bfloat16_bits(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of `array` in bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = array.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(array), quiet, rounded)


def write_weights(
    directory: Path,
    tensors: Mapping[str, Any],
    cast: Cast | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `tensors` as model.safetensors, or as shards and then their index when they need several files."""
    shards = list(
        _shards([SnapshotTensor(name, tensors[name], cast) for name in sorted(tensors)], max_shard_bytes)
    )
    if len(shards) == 1:
        _write_file(directory / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / file, shard)
        weight_map |= {tensor.name: file for tensor in shard}
    total = sum(tensor.size for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(tensors: list[SnapshotTensor], max_bytes: int) -> Iterator[list[SnapshotTensor]]:
    shard: list[SnapshotTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.size > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.size
    yield shard


def wide_first(tensors: Sequence[SnapshotTensor]) -> list[SnapshotTensor]:
    """Wide elements first, so that every tensor is aligned to its own element size, one after the other."""
    return sorted(tensors, key=lambda t: (-_ITEM_BYTES.get(t.dtype, 1), t.name))


def _write_file(path: Path, tensors: list[SnapshotTensor]) -> None:
    tensors = wide_first(tensors)
    header = file_header(((t.name, t.dtype, t.shape, t.size) for t in tensors), {"format": "pt"})
    with path.open("xb") as file:
        file.write(header)
        for tensor in tensors:
            file.write(tensor.data())
