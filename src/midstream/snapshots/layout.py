"""The layout of a snapshot directory, read from the headers of its files: no tensor data, no torch.

Always holds: a CheckpointSpec describes a directory with complete safetensors files that agree with the index. Each file has
its exact size, and each byte of data belongs to one tensor. All text in a spec is valid Unicode.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midstream.core.errors import SnapshotCorrupt, SnapshotError, SnapshotMissing
from midstream.snapshots.messages import listed, shown, shown_value

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = ("*.safetensors", INDEX_FILE)
#: What makes weights a checkpoint.
COMPANION_FILES = (
    "tokenizer*.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    CONFIG_FILE,
    "adapter_config.json",
)
#: Says what is in a delta of SkyRL (trainer_deltas/records.py).
SKYRL_MANIFEST = "manifest.json"
_NOT_SKYRL = (CONFIG_FILE, "adapter_config.json", INDEX_FILE)
SNAPSHOT_FILES = (*WEIGHT_FILES, *COMPANION_FILES, SKYRL_MANIFEST)
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
#: The limit of the safetensors format.
MAX_HEADER_BYTES = 100 * 10**6
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


def is_snapshot_file(name: str) -> bool:
    """Whether a file of this name belongs to a snapshot and may be fetched: a plain name, and never a pickle."""
    plain = not any(char in name for char in "/\\\0") and not name.startswith(".")
    known = any(fnmatch.fnmatchcase(name, pattern) for pattern in SNAPSHOT_FILES)
    return plain and known and not name.endswith(PICKLED)


def snapshot_files(names: Iterable[str]) -> frozenset[str]:
    """Which of all names in a directory are its snapshot's files.

    SkyRL writes its deltas without configuration and index. Beside those, a `manifest.json` is another program's file.
    """
    found = frozenset(name for name in names if is_snapshot_file(name))
    return found if found.isdisjoint(_NOT_SKYRL) else found - {SKYRL_MANIFEST}


@dataclass(frozen=True)
class TensorSpec:
    """dtype: as safetensors names it: "BF16", "F32", ... file: its name."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class FileLayout:
    """One safetensors file. ranges: where in the file each tensor's bytes lie, (begin, end). data_start: where data begins."""

    tensors: dict[str, TensorSpec]
    ranges: dict[str, tuple[int, int]]
    metadata: dict[str, Any]
    data_start: int

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
    """The tensors and the configuration of the checkpoint `directory`; errors as read_checkpoint's."""
    return read_checkpoint(directory)[0]


def read_checkpoint(directory: Path) -> tuple[CheckpointSpec, dict[str, FileLayout]]:
    """The spec of the checkpoint `directory`, and the layout of each of its weights files by name.

    The weights are `model.safetensors`, or the shards that `model.safetensors.index.json` names. Each header is parsed once. No
    metadata is kept: it counts only in a delta, and may be as large as the format allows.
    Raises SnapshotMissing when a file is not there, SnapshotCorrupt when one is not whole or the files disagree, SnapshotError
    when one cannot be read. The message names the file.
    """
    config = read_json(directory, CONFIG_FILE)
    present = {p.name for p in directory.glob("model*.safetensors")}
    if (directory / INDEX_FILE).exists():
        files = _read_shards(directory, present)
    elif WEIGHTS_FILE not in present:
        raise SnapshotMissing(f"{shown(directory.name)}: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there")
    elif len(present) > 1:
        extra = listed(sorted(present - {WEIGHTS_FILE}))
        raise SnapshotCorrupt(f"{extra}: beside {WEIGHTS_FILE}, with no {INDEX_FILE} to say which counts")
    else:
        files = {WEIGHTS_FILE: _without_metadata(directory / WEIGHTS_FILE)}
    tensors = {name: spec for layout in files.values() for name, spec in layout.tensors.items()}
    return CheckpointSpec(tensors, config), files


def _read_shards(directory: Path, present: set[str]) -> dict[str, FileLayout]:
    weight_map = read_weight_map(directory)
    shards = set(weight_map.values())
    if unnamed := sorted(present - shards):
        raise SnapshotCorrupt(f"{shown(unnamed[0])}: is not named by {INDEX_FILE}")
    files = {}
    for shard in sorted(shards):
        files[shard] = _without_metadata(directory / shard)
        for name in files[shard].tensors:
            if weight_map.get(name) != shard:
                raise SnapshotCorrupt(
                    f"{shown(shard)}: holds {shown(name)}, which {INDEX_FILE} does not place there"
                )
    if absent := sorted(name for name, shard in weight_map.items() if name not in files[shard].tensors):
        shard, name = shown(weight_map[absent[0]]), shown(absent[0])
        raise SnapshotCorrupt(f"{shard}: lacks {name}, which {INDEX_FILE} places there")
    return files


def _without_metadata(path: Path) -> FileLayout:
    return dataclasses.replace(read_file_layout(path), metadata={})


