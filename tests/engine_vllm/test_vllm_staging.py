"""Snapshot files in memory: whole or not at all, never more than there is room for, and gone when nobody needs them."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from midstream.engine.vllm import staging as module
from midstream.engine.vllm.staging import Staging


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "step-1"
    (folder / "more").mkdir(parents=True)
    (folder / "model-00001.safetensors").write_bytes(os.urandom(3_000_001))
    (folder / "model-00002.safetensors").write_bytes(b"")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "more" / "notes.txt").write_text("not of the top")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def empty(folder: Path) -> None:
    """Waits until no snapshot's file is below `folder`: memory is freed beside."""
    deadline = time.monotonic() + 120
    # os.walk passes over a directory that goes meanwhile.
    while left := [file for _, _, files in os.walk(folder) for file in files if file != module.LOCK]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.01)


def put(staging: Staging, directory: Path) -> Path:
    return asyncio.run(staging.put(directory))


def test_weights_beside_the_snapshots_own_are_refused_since_vllm_would_load_them(
    shm: Path, snapshot: Path
) -> None:
    assert put(Staging(snapshot.parent, shm), snapshot).is_relative_to(shm)
    (snapshot / "model.safetensors.index.json").unlink()
    for shard in snapshot.glob("model-*"):
        shard.unlink()
    (snapshot / "model.safetensors").write_bytes(b"weights")
    assert put(Staging(snapshot.parent, shm), snapshot).is_relative_to(shm)
    (snapshot / "value_head.safetensors").write_bytes(b"other weights")
    with pytest.raises(OSError, match=r"value_head\.safetensors: beside model\.safetensors"):
        put(Staging(snapshot.parent, shm), snapshot)


def test_a_copy_is_whole_and_private(shm: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1000)
    staging = Staging(snapshot.parent, shm)
    copy = put(staging, snapshot)
    assert copy.is_relative_to(shm)
    assert files(copy) == files(snapshot)
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700


def test_each_has_its_place_until_it_is_dropped(shm: Path, snapshot: Path) -> None:
    staging = Staging(snapshot.parent, shm)
    first, second = put(staging, snapshot), put(staging, snapshot)
    assert first != second
    staging.drop(first)
    assert not first.exists()
    assert files(second) == files(snapshot)
    staging.drop(first)
    staging.close()
    empty(shm)


def test_what_was_given_is_never_dropped(shm: Path, snapshot: Path) -> None:
    staging, before = Staging(snapshot.parent, shm, share=0.0), files(snapshot)
    same = put(staging, snapshot)
    assert same == snapshot
    staging.drop(same)
    staging.close()
    assert files(snapshot) == before
    assert list(shm.iterdir()) == []


def test_the_share_is_of_what_is_free(shm: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(map(len, files(snapshot).values()))
    for free, fits in ((2 * size, True), (2 * size - 2, False)):
        monkeypatch.setattr(module, "_available_memory", lambda free=free: free)
        assert (put(Staging(snapshot.parent, shm), snapshot) != snapshot) == fits


def test_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:     7 kB\n")
    monkeypatch.setattr(module, "MEMINFO", meminfo)
    assert module._available_memory() == 7 * 1024
    meminfo.unlink()
    assert module._available_memory() == 0


def test_no_such_file_system(tmp_path: Path, snapshot: Path) -> None:
    assert put(Staging(snapshot.parent, tmp_path / "nowhere"), snapshot) == snapshot


def test_what_a_dead_one_left_is_removed(shm: Path, snapshot: Path, tmp_path: Path) -> None:
    """Whoever's it was; those who live keep theirs."""
    code = (
        "import asyncio, sys; from pathlib import Path; from midstream.engine.vllm.staging import Staging\n"
        "owner, shm, snapshot = map(Path, sys.argv[1:]); staging = Staging(owner, shm)\n"
        "print(asyncio.run(staging.put(snapshot)), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "dead"), str(shm), str(snapshot)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        living = Staging(tmp_path / "living", shm)
        kept = put(living, snapshot)
        # It lives.
        assert files(left) == files(kept) == files(snapshot)
        process.kill()
    Staging(tmp_path / "another", shm)
    assert not left.parent.exists()
    assert files(kept) == files(snapshot)


def test_what_was_left_for_the_same_owner_is_removed(shm: Path, snapshot: Path) -> None:
    left = put(Staging(snapshot.parent, shm), snapshot)
    Staging(snapshot.parent, shm)
    assert not left.exists()


def test_after_close_it_can_be_used_again(shm: Path, snapshot: Path) -> None:
    staging = Staging(snapshot.parent, shm)
    put(staging, snapshot)
    staging.close()
    assert list(shm.iterdir()) == []
    assert files(put(staging, snapshot)) == files(snapshot)


def test_links_inside_are_resolved(shm: Path, snapshot: Path) -> None:
    (snapshot / "linked.json").symlink_to("config.json")
    copy = put(Staging(snapshot.parent, shm), snapshot)
    assert files(copy) == files(snapshot)
    assert not (copy / "linked.json").is_symlink()


@pytest.mark.parametrize("there", [True, False])
def test_links_that_lead_out_are_not_followed(shm: Path, snapshot: Path, tmp_path: Path, there: bool) -> None:
    """A copy without them would not be whole: the engine reads the directory itself."""
    outside = tmp_path / "secret.json"
    if there:
        outside.write_text("{}")
    (snapshot / "linked.json").symlink_to(outside)
    assert put(Staging(snapshot.parent, shm), snapshot) == snapshot
    empty(shm)


def test_no_room_after_all(
    shm: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others filled the memory meanwhile."""
    written = 0

    def full(fd: int, data: memoryview) -> int:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        # A short write is no mistake.
        return real(fd, data[:1000])

    real = os.write
    monkeypatch.setattr(module.os, "write", full)
    assert put(Staging(snapshot.parent, shm), snapshot) == snapshot
    assert "No space left on device" in caplog.text
    empty(shm)


def test_files_that_cannot_be_read_are_an_error(shm: Path, snapshot: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        put(Staging(snapshot.parent, shm), snapshot / "nothing")
    empty(shm)


def test_somebody_elses_directory_is_not_used(shm: Path, snapshot: Path) -> None:
    staging = Staging(snapshot.parent, shm)
    elsewhere = shm / "elsewhere"
    elsewhere.mkdir()
    staging._root.symlink_to(elsewhere)
    assert put(staging, snapshot) == snapshot
    assert list(elsewhere.iterdir()) == []
    staging._root.unlink()
    staging._root.mkdir(mode=0o755)
    staging._root.chmod(0o755)
    assert put(staging, snapshot) == snapshot


async def test_cancelled_it_leaves_nothing(
    shm: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    real = os.readv

    def slow(fd: int, buffers: list[memoryview]) -> int:
        reading.set()
        assert go_on.wait(20)
        return real(fd, buffers)

    monkeypatch.setattr(module.os, "readv", slow)

    putting = asyncio.create_task(Staging(snapshot.parent, shm).put(snapshot))
    assert await asyncio.to_thread(reading.wait, 20)
    putting.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await putting
    empty(shm)
