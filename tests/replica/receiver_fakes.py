"""A receiver without a process: each step waits while its name is in `blocked`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from midstream.core.errors import InvalidRequest, ReplicaUnavailable
from midstream.core.transfer import Received, Rendezvous, SentTensors, TrainerState
from midstream.core.types import FileContent
from midstream.replica.transfer import Receiver

CONTENT = (FileContent("model.safetensors", 8, "d" * 64),)
SENT = SentTensors(names=("a",), dtype_names=("bfloat16",), shapes=((4,),))
UNFIT = SentTensors(names=("b",), dtype_names=("bfloat16",), shapes=((4,),))
RENDEZVOUS = Rendezvous(master_address="127.0.0.1", master_port=29500, world_size=2)


class FakeReceiver(Receiver[Rendezvous, SentTensors]):
    """fails: steps that lose the trainer."""

    def __init__(self, directory: Path, blocked: set[str]) -> None:
        self.calls: list[str] = []
        self.blocked = blocked
        self.fails: set[str] = set()
        self.complete = True
        self.trainer = TrainerState.ALIVE
        self._directory = directory
        self._at = asyncio.Event()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def _step(self, name: str) -> None:
        self.calls.append(name)
        self._at.set()
        if name in self.blocked:
            raise ReplicaUnavailable(await asyncio.shield(self._end))
        if name in self.fails:
            raise ReplicaUnavailable("lost the trainer")

    async def at(self, step: str) -> None:
        """Until this step is under way."""
        while self.calls[-1:] != [step]:
            self._at.clear()
            await self._at.wait()

    def ends(self, why: str) -> None:
        """The process ends by itself."""
        if not self._end.done():
            self._end.set_result(why)

    async def join(self, rendezvous: Rendezvous, within_s: float) -> None:
        await self._step("join")

    async def begin(self, within_s: float) -> None:
        await self._step("begin")

    def check(self, sent: SentTensors) -> None:
        if sent == UNFIT:
            raise InvalidRequest("update_info.names: no such tensor", param="update_info.names")

    async def receive(self, sent: SentTensors, within_s: float) -> None:
        await self._step("receive")

    def check_complete(self) -> None:
        if not self.complete:
            raise InvalidRequest("update_info.names: 1 tensor was not sent: a", param="update_info.names")

    async def finish(self, within_s: float) -> Received:
        await self._step("finish")
        return Received(content=CONTENT, received_bytes=8)

    def hand_over(self) -> Path:
        self.calls.append("hand over")
        return self._directory

    def drop(self) -> None:
        self.calls.append("drop")

    def retract(self) -> None:
        self.calls.append("retract")

    async def trainer_state(self, within_s: float) -> TrainerState:
        return self.trainer

    def end(self, reason: str) -> None:
        self.calls.append("end")
        self.ends(reason)

    async def ended(self) -> str:
        return await asyncio.shield(self._end)
