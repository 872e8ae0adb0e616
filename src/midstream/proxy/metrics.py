"""What the gateway counts, in Prometheus' format.

The hot path only adds to plain integers; metric families are built when somebody asks.
Always holds: label values come from small fixed sets (replicas, path classes, statuses, reasons), never from sessions,
keys or request content. Durations are kept in the buckets of BUCKETS_S, one histogram per path class (completions,
chat_completions, messages, count_tokens, tinker, control, dashboard). Probes are not counted. Every name is one of
families.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from midstream.core.audits import AuditStats
from midstream.core.measures import (
    BUCKETS_S,
    COUNTS,
    MEASURES,
    SWAP_MEASURES,
    Distribution,
    Histogram,
    Trajectories,
)
from midstream.core.reports import RecordFilesStats, RecordsStats, ReplicaReport
from midstream.fleet.push_counts import ENDINGS, KEEPS, OUTCOMES, TIMED, PushCounts
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.tally import STALLS, Siblings, Tally, merged
from midstream.fleet.view import ReplicaView
from midstream.proxy.families import FAMILIES

Metric = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily
CONTENT_TYPE = CONTENT_TYPE_LATEST

_NONE, _NO_FILES, _NO_AUDIT = RecordsStats(), RecordFilesStats(), AuditStats()
_ReportValue = Callable[[ReplicaReport], float]
#: One sample per replica that is heard.
_REPORTED: dict[str, _ReportValue] = {
    "midstream_replica_ready": lambda r: r.ready,
    "midstream_replica_requests_in_flight": lambda r: r.in_flight,
    "midstream_replica_sequences_running": lambda r: r.engine.running,
    "midstream_replica_sequences_waiting": lambda r: r.engine.waiting,
    "midstream_replica_kv_blocks_used": lambda r: r.engine.kv.used,
    "midstream_replica_kv_blocks_capacity": lambda r: r.engine.kv.total,
    "midstream_replica_kv_block_tokens": lambda r: r.engine.kv.block_tokens,
    "midstream_replica_kv_between_turns_tokens": lambda r: r.engine.kv.held * r.engine.kv.block_tokens,
    "midstream_replica_kv_free_tokens": lambda r: r.engine.kv.free * r.engine.kv.block_tokens,
    "midstream_replica_kv_evicted_tokens": lambda r: r.engine.kv.evicted_tokens,
    "midstream_replica_kv_again_tokens": lambda r: r.engine.kv.again_tokens,
    "midstream_replica_kv_offloaded_tokens": lambda r: r.engine.kv.offloaded * r.engine.kv.block_tokens,
    "midstream_replica_kv_restored_tokens": lambda r: r.engine.kv.restored_tokens,
    "midstream_replica_kv_dropped_tokens": lambda r: r.engine.kv.dropped_tokens,
    "midstream_replica_kv_travelled_tokens": lambda r: r.engine.kv.travelled_tokens,
    "midstream_replica_kv_budget_tokens": lambda r: r.kv_waits.budget_tokens,
    "midstream_replica_kv_claimed_tokens": lambda r: r.kv_waits.claimed_tokens,
    "midstream_replica_turn_wait_seconds": lambda r: r.pace.wait_s,
    "midstream_replica_prefill_tokens_per_second": lambda r: r.pace.prefill_tokens_s,
    "midstream_replica_sessions_moved": lambda r: r.pace.moved,
    "midstream_replica_moved_tokens": lambda r: r.pace.moved_tokens,
    "midstream_replica_sessions_waiting": lambda r: r.kv_waits.waiting,
    "midstream_replica_sessions_refused": lambda r: r.kv_waits.refused,
    "midstream_replica_sessions_understated": lambda r: r.kv_waits.understated,
    "midstream_replica_long_texts": lambda r: r.long_texts,
    "midstream_replica_stalled_seconds": lambda r: r.stalled_s,
    "midstream_replica_engine_silent_seconds": lambda r: r.engine_silent_s,
    "midstream_replica_records_waiting_bytes": lambda r: (r.records or _NONE).waiting_bytes,
    "midstream_replica_record_files_held_bytes": lambda r: (r.record_files or _NO_FILES).held_bytes,
    "midstream_replica_generation": lambda r: r.own.generation,
    "midstream_replica_prompt_tokens": lambda r: r.engine.prompt_tokens,
    "midstream_replica_cached_prompt_tokens": lambda r: r.engine.cached_prompt_tokens,
    "midstream_replica_generated_tokens": lambda r: r.engine.generated_tokens,
    "midstream_replica_engine_steps": lambda r: r.engine.steps,
    "midstream_replica_records_durable": lambda r: (r.records or _NONE).durable,
    "midstream_replica_records_lost": lambda r: (r.records or _NONE).lost,
    "midstream_replica_record_files_written": lambda r: (r.record_files or _NO_FILES).written,
    "midstream_replica_record_files_failed": lambda r: (r.record_files or _NO_FILES).failed,
    "midstream_replica_record_files_expired": lambda r: (r.record_files or _NO_FILES).expired,
    "midstream_audit_turns": lambda r: (r.audit or _NO_AUDIT).audited,
    "midstream_audit_waiting": lambda r: (r.audit or _NO_AUDIT).waiting,
    "midstream_audit_max_dlogprob": lambda r: (r.audit or _NO_AUDIT).max_dlogprob,
}
#: The same numbers under vLLM's names. None: this engine does not report it.
_VLLM_REPORTED: dict[str, Callable[[ReplicaReport], float | None]] = {
    "vllm:num_requests_running": lambda r: r.engine.running,
    "vllm:num_requests_waiting": lambda r: r.engine.waiting,
    "vllm:kv_cache_usage_perc": lambda r: _kv_used(r),
    "vllm:gpu_cache_usage_perc": lambda r: _kv_used(r),
    "vllm:prompt_tokens": lambda r: r.engine.prompt_tokens,
    "vllm:generation_tokens": lambda r: r.engine.generated_tokens,
    "vllm:prefix_cache_queries": lambda r: r.engine.prompt_tokens,
    "vllm:prefix_cache_hits": lambda r: r.engine.cached_prompt_tokens,
}
#: Name to the measure that it shows.
_MEASURED = {
    "midstream_turn_time_to_first_token_seconds": "time_to_first_token_seconds",
    "midstream_turn_queue_seconds": "queue_seconds",
    "midstream_turn_inter_token_seconds": "inter_token_seconds",
    "midstream_turn_generation_seconds": "generation_seconds",
    "midstream_turn_request_seconds": "request_seconds",
    "midstream_turn_prompt_tokens": "prompt_tokens",
    "midstream_turn_generated_tokens": "generated_tokens",
    "midstream_turn_cached_prompt_ratio": "cached_prompt_share",
    "midstream_session_turns": "turns_per_session",
    **{f"midstream_{measure}": measure for measure in SWAP_MEASURES},
}
_VLLM_MEASURED = {
    "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds": "inter_token_seconds",
    "vllm:e2e_request_latency_seconds": "request_seconds",
    "vllm:request_queue_time_seconds": "queue_seconds",
    "vllm:request_decode_time_seconds": "generation_seconds",
    "vllm:request_prompt_tokens": "prompt_tokens",
    "vllm:request_generation_tokens": "generated_tokens",
}
#: Counters of pushes, each with the values of its label. All of them are shown from the start: Prometheus sees no increase from
#: nothing to one.
_PUSH_COUNTED = {
    "midstream_push_updates": ("push_updates", OUTCOMES),
    "midstream_push_groups_ended": ("push_groups_ended", ENDINGS),
    "midstream_push_keeps": ("push_keeps", KEEPS),
    "midstream_chain_rebases": ("chain_rebases", KEEPS),
}
_RECEIVED = "push_received_bytes"
_STALLS_OF_REPLICA = "event_loop_stall_seconds"
_NOTHING = Trajectories.none()
#: A tool call ends where the model stopped.
_VLLM_FINISHES = {"tool_calls": "stop"}


class GatewayMetrics:
    """Counters of the data path and gauges of its replicas.

    siblings: the server's other gateways, whose counts are shown with this one's. listening, ready: of this process.
    report: sends this process's counts to the supervisor before they are shown, so they are not lost with the process.
    """

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments
        self.siblings: Callable[[], Siblings] = Siblings
        self.report: Callable[[], None] = lambda: None
        self.listening: Callable[[], bool] = lambda: True
        self.ready: Callable[[], bool] = lambda: True
        # By (path class, status). 499: the client left first.
        # These two count every request. A Counter takes twice as long.
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        # By the reason of the route.
        self.routes: defaultdict[str, int] = defaultdict(int)
        # Sessions that moved, by the reason.
        self.moves: Counter[str] = Counter()
        # Connections lost or refused, by replica.
        self.upstream_errors: Counter[str] = Counter()
        # By kind: stale_connection, other_replica, other_snapshot, other_boot, handed_over, resumed.
        self.retries: Counter[str] = Counter()
        # Responses that ended visibly short, by replica.
        self.cut_responses: Counter[str] = Counter()
        # By path class.
        self.first_byte_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.total_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        # By process.
        self.stall_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        # Of the door of pushes.
        self.pushes = PushCounts()

    @property
    def workers(self) -> int:
        """How many gateway processes of the server listen."""
        return self.listening() + self.siblings().listening

    @property
    def workers_ready(self) -> int:
        """How many of them can use every replica that there should be."""
        return self.ready() + self.siblings().ready

    @property
    def _counters(self) -> dict[str, dict[str, int]]:
        names = ("routes", "moves", "upstream_errors", "retries", "cut_responses")
        return {name: getattr(self, name) for name in names}

    @property
    def _histograms(self) -> dict[str, defaultdict[str, Histogram]]:
        own = {"first_byte_s": self.first_byte_s, "total_s": self.total_s, STALLS: self.stall_s}
        return own | {"push_s": self.pushes.seconds}

    @property
    def _push_counters(self) -> dict[str, Counter[str]]:
        pushes = self.pushes
        return {
            "push_updates": pushes.updates,
            "push_groups_ended": pushes.groups_ended,
            "push_keeps": pushes.keeps,
            "chain_rebases": pushes.rebases,
            _RECEIVED: pushes.received_bytes,
        }

    def tally(self) -> Tally:
        counters = self._counters | self._push_counters
        return Tally(
            requests=[(path, status, count) for (path, status), count in self.requests.items()],
            counters={name: dict(counts) for name, counts in counters.items()},
            histograms={
                name: {path: Distribution([*one.counts], one.sum) for path, one in histograms.items()}
                for name, histograms in self._histograms.items()
            },
        )

    def in_all(self) -> Tally:
        """The counts of this process and of the others."""
        return merged((self.tally(), self.siblings().tally))

    def _in_all(self) -> GatewayMetrics:
        total = GatewayMetrics(self._deployments)
        counters = total._counters | total._push_counters
        tally = self.in_all()
        for path, status, count in tally.requests:
            total.requests[path, status] = count
        for name, counts in tally.counters.items():
            counters[name].update(counts)
        for name, histograms in tally.histograms.items():
            for path, one in histograms.items():
                total._histograms[name][path] = Histogram(one.counts, one.sum)
        return total

    async def exposition(self) -> bytes:
        """The text. A thread writes it, which takes many times as long as collecting it, so that streams continue meanwhile."""
        self.report()
        collected = _Collected(list(self.collect()))
        return await asyncio.to_thread(collected.text)

    def collect(self) -> Iterator[Metric]:
        total = self._in_all()
        yield from total._data_path()
        yield _durations("midstream_gateway_time_to_first_byte_seconds", total.first_byte_s)
        yield _durations("midstream_gateway_request_seconds", total.total_s)
        yield _samples("midstream_gateway_workers", [((), self.workers)])
        yield self._stalls(total.stall_s)
        yield from self._deployment_metrics()
        yield from self._replicas()
        leaving = [view for d in self._deployments for view in (*d.replicas.views, *d.replicas.leaving)]
        ends = [
            ((view.name,), view.replica.leaves_at) for view in leaving if view.replica.leaves_at is not None
        ]
        yield _samples("midstream_replica_leaves_timestamp_seconds", ends)
        yield from self._measured()
        yield from self._ended()
        yield from total._push_counts()
        yield from self._push_states()

    def _push_counts(self) -> Iterator[Metric]:
        counters, seconds = self._push_counters, self.pushes.seconds
        for name, (counter, values) in _PUSH_COUNTED.items():
            yield _samples(name, [((value,), counters[counter][value]) for value in values])
        yield _durations("midstream_push_seconds", {phase.value: seconds[phase.value] for phase in TIMED})
        yield _samples(
            "midstream_push_received_bytes",
            [((replica,), count) for replica, count in counters[_RECEIVED].items()],
        )

    def _push_states(self) -> Iterator[Metric]:
        """As the ledger had them a second ago at most."""
        pushes = self.pushes
        groups = [((d.name, pushes.open[d.name]), 1) for d in self._deployments if d.name in pushes.open]
        yield _samples("midstream_push_groups", groups)
        waiting = [((d.name,), pushes.waiting_s.get(d.name, 0.0)) for d in self._deployments]
        yield _samples("midstream_push_waiting_seconds", waiting)

    def _data_path(self) -> Iterator[Metric]:
        requests = [((path, str(status)), count) for (path, status), count in self.requests.items()]
        yield _samples("midstream_gateway_requests", requests)
        for name, counts in self._counters.items():
            yield _samples(
                f"midstream_gateway_{name}", [((value,), count) for value, count in counts.items()]
            )
        sessions = sum(len(d.sessions) for d in self._deployments)
        yield _samples("midstream_gateway_sessions", [((), sessions)])
        yield self._per_view("midstream_gateway_in_flight", lambda view: view.replica.in_flight)
        yield self._per_view("midstream_gateway_replica_up", lambda view: view.report is not None)
        yield self._per_view("midstream_gateway_replica_usable", lambda view: view.usable)

    def _per_view(self, name: str, value: Callable[[ReplicaView], float]) -> Metric:
        return _samples(name, [((view.name,), value(view)) for _, view in self._views()])

    def _deployment_metrics(self) -> Iterator[Metric]:
        policies = self._deployments.policy_count
        values: dict[str, Callable[[Deployment], float]] = {
            "wanted": lambda d: d.wanted_in_all,
            "usable": lambda d: sum(view.usable for view in d.replicas.views),
        }
        for name, value in values.items():
            found = [((d.name,), value(d)) for d in self._deployments]
            yield _samples(f"midstream_deployment_replicas_{name}", found)
        yield _samples("midstream_deployment_policies", [((d.name,), policies(d)) for d in self._deployments])

    def _views(self) -> list[tuple[Deployment, ReplicaView]]:
        """Members, and those that leave as long as they are heard. One that has left for another deployment is its member."""
        found = [(d, view) for d in self._deployments for view in d.replicas.views]
        names = {view.name for _, view in found}
        leaving = [(d, view) for d in self._deployments for view in d.replicas.leaving]
        return found + [(d, v) for d, v in leaving if v.replica.heard is not None and v.name not in names]

    def _replicas(self) -> Iterator[Metric]:
        heard = [(d, view, view.replica.heard) for d, view in self._views() if view.replica.heard is not None]
        for name, value in _REPORTED.items():
            yield _samples(name, [((view.name,), value(report)) for _, view, report in heard])
        # The gateway signals no snapshot to a replica that leaves.
        told = [(d, v, report) for d, v, report in heard if v.replica.standing == "member"]
        behind = [((view.name,), d.order.behind(report.own.snapshot)) for d, view, report in told]
        yield _samples("midstream_replica_snapshots_behind", behind)
        disagree = [((v.name,), d.reconciler.disagrees(v.report)) for d, v, _ in told if v.report is not None]
        yield _samples("midstream_replica_disagrees", disagree)
        for name, value_of in _VLLM_REPORTED.items():
            found = [((d.model, view.name), value_of(report)) for d, view, report in heard]
            yield _samples(name, [(labels, value) for labels, value in found if value is not None])
        about = [(view.name, d.name, r.own.snapshot, str(r.own.stage), view.url) for d, view, r in heard]
        yield _samples("midstream_replica", [(labels, 1) for labels in about])
        yield from _audited([(view.name, r.audit) for _, view, r in heard if r.audit is not None])

    def _heard_trajectories(self) -> list[tuple[Deployment, ReplicaView, Trajectories]]:
        """A replica that is heard but has measured nothing yet shows zeros: Prometheus sees no increase from nothing to one."""
        return [
            (d, view, view.replica.trajectories or _NOTHING)
            for d, view in self._views()
            if view.replica.trajectories is not None or view.report is not None
        ]

    def _measured(self) -> Iterator[Metric]:
        """What replicas measured of their turns and swaps, since their processes began."""
        measured = [(d, view, one.measures) for d, view, one in self._heard_trajectories()]
        for names, labels in (
            (_MEASURED, lambda d, view: (view.name,)),
            (_VLLM_MEASURED, lambda d, view: (d.model, view.name)),
        ):
            for name, measure in names.items():
                found = [(labels(d, view), own[measure]) for d, view, own in measured if measure in own]
                yield _distributions(name, MEASURES[measure], found)

    def _stalls(self, of_others: Mapping[str, Histogram]) -> HistogramMetricFamily:
        """Stalls of replicas as they reported them, and of all other processes of the server."""
        stalls: dict[str, Distribution] = {**of_others}
        for _, view, measured in self._heard_trajectories():
            if _STALLS_OF_REPLICA in measured.measures:
                stalls[view.name] = measured.measures[_STALLS_OF_REPLICA]
        found = [((process,), one) for process, one in stalls.items()]
        return _distributions("midstream_event_loop_stall_seconds", MEASURES[_STALLS_OF_REPLICA], found)

    def _ended(self) -> Iterator[Metric]:
        """How turns and swaps ended, as replicas counted."""
        measured = [(d, view, one.counts) for d, view, one in self._heard_trajectories()]
        for name, what in (("midstream_turn_choices", "finishes"), ("midstream_swaps", "swaps")):
            yield _samples(
                name,
                [
                    ((view.name, value), counts[what].get(value, 0))
                    for _, view, counts in measured
                    if what in counts
                    for value in COUNTS[what]
                ],
            )
        success: Counter[tuple[str, ...]] = Counter()
        for d, view, counts in measured:
            for finish in COUNTS["finishes"]:
                reason = _VLLM_FINISHES.get(finish, finish)
                success[d.model, view.name, reason] += counts.get("finishes", {}).get(finish, 0)
        yield _samples("vllm:request_success", success.items())


def _audited(audits: Sequence[tuple[str, AuditStats]]) -> Iterator[Metric]:
    differ = [((replica, cause), count) for replica, one in audits for cause, count in one.mismatches.items()]
    yield _samples("midstream_audit_mismatches", differ)
    skipped = [((replica, why), count) for replica, one in audits for why, count in one.not_audited.items()]
    yield _samples("midstream_audit_skipped", skipped)
    last = [(replica, one.last) for replica, one in audits if one.last is not None]
    yield _samples(
        "midstream_audit_last_mismatch_timestamp_seconds",
        [((replica, one.session, str(one.turn), one.snapshot, one.cause), one.at) for replica, one in last],
    )


class _Collected(Collector):
    """Families that nothing changes any more."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families

    def text(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)


