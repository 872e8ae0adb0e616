"""A name means the bytes that were served under it first, whatever changes in the bucket or on the replicas' disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server

from midstream.client import SnapshotFailed, SnapshotPublisher
from midstream.client.errors import SignalRefused
from midstream.snapshots.content import file_content

WEIGHTS = "model.safetensors"
CHANGED = 6400
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def server(trained: Server) -> Server:
    return trained


@pytest.fixture
def publisher(server: Server) -> Iterator[SnapshotPublisher]:
    with SnapshotPublisher(server.url, server.bucket.as_uri()) as made:
        yield made


def overwrite(file: Path) -> None:
    """In its place, keeping size and time."""
    before = file.stat()
    with file.open("r+b") as data:
        data.seek(before.st_size - CHANGED)
        old = data.read(CHANGED)
        data.seek(before.st_size - CHANGED)
        data.write(bytes(byte ^ 0x11 for byte in old))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def serve_everywhere(publisher: SnapshotPublisher, identity: str, **how: Any) -> None:
    publisher.snapshots.signal(identity, **how)
    publisher.snapshots.wait_until_ready(identity, 150)


def copies(server: Server, identity: str) -> list[Path]:
    """What the replicas keep of it."""
    found = sorted((server.state_dir / "snapshots").glob(f"*/{identity}-*"))
    assert len(found) == 2
    return found


def answers(server: Server) -> dict[str, tuple[str, list[float]]]:
    """Of each replica: its label, and how it scores a prompt."""
    body = {
        "model": server.model,
        "prompt": list(range(40, 72)),
        "max_tokens": 0,
        "echo": True,
        "logprobs": True,
    }
    said: dict[str, tuple[str, list[float]]] = {}
    for session in range(50):
        headers = {"x-session-affinity": f"s{session}"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        records = answer.json()["choices"][0]["logprobs"]["content"]
        scores = [record["logprob"] for record in records]
        said[answer.headers["x-midstream-replica"]] = (answer.json()["model"], scores)
        if len(said) == 2:
            return said
    raise AssertionError("a replica answered nothing")


def wait_until_read(server: Server, identity: str) -> None:
    """The digest of its weights is read behind its check, and a switch ends the reading."""
    until = time.monotonic() + DEADLINE_S
    with contextlib.closing(sqlite3.connect(server.state_dir / "ledger.db")) as ledger:
        while not ledger.execute("SELECT 1 FROM weights WHERE identity = ?", (identity,)).fetchone():
            assert time.monotonic() < until, f"the ledger does not know the weights of {identity}"
            time.sleep(0.02)


def ledger_of(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/v1/{server.deployment}/ledger", timeout=120).json()
    return found


@pytest.mark.parametrize("how", ["plain directory", "published"])
def test_bytes_changed_in_the_bucket_are_never_served_under_the_old_name(
    server: Server, publisher: SnapshotPublisher, tiny_model: Callable[..., Path], how: str
) -> None:
    first, second = f"one-{how[:5]}", f"two-{how[:5]}"
    for identity, seed in ((first, 1), (second, 2)):
        if how == "published":
            publisher.write_full(identity, tiny_model(seed=seed))
        else:
            shutil.copytree(tiny_model(seed=seed), server.bucket / identity)
        serve_everywhere(publisher, identity)
    serving = answers(server)
    meant = file_content(server.bucket / first / WEIGHTS).digest
    overwrite(server.bucket / first / WEIGHTS)
    now = file_content(server.bucket / first / WEIGHTS).digest
    for copy in copies(server, first):
        shutil.rmtree(copy)

    publisher.snapshots.signal(first)
    with pytest.raises(SnapshotFailed) as refused:
        publisher.snapshots.wait_until_ready(first, 150)
    assert f"{WEIGHTS} has the digest {now} instead of {meant}" in str(refused.value)
    while any(replica.error is None for replica in publisher.snapshots.status().replicas):
        pass
    assert answers(server) == serving, "what served before goes on"
    rows = {row["identity"]: row for row in ledger_of(server)["snapshots"]}
    assert [row["stage"] for row in rows[first]["replicas"]] == ["error", "error"]
    assert all(f"{now} instead of {meant}" in row["error"] for row in rows[first]["replicas"])
    assert {file["name"]: file["digest"] for file in rows[first]["files"]}[WEIGHTS] == meant

    # As it was.
    overwrite(server.bucket / first / WEIGHTS)
    serve_everywhere(publisher, first)
    assert {label.rpartition("@")[2] for label, _ in answers(server).values()} == {first}


def test_a_published_snapshot_keeps_its_meaning_though_its_manifest_is_replaced_too(
    server: Server, publisher: SnapshotPublisher, tiny_model: Callable[..., Path]
) -> None:
    publisher.write_full("again", tiny_model(seed=6))
    serve_everywhere(publisher, "again")
    publisher.write_full("again", tiny_model(seed=7), overwrite=True)
    with pytest.raises(SignalRefused, match="are not those that were served under this name"):
        publisher.snapshots.signal("again")
    serve_everywhere(publisher, "again", overwrite=True)


def test_changed_copies_on_the_replicas_disks_are_found_out_though_both_are_equal(
    server: Server, publisher: SnapshotPublisher, tiny_model: Callable[..., Path]
) -> None:
    """Majorities see nothing here: the ledger remembers what the weights were."""
    for identity, seed in (("kept", 3), ("between", 4)):
        shutil.copytree(tiny_model(seed=seed), server.bucket / identity)
        serve_everywhere(publisher, identity)
        if identity == "kept":
            right = answers(server)
            wait_until_read(server, identity)
    for copy in copies(server, "kept"):
        overwrite(copy / WEIGHTS)
    serve_everywhere(publisher, "kept")
    until = time.monotonic() + DEADLINE_S
    while any(
        found["verdict"] != "agreed" for found in (ledger_of(server)["disagreements"] or [{"verdict": ""}])
    ):
        assert time.monotonic() < until, ledger_of(server)["disagreements"]
    assert answers(server) == right
    found = ledger_of(server)["disagreements"]
    assert len(found) == 2
    assert all("kept is not what the ledger has under that name: the digest" in row["error"] for row in found)


def test_a_directory_that_leads_out_of_the_bucket_and_files_that_are_none_are_refused_at_once(
    server: Server, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(tiny_model(), outside)
    (server.bucket / "led-out").symlink_to(outside)
    shutil.copytree(tiny_model(), server.bucket / "led-out-by-a-file")
    (server.bucket / "led-out-by-a-file" / WEIGHTS).unlink()
    (server.bucket / "led-out-by-a-file" / WEIGHTS).symlink_to(outside / WEIGHTS)
    shutil.copytree(tiny_model(), server.bucket / "piped")
    (server.bucket / "piped" / WEIGHTS).unlink()
    os.mkfifo(server.bucket / "piped" / WEIGHTS)
    with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
        for identity, says in (
            ("led-out", "leads out of the bucket"),
            ("led-out-by-a-file", f"{WEIGHTS} leads out of the bucket"),
            ("piped", f"{WEIGHTS} is not a regular file"),
        ):
            with pytest.raises(SignalRefused, match=says) as refused:
                publisher.snapshots.signal(identity)
            assert refused.value.status == 400


def test_a_link_that_stays_in_the_bucket_is_followed(
    server: Server, publisher: SnapshotPublisher, tiny_model: Callable[..., Path]
) -> None:
    """As Hugging Face's caches have it: names are links to blobs."""
    shutil.copytree(tiny_model(seed=5), server.bucket / "linked")
    blobs = server.bucket / "blobs"
    blobs.mkdir()
    (server.bucket / "linked" / WEIGHTS).rename(blobs / "0123")
    (server.bucket / "linked" / WEIGHTS).symlink_to("../blobs/0123")
    serve_everywhere(publisher, "linked")


def test_nothing_of_the_server_is_readable_by_others(server: Server) -> None:
    paths = [server.state_dir, *server.state_dir.rglob("*")]
    inside = [path for path in paths if server.bucket not in (path, *path.parents) and not path.is_symlink()]
    assert {"ledger.db", "tinker.db"} <= {path.name for path in inside}
    open_to_others = [path for path in inside if stat.S_IMODE(path.stat().st_mode) & 0o077 and path.is_dir()]
    assert open_to_others == []
    assert [path for path in inside if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
