"""The ledger as the API shows it. Pure.

Always holds: every snapshot the ledger has is shown, with its chain and with how each replica fared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from midstream.core.types import FileContent, Stage
from midstream.ledger import DeploymentState, Disagreement, SnapshotRow, TransitionRow


def ledger_body(
    state: DeploymentState, snapshots: Sequence[SnapshotRow], transitions: Sequence[TransitionRow]
) -> dict[str, Any]:
    """`transitions`: the newest stage changes, oldest first."""
    by_snapshot: dict[str, list[TransitionRow]] = {}
    for moved in transitions:
        by_snapshot.setdefault(moved.identity, []).append(moved)
    return {
        "desired_snapshot_identity": state.snapshot,
        "generation": state.desired.generation if state.desired else 0,
        "snapshots": [_snapshot(row, by_snapshot.get(row.identity, [])) for row in snapshots],
        "disagreements": [_disagreement(row) for row in state.disagreements],
    }


def _snapshot(row: SnapshotRow, moves: Sequence[TransitionRow]) -> dict[str, Any]:
    return {
        "identity": row.identity,
        "kind": row.kind,
        "previous_snapshot_identity": row.previous,
        "compression_format": row.compression,
        "checksum_format": row.checksum_format,
        "chain": [link.snapshot for link in row.parents],
        "url": row.url,
        "reset_prompt_cache": row.reset_prompt_cache,
        "max_cache_age": row.max_cache_age,
        "extra_fields_ignore": list(row.ignore_config),
        "first_signalled_at": row.first_signalled_at,
        "signalled_at": row.signalled_at,
        "generation": row.generation,
        "fingerprint": row.fingerprint,
        "files": None if row.content is None else [_file(file) for file in row.content],
        "ready_at": row.ready_at,
        "replicas": _replicas(moves),
        "transitions": [_transition(moved) for moved in moves],
    }


def _file(file: FileContent) -> dict[str, Any]:
    return {"name": file.name, "size": file.size, "digest": file.digest}


def _replicas(moves: Iterable[TransitionRow]) -> list[dict[str, Any]]:
    """Of each replica, the last stage change and when it was ready, in the generation it was at last."""
    found: dict[str, dict[str, Any]] = {}
    for moved in moves:
        row = found.get(moved.replica)
        if row is None or row["generation"] != moved.generation:
            row = found[moved.replica] = {
                "replica": moved.replica,
                "generation": moved.generation,
                "ready_at": None,
            }
        row |= {"stage": moved.stage.value, "at": moved.at, "error": moved.detail or None}
        if moved.stage is Stage.IDLE:
            row["ready_at"] = moved.at
    return [found[name] for name in sorted(found)]


def _of_a_boot(row: TransitionRow | Disagreement) -> dict[str, Any]:
    return {
        "replica": row.replica,
        "boot": row.boot,
        "generation": row.generation,
        "error": row.detail or None,
    }


def _transition(row: TransitionRow) -> dict[str, Any]:
    return {**_of_a_boot(row), "seq": row.seq, "stage": row.stage.value, "at": row.at}


def _disagreement(row: Disagreement) -> dict[str, Any]:
    return {**_of_a_boot(row), "identity": row.identity, "verdict": row.verdict}
