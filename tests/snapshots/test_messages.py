"""Names out of a bucket's files, in messages: short, and on the one line that they belong to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midstream.core.errors import SnapshotCorrupt
from midstream.snapshots.messages import listed, shown
from midstream.snapshots.store.listing import find_snapshot

FORGED = "2026-01-01 00:00:00 gateway INFO all is well"


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\u2029", "\x1b[2K", "\x0b", "\udcff"])
def test_a_name_begins_no_line_and_commands_no_terminal(end: str) -> None:
    for text in (shown(f"model{end}{FORGED}"), listed([f"model{end}{FORGED}"])):
        assert text.isprintable()
        assert len(text.splitlines()) == 1
        assert text.startswith("model\\")
    assert shown("größe 漢字") == "größe 漢字"


def test_a_hostile_buckets_file_forges_no_line_of_the_log(tmp_path: Path) -> None:
    place = tmp_path / "bucket" / "a"
    place.mkdir(parents=True)
    (tmp_path / "outside").write_text("x")
    (place / f"model\n{FORGED}.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(SnapshotCorrupt) as refused:
        asyncio.run(find_snapshot(place.as_uri(), (tmp_path / "bucket").as_uri()))
    assert "leads out of the bucket" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
