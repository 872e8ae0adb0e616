"""What the hot-load API shows of replicas: how far each is with the desired snapshot. Pure.

Always holds:
- `loading_state` is an object; the least ready replica comes first, so that a client that reads only one waits for all.
- A replica that names the desired snapshot as its own is ready only when it serves exactly that, and was checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from midstream.core.types import ReplicaReport, Stage
from midstream.fleet.reconcile import failure, serves
from midstream.fleet.replicas import ReplicaView
from midstream.ledger import DeploymentState

#: Stages on the wire, in the order a replica goes through them; also how far from ready one is.
SHOWN_STAGE = {
    Stage.FETCHING: "downloading",
    Stage.REBUILDING: "rebuilding",
    Stage.VERIFYING: "verifying",
    Stage.STAGING: "staging",
    Stage.STAGED: "staged",
    Stage.COMMITTING: "committing",
    Stage.CHECKING: "checking",
}
READY_ORDER = ("error", "pending", *SHOWN_STAGE.values(), "idle", "done")
_AT_REST = ("idle", "done")


def replica_rows(
    state: DeploymentState, views: Sequence[ReplicaView], troubles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One row per replica, the least ready first. troubles: by replica, why it cannot be started."""
    rows = [(view.index, _replica_row(state, view, troubles.get(view.name))) for view in views]
    rows.sort(key=lambda at: (READY_ORDER.index(at[1]["loading_state"]["stage"]), at[1]["readiness"], at[0]))
    return [row for _, row in rows]


def _replica_row(state: DeploymentState, view: ReplicaView, trouble: str | None) -> dict[str, Any]:
    report = view.report
    stage, target, error = loading_state(state, report)
    if report is None and view.last_words:
        error = f"{error}: {view.last_words}"
    if trouble is not None:
        error = trouble if error is None else f"{error}: {trouble}"
    timing = report.last_swap if report else None
    on_the_way = report is not None and report.snapshot == state.snapshot and stage not in _AT_REST
    return {
        "current_snapshot_identity": report.snapshot if report else None,
        "readiness": view.usable and not on_the_way,
        "loading_state": {"stage": stage, "target_snapshot_identity": target},
        "midstream": {
            "replica": view.name,
            "boot": report.boot if report else None,
            "reachable": report is not None,
            "error": error,
            "generation": report.generation if report else None,
            "last_swap": msgspec.to_builtins(timing) if timing else None,
        },
    }


def loading_state(state: DeploymentState, report: ReplicaReport | None) -> tuple[str, str | None, str | None]:
    """(stage on the wire, its target, error message) of one replica.

    `error` is about the desired snapshot only. It stays while that is desired, also when the replica went on to load a
    fallback. `pending` says that the replica has not taken up the desired snapshot.
    """
    desired = state.desired
    if report is None:
        return "pending", desired.snapshot if desired else None, "the replica cannot be reached"
    if desired is not None:
        error = failure(state, report, desired)
        if error is not None:
            return "error", desired.snapshot, error
    if report.stage in SHOWN_STAGE:
        return SHOWN_STAGE[report.stage], report.target, None
    if desired is None:
        return "idle", None, None
    if serves(state, report, desired):
        return "done", desired.snapshot, None
    return "pending", desired.snapshot, None
