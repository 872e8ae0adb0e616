"""The receiver process: it takes part in a group of `torch.distributed` and writes what comes into a file.

Owns: the group's connections, the memory of the pieces, and the digests of the file's parts.
Always holds: a piece is written while the next one comes: the group has PIECES_COMING broadcasts to do at a time. The digest is
that of the bytes that lie in the file, on all cores together. Nothing is unpickled. The process ends when its socket closes, so
it never outlives its replica; a deadline is the replica's, which kills it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from midstream.core.logs import configure_as_parent
from midstream.http.ipc import Channel, Disconnected
from midstream.snapshots.content import (
    PART_BYTES,
    ReadPart,
    combined,
    in_groups,
    part_ranges,
    read_parts,
)
from midstream.snapshots.finite import parts_show_finite
from midstream.transfer import protocol as m
from midstream.transfer.layout import pieces

logger = logging.getLogger(__name__)

#: This process may use so many.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
#: With fewer, digests would take the time of broadcasts: both ends of one are busy all the time.
CORES_FOR_DIGESTS_BESIDE = 8
#: With one, the trainer would wait while a piece is written.
PIECES_COMING = 2

#: torch's type stubs leave out most of what is used here.
_distributed: Any = torch.distributed


class UpdateFile:
    """The file of one update. Its data comes piece after piece, without gaps.

    beside: parts are digested while others come, not at the end.
    """

    def __init__(self, path: Path, *, beside: bool) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR)
        self._beside = beside
        self._digester = ThreadPoolExecutor(CORES, "digests")
        # Where the first part begins that is not digested. Parts with some of the header, which comes last, do not count.
        self._whole: int | None = None
        # Of parts that are written, by where they begin.
        self._beside_parts: dict[int, Future[list[ReadPart]]] = {}

    def write(self, data: memoryview, begin: int) -> None:
        """The bytes of the file from `begin` on. Raises OSError."""
        _write(self._file, data, begin)
        if self._whole is None:
            self._whole = -(-begin // PART_BYTES) * PART_BYTES
        while self._beside and self._whole + PART_BYTES <= begin + len(data):
            part = self._whole, self._whole + PART_BYTES
            self._beside_parts[self._whole] = self._digester.submit(read_parts, self._file, [part])
            self._whole += PART_BYTES

    def close(self, header: bytes, size: int) -> tuple[str, bool]:
        """Complete the file. Returns its digest, and whether the same pass showed all its numbers to be finite. Raises
        OSError."""
        try:
            os.ftruncate(self._file, size)
            _write(self._file, memoryview(header), 0)
            ranges = part_ranges(size)
            missing = [each for each in ranges if each[0] not in self._beside_parts]
            found = self._digester.map(partial(read_parts, self._file), in_groups(missing))
            parts = dict(zip((begin for begin, _ in missing), chain.from_iterable(found), strict=True))
            parts |= {begin: future.result()[0] for begin, future in self._beside_parts.items()}
            finite = parts_show_finite(self._path, {at: part.largest for at, part in parts.items()})
            return combined(parts[begin].digest for begin, _ in ranges), finite
        finally:
            self.forget()

    def forget(self) -> None:
        self._digester.shutdown(cancel_futures=True)
        os.close(self._file)


def _write(file: int, data: memoryview, begin: int) -> None:
    while data:
        count = os.pwrite(file, data, begin)
        data, begin = data[count:], begin + count


class GroupMember:
    """Takes part in one group. Every method may block until the process is killed."""

    def __init__(self) -> None:
        #: Of the group's keys in the store. It has the group's own key.
        self.prefix = ""
        self._group: Any = None
        self._target: UpdateFile | None = None
        # The next update uses the same memory: the first touch of new memory costs more than a copy.
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(PIECES_COMING)]

    def carry_out(self, order: m.Order) -> m.OrderDone:
        digest, finite = "", False
        match order:
            case m.JoinGroup():
                self._join(order)
            case m.OpenFile(_, path):
                self._forget()
                self._target = UpdateFile(Path(path), beside=CORES >= CORES_FOR_DIGESTS_BESIDE)
            case m.ReceiveRanges():
                self._receive(order)
            case m.CloseFile(_, header, size):
                assert self._target is not None
                target, self._target = self._target, None
                digest, finite = target.close(header, size)
            case m.ForgetFile():
                self._forget()
        return m.OrderDone(order.call, digest=digest, finite=finite)

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
        options = _distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=order.timeout_s)
        coming: deque[tuple[Any, torch.Tensor, int]] = deque()
        for number, (begin, end) in enumerate(pieces(order.ranges, order.piece_bytes)):
            if len(coming) == PIECES_COMING:
                self._take(*coming.popleft())
            piece = self._memory(number % PIECES_COMING, end - begin)
            coming.append((self._group.broadcast([piece], options), piece, begin))
        while coming:
            self._take(*coming.popleft())

    def _take(self, broadcast: Any, piece: torch.Tensor, begin: int) -> None:
        assert self._target is not None
        broadcast.wait()
        self._target.write(piece.numpy().data, begin)

    def _memory(self, turn: int, size: int) -> torch.Tensor:
        if self._buffers[turn].numel() < size:
            self._buffers[turn] = torch.empty(size, dtype=torch.uint8)
        return self._buffers[turn][:size]

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
    member, one_at_a_time = GroupMember(), threading.Lock()

    def say(done: m.OrderDone) -> None:
        with one_at_a_time, contextlib.suppress(Disconnected):
            channel.send(done)

    orders = ThreadPoolExecutor(1, "orders")
    while True:
        for order in channel.receive(None):
            if isinstance(order, m.Ping):
                say(m.OrderDone(order.call))
            else:
                orders.submit(lambda order: say(_attempted(member, order)), order)


def main() -> int:
    channel = Channel.of_child(m.order_decoder)
    with contextlib.suppress(Disconnected):
        configure_as_parent("receiver")
        # It copies bytes, and computes nothing.
        torch.set_num_threads(1)
        serve(channel)
    # A thread may be inside a broadcast that never ends.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
