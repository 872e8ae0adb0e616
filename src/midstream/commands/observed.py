"""One look at a live server, as numbers: what `midstream top` draws and what its --json prints. Reads the control API alone.

Owns: the reader of /metrics, for `midstream status` too.

Always holds: a number that the server does not report, or that the key may not see, is None and never a guess. Rates are of the
time between two looks, so the first look has none. A counter that became smaller was restarted, and gives no rate.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from midstream.client import ServerClient
from midstream.client.errors import SignalRefused
from midstream.client.status import ReplicaStatus, Status, read_status
from midstream.commands.common import full_deployment_name
from midstream.core.errors import ConfigError, Forbidden
from midstream.core.types import BASE_SNAPSHOT
from midstream.core.wires import NO_ROLLOUTS

#: The ledger, policies and sessions are asked for no more often, in seconds.
SLOW_EVERY_S = 3.0
SESSIONS_MAX = 1000
SESSIONS_SHOWN = 8
SNAPSHOTS_SHOWN = 6

Metrics = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True)
class Look:
    """What one look saw. at: seconds since the epoch. deployment: its full name, None when several could be meant.

    sessions: as GET /v1/sessions lists them, SESSIONS_MAX at most. sessions, ledger: None when they were not to be
    had.
    """

    at: float
    url: str
    deployment: str | None
    health: Mapping[str, Any]
    status: Status
    metrics: Metrics
    policies: Sequence[Mapping[str, Any]] = ()
    ledger: Mapping[str, Any] | None = None
    sessions: Sequence[Mapping[str, Any]] | None = None
    more_sessions: bool = False


@dataclass
class Observer:
    """Looks at one server again and again. asked: the deployment that was named, None for the server's own."""

    server: ServerClient
    asked: str | None
    now: Callable[[], float] = time.time
    _slow: dict[str, Any] = field(default_factory=dict)
    _slow_at: float = float("-inf")

    def look(self) -> Look:
        """Raises PublishError when the server does not answer."""
        at = self.now()
        health = self.server.health()
        status = self.server.snapshots.status(retry_s=0)
        metrics = metrics_of(self.server)
        if at - self._slow_at >= SLOW_EVERY_S:
            self._slow, self._slow_at = self._look_slowly(), at
        return Look(at=at, url=self.server.root, health=health, status=status, metrics=metrics, **self._slow)

    def _look_slowly(self) -> dict[str, Any]:
        name = _allowed(self._name)
        found: dict[str, Any] = {"deployment": name}
        if name is not None:
            policies = _allowed(lambda: self.server.deployments.policies(name, retry_s=0))
            found |= {"policies": policies or (), "ledger": ledger_of(self.server, name)}
        page = _allowed(lambda: self.server.get(f"/v1/sessions?limit={SESSIONS_MAX}", retry_s=0))
        if page is not None:
            found |= {"sessions": page["data"], "more_sessions": page["has_more"]}
        return found

    def _name(self) -> str | None:
        try:
            return full_deployment_name(self.server, self.asked)
        except ConfigError:
            if self.asked is not None:
                raise
            # There are several, and none is called as the server's own.
            return None


def _allowed(ask: Callable[[], Any]) -> Any:
    """The answer; None if the key may not see it."""
    try:
        return ask()
    except SignalRefused as error:
        if error.status != Forbidden.status:
            raise
        return None


def ledger_of(server: ServerClient, deployment: str) -> dict[str, Any] | None:
    """Without most of the stage changes. None if the key may not see it."""
    found: dict[str, Any] | None = _allowed(lambda: server.get(f"/v1/{deployment}/ledger?limit=1", retry_s=0))
    return found


def audit_notes(metrics: Metrics, replica: str) -> list[str]:
    """What the continuous audit of the replica found; nothing where it found none."""
    differ = sum(
        value
        for labels, value in metrics.get("midstream_audit_mismatches_total", ())
        if labels["replica"] == replica
    )
    last = metrics.get("midstream_audit_last_mismatch_timestamp_seconds", ())
    about = [
        f", the last one is turn {labels['turn']} of {labels['session']} ({labels['cause']})"
        for labels, _ in last
        if labels["replica"] == replica
    ]
    return [f"audit: {differ:.0f} turns differ{''.join(about)}"] if differ else []


