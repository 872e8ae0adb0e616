"""What a snapshot directory holds, read from file headers alone: no tensor data, no torch.

Always holds: a CheckpointSpec describes a directory whose safetensors files are whole (exact size, every byte
of data owned by one tensor) and agree with the index. A truncated or padded file never gets one. All text in
it is valid Unicode.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.snapshots.messages import listed, shown, shown_value

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 10**6  # the format's own limit
MAX_JSON_BYTES = 100 * 10**6
MAX_NAME_CHARS = 255
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class TensorSpec:
    dtype: str  # the name safetensors gives it: "BF16", "F32", ...
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class FileLayout:
    """One safetensors file: its tensors, where in the file each one's bytes lie (begin, end), and its metadata."""

    tensors: dict[str, TensorSpec]
    ranges: dict[str, tuple[int, int]]
    metadata: dict[str, Any]
    data_start: int  # bytes before the tensors' data

    def __repr__(self) -> str:
        return f"<FileLayout tensors={len(self.tensors)}>"


@dataclass(frozen=True)
class CheckpointSpec:
    tensors: dict[str, TensorSpec]
    config: dict[str, Any]

    def __repr__(self) -> str:
        files = {tensor.file for tensor in self.tensors.values()}
        return f"<CheckpointSpec tensors={len(self.tensors)} files={len(files)}>"


def read_spec(directory: Path) -> CheckpointSpec:
    """The tensors and configuration of `directory`.

    The weights are `model.safetensors`, or the shards `model.safetensors.index.json` names. Raises
    SnapshotMissing when a file is not there, SnapshotCorrupt when one is not whole or the files disagree;
    both name the file.
    """
    config = _read_json(directory, CONFIG_FILE)
    present = {p.name for p in directory.glob("model*.safetensors")}
    if (directory / INDEX_FILE).exists():
        return CheckpointSpec(_read_shards(directory, present), config)
    if WEIGHTS_FILE not in present:
        raise SnapshotMissing(f"{shown(directory.name)}: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there")
    if len(present) > 1:
        extra = listed(sorted(present - {WEIGHTS_FILE}))
        raise SnapshotCorrupt(f"{extra}: beside {WEIGHTS_FILE}, with no {INDEX_FILE} to say which counts")
    return CheckpointSpec(read_safetensors_header(directory / WEIGHTS_FILE), config)


def _read_shards(directory: Path, present: set[str]) -> dict[str, TensorSpec]:
    weight_map = _read_json(directory, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SnapshotCorrupt(f"{INDEX_FILE}: has no weight_map")
    for name, shard in weight_map.items():
        if not _is_shard_name(shard):
            raise SnapshotCorrupt(
                f"{INDEX_FILE}: {shown(name)} is mapped to {shown_value(shard)}, which is not a shard's name"
            )
    shards = set(weight_map.values())
    if unnamed := sorted(present - shards):
        raise SnapshotCorrupt(f"{shown(unnamed[0])}: is not named by {INDEX_FILE}")
    tensors: dict[str, TensorSpec] = {}
    for shard in sorted(shards):
        for name, spec in read_safetensors_header(directory / shard).items():
            if weight_map.get(name) != shard:
                raise SnapshotCorrupt(
                    f"{shown(shard)}: holds {shown(name)}, which {INDEX_FILE} does not place there"
                )
            tensors[name] = spec
    if absent := sorted(weight_map.keys() - tensors.keys()):
        shard, name = shown(weight_map[absent[0]]), shown(absent[0])
        raise SnapshotCorrupt(f"{shard}: lacks {name}, which {INDEX_FILE} places there")
    return tensors


def _is_shard_name(name: Any) -> bool:
    if not isinstance(name, str) or not name.endswith(".safetensors") or len(name) > MAX_NAME_CHARS:
        return False
    return Path(name).name == name and name.isprintable()


def read_safetensors_header(path: Path) -> dict[str, TensorSpec]:
    """The tensors of one safetensors file, whose layout and size are checked to the byte."""
    return read_file_layout(path).tensors


def read_file_layout(path: Path, gaps: bool = False) -> FileLayout:
    """The layout of one safetensors file, checked to the byte. Raises SnapshotMissing, SnapshotCorrupt, SnapshotError.

    gaps: bytes that belong to no tensor are let pass, so that a caller who knows which tensor is missing can say so.
    """
    name = shown(path.name)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise SnapshotCorrupt(f"{name}: truncated: {size} bytes do not hold its header")
            if length > MAX_HEADER_BYTES:
                raise SnapshotCorrupt(f"{name}: a header of {length} bytes is over the format's limit")
            header = _parse_object(name, file.read(length))
    except FileNotFoundError as error:
        raise SnapshotMissing(f"{name}: is not there") from error
    except OSError as error:
        raise SnapshotError(f"{name}: cannot be read: {error.strerror}") from error
    metadata = header.pop("__metadata__", None)
    start = 8 + length
    ranges: list[tuple[int, int, str]] = []
    result = FileLayout({}, {}, metadata if isinstance(metadata, dict) else {}, start)
    for tensor, entry in header.items():
        spec, begin, end = _tensor_entry(path.name, shown(tensor), entry)
        result.tensors[tensor] = spec
        result.ranges[tensor] = (start + begin, start + end)
        ranges.append((begin, end, shown(tensor)))
    _check_ranges(name, sorted(ranges), size - start, gaps)
    return result


def _tensor_entry(path_name: str, tensor: str, entry: Any) -> tuple[TensorSpec, int, int]:
    file = shown(path_name)
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise SnapshotCorrupt(f"{file}: {tensor} has no dtype, shape and data_offsets")
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise SnapshotCorrupt(f"{file}: {tensor} has a size or offset that is not a whole number of 63 bits")
    if dtype not in DTYPE_BITS:
        raise SnapshotCorrupt(f"{file}: {tensor} has the unknown dtype {shown_value(dtype)}")
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    if bits != 8 * (end - begin):
        raise SnapshotCorrupt(
            f"{file}: {tensor} {dtype}{shown_value(shape)} does not fill its {end - begin} bytes"
        )
    return TensorSpec(dtype, tuple(shape), path_name), begin, end


def _check_ranges(file: str, ranges: list[tuple[int, int, str]], data_bytes: int, gaps: bool) -> None:
    position = 0
    for begin, end, tensor in ranges:
        if begin < position or (begin > position and not gaps):
            raise SnapshotCorrupt(f"{file}: {tensor} starts at byte {begin} of the data, not at {position}")
        position = end
    if position > data_bytes:
        raise SnapshotCorrupt(f"{file}: truncated: {data_bytes} bytes of data, {position} expected")
    if position < data_bytes and not gaps:
        raise SnapshotCorrupt(f"{file}: {data_bytes - position} bytes after the last tensor")


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise SnapshotCorrupt(f"{name}: is larger than {MAX_JSON_BYTES} bytes")
        return _parse_object(name, path.read_bytes())
    except FileNotFoundError as error:
        raise SnapshotMissing(f"{name}: is not there") from error


def _parse_object(name: str, data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise SnapshotCorrupt(f"{name}: names a key twice")
        return result

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
        if _SURROGATE_ESCAPE.search(data):  # escapes are the only way to half a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise SnapshotCorrupt(f"{name}: has text that is not valid Unicode") from error
    except (ValueError, RecursionError) as error:
        raise SnapshotCorrupt(f"{name}: is not valid JSON: {shown(str(error))}") from error
    if not isinstance(value, dict):
        raise SnapshotCorrupt(f"{name}: is not a JSON object")
    return value
