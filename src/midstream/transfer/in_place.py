"""A replica's part in a trainer's group where the engine's own ranks take the weights, by a backend of vLLM.

Owns: what the trainer announced of an update, and the file beside the engine that has the same tensors.
Always holds: tensors are checked by name before a byte moves. The engine stands still from the first of them on. The file has
exactly what the engine's first rank was given, so its content is compared, kept and loaded again as that of any snapshot. The
engine compares what its other ranks were given with that. An engine whose weights are uncertain is given up with the update. A
part ends with the engine's server.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec

from midstream.core.errors import InvalidRequest, ReplicaUnavailable
from midstream.core.transfer import InitInfo, Received, SentTensors, TrainerState, UpdateInfo
from midstream.core.types import Content
from midstream.engine.base import InPlaceWeights, Tee, TransferFailed, TransferRefused
from midstream.replica.transfer import Receiver
from midstream.snapshots.content import PART_BYTES
from midstream.snapshots.layout import CONFIG_FILE, CheckpointSpec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.tasks import all_of, finished
from midstream.transfer.files import UpdateFiles
from midstream.transfer.layout import UpdateLayout
from midstream.transfer.trainer_store import TrainerStore

log = logging.getLogger(__name__)

#: For the ranks to close their connections.
LEAVE_S = 5.0
#: Fields of backends that bring something else than whole tensors.
_PATCHES = ("num_updates_list",)


class InPlaceReceiver(Receiver[InitInfo, UpdateInfo]):
    """weights: of the engine. base: of the served model. base_directory: has its configuration."""

    def __init__(
        self, weights: InPlaceWeights, base: CheckpointSpec, base_directory: Path, cache: SnapshotCache
    ) -> None:
        self.backend = weights.backend
        self._weights = weights
        self._base = base
        self._files = UpdateFiles(base_directory / CONFIG_FILE, cache)
        self._layout: UpdateLayout | None = None
        # The engine stands still for the open update.
        self._held = False
        # The digests of the file's parts that the engine has digested, by where they begin.
        self._parts: dict[int, bytes] = {}
        # All numbers that came were seen to be finite.
        self._finite = False
        self._trainer: TrainerStore | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._leaving: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"InPlaceReceiver({self._weights!r}, {self._layout!r})"

    async def join(self, invitation: InitInfo, within_s: float) -> None:
        address, port = invitation.fields.get("master_address"), invitation.fields.get("master_port")
        if isinstance(address, str) and isinstance(port, int):
            self._trainer = TrainerStore(address, port)
        if self._leaving is not None:
            raise ReplicaUnavailable("the group has ended")
        self._weights.on_end = self.end
        now = asyncio.get_running_loop().time
        until = now() + within_s
        try:
            await self._weights.join(invitation.fields, within_s)
        except TransferRefused as error:
            raise InvalidRequest(f"init_info: {error}", param="init_info") from error
        except TransferFailed as error:
            raise ReplicaUnavailable(str(error)) from error
        if self._trainer is not None and not await self._trainer.mark(max(0.0, until - now())):
            log.info("%r is no store of torch: what listens there is taken for the trainer", self._trainer)

    async def begin(self, within_s: float) -> None:
        try:
            # Said here, before the trainer waits in a broadcast.
            self._weights.check_ready()
        except TransferFailed as error:
            raise ReplicaUnavailable(str(error)) from error
        layout = await finished(UpdateLayout, self._base)
        await self._files.make(layout.bytes_max)
        if self._leaving is not None:
            self._files.drop()
            raise ReplicaUnavailable("the group has ended")
        self._layout, self._held, self._parts, self._finite = layout, False, {}, True

    def check(self, sent: UpdateInfo) -> None:
        self._open_layout.check(tensors_of(sent))

    async def receive(self, sent: UpdateInfo, within_s: float) -> None:
        tensors = tensors_of(sent)
        places = dict(zip(tensors.names, self._open_layout.place(tensors), strict=True))
        now = asyncio.get_running_loop().time
        until = now() + within_s
        try:
            if not self._held:
                # Not when the update begins: its trainer may die before it sends anything.
                await self._hold(within_s)
            tee = Tee(self._files.weights, places, PART_BYTES)
            teed = await self._weights.write(sent.fields, tee, max(0.0, until - now()))
        except TransferFailed as error:
            raise ReplicaUnavailable(str(error)) from error
        self._parts |= teed.parts
        self._finite &= teed.finite

    def check_complete(self) -> None:
        self._open_layout.check_complete()

    async def finish(self, within_s: float) -> Received:
        layout = self._open_layout
        header = await finished(layout.header)
        content: Content = ()

        async def close() -> None:
            nonlocal content
            content = await self._files.close(header, layout.end, self._parts)
            if self._finite:
                await self._files.note_finite()

        try:
            async with asyncio.timeout(within_s):
                # The engine has all tensors, and does not read the file before it is complete.
                await all_of((close(), self._weights.finish(within_s)))
            self._weights.written(self._files.weights)
        except (TransferFailed, OSError) as error:
            late = f"the update was not finished within {within_s:g} s"
            why = late if isinstance(error, TimeoutError) else str(error)
            self._weights.give_up(why)
            raise ReplicaUnavailable(why) from error
        return Received(content=content, received_bytes=layout.sent_bytes)

    def hand_over(self) -> Path:
        self._layout = None
        return self._files.hand_over()

    def retract(self) -> None:
        self._weights.give_up_written("the update became no snapshot")

    def drop(self) -> None:
        self._layout = None
        self._files.drop()
        self._weights.give_up("the update was dropped")

    async def trainer_state(self, within_s: float) -> TrainerState:
        if self._trainer is None:
            # It did not say where it is. Nothing would ever show more.
            return TrainerState.ALIVE
        return await self._trainer.look(within_s)

    def end(self, reason: str) -> None:
        if self._leaving is not None:
            return
        self._leaving = asyncio.create_task(self._leave(reason), name="end of a part in place")
        self._weights.give_up_unfinished(reason)

    async def ended(self) -> str:
        return await asyncio.shield(self._ended)

    async def _hold(self, within_s: float) -> None:
        await self._weights.hold(within_s)
        if self._leaving is not None:
            self._weights.give_up("the group has ended")
            raise TransferFailed("the group has ended")
        self._held = True

    @property
    def _open_layout(self) -> UpdateLayout:
        assert self._layout is not None
        return self._layout

    async def _leave(self, reason: str) -> None:
        try:
            await self._weights.leave(LEAVE_S)
        finally:
            if self._layout is not None:
                self._layout = None
                self._files.drop()
            self._ended.set_result(reason)


def tensors_of(sent: UpdateInfo) -> SentTensors:
    """The tensors that come. Raises InvalidRequest, which names the field."""
    parts = sent.fields if isinstance(sent.fields, list) else [sent.fields]
    found = [_tensors(part) for part in parts]
    if any(one != found[0] for one in found):
        raise InvalidRequest("update_info: every rank has to get the same tensors", param="update_info")
    return found[0]


def _tensors(part: dict[str, Any]) -> SentTensors:
    for field in _PATCHES:
        if field in part:
            raise InvalidRequest(
                f"update_info.{field}: belongs to patches; here whole tensors are taken",
                param=f"update_info.{field}",
            )
    missing = [field for field in SentTensors.__struct_fields__ if field not in part]
    if missing:
        param = f"update_info.{missing[0]}"
        raise InvalidRequest(f"{param}: is needed to write down what vLLM is given", param=param)
    try:
        return msgspec.convert({field: part[field] for field in SentTensors.__struct_fields__}, SentTensors)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"update_info: {error}", param="update_info") from error