def read_weight_map(directory: Path) -> dict[str, str]:
    """The file of each tensor, as the index of `directory` says: plain names of safetensors files, at least one.

    Raises SnapshotMissing, SnapshotCorrupt, SnapshotError.
    """
    weight_map = read_json(directory, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SnapshotCorrupt(f"{INDEX_FILE}: has no weight_map")
    for name, shard in weight_map.items():
        if not is_shard_name(shard):
            raise SnapshotCorrupt(
                f"{INDEX_FILE}: {shown(name)} is mapped to {shown_value(shard)}, which is not a shard's name"
            )
    return weight_map


def is_shard_name(name: Any) -> bool:
    """Whether it is the plain name of a safetensors file."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or len(name) > MAX_NAME_CHARS:
        return False
    return Path(name).name == name and name.isprintable()


def file_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The beginning of a safetensors file, up to the first tensor. tensors: the name, dtype, shape and bytes of each, in the
    order in which they follow."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, size in tensors:
        begin, end = end, end + size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces behind the object.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_file_layout(path: Path, gaps: bool = False) -> FileLayout:
    """The layout of one safetensors file, checked to the byte. Raises SnapshotMissing, SnapshotCorrupt, SnapshotError.

    gaps: allow bytes that belong to no tensor, so that the caller can say which tensor is missing.
    """
    name = path.name
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise _corrupt(name, f"truncated: {size} bytes do not hold its header")
            if length > MAX_HEADER_BYTES:
                raise _corrupt(name, f"a header of {length} bytes is over the format's limit")
            header = _parse_header(name, file.read(length), gaps)
    except FileNotFoundError as error:
        raise SnapshotMissing(f"{shown(name)}: is not there") from error
    except OSError as error:
        raise SnapshotError(f"{shown(name)}: cannot be read: {error.strerror}") from error
    metadata = header.pop("__metadata__", None) or {}
    start = 8 + length
    ranges: list[tuple[int, int, str]] = []
    result = FileLayout({}, {}, metadata, start)
    for tensor, entry in header.items():
        spec, begin, end = _tensor_entry(name, tensor, entry)
        result.tensors[tensor] = spec
        result.ranges[tensor] = (start + begin, start + end)
        ranges.append((begin, end, tensor))
    _check_ranges(name, sorted(ranges), size - start, gaps)
    return result


def _corrupt(file: str, what: str) -> SnapshotCorrupt:
    return SnapshotCorrupt(f"{shown(file)}: {what}")


def _parse_header(name: str, data: bytes, of_delta: bool) -> dict[str, Any]:
    """The header, checked as the format demands: nothing before the object, and metadata that maps text to text.

    of_delta: the caller says which tensor has metadata that is no text.
    """
    header = parse_object(name, data)
    if not data.startswith(b"{"):
        raise _corrupt(name, "its header does not begin with an object")
    metadata = header.get("__metadata__")
    if metadata is None:
        return header
    if not isinstance(metadata, dict) or not (of_delta or all(isinstance(v, str) for v in metadata.values())):
        raise _corrupt(name, "its __metadata__ is not text by name")
    return header


def _bits(dtype: str, shape: Sequence[int]) -> int | None:
    """The size of a tensor in bits; None if a part of the product exceeds 63 bits, in the order in which safetensors
    multiplies."""
    bits = 1
    for size in (*shape, DTYPE_BITS[dtype]):
        bits *= size
        if bits >= 2**63:
            return None
    return bits


def _tensor_entry(file: str, tensor: str, entry: Any) -> tuple[TensorSpec, int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise _corrupt(file, f"{shown(tensor)} has no dtype, shape and data_offsets")
    if len(entry) > 3:
        raise _corrupt(file, f"{shown(tensor)} has more than dtype, shape and data_offsets")
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
        raise _corrupt(file, f"{shown(tensor)} has a size or offset that is not a whole number of 63 bits")
    if dtype not in DTYPE_BITS:
        raise _corrupt(file, f"{shown(tensor)} has the unknown dtype {shown_value(dtype)}")
    if _bits(dtype, shape) != 8 * (end - begin):
        raise _corrupt(
            file, f"{shown(tensor)} {dtype}{shown_value(shape)} does not fill its {end - begin} bytes"
        )
    return TensorSpec(dtype, tuple(shape), file), begin, end


def _check_ranges(file: str, ranges: list[tuple[int, int, str]], data_bytes: int, gaps: bool) -> None:
    position = 0
    for begin, end, tensor in ranges:
        if begin < position or (begin > position and not gaps):
            raise _corrupt(file, f"{shown(tensor)} starts at byte {begin} of the data, not at {position}")
        position = end
    if position > data_bytes:
        raise _corrupt(file, f"truncated: {data_bytes} bytes of data, {position} expected")
    if position < data_bytes and not gaps:
        raise _corrupt(file, f"{data_bytes - position} bytes after the last tensor")


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the directory. Raises SnapshotMissing, SnapshotCorrupt, SnapshotError."""
    path = directory / name
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise _corrupt(name, f"is larger than {MAX_JSON_BYTES} bytes")
        return parse_object(name, path.read_bytes())
    except FileNotFoundError as error:
        raise SnapshotMissing(f"{shown(name)}: is not there") from error
    except OSError as error:
        raise SnapshotError(f"{shown(name)}: cannot be read: {error.strerror}") from error


def _whole_number(digits: str) -> float:
    """The number as `safetensors` reads it: `-0` is the float -0.0, and so neither a size nor an offset."""
    return -0.0 if digits == "-0" else int(digits)


def parse_object(name: str, data: bytes) -> dict[str, Any]:
    """The JSON object in a file's bytes. Raises SnapshotCorrupt, which names the file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise _corrupt(name, "names a key twice")
        return result

    try:
        whole = _whole_number if b"-0" in data else None
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_int=whole)
        # Only an escape can make half a surrogate pair.
        if _SURROGATE_ESCAPE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _corrupt(name, "has text that is not valid Unicode") from error
    except (ValueError, RecursionError) as error:
        raise _corrupt(name, f"is not valid JSON: {shown(str(error))}") from error
    if not isinstance(value, dict):
        raise _corrupt(name, "is not a JSON object")
    return value
