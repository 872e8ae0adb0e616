"""A trainer that writes weights into a real vLLM server, in the four calls of vLLM's weight transfer.

Owns: the trainer's group in a thread, and the replica's part in it. No replica and no gateway are there.
Always holds: every call has WITHIN_S. An update that fails is given up, as a replica does, and its group is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from midstream.client.errors import PublishError
from midstream.client.push import TrainerGroup
from midstream.core.errors import MidstreamError
from midstream.core.retry import Deadline
from midstream.core.transfer import InitInfo, Rendezvous, UpdateInfo
from midstream.engine.vllm.engine import VllmEngine
from midstream.engine.vllm.in_place import FINISH, INIT, START, UPDATE
from midstream.snapshots.layout import WEIGHTS_FILE, read_spec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.transfer.in_place import InPlaceReceiver

CALLS = {INIT: "init", START: "start", UPDATE: "update", FINISH: "finish"}
#: Where a trainer says that it is there: the group is joined, an update is in the middle of its tensors, half of all tensors
#: have come, all have.
REACHED = ("joined", "update", "half", "written")
PHASES = ("init", "joined", "hold", "start", "update", "half", "finish", "written")
#: Far longer than a stopped process may take to be seen.
WITHIN_S = 60.0
#: Of a piece: a call has many.
PIECE_BYTES = 20_000

#: Called with one of REACHED.
Reached = Callable[[str], None]


class DoorFailed(Exception):
    """The update has become nothing."""


class Door:
    """base: of the server's start. folder: for what is written."""

    def __init__(self, engine: VllmEngine, base: Path, folder: Path) -> None:
        self._engine = engine
        self._base = base
        self._cache = SnapshotCache(folder)

    async def write(self, checkpoint: Path, reached: Reached) -> Path:
        """Where what was written lies, for a switch to it. Raises DoorFailed."""
        weights = self._engine.in_place
        assert weights is not None
        receiver = InPlaceReceiver(weights, read_spec(self._base), self._base, self._cache)
        with ThreadPoolExecutor(1, "trainer") as trainer:
            update = _Update(receiver, load_file(checkpoint / WEIGHTS_FILE), reached, trainer)
            try:
                return await update.run()
            except (MidstreamError, PublishError) as error:
                receiver.drop()
                raise DoorFailed(str(error)) from error
            finally:
                receiver.end("the update is over")
                await update.close()
                await receiver.ended()


class _Update:
    def __init__(
        self,
        receiver: InPlaceReceiver,
        tensors: dict[str, torch.Tensor],
        reached: Reached,
        trainer: ThreadPoolExecutor,
    ) -> None:
        self._receiver = receiver
        self._tensors = tensors
        self._reached = reached
        self._trainer = trainer
        self._group: TrainerGroup | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self) -> Path:
        receiver, names = self._receiver, [*self._tensors]
        await self._loop.run_in_executor(self._trainer, self._form)
        self._reached("joined")
        await receiver.begin(WITHIN_S)
        middle = len(names) // 2
        await self._send(names[:middle])
        self._reached("half")
        await self._send(names[middle:])
        receiver.check_complete()
        await receiver.finish(WITHIN_S)
        self._reached("written")
        return receiver.hand_over()

    async def close(self) -> None:
        if self._group is not None:
            await self._loop.run_in_executor(self._trainer, self._group.close)

    def _form(self) -> None:
        """In the trainer's thread."""
        asked = Rendezvous(
            master_address="127.0.0.1", master_port=0, world_size=2, packed_buffer_size_bytes=PIECE_BYTES
        )

        def init(fields: dict[str, Any]) -> None:
            invited = InitInfo(backend="gloo", fields=fields)
            joining = asyncio.run_coroutine_threadsafe(self._receiver.join(invited, WITHIN_S), self._loop)
            joining.result()

        self._group = TrainerGroup.form(asked, init, Deadline(2 * WITHIN_S))

    async def _send(self, names: list[str]) -> None:
        tensors = {name: self._tensors[name] for name in names}
        sent = UpdateInfo(
            fields={
                "names": names,
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
            }
        )
        self._receiver.check(sent)

        def receive() -> None:
            receiving = asyncio.run_coroutine_threadsafe(self._receiver.receive(sent, WITHIN_S), self._loop)
            receiving.result()

        def parts() -> Iterator[torch.Tensor]:
            for number, tensor in enumerate(tensors.values()):
                if number == len(tensors) // 2:
                    self._reached("update")
                yield tensor.contiguous().view(-1).view(torch.uint8)

        group = self._group
        assert group is not None
        await self._loop.run_in_executor(self._trainer, group.send, parts(), receive, Deadline(2 * WITHIN_S))
