"""Which replicas take part in a trainer's group, with how many ranks, and whether the group is still theirs. Pure.

Always holds:
- Every replica that a deployment is to have takes part, in its present boot. Ranks have no gaps.
- At the finish, a member that the deployment is to have no more counts for nothing, and enough members have the bytes.
- What a gateway does not hear of is no sign that a member is gone.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import accumulate

from midstream.core.errors import Conflict, InvalidRequest, ReplicaUnavailable
from midstream.core.transfer import InitInfo, Rendezvous
from midstream.core.types import EngineCard
from midstream.fleet.registry import Deployment
from midstream.ledger import DeploymentRow, Phase, Transfer, TransferMember

#: Replicas that are not ready are waited for so long before the next try.
READY_AGAIN_S = 5
INIT = "call /init_weight_transfer_engine"
#: Clients find the first two words.
AGAIN = f"init again: {INIT}"
#: What is to be done in each phase.
NEXT = {
    Phase.JOINING: "wait for the answer of /init_weight_transfer_engine",
    Phase.JOINED: "call /start_weight_update",
    Phase.STARTING: "wait for the answer of /start_weight_update",
    Phase.STARTED: "call /update_weights with update_info, then /finish_weight_update",
    Phase.RECEIVING: "wait for the answer of /update_weights",
    Phase.FINISHING: "wait for the answer of /finish_weight_update",
    Phase.UNNAMED: "call /finish_weight_update with another weight_version, or other policies",
}
_SIZE, _OFFSET = "world_size", "rank_offset"


def all_ready(deployment: Deployment, asked: Rendezvous | InitInfo) -> list[TransferMember]:
    """All replicas, each with its ranks. Raises ReplicaUnavailable, InvalidRequest, or Conflict for another world size."""
    views = deployment.replicas.views
    missing = [*deployment.absent, *(view.name for view in views if not view.usable)]
    lacking = deployment.wanted_in_all - len(views)
    if missing or lacking > 0 or not views:
        names = ", ".join(missing) or f"{max(lacking, 1)} more"
        raise ReplicaUnavailable(f"not every replica is ready: {names}", retry_after_s=READY_AGAIN_S)
    backend = asked.backend if isinstance(asked, InitInfo) else ""
    cards = {view.name: _card(deployment, view.name) for view in views}
    if others := [name for name, card in cards.items() if card.weight_transfer != backend]:
        has = {name: cards[name].weight_transfer or "a receiver" for name in others}
        raise Conflict(
            f"init_info: all replicas have to take weights in one way; {backend or 'a receiver'} is asked for, and"
            f" {', '.join(f'{name} has {one}' for name, one in has.items())}"
        )
    first, size = _offset_and_size(asked)
    starts = list(accumulate((card.ranks for card in cards.values()), initial=first))
    if size is not None and size != starts[-1]:
        raise Conflict(
            f"init_info.world_size: {_counted(len(views), starts[-1] - first)} from rank {first} on make it {starts[-1]}, got"
            f" {size}; {AGAIN}",
            param="init_info.world_size",
        )
    return [
        TransferMember(name, boot_of(deployment, name) or "", start, ranks=card.ranks)
        for start, (name, card) in zip(starts, cards.items(), strict=False)
    ]


def check_crossing(row: DeploymentRow) -> None:
    """Raises Conflict where streams have to end before a switch: they would wait for it, and it for them."""
    if row.transition == "SYNC":
        raise Conflict(
            f"{row.name} is synchronous, so a switch waits for streams, which stand still while a trainer writes in"
            " place; make its transition ASYNC, or publish files"
        )


def and_ended(message: str) -> str:
    return f"{message}. The group has ended; {AGAIN}"


def _counted(replicas: int, ranks: int) -> str:
    return f"{replicas} replicas" if ranks == replicas else f"{ranks} ranks of {replicas} replicas"


def _offset_and_size(asked: Rendezvous | InitInfo) -> tuple[int, int | None]:
    """The first rank of a replica, and the world size where the trainer gave one. Raises InvalidRequest."""
    if isinstance(asked, Rendezvous):
        return asked.rank_offset, asked.world_size
    for field in (_OFFSET, _SIZE):
        given = asked.fields.get(field, 1)
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise InvalidRequest(
                f"init_info.{field}: must be a number from 1 on, got {given!r:.40}",
                param=f"init_info.{field}",
            )
    return asked.fields.get(_OFFSET, 1), asked.fields.get(_SIZE)


def _card(deployment: Deployment, replica: str) -> EngineCard:
    view = deployment.replicas.named(replica)
    card = None if view is None or view.report is None else view.report.card
    return card or EngineCard()


def backend_of(deployment: Deployment) -> str:
    """The backend of vLLM by which its replicas take weights, as far as they have reported; "": they have receivers."""
    found = (_card(deployment, view.name).weight_transfer for view in deployment.replicas.views)
    return next(filter(None, found), "")


def ranks_of(deployment: Deployment) -> int:
    """The ranks of all replicas that it is to have. One that has not reported is taken for one like the others."""
    views = deployment.replicas.views
    known = [_card(deployment, view.name).ranks for view in views if view.report and view.report.card]
    return sum(known) + max(known, default=1) * max(0, deployment.wanted_in_all - len(known))


def boot_of(deployment: Deployment, replica: str) -> str | None:
    """None: the replica is gone, or not reachable."""
    view = deployment.replicas.named(replica)
    return None if view is None or view.report is None else view.report.boot


def left_since(deployment: Deployment, group: Transfer) -> dict[str, str]:
    """Members that the deployment is to have no more, with that as the reason. Their failures count for nothing."""
    if not _sees(deployment):
        return {}
    return {
        member.replica: f"{member.replica} has left the deployment"
        for member in group.members
        if deployment.replicas.named(member.replica) is None and member.replica not in deployment.absent
    }


def _sees(deployment: Deployment) -> bool:
    """Whether this gateway hears of any replica. One that has just started, or is cut off, says nothing of a group."""
    return any(view.report is not None for view in deployment.replicas.views)


def check_reachable(deployment: Deployment, group: Transfer, *, every: bool) -> None:
    """Raises ReplicaUnavailable unless this gateway hears of the group's members, or of one. The group stays: another gateway
    may hear of them, and a member that restarts says so."""
    left = left_since(deployment, group)
    members = [member.replica for member in group.active if member.replica not in left]
    unheard = [name for name in members if boot_of(deployment, name) is None]
    if unheard and (every or unheard == members):
        are = "is" if len(unheard) == 1 else "are"
        raise ReplicaUnavailable(
            f"{', '.join(unheard)} {are} not reachable; the group stays, so repeat the call",
            retry_after_s=READY_AGAIN_S,
        )


def needed(group: Transfer, quorum: float, left: Collection[str] = ()) -> int:
    """How many members have to do their part, of those that have not left."""
    return max(1, math.ceil(quorum * (len(group.members) - len(left)) - 1e-9))


def changed_since(deployment: Deployment, group: Transfer) -> list[str]:
    """Why the group is not that of the replicas any more, in words. A replica that is not ready yet, or not reachable, changes
    nothing."""
    left = left_since(deployment, group)
    found = [f"replica {name} is gone" for name in left]
    boots = {member.replica: (member.boot, boot_of(deployment, member.replica)) for member in group.members}
    found += [f"replica {name} restarted" for name, (boot, now) in boots.items() if now not in (None, boot)]
    joined = [view.name for view in deployment.replicas.views if view.usable and view.name not in boots]
    return [*found, *(f"replica {name} joined" for name in joined)]
