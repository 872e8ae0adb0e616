"""vLLM's own factory, client and source push weights with the backend of midstream. No vLLM server runs here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "client"))

from publish_world import listening
from trainer_push_world import Peers, PushWorld, push_world, refused, tensors_of

SOURCE = Path(__file__).parents[2] / "src"
Trainer = Callable[[PushWorld], AbstractContextManager[Any]]
TRAINER = Path(__file__).with_name("push_trainer.py")


@pytest.fixture(scope="module")
def peers(vllm_python: Path) -> Iterator[Peers]:
    kept = Peers()
    yield kept
    kept.close()


@contextmanager
def running(python: Path, world: PushWorld) -> Iterator[Any]:
    """ask(order, **arguments) -> its answer."""
    with listening(world) as url:
        process = subprocess.Popen(
            [str(python), str(TRAINER), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def answer() -> dict[str, Any]:
            while not (line := process.stdout.readline()).startswith("{"):
                assert line, "the trainer has ended"
            found: dict[str, Any] = json.loads(line)
            return found

        def ask(order: str, **arguments: Any) -> dict[str, Any]:
            process.stdin.write(json.dumps({"order": order, **arguments}) + "\n")
            process.stdin.flush()
            return answer()

        try:
            answer()
            yield ask
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def trainer(vllm_python: Path) -> Trainer:
    return lambda world: running(vllm_python, world)


def wanted() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    made = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7, dtype=torch.bfloat16))
    named = {name: tensor.detach() for name, tensor in made.named_parameters()}
    return {"scale": torch.tensor(0.5), **named}


def test_vllms_own_classes_push_to_every_replica(peers: Peers, trainer: Trainer) -> None:
    with push_world(peers, 2) as world, trainer(world) as ask:
        # Pieces of 100 bytes cut across all tensors.
        answer = ask("init", rank=0, packed_buffer_size_bytes=100)
        assert "error" not in answer
        assert world.rendezvous["key"] not in answer["repr"]
        assert "error" not in ask("send", weight_version="step-1")
        assert "error" not in ask("send")
        assert [name for name, _ in world.served] == ["step-1", "update-000001-push"]
        for data in (one for _, received in world.served for one in received):
            found = tensors_of(world.sent, data)
            assert found.keys() == wanted().keys()
            assert all(found[name].equal(tensor) for name, tensor in wanted().items())
        assert "error" not in ask("shutdown")
        assert world.calls[-1] == "shutdown_weight_transfer_engine"


def test_tensors_go_one_by_one_where_they_are_not_packed(peers: Peers, trainer: Trainer) -> None:
    with push_world(peers, 1) as world, trainer(world) as ask:
        ask("init", rank=0, packed=False)
        ask("send", weight_version="step-1")
        assert tensors_of(world.sent, world.served[0][1][0]).keys() == wanted().keys()


def test_another_rank_sends_nothing(peers: Peers, trainer: Trainer) -> None:
    with push_world(peers, 1) as world, trainer(world) as ask:
        assert "error" not in ask("init", rank=1)
        assert "error" not in ask("send")
        assert "error" not in ask("shutdown")
        assert world.calls == ["get_world_size"]


def test_a_refused_update_ends_the_send_with_the_servers_words(peers: Peers, trainer: Trainer) -> None:
    def before(name: str) -> httpx.Response | None:
        return refused(400, "tensor 0.weight is not in the model") if name == "update_weights" else None

    with push_world(peers, 1) as world, trainer(world) as ask:
        world.before = before
        ask("init", rank=0)
        answer = ask("send")
        assert answer["error"].startswith("HTTPError: 400")
        assert "tensor 0.weight is not in the model" in answer["notes"][0]
        assert "the group has ended" in ask("send")["error"]
        world.before = lambda _: None
        assert "error" not in ask("init", rank=0)
        assert "error" not in ask("send")
        assert world.serving == "update-000001-push"
