"""What the hot-load API shows of replicas: how far each is with the desired snapshot. Pure.

Always holds:
- `loading_state` is an object; the least ready replica comes first, so that a client that reads only one waits for all.
- `readiness` is about the snapshot that a replica serves, and `loading_state` about the desired one. So a replica that has
  not taken up a signal yet is ready and `pending`: it serves the snapshot before.
- A replica that names the desired snapshot as its own is ready only when it serves exactly that, and was checked.
- A replica that should be there has a row, also while it has no address. So a client that waits for all never ends early.
- Of a policy, only replicas that are to hold it have a row. While none is to, each that is heard has one: `unloaded` once the
  desired snapshot was served, `pending` before.
"""

from __future__ import annotations

from collections.abc import Mapping

from midstream.api import answers
from midstream.core.reports import Reported
from midstream.core.types import Stage
from midstream.fleet.reconcile import failure, serves
from midstream.fleet.registry import Deployment
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.view import ReplicaView
from midstream.ledger import DeploymentState

#: Stages on the wire, in the order a replica goes through them; also how far from ready one is.
SHOWN_STAGE: Mapping[Stage, answers.ShownStage] = {
    Stage.FETCHING: "downloading",
    Stage.REBUILDING: "rebuilding",
    Stage.VERIFYING: "verifying",
    Stage.STAGING: "staging",
    Stage.STAGED: "staged",
    Stage.COMMITTING: "committing",
    Stage.CHECKING: "checking",
}
READY_ORDER = ("error", "pending", *SHOWN_STAGE.values(), "unloaded", "idle", "done")
_AT_REST = ("idle", "done")
#: Each replica that is to serve the desired snapshot does; or each has made way for other policies since.
SERVED_STAGES = ("done", "unloaded")


def replica_rows(state: DeploymentState, deployment: Deployment) -> list[answers.HotLoadRow]:
    """One row per replica that should serve the deployment, the least ready first. state: the deployment's own."""
    replicas, troubles = deployment.replicas, deployment.troubles
    views, made_way = replicas.holders, False
    if not views:
        views = [view for view in replicas.views if view.report is not None] or replicas.views
        made_way = replicas.by_demand and state.proven
    rows = []
    for view in views:
        # What a replica said before it fell silent is shown with the deployment's own weights.
        words = "" if deployment.policy else view.replica.last_words
        rows.append((view.replica.index, _replica_row(state, view, troubles.get(view.name), words, made_way)))
    rows += [(len(views), _absent_row(state, name, troubles.get(name))) for name in deployment.absent]
    rows.sort(key=lambda at: (READY_ORDER.index(at[1].loading_state.stage), at[1].readiness, at[0]))
    return [row for _, row in rows]


def unloaded(replicas: ReplicaSet) -> list[str]:
    """The names of the replicas that are not to hold it, in order."""
    holders = replicas.holders
    return [view.name for view in replicas.views if view not in holders]


def _replica_row(
    state: DeploymentState, view: ReplicaView, trouble: str | None, words: str, made_way: bool
) -> answers.HotLoadRow:
    report = view.report
    stage, target, error = loading_state(state, report)
    if made_way and error is None:
        stage = "unloaded"
    if report is None and words:
        error = f"{error}: {words}"
    # A replica that never served has failed to load and cannot start for one reason, which is shown once.
    if trouble is not None and trouble != error:
        error = trouble if error is None else f"{error}: {trouble}"
    timing = report.own.last_swap if report else None
    on_the_way = report is not None and report.own.snapshot == state.snapshot and stage not in _AT_REST
    return answers.HotLoadRow(
        current_snapshot_identity=report.own.snapshot if report else None,
        readiness=view.usable and not on_the_way,
        loading_state=answers.LoadingState(stage, target),
        midstream=answers.ReplicaLoad(
            replica=view.name,
            boot=report.boot if report else None,
            reachable=report is not None,
            error=error,
            generation=report.own.generation if report else None,
            last_swap=timing,
        ),
    )


def _absent_row(state: DeploymentState, name: str, trouble: str | None) -> answers.HotLoadRow:
    """The row of a replica that has no address yet."""
    target = state.desired.snapshot if state.desired else None
    return answers.HotLoadRow(
        current_snapshot_identity=None,
        readiness=False,
        loading_state=answers.LoadingState("pending", target),
        midstream=answers.ReplicaLoad(
            replica=name,
            boot=None,
            reachable=False,
            error=trouble or "the replica is starting and has not reported yet",
            generation=None,
            last_swap=None,
        ),
    )


def loading_state(
    state: DeploymentState, report: Reported | None
) -> tuple[answers.ShownStage, str | None, str | None]:
    """(stage on the wire, its target, error message) of one replica.

    `error` is about the desired snapshot only. It stays while that is desired, also when the replica went on to load a
    fallback. Of a load that waits for others it says for what. `pending` says that the replica has not taken up the desired
    snapshot.
    """
    desired = state.desired
    if report is None:
        return "pending", desired.snapshot if desired else None, "the replica cannot be reached"
    if desired is not None:
        error = failure(state, report, desired)
        if error is not None:
            return "error", desired.snapshot, error
    if report.own.stage in SHOWN_STAGE:
        return SHOWN_STAGE[report.own.stage], report.own.target, report.own.error
    if desired is None:
        return "idle", None, None
    if serves(state, report, desired):
        return "done", desired.snapshot, None
    return "pending", desired.snapshot, None
