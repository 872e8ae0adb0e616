"""What the dashboard shows: the state of everything now, how it came about, and the last quarter of an hour in numbers.

Owns: the samples and the swaps that are kept for whoever opens the dashboard later.
Always holds:
- All of it is what replicas reported and what this server's gateways counted. Nothing is asked of a replica for it.
- A key is shown the deployments that it may observe. The counts of gateways, which are of all of them, are shown to a key for
  every deployment alone.
- What is kept has a bound: SAMPLES_KEPT samples and SWAPS_KEPT swaps.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from midstream import __version__
from midstream.api.status import SHOWN_STAGE
from midstream.core.audits import AuditStats
from midstream.core.reports import PolicyReport, ReplicaReport
from midstream.core.scopes import OBSERVE, Grant
from midstream.core.types import Stage, Transition
from midstream.core.wires import NO_ROLLOUTS
from midstream.fleet.access import shown_only
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.tally import Tally
from midstream.fleet.view import ReplicaView
from midstream.proxy.metrics import GatewayMetrics

SAMPLE_EVERY_S = 2.0
#: 15 minutes.
SAMPLES_KEPT = 450
SWAPS_KEPT = 512
#: Replicas that are not heard are remembered while there are no more parts than these.
PARTS_KEPT = 65_536
_FIRST_TOKEN = "time_to_first_token_seconds"
#: Rows of policies that are shown: those that replicas hold, by name.
POLICIES_SHOWN = 512

#: Of a replica: generated, prompt and cached prompt tokens so far in its boot, running and waiting sequences, the share of KV
#: blocks in use, how many signals it is behind, the number of its boot in this gateway's memory, and how many turns came to a
#: first token so far, after how many seconds in all.
ReplicaSample = tuple[int, int, int, int, int, float, int, int, int, float]


class Sample(NamedTuple):
    """at: seconds since the epoch. answered, failed, cut: requests for inference so far, in all gateways; None to a key that is
    not shown them. counts: grows when the gateways behind these counts are others, so that the counts may jump."""

    at: float
    replicas: dict[str, ReplicaSample]
    answered: int | None
    failed: int | None
    cut: int | None
    sessions: int | None
    counts: int = 0


class _Part(NamedTuple):
    """What makes swaps of its own: a boot of a replica, and each policy on it. policy: "" of the deployment's own weights.
    made: when the policy was made; one of the same name that is made later is another."""

    replica: str
    boot: str
    policy: str
    made: float


class Swap(msgspec.Struct, kw_only=True):
    """One attempt of one replica to come to a snapshot. stages: [stage, seconds since the epoch], in order.

    number: grows with every change of any swap. pause_ms, streams_crossed: once they are known.
    """

    number: int
    deployment: str
    replica: str
    boot: str
    generation: int
    snapshot: str
    policy: str
    stages: list[tuple[str, float]]
    error: str | None = None
    pause_ms: float | None = None
    streams_crossed: int | None = None


class Board:
    """What is shown of all deployments. now: seconds since the epoch. monotonic: seconds."""

    def __init__(
        self,
        deployments: Deployments,
        metrics: GatewayMetrics,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deployments, self._metrics = deployments, metrics
        self._now, self._monotonic = now, monotonic
        self._sampled_at = float("-inf")
        self._samples: deque[tuple[int, Sample]] = deque(maxlen=SAMPLES_KEPT)
        self._taken = 0
        self._swaps: OrderedDict[tuple[str, _Part, int, str], Swap] = OrderedDict()
        self._number = 0
        # The last transition that was seen, of each part of the newest reports.
        self._seen: dict[_Part, int] = {}
        self._boots: dict[str, tuple[str, int]] = {}
        self._counting: tuple[bool, int] = (False, 0)
        self._counts_of = 0

    def __repr__(self) -> str:
        return f"Board({len(self._samples)} samples, {len(self._swaps)} swaps)"

    # -- what is kept

    def look(self) -> None:
        """Learn of swaps, and take a sample if the last one is SAMPLE_EVERY_S old. Cheap: called in every round."""
        seen: dict[_Part, int] = {}
        for deployment in self._deployments:
            for view in deployment.replicas.views:
                if view.replica.heard is not None:
                    self._learn_of(deployment, view.name, view.replica.heard, seen)
        # One that is not heard now may be heard again.
        heard = {key.replica for key in seen}
        self._seen = seen | {key: seq for key, seq in self._seen.items() if key.replica not in heard}
        if len(self._seen) > PARTS_KEPT:
            self._seen = seen
        if self._monotonic() - self._sampled_at >= SAMPLE_EVERY_S:
            self._sampled_at = self._monotonic()
            self._taken += 1
            self._samples.append((self._taken, self._sample()))

    def _learn_of(
        self, deployment: Deployment, replica: str, report: ReplicaReport, learnt: dict[_Part, int]
    ) -> None:
        """learnt: what was seen of each part, to be added to."""
        for part in report.policies:
            key = _Part(replica, report.boot, part.policy, part.made)
            seen = self._seen.get(key, -1)
            learnt[key] = part.transitions[-1].seq if part.transitions else seen
            if learnt[key] > seen:
                for moved in part.transitions:
                    if moved.seq > seen:
                        self._moved(deployment.name, key, moved)
            self._time(deployment.name, key, part)

    def _moved(self, deployment: str, key: _Part, moved: Transition) -> None:
        # A fallback has the generation of what failed.
        at = (deployment, key, moved.generation, moved.snapshot)
        swap = self._swaps.get(at)
        if swap is None:
            swap = self._swaps[at] = Swap(
                number=0,
                deployment=deployment,
                replica=key.replica,
                boot=key.boot,
                generation=moved.generation,
                snapshot=moved.snapshot,
                policy=key.policy,
                stages=[],
            )
            if len(self._swaps) > SWAPS_KEPT:
                self._swaps.popitem(last=False)
        swap.stages.append((_stage(moved.stage), moved.at))
        swap.error = moved.detail or None if moved.stage is Stage.ERROR else None
        self._changed(swap)

    def _time(self, deployment: str, key: _Part, part: PolicyReport) -> None:
        for timing in part.swaps:
            swap = self._swaps.get((deployment, key, timing.generation, timing.snapshot))
            if swap is not None and swap.pause_ms is None:
                swap.pause_ms, swap.streams_crossed = timing.pause_ms, timing.streams_crossed
                self._changed(swap)

    def _changed(self, swap: Swap) -> None:
        self._number += 1
        swap.number = self._number

    def _sample(self) -> Sample:
        replicas: dict[str, ReplicaSample] = {}
        for deployment in self._deployments:
            for view in deployment.replicas.views:
                if (report := view.replica.heard) is not None:
                    replicas[view.name] = self._of_replica(deployment, view, report)
        self._boots = {name: boot for name, boot in self._boots.items() if name in replicas}
        siblings = self._metrics.siblings()
        if self._counting != (counting := (siblings.tally == Tally(), siblings.listening)):
            self._counting = counting
            self._counts_of += 1
        counted, sessions = self._counted(), sum(map(_sessions, self._deployments))
        return Sample(self._now(), replicas, *counted, sessions, self._counts_of)

    def _of_replica(self, deployment: Deployment, view: ReplicaView, report: ReplicaReport) -> ReplicaSample:
        known = self._boots.get(view.name)
        if known is None or known[0] != report.boot:
            known = self._boots[view.name] = (report.boot, 0 if known is None else known[1] + 1)
        first = view.replica.trajectories.measures.get(_FIRST_TOKEN) if view.replica.trajectories else None
        engine = report.engine
        used = engine.kv.used / engine.kv.total if engine.kv.total else 0.0
        return (
            engine.generated_tokens,
            engine.prompt_tokens,
            engine.cached_prompt_tokens,
            engine.running,
            engine.waiting,
            round(used, 4),
            deployment.order.behind(report.own.snapshot),
            known[1],
            0 if first is None else sum(first.counts),
            0.0 if first is None else round(first.sum, 6),
        )

    def _counted(self) -> tuple[int, int, int]:
        """Requests for inference that were answered, those that failed for the server's sake, and responses cut short."""
        tally = self._metrics.in_all()
        answered = failed = 0
        for path, status, count in tally.requests:
            if path in NO_ROLLOUTS:
                continue
            answered += count
            failed += count if status >= 500 else 0
        return answered, failed, sum(tally.counters.get("cut_responses", {}).values())

    # -- what is shown

    def sections(self, grant: Grant) -> dict[str, Any]:
        """What there is now, in parts that change at different times."""
        shown = shown_only(grant, (OBSERVE,), self._deployments)
        found = {
            "server": self._server(shown),
            "replicas": [_replica(one, view) for one in shown for view in _views(one)],
            "policies": self._policies(shown),
            "rewards": [row for one in shown for row in _rewards(one)],
        }
        if grant.everywhere((OBSERVE,)):
            found["counts"] = self._counts()
        return found

    def swaps(self, grant: Grant, after: int = 0) -> list[Swap]:
        """The swaps that changed since `number` was `after`, the oldest first."""
        names = {one.name for one in shown_only(grant, (OBSERVE,), self._deployments)}
        return [s for s in self._swaps.values() if s.number > after and s.deployment in names]

    def samples(self, grant: Grant, after: int = 0) -> Iterator[tuple[int, Sample]]:
        """The samples after number `after`, each with its number."""
        shown = shown_only(grant, (OBSERVE,), self._deployments)
        names = {view.name for one in shown for view in _views(one)}
        everything = grant.everywhere((OBSERVE,))
        for number, sample in self._samples:
            if number > after:
                kept = {name: of for name, of in sample.replicas.items() if everything or name in names}
                counted = sample if everything else Sample(sample.at, {}, None, None, None, None)
                yield number, counted._replace(replicas=kept)

    def _server(self, shown: Iterable[Deployment]) -> dict[str, Any]:
        return {
            "version": __version__,
            "gateways": self._metrics.workers,
            "gateways_ready": self._metrics.workers_ready,
            "deployments": [
                {
                    "name": one.name,
                    "model": one.model,
                    "wanted": one.wanted_in_all,
                    "usable": sum(view.usable for view in one.replicas.views),
                    "desired": one.order.desired,
                    "generation": one.order.position(one.order.desired),
                    "deleting": one.deleting,
                    "sessions": _sessions(one),
                    "policies": self._deployments.policy_count(one),
                    "failed": dict(sorted(one.troubles.items())),
                }
                for one in shown
            ],
        }

    def _policies(self, shown: Iterable[Deployment]) -> list[dict[str, Any]]:
        """For each policy that a replica holds: which snapshot serves on which replica."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for one in shown:
            for view in one.replicas.views:
                for policy in view.replica.heard.others if view.replica.heard else ():
                    row = rows.setdefault(
                        (one.name, policy.policy),
                        {
                            "policy": policy.policy,
                            "deployment": one.name,
                            "in_flight": 0,
                            "replicas": {},
                            "error": None,
                        },
                    )
                    row["in_flight"] += policy.in_flight
                    row["replicas"][view.name] = [policy.snapshot, _stage(policy.stage)]
                    row["error"] = policy.error or row["error"]
        return [rows[key] for key in sorted(rows)][:POLICIES_SHOWN]

    def _counts(self) -> dict[str, Any]:
        tally = self._metrics.in_all()
        return {"requests": sorted(tally.requests), **{n: c for n, c in sorted(tally.counters.items()) if c}}


def _views(deployment: Deployment) -> list[ReplicaView]:
    return [*deployment.replicas.views, *deployment.replicas.leaving]


def _rewards(deployment: Deployment) -> list[dict[str, Any]]:
    """Mean rewards by the snapshot that sampled what was rewarded, over all replicas, the first rewarded first."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for view in _views(deployment):
        for one in view.replica.trajectories.rewards if view.replica.trajectories else ():
            found = sums.setdefault((one.policy, one.name, one.snapshot), [one.first_at, 0, 0.0])
            found[:] = min(found[0], one.first_at), found[1] + one.count, found[2] + one.sum
    ordered = sorted(sums.items(), key=lambda item: item[1][0])
    return [
        {
            "deployment": deployment.name,
            "policy": policy,
            "name": name,
            "snapshot": snapshot,
            "count": int(count),
            "mean": total / count,
        }
        for (policy, name, snapshot), (_, count, total) in ordered
    ]


