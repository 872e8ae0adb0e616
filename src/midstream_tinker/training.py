"""Training calls: what each becomes in the trainer process, in the store, in the bucket.

Always holds:
- A model's call is carried out in its turn (turns.py) or its future fails. A refused call takes its turn, too, so that the
  calls after it are not held up.
- A row that names files is written after the files are whole and synced. A model's weights go into the bucket in the order in
  which they were saved, while its training continues. At most one export of a model is on the disk.
- A model, a checkpoint or a session of another tenant is as unknown as none.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from midstream.core.beside import beside
from midstream.core.clock import steady
from midstream.core.private import private_directory
from midstream_tinker import weights as names
from midstream_tinker.answers import ModelMade, StepDone, WeightsLoaded, WeightsSaved
from midstream_tinker.codec import loss_outputs, loss_outputs_json
from midstream_tinker.futures import PROTOBUF, Future, Futures
from midstream_tinker.loaded import MAX_MODELS, Loaded, TrainerPort
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.samplers import Exported, Samplers, checkpoint_row
from midstream_tinker.store import SILENT_S, CheckpointRow, ModelRow, SamplingSession, Store
from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.types import AdamParams, ForwardBackward, LoraConfig, WorkFailed
from midstream_tinker.turns import GAP_S, TrainingTurn, Turns, failing
from midstream_tinker.types import (
    CreateModelBody,
    CreateSamplingSessionBody,
    LoadWeightsBody,
    OptimizerConfig,
    OptimStepBody,
    SaveWeightsBody,
    SaveWeightsForSamplerBody,
    Served,
    TrainingBody,
)

# Bytes of one model's requests that wait for their turn.
MAX_WAITING_BYTES = 1 << 30
# The turn of the request that makes a model. The client's own counter begins with 1.
CREATION = 0
SAMPLER_KINDS = ("snapshot", "inflight")

_encoder = msgspec.msgpack.Encoder(order="deterministic")
Act = Callable[[Future], Awaitable[None]]


class Mark(NamedTuple):
    """What a request that comes again is known by, and its size in bytes."""

    digest: bytes
    size: int


class _Model:
    """One that was asked for since this process began. publication: of the weights saved last."""

    def __init__(self, row: ModelRow, turns: Turns) -> None:
        self.row = row
        self.turns = turns
        self.turns_task: asyncio.Task[None] | None = None
        self.publication: asyncio.Task[None] | None = None


class _Call(NamedTuple):
    """What a request becomes in its turn. kind: of its future."""

    model: _Model
    kind: str
    seq_id: int
    act: Act


@dataclass(frozen=True)
class Limits:
    """gap_s: how long a missing seq_id is waited for. max_models: in the trainer at once."""

    gap_s: float = GAP_S
    max_models: int = MAX_MODELS


DEFAULT_LIMITS = Limits()


class Training:
    """Made in the event loop it is used in."""

    def __init__(
        self,
        *,
        trainer: TrainerPort,
        store: Store,
        futures: Futures,
        places: names.CheckpointPlaces,
        samplers: Samplers,
        served: Served,
        limits: Limits = DEFAULT_LIMITS,
        clock: Callable[[], float] = steady,
    ) -> None:
        self._loaded = Loaded(trainer, self._abandoned, max_models=limits.max_models)
        self._store = store
        self._futures = futures
        self._places = places
        self._samplers = samplers
        self._served = served
        self._gap_s = limits.gap_s
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._calls: dict[type, Callable[[str, str | None, Any], _Call]] = {
            CreateModelBody: self._create_model,
            LoadWeightsBody: self._load_weights,
            ForwardBackward: self._forward_backward,
            OptimStepBody: self._optim_step,
            SaveWeightsBody: self._save_weights,
            SaveWeightsForSamplerBody: self._save_weights_for_sampler,
        }
        # Left by a process that died.
        for left in (places.exports, *places.leftovers()):
            shutil.rmtree(left, ignore_errors=True)
        private_directory(places.root)
        private_directory(places.exports)

    async def close(self) -> None:
        """Nothing is carried out any more; what is under way is given up, and the trainer process ends."""
        tasks = [
            t
            for model in self._models.values()
            for t in (model.turns_task, model.publication)
            if t is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loaded.close()
        await self._samplers.close()

    async def submit(self, tenant: str, api_key: str | None, body: TrainingBody) -> str:
        """The request_id of its future. Raises TinkerRefusal."""
        size = body.size if isinstance(body, ForwardBackward) else 0
        mark = await beside.run(size, lambda: mark_of(body))
        return self._queue(self._calls[type(body)](tenant, api_key, body), mark)

    # -- models

    def _create_model(self, tenant: str, api_key: str | None, body: CreateModelBody) -> _Call:
        self._check_base(body.base_model, body.optimizer_config)
        row = self._store.create_model(
            tenant,
            body.session_id,
            body.model_seq_id,
            base_model=body.base_model,
            lora=body.lora_config,
            user_metadata=body.user_metadata,
        )

        async def create(future: Future) -> None:
            await self._loaded.make(row.id, m.CreateModel(row.id, row.lora))
            future.resolve_json(ModelMade(model_id=row.id))

        return _Call(self._new_model(row), "create_model", CREATION, create)

    def _load_weights(self, tenant: str, api_key: str | None, body: LoadWeightsBody) -> _Call:
        """Into a model there is, in its turn, or into one that this makes."""
        if body.model_id is not None:
            model = self._model(tenant, body.model_id)

            async def load(future: Future) -> None:
                await self._load(model.row, body, future)

            return _Call(model, "load_weights", _given(body.seq_id), load)
        if body.session_id is None or body.model_seq_id is None:
            raise TinkerRefusal(400, "give model_id and seq_id, or session_id and model_seq_id", "model_id")
        checkpoint, lora = self.weights_info(tenant, body.path)
        base_model = body.base_model or checkpoint.base_model
        self._check_base(base_model, body.optimizer_config)
        row = self._store.create_model(
            tenant,
            body.session_id,
            body.model_seq_id,
            base_model=base_model,
            lora=lora,
            restored_from=body.path,
            user_metadata=body.user_metadata,
        )

        async def restore(future: Future) -> None:
            await self._load(row, body, future)

        return _Call(self._new_model(row), "load_weights", CREATION, restore)

    async def finish_session(self, tenant: str, session_id: str) -> None:
        """Its models are unloaded once what was asked of them is done."""
        for model in self._models.values():
            if (model.row.tenant, model.row.session_id) == (tenant, session_id):
                model.turns.close()

    # -- steps

    def _forward_backward(self, tenant: str, api_key: str | None, body: ForwardBackward) -> _Call:
        model = self._model(tenant, body.model_id)

        async def run(future: Future) -> None:
            losses: m.LossReply = await self._loaded.call(model.row.id, m.RunForwardBackward(body))
            result = losses.result
            encoded = await beside.run(result.size, lambda: loss_outputs(result))
            future.resolve(encoded, PROTOBUF, as_json=loss_outputs_json)

        kind = "forward" if body.forward_only else "forward_backward"
        return _Call(model, kind, _given(body.seq_id), run)

    def _optim_step(self, tenant: str, api_key: str | None, body: OptimStepBody) -> _Call:
        model = self._model(tenant, body.model_id)

        async def step(future: Future) -> None:
            if body.optimizer_params is not None:
                kind = body.optimizer_params.get("type")
                raise WorkFailed(f"the optimizer {kind!r} is not supported here: use AdamParams")
            adam = body.adam_params or AdamParams()
            done: m.Metrics = await self._loaded.call(model.row.id, m.OptimStep(model.row.id, adam))
            future.resolve_json(StepDone(metrics=done.metrics))

        return _Call(model, "optim_step", _given(body.seq_id), step)

    # -- weights

    def _save_weights(self, tenant: str, api_key: str | None, body: SaveWeightsBody) -> _Call:
        model = self._model(tenant, body.model_id)

        async def save(future: Future) -> None:
            if body.path is None:
                raise WorkFailed("save_weights needs a name (path)")
            uri = names.checkpoint_uri(model.row.id, "weights", body.path)
            if not body.overwrite:
                self._refuse_known(tenant, uri)
            directory = self._places.checkpoint(uri)
            written: m.Written = await self._loaded.call(
                model.row.id, m.SaveState(model.row.id, str(directory))
            )
            checkpoint = checkpoint_row(model.row, uri, self._clock(), written.size, body.user_metadata)
            self._store.add_checkpoint(tenant, checkpoint)
            future.resolve_json(WeightsSaved(path=str(uri)))

        return _Call(model, "save_weights", _given(body.seq_id), save)

    def _save_weights_for_sampler(
        self, tenant: str, api_key: str | None, body: SaveWeightsForSamplerBody
    ) -> _Call:
        model = self._model(tenant, body.model_id)
        seq_id = _given(body.seq_id)

        async def export(future: Future) -> None:
            if (body.path is None) == (body.sampling_session_seq_id is None):
                raise WorkFailed(
                    "save_weights_for_sampler needs either a name (path) or sampling_session_seq_id"
                )
            if body.kind not in SAMPLER_KINDS:
                raise WorkFailed(f"save_weights_for_sampler of kind {body.kind!r} is not supported here")
            if model.publication is not None:
                await asyncio.wait((model.publication,))
            if body.path is not None:
                self._refuse_known(tenant, names.checkpoint_uri(model.row.id, "sampler_weights", body.path))
            adapter = await self._samplers.as_adapter(model.row.lora)
            identity = names.snapshot_identity(model.row.id, seq_id, body.path)
            directory = self._places.export(identity)
            try:
                command = m.ExportWeights(model.row.id, str(directory), adapter)
                written: m.Written = await self._loaded.call(model.row.id, command)
            except BaseException:
                await self._remove_export(identity)
                raise
            exported = Exported(identity, directory, written.size, adapter)
            publishing = self._published(model.row, exported, api_key, body, future)
            model.publication = asyncio.create_task(publishing)

        return _Call(model, "save_weights_for_sampler", seq_id, export)

    async def create_sampling_session(
        self, tenant: str, api_key: str | None, body: CreateSamplingSessionBody
    ) -> SamplingSession:
        """On saved sampler weights (model_path), which replicas serve when this returns. Raises TinkerRefusal."""
        path = body.model_path or ""
        checkpoint = self._checkpoint(tenant, path, "model_path")
        if checkpoint.snapshot is None:
            raise TinkerRefusal(
                400,
                f"{path} holds a state to train on from; save_weights_for_sampler makes one to sample",
                "model_path",
            )
        return await self._samplers.session(tenant, api_key, body, checkpoint)

    def weights_info(self, tenant: str, uri: str) -> tuple[CheckpointRow, LoraConfig]:
        """Of a state to train on from. Raises TinkerRefusal."""
        checkpoint = self._checkpoint(tenant, uri, "path")
        if checkpoint.kind != "weights":
            raise TinkerRefusal(
                400, f"{uri} holds weights for sampling; train from what save_state saved", "path"
            )
        row = self._store.model(tenant, checkpoint.model_id)
        if row is None:
            raise TinkerRefusal(404, f"nothing is known of the model that saved {uri}", "path")
        return checkpoint, row.lora

    async def delete_checkpoint(self, tenant: str, uri: str) -> None:
        """A state's files are removed; sampler weights stay in the bucket, as they may serve. Raises TinkerRefusal (404)."""
        checkpoint = self._checkpoint(tenant, uri, "path")
        self._store.delete_checkpoint(tenant, uri)
        if checkpoint.kind == "weights":
            # Its name may be used again at once.
            removed = self._places.put_aside(names.parse_uri(uri))
            await asyncio.to_thread(shutil.rmtree, removed, ignore_errors=True)

    def refuse(self, tenant: str, model_id: str, seq_id: int, error: TinkerRefusal) -> str | None:
        """A future that fails with `error` in its turn; None: no future waits for that turn. Raises TinkerRefusal."""
        try:
            model = self._model(tenant, model_id)
        except TinkerRefusal:
            return None
        if seq_id <= CREATION:
            return None

        async def fail(future: Future) -> None:
            raise error

        return self._queue(_Call(model, "refused", seq_id, fail), mark_of(error.body()))

    # -- inside

    async def _load(self, row: ModelRow, body: LoadWeightsBody, future: Future) -> None:
        if body.weights_access_token is not None:
            raise WorkFailed(
                "weights_access_token is not supported here: checkpoints belong to their API key"
            )
        _, lora = self.weights_info(row.tenant, body.path)
        if lora.shape != row.lora.shape:
            raise WorkFailed(f"{body.path} has {lora.shape}, the model {row.lora.shape}")
        directory = self._places.checkpoint(names.parse_uri(body.path))
        await self._loaded.make(row.id, m.LoadState(row.id, str(directory), body.optimizer))
        future.resolve_json(WeightsLoaded(model_id=row.id, path=body.path))

    async def _published(
        self,
        row: ModelRow,
        exported: Exported,
        api_key: str | None,
        body: SaveWeightsForSamplerBody,
        future: Future,
    ) -> None:
        """What was exported goes into the bucket; `future` gets a checkpoint or a sampling session."""
        with failing(future):
            try:
                saved = await self._samplers.save(row, exported, api_key, body)
            finally:
                await self._remove_export(exported.identity)
            future.resolve_json(saved)

    async def _remove_export(self, identity: str) -> None:
        for directory in self._places.export_with_leftovers(identity):
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _refuse_known(self, tenant: str, uri: names.CheckpointUri) -> None:
        if self._store.checkpoint(tenant, str(uri)) is not None:
            raise WorkFailed(f"{uri} is there already; delete it, or choose another name")

    def _checkpoint(self, tenant: str, uri: str, param: str) -> CheckpointRow:
        names.parse_uri(uri, param)
        found = self._store.checkpoint(tenant, uri)
        if found is None:
            raise TinkerRefusal(404, f"there is no checkpoint {uri} of this API key", param)
        return found

    def _check_base(self, base_model: str, optimizer: OptimizerConfig | None) -> None:
        if not self._served.trainable:
            raise TinkerRefusal(400, "this server does not train", "base_model")
        if base_model not in self._served.names:
            known = ", ".join(self._served.names)
            raise TinkerRefusal(
                400, f"base_model {base_model!r} is not served here; this server has {known}", "base_model"
            )
        if optimizer is not None and optimizer.type != "adamw":
            raise TinkerRefusal(
                400, f"the optimizer {optimizer.type!r} is not supported here: use adamw", "optimizer_config"
            )

    def _new_model(self, row: ModelRow) -> _Model:
        return self._models.get(row.id) or self._begin(row, first=CREATION)

    def _model(self, tenant: str, model_id: str) -> _Model:
        """Raises TinkerRefusal (404). One that only the store knows is lost, whatever seq_id its client has come to."""
        model = self._models.get(model_id)
        row = model.row if model is not None else self._store.model(tenant, model_id)
        if row is None or row.tenant != tenant:
            raise TinkerRefusal(404, f"there is no model {model_id!r} of this API key", "model_id")
        return model or self._begin(row, first=None)

    def _begin(self, row: ModelRow, first: int | None) -> _Model:
        self._close_expired()
        model = self._models[row.id] = _Model(row, Turns(row.id, first, gap_s=self._gap_s))
        model.turns_task = asyncio.create_task(self._work(model), name=f"turns of {row.id}")
        return model

    def _close_expired(self) -> None:
        """Of sessions that are gone, and never were finished, nothing is held for ever."""
        sessions = {(model.row.tenant, model.row.session_id) for model in self._models.values()}
        gone = {session for session in sessions if self._store.session(*session) is None}
        for model in self._models.values():
            if (model.row.tenant, model.row.session_id) in gone and not len(model.turns):
                model.turns.close()

    def _queue(self, call: _Call, mark: Mark) -> str:
        """Its request_id. Raises TinkerRefusal: 400 the seq_id had another body, 429 too much is waiting."""
        model, kind, seq_id, act = call
        known = model.turns.known(kind, seq_id, mark.digest)
        if known is not None:
            return known
        waiting = model.turns.waiting_bytes
        if waiting + mark.size > MAX_WAITING_BYTES and not model.turns.is_next(seq_id):
            raise TinkerRefusal(429, f"requests of {waiting} bytes wait for their turn with {model.row.id}")
        self._store.touch_session(model.row.tenant, model.row.session_id)
        future = self._futures.new(model.row.tenant, kind)
        model.turns.add(TrainingTurn(kind, seq_id, mark.digest, future, lambda: act(future), mark.size))
        return future.request_id

    async def _work(self, model: _Model) -> None:
        while (turn := await model.turns.take()) is not None:
            with failing(turn.future):
                await turn.act()
        if model.publication is not None:
            await asyncio.wait((model.publication,))
        await self._loaded.drop(model.row.id, "its session was finished")
        del self._models[model.row.id]

    def _abandoned(self, model_ids: Iterable[str], full: bool) -> list[str]:
        """The models with an expired session; if the trainer is full, also those with a client that is silent for a while."""
        return [model_id for model_id in model_ids if self._is_abandoned(self._models[model_id], full)]

    def _is_abandoned(self, model: _Model, full: bool) -> bool:
        if len(model.turns):
            return False
        session = self._store.session(model.row.tenant, model.row.session_id)
        return session is None or (full and self._clock() - session.seen > SILENT_S)


def mark_of(body: object) -> Mark:
    """Tensors are not encoded: to copy a large one holds the interpreter's lock for long, to digest it does not."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    parts: Iterable[bytes] = (_encoder.encode(body),)
    if isinstance(body, ForwardBackward):
        parts = _parts(body)
    for part in parts:
        digest.update(part)
        size += len(part)
    return Mark(digest.digest(), size)


def _parts(body: ForwardBackward) -> Iterator[bytes]:
    yield _encoder.encode(msgspec.structs.replace(body, data=()))
    for datum in body.data:
        tensors = sorted(datum.inputs.items())
        described = [(name, tensor.dtype, tensor.shape, len(tensor.data)) for name, tensor in tensors]
        yield _encoder.encode((datum.tokens, described))
        yield from (tensor.data for _, tensor in tensors)


def _given(seq_id: int | None) -> int:
    if not seq_id:
        raise TinkerRefusal(400, "a training request needs its seq_id, from 1", "seq_id")
    return seq_id
