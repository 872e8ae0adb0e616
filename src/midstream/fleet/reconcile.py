"""What to do about one replica: observation in, action out. Pure.

Always holds:
- A snapshot that failed on a replica is not sent to that boot again under the same generation. One that killed `DEATHS_MAX`
  boots of a replica is not sent to its further boots. A replica that lost `LOSSES_MAX` boots in a row, whatever they were
  loading, is asked for a new snapshot only now and then.
- What a replica loads or serves already, file for file, is not sent to it again.
- Once a published snapshot was ready on any replica, a boot that starts from the base weights takes no requests at first. It
  has to serve a published snapshot again. A boot that was serving before the first signal keeps serving.
- A replica that is admitted stays admitted for the rest of its boot: swaps never take it out of rotation. The one exception
  is a replica with other weights than the others (agree.py), until they are equal.
- The prompt-cache policy a replica gets is the strongest of all signals since the one it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from midstream.core.reports import Reported
from midstream.core.retry import Backoff
from midstream.core.types import BASE_SNAPSHOT, Desired, ResetPromptCache, Stage
from midstream.fleet.agree import is_out, standing_of
from midstream.ledger import BootHistory, Death, DeploymentState, TransitionRow

# One death may be an accident.
DEATHS_MAX = 2
# After so many lost boots in a row the replica is the cause, whatever it was loading.
LOSSES_MAX = 4
BACKOFF = Backoff(first_s=2.0, last_s=60.0)

LOADING = frozenset(Stage) - {Stage.IDLE, Stage.ERROR}
#: Stages in which the engine has been given the weights, so that they may be what kills it.
IN_ENGINE = frozenset((Stage.STAGING, Stage.STAGED, Stage.COMMITTING, Stage.CHECKING))


@dataclass(frozen=True)
class ReplicaAction:
    # The message to the replica. None: it knows, or there is nothing for it to do.
    send: Desired | None
    # Placement may use it.
    admit: bool
    # It has to serve a published snapshot and failed on all of them: retry after a while.
    stuck: bool = False


def decide(
    state: DeploymentState,
    report: Reported | None,
    admitted: bool,
    retry_generation: int = 0,
    turn: bool | None = None,
) -> ReplicaAction:
    """The action for a replica with this report (None: unreachable), currently admitted or not.

    retry_generation: of the last retry of a replica that was stuck, 0: none. Failures before it are forgiven, and what is
    sent carries it. turn: whether it may switch now, None: whenever it is ready.
    """
    if report is None:
        return ReplicaAction(send=None, admit=admitted)
    out = is_out(state, report)
    admit = standing_of(state, report) is None and (admitted or _may_join(state, report))
    target = _target(state, report, retry_generation)
    if target is None:
        bare = report.own.snapshot == BASE_SNAPSHOT or not report.ready
        hopeful = state.desired is not None and (state.ever_ready if bare else state.proven)
        hopeful = hopeful or _is_spared(state, report, retry_generation)
        return ReplicaAction(
            None, admit, stuck=hopeful and not (out and report.own.snapshot == state.snapshot)
        )
    reset = effective_reset(state, report)
    send = replace(target, reset_prompt_cache=reset, reset_since=report.own.signalled)
    if has_taken_up(state, report, target):
        if turn is False or not report.own.held:
            return ReplicaAction(None, admit)
        # Under the generation that it has staged. A later one would make it prepare again, out of turn.
        known = report.own.generation if target.reload else _staged(report)
        return ReplicaAction(replace(send, generation=known), admit)
    generation = max(target.generation, retry_generation)
    let_go = _staged(report) if turn and keeps_staged(report, generation) else 0
    # Held also when it is its turn: that may have passed by the time this is staged.
    return ReplicaAction(replace(send, generation=generation, hold=turn is not None, let_go=let_go), admit)


def target_of(state: DeploymentState, report: Reported, retry_generation: int = 0) -> Desired | None:
    """What this replica should be loading or serving; None when it should stay as it is.

    It is the desired snapshot until that has failed on this boot. Then a replica on published weights keeps those. One on the
    base weights of its start, or on weights that failed their check, has to serve again: it gets the snapshot that last became
    ready on any replica.
    """
    if state.desired is None:
        return None
    if failure(state, report, state.desired, retry_generation) is None:
        return state.desired
    if report.own.snapshot != BASE_SNAPSHOT and report.ready:
        return None
    return next((f for f in state.fallbacks if failure(state, report, f, retry_generation) is None), None)


def waits_staged(state: DeploymentState, report: Reported, retry_generation: int = 0) -> bool:
    """Whether all it needs to switch, to what it should serve or to what it keeps before that, is to be let go."""
    target = _target(state, report, retry_generation)
    if target is None or report.own.stage is not Stage.STAGED:
        return False
    return has_taken_up(state, report, target) or keeps_staged(
        report, max(target.generation, retry_generation)
    )


def keeps_staged(report: Reported, generation: int) -> bool:
    """Whether it knows what is wanted now and still holds what it has staged: newer targets came faster than its turn."""
    return report.own.held and report.own.generation == generation != _staged(report)


def _staged(report: Reported) -> int:
    """The generation of what is staged."""
    return report.own.transitions[-1].generation if report.own.transitions else report.own.generation


def _target(state: DeploymentState, report: Reported, retry_generation: int) -> Desired | None:
    """What this replica should be loading or serving, also once more; a fallback only when there is nothing better to load."""
    desired = state.desired or Desired(snapshot=BASE_SNAPSHOT, generation=0)
    target = _reload(state, report, desired) or target_of(state, report, retry_generation)
    again = (_reload(state, report, fallback) for fallback in state.fallbacks)
    return target or next((fallback for fallback in again if fallback is not None), None)


def _reload(state: DeploymentState, report: Reported, served: Desired) -> Desired | None:
    """What serves, if it is this, to be loaded once more since it is not what the others have."""
    found = standing_of(state, report)
    if (
        found is None
        or found.verdict != "reload"
        or not found.identity == served.snapshot == report.own.snapshot
    ):
        return None
    retry = found.retry_generation
    return replace(served, generation=max(served.generation, retry), reload=retry)


def failure(
    state: DeploymentState, report: Reported, desired: Desired, retry_generation: int = 0
) -> str | None:
    """Why this replica failed on `desired`, or None when it did not (or is at it again).

    A replica that serves exactly this has not failed on it, unless it failed its check, or its weights are not those of the
    others. Failures of this boot are read from the transitions. `report.own.stage` still shows the stage of the attempt before,
    between accepting a retry and beginning it.
    Of earlier boots, only deaths count: DEATHS_MAX on this snapshot, or LOSSES_MAX on whatever they loaded. Only a retry or a
    load that works makes up for them. A snapshot that served before may still be loaded.
    """
    why = _own_failure(state, report, desired, retry_generation)
    if why is not None or desired.snapshot != state.snapshot or serves(state, report, desired):
        return why
    begun = (moved.generation for moved in report.own.transitions if moved.snapshot == desired.snapshot)
    return _losses(state, report, max(begun, default=0), retry_generation)


def lost_boots(state: DeploymentState, replica: str) -> tuple[Death, ...]:
    """Those it lost to snapshots, whichever they were, since it last loaded a new one."""
    return tuple(death for death in state.deaths if death.replica == replica)


def _losses(state: DeploymentState, report: Reported, begun: int, retry_generation: int) -> str | None:
    """begun: the generation of the last message to this boot to load what is desired; 0: there was none."""
    lost = lost_boots(state, report.replica)
    if len(lost) < LOSSES_MAX or lost[-1].generation < max(begun, retry_generation):
        return None
    return (
        f"its engine died {len(lost)} times in a row while it loaded snapshots, the last time on {lost[-1].identity} "
        f"({lost[-1].detail}); it is asked again after a while"
    )


def _is_spared(state: DeploymentState, report: Reported, retry_generation: int) -> bool:
    """Whether nothing but boots lost to other snapshots keeps it from what is desired."""
    desired = state.desired
    return desired is not None and _own_failure(state, report, desired, retry_generation) is None


def _own_failure(
    state: DeploymentState, report: Reported, desired: Desired, retry_generation: int
) -> str | None:
    if (why := _disagrees(state, report, desired)) is not None:
        return why
    if report.ready and serves(state, report, desired):
        return None
    since = max(desired.generation, retry_generation)
    for moved in reversed(report.own.transitions):
        if moved.snapshot == desired.snapshot and moved.generation >= since:
            return (moved.detail or "failed") if moved.stage is Stage.ERROR else None
    deaths = [
        death
        for death in state.deaths
        if (death.replica, death.identity) == (report.replica, desired.snapshot) and death.generation >= since
    ]
    return deaths[-1].detail if len(deaths) >= DEATHS_MAX else None


def _disagrees(state: DeploymentState, report: Reported, desired: Desired) -> str | None:
    found = standing_of(state, report)
    if found is None or found.verdict != "out" or found.identity != desired.snapshot:
        return None
    return found.detail if desired.generation <= found.retry_generation else None


def has_taken_up(state: DeploymentState, report: Reported, desired: Desired) -> bool:
    """Whether the replica is at `desired`, or serves it and is at nothing else."""
    if desired.reload:
        return report.own.generation >= desired.generation
    if report.own.stage in LOADING:
        last = report.own.transitions[-1].generation if report.own.transitions else report.own.generation
        return report.own.target == desired.snapshot and last >= _since(state, desired)
    return serves(state, report, desired)


def serves(state: DeploymentState, report: Reported, desired: Desired) -> bool:
    """Whether these files, and not older ones under the same name, are what serves."""
    return report.own.snapshot == desired.snapshot and serving_generation(report) >= _since(state, desired)


def serving_generation(report: Reported) -> int:
    """The generation under which the replica loaded what serves now; 0 for the base weights of its start.

    Only a commit loads. A replica that is asked to return to the snapshot it serves is idle again under a later generation. Its
    weights, and what was done to its prompt cache, are still those of the commit.
    """
    # The commit may be too long ago to be in the report.
    idle = report.own.generation if report.own.stage is Stage.IDLE else None
    seen = False
    for moved in reversed(report.own.transitions):
        if moved.snapshot != report.own.snapshot:
            continue
        if moved.stage is Stage.CHECKING:
            return moved.generation
        if moved.stage is Stage.IDLE and not seen:
            idle, seen = moved.generation, True
    return 0 if idle is None or report.own.snapshot == BASE_SNAPSHOT else idle


def effective_reset(state: DeploymentState, report: Reported) -> ResetPromptCache:
    """The strongest policy of all signals after the one this replica serves: it may never have loaded those between.

    A fallback is loaded under a later generation than it was signalled under: the signals between count as well. While its
    weights are not known to be those of the others, none of its KV is to be used again.
    """
    if standing_of(state, report) is not None:
        return "all"
    served = report.own.signalled or serving_generation(report)
    if state.reset_all > served:
        return "all"
    return "new_session" if state.reset_new_session > served else "none"


@dataclass(frozen=True)
class Stuck:
    """Retries of a replica that failed on everything it could serve, since one signal, or since it loses boots to all."""

    # The generation of the desired snapshot.
    signal: int
    retries: int = 0
    # The generation of the last retry.
    generation: int = 0
    # When the next retry is due. None: the last one is still on its way.
    due: float | None = None


@dataclass(frozen=True)
class BootLoss:
    """A boot that ended while it was loading a snapshot. seq: of the stage change to store; None: it reported one."""

    death: Death
    seq: int | None


class Delivered(NamedTuple):
    """What this process last asked a boot to load. seen: the generation in the report that it answered."""

    boot: str
    identity: str
    generation: int
    seen: int


def loss(replica: str, history: BootHistory, sent: Delivered | None, watched: bool) -> BootLoss | None:
    """Whether the boot that ended before this one died of a snapshot.

    sent: last delivered by this process. Another gateway may have sent something newer. watched: this process saw it live.
    Only then a boot counts that ended before it reported staging, as its last reports were lost with it. Without watching, the
    boot may as well have been stopped and started over.
    """
    last = history.tail[-1] if history.tail else None
    if last is not None and (last.stage in IN_ENGINE or (last.stage in LOADING and watched)):
        return BootLoss(Death(replica, last.identity, last.generation, _died(last.stage.value)), last.seq + 1)
    if last is not None and last.stage is Stage.ERROR and _failed_in_engine(history.tail):
        return BootLoss(Death(replica, last.identity, last.generation, last.detail or "failed"), None)
    if not watched or sent is None or sent.boot != history.previous_boot:
        return None
    if last is None or _is_unreported(last, sent):
        death = Death(replica, sent.identity, sent.generation, _died("not reported"))
        return BootLoss(death, 0 if last is None else last.seq + 1)
    return None


def _is_unreported(last: TransitionRow, sent: Delivered) -> bool:
    """Whether the boot's last stage change is older than what it was sent, and of something else."""
    other = (last.identity, last.generation) != (sent.identity, sent.generation)
    return other and last.generation <= max(sent.generation, sent.seen)


