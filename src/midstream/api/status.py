"""What the hot-load API shows of replicas: how far each is with the desired snapshot. Pure.

Always holds:
- `loading_state` is an object; the least ready replica comes first, so that a client that reads only one waits for all.
- A replica that names the desired snapshot as its own is ready only when it serves exactly that, and was checked.
- A replica that should be there has a row, also while it has no address. So a client that waits for all never ends early.
- Of a policy, only replicas that are to hold it have a row. While none is to, each that is heard has one: `unloaded` once the
  desired snapshot was served, `pending` before.

What a deployment's engines can do: what a signal needs of them, and how they are shown. Pure.

Owns: which signals are refused when an engine lacks a feature.
Always holds: a deployment has a feature when every known replica of it has the feature. Of unknown replicas nothing is
claimed, and nothing is refused on their account.

The ledger as the API shows it. Pure.

Always holds: every snapshot the ledger has is shown, with its chain and with how each replica fared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from midstream.api import answers
from midstream.api.signals import SignalBody
from midstream.core.errors import SnapshotRefused
from midstream.core.text import engine_name, in_order, refusal
from midstream.core.types import ENGINE_FEATURES, EngineCard, FileContent, ReplicaReport, Stage
from midstream.fleet.reconcile import failure, serves
from midstream.fleet.registry import Deployment
from midstream.fleet.replicas import ReplicaSet, ReplicaView
from midstream.ledger import DeploymentState, Disagreement, SnapshotRow, TransitionRow


class Need(NamedTuple):
    """words: what an engine without the feature does not do, as in `does not {words}`."""

    feature: str
    words: str


_MAX_AGE = Need("max_cache_age", "know how old cached KV is; signal all, new_session or none")
_POLICY = Need("cache_policies", "keep cached KV from being reused; signal none")
# What the fields of reset_prompt_cache need.
SIGNAL_NEEDS = (_MAX_AGE, _POLICY)
# What the field policy needs, and what a signal without it.
_SEVERAL = Need("policies", "serve adapters; serve a merged checkpoint in a deployment of its own")
FULL = Need("full_snapshots", "take full weights; signal a policy")


def check_signal(signal: SignalBody, reports: Iterable[ReplicaReport | None]) -> None:
    """Raises SnapshotRefused, which names the field, the engine and the feature, when a replica's engine cannot do what the
    signal asks for. reports: of the deployment's replicas, None of one that cannot be reached."""
    needs = [("reset_prompt_cache", need) for need in [_need(signal)] if need is not None]
    if signal.policy is not None:
        # Whatever its cache policy would need: this is what the signal is for.
        needs.insert(0, ("policy", _SEVERAL))
    else:
        needs.insert(0, ("identity", FULL))
    for card in _cards(reports):
        for param, need in needs:
            if not card.has(need.feature):
                raise SnapshotRefused(refusal(param, card, need.feature, need.words), param=param)


def _need(signal: SignalBody) -> Need | None:
    """A signal that does not say asks for `all`."""
    if signal.max_cache_age is not None:
        return _MAX_AGE
    return None if signal.reset == "none" else _POLICY


def engines(reports: Iterable[ReplicaReport | None]) -> answers.ModelEngines | UnsetType:
    """What a model's object says of the engines that serve it. UNSET while no engine is known.

    `engine` names the features that all of them have, and those that one or more of them lacks. Engines of several kinds or
    versions are named with commas. `why` has reasons for some that are lacking. `max_model_len` is the shortest.
    """
    heard = [report for report in reports if report is not None]
    cards = _cards(heard)
    if not cards:
        return UNSET
    common = set(ENGINE_FEATURES).intersection(*(card.features for card in cards))
    engine = answers.Engine(
        kind=_all(card.kind for card in cards),
        version=_all(card.version for card in cards),
        features=in_order(common),
        lacks=in_order(ENGINE_FEATURES.keys() - common),
        why={feature: reason for card in cards for feature, reason in card.why.items()} or UNSET,
    )
    return answers.ModelEngines(engine, max_model_len(heard))


def max_model_len(reports: Iterable[ReplicaReport | None]) -> int | UnsetType:
    """The shortest, in tokens; UNSET while no engine is known."""
    lengths = [
        report.max_model_len for report in reports if report is not None and report.max_model_len is not None
    ]
    return min(lengths) if lengths else UNSET


def engine_of(report: ReplicaReport | None) -> str | UnsetType:
    """The engine's name; UNSET while it is not known."""
    return UNSET if report is None or report.card is None else engine_name(report.card)


def _cards(reports: Iterable[ReplicaReport | None]) -> list[EngineCard]:
    return [report.card for report in reports if report is not None and report.card is not None]


def _all(names: Iterable[str]) -> str:
    return ", ".join(sorted({name for name in names if name}))


