"""Publishing adapters to a policy: what is written, what is signalled, what is refused before anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from publish_world import World, listening, weights

from midstream import cli
from midstream.client import PublishError, SnapshotPublisher
from midstream.commands.status import POLICY_HEADS, render
from midstream.snapshots.content import MANIFEST_FILE
from midstream.snapshots.rebuild import rebuild

WRITTEN = ["adapter_config.json", "adapter_model.safetensors", MANIFEST_FILE]


class Adapter:
    """As PEFT's models: it has several adapters, and writes those with names of their own into directories."""

    def __init__(self, active: Any = "default") -> None:
        self.active_adapter = active
        self.peft_config = {"default": object(), "other": object()}

    def save_pretrained(self, directory: str, safe_serialization: bool, selected_adapters: list[str]) -> None:
        (name,) = selected_adapters
        write_adapter(Path(directory) / ("" if name == "default" else name), value=len(name))


def write_adapter(directory: Path, value: float = 1.0, numbers: Any = None) -> Path:
    directory.mkdir(exist_ok=True)
    weights = np.full((2, 3), value, np.float32) if numbers is None else np.ascontiguousarray(numbers)
    tensors = {"base_model.model.q.lora_A.weight": weights}
    safetensors.numpy.save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    (directory / "README.md").write_text("PEFT writes one")
    (directory / "optimizer.safetensors").write_bytes(b"of the trainer")
    return directory


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_adapter_of_a_number_that_is_not_finite_is_not_published(world: World) -> None:
    numbers = np.ones((2, 3), np.float32)
    numbers[1, 2] = np.inf
    directory = write_adapter(world.root / "adapter", numbers=numbers)
    says = r"^snapshot 'red-1' is not published: tensor base_model\.model\.q\.lora_A\.weight is infinity at index \[1, 2\]"
    with world.publisher(policy="red") as publisher, pytest.raises(PublishError, match=says):
        publisher.publish("red-1", directory)
    assert list(world.bucket.iterdir()) == []
    assert world.signals == []


def files(world: World, identity: str) -> list[str]:
    return sorted(file.name for file in (world.bucket / identity).iterdir())


@pytest.mark.parametrize("how", ["directory", "model", "background", "publishers"])
def test_an_adapter_is_written_whole_and_signalled_to_its_policy(world: World, how: str) -> None:
    adapter = Adapter()
    directory = write_adapter(world.root / "adapter", value=7.0)
    given = adapter if how == "publishers" else None
    with world.publisher(policy="red", adapter=given) as publisher:
        if how == "directory":
            done = publisher.publish("red-1", directory)
        elif how == "model":
            done = publisher.publish("red-1", adapter=adapter)
        elif how == "background":
            done = publisher.begin("red-1", adapter=adapter).wait(30)
        else:
            done = publisher.publish("red-1")
    assert files(world, "red-1") == WRITTEN
    assert (done.kind, done.why) == ("full", "there is no snapshot to make a delta against")
    assert [signal["policy"] for signal in world.signals] == ["red"]
    assert set(world.asked) == {"policy=red"}
    assert world.hints == []
    (kept,) = world.work.glob("checkpoint-*")
    assert sorted(file.name for file in kept.iterdir()) == WRITTEN[:2]


def test_the_active_adapter_of_several_is_taken(world: World) -> None:
    with world.publisher(policy="red") as publisher:
        publisher.publish("red-1", adapter=Adapter("other"))
        with pytest.raises(ValueError, match=r"\['a', 'b'\] are active; set one"):
            publisher.publish("red-2", adapter=Adapter(["a", "b"]))
    found = safetensors.numpy.load_file(world.bucket / "red-1" / "adapter_model.safetensors")
    assert found["base_model.model.q.lora_A.weight"][0, 0] == len("other")
    assert not (world.bucket / "red-2").exists()


def test_an_adapter_that_changed_a_little_is_a_delta_and_one_of_another_rank_is_whole(world: World) -> None:
    numbers = np.random.default_rng(1).normal(size=(16, 4096)).astype(np.float32)
    kinds = []
    with world.publisher(policy="red") as publisher:
        for step, rows in enumerate((16, 16, 8)):
            directory = write_adapter(world.root / "adapter", numbers=numbers[:rows])
            kinds.append(publisher.publish(f"red-{step}", directory).kind)
            numbers[:, ::100] += 1
        with pytest.raises(PublishError, match="cannot be a delta: names, shapes, dtypes or files"):
            publisher.publish("red-3", write_adapter(world.root / "other", numbers=numbers), kind="delta")
    assert kinds == ["full", "delta", "full"]
    stood_on = [signal.get("incremental_snapshot_metadata", {}) for signal in world.signals]
    assert [link.get("previous_snapshot_identity") for link in stood_on] == [None, "red-0", None]
    rebuild(world.bucket / "red-0", world.bucket / "red-1", world.root / "out", "arc_v2")
    found = safetensors.numpy.load_file(world.root / "out" / "adapter_model.safetensors")
    expected = numbers.copy()
    expected[:, ::100] -= 2
    assert np.allclose(found["base_model.model.q.lora_A.weight"], expected)


