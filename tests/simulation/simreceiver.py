"""The groups in which simulated trainers send weights: their stores, and the receiver processes of the replicas.

Owns: what is replaced under `midstream.transfer.process`: the start of a process and its end of the socket. What it would do
with torch it does here, in simulated time.
Always holds: a receiver process ends with its socket. A broadcast ends when every member took it. The death of a member breaks
a group that was formed, and hangs one that was not. Two members of one rank hang.
"""

from __future__ import annotations

import asyncio
import contextvars
import io
import random
import signal
import sys
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simloop import PROCESS, SimLoop
from simnet import Listener, SimSocket, SimTransport
from simprocess import Process

from midstream.http import ipc
from midstream.snapshots.content import file_content
from midstream.transfer import protocol as m
from midstream.transfer.layout import pieces

if TYPE_CHECKING:
    from simnet import Network

#: The most that a step of a receiver takes, and a broadcast.
STEP_S = 0.05
BROADCAST_S = 0.03
#: That a trainer sends.
PIECE_BYTES = 16 * 1024
#: Messages to a store, and the length of its clients' first one.
SET, CHECK = b"\1", b"\5"
HELLO_BYTES = 5
CLOSED = "[gloo] Connection closed by peer"


class GroupBroken(Exception):
    """What torch raises when a member is gone."""


class Group:
    """Members by rank, the trainer being 0. damaged: the rank that gets a wrong byte; None: none does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.damaged: int | None = None
        self.formed = asyncio.Event()
        self._members: dict[int, Process] = {}
        self._pieces: list[bytes] = []
        #: How many pieces each receiver took.
        self._taken: dict[int, int] = {}
        self._broken = False
        self._changed = asyncio.Event()

    async def join(self, rank: int, process: Process) -> None:
        """Raises GroupBroken."""
        if rank in self._members or not 0 <= rank < self.size:
            await asyncio.Event().wait()
        self._members[rank] = process
        if rank:
            self._taken[rank] = 0
        if len(self._members) == self.size:
            self.formed.set()
        await self.formed.wait()
        self._check()

    def lost(self, process: Process) -> None:
        """A process died. Its rank stays taken in a group that was not formed."""
        if process in self._members.values() and self.formed.is_set():
            self._broken = True
            self._wake()

    def lost_ranks(self, ranks: Collection[int]) -> None:
        """These left, or died."""
        if self.formed.is_set() and any(rank in self._members for rank in ranks):
            self._broken = True
            self._wake()

    def close(self) -> None:
        """The trainer is gone."""
        if self.formed.is_set():
            self._broken = True
            self._wake()

    async def send(self, piece: bytes) -> None:
        """The trainer's end of a broadcast. Raises GroupBroken."""
        self._check()
        self._pieces.append(piece)
        self._wake()
        while min(self._taken.values()) < len(self._pieces):
            await self._change()

    async def receive(self, rank: int, size: int) -> bytes:
        """Raises GroupBroken."""
        self._check()
        number = self._taken[rank]
        while len(self._pieces) <= number:
            await self._change()
        piece = self._pieces[number]
        if len(piece) != size:
            self._broken = True
            self._wake()
            raise GroupBroken(f"a broadcast of {len(piece)} bytes, not of {size}")
        self._taken[rank] += 1
        self._wake()
        if rank == self.damaged and piece:
            self.damaged = None
            return bytes((piece[0] ^ 0x40,)) + piece[1:]
        return piece

    async def _change(self) -> None:
        await self._changed.wait()
        self._check()

    def _check(self) -> None:
        if self._broken:
            raise GroupBroken(CLOSED)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class StoreEnd(asyncio.Protocol):
    """A connection to a store: what torch's answers to a replica (midstream/transfer/trainer_store.py). keys: of the store."""

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys
        self._read = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        # The end of what comes is a check of one key, and may come later.
        left = io.BytesIO(self._read)
        left.seek(HELLO_BYTES)
        kind = left.read(1)
        if kind == SET:
            key, value = _sized(left), _sized(left)
            kind = left.read(1)
            if value:
                self._keys.add(key)
        if kind == CHECK and left.read(8) and (key := _sized(left)):
            self._transport.write(bytes([key not in self._keys]))


def _sized(left: io.BytesIO) -> bytes:
    """Bytes behind their number; nothing unless all are there."""
    size = int.from_bytes(left.read(8), sys.byteorder)
    found = left.read(size)
    return found if len(found) == size else b""


