"""The receiver process: it takes part in a group of `torch.distributed` and writes what comes into a file.

Owns: the group's connections, the mapping of the file, and the digests of its parts.
Always holds: the target of a broadcast is the mapped file itself. A part is digested once, behind the write position. Nothing
is unpickled. The process ends when its socket closes, so it never outlives its replica; a deadline is the replica's, which
kills it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from midstream.core.logs import configure_as_parent
from midstream.http.ipc import Channel, Disconnected
from midstream.snapshots.content import PART_BYTES, combined, part_digest
from midstream.transfer import protocol as m
from midstream.transfer.layout import pieces

logger = logging.getLogger(__name__)

#: torch's type stubs leave out most of what is used here.
_distributed: Any = torch.distributed

#: They compute beside the engine.
DIGEST_THREADS = 2


class UpdateFile:
    """The file of one update. `written`: everything from the data's start to there has come."""

    def __init__(self, path: Path, size: int) -> None:
        # Mapped and shared: what is written to the tensor is in the file.
        self.mapped: torch.Tensor = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self._file = path.open("r+b")
        self._digests: dict[int, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(DIGEST_THREADS, "digests")

    def written(self, position: int) -> None:
        """All before `position` has come. Digests the parts that are whole, but for the first, which has the header."""
        for part in range(len(self._digests) + 1, position // PART_BYTES):
            self._digest(part, (part + 1) * PART_BYTES)

    def _digest(self, part: int, end: int) -> None:
        begin = part * PART_BYTES
        self._digests[part] = self._threads.submit(part_digest, self._file.fileno(), begin, end)

    def close(self, header: bytes, size: int) -> str:
        """Complete the file, and return its digest."""
        # Nothing is written through the mapping after the last change that the file's time shows.
        del self.mapped
        self._file.truncate(size)
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        for part in range(-(-size // PART_BYTES)):
            if part not in self._digests:
                self._digest(part, min((part + 1) * PART_BYTES, size))
        try:
            return combined(self._digests[part].result() for part in sorted(self._digests))
        finally:
            self.forget()

    def forget(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._file.close()


class GroupMember:
    """Takes part in one group. Every method may block until the process is killed."""

    def __init__(self) -> None:
        #: Of the group's keys in the store. It has the group's own key.
        self.prefix = ""
        self._group: Any = None
        self._target: UpdateFile | None = None

    def carry_out(self, order: m.Order) -> m.OrderDone:
        digest = ""
        match order:
            case m.JoinGroup():
                self._join(order)
            case m.OpenFile(_, path, size):
                self._forget()
                self._target = UpdateFile(Path(path), size)
            case m.ReceiveRanges():
                self._receive(order)
            case m.CloseFile(_, header, size):
                assert self._target is not None
                target, self._target = self._target, None
                digest = target.close(header, size)
            case m.ForgetFile():
                self._forget()
        return m.OrderDone(order.call, digest=digest)

    def _join(self, order: m.JoinGroup) -> None:
        self.prefix = order.prefix
        timeout = timedelta(seconds=order.timeout_s)
        store = _distributed.TCPStore(
            order.address,
            order.port,
            order.world_size,
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,
        )
        options = _distributed.ProcessGroupGloo._Options()
        options._timeout = timeout
        # Other members reach this machine as it reaches the store.
        host = _own_address(order.address, order.port)
        options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        self._group = _distributed.ProcessGroupGloo(
            _distributed.PrefixStore(order.prefix, store), order.rank, order.world_size, options
        )

    def _receive(self, order: m.ReceiveRanges) -> None:
        assert self._target is not None
        options = _distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=order.timeout_s)
        for begin, end in pieces(order.ranges, order.piece_bytes):
            self._group.broadcast([self._target.mapped[begin:end]], options).wait()
            self._target.written(end)

    def _forget(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            target.forget()


def _own_address(address: str, port: int) -> str:
    """The address of this machine that a connection to there has."""
    with socket.create_connection((address, port), timeout=10) as probe:
        host: str = probe.getsockname()[0]
    return host


def _attempted(member: GroupMember, order: m.Order) -> m.OrderDone:
    try:
        return member.carry_out(order)
    except Exception as error:  # noqa: BLE001 - whatever torch raises is for the replica to report
        # The key of the group is not.
        text = " ".join(str(error).split())
        if member.prefix:
            text = text.replace(member.prefix, "KEY")
        logger.info("%s failed: %s", type(order).__name__, text)
        return m.OrderDone(order.call, error=text[:500] or type(error).__name__)


def serve(channel: Channel[m.Order]) -> None:
    """Until the socket closes, which is seen at once: a thread of its own carries out the orders."""
    member = GroupMember()

    def answer(order: m.Order) -> None:
        with contextlib.suppress(Disconnected):
            channel.send(_attempted(member, order))

    orders = ThreadPoolExecutor(1, "orders")
    while True:
        for order in channel.receive(None):
            orders.submit(answer, order)


def main() -> int:
    """The argument is the number of the process's end of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # The replica decides when the receiver ends.
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), m.order_decoder)
    with contextlib.suppress(Disconnected):
        configure_as_parent("receiver")
        # It copies bytes, and computes nothing.
        torch.set_num_threads(1)
        serve(channel)
    # A thread may be inside a broadcast that never ends.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
