"""A copy beside the training: what is published is what the weights were at `begin`, whatever the step does, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from publish_world import World, weights

from midstream.client import PublishError, TrainingRun
from midstream.client.copying import AT_ONCE_BYTES, Copying, _queued
from midstream.client.weights import TensorCopy


class Net(torch.nn.Module):
    """Two large parameters, a small one, and a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.a = torch.nn.Parameter(torch.randn(200, 200, generator=made))
        self.b = torch.nn.Parameter(torch.randn(200, 200, generator=made))
        self.small = torch.nn.Parameter(torch.randn(200, generator=made))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        result: torch.Tensor = x @ self.a @ self.b + self.small
        return result


def now(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def backward(net: Net) -> None:
    net(torch.ones(1, 200)).sum().backward()


def hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks)


def assert_served(world: World, identity: str, state: dict[str, torch.Tensor]) -> None:
    assert world.desired == identity
    assert world.serving is not None
    served = safetensors.torch.load_file(world.serving / "model.safetensors")
    assert sorted(served) == sorted(state)
    assert all(served[name].equal(tensor) for name, tensor in state.items())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


class Gate:
    """No copy is made before it is open. made: one was made since the last `shut`. error: what a copy raises instead."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.made = threading.Event()
        self.error: Exception | None = None

    def shut(self) -> None:
        self.open.clear()
        self.made.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    found, take = Gate(), TensorCopy.take

    def taken(memory: TensorCopy, tensors: Any) -> Any:
        assert found.open.wait(60), "begin waits for the copy"
        if found.error is not None:
            raise found.error
        copy = take(memory, tensors)
        found.made.set()
        return copy

    monkeypatch.setattr(TensorCopy, "take", taken)
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_each_step_waits_until_the_weights_before_it_are_copied(
    world: World, gate: Gate, several: bool, fused: bool
) -> None:
    """Torch counts no change by a fused optimizer, so the hook alone keeps its weights whole."""
    net = Net()
    optimizers = [
        torch.optim.Adam([net.a, net.small], fused=fused),
        torch.optim.SGD([net.b], lr=0.1, fused=fused),
    ]
    if not several:
        optimizers = [torch.optim.Adam(net.parameters(), fused=fused)]
    copied: list[bool] = []
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: gate.open.set())
    with world.publisher(full_every=3) as publisher:
        kinds = []
        for step in range(4):
            gate.shut()
            wanted = now(net)
            publication = publisher.begin(
                f"{step}",
                net.state_dict(),
                config_dir=world.config,
                optimizer=optimizers if several else optimizers[0],
            )
            last = [
                one.register_step_pre_hook(lambda *_: copied.append(gate.made.is_set())) for one in optimizers
            ]
            backward(net)
            assert not gate.made.is_set()
            for optimizer in optimizers:
                optimizer.step()
            assert not net.a.equal(wanted["a"])
            kinds.append(publication.wait(60).kind)
            assert_served(world, f"{step}", wanted)
            for hook in last:
                hook.remove()
    assert kinds == ["full", "delta", "delta", "full"]
    assert copied == [True] * 4 * len(optimizers)
    assert [hooks(optimizer) for optimizer in optimizers] == [1] * len(optimizers)


def test_without_a_step_wait_copied_says_when_weights_may_change(world: World, gate: Gate) -> None:
    net = Net()
    wanted = now(net)
    with world.publisher() as publisher:
        publication = publisher.begin("0", net.state_dict(), config_dir=world.config, optimizer=())
        with pytest.raises(TimeoutError):
            publication.wait_copied(0.01)
        gate.open.set()
        publication.wait_copied()
        assert gate.made.is_set()
        with torch.no_grad():
            net.a.zero_()
        publication.wait(60)
        assert_served(world, "0", wanted)
        at_once = publisher.begin("1", net.state_dict(), config_dir=world.config)
        at_once.wait_copied()
        at_once.wait(60)


def test_what_is_small_may_change_at_once(world: World, gate: Gate) -> None:
    net = Net()
    assert net.small.nbytes < AT_ONCE_BYTES < net.a.nbytes
    wanted = now(net)
    with world.publisher() as publisher:
        publication = publisher.begin("0", net.state_dict(), config_dir=world.config, optimizer=())
        with torch.no_grad():
            net.small.zero_()
            net.seen += 1
        gate.open.set()
        publication.wait(60)
    assert_served(world, "0", wanted)


def test_weights_that_change_before_they_are_copied_are_not_published(world: World, gate: Gate) -> None:
    """An optimizer was not given. The next publication is whole again."""
    net = Net()
    first, second = torch.optim.SGD([net.a], lr=0.1), torch.optim.SGD([net.b], lr=0.1)
    with world.publisher() as publisher:
        publication = publisher.begin("0", net.state_dict(), config_dir=world.config, optimizer=first)
        backward(net)
        second.step()
        gate.open.set()
        with pytest.raises(PublishError, match=r"^tensor b was changed before it was copied"):
            first.step()
        wanted = now(net)
        first.step()
        assert not net.a.equal(wanted["a"]), "the trainer hears of it once"
        for wait in (publication.wait, publication.wait_copied, publication.wait):
            with pytest.raises(PublishError, match="tensor b"):
                wait()
        assert (world.signals, list(world.bucket.iterdir())) == ([], [])
        wanted = now(net)
        publisher.begin("1", net.state_dict(), config_dir=world.config, optimizer=(first, second)).wait(60)
    assert_served(world, "1", wanted)
    assert not list(world.work.glob("checkpoint-*-delta"))
    assert len(list(world.work.glob("checkpoint-*"))) == 1


def fused(net: Net) -> None:
    torch.optim.AdamW([net.b], lr=1e-3, fused=True).step()


def of_data(net: Net) -> None:
    net.b.data.mul_(1.5)


@pytest.mark.parametrize("change", [fused, of_data])
def test_changes_that_torch_does_not_count_are_seen(
    world: World, gate: Gate, change: Callable[[Net], None]
) -> None:
    net = Net()
    with torch.no_grad():
        # Not a number, and yet what it was.
        net.a[0, 0] = torch.nan
    backward(net)
    net.b.grad = torch.ones_like(net.b)
    version = net.b._version
    with world.publisher() as publisher:
        publication = publisher.begin("0", net.state_dict(), config_dir=world.config, optimizer=())
        change(net)
        assert net.b._version == version
        gate.open.set()
        with pytest.raises(PublishError, match=r"^tensor b was changed before it was copied"):
            publication.wait(60)
    assert world.signals == []


@pytest.mark.parametrize("heard", ["step", "wait", "wait_copied"])
def test_a_copy_that_fails_is_raised_in_the_trainer_once(world: World, gate: Gate, heard: str) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gate.error = MemoryError("no room for a copy")
    gate.open.set()
    before = now(net)
    with world.publisher() as publisher:
        publication = publisher.begin("0", net.state_dict(), config_dir=world.config, optimizer=optimizer)
        backward(net)
        with pytest.raises(MemoryError, match="no room"):
            {"step": optimizer.step, "wait": publication.wait, "wait_copied": publication.wait_copied}[
                heard
            ]()
        assert net.a.equal(before["a"])
        optimizer.step()
        assert not net.a.equal(before["a"])
        with pytest.raises(MemoryError, match="no room"):
            publication.wait()
        assert world.signals == []
        gate.error = None
        wanted = now(net)
        publisher.begin("1", net.state_dict(), config_dir=world.config, optimizer=optimizer).wait(60)
    assert_served(world, "1", wanted)


def test_a_failure_after_the_copy_is_not_the_steps(world: World) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    world.away = True
    with world.publisher() as publisher:
        publication = publisher.begin(
            "0", net.state_dict(), config_dir=world.config, optimizer=optimizer, timeout_s=0.01
        )
        with pytest.raises(PublishError):
            publication.wait(60)
        publication.wait_copied()
        backward(net)
        optimizer.step()


def test_tensors_under_other_names_are_refused_by_the_wait(world: World) -> None:
    with world.publisher() as publisher:
        state = {"module.a": torch.zeros(200, 200)}
        publication = publisher.begin("0", state, config_dir=world.config, optimizer=())
        with pytest.raises(ValueError, match="module"):
            publication.wait_copied()
        with pytest.raises(ValueError, match="module"):
            publication.wait()


def test_hooks_stay_until_the_next_publication_or_the_end(world: World, gate: Gate) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gate.open.set()
    with world.publisher() as publisher:
        for name in ("0", "1"):
            publisher.begin(name, net.state_dict(), config_dir=world.config, optimizer=optimizer)
            assert hooks(optimizer) == 1
        publisher.publish("2", net.state_dict(), config_dir=world.config)
        assert hooks(optimizer) == 0
        gate.shut()
        publication = publisher.begin("3", net.state_dict(), config_dir=world.config, optimizer=optimizer)
        with pytest.raises(ValueError, match="adapter: is for a policy"):
            publisher.begin("4", adapter=object())
        assert hooks(optimizer) == 1, "a mistake does not end the publication before"
        gate.open.set()
        publication.wait(60)
    assert hooks(optimizer) == 0


def test_a_publisher_may_close_while_another_thread_steps(world: World, gate: Gate) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    entered = threading.Event()
    optimizer.register_step_pre_hook(lambda *_: entered.set())
    wanted = now(net)
    publisher = world.publisher()
    publisher.begin("0", net.state_dict(), config_dir=world.config, optimizer=optimizer)
    backward(net)
    with ThreadPoolExecutor(2) as threads:
        step = threads.submit(optimizer.step)
        assert entered.wait(60)
        closed = threads.submit(publisher.close)
        gate.open.set()
        closed.result(60)
        step.result(60)
    assert not net.a.equal(wanted["a"])
    assert_served(world, "0", wanted)
    assert hooks(optimizer) == 1
    with pytest.raises(RuntimeError):
        publisher.begin("1", net.state_dict(), config_dir=world.config, optimizer=optimizer)
    optimizer.step()
    publisher.close()
    assert hooks(optimizer) == 1


def test_a_run_may_copy_beside_its_steps(world: World) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    how: dict[str, Any] = {"config_dir": world.config, "optimizer": optimizer}
    with world.publisher() as publisher, TrainingRun(publisher, "run", behind=1, **how) as run:
        for _ in range(3):
            wanted = now(net)
            run.publish(net.state_dict())
            backward(net)
            optimizer.step()
    assert_served(world, "run/2", wanted)


def test_a_model_is_published_as_its_own_files_would_be(
    world: World, gate: Gate, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Its experts are fused in memory, so their tensors in the checkpoint are others than the optimizer's."""
    from transformers import AutoModelForCausalLM

    served = tiny_model(seed=3)
    model = AutoModelForCausalLM.from_pretrained(served)
    model.save_pretrained(tmp_path / "whole")
    wanted = safetensors.torch.load_file(tmp_path / "whole" / "model.safetensors")
    wanted.pop("lm_head.weight", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with world.publisher() as publisher:
        publication = publisher.begin("0", model=model, config_dir=served, optimizer=optimizer)
        model(torch.arange(16)[None], labels=torch.arange(16)[None]).loss.backward()
        gate.open.set()
        optimizer.step()
        publication.wait(60)
    assert world.serving is not None
    found = safetensors.torch.load_file(world.serving / "model.safetensors")
    found.pop("lm_head.weight", None)
    assert sorted(found) == sorted(wanted)
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())
    assert (world.serving / "config.json").read_bytes() == (served / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("given", "how", "words"),
    [
        (
            "torch",
            {"optimizer": object()},
            "optimizer: must be a torch.optim.Optimizer or several, got a object",
        ),
        ("torch", {"optimizer": ["sgd"]}, "got a str"),
        ("numpy", {"optimizer": ()}, "optimizer: is for tensors of torch by name, or a model"),
        ("directory", {"optimizer": ()}, "optimizer: is for tensors of torch by name, or a model"),
        ("model", {"optimizer": ()}, "optimizer: with a model, give config_dir"),
    ],
)
def test_what_cannot_be_copied_beside_the_training_is_refused_at_once(
    world: World, tmp_path: Path, given: str, how: dict[str, Any], words: str
) -> None:
    class Model(Net):
        save_pretrained = None

    config = {} if given == "model" else {"config_dir": world.config}
    value = {"torch": Net().state_dict(), "numpy": weights(0), "directory": tmp_path, "model": None}[given]
    model = {"model": Model()} if given == "model" else {}
    with world.publisher() as publisher, pytest.raises(ValueError, match=words):
        publisher.begin("0", value, **config, **model, **how)
    assert world.signals == []


