"""What each member of a trainer's group is ordered to do with what the trainer said. Pure.

Always holds: a member gets the ranks that are its own. Of what a trainer says to a backend of vLLM, nothing else is changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from midstream.core.errors import InvalidRequest
from midstream.core.transfer import (
    Check,
    CheckInPlace,
    InitInfo,
    Join,
    JoinInPlace,
    Receive,
    ReceiveInPlace,
    Rendezvous,
    SentTensors,
    UpdateInfo,
)
from midstream.ledger import Transfer, TransferMember

T = TypeVar("T")
U = TypeVar("U")
#: What a trainer says of an update: part by part.
Sent = Sequence[SentTensors | UpdateInfo]
_TRAINER_CHARS = 12
#: A backend whose `init_info` has one of them gives its ranks numbers.
_OF_A_GROUP = {"rank_offset", "world_size", "master_address"}


def trainer_name(asked: Rendezvous | InitInfo) -> str:
    """HOST:PORT of its store. A trainer without one has the digest of what it said."""
    if isinstance(asked, Rendezvous):
        return f"{asked.master_address}:{asked.master_port}"
    address, port = asked.fields.get("master_address"), asked.fields.get("master_port")
    if address and port:
        return f"{address}:{port}"
    said = msgspec.json.encode(asked.fields, order="deterministic")
    return f"{asked.backend}:{hashlib.sha256(said).hexdigest()[:_TRAINER_CHARS]}"


def join(
    group: Transfer, member: TransferMember, asked: Rendezvous | InitInfo, within_s: float
) -> Join | JoinInPlace:
    name, boot = group.group, member.boot
    if isinstance(asked, Rendezvous):
        own = msgspec.structs.replace(asked, rank_offset=member.rank)
        return Join(group=name, boot=boot, within_s=within_s, rendezvous=own)
    fields = dict(asked.fields)
    if _OF_A_GROUP & fields.keys():
        # Also where the trainer leaves it out: vLLM's default would be the same on all replicas.
        fields["rank_offset"] = member.rank
    init = InitInfo(backend=asked.backend, fields=fields)
    return JoinInPlace(group=name, boot=boot, within_s=within_s, init=init)


def check(
    group: Transfer, member: TransferMember, sent: SentTensors | UpdateInfo, within_s: float
) -> Check | CheckInPlace:
    return _order(Check, CheckInPlace, group, member, sent, within_s)


def receive(
    group: Transfer, member: TransferMember, sent: SentTensors | UpdateInfo, within_s: float
) -> Receive | ReceiveInPlace:
    return _order(Receive, ReceiveInPlace, group, member, sent, within_s)


def _order(
    of_tensors: Callable[..., T],
    in_place: Callable[..., U],
    group: Transfer,
    member: TransferMember,
    sent: SentTensors | UpdateInfo,
    within_s: float,
) -> T | U:
    """What is said of tensors to this member, in the words of its way to take them."""
    to: dict[str, Any] = {
        "group": group.group,
        "boot": member.boot,
        "within_s": within_s,
        "update": group.number,
    }
    if isinstance(sent, SentTensors):
        return of_tensors(**to, sent=sent)
    return in_place(**to, info=_own_part(group, member, sent))


def check_parts(group: Transfer, sent: Sent) -> None:
    """Raises InvalidRequest unless a list that is for each rank has as many entries as there are ranks."""
    ranks = sum(member.ranks for member in group.members)
    for one in sent:
        if isinstance(one, UpdateInfo) and isinstance(one.fields, list) and len(one.fields) != ranks:
            raise InvalidRequest(
                f"update_info: a list has one entry for each rank, {ranks}, got {len(one.fields)}",
                param="update_info",
            )


def _own_part(group: Transfer, member: TransferMember, sent: UpdateInfo) -> UpdateInfo:
    if not isinstance(sent.fields, list):
        return sent
    start = member.rank - min(one.rank for one in group.members)
    return UpdateInfo(fields=sent.fields[start : start + member.ranks])
