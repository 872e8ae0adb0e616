"""What becomes of a trainer's update: the port to the signal that makes a snapshot of it, and the result of the call.

Always holds: an update whose bytes differ between its replicas never comes here. A call whose answer was lost gets the same
result when it is repeated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from midstream.core.errors import Conflict
from midstream.core.types import Content, Desired
from midstream.ledger import Begun, Committing, Ledger, Phase, SignalResult, Transfer, TransferUpdate


class UpdateSignal(Protocol):
    """What makes a snapshot of an update whose bytes are the same on all replicas."""

    async def sign(self, content: Content, committing: Committing) -> SignalResult:
        """Take the signal, and commit the update with it. Raises MidstreamError; nothing is signalled then."""

    async def served(self, desired: Desired, replicas: Collection[str], within_s: float) -> None:
        """Returns when these replicas serve it. Raises MidstreamError."""


@dataclass(frozen=True)
class Finished:
    """fenced: replicas that the update did not reach, with the reasons."""

    desired: Desired
    replicas: tuple[str, ...]
    fenced: dict[str, str]


async def finished_before(
    ledger: Ledger, deployment: str, group: Transfer | None, said: Begun
) -> Finished | None:
    """What the group's last update became, if it has this name and no other was started since. Raises Conflict."""
    if group is None or group.phase is not Phase.JOINED:
        return None
    update = await ledger.committed_update(group)
    if update is None or said.identity not in (None, update.identity):
        return None
    if said.policies not in (None, update.policies):
        raise Conflict(
            f"policies: {update.identity!r} was finished with {update.policies}, not {said.policies};"
            " push again, or signal it again",
            param="policies",
        )
    return Finished(await desired_of(ledger, deployment, update), update.replicas, {})


async def desired_of(ledger: Ledger, deployment: str, update: TransferUpdate) -> Desired:
    """Raises Conflict when something else is desired by now."""
    desired = (await ledger.state(deployment)).desired
    if desired is None or desired.generation != update.generation:
        raise Conflict(f"{update.identity!r} was superseded before it served everywhere")
    return desired