def metrics_of(server: ServerClient) -> Metrics:
    """Samples by name, each with its labels; none where the key may see the status but not the metrics."""
    exposition = _allowed(lambda: server.metrics(retry_s=0)) or ""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found[sample.name].append((sample.labels, sample.value))
    return found


def summary(look: Look, before: Look | None) -> dict[str, Any]:
    """The numbers of `look` as one JSON document. before: the look before it, for rates."""
    return {
        "time": look.at,
        "server": look.url,
        "deployment": look.deployment,
        "deployments": [
            {key: row.get(key) for key in ("name", "model", "wanted", "usable", "failed")}
            for row in look.health.get("deployments", ())
        ],
        "replicas": [_replica(replica, look, before) for replica in _by_name(look.status)],
        "policies": [_policy(policy) for policy in look.policies],
        "snapshots": _snapshots(look.ledger),
        "sessions": _sessions(look),
        "totals": totals(look),
        "rates": rates(look, before),
        "errors": errors(look),
    }


def totals(look: Look) -> dict[str, int | None]:
    """Since the processes started."""
    counted = {
        "requests": _sum(look, "midstream_gateway_requests_total", _of_clients),
        "failed_requests": _sum(look, "midstream_gateway_requests_total", _failed),
        "cut_responses": _sum(look, "midstream_gateway_cut_responses_total"),
        "prompt_tokens": _sum(look, "midstream_replica_prompt_tokens_total"),
        "cached_prompt_tokens": _sum(look, "midstream_replica_cached_prompt_tokens_total"),
        "generated_tokens": _sum(look, "midstream_replica_generated_tokens_total"),
    }
    return {name: _whole(value) for name, value in counted.items()}


def rates(look: Look, before: Look | None) -> dict[str, float | None]:
    """Per second, of what `totals` counts."""
    now = totals(look)
    if before is None or look.at <= before.at:
        return dict.fromkeys(now)
    then = totals(before)
    return {name: _rate(now[name], then[name], look.at - before.at) for name in now}


def errors(look: Look) -> dict[str, int]:
    """Requests for inference that failed, by HTTP status."""
    found: dict[str, int] = {}
    for labels, value in look.metrics.get("midstream_gateway_requests_total", ()):
        if _failed(labels) and value:
            found[labels["status"]] = found.get(labels["status"], 0) + int(value)
    return dict(sorted(found.items()))


def _rate(now: float | None, then: float | None, seconds: float) -> float | None:
    return None if now is None or then is None or now < then else (now - then) / seconds


def _of_clients(labels: Mapping[str, str]) -> bool:
    return labels.get("path") not in NO_ROLLOUTS


def _failed(labels: Mapping[str, str]) -> bool:
    return _of_clients(labels) and labels.get("status", "")[:1] in ("4", "5")


def _any(_labels: Mapping[str, str]) -> bool:
    return True


def _sum(look: Look, name: str, matches: Callable[[Mapping[str, str]], bool] = _any) -> float | None:
    """The sum of a metric's samples; None when there are no metrics at all. A counter appears with its first event."""
    if not look.metrics:
        return None
    return sum(value for labels, value in look.metrics.get(name, ()) if matches(labels))


def of_replica(metrics: Metrics, name: str, replica: str) -> float | None:
    """What a replica measured last. name: without the beginning that all of a replica's have."""
    samples = metrics.get(f"midstream_replica_{name}", ())
    return next((value for labels, value in samples if labels.get("replica") == replica), None)


def cached_share(metrics: Metrics, replica: str) -> float | None:
    """The share of the prompt tokens, since the replica started, that came from its cache."""
    cached = of_replica(metrics, "cached_prompt_tokens_total", replica)
    return share(cached or 0.0, of_replica(metrics, "prompt_tokens_total", replica))


