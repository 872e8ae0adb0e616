"""What a delta of a trainer says of itself, as one record, whichever trainer wrote it. Pure but for reading files.

Miles (`weight_vNNNNNN/`): `model.safetensors.index.json` has in `metadata` the version, the base version, the encoding, the
compression and the kind of checksum. Its `weight_map` places each changed tensor in a file, whose `__metadata__` has the
checksums. SkyRL (`delta-NNNNNNNN/`): `manifest.json` has a record of each changed tensor. In both a tensor of the files is a
`U8` blob, and tensors that did not change are not there.

Always holds: a TrainerDelta names each tensor once, and each in a file of its own directory. Its blobs are all that the files
hold. An index or manifest that is not understood as a whole is an error that names the file and the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from midstream.core.errors import SnapshotCorrupt, SnapshotIncompatible
from midstream.core.types import TrainerFormat
from midstream.snapshots.changes import ChangedTensor, Encoding
from midstream.snapshots.identity import WHOLE_SUFFIX
from midstream.snapshots.layout import (
    INDEX_FILE,
    SKYRL_MANIFEST,
    FileLayout,
    is_shard_name,
    read_file_layout,
    read_json,
)
from midstream.snapshots.messages import listed, shown, shown_value

#: By the names that Miles has for them.
ENCODINGS: Mapping[str, Encoding] = {"xor": "arc_v2", "overwrite": "overwrite"}
MILES_CHECKSUMS = ("xxh3-128", "blake3", "adler32")
SKYRL_CHECKSUMS = ("xxh3-128", "sha256")
#: How torch names the types that safetensors files have.
_TORCH_DTYPES = {
    "BOOL": "bool",
    **{
        f"{kind}{bits}": f"{name}{bits}"
        for kind, name in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
#: Directories of versions, by their names: those of Miles, and those of SkyRL. Whole files may lie beside a version's own.
_VERSION_NAME = re.compile(rf"(?:weight_v|delta-)(\d{{1,18}})(?:{re.escape(WHOLE_SUFFIX)})?", re.ASCII)


class TrainerDelta(NamedTuple):
    """said_in: the file that says it. tensors: those that changed, by name."""

    said_in: str
    version: int
    base_version: int
    tensors: Mapping[str, ChangedTensor]


class Lineage(NamedTuple):
    """The names of the directories that a delta and its parent lie in. "": not known."""

    parent: str = ""
    own: str = ""


NO_LINEAGE = Lineage()


def version_of(name: str) -> int | None:
    """The version that a directory's name is of; None if a trainer gives no such name."""
    found = _VERSION_NAME.fullmatch(name)
    return int(found[1]) if found else None


def torch_dtype(dtype: str) -> str | None:
    """What torch calls a type of safetensors; None where it is not known."""
    return _TORCH_DTYPES.get(dtype)


def read_trainer_delta(directory: Path, compression: TrainerFormat) -> TrainerDelta:
    """Raises SnapshotMissing, SnapshotCorrupt, SnapshotIncompatible, SnapshotError."""
    return _READERS[compression](directory)


def check_lineage(delta: TrainerDelta, lineage: Lineage) -> None:
    """Raise SnapshotIncompatible when the delta says another version, or another parent, than its place does."""
    if delta.base_version >= delta.version:
        raise SnapshotIncompatible(
            f"{delta.said_in}: version {delta.version} cannot stand on version {delta.base_version}"
        )
    own, parent = version_of(lineage.own), version_of(lineage.parent)
    if own is not None and own != delta.version:
        raise SnapshotIncompatible(
            f"{delta.said_in}: says version {delta.version}, and lies in {shown(lineage.own)}"
        )
    if parent is not None and parent != delta.base_version:
        raise SnapshotIncompatible(
            f"{delta.said_in}: stands on version {delta.base_version}, and its parent here is {shown(lineage.parent)}"
        )


# -- Miles


def _read_miles(directory: Path) -> TrainerDelta:
    index = read_json(directory, INDEX_FILE)
    metadata, weight_map = index.get("metadata"), index.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise SnapshotCorrupt(f"{INDEX_FILE}: has no metadata and weight_map")
    if "delta_encoding" not in metadata:
        raise SnapshotIncompatible(
            f"{INDEX_FILE}: has no delta_encoding, so it is a full snapshot; signal it as one"
        )
    encoding = ENCODINGS[_one_of(metadata, "delta_encoding", tuple(ENCODINGS))]
    _one_of(metadata, "compression_format", ("zstd",))
    algorithm = _one_of(metadata, "checksum_format", MILES_CHECKSUMS)
    for name, file in weight_map.items():
        if not is_shard_name(file):
            raise SnapshotCorrupt(
                f"{INDEX_FILE}: {shown(name)} is mapped to {shown_value(file)}, which is not a file's name"
            )
    layouts = _layouts(directory, weight_map.values(), INDEX_FILE)
    tensors = {}
    for name, file in weight_map.items():
        checksum = layouts[file].metadata.get(name)
        blob = _blob(layouts, file, name, name)
        if checksum is None:
            raise SnapshotCorrupt(f"{shown(file)}: {shown(name)} has no checksum in the metadata")
        tensors[name] = ChangedTensor(file, blob, encoding, algorithm, checksum)
    _check_all_named(layouts, [(one.file, name) for name, one in tensors.items()], INDEX_FILE)
    return TrainerDelta(
        INDEX_FILE, _version(metadata, "version"), _version(metadata, "base_version"), tensors
    )


