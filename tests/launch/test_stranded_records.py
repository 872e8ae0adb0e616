"""Records that a replica left on the disk when it went: they come into the bucket, each once, and no live replica loses one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
from test_not_ready import FakeLauncher

from midstream.client.journal import gaps_in, read_records
from midstream.core.config import EngineSettings, RecordsSettings, Settings, TinkerSettings
from midstream.core.errors import ConfigError, SnapshotError
from midstream.core.retry import Backoff
from midstream.fleet.desired_state import Wanted, WantedReplica
from midstream.launch import stranded
from midstream.launch.caches import held
from midstream.launch.engines import records_fields
from midstream.launch.replica import held_directories
from midstream.launch.specs import ReplicaSpec
from midstream.launch.stranded import StrandedRecords, upload_stranded
from midstream.launch.supervisor import Supervisor
from midstream.replica.journal import Journal
from midstream.snapshots.store.upload import put_file


class Disk:
    """The records' directory of a machine, and the bucket."""

    def __init__(self, path: Path) -> None:
        self.root = path / "state" / "records"
        self.bucket = path / "bucket"
        self.url = self.bucket.as_uri()

    def leave(self, name: str, *values: int, deployment: str = "d", torn: bytes = b"") -> list[str]:
        """What a replica leaves that could not reach the bucket: a segment for each value. Returns their names."""
        blocked = self.root.parent / "no directory"
        blocked.parent.mkdir(parents=True, exist_ok=True)
        blocked.write_text("")
        journal = Journal(
            self.root / name, blocked.as_uri(), name, {"deployment": deployment}, segment_bytes=1
        )
        journal.start()
        for count, value in enumerate(values, 1):
            journal.add(lambda value=value: {"kind": "turn", "value": value})  # type: ignore[misc]
            while journal.stats().durable < count:
                threading.Event().wait(0.001)
        journal.close()
        names = self.left(name)
        if torn:
            with (self.root / name / names[-1]).open("ab") as file:
                file.write(torn)
        return names

    def left(self, name: str) -> list[str]:
        return sorted(path.name for path in (self.root / name).glob("*.jsonl"))

    def kept(self) -> list[dict[str, Any]]:
        return list(read_records(self.url))

    def upload(self) -> bool:
        return upload_stranded(self.root, self.url)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def values(records: list[dict[str, Any]]) -> list[Any]:
    return [record.get("value") for record in records]


def test_what_a_replica_left_comes_into_the_bucket_under_the_names_it_gave(disk: Disk) -> None:
    names = disk.leave("replica-1", 1, 2, 3, torn=b'{"n": 4, "replica": "rep')
    others = disk.leave("b-replica-0", 9, deployment="b")
    assert disk.upload()
    assert sorted(p.name for p in (disk.bucket / "records" / "d").iterdir()) == names
    assert [p.name for p in (disk.bucket / "records" / "b").iterdir()] == others
    records = disk.kept()
    assert values(records) == [9, 1, 2, 3]
    assert gaps_in(records) == 0
    assert [p.name for p in disk.root.iterdir()] == [stranded.ADOPTED], "no directory of theirs is left"
    assert disk.upload()
    assert values(disk.kept()) == [9, 1, 2, 3]


def test_a_live_replicas_segments_are_its_own(disk: Disk) -> None:
    disk.leave("replica-1", 1)
    with held(disk.root / "replica-0"):
        journal = Journal(disk.root / "replica-0", f"{disk.url}/records/d", "replica-0", {"deployment": "d"})
        journal.start()
        journal.add(lambda: {"kind": "turn", "value": 5})
        while not journal.stats().durable:
            threading.Event().wait(0.001)
        assert disk.upload(), "a replica that lives is nothing to wait for"
        assert values(disk.kept()) == [1]
        assert len(disk.left("replica-0")) == 1
        journal.close()
    assert values(disk.kept()) == [5, 1]


