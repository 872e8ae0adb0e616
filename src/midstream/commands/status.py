"""`midstream status`: the snapshot, the stage and the load of each replica, the adapter that each policy serves, and pushes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from midstream.client import ServerClient
from midstream.client.status import ReplicaStatus, Status, read_status
from midstream.commands.common import (
    add_server_arguments,
    add_watch_arguments,
    connect,
    full_deployment_name,
    guarded,
    show,
)
from midstream.commands.observed import (
    Metrics,
    audit_notes,
    cached_share,
    ledger_of,
    loading_ms,
    metrics_of,
    of_replica,
)
from midstream.commands.pushes_view import Groups, pushes_text
from midstream.core.errors import ConfigError
from midstream.core.text import plain, table
from midstream.core.types import BASE_SNAPSHOT

HEADS = ("replica", "snapshot", "stage", "in flight", "cached", "KV cache", "last swap", "")
#: A policy is the name, and its snapshots are adapters.
POLICY_HEADS = ("policy", "adapter", "stage", "replicas", "")
#: As the server lists them.
Policies = Sequence[Mapping[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=guarded(_status))
    add_server_arguments(parser)
    add_watch_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per look")


def _status(options: argparse.Namespace) -> int:
    draw = as_json if options.json else render
    with connect(options) as server:
        return show(lambda: _look(server, draw, options.deployment), options)


def _look(
    server: ServerClient, draw: Callable[[Status, Metrics, Policies, Groups], str], deployment: str | None
) -> str:
    status = server.snapshots.status(retry_s=0)
    metrics, own = metrics_of(server), _own_name(server, deployment)
    policies = () if own is None else server.deployments.policies(own, retry_s=0)
    picture = draw(status, metrics, policies, _groups(server, own, metrics))
    if status.replicas or draw is as_json:
        return picture
    name = full_deployment_name(server, deployment)
    row = next((row for row in server.deployments.all(retry_s=0) if row["name"] == name), {})
    why = (row.get("status") or {}).get("message")
    return f"{picture}: {row.get('state')}, {plain(why)}" if why else picture


def _own_name(server: ServerClient, deployment: str | None) -> str | None:
    """None for a model's name, which does not say which deployment it is."""
    if deployment is not None and "/models/" in deployment:
        return None
    try:
        return full_deployment_name(server, deployment)
    except ConfigError:
        # There are several, and the one that is meant without a name is not called so.
        return None


def _groups(server: ServerClient, own: str | None, metrics: Metrics) -> Groups:
    """The ledger of a long run is large, so it is asked for only where a trainer has pushed since the server started."""
    pushes = ("midstream_push_groups", "midstream_push_updates_total", "midstream_push_groups_ended_total")
    used = any(value for name in pushes for _, value in metrics.get(name, ()))
    ledger = ledger_of(server, own) if own is not None and used else None
    return ledger.get("transfers", ()) if ledger else ()


def render(status: Status, metrics: Metrics, policies: Policies = (), groups: Groups = ()) -> str:
    if not status.replicas:
        return "there are no replicas"
    replicas = sorted(status.replicas, key=lambda r: r.name)
    parts = [table(HEADS, [_row(replica, metrics) for replica in replicas])]
    if status.rebase_problem:
        parts.append(plain(f"a long chain of deltas is not shortened: {status.rebase_problem}"))
    ends = metrics.get("midstream_replica_leaves_timestamp_seconds", ())
    parts += [f"{plain(labels['replica'])} leaves at {_clock(at)}" for labels, at in ends]
    if policies:
        parts.append(table(POLICY_HEADS, [row for policy in policies for row in _policy_rows(policy)]))
    if groups:
        parts.append(pushes_text(groups, serving=lambda identity: _serving(replicas, identity)))
    return "\n\n".join(parts)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S UTC", time.gmtime(at))


def _serving(replicas: Sequence[ReplicaStatus], identity: str) -> int:
    return sum(replica.snapshot == identity for replica in replicas)