def test_publish_needs_no_optimizer(world: World) -> None:
    with world.publisher() as publisher, pytest.raises(ValueError, match="optimizer: is for begin"):
        publisher.publish("0", Net().state_dict(), config_dir=world.config, optimizer=())


def test_an_optimizer_of_two_is_left_when_the_other_has_no_hooks(world: World) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with world.publisher() as publisher, pytest.raises(ValueError, match="got a object"):
        publisher.begin("0", net.state_dict(), config_dir=world.config, optimizer=[optimizer, object()])
    assert hooks(optimizer) == 0


def test_a_copy_waits_for_what_its_devices_were_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has another stream, which may run ahead of the trainer's."""
    order: list[str] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            order.append(f"{self.device} is done")

    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=lambda: Event(device))
    )
    devices = [torch.device(name) for name in ("cuda:1", "cpu", "cuda:1")]
    tensors = [SimpleNamespace(device=device, is_cuda=device.type == "cuda") for device in devices]
    copying = Copying({}, ())
    copying._queued = _queued(tensors)
    copying.run(lambda: order.append("copied"))
    assert order == ["cuda:1 is done", "copied"]


def test_a_change_of_any_of_many_tensors_is_seen() -> None:
    """Also where each has few numbers among those that are compared."""
    tensors = {str(n): torch.zeros(128, 128) for n in range(600)}
    assert all(tensor.nbytes >= AT_ONCE_BYTES for tensor in tensors.values())
    for changed in ("1", "599"):
        copying = Copying(tensors, ())
        tensors[changed].data.add_(1)
        with pytest.raises(PublishError, match=f"^tensor {changed} was changed"):
            copying.run(lambda: None)


