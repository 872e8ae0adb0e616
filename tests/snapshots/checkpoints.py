"""Small checkpoints for tests of snapshots as files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from midstream.client.bucket import open_bucket
from midstream.snapshots.identity import snapshot_url
from midstream.snapshots.store.fetch import Progress, fetch_listed
from midstream.snapshots.store.listing import list_snapshot

CONFIG = {"model_type": "tiny", "hidden_size": 8}


async def fetch_snapshot(
    url: str, dest: Path, progress: Progress | None = None, *, fingerprint: str | None = None
) -> None:
    """Make `dest` a copy of the snapshot directory at `url`, as its replica does."""
    await fetch_listed(await list_snapshot(url, fingerprint), dest, progress)


def write_checkpoint(
    directory: Path, *, seed: int = 0, shards: int = 1, config: dict[str, Any] | None = None, size: int = 6
) -> Path:
    """A whole checkpoint; its tensors' values come from `seed`, names and shapes are always the same."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (directory / "tokenizer.json").write_text("{}")
    random = np.random.default_rng(seed)
    tensors = {f"layers.{i}.w": random.standard_normal((size, 7)).astype(np.float32) for i in range(4)}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for s in range(shards):
        name = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        part = {k: v for i, (k, v) in enumerate(tensors.items()) if i % shards == s}
        save_file(part, directory / name)
        weight_map.update(dict.fromkeys(part, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def weights(directory: Path) -> dict[str, bytes]:
    """The bytes of every tensor, by name."""
    loaded = {}
    for file in sorted(directory.glob("*.safetensors")):
        loaded.update({name: array.tobytes() for name, array in load_file(file).items()})
    return loaded


def files(directory: Path) -> dict[str, bytes]:
    """All files that are not hidden, by name."""
    return {p.name: p.read_bytes() for p in directory.iterdir() if not p.name.startswith(".")}


def rot(file: Path, change: Callable[[bytearray], None]) -> None:
    """Change the bytes of `file` as a failing disk does: nothing else shows it."""
    stat = file.stat()
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def flip_last(data: bytearray) -> None:
    data[-1] ^= 0xFF


def put_directory(bucket: str, identity: str, directory: Path, *, overwrite: bool = False) -> str:
    """As the publisher puts a snapshot into its bucket; the snapshot's URL."""
    open_bucket(bucket).put(identity, directory, overwrite=overwrite)
    return snapshot_url(bucket, identity)
