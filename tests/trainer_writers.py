"""Writes disk deltas as Miles and SkyRL define them, by their definitions alone: no reader of midstream is used."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from safetensors.numpy import save_file

Arrays = Mapping[str, NDArray[Any]]


def digest(algorithm: str, data: bytes) -> str:
    if algorithm == "xxh3-128":
        import xxhash

        return str(xxhash.xxh3_128(data).hexdigest())
    if algorithm == "blake3":
        import blake3

        return str(blake3.blake3(data).hexdigest())
    return f"{zlib.adler32(data):08x}" if algorithm == "adler32" else hashlib.sha256(data).hexdigest()


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(array.tobytes(), np.uint8)


def _xor(old: NDArray[np.uint8], new: NDArray[np.uint8]) -> bytes:
    return (old ^ new).tobytes()


def _overwrite(old: NDArray[np.uint8], new: NDArray[np.uint8]) -> bytes:
    where = np.flatnonzero(old != new).astype("<u4")
    return np.array([len(where)], "<u4").tobytes() + where.tobytes() + new[where].tobytes()


ENCODERS: Mapping[str, Callable[[NDArray[np.uint8], NDArray[np.uint8]], bytes]] = {
    "xor": _xor,
    "overwrite": _overwrite,
}


def _blobs(old: Arrays, new: Arrays, encoding: str, level: int) -> dict[str, tuple[NDArray[np.uint8], bytes]]:
    """Of the tensors that changed: the blob, and the new bytes."""
    compress = zstandard.ZstdCompressor(level=level).compress
    made = {}
    for name in old:
        before, after = _bytes(old[name]), _bytes(new[name])
        if not np.array_equal(before, after):
            blob = compress(ENCODERS[encoding](before, after))
            made[name] = np.frombuffer(blob, np.uint8), after.tobytes()
    return made


def write_miles(
    directory: Path,
    old: Arrays,
    new: Arrays,
    version: int = 1,
    *,
    encoding: str = "xor",
    algorithm: str = "adler32",
    files: int = 2,
    **metadata: str,
) -> Path:
    directory.mkdir(parents=True)
    blobs = _blobs(old, new, encoding, 1)
    parts = [dict(list(blobs.items())[i::files]) for i in range(files)]
    parts = [part for part in parts if part]
    weight_map = {}
    for number, part in enumerate(parts):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        checksums = {name: digest(algorithm, after) for name, (_, after) in part.items()}
        save_file({name: blob for name, (blob, _) in part.items()}, directory / file, checksums)
        weight_map.update(dict.fromkeys(part, file))
    said = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": algorithm,
    }
    index = {"metadata": {**said, **metadata}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_skyrl(
    directory: Path, old: Arrays, new: Arrays, version: int = 1, *, algorithm: str = "sha256"
) -> Path:
    directory.mkdir(parents=True)
    blobs = _blobs(old, new, "xor", 1)
    records, files = [], []
    for number, (name, (blob, after)) in enumerate(blobs.items()):
        # One file for each tensor, as where each is as large as a file may be.
        file = f"delta-rank00000-file{number:06d}.safetensors"
        save_file({name: blob}, directory / file)
        files.append(file)
        dtype = str(old[name].dtype)
        records.append(
            {
                "name": name,
                "dtype": dtype,
                "shape": list(old[name].shape),
                "uncompressed_num_bytes": len(after),
                "compressed_num_bytes": len(blob),
                "payload_file": file,
                "payload_key": name,
                "checksum": digest(algorithm, after),
                "checksum_algorithm": algorithm,
            }
        )
    manifest = {
        "version": version,
        "base_version": version - 1,
        "tensors": records,
        "total_uncompressed_num_bytes": sum(one["uncompressed_num_bytes"] for one in records),
        "total_compressed_num_bytes": sum(one["compressed_num_bytes"] for one in records),
        "payload_files": files,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory
