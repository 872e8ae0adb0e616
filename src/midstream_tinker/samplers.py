"""Weights that were saved to be sampled: how they get into the bucket, and the sampling sessions that stand for them.

A LoRA run's weights are adapters where replicas serve those side by side (adapters.py). Other weights are whole snapshots.
These serve one at a time, in the place of what the deployment serves.

Always holds:
- A checkpoint's row is written after its files are in the bucket, a sampling session's after replicas have served its weights.
- Of a run's adapters without a name, the newest UNNAMED_KEPT can be sampled. One that no sampling session stands for any more
  leaves the bucket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from midstream.core.clock import steady
from midstream.snapshots.adapter import RANK_MAX
from midstream_tinker import weights as names
from midstream_tinker.adapters import SamplerAdapters
from midstream_tinker.answers import SamplerWeightsSaved
from midstream_tinker.publishing import Publish
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.store import CheckpointRow, ModelRow, SamplingSession, Store
from midstream_tinker.trainer.types import LoraConfig, WorkFailed
from midstream_tinker.types import CreateSamplingSessionBody, SaveWeightsForSamplerBody

UNNAMED_KEPT = 64


class Exported(NamedTuple):
    """What the trainer wrote. size: bytes. adapter: it is one; else a whole checkpoint."""

    identity: str
    directory: Path
    size: int
    adapter: bool


class Samplers:
    """Made in the event loop it is used in."""

    def __init__(
        self,
        store: Store,
        publish: Publish,
        adapters: SamplerAdapters,
        *,
        unnamed_kept: int = UNNAMED_KEPT,
        clock: Callable[[], float] = steady,
    ) -> None:
        self._store = store
        self._publish = publish
        self._adapters = adapters
        self._unnamed_kept = unnamed_kept
        self._clock = clock
        # In the bucket, without a name.
        self._unnamed = store.unnamed_adapters()
        # Of sampling sessions being made: who asks again while weights load would load them over what came after.
        self._making: WeakValueDictionary[tuple[str, str, int], asyncio.Lock] = WeakValueDictionary()

    async def as_adapter(self, lora: LoraConfig) -> bool:
        """Whether the weights of such a model are to be exported as an adapter. Raises WorkFailed."""
        return 0 < lora.rank <= RANK_MAX and await self._adapters.possible()

    async def save(
        self, row: ModelRow, exported: Exported, api_key: str | None, body: SaveWeightsForSamplerBody
    ) -> SamplerWeightsSaved:
        """Put them into the bucket. The result: a path, or a sampling session. Raises WorkFailed, TinkerRefusal."""
        identity, directory = exported.identity, exported.directory
        if body.path is not None:
            if exported.adapter:
                await self._publish.put_adapter(identity, directory)
            else:
                await self._publish.keep(identity, directory)
            uri = names.checkpoint_uri(row.id, "sampler_weights", body.path)
            checkpoint = checkpoint_row(
                row, uri, self._clock(), exported.size, body.user_metadata, snapshot=identity
            )
            self._store.add_checkpoint(row.tenant, checkpoint)
            return SamplerWeightsSaved(path=str(uri))
        seq = body.sampling_session_seq_id or 0
        if not exported.adapter:
            await self._publish.publish(identity, directory, api_key)
            return SamplerWeightsSaved(sampling_session_id=self._session_of(row, seq, exported).id)
        return SamplerWeightsSaved(sampling_session_id=(await self._save_unnamed(row, seq, exported)).id)

    async def session(
        self, tenant: str, api_key: str | None, body: CreateSamplingSessionBody, checkpoint: CheckpointRow
    ) -> SamplingSession:
        """On saved sampler weights, which replicas serve when this returns. Raises TinkerRefusal."""
        seq, path, snapshot = body.sampling_session_seq_id, checkpoint.uri, checkpoint.snapshot
        assert snapshot is not None
        async with self._making.setdefault((tenant, body.session_id, seq), asyncio.Lock()):
            made = self._store.sampling_session_at(tenant, body.session_id, seq)
            if made is not None and made.model_path == path:
                return made
            try:
                adapter = await self._publish.holds_adapter(snapshot)
                if adapter:
                    async with self._adapters.use(snapshot):
                        pass
                else:
                    await self._publish.serve(snapshot, api_key)
            except WorkFailed as error:
                raise _refusal(error, "model_path") from error
            return self._store.create_sampling_session(
                tenant,
                body.session_id,
                seq,
                base_model=checkpoint.base_model,
                policy="adapter" if adapter else "exact",
                model_path=path,
                snapshot=snapshot,
                run=names.run_of(snapshot),
            )

    async def close(self) -> None:
        await self._adapters.close()

    async def _save_unnamed(self, row: ModelRow, seq: int, exported: Exported) -> SamplingSession:
        identity = exported.identity
        await self._publish.put_adapter(identity, exported.directory)
        self._unnamed.add(identity)
        try:
            async with self._adapters.use(identity):
                made = self._session_of(row, seq, exported)
            self._store.drop_unnamed(names.run_name(row.id), self._unnamed_kept)
        finally:
            await self._remove_unnamed()
        return made

    def _session_of(self, row: ModelRow, seq: int, exported: Exported) -> SamplingSession:
        """Raises TinkerRefusal (400) when the counter `seq` stands for other weights."""
        made = self._store.create_sampling_session(
            row.tenant,
            row.session_id,
            seq,
            base_model=row.base_model,
            policy="adapter" if exported.adapter else "run",
            snapshot=exported.identity,
            run=names.run_name(row.id),
        )
        if made.snapshot != exported.identity:
            message = f"sampling_session_seq_id {seq} was used before in this session, for {made.snapshot!r}"
            raise TinkerRefusal(400, message, "sampling_session_seq_id")
        return made

    async def _remove_unnamed(self) -> None:
        """The files of adapters that no sampling session names. Never raises: what stays only takes room."""
        for identity in sorted(self._unnamed - self._store.unnamed_adapters()):
            # A sample that began before may still use it.
            if await self._adapters.forget(identity):
                self._unnamed.discard(identity)
                await self._publish.remove(identity)


def checkpoint_row(
    model: ModelRow,
    uri: names.CheckpointUri,
    created: float,
    size: int,
    user_metadata: dict[str, Any] | None,
    *,
    snapshot: str | None = None,
) -> CheckpointRow:
    return CheckpointRow(
        uri=str(uri),
        tenant=model.tenant,
        model_id=model.id,
        kind=uri.kind,
        name=uri.name,
        created=created,
        snapshot=snapshot,
        base_model=model.base_model,
        size=size,
        user_metadata=user_metadata,
    )


def _refusal(error: WorkFailed, param: str) -> TinkerRefusal:
    """503, which the SDK tries again, only where that may help."""
    if error.category == "server":
        return TinkerRefusal(503, error.message, param)
    return TinkerRefusal(400 if error.category == "user" else 422, error.message, param)
