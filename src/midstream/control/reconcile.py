"""What to do about one replica: observation in, action out. Pure.

Always holds:
- A snapshot that failed on a replica is not sent to that boot again under the same generation.
- A new boot, which starts from the base weights, takes no requests until it serves a published snapshot again; with
  nothing published that ever loaded, the base weights are what everybody serves.
- A replica that is admitted stays admitted for the rest of its boot: swaps never take it out of rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

from midstream.ledger import DeploymentState
from midstream.types import BASE_SNAPSHOT, Desired, ReplicaReport, Stage


@dataclass(frozen=True)
class Action:
    send: Desired | None  # tell the replica; None: it knows, or there is nothing for it to do
    admit: bool  # placement may use it


def decide(state: DeploymentState, report: ReplicaReport | None, admitted: bool) -> Action:
    """The action for a replica with this report (None: unreachable), currently admitted or not."""
    if report is None:
        return Action(send=None, admit=admitted)
    target = target_of(state, report)
    send = None if target is None or has_accepted(report, target) else target
    return Action(send=send, admit=admitted or _may_join(state, report))


def target_of(state: DeploymentState, report: ReplicaReport) -> Desired | None:
    """What this replica should be loading or serving; None when it should stay as it is.

    The desired snapshot; once that has failed on this boot, a replica on published weights keeps those, and one still on
    the base weights of its start gets the snapshot that last became ready anywhere, so that it can serve again.
    """
    if state.desired is None:
        return None
    if failure(report, state.desired) is None:
        return state.desired
    if report.snapshot != BASE_SNAPSHOT:
        return None
    return next((f for f in state.fallbacks if failure(report, f) is None), None)


def failure(report: ReplicaReport, desired: Desired) -> str | None:
    """Why this boot failed on `desired`, or None when it did not (or is at it again).

    Read from the transitions, not from `report.stage`: between accepting a retry and beginning it, a report still
    shows the stage of the attempt before.
    """
    key = (desired.snapshot, desired.generation)
    for moved in reversed(report.transitions):
        if (moved.snapshot, moved.generation) == key:
            return (moved.detail or "failed") if moved.stage is Stage.ERROR else None
    return None


def has_accepted(report: ReplicaReport, desired: Desired) -> bool:
    return report.generation == desired.generation and desired.snapshot in (report.target, report.snapshot)


def _may_join(state: DeploymentState, report: ReplicaReport) -> bool:
    """Whether a boot that is not admitted yet may be.

    A boot starts on the base weights, so any other snapshot it serves is one that it loaded and verified. That it may
    already be superseded does not keep it out: the others are no further, and under a steady flow of signals it
    would never get in. The same rule takes running replicas over after a restart of the gateway.
    """
    if not report.ready:
        return False
    if report.snapshot != BASE_SNAPSHOT or state.desired is None:
        return True
    return not state.fallbacks and failure(report, state.desired) is not None
