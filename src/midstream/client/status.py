"""The server's status of its replicas. Pure.

Always holds: a snapshot counts as served, or as failed, only when the answer says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica in the server's answer.

    snapshot: the one that it serves; None when the replica is unreachable. generation: of the signal that it took last; None
    when the server does not say. last_swap: fetch_ms, verify_ms, stage_ms, pause_ms, streams_crossed. raw: the whole entry.
    """

    snapshot: str | None
    ready: bool
    stage: str
    target: str | None
    name: str = "a replica"
    error: str | None = None
    generation: int | None = None
    last_swap: dict[str, Any] | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Status:
    """All replicas, the least ready first."""

    replicas: tuple[ReplicaStatus, ...]

    def serves(self, identity: str) -> bool:
        """Whether every replica is ready on `identity`, and none is still to load other files of that name."""
        return bool(self.replicas) and all(
            r.ready and r.snapshot == identity and (r.target != identity or r.stage in ("done", "idle"))
            for r in self.replicas
        )

    def failed(self, identity: str) -> ReplicaStatus | None:
        """A replica that could not load `identity`, if any."""
        return next((r for r in self.replicas if r.stage == "error" and r.target == identity), None)

    def stands_on(self, identity: str, generation: int | None) -> bool:
        """Whether a delta against the `identity` that was signalled as `generation` is certain to be understood.

        One replica serves it, none is meant to serve anything else, and none is in trouble. generation: None when the
        server's answer to the signal gave none.
        """
        heard = [r.generation for r in self.replicas if r.generation is not None]
        return (
            any(r.snapshot == identity for r in self.replicas)
            and all(r.stage != "error" and (r.target or r.snapshot) == identity for r in self.replicas)
            and (generation is None or not heard or max(heard) == generation)
        )

    def __str__(self) -> str:
        shown = [
            f"{r.name} is on {r.snapshot} ({r.stage}{': ' + r.error if r.error else ''})"
            for r in self.replicas
        ]
        return "; ".join(shown) or "there are no replicas"


def read_status(answer: Any) -> Status:
    """Raises KeyError, TypeError or AttributeError when `answer` is something else."""
    return Status(tuple(_replica(row) for row in answer["replicas"]))


def _replica(row: dict[str, Any]) -> ReplicaStatus:
    own = row.get("midstream") or {}
    loading = row.get("loading_state") or {}
    return ReplicaStatus(
        snapshot=row["current_snapshot_identity"],
        ready=bool(row["readiness"]),
        stage=loading.get("stage", "idle"),
        target=loading.get("target_snapshot_identity"),
        name=own.get("replica", "a replica"),
        error=own.get("error"),
        generation=own.get("generation"),
        last_swap=own.get("last_swap"),
        raw=row,
    )