def test_of_thousands_of_tensors_some_have_their_numbers_compared_and_all_are_counted() -> None:
    """As a checkpoint with experts has them. With one number of each, a copy of bfloat16 ended in an error of torch."""
    one = torch.zeros(AT_ONCE_BYTES // 2, dtype=torch.bfloat16)
    tensors = dict.fromkeys(map(str, range(9_000)), one)
    tensors["1"] = one.clone()
    Copying(tensors, ()).run(lambda: None)
    copying = Copying(tensors, ())
    one.data.add_(1)
    with pytest.raises(PublishError, match=r"^tensor 0 was changed"):
        copying.run(lambda: None)
    copying = Copying(tensors, ())
    tensors["1"].add_(1)
    with pytest.raises(PublishError, match=r"^tensor 1 was changed"):
        copying.run(lambda: None)


def test_a_begin_that_is_refused_keeps_neither_hooks_nor_tensors(world: World) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = net.state_dict()
    with world.publisher() as publisher:
        publisher.begin("0", state, config_dir=world.config, optimizer=optimizer).wait(60)
        with pytest.raises(PublishError, match="already in the bucket"):
            publisher.begin("0", state, config_dir=world.config, optimizer=optimizer)
        assert hooks(optimizer) == 0
        publisher.begin("1", state, config_dir=world.config, optimizer=optimizer).wait(60)
