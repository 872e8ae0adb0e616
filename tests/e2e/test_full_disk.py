"""A real server whose state directory's disk is full: signals wait for room, rollouts do not notice."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import httpx
import pytest
import serving

from midstream.client import SnapshotPublisher

HOT_LOAD = "/hot_load/v1/models/hot_load"
SIZE = "96m"
SIGNALS_MAX = 200
#: A file system of its own at $0, seen by this command and its children alone.
ON_A_SMALL_DISK = f'mount -t tmpfs -o size={SIZE},mode=700 tmpfs "$0" && exec "$@"'


def on_a_small_disk(disk: Path, command: list[str]) -> list[str]:
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", ON_A_SMALL_DISK, str(disk), *command]


def fill(file: Path) -> None:
    """Take all the room that is left."""
    with file.open("wb", buffering=0) as out:
        for size in (2**20, 4096, 1):
            while has_room(out, size):
                pass


def has_room(out: FileIO, size: int) -> bool:
    try:
        out.write(bytes(size))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


@pytest.mark.variant
def test_a_full_state_disk_holds_up_signals_alone_and_room_cures_it(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, bucket = tmp_path / "disk", tmp_path / "bucket"
    disk.mkdir()
    if shutil.which("unshare") is None or subprocess.run(on_a_small_disk(disk, ["true"])).returncode:
        pytest.skip("this user cannot mount a file system of its own")
    plain = serving.command
    monkeypatch.setattr(serving, "command", lambda *words: on_a_small_disk(disk, plain(*words)))
    options = ("--model", str(tiny_model()), "--bucket", bucket.as_uri(), "--no-tinker")
    with (
        serving.serve(disk / "state", *options) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        children = sorted(server.children())
        inside = Path(f"/proc/{server.process.pid}/root{disk}")
        body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 4, "seed": 1}
        expected = http.post("/v1/completions", json=body).json()["choices"]
        for number in range(SIGNALS_MAX):
            shutil.copytree(tiny_model(seed=1), bucket / f"step-{number}")
        with SnapshotPublisher(server.url, bucket.as_uri()) as publisher:
            fill(inside / "fill")
            for number in range(SIGNALS_MAX):
                answer = http.post(HOT_LOAD, json={"identity": f"step-{number}"})
                if answer.status_code != 200:
                    break
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["message"].startswith("the ledger cannot be used now: ")
            for _ in range(4):
                served = http.post("/v1/completions", json=body)
                assert served.status_code == 200
            assert number > 0 or served.json()["choices"] == expected
            assert http.get(HOT_LOAD).status_code == http.get("/health").status_code == 200
            os.unlink(inside / "fill")
            publisher.snapshots.signal(f"step-{number}")
            publisher.snapshots.wait_until_ready(f"step-{number}", timeout_s=150)
        assert http.post("/v1/completions", json=body).json()["model"].endswith(f"@step-{number}")
        assert sorted(server.children()) == children, "no process died of it"
        assert "Traceback" not in server.log.read_text()
