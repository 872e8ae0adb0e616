"""The ledger as the API shows it. Pure.

Always holds: every snapshot the ledger has is shown, with its chain and with how each replica fared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from midstream.api import answers, transfer_answers
from midstream.core.types import Stage
from midstream.ledger import (
    DeploymentState,
    Disagreement,
    SnapshotRow,
    Transfer,
    TransferUpdate,
    TransitionRow,
)


def shown(
    state: DeploymentState,
    snapshots: Sequence[SnapshotRow],
    transitions: Sequence[TransitionRow],
    transfers: Sequence[tuple[Transfer, Sequence[TransferUpdate]]] = (),
    *,
    older_left_out: bool,
) -> answers.DeploymentLedger:
    """`transitions`: the newest stage changes, oldest first. transfers: groups with their updates."""
    by_snapshot: dict[str, list[TransitionRow]] = {}
    for moved in transitions:
        by_snapshot.setdefault(moved.identity, []).append(moved)
    return answers.DeploymentLedger(
        desired_snapshot_identity=state.snapshot,
        generation=state.desired.generation if state.desired else 0,
        snapshots=[_snapshot(row, by_snapshot.get(row.identity, [])) for row in snapshots],
        disagreements=[_disagreement(row) for row in state.disagreements],
        transfers=[_transfer(group, updates) for group, updates in transfers],
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
        full_url=row.full_url,
        full_needed=row.full_needed,
        reset_prompt_cache=row.reset_prompt_cache,
        max_cache_age=row.max_cache_age,
        extra_fields_ignore=list(row.ignore_config),
        first_signalled_at=row.first_signalled_at,
        signalled_at=row.signalled_at,
        generation=row.generation,
        fingerprint=row.fingerprint,
        files=msgspec.convert(row.content, list[answers.LedgerFile] | None, from_attributes=True),
        ready_at=row.ready_at,
        replicas=_replicas(moves),
        transitions=[_transition(moved) for moved in moves],
    )


def _replicas(moves: Iterable[TransitionRow]) -> list[answers.LedgerReplica]:
    """The last stage change of each replica and when it was ready, in the last generation that it worked on."""
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


def _transfer(row: Transfer, updates: Sequence[TransferUpdate]) -> transfer_answers.LedgerTransfer:
    return transfer_answers.LedgerTransfer(
        group=row.group,
        phase=row.phase,
        trainer=row.trainer,
        members=[
            transfer_answers.LedgerMember(member.replica, member.boot, member.rank, member.fenced or None)
            for member in row.members
        ],
        deadline=row.deadline,
        opened_at=row.opened_at,
        ended_at=row.ended_at,
        reason=row.reason or None,
        updates=msgspec.convert(updates, list[transfer_answers.LedgerUpdate], from_attributes=True),
    )
