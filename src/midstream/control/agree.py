"""Whether replicas that serve the same files hold the same weights: their checks compared. Pure.

Judged are those that serve what is desired, and those that stay with a fallback. A replica that differs loads the files once
more; if it differs again it is out of rotation until it agrees on a later snapshot. Engines of equal settings on one kind of
processor give equal bits; CANARY_TOLERANCE is for those that do not.

Always holds: the majority is right, of equal groups the one with the earliest replica, so somebody always stays in; a replica
that is being loaded again, or is out, does not vote while another is there that may.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from midstream.ledger import DeploymentState, Disagreement
from midstream.types import ReplicaReport, SnapshotCheck, Stage

#: Nats, per token of the canary. Kernels that differ in summation order stay an order of magnitude below it in bfloat16,
#: one RL step's other weights seldom do over a whole prompt; digests, where both have one, must be equal anyway.
CANARY_TOLERANCE = 0.05


@dataclass(frozen=True)
class Finding:
    """What the ledger has to be told of a replica.

    verdict: reload: it differs for the first time; out: again, or it could not load; agreed: it is as it should be.
    generation: of the check, for reload; else the retry generation of the disagreement that it settles.
    """

    replica: str
    boot: str
    identity: str
    verdict: Literal["reload", "out", "agreed"]
    generation: int
    detail: str = ""


def standing_of(state: DeploymentState, report: ReplicaReport) -> Disagreement | None:
    """The disagreement this boot has not settled; None when there is none."""
    for found in state.disagreements:
        if (found.replica, found.boot) == (report.replica, report.boot):
            return None if found.verdict == "agreed" else found
    return None


def is_out(state: DeploymentState, report: ReplicaReport) -> bool:
    found = standing_of(state, report)
    return found is not None and found.verdict == "out"


def findings(
    state: DeploymentState, reports: Sequence[ReplicaReport], staying: Collection[str] = ()
) -> list[Finding]:
    """What follows from the checks of the replicas, in fleet order, that serve what is desired or a fallback.

    staying: names of those that have nothing else to load: one on a fallback that goes on to something else is let go on.
    """
    by_snapshot: dict[str, list[tuple[ReplicaReport, SnapshotCheck]]] = {}
    for report in reports:
        if (check := _known_check(state, report)) is not None:
            by_snapshot.setdefault(check.snapshot, []).append((report, check))
    found = [_failed_reload(state, report) for report in reports]
    for snapshot, checked in by_snapshot.items():
        right = _right(_voters(state, reports, checked))
        for report, check in checked:
            if right is not None and (snapshot == state.snapshot or report.replica in staying):
                found.append(_compared(state, report, check, *right))
    return [finding for finding in found if finding is not None]


def _voters(
    state: DeploymentState,
    reports: Sequence[ReplicaReport],
    checked: Sequence[tuple[ReplicaReport, SnapshotCheck]],
) -> list[tuple[ReplicaReport, SnapshotCheck]]:
    """Who is not doubted; when no replica that is there is, those that loaded again since, lest nobody ever serves again."""
    if any(standing_of(state, report) is None for report in reports):
        return [pair for pair in checked if standing_of(state, pair[0]) is None]
    return [(report, check) for report, check in checked if _has_loaded_since(state, report, check)]


def _has_loaded_since(state: DeploymentState, report: ReplicaReport, check: SnapshotCheck) -> bool:
    standing = standing_of(state, report)
    if standing is None or check.generation < standing.retry_generation:
        return False
    proved_wrong = standing.verdict == "out" and standing.identity == check.snapshot
    return not proved_wrong or _signalled_since(state, standing)


def difference(check: SnapshotCheck, right: SnapshotCheck) -> str | None:
    """How a check differs from the right one; None when they agree."""
    if len(check.canary) != len(right.canary):
        return f"its canary has {len(check.canary)} log-probabilities instead of {len(right.canary)}"
    for position, (mine, theirs) in enumerate(zip(check.canary, right.canary, strict=True), start=1):
        if not abs(mine - theirs) <= CANARY_TOLERANCE:  # a NaN differs, too
            return f"the log-probability of canary token {position} is {mine:.6g} instead of {theirs:.6g}"
    if None not in (check.weights, right.weights) and check.weights != right.weights:
        return f"the digest of its weights is {check.weights} instead of {right.weights}"
    return None


def _known_check(state: DeploymentState, report: ReplicaReport) -> SnapshotCheck | None:
    """Of what serves, when it is of the files that the ledger means."""
    check, since = report.check, state.since.get(report.snapshot)
    if check is None or since is None or check.snapshot != report.snapshot:
        return None
    return check if check.generation >= since else None


def _right(
    voters: Sequence[tuple[ReplicaReport, SnapshotCheck]],
) -> tuple[ReplicaReport, SnapshotCheck] | None:
    """One of the largest group of replicas that agree, the group with the earliest replica among equals."""
    groups: list[list[tuple[ReplicaReport, SnapshotCheck]]] = []
    for report, check in voters:
        for group in groups:
            if difference(check, group[0][1]) is None:
                group.append((report, check))
                break
        else:
            groups.append([(report, check)])
    return max(groups, key=len)[0] if groups else None


def _compared(
    state: DeploymentState,
    report: ReplicaReport,
    check: SnapshotCheck,
    reference: ReplicaReport,
    right: SnapshotCheck,
) -> Finding | None:
    standing = standing_of(state, report)
    why = difference(check, right)
    if why is not None:
        why = f"{check.snapshot} is not what {reference.replica} serves under that name: {why}"
    if standing is None:
        return _found(report, check.snapshot, "reload", check.generation, why) if why else None
    if check.generation < standing.retry_generation:
        return None  # of before it was loaded again
    if why is None:
        return _found(report, standing.identity, "agreed", standing.retry_generation)
    if standing.identity == check.snapshot and not _signalled_since(state, standing):
        if standing.verdict == "out":
            return None
        return _found(report, check.snapshot, "out", standing.retry_generation, why)
    return _found(report, check.snapshot, "reload", check.generation, why)


def _failed_reload(state: DeploymentState, report: ReplicaReport) -> Finding | None:
    standing = standing_of(state, report)
    if standing is None or standing.verdict == "out" or standing.identity not in state.since:
        return None
    at_rest = report.stage in (Stage.IDLE, Stage.ERROR) and report.generation >= standing.retry_generation
    if not at_rest or report.snapshot != standing.identity:
        return None
    if report.check is not None and report.check.generation >= standing.retry_generation:
        return None
    last = report.transitions[-1] if report.transitions else None
    if last is None or last.snapshot != standing.identity or last.generation < standing.retry_generation:
        return None  # accepted, not begun
    why = f"{standing.detail}; loading it again failed: {report.error or 'it was not loaded'}"
    return _found(report, standing.identity, "out", standing.retry_generation, why)


def _signalled_since(state: DeploymentState, standing: Disagreement) -> bool:
    generation = 0 if state.desired is None else state.desired.generation
    return generation > standing.retry_generation


def _found(
    report: ReplicaReport,
    identity: str,
    verdict: Literal["reload", "out", "agreed"],
    generation: int,
    detail: str | None = None,
) -> Finding:
    return Finding(report.replica, report.boot, identity, verdict, generation, detail or "")