def _one_of(metadata: Mapping[str, Any], field: str, known: tuple[str, ...]) -> str:
    value = metadata.get(field)
    if not isinstance(value, str) or value not in known:
        raise SnapshotIncompatible(
            f"{INDEX_FILE}: {field} {shown_value(value)} is not supported: it must be {' or '.join(known)}"
        )
    return value


def _version(metadata: Mapping[str, Any], field: str) -> int:
    value = metadata.get(field)
    if not isinstance(value, str) or not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise SnapshotCorrupt(f"{INDEX_FILE}: {field} {shown_value(value)} is no version")
    return int(value)


# -- SkyRL


class _Record(msgspec.Struct, frozen=True):
    """sha256: the checksum, in manifests of before there were other ones."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    uncompressed_num_bytes: int
    compressed_num_bytes: int
    payload_file: str
    payload_key: str
    checksum: str | None = None
    checksum_algorithm: str | None = None
    sha256: str | None = None


class _Manifest(msgspec.Struct, frozen=True):
    version: int
    base_version: int
    tensors: tuple[_Record, ...] = ()
    payload_files: tuple[str, ...] = ()


def _read_skyrl(directory: Path) -> TrainerDelta:
    try:
        manifest = msgspec.convert(read_json(directory, SKYRL_MANIFEST), _Manifest)
    except msgspec.ValidationError as error:
        raise SnapshotCorrupt(f"{SKYRL_MANIFEST}: is no manifest: {shown(str(error))}") from None
    if min(manifest.version, manifest.base_version) < 0:
        raise SnapshotCorrupt(f"{SKYRL_MANIFEST}: a version is below 0")
    for file in manifest.payload_files:
        if not is_shard_name(file):
            raise SnapshotCorrupt(f"{SKYRL_MANIFEST}: {shown_value(file)} is not a file's name")
    layouts = _layouts(directory, manifest.payload_files, SKYRL_MANIFEST)
    tensors: dict[str, ChangedTensor] = {}
    for record in manifest.tensors:
        if record.name in tensors:
            raise SnapshotCorrupt(f"{SKYRL_MANIFEST}: names {shown(record.name)} twice")
        tensors[record.name] = _changed(record, layouts)
    named = [(record.payload_file, record.payload_key) for record in manifest.tensors]
    _check_all_named(layouts, named, SKYRL_MANIFEST)
    return TrainerDelta(SKYRL_MANIFEST, manifest.version, manifest.base_version, tensors)


def _changed(record: _Record, layouts: Mapping[str, FileLayout]) -> ChangedTensor:
    at = f"{SKYRL_MANIFEST}: {shown(record.name)}"
    checksum, algorithm = record.checksum, record.checksum_algorithm or SKYRL_CHECKSUMS[0]
    if checksum is None:
        checksum, algorithm = record.sha256, "sha256"
    if checksum is None:
        raise SnapshotCorrupt(f"{at} has no checksum")
    if algorithm not in SKYRL_CHECKSUMS:
        raise SnapshotIncompatible(f"{at} has a checksum of an unknown kind, {shown_value(algorithm)}")
    if record.payload_file not in layouts:
        raise SnapshotCorrupt(
            f"{at} is in {shown_value(record.payload_file)}, which is none of its payload_files"
        )
    begin, end = _blob(layouts, record.payload_file, record.payload_key, record.name)
    if end - begin != record.compressed_num_bytes:
        raise SnapshotCorrupt(f"{at} has a blob of {end - begin} bytes, not of {record.compressed_num_bytes}")
    return ChangedTensor(
        record.payload_file,
        (begin, end),
        ENCODINGS["xor"],
        algorithm,
        checksum,
        record.uncompressed_num_bytes,
        record.dtype,
        record.shape,
    )


# -- both


def _layouts(directory: Path, named: Iterable[str], said_in: str) -> dict[str, FileLayout]:
    """The layouts of the files that are named. No others may be there: they may be what is left of another delta."""
    files = sorted(set(named))
    present = {path.name for path in directory.glob("*.safetensors") if not path.name.startswith(".")}
    if extra := sorted(present.difference(files)):
        raise SnapshotCorrupt(f"{shown(extra[0])}: is not named by {said_in}")
    return {file: read_file_layout(directory / file) for file in files}


def _blob(layouts: Mapping[str, FileLayout], file: str, key: str, tensor: str) -> tuple[int, int]:
    spec = layouts[file].tensors.get(key)
    if spec is None:
        raise SnapshotCorrupt(f"{shown(file)}: lacks {shown(tensor)}")
    if spec.dtype != "U8" or len(spec.shape) != 1:
        raise SnapshotCorrupt(
            f"{shown(file)}: {shown(tensor)} is {spec.dtype}{shown_value(list(spec.shape))}, not a U8 blob of one dimension"
        )
    return layouts[file].ranges[key]


def _check_all_named(
    layouts: Mapping[str, FileLayout], named: Iterable[tuple[str, str]], said_in: str
) -> None:
    known = list(named)
    if len(set(known)) != len(known):
        raise SnapshotCorrupt(f"{said_in}: takes two tensors from one blob")
    for file, layout in layouts.items():
        if extra := sorted(layout.tensors.keys() - {key for of, key in known if of == file}):
            raise SnapshotCorrupt(f"{shown(file)}: holds {listed(extra)}, which {said_in} does not name")


_READERS: Mapping[TrainerFormat, Callable[[Path], TrainerDelta]] = {
    "miles_delta": _read_miles,
    "skyrl_delta": _read_skyrl,
}
