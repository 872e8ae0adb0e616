"""The server's status of its replicas, as its hot-load API answers it. Pure.

Always holds: a snapshot counts as served, or as failed, only when the answer says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica in the server's answer.

    snapshot: the one that it serves; None when the replica is unreachable. ready: whether it serves, and loads nothing.
    stage: of its load, such as "idle", "done" or "error". target: the snapshot that it loads, or loaded last. name: its own.
    error: why it could not load `target`. generation: of the signal that it took last; None when the server does not say.
    last_swap: fetch_ms, verify_ms, stage_ms, pause_ms, streams_crossed, same_weights_as. raw: the whole entry.
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
    """What every replica serves and loads. replicas: the least ready first. rebase_problem: why a long chain of deltas is not
    shortened, if something prevents it."""

    replicas: tuple[ReplicaStatus, ...]
    rebase_problem: str = ""

    def serves(self, identity: str) -> bool:
        """Whether every replica is ready on `identity`, and none is still to load other files of that name.

        Of a policy that was served and has made way for others: whether the next request for it loads `identity`.
        """
        return bool(self.replicas) and all(
            (r.ready and r.snapshot == identity and (r.target != identity or r.stage in ("done", "idle")))
            or (r.stage == "unloaded" and r.target == identity)
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


class _Loading(msgspec.Struct):
    stage: str | None = None
    target_snapshot_identity: str | None = None


class _Own(msgspec.Struct):
    replica: str = "a replica"
    error: str | None = None
    generation: int | None = None
    last_swap: dict[str, Any] | None = None


class _Row(msgspec.Struct):
    current_snapshot_identity: str | None
    readiness: Any
    loading_state: _Loading | None = None
    midstream: _Own | None = None


class _Rows(msgspec.Struct):
    replicas: list[_Row]
    rebase_problem: str = ""


def read_status(answer: Any) -> Status:
    """Raises ValueError when `answer` is something else."""
    try:
        found = msgspec.convert(answer, _Rows)
    except msgspec.ValidationError as error:
        raise ValueError(f"this is no list of replicas: {error}") from error
    replicas = tuple(map(_replica, found.replicas, answer["replicas"]))
    return Status(replicas, found.rebase_problem)


def _replica(row: _Row, raw: dict[str, Any]) -> ReplicaStatus:
    own, loading = row.midstream or _Own(), row.loading_state or _Loading()
    return ReplicaStatus(
        snapshot=row.current_snapshot_identity,
        ready=bool(row.readiness),
        stage=loading.stage or "idle",
        target=loading.target_snapshot_identity,
        name=own.replica,
        error=own.error,
        generation=own.generation,
        last_swap=own.last_swap,
        raw=raw,
    )
