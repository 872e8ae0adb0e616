"""Whether replicas that serve the same files hold the same weights: compared with the ledger, and with each other. Pure.

The ledger remembers the bytes of an identity's files. For each kind of engine it also remembers the digest of the weights that
the engine made of them. A replica that differs from the ledger is wrong, even if all others agree with it.

Replicas are judged that serve the desired snapshot, or stay with a fallback. A replica that differs loads the files once more.
If it differs again, it is out of rotation until it agrees on a later snapshot. Engines of equal settings on one kind of
processor give equal bits; CANARY_TOLERANCE is for those that do not.

Always holds:
- A replica that differs from the ledger does not vote. Among the others the majority is right. Of equal groups, the one with
  the earliest replica is right. No two digests of a group differ, also where they agree with one that has none.
- A replica that is being loaded again, or is out, does not vote while another one is there that may.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from midstream.core.reports import Reported
from midstream.core.types import BASE_SNAPSHOT, SnapshotCheck, Stage
from midstream.ledger import DeploymentState, Disagreement
from midstream.snapshots.content import difference as content_difference

#: Nats, per token of the canary. Kernels that differ in summation order stay an order of magnitude below it in bfloat16.
#: Weights of another RL step seldom do over a whole prompt. Digests, where both have one, must be equal anyway.
CANARY_TOLERANCE = 0.05


def standing_of(state: DeploymentState, report: Reported) -> Disagreement | None:
    """The disagreement this boot has not settled; None when there is none."""
    for found in state.disagreements:
        if (found.replica, found.boot) == (report.replica, report.boot):
            return None if found.verdict == "agreed" else found
    return None


def is_out(state: DeploymentState, report: Reported) -> bool:
    found = standing_of(state, report)
    return found is not None and found.verdict == "out"


def findings(
    state: DeploymentState, reports: Sequence[Reported], staying: Collection[str] = ()
) -> list[Disagreement]:
    """What the ledger has to store: it follows from the checks of the replicas, in fleet order, that serve what is desired or a
    fallback. A new disagreement has the verdict "reload", and no retry generation yet. Another verdict settles a stored one.

    staying: names of those that have nothing else to load: one on a fallback that will load something else is not held up.
    """
    by_snapshot: dict[str, list[tuple[Reported, SnapshotCheck]]] = {}
    for report in reports:
        if (check := _known_check(state, report)) is not None:
            by_snapshot.setdefault(check.snapshot, []).append((report, check))
    found = [_failed_reload(state, report) for report in reports]
    for snapshot, checked in by_snapshot.items():
        right = _right(_voters(state, reports, checked))
        for report, check in checked:
            if snapshot != state.snapshot and report.replica not in staying:
                continue
            why = _why(state, report, check, right)
            if why is not None or right:
                found.append(_judged(state, report, check, why))
    return [finding for finding in found if finding is not None]


def _voters(
    state: DeploymentState,
    reports: Sequence[Reported],
    checked: Sequence[tuple[Reported, SnapshotCheck]],
) -> list[tuple[Reported, SnapshotCheck]]:
    """Replicas with weights that agree. If none agrees, those that have reloaded since, so that some replica can serve
    again."""
    checked = [pair for pair in checked if known_difference(state, *pair) is None]
    if any(standing_of(state, report) is None for report in reports):
        return [pair for pair in checked if standing_of(state, pair[0]) is None]
    return [(report, check) for report, check in checked if _has_loaded_since(state, report, check)]


def _has_loaded_since(state: DeploymentState, report: Reported, check: SnapshotCheck) -> bool:
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
        # Written so that a NaN differs, too.
        if not abs(mine - theirs) <= CANARY_TOLERANCE:
            return f"the log-probability of canary token {position} is {mine:.6g} instead of {theirs:.6g}"
    return _other_digest(check, right)


def _other_digest(check: SnapshotCheck, right: SnapshotCheck) -> str | None:
    kind, digest = _digest(check)
    right_kind, right_digest = _digest(right)
    if None not in (digest, right_digest) and kind == right_kind and digest != right_digest:
        return f"the digest of its weights is {digest} instead of {right_digest}"
    return None


def known_difference(state: DeploymentState, report: Reported, check: SnapshotCheck) -> str | None:
    """How what serves differs from what the ledger has under its name; None: not as far as is known."""
    named = [desired for desired in (state.desired, *state.fallbacks) if desired is not None]
    meant = {desired.snapshot: desired for desired in named}.get(check.snapshot)
    if meant is not None and meant.content is not None:
        for found in report.own.contents:
            if (found.snapshot, found.fingerprint) != (meant.snapshot, meant.fingerprint):
                continue
            if (other := content_difference(meant.content, found.files)) is not None:
                return other
    kind, digest = _digest(check)
    known = state.weights.get(check.snapshot, {}).get(kind)
    if None not in (digest, known) and digest != known:
        return f"the digest of its weights is {digest} instead of {known}"
    return None


def settled(state: DeploymentState, reports: Sequence[Reported]) -> list[SnapshotCheck]:
    """Checks of what is desired with digests that the ledger does not have: one of each kind of engine, from replicas that
    agree.

    None while any replica may still say something else.
    """
    if state.snapshot == BASE_SNAPSHOT or any(standing_of(state, report) is not None for report in reports):
        return []
    waiting = [report for report in reports if report.own.stage is not Stage.ERROR]
    checks = [_known_check(state, report) for report in waiting]
    if any(check is None or check.unread or check.snapshot != state.snapshot for check in checks):
        return []
    found: dict[str, SnapshotCheck] = {}
    disputed = set(state.weights.get(state.snapshot, {}))
    for check in checks:
        if check is None or check.weights is None:
            continue
        kind = _digest(check)[0]
        if found.setdefault(kind, check).weights != check.weights:
            disputed.add(kind)
    return [check for kind, check in found.items() if kind not in disputed]


def _digest(check: SnapshotCheck) -> tuple[str, str | None]:
    """(kind of engine, digest) of the weights."""
    if check.weights is None:
        return "", None
    kind, _, digest = check.weights.rpartition(":")
    return kind, digest


def _known_check(state: DeploymentState, report: Reported) -> SnapshotCheck | None:
    """Of what serves, when it is of the files that the ledger means."""
    check, since = report.own.check, state.since.get(report.own.snapshot)
    if check is None or since is None or check.snapshot != report.own.snapshot:
        return None
    return check if check.generation >= since else None


def _right(
    voters: Sequence[tuple[Reported, SnapshotCheck]],
) -> list[tuple[Reported, SnapshotCheck]]:
    """Those by whom the others are judged: of the largest group of replicas that agree, the group with the earliest replica
    among equals, one for the canary, and one for each kind of digest."""
    places = {report.replica: place for place, (report, _) in enumerate(voters)}
    best: list[tuple[Reported, SnapshotCheck]] = []
    rank = (0, 0)
    for first in voters:
        group = _group(first, voters)
        if (found := (len(group), -min(places[report.replica] for report, _ in group))) > rank:
            best, rank = group, found
        if len(best) == len(voters):
            break
    kinds = {
        _digest(check)[0]: (report, check) for report, check in reversed(best) if check.weights is not None
    }
    return best[:1] + [pair for pair in kinds.values() if pair not in best[:1]]


def _group(
    first: tuple[Reported, SnapshotCheck], voters: Sequence[tuple[Reported, SnapshotCheck]]
) -> list[tuple[Reported, SnapshotCheck]]:
    """Voters with the canary of `first`, of whose digests no two differ. Those with its digest come first."""
    alike = [pair for pair in voters if pair[0] is not first[0] and difference(pair[1], first[1]) is None]
    digests: dict[str, str] = {}
    group = []
    for report, check in (first, *sorted(alike, key=lambda pair: pair[1].weights != first[1].weights)):
        kind, digest = _digest(check)
        if digest is None or digests.setdefault(kind, digest) == digest:
            group.append((report, check))
    return group


def _why(
    state: DeploymentState,
    report: Reported,
    check: SnapshotCheck,
    right: Sequence[tuple[Reported, SnapshotCheck]],
) -> str | None:
    """What is wrong with it, if anything."""
    if (why := known_difference(state, report, check)) is not None:
        return f"{check.snapshot} is not what the ledger has under that name: {why}"
    for place, (other, theirs) in enumerate(right):
        why = _other_digest(check, theirs) if place else difference(check, theirs)
        if why is not None:
            return f"{check.snapshot} is not what {other.replica} serves under that name: {why}"
    return None


def _judged(
    state: DeploymentState, report: Reported, check: SnapshotCheck, why: str | None
) -> Disagreement | None:
    standing = standing_of(state, report)
    if standing is None:
        return _new(report, check, why) if why else None
    if check.generation < standing.retry_generation:
        # The report is from before the snapshot was loaded again.
        return None
    if why is None:
        # What it differed in may be still to come.
        return None if check.unread else replace(standing, verdict="agreed")
    if standing.identity == check.snapshot and not _signalled_since(state, standing):
        if standing.verdict == "out":
            return None
        return replace(standing, verdict="out", detail=why)
    return _new(report, check, why)


def _new(report: Reported, check: SnapshotCheck, why: str) -> Disagreement:
    return Disagreement(report.replica, report.boot, check.snapshot, check.generation, 0, why)


def _failed_reload(state: DeploymentState, report: Reported) -> Disagreement | None:
    standing = standing_of(state, report)
    if standing is None or standing.verdict == "out" or standing.identity not in state.since:
        return None
    at_rest = (
        report.own.stage in (Stage.IDLE, Stage.ERROR) and report.own.generation >= standing.retry_generation
    )
    if not at_rest or report.own.snapshot != standing.identity:
        return None
    if report.own.check is not None and report.own.check.generation >= standing.retry_generation:
        return None
    last = report.own.transitions[-1] if report.own.transitions else None
    if last is None or last.snapshot != standing.identity or last.generation < standing.retry_generation:
        # The signal was accepted; its attempt has not begun.
        return None
    why = f"{standing.detail}; loading it again failed: {report.own.error or 'it was not loaded'}"
    return replace(standing, verdict="out", detail=why)


def _signalled_since(state: DeploymentState, standing: Disagreement) -> bool:
    generation = 0 if state.desired is None else state.desired.generation
    return generation > standing.retry_generation
