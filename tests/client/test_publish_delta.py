"""Full and delta snapshots: which is sent when, what arrives, and what a trainer that died leaves to the next one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from publish_world import World, listening, weights

from midstream.client import NotReadyInTime, PublishError, SnapshotFailed, SnapshotPublisher, publication
from midstream.client.errors import SignalRefused
from midstream.client.weights import write_weights
from midstream.snapshots.content import MANIFEST_FILE
from midstream.snapshots.layout import read_spec


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def url(world: World) -> Iterator[str]:
    with listening(world) as address:
        yield address


def snapshot_files(directory: Path) -> list[Path]:
    """All but the manifest."""
    return [path for path in directory.iterdir() if path.name != MANIFEST_FILE]


def assert_served(world: World, identity: str, tensors: dict[str, Any]) -> None:
    assert world.desired == identity
    served = world.served()
    assert sorted(served) == sorted(tensors)
    for name, values in tensors.items():
        assert served[name].tobytes() == values.tobytes(), name


def test_every_kth_snapshot_is_full_and_the_others_are_deltas_of_the_one_before(world: World) -> None:
    with world.publisher(full_every=3) as publisher:
        done = []
        for step in range(7):
            done.append(publisher.publish(f"step-{step}", weights(step), config_dir=world.config))
            assert_served(world, f"step-{step}", weights(step))
    assert [p.kind for p in done] == ["full", "delta", "delta", "full", "delta", "delta", "full"]
    assert [p.previous for p in done[:4]] == [None, "step-0", "step-1", None]
    assert "incremental_snapshot_metadata" not in world.signals[0]
    assert world.signals[1]["incremental_snapshot_metadata"] == {
        "previous_snapshot_identity": "step-0",
        "compression_format": "arc_v2",
        "checksum_format": "alder32",
    }
    full, delta = done[0], done[1]
    assert (
        full.bytes_sent
        == full.bytes_whole
        == sum(f.stat().st_size for f in snapshot_files(world.bucket / "step-0"))
    )
    assert delta.bytes_sent == sum(f.stat().st_size for f in snapshot_files(world.bucket / "step-1"))
    assert delta.bytes_sent < full.bytes_sent / 5
    assert done[3].why == "every 3 snapshots"


def test_full_every_one_sends_no_deltas(world: World) -> None:
    with world.publisher(full_every=1) as publisher:
        kinds = [publisher.publish(f"{i}", weights(i), config_dir=world.config).kind for i in range(3)]
    assert kinds == ["full"] * 3
    with pytest.raises(ValueError, match="full_every must be at least 1, got 0"):
        world.publisher(full_every=0)


def test_a_directory_and_tensors_may_follow_each_other(world: World, tmp_path: Path) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        write_weights(checkpoint, weights(1))
        (checkpoint / "config.json").write_text('{"model_type": "x"}')
        assert publisher.publish("1", checkpoint).kind == "delta"
        # The trainer goes on.
        safetensors.numpy.save_file(weights(9), checkpoint / "model.safetensors")
        assert publisher.publish("2", weights(2), config_dir=world.config).kind == "delta"
    assert_served(world, "2", weights(2))


def test_only_the_last_checkpoint_stays_on_disk(world: World) -> None:
    with world.publisher() as publisher:
        for step in range(3):
            publisher.publish(f"{step}", weights(step), config_dir=world.config)
        assert sorted(p.name.partition("-")[0] for p in world.work.iterdir()) == [
            "checkpoint", "lock", "parent.json",
        ]  # fmt: skip


def test_without_a_work_directory_deltas_still_work_and_nothing_is_left(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with world.publisher(work_dir=None) as publisher:
        assert publisher.publish("0", weights(0), config_dir=world.config).kind == "full"
        assert publisher.publish("1", weights(1), config_dir=world.config).kind == "delta"
        assert len(list(scratch.iterdir())) == 1
    assert list(scratch.iterdir()) == []


# --- going on after something happened ---


def test_a_restarted_publisher_goes_on_with_deltas(world: World) -> None:
    with world.publisher(full_every=3) as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        publisher.publish("1", weights(1), config_dir=world.config)
    with world.publisher(full_every=3) as publisher:
        assert publisher.publish("2", weights(2), config_dir=world.config).kind == "delta"
        assert_served(world, "2", weights(2))
        assert publisher.publish("3", weights(3), config_dir=world.config).kind == "full"


@pytest.mark.parametrize(
    "happened",
    [
        "ledger reset",
        "another trainer's snapshot",
        "the same name again",
        "another server",
        "state unreadable",
    ],
)
def test_in_doubt_the_next_snapshot_is_full(world: World, happened: str) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        publisher.publish("1", weights(1), config_dir=world.config)
    match happened:
        case "ledger reset":
            world.reset()
        case "another trainer's snapshot":
            world.desired, world.generation = "theirs", world.generation + 1
        case "the same name again":
            world.generation += 1
        case "state unreadable":
            (world.work / "parent.json").write_text("{")
    kwargs = {"deployment": "other"} if happened == "another server" else {}
    with world.publisher(**kwargs) as publisher:
        assert publisher.publish("2", weights(2), config_dir=world.config).kind == "full"
        assert_served(world, "2", weights(2))
        assert publisher.publish("3", weights(3), config_dir=world.config).kind == "delta"
        assert_served(world, "3", weights(3))


def test_after_a_failed_delta_the_next_is_full_by_itself(world: World) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        world.fail = "1"
        with pytest.raises(SnapshotFailed, match="r0 could not load snapshot '1': Adler-32 differs"):
            publisher.publish("1", weights(1), config_dir=world.config)
        assert "incremental_snapshot_metadata" in world.signals[-1]
        done = publisher.publish("2", weights(2), config_dir=world.config)
        assert (done.kind, done.why) == ("full", "there is no snapshot to make a delta against")
        assert publisher.publish("3", weights(3), config_dir=world.config).kind == "delta"
    assert_served(world, "3", weights(3))


def test_a_delta_that_failed_unseen_is_followed_by_a_full_one(world: World) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        broken = world.status
        world.status = lambda: {"replicas": []}  # type: ignore[method-assign]
        world.fail = "1"
        with pytest.raises(NotReadyInTime):
            publisher.publish("1", weights(1), config_dir=world.config, kind="full", timeout_s=0.0)
        world.status = broken  # type: ignore[method-assign]
        done = publisher.publish("2", weights(2), config_dir=world.config)
    assert (done.kind, done.why) == ("full", "the server does not stand on '1'")
    assert_served(world, "2", weights(2))


def test_a_refused_delta_is_sent_again_as_a_full_snapshot(world: World) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        world.refuse_deltas = True
        done = publisher.publish("1", weights(1), config_dir=world.config)
        assert done.kind == "full"
        assert "400 previous_snapshot_identity is not served" in done.why
        assert_served(world, "1", weights(1))
        with pytest.raises(SignalRefused, match="400 previous_snapshot_identity is not served"):
            publisher.publish("2", weights(2), config_dir=world.config, kind="delta")
        assert world.desired == "1"


def test_a_full_chain_is_waited_for_only_by_a_delta_that_was_asked_for(world: World) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        world.rebases_pending = 3
        assert publisher.publish("1", weights(1), config_dir=world.config, kind="delta").kind == "delta"
        assert world.rebases_pending == 0
        world.rebases_pending = 3
        # A full snapshot is there at once, and nobody says when a replica has written its own.
        done = publisher.publish("2", weights(2), config_dir=world.config)
        assert (done.kind, world.rebases_pending) == ("full", 2)
        assert "503 at most 64 are allowed" in done.why
        assert_served(world, "2", weights(2))


def test_a_delta_that_cannot_be_is_an_error_only_when_it_was_asked_for(world: World) -> None:
    def changed(**tensors: Any) -> dict[str, Any]:
        return weights(1) | tensors

    with world.publisher() as publisher:
        with pytest.raises(
            PublishError, match="'0' cannot be a delta: there is no snapshot to make a delta against"
        ):
            publisher.publish("0", weights(0), config_dir=world.config, kind="delta")
        publisher.publish("0", weights(0), config_dir=world.config)
        for other in (
            changed(c=np.zeros(1)),
            changed(a=np.zeros(4999, np.float32)),
            changed(a=np.zeros(5000, np.int32)),
        ):
            with pytest.raises(PublishError, match="'1' cannot be a delta: names, shapes, dtypes or files"):
                publisher.publish("1", other, config_dir=world.config, kind="delta")
        assert world.desired == "0"
        assert not (world.bucket / "1").exists()
        assert publisher.publish("1", changed(c=np.zeros(1)), config_dir=world.config).kind == "full"


def test_a_delta_that_is_no_smaller_than_the_whole_is_not_sent(world: World) -> None:
    noise = [{"a": np.frombuffer(np.random.default_rng(i).bytes(4000), np.int32).copy()} for i in range(2)]
    with world.publisher() as publisher:
        publisher.publish("0", noise[0], config_dir=world.config)
        done = publisher.publish("1", noise[1], config_dir=world.config)
    assert (done.kind, done.why) == ("full", "a delta would not be smaller")
    assert_served(world, "1", noise[1])


@pytest.mark.parametrize("how", ["tensors", "directory", "cast", "background", "write_full"])
@pytest.mark.parametrize("before", [0, 1])
def test_weights_that_are_not_finite_are_refused_before_they_are_uploaded(
    world: World, how: str, before: int
) -> None:
    """Full or delta. The next snapshot stands on the one before."""
    states = [weights(step) for step in range(2)]
    bad = {name: array.copy() for name, array in states[1].items()}
    bad["b"][7] = np.finfo(np.float32).max if how == "cast" else np.nan
    number = "infinity" if how == "cast" else "NaN"
    says = rf"^snapshot 'bad' is not published: tensor b is {number} at index \[7\] \(model\.safetensors\)$"
    options: dict[str, Any] = {"dtype": "bfloat16"} if how == "cast" else {}
    directory = world.root / "whole"
    shutil.copytree(world.config, directory)
    write_weights(directory, bad)

    def publish(publisher: SnapshotPublisher, bad: dict[str, Any]) -> None:
        if how == "directory":
            publisher.publish("bad", directory)
        elif how == "background":
            publisher.begin("bad", bad, config_dir=world.config).wait(30)
        elif how == "write_full":
            publisher.write_full("bad", bad, config_dir=world.config)
        else:
            publisher.publish("bad", bad, config_dir=world.config, **options)

    with world.publisher() as publisher:
        if before:
            publisher.publish("0", states[0], config_dir=world.config, **options)
        there, signals = sorted(world.bucket.iterdir()), len(world.signals)
        with pytest.raises(PublishError, match=says):
            publish(publisher, bad)
        assert (sorted(world.bucket.iterdir()), len(world.signals)) == (there, signals)
        done = publisher.publish("1", states[1], config_dir=world.config, **options)
    assert done.kind == ("delta" if before else "full")


def test_replacing_a_snapshot_is_never_a_delta(world: World) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        publisher.publish("1", weights(1), config_dir=world.config)
        for name in ("1", "0"):
            done = publisher.publish(name, weights(2), config_dir=world.config, overwrite=True)
            assert done.kind == "full"
            assert_served(world, name, weights(2))


def test_two_publishers_cannot_share_a_work_directory(world: World) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        with (
            world.publisher() as second,
            pytest.raises(PublishError, match="is used by another publisher"),
        ):
            second.publish("1", weights(1), config_dir=world.config)
    with world.publisher() as third:
        third.publish("1", weights(1), config_dir=world.config)


# --- in the background ---


def test_training_goes_on_with_other_weights_while_a_snapshot_is_published(world: World) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        live = weights(1)
        world.open.clear()
        first = publisher.begin("1", live, config_dir=world.config)
        for values in live.values():
            # The next update.
            values += 1
        assert not first.done()
        with pytest.raises(TimeoutError):
            first.wait(0.01)
        world.open.set()
        assert first.wait(120).kind == "delta"
        assert_served(world, "1", weights(1))
        assert first.done()


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No weights of a copy are written before it is set."""
    write, event = publication.write_weights, threading.Event()

    def written_late(*args: Any) -> None:
        assert event.wait(60), "begin waits for the files"
        write(*args)

    monkeypatch.setattr(publication, "write_weights", written_late)
    return event


