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
from midstream.snapshots.store import cache as cache_module
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
        # All hole: what is to come, and has no room yet, does not count.
        file.truncate(10**9)
    cache.prune({kept})
    assert partial.exists()
    with (partial / "x.part").open("r+b") as file:
        file.write(bytes(8192))
    cache.prune({kept})
    assert (kept.exists(), partial.exists()) == (True, False)


def test_one_bound_is_of_snapshots_and_of_all_policies(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, bytes_max=1000)
    own = fill(cache.whole([link("full")]), 300, 9)
    red, blue = cache.of_policy("red"), cache.of_policy("blue")
    old, held = fill(red.whole([link("a")]), 300, 8), fill(red.whole([link("b")]), 300, 7)
    red.users.keeping["red's"] = lambda: {held}
    cache.users.keeping["the deployment's"] = lambda: {own}
    blue.make_room(400, (), "next")
    assert [p.exists() for p in (own, old, held)] == [True, False, True], "nobody's use is another's room"
    with pytest.raises(SnapshotError, match=r"401 bytes do not fit .* holds 600 that are in use"):
        blue.make_room(401, (), "next")
    red.users.leave("red's")
    blue.make_room(401, (), "next")
    assert (own.exists(), held.exists()) == (True, False)


def test_room_that_was_made_for_one_is_not_given_to_another(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path, bytes_max=1000)
    red, blue = cache.of_policy("red"), cache.of_policy("blue")
    rebuilt, fetched = object(), partial_directory(red.root, "file:///b/c")

    def reserve() -> None:
        fetched.mkdir()
        (fetched / "x.part").write_bytes(bytes(400))

    red.users.keeping["red's"] = lambda: {fetched}
    red.make_room(400, (), "fetched", reserve=reserve)
    red.make_room(300, (), "rebuilt", user=rebuilt)
    with pytest.raises(SnapshotError, match=r"301 bytes do not fit .* holds 700 that are in use"):
        blue.make_room(301, (), "next")
    blue.make_room(300, (), "next")
    red.wrote(rebuilt)
    blue.make_room(600, (), "next")


def test_a_full_disk_gives_what_a_superseded_fetch_had_reserved_to_the_next_one(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path)
    given_up = fill(partial_directory(tmp_path, "file:///b/old"), 100, age=1)
    serving = fill(cache.whole([link("serving")]), 100, age=9)
    asked = []

    def reserve() -> None:
        asked.append(given_up.exists())
        if given_up.exists():
            raise SnapshotError("the disk has no room")

    cache.make_room(100, {serving}, "new", reserve=reserve)
    assert asked == [True, False]
    assert serving.exists()

    def never() -> None:
        raise SnapshotError("the disk has no room")

    with pytest.raises(SnapshotError, match="no room"):
        cache.make_room(100, {serving}, "new", reserve=never)
    assert serving.exists()


def test_without_a_bound_so_many_snapshots_of_policies_stay_beside_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "POLICIES_KEPT", 2)
    cache = SnapshotCache(tmp_path)
    places = []
    for age, name in enumerate("abcde"):
        policy = cache.of_policy(name)
        places.append(fill(policy.whole([link("1")]), 10, age))
    cache.users.keeping["e's"] = lambda: {places[4]}
    policy.prune(())
    assert [place.exists() for place in places] == [True, True, False, False, True]


def test_a_policys_directory_goes_whole_and_one_of_its_name_begins_anew(tmp_path: Path) -> None:
    cache = SnapshotCache(tmp_path)
    red = cache.of_policy("red")
    fill(red.whole([link("a")]), 10, 1)
    partial_directory(red.root, "file:///b/c").mkdir()
    doomed = cache.set_policy_aside("red")
    assert doomed is not None
    assert cache.set_policy_aside("red") is None
    assert repr(cache.of_policy("red")).endswith("entries=0 bytes=0 of unbounded>")


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