def _sessions(deployment: Deployment) -> int:
    return len(deployment.sessions)


def _stage(stage: Stage) -> str:
    """The stage as the hot-load API names it."""
    return SHOWN_STAGE.get(stage, str(stage))


def _differ(audit: AuditStats | None) -> str | None:
    """What the continuous audit found; None: nothing. The sessions are not for everyone who may see this."""
    if audit is None or audit.last is None:
        return None
    count = sum(audit.mismatches.values())
    return f"audit: {count} turns differ, the last one by {audit.last.snapshot} ({audit.last.cause})"


def _replica(deployment: Deployment, view: ReplicaView) -> dict[str, Any]:
    about: dict[str, Any] = {
        "name": view.name,
        "deployment": deployment.name,
        "usable": view.usable,
        "standing": view.replica.standing,
        "leaves_at": view.replica.leaves_at,
        "in_flight": view.replica.in_flight,
        "own": view.replica.own,
        "error": deployment.troubles.get(view.name) or view.replica.last_words or None,
    }
    report = view.replica.heard
    if report is None:
        return about | {"stage": "unreachable", "snapshot": None}
    engine, own = report.engine, report.own
    return about | {
        "stage": _stage(own.stage) if report.ready else "starting" if not own.error else "error",
        "snapshot": own.snapshot,
        "target": own.target,
        "behind": deployment.order.behind(own.snapshot),
        "held": own.held,
        "admitting": own.admitting,
        "error": own.error or about["error"],
        "running": engine.running,
        "waiting": engine.waiting,
        "kv_used": engine.kv.used,
        "kv_total": engine.kv.total,
        "kv_held": engine.kv.held,
        "kv_loose": engine.kv.loose,
        "kv_evicted": engine.kv.evicted_tokens,
        "sessions_waiting": report.kv_waits.waiting,
        "policies": len(report.others),
        "resident": list(own.resident),
        "stalled_s": report.stalled_s,
        "engine": report.card.kind if report.card else None,
        "audit": _differ(report.audit),
    }