class RendezvousStore:
    """What a trainer opens, and listens with. Its groups by prefix and size."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.groups: dict[tuple[str, int], Group] = {}

    def group(self, prefix: str, size: int) -> Group:
        return self.groups.setdefault((prefix, size), Group(size))

    @property
    def alive(self) -> bool:
        return self._listener.is_serving()

    def close(self) -> None:
        self._listener.close()
        for group in self.groups.values():
            group.close()


@dataclass
class Receivers:
    """All receiver processes of a world, and the trainers' stores by port."""

    loop: SimLoop
    network: Network
    rng: random.Random
    stores: dict[int, RendezvousStore] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    ends: dict[Process, ReceiverEnd] = field(default_factory=dict)
    _pid: int = 50_000

    def alive(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    def open_store(self) -> int:
        """The port of a new store, of the process that asks."""
        port = self.network.free_port()
        address, keys = ("127.0.0.1", port), set[bytes]()
        self.stores[port] = RendezvousStore(
            self.network.listen(lambda: StoreEnd(keys), address, SimSocket(address))
        )
        return port

    async def spawn(self, module: str, link: Callable[[], Any]) -> tuple[ReceiverHandle, Any]:
        """In place of `ipc.spawn`."""
        assert module == "midstream.transfer.receiver"
        owner = PROCESS.get()
        self._pid += 1
        process = Process(f"receiver of {owner.name}", self._pid)
        self.processes.append(process)
        near = SimTransport(self.network, owner, contextvars.copy_context())
        far = SimTransport(self.network, process, process.context.copy())
        near.other, far.other = far, near
        made = link()
        near.set_protocol(made)
        self.loop.call_soon(self._started, far, process, context=process.context.copy())
        made.connection_made(near)
        await asyncio.sleep(self.slow_s(STEP_S))
        return ReceiverHandle(self, process), made

    def _started(self, far: SimTransport, process: Process) -> None:
        protocol = self.ends[process] = ReceiverEnd(self, process)
        far.set_protocol(protocol)
        protocol.connection_made(far)
        far.arrive()

    def slow_s(self, most: float) -> float:
        return self.rng.random() * most

    def end(self, process: Process) -> None:
        if process.alive:
            process.alive = False
            self.loop.forget(process)
            self.network.died(process)
            self.lost(process)

    def lost(self, process: Process) -> None:
        """Of all groups. It died."""
        for store in self.stores.values():
            for group in store.groups.values():
                group.lost(process)


class ReceiverHandle:
    """What `subprocess.Popen` gives."""

    def __init__(self, receivers: Receivers, process: Process) -> None:
        self._receivers, self._process = receivers, process
        self.pid = process.pid

    def kill(self) -> None:
        self._receivers.end(self._process)

    def wait(self) -> int:
        assert not self._process.alive
        return -signal.SIGKILL


class ReceiverEnd(asyncio.Protocol):
    """The process's end of the socket, and all that the process does. hung: it answers nothing any more, and ends with it."""

    def __init__(self, receivers: Receivers, process: Process) -> None:
        self._receivers, self.process = receivers, process
        self._frames = ipc.Frames(m.order_decoder)
        self._orders: asyncio.Queue[m.Order] = asyncio.Queue()
        self._transport: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._group: Group | None = None
        self._rank = 0
        self._path: Path | None = None
        self.hung = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._run(self._serve())

    def hang(self) -> None:
        self.hung = True
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        if self.hung:
            return
        for order in self._frames.feed(data):
            if isinstance(order, m.Ping):
                self._transport.write(bytes(ipc.frame(m.OrderDone(order.call))))
            else:
                self._orders.put_nowait(order)

    def connection_lost(self, error: Exception | None) -> None:
        self._receivers.end(self.process)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=self.process.name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            said = {"message": "a simulated receiver failed", "exception": error}
            self._receivers.loop.call_exception_handler(said)

    async def _serve(self) -> None:
        while True:
            await self._answer(await self._orders.get())

    async def _answer(self, order: m.Order) -> None:
        await asyncio.sleep(self._receivers.slow_s(STEP_S))
        digest, error = "", None
        try:
            digest = await self._carry_out(order)
        except (GroupBroken, TimeoutError, OSError) as found:
            error = str(found) or type(found).__name__
        self._transport.write(bytes(ipc.frame(m.OrderDone(order.call, error, digest))))

    async def _carry_out(self, order: m.Order) -> str:
        match order:
            case m.JoinGroup():
                async with asyncio.timeout(order.timeout_s):
                    await self._join(order)
            case m.OpenFile(_, path):
                self._path = Path(path)
            case m.ReceiveRanges():
                async with asyncio.timeout(order.timeout_s):
                    await self._receive(order)
            case m.CloseFile(_, header, size):
                return self._close(header, size)
            case m.ForgetFile():
                self._path = None
        return ""

    async def _join(self, order: m.JoinGroup) -> None:
        store = self._receivers.stores[order.port]
        if not store.alive:
            # Torch tries again until the time is over.
            await asyncio.Event().wait()
        self._rank = order.rank
        self._group = store.group(order.prefix, order.world_size)
        await self._group.join(order.rank, self.process)

    async def _receive(self, order: m.ReceiveRanges) -> None:
        assert self._group is not None
        assert self._path is not None
        for begin, end in pieces(order.ranges, order.piece_bytes):
            data = await self._group.receive(self._rank, end - begin)
            await asyncio.sleep(self._receivers.slow_s(BROADCAST_S))
            # The room for it was reserved.
            with self._path.open("r+b") as file:
                file.seek(begin)
                file.write(data)

    def _close(self, header: bytes, size: int) -> str:
        path, self._path = self._path, None
        assert path is not None
        with path.open("r+b") as file:
            file.truncate(size)
            file.write(header)
        return file_content(path).digest