def test_tensors_of_torch_are_copied_in_memory_and_written_beside_the_training(
    world: World, may_write: threading.Event
) -> None:
    with world.publisher() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
        for step in (1, 2):
            may_write.clear()
            live = {name: torch.from_numpy(values) for name, values in weights(step).items()}
            begun = publisher.begin(f"{step}", live, config_dir=world.config)
            for tensor in live.values():
                tensor.zero_()
            assert not begun.done()
            may_write.set()
            assert begun.wait(60).kind == "delta"
            assert_served(world, f"{step}", weights(step))


def test_the_configuration_may_go_once_begin_has_returned(
    world: World, may_write: threading.Event, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    shutil.copytree(world.config, scratch)
    live = {name: torch.from_numpy(values) for name, values in weights(0).items()}
    with world.publisher() as publisher:
        begun = publisher.begin("0", live, config_dir=scratch)
        shutil.rmtree(scratch)
        may_write.set()
        assert begun.wait(60).kind == "full"
    assert_served(world, "0", weights(0))


def test_begin_refuses_tensors_under_other_names_at_once(world: World) -> None:
    with world.publisher() as publisher, pytest.raises(ValueError, match="module"):
        publisher.begin("1", {"module.a": torch.zeros(2)}, config_dir=world.config)


def test_a_publication_waits_for_the_one_before_and_only_its_own_waiter_gets_its_failure(
    world: World,
) -> None:
    with world.publisher() as publisher:
        world.fail = "0"
        failing = publisher.begin("0", weights(0), config_dir=world.config)
        second = publisher.begin("1", weights(1), config_dir=world.config)
        assert failing.done()
        assert second.wait(120).kind == "full"
        with pytest.raises(SnapshotFailed):
            failing.wait()
    assert [body["identity"] for body in world.signals] == ["0", "1"]


def test_phases_and_statuses_are_told_as_they_come(world: World) -> None:
    told: list[str] = []
    with world.publisher() as publisher:
        for step in range(2):
            publisher.publish(
                f"{step}",
                weights(step),
                config_dir=world.config,
                on_phase=told.append,
                on_status=lambda status: told.append(str(status)),
            )
    assert told == [
        "writing", "uploading", "loading", "r0 is on 0 (done)",
        "writing", "encoding", "uploading", "loading", "r0 is on 1 (done)",
    ]  # fmt: skip


def test_what_a_signal_says_is_what_was_asked_for(world: World) -> None:
    with world.publisher() as publisher:
        publisher.publish(
            "0",
            weights(0),
            config_dir=world.config,
            reset_prompt_cache={"max_age": 3},
            extra_fields_ignore=["rope_theta"],
        )
        world.refuse_deltas = True
        with pytest.raises(SignalRefused):
            publisher.snapshots.signal("1", previous="0", compression="arc_v1")
    assert world.signals[0] == {
        "identity": "0",
        "reset_prompt_cache": {"max_age": 3},
        "validation": {"extra_fields_ignore": ["rope_theta"]},
    }
    assert world.signals[1]["incremental_snapshot_metadata"]["compression_format"] == "arc_v1"


# --- a trainer that dies ---

DIES = """
import os, sys
import numpy as np
from midstream.client import SnapshotPublisher
from midstream.client import bucket, parent, publication, snapshot_calls

url, bucket_dir, work, config, weights, where = sys.argv[1:]

def die_before(owner, name):
    setattr(owner, name, lambda *a, **k: os._exit(9))

def die_after(owner, name):
    real = getattr(owner, name)
    def dying(*a, **k):
        real(*a, **k)
        os._exit(9)
    setattr(owner, name, dying)

match where:
    case "weights written": die_before(publication.ToBucket, "run")
    case "delta encoded": die_after(publication, "encode_delta")
    case "files half in the bucket": die_after(bucket.shutil, "copyfile")
    case "files in the bucket": die_before(snapshot_calls.SnapshotCalls, "signal")
    case "signal taken": die_before(parent.WorkDirectory, "keep")
    case "parent half remembered": die_before(parent.os, "replace")
    case "parent remembered": die_before(snapshot_calls.SnapshotCalls, "wait_until_ready")
publisher = SnapshotPublisher(url, bucket_dir, work_dir=work)
publisher.publish("1", dict(np.load(weights)), config_dir=config)
"""


@pytest.mark.parametrize(
    ("where", "taken", "next_kind"),
    [
        ("weights written", False, "delta"),
        ("delta encoded", False, "delta"),
        ("files half in the bucket", False, "delta"),
        ("files in the bucket", False, "delta"),
        ("signal taken", True, "full"),
        ("parent half remembered", True, "full"),
        ("parent remembered", True, "delta"),
    ],
)
def test_a_trainer_may_die_anywhere(
    world: World, url: str, tmp_path: Path, where: str, taken: bool, next_kind: str
) -> None:
    make: Callable[[], SnapshotPublisher] = lambda: SnapshotPublisher(  # noqa: E731
        url, str(world.bucket), work_dir=world.work
    )
    with make() as publisher:
        publisher.publish("0", weights(0), config_dir=world.config)
    np.savez(tmp_path / "w.npz", **weights(1))
    arguments = [url, world.bucket, world.work, world.config, tmp_path / "w.npz", where]
    died = subprocess.run([sys.executable, "-c", DIES, *map(str, arguments)], timeout=60)
    assert died.returncode == 9
    assert_served(world, "1" if taken else "0", weights(1 if taken else 0))
    visible = [p.name for p in world.bucket.iterdir() if not p.name.startswith(".")]
    assert sorted(visible) in (["0"], ["0", "1"])
    if "1" in visible:
        assert read_spec_names(world.bucket / "1") == ["a", "b"]
    with make() as publisher:
        assert publisher.publish("2", weights(2), config_dir=world.config).kind == next_kind
        assert_served(world, "2", weights(2))
        assert len(list(world.work.glob("checkpoint-*"))) == 1


def read_spec_names(directory: Path) -> list[str]:
    return sorted(read_spec(directory).tensors)
