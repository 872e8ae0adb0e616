"""The local cache: which content is where, and what goes first when it is full."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.core.errors import SnapshotError
from midstream.core.types import SnapshotFiles
from midstream.snapshots import durable
from midstream.snapshots.store.cache import SnapshotCache, entry_name
from midstream.snapshots.store.fetch import partial_directory


def link(
    name: str, fingerprint: str | None = "f", url: str = "file:///b", delta: bool = False
) -> SnapshotFiles:
    return SnapshotFiles(
        snapshot=name, url=f"{url}/{name}", fingerprint=fingerprint, compression="arc_v2" if delta else None
    )


def fill(path: Path, size: int, age: int) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(bytes(size))
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    return path


@given(st.lists(st.text(min_size=1, max_size=60), unique=True, max_size=20))
def test_different_identities_have_different_safe_directory_names(identities: list[str]) -> None:
    names = [entry_name(i, [link(i)]) for i in identities]
    assert len({n.casefold() for n in names}) == len(identities)
    assert all(n.isascii() and "/" not in n and not n.startswith(".") and len(n) < 100 for n in names)


def test_every_part_of_a_chain_tells_contents_apart(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path)
    full, delta = link("a"), link("b", delta=True)
    chains = [
        [full],
        [link("a", "g")],
        [link("a", None)],
        [link("a", url="file:///c")],
        [full, delta],
        [link("a", "g"), delta],
        [full, link("b", "g", delta=True)],
        [full, link("b")],
        [full, link("c", delta=True), delta],
    ]
    assert len({cache.whole(chain) for chain in chains} | {cache.delta(delta)}) == len(chains) + 1
    assert cache.whole([full, delta]) == cache.whole((link("a"), link("b", delta=True)))


def test_room_is_made_by_removing_what_was_used_least_recently_but_never_what_is_kept(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, bytes_max=1000)
    oldest, older, newer, newest = (
        fill(cache.whole([link(name)]), 200, age) for age, name in zip((4, 3, 2, 1), "abcd", strict=True)
    )
    cache.make_room(200, {oldest}, "next")
    assert all(p.exists() for p in (oldest, older, newer, newest))
    cache.make_room(500, {oldest}, "next")
    assert [p.exists() for p in (oldest, older, newer, newest)] == [True, False, False, True]
    with pytest.raises(
        SnapshotError,
        match=r"^next: 801 bytes do not fit into the snapshot cache, which is bounded to 1000 and holds 200 ",
    ):
        cache.make_room(801, {oldest}, "next")
    assert oldest.exists()


def test_using_an_entry_saves_it(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, bytes_max=450)
    first, second = fill(cache.whole([link("a")]), 200, 2), fill(cache.whole([link("b")]), 200, 1)
    cache.touch(first)
    cache.make_room(200, (), "c")
    assert (first.exists(), second.exists()) == (True, False)


def test_pruning_keeps_to_the_bound_counting_files_that_are_half_there(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, bytes_max=1000)
    kept = fill(cache.whole([link("a")]), 900, 9)
    partial = partial_directory(tmp_path, "file:///b/c")
    partial.mkdir()
    with (partial / "x.part").open("wb") as file:
        # All hole: what is to come does not count yet.
        file.truncate(10**9)
    cache.prune({kept})
    assert partial.exists()
    with (partial / "x.part").open("r+b") as file:
        file.write(bytes(8192))
    cache.prune({kept})
    assert (kept.exists(), partial.exists()) == (True, False)


def test_without_a_bound_one_more_than_what_is_kept_stays(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path)
    a, b, c, d = (
        fill(cache.whole([link(name)]), 10, age) for age, name in zip((1, 2, 3, 4), "abcd", strict=True)
    )
    cache.make_room(10**15, (), "no bound")
    cache.prune({d, tmp_path / "never-fetched"})
    assert [p.exists() for p in (a, b, c, d)] == [True, False, False, True]
    assert repr(cache).endswith("entries=2 bytes=20 of unbounded>")


def boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot_id: str) -> None:
    """The machine was started as `boot_id`."""
    (tmp_path / "boot").write_text(boot_id)
    monkeypatch.setattr(durable, "_KERNEL_BOOT_ID", tmp_path / "boot")


def cut_short(monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None) -> None:
    """The next removal ends before it removes anything."""
    real = shutil.rmtree

    def rmtree(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", real)
        if error is not None:
            raise error

    monkeypatch.setattr(shutil, "rmtree", rmtree)


def test_an_opening_that_dies_while_it_removes_what_a_power_cut_may_have_spoilt_trusts_none_of_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    boot(tmp_path, monkeypatch, "boot-1")
    cache = SnapshotCache(root)
    spoilt = [fill(cache.whole([link(name)]), 10, 1) for name in "ab"]
    boot(tmp_path, monkeypatch, "boot-2")
    cut_short(monkeypatch, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        SnapshotCache(root)
    assert any(path.exists() for path in spoilt)
    SnapshotCache(root)
    assert [p.name for p in root.iterdir()] == [".boot"]


def test_a_machine_that_does_not_say_when_it_was_started_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_KERNEL_BOOT_ID", tmp_path / "no-linux")
    root = tmp_path / "cache"
    fill(SnapshotCache(root).whole([link("a")]), 10, 1)
    SnapshotCache(root)
    assert [p.name for p in root.iterdir()] == [".boot"]


def test_a_removal_that_was_cut_short_is_not_in_the_way_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SnapshotCache(tmp_path)
    path = fill(cache.whole([link("a")]), 10, 1)
    cut_short(monkeypatch, None)
    cache.drop(path)
    fill(path, 10, 1)
    cache.drop(path)
    assert not path.exists()


def test_opening_again_keeps_snapshots_and_unfinished_ones_and_removes_scraps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot(tmp_path, monkeypatch, "boot-1")
    root = tmp_path / "cache"
    cache = SnapshotCache(root)
    whole, partial = cache.whole([link("a")]), partial_directory(root, "file:///b/c")
    for directory in (whole, partial, root / ".moving-1", root / ".fetch-delta-2"):
        fill(directory, 10, 1)
    SnapshotCache(root)
    assert {p for p in root.iterdir() if p.is_dir()} == {whole, partial}
    # The disk may not have got all that was written.
    boot(tmp_path, monkeypatch, "boot-2")
    SnapshotCache(root)
    assert [p.name for p in root.iterdir()] == [".boot"]


def test_removing_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path)
    path = fill(cache.whole([link("a")]), 10, 1)
    cache.drop(path)
    cache.drop(path)
    assert [p.name for p in tmp_path.iterdir()] == [".boot"]