def _kv_used(report: ReplicaReport) -> float | None:
    engine = report.engine
    return engine.kv.used / engine.kv.total if engine.kv.total else None


def _samples(name: str, values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """The family of that name. values: the values of its labels in their order, and the sample's."""
    kind, help_text, labels = FAMILIES[name]
    if kind == "info":
        info = InfoMetricFamily(name, help_text, labels=labels[:1])
        for given, _ in values:
            info.add_metric(given[:1], dict(zip(labels[1:], given[1:], strict=True)))
        return info
    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family = make(name, help_text, labels=labels)
    for given, value in values:
        family.add_metric(given, float(value))
    return family


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """(upper bound, count at or below it), as Prometheus wants them."""
    return list(zip([*map(str, bounds), "+Inf"], map(float, accumulate(counts)), strict=True))


def _distributions(
    name: str, bounds: Sequence[float], found: Iterable[tuple[Sequence[str], Distribution]]
) -> HistogramMetricFamily:
    _, help_text, labels = FAMILIES[name]
    family = HistogramMetricFamily(name, help_text, labels=labels)
    for given, one in found:
        family.add_metric(given, cumulative(bounds, one.counts), one.sum)
    return family


def _durations(name: str, histograms: Mapping[str, Histogram]) -> HistogramMetricFamily:
    return _distributions(name, BUCKETS_S, (((path,), one) for path, one in histograms.items()))
