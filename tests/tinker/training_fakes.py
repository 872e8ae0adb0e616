"""A trainer process and a way into the deployment that do what they are told, and Training between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np

from midstream_tinker.adapters import SamplerAdapters
from midstream_tinker.futures import Future, Futures
from midstream_tinker.loaded import TrainerPort
from midstream_tinker.samplers import Samplers
from midstream_tinker.store import Store
from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.process import TrainerDied
from midstream_tinker.trainer.types import (
    AdamParams,
    Datum,
    ForwardBackward,
    LoraConfig,
    LossOutputs,
    Tensor,
    WorkFailed,
)
from midstream_tinker.training import Limits, Training
from midstream_tinker.types import CreateModelBody, OptimStepBody, Served
from midstream_tinker.weights import CheckpointPlaces

TENANT = "tenant"
BASE = "Qwen/Qwen3-8B-Base"
INFO = m.TrainerInfo(model_type="fake", vocab_size=10, max_positions=64, moe_layers=0, top_k=0, experts=0)


class FakeTrainer:
    """Writes what it is told to into real directories; a model's weights are the losses and steps it has seen.

    before: called with each command before it is carried out; it may wait, or raise. die: ends the process.
    """

    def __init__(self) -> None:
        self.running = False
        self.starts = 0
        self.said: list[m.Command] = []
        self.weights: dict[str, list[str]] = {}
        self.before: Callable[[Any], Any] | None = None

    def die(self) -> None:
        self.running = False
        self.weights.clear()

    async def start(self) -> m.TrainerInfo:
        self.running = True
        self.starts += 1
        return INFO

    async def close(self) -> None:
        self.die()

    async def call(self, command: Any) -> Any:
        if self.before is not None and (waiting := self.before(command)) is not None:
            await waiting
        if not self.running:
            raise TrainerDied("the trainer process was killed")
        self.said.append(command)
        return self._carry_out(command)

    def _carry_out(self, command: Any) -> Any:
        match command:
            case m.CreateModel(model_id, lora):
                assert model_id not in self.weights
                self.weights[model_id] = []
                return m.ModelState(model_id, lora, 1, 0)
            case m.LoadState(model_id, directory, _):
                self.weights[model_id] = json.loads((Path(directory) / "state.json").read_text())
                return m.ModelState(model_id, LoraConfig(), 1, 0)
            case m.DropModel(model_id):
                self.weights.pop(model_id, None)
                return m.TrainerDone()
            case m.RunForwardBackward(request):
                if request.loss_fn == "nonsense":
                    raise WorkFailed("the loss 'nonsense' is not known here")
                self.weights[request.model_id].append(f"loss {request.seq_id}")
                return m.LossReply(LossOutputs(outputs=(logprobs(-1.5),), metrics={"loss:sum": 1.5}))
            case m.OptimStep(model_id, adam):
                self.weights[model_id].append(f"step {adam.learning_rate:g}")
                return m.Metrics({"grad_norm:mean": 2.0})
            case m.SaveState(model_id, directory) | m.ExportWeights(model_id, directory):
                Path(directory).mkdir(parents=True, exist_ok=True)
                (Path(directory) / "state.json").write_text(json.dumps(self.weights[model_id]))
                return m.Written(7)
        raise AssertionError(command)


class FakePublish:
    """bucket: what was put there, by identity. serving: what the replicas serve, in that order, with the keys."""

    def __init__(self) -> None:
        self.bucket: dict[str, list[str]] = {}
        self.serving: list[tuple[str, str | None]] = []
        self.adapters: set[str] = set()
        self.gate: asyncio.Event | None = None
        self.failure: WorkFailed | None = None

    async def publish(self, identity: str, directory: Path, api_key: str | None) -> None:
        await self._may_go_on()
        self.bucket[identity] = json.loads((directory / "state.json").read_text())
        self.serving.append((identity, api_key))

    async def keep(self, identity: str, directory: Path) -> None:
        await self._may_go_on()
        self.bucket[identity] = json.loads((directory / "state.json").read_text())

    async def serve(self, identity: str, api_key: str | None) -> None:
        await self._may_go_on()
        assert identity in self.bucket
        self.serving.append((identity, api_key))

    async def _may_go_on(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure

    async def put_adapter(self, identity: str, directory: Path) -> None:
        await self.keep(identity, directory)
        self.adapters.add(identity)

    async def holds_adapter(self, identity: str) -> bool:
        return identity in self.adapters

    async def remove(self, identity: str) -> None:
        del self.bucket[identity]


class FakePolicies:
    """loaded: policy to snapshot. said: every load and end, in their order, as (what, policy).

    most: the most that were there at once, ever. before: called with each call before it is carried out; it may wait, or raise.
    """

    def __init__(self, several: bool = True) -> None:
        self._several = several
        self.loaded: dict[str, str] = {}
        self.said: list[tuple[str, str]] = []
        self.most = 0
        self.before: Callable[[str, str], Any] | None = None

    async def several(self) -> bool:
        return self._several

    async def known(self) -> list[str]:
        return list(self.loaded)

    async def load(self, policy: str, snapshot: str) -> None:
        await self._say("load", policy)
        self.loaded[policy] = snapshot
        self.most = max(self.most, len(self.loaded))

    async def end(self, policy: str) -> None:
        await self._say("end", policy)
        self.loaded.pop(policy, None)

    async def _say(self, what: str, policy: str) -> None:
        self.said.append((what, policy))
        if self.before is not None and (waiting := self.before(what, policy)) is not None:
            await waiting


class World:
    """One server on a disk, which another may find again. several: replicas serve adapters side by side."""

    def __init__(self, root: Path, trainer: TrainerPort | None = None, **options: Any) -> None:
        self.root = root
        self.trainer = FakeTrainer()
        self.publish = FakePublish()
        self.policies = FakePolicies(options.pop("several", False))
        self.adapters = SamplerAdapters(self.policies, options.pop("adapters_max", 2))
        self.futures = Futures()
        self.store = Store(root / "tinker.db", options.get("clock", time.time))
        self.places = CheckpointPlaces(root / "tinker")
        clock = options.pop("clock", time.time)
        self.training = Training(
            trainer=trainer or self.trainer,
            store=self.store,
            futures=self.futures,
            places=self.places,
            samplers=Samplers(
                self.store,
                self.publish,
                self.adapters,
                unnamed_kept=options.pop("unnamed_kept", 2),
                clock=clock,
            ),
            served=Served(names=("accounts/acme/models/tiny", BASE), directory="/models/tiny"),
            limits=Limits(**options),
            clock=clock,
        )
        self.session = ""

    def new_session(self, tenant: str = TENANT) -> str:
        self.session = self.store.create_session(tenant).id
        return self.session

    async def close(self) -> None:
        await self.training.close()
        self.store.close()

    def future(self, request_id: str, tenant: str = TENANT) -> Future:
        found = self.futures.find(tenant, request_id)
        assert found is not None
        return found

    async def ended(self, request_id: str, tenant: str = TENANT) -> Future:
        future = self.future(request_id, tenant)
        await future.wait()
        return future

    async def result(self, request_id: str, tenant: str = TENANT) -> dict[str, Any]:
        future = await self.ended(request_id, tenant)
        assert future.outcome is not None
        assert future.outcome.media_type == "application/json"
        body: dict[str, Any] = json.loads(future.outcome.body)
        assert "error" not in body, body
        return body

    async def error(self, request_id: str) -> tuple[str, str]:
        """(message, category)."""
        future = await self.ended(request_id)
        assert future.outcome is not None
        body = json.loads(future.outcome.body) if future.outcome.media_type == "application/json" else {}
        assert "error" in body, future.outcome
        return body["error"], body["category"]

    async def model(self, seq: int = 0, rank: int = 8) -> str:
        """The id of a model that is there."""
        body = create(self.session or self.new_session(), seq, rank)
        made = await self.result(await self.training.submit(TENANT, "tml-key", body))
        return str(made["model_id"])

    async def step(self, model_id: str, seq_id: int, rate: float = 0.1) -> str:
        return await self.training.submit(TENANT, "tml-key", optim(model_id, seq_id, rate))

    async def loss(self, model_id: str, seq_id: int, loss_fn: str = "cross_entropy") -> str:
        request = forward_backward(model_id, seq_id, loss_fn)
        return await self.training.submit(TENANT, "tml-key", request)


@contextlib.asynccontextmanager
async def world(root: Path, **options: Any) -> AsyncIterator[World]:
    made = World(root, **options)
    try:
        yield made
    finally:
        await made.close()


def create(session: str, seq: int = 0, rank: int = 8) -> CreateModelBody:
    lora = LoraConfig(rank=rank)
    return CreateModelBody(session_id=session, model_seq_id=seq, base_model=BASE, lora_config=lora)


def optim(model_id: str, seq_id: int | None, rate: float = 0.1) -> OptimStepBody:
    return OptimStepBody(model_id=model_id, seq_id=seq_id, adam_params=AdamParams(learning_rate=rate))


def forward_backward(
    model_id: str, seq_id: int, loss_fn: str = "cross_entropy", token: int = 1
) -> ForwardBackward:
    target = Tensor(dtype="int64", shape=(1,), data=np.array([2], "<i8").tobytes())
    datum = Datum(tokens=(token,), inputs={"target_tokens": target})
    return ForwardBackward(
        model_id=model_id, seq_id=seq_id, data=(datum,), loss_fn=loss_fn, config={}, forward_only=False
    )


def logprobs(*values: float) -> dict[str, Tensor]:
    array = np.array(values, "<f4")
    return {"logprobs": Tensor(dtype="float32", shape=array.shape, data=array.tobytes())}