def ledger_shown(
    state: DeploymentState,
    snapshots: Sequence[SnapshotRow],
    transitions: Sequence[TransitionRow],
    *,
    older_left_out: bool,
) -> answers.DeploymentLedger:
    """`transitions`: the newest stage changes, oldest first."""
    by_snapshot: dict[str, list[TransitionRow]] = {}
    for moved in transitions:
        by_snapshot.setdefault(moved.identity, []).append(moved)
    return answers.DeploymentLedger(
        desired_snapshot_identity=state.snapshot,
        generation=state.desired.generation if state.desired else 0,
        snapshots=[_snapshot(row, by_snapshot.get(row.identity, [])) for row in snapshots],
        disagreements=[_disagreement(row) for row in state.disagreements],
        older_transitions_left_out=older_left_out,
    )


def _snapshot(row: SnapshotRow, moves: Sequence[TransitionRow]) -> answers.LedgerSnapshot:
    return answers.LedgerSnapshot(
        identity=row.identity,
        kind=row.kind,
        previous_snapshot_identity=row.previous,
        compression_format=row.compression,
        checksum_format=row.checksum_format,
        chain=[link.snapshot for link in row.parents],
        url=row.url,
        reset_prompt_cache=row.reset_prompt_cache,
        max_cache_age=row.max_cache_age,
        extra_fields_ignore=list(row.ignore_config),
        first_signalled_at=row.first_signalled_at,
        signalled_at=row.signalled_at,
        generation=row.generation,
        fingerprint=row.fingerprint,
        files=None if row.content is None else [_file(file) for file in row.content],
        ready_at=row.ready_at,
        replicas=_replicas(moves),
        transitions=[_transition(moved) for moved in moves],
    )


def _file(file: FileContent) -> answers.LedgerFile:
    return answers.LedgerFile(file.name, file.size, file.digest)


def _replicas(moves: Iterable[TransitionRow]) -> list[answers.LedgerReplica]:
    """Of each replica, the last stage change and when it was ready, in the generation it was at last."""
    found: dict[str, answers.LedgerReplica] = {}
    for moved in moves:
        before = found.get(moved.replica)
        ready_at = None if before is None or before.generation != moved.generation else before.ready_at
        found[moved.replica] = answers.LedgerReplica(
            replica=moved.replica,
            generation=moved.generation,
            ready_at=moved.at if moved.stage is Stage.IDLE else ready_at,
            stage=moved.stage,
            at=moved.at,
            error=moved.detail or None,
        )
    return [found[name] for name in sorted(found)]


def _transition(row: TransitionRow) -> answers.LedgerTransition:
    return answers.LedgerTransition(
        replica=row.replica,
        boot=row.boot,
        generation=row.generation,
        error=row.detail or None,
        seq=row.seq,
        stage=row.stage,
        at=row.at,
    )


def _disagreement(row: Disagreement) -> answers.LedgerDisagreement:
    return answers.LedgerDisagreement(
        replica=row.replica,
        boot=row.boot,
        generation=row.generation,
        error=row.detail or None,
        identity=row.identity,
        verdict=row.verdict,
    )


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
    rows = [(view.index, _replica_row(state, view, troubles.get(view.name), made_way)) for view in views]
    rows += [(len(views), _absent_row(state, name, troubles.get(name))) for name in deployment.absent]
    rows.sort(key=lambda at: (READY_ORDER.index(at[1].loading_state.stage), at[1].readiness, at[0]))
    return [row for _, row in rows]


def unloaded(replicas: ReplicaSet) -> list[str]:
    """The names of the replicas that are not to hold it, in order."""
    holders = replicas.holders
    return [view.name for view in replicas.views if view not in holders]


def _replica_row(
    state: DeploymentState, view: ReplicaView, trouble: str | None, made_way: bool
) -> answers.HotLoadRow:
    report = view.report
    stage, target, error = loading_state(state, report)
    if made_way and error is None:
        stage = "unloaded"
    if report is None and view.last_words:
        error = f"{error}: {view.last_words}"
    # A replica that never served has failed to load and cannot start for one reason, which is told once.
    if trouble is not None and trouble != error:
        error = trouble if error is None else f"{error}: {trouble}"
    timing = report.last_swap if report else None
    on_the_way = report is not None and report.snapshot == state.snapshot and stage not in _AT_REST
    return answers.HotLoadRow(
        current_snapshot_identity=report.snapshot if report else None,
        readiness=view.usable and not on_the_way,
        loading_state=answers.LoadingState(stage, target),
        midstream=answers.ReplicaLoad(
            replica=view.name,
            boot=report.boot if report else None,
            reachable=report is not None,
            error=error,
            generation=report.generation if report else None,
            last_swap=timing,
        ),
    )


def _absent_row(state: DeploymentState, name: str, trouble: str | None) -> answers.HotLoadRow:
    """Of a replica that has no address yet."""
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
    state: DeploymentState, report: ReplicaReport | None
) -> tuple[answers.ShownStage, str | None, str | None]:
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
