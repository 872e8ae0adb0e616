"""Weights that a trainer sends to the replicas, as gateways, replicas and trainers speak of them. No I/O, no torch.

A trainer and the receivers of the replicas form a group (`torch.distributed`, gloo). The trainer is rank 0. The calls of vLLM
0.32 steer it: init, start, update, finish. The bytes go from the trainer to the receivers, and no gateway carries any.

Where a replica declares a backend of vLLM's own weight transfer (`EngineCard.weight_transfer`), vLLM's workers take part
themselves, each as a rank. What the trainer says to them is passed on (`InitInfo`, `UpdateInfo`).

Always holds: every order names the group, and a replica's boot is part of the group. Each has a time by which it has ended.
Without a backend of vLLM, the bytes of one update are those of its tensors, in the order of their names, little-endian and
without gaps. They come as broadcasts of uint8 from rank 0: pieces of `packed_buffer_size_bytes`, the last one shorter; or, if
not packed, one piece per tensor that is not empty.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec

from midstream.core.types import Content, SnapshotFiles

#: Where a receiver takes part in a group.
TRANSFER_PATH = "/replica/transfer"
#: Where a replica gives others the files of a pushed snapshot: FILES_PATH/FINGERPRINT/NAME.
FILES_PATH = "/replica/files"
#: Of the keys in the rendezvous store, before the group's key.
STORE_PREFIX = "midstream"
PIECE_BYTES = 64 * 2**20


class TrainerState(enum.StrEnum):
    """What one look for a trainer shows."""

    ALIVE = "alive"
    #: Nobody listens at its address, or something else does.
    GONE = "gone"
    #: What listens there is silent: a trainer that stands still, or something else that holds its port.
    UNKNOWN = "unknown"


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """`init_info` of /init_weight_transfer_engine, with the names of vLLM's own.

    master_address, master_port: of the store (torch's TCPStore), which the trainer opens. rank_offset: the rank of the first
    receiver. world_size: of the group, the trainer included. key: only who knows it finds the group in the store.
    packed_buffer_size_bytes: of a piece. packed_num_buffers: taken, and of no use here.
    """

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    key: str = ""
    packed: bool = True
    packed_buffer_size_bytes: int = PIECE_BYTES
    packed_num_buffers: int = 2


class SentTensors(msgspec.Struct, frozen=True, kw_only=True):
    """`update_info` of /update_weights: the tensors that come, in this order.

    names: as the checkpoint names them. dtype_names: as torch names them, `bfloat16`. shapes: in elements.
    """

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class InitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`init_info` for a backend of vLLM, as the trainer gave it. rank_offset, if there: of the first rank that it means."""

    backend: str
    fields: dict[str, Any]


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`update_info` for a backend of vLLM, as the trainer gave it: for all ranks, or one for each rank, in their order."""

    fields: dict[str, Any] | list[dict[str, Any]]


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="order"):
    """group: its id. boot: of the replica that is meant; another one refuses. within_s: how long it may take, in seconds."""

    group: str
    boot: str
    within_s: float


class Join(_Order, frozen=True, kw_only=True, tag="join"):
    """Start a receiver and take part as `rendezvous.rank_offset`. It replaces the receiver of an older group."""

    rendezvous: Rendezvous


class JoinInPlace(_Order, frozen=True, kw_only=True, tag="join in place"):
    """Have the engine's own ranks take part, from `rank_offset` on. It replaces the group before."""

    init: InitInfo


class Begin(_Order, frozen=True, kw_only=True, tag="begin"):
    """Make room for update number `update`. What an older one left is dropped. live_s: it is dropped after so long, too."""

    update: int
    live_s: float


class Check(_Order, frozen=True, kw_only=True, tag="check"):
    """Refuse tensors that do not fit the served model, by name, before a byte moves."""

    update: int
    sent: SentTensors


class Receive(_Order, frozen=True, kw_only=True, tag="receive"):
    """Receive these tensors; answered when they are here."""

    update: int
    sent: SentTensors


class CheckInPlace(_Order, frozen=True, kw_only=True, tag="check in place"):
    """As `Check`."""

    update: int
    info: UpdateInfo


class ReceiveInPlace(_Order, frozen=True, kw_only=True, tag="receive in place"):
    """As `Receive`, into the weights of the engine. They are uncertain from here on, until a signal has switched to them."""

    update: int
    info: UpdateInfo


class Finish(_Order, frozen=True, kw_only=True, tag="finish"):
    """Close the files of the update. Refused when a tensor was not sent. Answered with `Received`, also when it comes again."""

    update: int


class Drop(_Order, frozen=True, kw_only=True, tag="drop"):
    """Forget what the update received."""

    update: int


class LeaveGroup(_Order, frozen=True, kw_only=True, tag="leave"):
    """End the receiver, whatever it does. Also of a group that is unknown."""


class Alive(_Order, frozen=True, kw_only=True, tag="alive"):
    """Look whether the trainer's store still answers. Answered with `TrainerSeen`."""


class Keep(_Order, frozen=True, kw_only=True, tag="keep"):
    """Put the files of `content` into `bucket` as `snapshot`. Answered when they are durable. boot: "" for any."""

    snapshot: str
    bucket: str
    content: Content


class Digest(_Order, frozen=True, kw_only=True, tag="digest"):
    """Digest the whole files of `chain`, a full snapshot and then deltas, which are here. Answered with `Digested`. boot: ""
    for any."""

    chain: Annotated[tuple[SnapshotFiles, ...], msgspec.Meta(min_length=1)]


class Distrust(_Order, frozen=True, kw_only=True, tag="distrust"):
    """Use no whole files of `chain` or of its beginnings any more: other replicas have other bytes. boot: "" for any."""

    chain: Annotated[tuple[SnapshotFiles, ...], msgspec.Meta(min_length=1)]


TransferOrder = (
    Join
    | JoinInPlace
    | Begin
    | Check
    | CheckInPlace
    | Receive
    | ReceiveInPlace
    | Finish
    | Drop
    | LeaveGroup
    | Alive
    | Keep
    | Digest
    | Distrust
)


class CarriedOut(msgspec.Struct, frozen=True):
    """The answer of an order that has none of its own."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """content: of the files that the update made. received_bytes: of its tensors."""

    content: Content
    received_bytes: int


class Digested(msgspec.Struct, frozen=True, kw_only=True):
    """content: of the whole files."""

    content: Content


class TrainerSeen(msgspec.Struct, frozen=True):
    state: TrainerState
