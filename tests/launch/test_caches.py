"""Cache directories are renamed and removed by nobody but who holds them, and there are no more than are used at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.launch import caches
from midstream.launch.caches import held, remove_caches, set_strange_caches_aside, take_over
from midstream.launch.replica import alone


def cache(root: Path, name: str) -> Path:
    """With something in it that says whose it was."""
    (root / name).mkdir(parents=True)
    (root / name / "was").write_text(name)
    return root / name


def names(root: Path) -> set[str]:
    return {directory.name for directory in root.iterdir()}


def test_caches_that_a_process_uses_stay_whoever_thinks_they_are_nobodys(tmp_path: Path) -> None:
    used, free = cache(tmp_path, "b-replica-0"), cache(tmp_path, "b-replica-1")
    with alone(used, 0.0):
        assert [
            d.name.startswith(".gone-b-replica-1") for d in set_strange_caches_aside(tmp_path, set())
        ] == [True]
        assert (used / "was").exists()
        assert not free.exists()
        cache(tmp_path, "b-replica-1")
        remove_caches(used, set())
        assert (used / "was").exists()
        assert not free.exists()
    remove_caches(used, set())
    assert not used.exists(), "from when nobody uses it"


def test_one_that_is_removed_while_a_process_waits_for_it_is_made_anew_and_held(tmp_path: Path) -> None:
    directory = cache(tmp_path, "b-replica-0")
    real_flock = caches.fcntl.flock
    opened = []

    def flock_later(file: object, operation: int) -> None:
        """The first time, the directory goes between opening its lock and holding it."""
        opened.append(file)
        if len(opened) == 1:
            directory.rename(tmp_path / "gone")
        real_flock(file, operation)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches.fcntl, "flock", flock_later)
        with held(directory):
            assert os.listdir(directory) == [".lock"]
            with pytest.raises(BlockingIOError), held(directory):
                pass
            with held(tmp_path / "gone"):
                pass


def test_a_replica_that_is_new_on_a_node_takes_over_what_nobody_uses_and_nothing_else(tmp_path: Path) -> None:
    cache(tmp_path, "replica-0")
    cache(tmp_path, "replica-1")
    cache(tmp_path, ".gone-replica-3-ab")
    with alone(tmp_path / "replica-0", 0.0):
        assert (take_over(tmp_path, "replica-4") / "was").read_text() == "replica-1"
        assert names(tmp_path) == {"replica-0", "replica-4", ".gone-replica-3-ab"}
        with alone(tmp_path / "replica-4", 0.0):
            assert list(take_over(tmp_path, "b-replica-1").iterdir()) == [], "none was left"
        assert (take_over(tmp_path, "replica-4") / "was").read_text() == "replica-1", "its own"
    assert take_over(tmp_path / "new", "replica-0").is_dir()


def test_a_node_that_replicas_come_to_and_leave_has_no_more_caches_than_it_had_replicas(
    tmp_path: Path,
) -> None:
    @contextlib.contextmanager
    def running(number: int) -> Iterator[None]:
        with alone(take_over(tmp_path, f"replica-{number}"), 0.0):
            yield

    for number in range(6):
        with running(number), running(number + 10):
            assert len(names(tmp_path)) == 2
