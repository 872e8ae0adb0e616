"""Deltas to and from Fireworks' own package, in a process of its own: what one side writes, the other reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from midstream.core.types import CompressionFormat
from midstream.snapshots.arc2.encode import encode_delta
from midstream.snapshots.layout import read_file_layout
from midstream.snapshots.rebuild import rebuild

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).parents[2] / ".venv-fireworks" / "reference"


FORMATS: tuple[CompressionFormat, ...] = ("arc_v1", "arc_v2")
SHARDS = (1, 3)
PROGRAM = """
import sys
from pathlib import Path
from fireworks_delta_compression import compression as c

if __name__ == "__main__":
    for root in map(Path, sys.argv[1:]):
        form = root.name
        c.delta_compress_dirs(str(root / "parent"), str(root / "child"), str(root / "theirs"), form)
        for diff in (root / "ours").glob("*.safetensors"):
            base = str(root / "applied" / diff.name)
            c.delta_decompress_inplace(base_path=base, diff_path=str(diff), compression_format=form)
            base = str(root / "loaded" / diff.name)
            c.decompress_delta_into_source(str(diff), base, form, c.get_delta_decompress_executor())
"""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Per format and number of files: parent, child, both sides' deltas, and ours applied by the reference in two ways."""
    assert PACKAGES.exists(), "make setup-fireworks installs the reference"
    result = {}
    for compression in FORMATS:
        for shards in SHARDS:
            root = tmp_path_factory.mktemp("reference") / compression
            root.mkdir()
            parent, child = pair(root, shards)
            encode_delta(parent, child, root / "ours", compression)
            shutil.copytree(parent, root / "applied")
            shutil.copytree(parent, root / "loaded")
            result[compression, shards] = root
    program = tmp_path_factory.mktemp("program") / "reference.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), *map(str, result.values())],
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return result


def pair(root: Path, shards: int) -> tuple[Path, Path]:
    rng = np.random.default_rng(3)
    weight_map: dict[str, str] = {}
    for side in ("parent", "child"):
        (root / side).mkdir()
        (root / side / "config.json").write_text("{}")
    for shard in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        old = {f"s{shard}.{i}": rng.standard_normal((50, 90 + i)).astype(np.float32) for i in range(4)}
        old |= {f"s{shard}.scalar": np.array(1.5, np.float16), f"s{shard}.empty": np.empty((0, 2), np.int32)}
        old[f"s{shard}.large"] = rng.standard_normal((700, 900)).astype(np.float32)
        new = {k: np.where(rng.random(a.shape) < 0.02, a * 1.01, a).astype(a.dtype) for k, a in old.items()}
        new[f"s{shard}.0"] = old[f"s{shard}.0"]
        save_file(old, root / "parent" / name, {"format": "pt"})
        save_file(new, root / "child" / name, {"format": "pt"})
        weight_map |= dict.fromkeys(old, name)
    if shards > 1:
        for side in ("parent", "child"):
            index = json.dumps({"weight_map": weight_map})
            (root / side / "model.safetensors.index.json").write_text(index)
    return root / "parent", root / "child"


def tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    result = {}
    for path in directory.glob("*.safetensors"):
        for name, array in load_file(path).items():
            result[f"{path.name}/{name}"] = (str(array.dtype), array.shape, array.tobytes())
    return result


def checksums(directory: Path) -> dict[str, dict[str, str]]:
    return {p.name: read_file_layout(p).metadata for p in directory.glob("*.safetensors")}


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("compression", FORMATS)
def test_the_reference_and_midstream_read_each_other(
    worlds: dict[tuple[str, int], Path], compression: CompressionFormat, shards: int
) -> None:
    root = worlds[compression, shards]
    assert checksums(root / "ours") == checksums(root / "theirs")
    rebuild(root / "parent", root / "theirs", root / "out", compression)
    child = tensors(root / "child")
    assert child != tensors(root / "parent")
    for rebuilt in ("out", "applied", "loaded"):
        assert tensors(root / rebuilt) == child, rebuilt