def test_what_is_no_adapter_is_refused_before_anything_is_written(world: World) -> None:
    cut = write_adapter(world.root / "cut")
    tensors = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(tensors[:-1])
    pickled = write_adapter(world.root / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with world.publisher(policy="red") as publisher:
        for directory in (cut, pickled, world.config):
            with pytest.raises(PublishError, match="would not be whole"):
                publisher.publish("red-1", directory)
            with pytest.raises(PublishError, match="would not be whole"):
                publisher.write_full("red-1", directory)
        with pytest.raises(ValueError, match="a policy takes no tensors"):
            publisher.publish("red-1", weights(0))
        with pytest.raises(ValueError, match="a policy takes no model"):
            publisher.publish("red-1", model=object())
        with pytest.raises(ValueError, match="must be a PEFT model"):
            publisher.publish("red-1", adapter=object())
        with pytest.raises(ValueError, match="either the directory of an adapter"):
            publisher.publish("red-1")
    assert list(world.bucket.iterdir()) == []
    assert world.signals == []


def test_an_adapter_without_a_policy_is_refused(world: World) -> None:
    directory = write_adapter(world.root / "adapter")
    with pytest.raises(ValueError, match="give its name as policy"):
        SnapshotPublisher("http://server", str(world.bucket), adapter=Adapter())
    with world.publisher() as publisher:
        with pytest.raises(PublishError, match="is an adapter: name the policy"):
            publisher.publish("red-1", directory)
        with pytest.raises(ValueError, match="give the publisher its name as policy"):
            publisher.publish("red-1", adapter=Adapter())
    assert list(world.bucket.iterdir()) == []


def test_an_adapter_is_published_from_a_shell_and_leaves_what_deltas_stand_on(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world.root)
    kept = world.root / ".midstream" / "publish" / "checkpoint-0"
    kept.mkdir(parents=True)
    with listening(world) as address:
        server = ("--server", address)
        adapter = str(write_adapter(world.root / "red-7"))
        code = cli.main(["publish", "--adapter", adapter, "--policy", "red", *server])
        out, err = capsys.readouterr()
        assert (code, "published red-7: full" in out) == (0, True), err
        for arguments in (
            ["--adapter", adapter],
            [adapter, "--policy", "red"],
            [],
            [adapter, "--adapter", adapter],
        ):
            assert cli.main(["publish", *arguments, *server]) == 2
    assert files(world, "red-7") == WRITTEN
    assert [signal["policy"] for signal in world.signals] == ["red"]
    assert kept.is_dir()


def test_status_shows_each_policy_with_its_snapshots(world: World) -> None:
    def row(replica: str, snapshot: str, stage: str = "done", error: str | None = None) -> dict[str, Any]:
        return {
            "current_snapshot_identity": snapshot,
            "readiness": stage == "done",
            "loading_state": {"stage": stage, "target_snapshot_identity": "red-2"},
            "midstream": {"replica": replica, "error": error},
        }

    red = [row("r0", "red-2"), row("r1", "red-1", "error", "r is 4")]
    blue = [{**row(name, "red-2")} for name in ("r1", "r0")]
    policies = [
        {"policy": "blue", "snapshot": "red-2", "frozen": True, "state": "READY", "replicas": blue},
        {"policy": "red", "snapshot": "red-2", "frozen": False, "state": "READY", "replicas": red},
    ]
    world.policies = policies
    with world.publisher() as publisher:
        shown = render(
            publisher.snapshots.status(),
            {},
            publisher.server.deployments.policies("accounts/a/deployments/d"),
        )
    lines = [line.split() for line in shown.partition("\n\n")[2].splitlines()]
    assert lines == [
        [head for head in POLICY_HEADS if head],
        ["blue", "red-2", "done", "r0,", "r1", "frozen"],
        ["red", "red-2", "done", "r0"],
        ["red", "red-1", "error", "red-2", "r1", "r", "is", "4"],
    ]