def as_json(status: Status, metrics: Metrics, policies: Policies = (), groups: Groups = ()) -> str:
    """The numbers of `render` as JSON. Replicas are in the server's order, the least ready first."""
    rows = []
    for replica in status.replicas:
        row: dict[str, Any] = dataclasses.asdict(replica)
        del row["raw"]
        rows.append(
            row
            | {
                "in_flight": of_replica(metrics, "requests_in_flight", replica.name),
                "cached_share": cached_share(metrics, replica.name),
            }
        )
    shown = [
        {
            "policy": policy["policy"],
            "snapshot": policy["snapshot"],
            "frozen": policy["frozen"],
            "replicas": [
                {name: value for name, value in dataclasses.asdict(replica).items() if name != "raw"}
                for replica in read_status(policy).replicas
            ],
        }
        for policy in policies
    ]
    return json.dumps(
        {
            "replicas": rows,
            "policies": shown,
            "transfers": groups,
            "rebase_problem": status.rebase_problem,
        }
    )


def _policy_rows(policy: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row for the replicas that are equal."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for replica in read_status(dict(policy)).replicas:
        snapshot = "-" if replica.snapshot == BASE_SNAPSHOT else replica.snapshot or "-"
        alike.setdefault((snapshot, _stage(replica), replica.error or ""), []).append(replica.name)
    state = "frozen" if policy["frozen"] else ""
    if policy["state"] == "DELETING":
        state = ", waits for ".join(filter(None, ("ending", ", ".join(policy.get("waits_for", ())))))
    return [
        (policy["policy"], snapshot, stage, ", ".join(sorted(names)), "; ".join(filter(None, (state, error))))
        for (snapshot, stage, error), names in alike.items()
    ]


def _stage(replica: ReplicaStatus) -> str:
    if replica.target is not None and replica.target != replica.snapshot:
        return f"{replica.stage} {replica.target}"
    return replica.stage


def _row(replica: ReplicaStatus, metrics: Metrics) -> tuple[str, ...]:
    in_flight = of_replica(metrics, "requests_in_flight", replica.name)
    cached = cached_share(metrics, replica.name)
    notes = [] if replica.ready else ["not ready"]
    notes += audit_notes(metrics, replica.name)
    return (
        replica.name,
        replica.snapshot or "-",
        _stage(replica),
        "-" if in_flight is None else f"{in_flight:.0f}",
        "-" if cached is None else f"{cached:.0%}",
        _kv(replica.name, metrics),
        _swap(replica.last_swap),
        "; ".join([*notes, *([replica.error] if replica.error else [])]),
    )


def _kv(name: str, metrics: Metrics) -> str:
    """What the cache holds now, and how many sessions wait for room in it."""
    used, total = (of_replica(metrics, f"kv_blocks_{which}", name) for which in ("used", "capacity"))
    between, free = (of_replica(metrics, f"kv_{which}_tokens", name) for which in ("between_turns", "free"))
    tokens = of_replica(metrics, "kv_block_tokens", name)
    if not total or not tokens or used is None or between is None or free is None:
        return "-"
    waiting = of_replica(metrics, "sessions_waiting", name)
    parts = {"live": used / total, "between turns": between / total / tokens, "free": free / total / tokens}
    if offloaded := of_replica(metrics, "kv_offloaded_tokens", name):
        parts["offloaded"] = offloaded / total / tokens
    waits = f", {waiting:.0f} sessions wait" if waiting else ""
    return ", ".join(f"{share:.0%} {what}" for what, share in parts.items()) + waits


def _swap(timing: Mapping[str, Any] | None) -> str:
    if timing is None:
        return "-"
    crossed = timing.get("streams_crossed", 0)
    same = f", same weights as {timing['same_weights_as']}" if timing.get("same_weights_as") else ""
    return f"loaded {loading_ms(timing):.0f} ms, paused {timing.get('pause_ms', 0.0):.1f} ms, {crossed} streams crossed{same}"
