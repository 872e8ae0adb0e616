"""The snapshots that `midstream verify` takes from a bucket."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from midstream.snapshots.arc2.encode import encode_delta
from midstream.verify.snapshots import BucketSnapshots


def test_a_delta_that_was_tried_too_early_as_a_parent_stays_usable(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """first, then middle on it, then last on that; records name them in another order."""
    whole = [tiny_model(seed=seed) for seed in range(3)]
    bucket, scratch = tmp_path / "bucket", tmp_path / "scratch"
    scratch.mkdir()
    shutil.copytree(whole[0], bucket / "first")
    encode_delta(whole[0], whole[1], bucket / "middle", "arc_v2")
    encode_delta(whole[1], whole[2], bucket / "last", "arc_v2")
    snapshots = BucketSnapshots(bucket.as_uri(), scratch, known=["first", "last", "middle"])
    assert [snapshots.refused(name) for name in ("middle", "last")] == [None, None]
    assert snapshots.stands_on == {"middle": "first", "last": "middle"}
