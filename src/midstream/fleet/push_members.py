"""Which replicas take part in a trainer's group, whether the group is still theirs, and how many of them are enough. Pure.

Always holds:
- Every replica that a deployment is to have takes part, in its present boot.
- At the finish, a member that the deployment is to have no more counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from midstream.core.errors import Conflict, ReplicaUnavailable
from midstream.core.transfer import Rendezvous
from midstream.fleet.registry import Deployment
from midstream.ledger import Phase, Transfer, TransferMember

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
}


def all_ready(deployment: Deployment, rendezvous: Rendezvous) -> list[TransferMember]:
    """All replicas, each with its rank. Raises ReplicaUnavailable, or Conflict for another world size."""
    views = deployment.replicas.views
    missing = [*deployment.absent, *(view.name for view in views if not view.usable)]
    lacking = deployment.wanted_in_all - len(views)
    if missing or lacking > 0 or not views:
        names = ", ".join(missing) or f"{max(lacking, 1)} more"
        raise ReplicaUnavailable(f"not every replica is ready: {names}", retry_after_s=READY_AGAIN_S)
    size = rendezvous.rank_offset + len(views)
    if rendezvous.world_size != size:
        raise Conflict(
            f"init_info.world_size: {len(views)} replicas from rank {rendezvous.rank_offset} on make it {size}, got"
            f" {rendezvous.world_size}; {AGAIN}",
            param="init_info.world_size",
        )
    return [
        TransferMember(view.name, boot_of(deployment, view.name) or "", rendezvous.rank_offset + number)
        for number, view in enumerate(views)
    ]


def boot_of(deployment: Deployment, replica: str) -> str | None:
    """None: the replica is gone, or not reachable."""
    view = deployment.replicas.named(replica)
    return None if view is None or view.report is None else view.report.boot


def left_since(deployment: Deployment, group: Transfer) -> dict[str, str]:
    """Members that the deployment is to have no more, with that as the reason. Their failures count for nothing."""
    return {
        member.replica: f"{member.replica} has left the deployment"
        for member in group.members
        if deployment.replicas.named(member.replica) is None and member.replica not in deployment.absent
    }


def needed(group: Transfer, quorum: float, left: Collection[str] = ()) -> int:
    """How many members have to do their part, of those that have not left."""
    return max(1, math.ceil(quorum * (len(group.members) - len(left)) - 1e-9))


def changed_since(deployment: Deployment, group: Transfer) -> list[str]:
    """Why the group is not that of the replicas any more, in words. A replica that is not ready yet changes nothing."""
    found = []
    for member in group.members:
        boot = boot_of(deployment, member.replica)
        if boot is None:
            is_there = deployment.replicas.named(member.replica) is not None
            found.append(f"replica {member.replica} is {'not reachable' if is_there else 'gone'}")
        elif boot != member.boot:
            found.append(f"replica {member.replica} restarted")
    known = {member.replica for member in group.members}
    joined = [view.name for view in deployment.replicas.views if view.usable and view.name not in known]
    return [*found, *(f"replica {name} joined" for name in joined)]