def _by_name(status: Status) -> Iterable[ReplicaStatus]:
    return sorted(status.replicas, key=lambda replica: replica.name)


def _replica(replica: ReplicaStatus, look: Look, before: Look | None) -> dict[str, Any]:
    def of(name: str, at: Look | None = look) -> float | None:
        return None if at is None else of_replica(at.metrics, name, replica.name)

    generated = "generated_tokens_total"
    speed = None
    if before is not None and look.at > before.at:
        speed = _rate(of(generated), of(generated, before), look.at - before.at)
    known = {row["name"]: row for row in look.health.get("replicas", ())}
    return {
        "replica": replica.name,
        "snapshot": replica.snapshot,
        "stage": replica.stage,
        "target": replica.target if replica.target != replica.snapshot else None,
        "ready": replica.ready,
        "usable": known.get(replica.name, {}).get("usable"),
        "engine": known.get(replica.name, {}).get("engine"),
        "in_flight": _whole(of("requests_in_flight")),
        "waiting": _whole(of("sequences_waiting")),
        "kv_share": share(of("kv_blocks_used"), of("kv_blocks_capacity")),
        "cached_share": cached_share(look.metrics, replica.name),
        "tokens_per_s": speed,
        "generation": replica.generation,
        "last_swap": replica.last_swap,
        "error": replica.error,
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def loading_ms(swap: Mapping[str, Any]) -> float:
    """How long the replica prepared its last snapshot beside the one that it served."""
    return sum(float(swap.get(f"{part}_ms", 0.0)) for part in ("fetch", "rebuild", "verify", "stage"))


def _policy(policy: Mapping[str, Any]) -> dict[str, Any]:
    replicas = read_status(dict(policy)).replicas
    serving = [replica for replica in replicas if replica.snapshot == policy["snapshot"]]
    return {
        "policy": policy["policy"],
        "snapshot": policy["snapshot"],
        "frozen": policy["frozen"],
        "loaded": sum(replica.snapshot not in (None, BASE_SNAPSHOT) for replica in replicas),
        "serving": len(serving),
        "replicas": len(replicas),
        "errors": sorted({replica.error for replica in replicas if replica.error}),
    }


def _snapshots(ledger: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The newest, the last signalled first."""
    if ledger is None:
        return []
    rows = sorted(ledger["snapshots"], key=lambda row: row["signalled_at"], reverse=True)[:SNAPSHOTS_SHOWN]
    return [
        {
            "snapshot": row["identity"],
            "kind": row["kind"],
            "previous": row.get("previous_snapshot_identity"),
            "desired": row["identity"] == ledger["desired_snapshot_identity"],
            "signalled_at": row["signalled_at"],
            "bytes": sum(file["size"] for file in row.get("files") or ()) or None,
            "ready_after_s": {
                one["replica"]: max(0.0, one["ready_at"] - row["signalled_at"])
                for one in row.get("replicas", ())
                if one["ready_at"] is not None
            },
            "errors": {one["replica"]: one["error"] for one in row.get("replicas", ()) if one["error"]},
        }
        for row in rows
    ]


def _sessions(look: Look) -> dict[str, Any]:
    """count: None when it is not known. recent: those that were used last."""
    listed, whole = look.sessions or (), look.sessions is not None and not look.more_sessions
    recent = sorted(listed, key=lambda row: row["used_at"], reverse=True)[:SESSIONS_SHOWN]
    known = _sum(look, "midstream_gateway_sessions")
    return {
        "count": int(known) if known is not None else len(listed) if whole else None,
        "open_turns": sum(row["open_turns"] for row in listed) if whole else None,
        "recent": [
            {
                key: row.get(key)
                for key in (
                    *("id", "replica", "turns", "open_turns", "prompt_tokens", "cached_share"),
                    *(
                        "generated_tokens",
                        "last_time_to_first_token_s",
                        "mean_inter_token_s",
                        "used_at",
                        "last_reward",
                    ),
                )
            }
            for row in recent
        ],
    }
