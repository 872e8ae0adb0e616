"""Deltas that SkyRL's own publisher wrote, in a process of its own; and whether its own reader takes those of our tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_delta import arrays, assert_equal, changed, checkpoint, loaded
from trainer_writers import write_skyrl

from midstream.snapshots.rebuild import rebuild
from midstream.snapshots.trainer_deltas.records import Lineage

pytestmark = pytest.mark.variant

PACKAGES = Path(__file__).parents[2] / ".venv-skyrl" / "packages"
#: The packages around the module import what a trainer needs, such as Ray. They are stood in for.
PROGRAM = """
import sys, types
from pathlib import Path
from safetensors.torch import load_file

packages, root = Path(sys.argv[1]), Path(sys.argv[2])
for name in ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.weight_sync"):
    module = types.ModuleType(name)
    module.__path__ = [str(packages.joinpath(*name.split(".")))]
    sys.modules[name] = module
from skyrl.backends.skyrl_train.weight_sync.delta.checkpoint import DeltaCheckpointPublisher, LocalCheckpointStore

publisher = DeltaCheckpointPublisher(
    str(root / "v0"), str(root / "theirs"), str(root / "staging"), max_file_size_in_gb=1e-5, publish_num_workers=1
)
for version in (1, 2):
    tensors = load_file(root / f"v{version}" / "model.safetensors")
    publisher.publish(publisher.create_delta_files(iter(tensors.items())))
store = LocalCheckpointStore(str(root / "v0"), str(root / "local"))
store.fetch(2, sync_dir=str(root / "ours"))
"""


def test_what_its_publisher_writes_is_rebuilt_and_its_reader_takes_what_our_tests_write(
    tmp_path: Path,
) -> None:
    if not PACKAGES.exists():
        pytest.fail("SkyRL's writer is not installed: run `make setup-skyrl`")
    # Its publisher takes no tensor without a dimension.
    first = {name: array for name, array in arrays().items() if array.ndim}
    versions = [first, changed(first, 1), changed(changed(first, 1), 2)]
    checkpoint(tmp_path / "v0", versions[0], 2)
    for number in (1, 2):
        checkpoint(tmp_path / f"v{number}", versions[number])
        ours = tmp_path / "ours" / f"delta-{number:08d}"
        write_skyrl(ours, versions[number - 1], versions[number], number, algorithm="xxh3-128")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(PACKAGES), str(tmp_path)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert_equal(loaded(tmp_path / "local" / "weights"), versions[2])
    path = tmp_path / "v0"
    for number in (1, 2):
        delta, out = tmp_path / "theirs" / f"delta-{number:08d}", tmp_path / f"out{number}"
        rebuild(path, delta, out, "skyrl_delta", lineage=Lineage(path.name, delta.name))
        assert_equal(loaded(out), versions[number])
        path = out
    # Several files, as for a large model.
    assert len(list((tmp_path / "theirs" / "delta-00000001").glob("*.safetensors"))) > 1