def _died(stage: str) -> str:
    return f"the engine died while loading it (stage: {stage})"


def _failed_in_engine(tail: Sequence[TransitionRow]) -> bool:
    if len(tail) < 2:
        return False
    before, last = tail[-2:]
    same = (before.identity, before.generation) == (last.identity, last.generation)
    return same and before.stage in IN_ENGINE


def _since(state: DeploymentState, desired: Desired) -> int:
    return state.since.get(desired.snapshot, desired.generation)


def _may_join(state: DeploymentState, report: Reported | None) -> bool:
    """Whether a boot that is not admitted yet may be.

    A boot starts on the base weights, so any other snapshot it serves is one that it loaded and verified. A snapshot that is
    already superseded does not keep it out: the others are no further. Under a steady flow of signals it would never get in.
    The same rule takes running replicas over after a restart of the gateway.
    """
    if report is None or not report.ready or standing_of(state, report) is not None:
        return False
    if report.own.stage is Stage.CHECKING and report.own.snapshot == state.snapshot:
        # The snapshot is not proved yet.
        return False
    if report.own.snapshot != BASE_SNAPSHOT or state.snapshot == BASE_SNAPSHOT:
        return True
    if report.boot in state.first_boots:
        # It served this snapshot when there was nothing else to serve. Clocks could not show that: they jump.
        return True
    assert state.desired is not None
    return not state.ever_ready and failure(state, report, state.desired) is not None
