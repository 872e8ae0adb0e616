"""An engine of the simulation that takes a trainer's weights in place: vLLM's fence (production code) over a simulated server.

Owns: what the server has of an update, its ranks in the trainer's group, and whether it stands still.
Always holds: from the first tensor until a commit, what the engine computes is of no snapshot. What it commits is what it was
given, not what the file beside it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simreceiver import GroupBroken, Receivers
from simstrikes import own_process

from midstream.core.transfer import STORE_PREFIX
from midstream.engine.servers.boot import ServerBoot
from midstream.engine.servers.control import ServerRefused
from midstream.engine.vllm.in_place import CLOSE_TEE, INIT, OPEN_TEE, SHUTDOWN, UPDATE, VllmInPlace
from midstream.http.call import CallFailed
from midstream.snapshots.layout import WEIGHTS_FILE

if TYPE_CHECKING:
    from simengine import SimEngine
    from simreceiver import Group

BACKEND = "nccl"
#: The most that a call takes, and a broadcast.
CALL_S = 0.05
BROADCAST_S = 0.02


class InPlace:
    """ranks: that the engine has. killed: is called when the fence kills it."""

    def __init__(
        self,
        engine: SimEngine,
        ranks: int,
        receivers: Receivers,
        piece_bytes: int,
        killed: Callable[[], None],
    ) -> None:
        self.ranks = ranks
        self._killed = killed
        self.boot = ServerBoot("vLLM")
        self.lock = asyncio.Lock()
        self.still = False
        self.fence = VllmInPlace(
            BACKEND,
            lambda: self,  # type: ignore[arg-type, return-value]
            self.boot,
            self.lock,
            self._stand_still,
            self._move_on,
            self._kill,
        )
        self._engine, self._receivers, self._piece_bytes = engine, receivers, piece_bytes
        self._group: Group | None = None
        self._first, self._packed = 0, True
        self._tee: tuple[Path, Mapping[str, Any]] | None = None
        #: What the server was given, by name.
        self._tensors: dict[str, bytes] = {}

    # -- the life of the server

    def began(self) -> None:
        self.boot.begin()
        self.still = False
        self._tensors.clear()
        self.fence.began()

    def ended(self, reason: str) -> None:
        self.boot.end(reason)
        self.boot.cancel_tasks()
        self._leave()
        self.fence.ended(reason)

    def _kill(self, reason: str) -> None:
        self.still = True
        self._killed()
        self.boot.end(reason)
        self.boot_over = asyncio.create_task(self._engine.die(reason), name="vLLM is killed")

    async def _stand_still(self) -> None:
        await self._engine.awake()
        self.still = True

    async def _move_on(self) -> None:
        await self._engine.awake()
        self.still = False
        self._engine.wake()

    def weights(self, file: Path) -> int | None:
        """Those of the file, if the server was given them; None: it was given others."""
        from simengine import of_directory
        from simpush import tensors_of

        same = tensors_of(file.read_bytes()) == self._tensors
        return of_directory(file.parent) if same else None

    def switched(self) -> None:
        self.fence.switched()
        self.still = False
        self._engine.wake()

    # -- as Control

    async def read_all(self, within_s: float) -> None:
        # What the engine computed is read in the turn in which it was.
        pass

    async def transfer(self, path: str, body: Any, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._transfer(path, body)
        except TimeoutError as error:
            raise CallFailed(f"{path}: no answer within {within_s:g} s") from error
        except GroupBroken as error:
            raise ServerRefused(f"{path} answered 500: {error}", 500) from error

    async def ask_workers(self, method: str, arguments: Mapping[str, Any], within_s: float) -> list[Any]:
        await asyncio.sleep(self._engine.slow_s(CALL_S))
        if method == OPEN_TEE:
            self._tee = Path(arguments["path"]), arguments["places"]
            return [None] * self.ranks
        assert method == CLOSE_TEE
        self._tee = None
        # Not seen to be finite: the production code looks at the file.
        return [
            {"first": not rank, "missing": [], "digests": {}, "parts": {}, "finite": False}
            for rank in range(self.ranks)
        ]

    async def _transfer(self, path: str, body: Any) -> None:
        await asyncio.sleep(self._engine.slow_s(CALL_S))
        await self._engine.awake()
        if path == INIT:
            await self._join(body["init_info"])
        elif path == UPDATE:
            await self._receive()
        elif path == SHUTDOWN:
            self._leave()

    async def _join(self, info: Mapping[str, Any]) -> None:
        self._leave()
        self._first, self._packed = info["rank_offset"], info["packed"]
        store = self._receivers.stores[info["master_port"]]
        if not store.alive:
            await asyncio.Event().wait()
        self._group = store.group(f"{STORE_PREFIX}/{info['key']}", info["world_size"])
        process = own_process()
        joining = [self._group.join(self._first + number, process) for number in range(self.ranks)]
        await asyncio.gather(*joining)

    async def _receive(self) -> None:
        assert self._group is not None
        assert self._tee is not None
        path, places = self._tee
        sizes = [end - begin for begin, end in places.values()]
        total = sum(sizes)
        steps = range(0, total, self._piece_bytes)
        packed = [min(self._piece_bytes, total - at) for at in steps]
        data = b""
        for size in packed if self._packed else [size for size in sizes if size]:
            ranks = range(self._first, self._first + self.ranks)
            given = await asyncio.gather(*(self._group.receive(rank, size) for rank in ranks))
            data += given[0]
            self._engine.overwrite(len(data))
            await asyncio.sleep(self._engine.slow_s(BROADCAST_S))
            await self._engine.awake()
        at = 0
        with path.open("r+b") as file:
            for (name, (begin, _)), size in zip(places.items(), sizes, strict=True):
                self._tensors[name] = data[at : at + size]
                file.seek(begin)
                file.write(self._tensors[name])
                at += size

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.lost_ranks(range(self._first, self._first + self.ranks))
        self._tensors = {}

    def holds(self, directory: Path) -> Path | None:
        return directory / WEIGHTS_FILE if self.fence.holds(directory) else None


Make = Callable[["SimEngine"], InPlace]