def test_of_two_that_adopt_at_once_one_uploads(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes back: the first may fail. And a replica of that name can start meanwhile."""
    names = disk.leave("replica-1", 1, 2)
    put: list[str] = []

    def put_slowly(url: str, path: Path) -> None:
        put.append(path.name)
        if len(put) == 1:
            assert not disk.upload()
            with held(disk.root / "replica-1"):
                assert not disk.upload()
        put_file(url, path)

    monkeypatch.setattr(stranded, "put_file", put_slowly)
    assert disk.upload()
    assert put == names
    assert values(disk.kept()) == [1, 2]


def test_whoever_dies_while_it_adopts_loses_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.leave("replica-1", 1, 2)

    def dies(url: str, path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stranded, "put_file", dies)
        with pytest.raises(KeyboardInterrupt):
            disk.upload()
    assert len(disk.left("replica-1")) == 1
    assert disk.upload()
    assert values(disk.kept()) == [1, 2]


def test_a_bucket_that_fails_is_tried_again_until_nothing_is_left(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk.leave("replica-1", 1, 2)
    fails = 2

    def put(url: str, path: Path) -> None:
        nonlocal fails
        if fails:
            fails -= 1
            raise SnapshotError("the bucket is away")
        put_file(url, path)

    monkeypatch.setattr(stranded, "put_file", put)
    monkeypatch.setattr(stranded, "BACKOFF", Backoff(first_s=0.01, last_s=0.01))
    whole = threading.Event()

    def upload() -> bool:
        done = disk.upload()
        if done:
            whole.set()
        return done

    records = StrandedRecords(upload)
    with caplog.at_level(logging.WARNING):
        records.start()
        assert whole.wait(30)
        assert records.settled(30)
        records.close()
    assert values(disk.kept()) == [1, 2]
    assert "the bucket is away" in caplog.text
    assert not records.settled(30), "nobody uploads any more"


def test_a_directory_that_cannot_be_held_keeps_no_other_waiting(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.leave("replica-0", 1)
    disk.leave("replica-1", 2)
    (disk.root / "replica-0" / ".lock").mkdir()
    assert not disk.upload()
    assert values(disk.kept()) == [2]
    assert "replica-0" in caplog.text
    (disk.root / "replica-0" / ".lock").rmdir()
    assert disk.upload()
    assert values(disk.kept()) == [1, 2]


def test_a_file_that_is_no_segment_is_said_and_kept(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.leave("replica-1", 1)
    deep = b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}"
    lines = (b"[1]", b'{"deployment": "../x"}', b"{", b'{"deployment": "\xff"}', deep)
    for name, line in zip("abcde", lines, strict=True):
        (disk.root / "replica-1" / f"{name}.jsonl").write_bytes(line + b"\n")
    with caplog.at_level(logging.ERROR):
        assert disk.upload()
        assert disk.upload()
    assert values(disk.kept()) == [1]
    aside = (disk.root / stranded.ADOPTED).glob("*.unreadable")
    assert {path.name for path in aside} == {f"{name}.jsonl.unreadable" for name in "abcde"}
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 5, "once each"


def test_a_replica_process_holds_the_directory_of_its_records(disk: Disk, tmp_path: Path) -> None:
    spec = ReplicaSpec(
        name="replica-0", host="127.0.0.1", port=0, model_dir="m", model="accounts/a/models/m", deployment="d",
        cache_dir=str(tmp_path / "cache"), token="t", engine=EngineSettings(), log_level="info",
        records=RecordsSettings(bucket=disk.url), records_dir=str(disk.root / "replica-0"),
    )  # fmt: skip
    disk.leave("replica-0", 1)
    with held_directories(spec):
        assert disk.upload()
        assert len(disk.left("replica-0")) == 1
    assert disk.upload()
    assert values(disk.kept()) == [1]


class Recorded(FakeLauncher):
    """Its replicas start at once; notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked: list[str] = []
        self.removed = threading.Event()

    def upload_stranded(self) -> bool:
        self.asked.append("upload")
        return True

    def remove_caches(self, replica: str, others: Set[str]) -> None:
        self.asked.append(f"remove {replica}")
        self.removed.set()


async def test_the_records_of_a_deployment_that_is_deleted_go_up_before_its_files_do(
    disk: Disk, tmp_path: Path
) -> None:
    settings = Settings(
        state_dir=str(tmp_path),
        records=RecordsSettings(bucket=disk.url),
        tinker=TinkerSettings(enabled=False),
    )
    launcher = Recorded()
    models = {"tiny-moe": tmp_path / "models" / "tiny-moe"}
    models["tiny-moe"].mkdir(parents=True)

    def wanted(*deployments: str) -> Wanted:
        replicas = (
            WantedReplica(name=f"{name}-replica-0", deployment=name, model="accounts/a/models/tiny-moe")
            for name in deployments
        )
        return Wanted(tuple(replicas))

    supervisor = Supervisor(settings, "tiny-moe", models, launcher)
    supervisor.records.start()  # type: ignore[union-attr]
    supervisor.replicas.want(wanted("a", "b"))
    # Their tasks have begun.
    await asyncio.to_thread(supervisor.records.settled, 30)  # type: ignore[union-attr]
    launcher.asked.clear()
    supervisor.replicas.want(wanted("a"))
    assert await asyncio.to_thread(launcher.removed.wait, 30)
    await supervisor.close()
    assert "upload" in launcher.asked[: launcher.asked.index("remove b-replica-0")]


def test_a_start_without_records_says_what_waits(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.leave("replica-1", 1, 2)
    with caplog.at_level(logging.WARNING):
        stranded.say_what_waits(disk.root)
        stranded.say_what_waits(disk.root / "nothing")
    (said,) = [record.getMessage() for record in caplog.records if "--records" in record.getMessage()]
    assert "2 files" in said
    assert str(disk.root) in said


def test_a_bucket_of_records_is_not_where_they_wait(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path), records=RecordsSettings(bucket=tmp_path.as_uri()))
    with pytest.raises(ConfigError, match=r"--records: .* is the state directory"):
        records_fields(settings, "replica-0")
    beside = RecordsSettings(bucket=(tmp_path / "kept").as_uri())
    records_fields(Settings(state_dir=str(tmp_path), records=beside), "replica-0")
