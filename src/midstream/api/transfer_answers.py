"""The answers about weights that trainers send: of the calls, and what the ledger shows of groups and updates. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec


class TransferDone(msgspec.Struct):
    message: str


class TransferOpened(msgspec.Struct):
    """world_size: of the group, the trainer included. ranks: by replica."""

    message: str
    group: str
    world_size: int
    ranks: dict[str, int]


class TransferStarted(msgspec.Struct):
    """update: its number in the group."""

    message: str
    group: str
    update: int


class TransferFinished(msgspec.Struct):
    """weight_version: the snapshot that these replicas serve now. fenced: why others did not get it, by replica."""

    message: str
    weight_version: str
    generation: int
    replicas: list[str]
    fenced: dict[str, str]


class LedgerMember(msgspec.Struct):
    """fenced: why the replica takes no further part; null while it does."""

    replica: str
    boot: str
    rank: int
    fenced: str | None


class LedgerUpdate(msgspec.Struct):
    """An update that a trainer sent. committed_at, identity, generation: null unless it became a snapshot. replicas: those
    that received it. kept: whether its files are in the bucket; empty before it was committed."""

    number: int
    started_at: float
    committed_at: float | None
    identity: str | None
    generation: int | None
    replicas: list[str]
    kept: Literal["", "wanted", "kept", "off", "given up"]


class LedgerTransfer(msgspec.Struct):
    """A trainer's group. trainer: HOST:PORT of its store. deadline: null while it waits for its next update. reason: why it
    ended."""

    group: str
    phase: str
    trainer: str
    members: list[LedgerMember]
    deadline: float | None
    opened_at: float
    ended_at: float | None
    reason: str | None
    updates: list[LedgerUpdate]
