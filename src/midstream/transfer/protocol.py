"""The messages between a replica process and its receiver process. `http/ipc.py` frames them. Imports no torch.

The replica sends orders. The receiver carries them out one after the other, and answers each with one `OrderDone`, which has
the number of the call. A Ping waits for no other order.
"""

from __future__ import annotations

import msgspec


class JoinGroup(msgspec.Struct, tag=True, frozen=True):
    """Take part in the group whose store is at `address`. timeout_s: for the other members."""

    call: int
    address: str
    port: int
    world_size: int
    rank: int
    prefix: str
    timeout_s: float


class OpenFile(msgspec.Struct, tag=True, frozen=True):
    """The target of what comes. It is there, and has room for all of it."""

    call: int
    path: str


class ReceiveRanges(msgspec.Struct, tag=True, frozen=True):
    """Receive these ranges of the file, which follow those received before. piece_bytes: of a broadcast, at most; None: a
    range is one."""

    call: int
    ranges: list[tuple[int, int]]
    piece_bytes: int | None
    timeout_s: float


class CloseFile(msgspec.Struct, tag=True, frozen=True):
    """Write the header, and cut the file to `size`. Answered with the digest, and what its pass showed."""

    call: int
    header: bytes
    size: int


class ForgetFile(msgspec.Struct, tag=True, frozen=True):
    call: int


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answered at once, beside the order that is carried out."""

    call: int


Order = JoinGroup | OpenFile | ReceiveRanges | CloseFile | ForgetFile | Ping


class OrderDone(msgspec.Struct, tag=True, frozen=True):
    """error: why the order failed, on one line. digest: of the closed file. finite: all its numbers were seen to be."""

    call: int
    error: str | None = None
    digest: str = ""
    finite: bool = False


order_decoder = msgspec.msgpack.Decoder(Order)
done_decoder = msgspec.msgpack.Decoder(OrderDone)
