"""What the gateway counts, in Prometheus' format.

The hot path only adds to plain integers; metric families are built when somebody asks.
Always holds: label values come from small fixed sets (replicas, path classes, statuses, reasons), never from sessions,
keys or request content. Durations are kept in the buckets of BUCKETS_S, one histogram per path class (completions,
chat_completions, messages, count_tokens, tinker, control, dashboard).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from midstream.core.sessions import BUCKETS_S, TURN_MEASURES, Distribution
from midstream.core.types import RecordsStats, ReplicaReport
from midstream.fleet.registry import Deployments
from midstream.fleet.tally import Siblings, Tally, merged
from midstream.fleet.view import ReplicaView

Metric = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily
CONTENT_TYPE = CONTENT_TYPE_LATEST

_NONE = RecordsStats()
#: name, help, value: one sample per reachable replica
_REPORT_GAUGES: tuple[tuple[str, str, Callable[[ReplicaReport], float]], ...] = (
    ("replica_ready", "1 when the engine answers and a snapshot serves", lambda r: r.ready),
    ("replica_requests_in_flight", "requests the replica is serving", lambda r: r.in_flight),
    ("replica_sequences_running", "sequences being stepped", lambda r: r.engine.running),
    ("replica_sequences_waiting", "sequences queued in the engine", lambda r: r.engine.waiting),
    ("replica_kv_blocks_used", "KV cache blocks in use", lambda r: r.engine.kv_blocks_used),
    ("replica_kv_blocks_total", "KV cache blocks there are", lambda r: r.engine.kv_blocks_total),
    ("replica_long_texts", "long prompts and grammars being read, or waiting", lambda r: r.long_texts),
    ("replica_stalled_seconds", "longest stall of its event loop lately", lambda r: r.stalled_s),
    ("replica_engine_silent_seconds", "since the engine was heard, from 5 on", lambda r: r.engine_silent_s),
    ("replica_records_waiting_bytes", "not in the bucket yet", lambda r: (r.records or _NONE).waiting_bytes),
    ("replica_generation", "generation of the last accepted signal", lambda r: r.generation),
    (
        "replica_swap_pause_milliseconds",
        "time in which no step ran during the last weight swap",
        lambda r: r.last_swap.pause_ms if r.last_swap else 0.0,
    ),
)
_REPORT_COUNTERS: tuple[tuple[str, str, Callable[[ReplicaReport], float]], ...] = (
    ("replica_prompt_tokens", "prompt tokens taken", lambda r: r.engine.prompt_tokens),
    (
        "replica_cached_prompt_tokens",
        "prompt tokens whose KV was reused",
        lambda r: r.engine.cached_prompt_tokens,
    ),
    ("replica_generated_tokens", "tokens generated", lambda r: r.engine.generated_tokens),
    ("replica_engine_steps", "engine steps", lambda r: r.engine.steps),
    ("replica_records_durable", "records that a crash does not take", lambda r: (r.records or _NONE).durable),
    ("replica_records_lost", "records that found no room", lambda r: (r.records or _NONE).lost),
)


#: Of TURN_MEASURES.
_TURN_HELP = {
    "time_to_first_token_seconds": "from a request's arrival at its replica to its first token",
    "inter_token_seconds": "mean time between two tokens of a turn",
    "generation_seconds": "from the first token of a turn to its end",
    "cached_prompt_share": "part of a turn's prompt tokens whose KV was reused",
    "turns_per_session": "turns of a session, when it is closed",
}


class Histogram:
    """How many durations fell into each bucket, and their sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def add(self, counts: Sequence[int], sum_s: float) -> None:
        """What another one counted."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        self.sum_s += sum_s

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, count at or below it), as Prometheus wants them."""
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class GatewayMetrics(Collector):
    """Counters of the data path and gauges of its replicas, in a registry of their own.

    siblings: the server's other gateways, whose counts are shown with this one's. listening, ready: of this process.
    report: tells the supervisor what this process counted, before anybody is shown it: so it is not lost with the process.
    """

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments
        self.siblings: Callable[[], Siblings] = Siblings
        self.report: Callable[[], None] = lambda: None
        self.listening: Callable[[], bool] = lambda: True
        self.ready: Callable[[], bool] = lambda: True
        # By (path class, status). 499: the client left first.
        self.requests: Counter[tuple[str, int]] = Counter()
        # By the reason of the route.
        self.routes: Counter[str] = Counter()
        # Connections lost or refused, by replica.
        self.upstream_errors: Counter[str] = Counter()
        # By kind: stale_connection, other_replica, other_snapshot, other_boot, resumed.
        self.retries: Counter[str] = Counter()
        # Responses that ended visibly short, by replica.
        self.cut_responses: Counter[str] = Counter()
        # By path class.
        self.first_byte_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.total_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    @property
    def workers(self) -> int:
        """How many gateway processes of the server listen."""
        return self.listening() + self.siblings().listening

    @property
    def workers_ready(self) -> int:
        """How many of them can use every replica that there should be."""
        return self.ready() + self.siblings().ready

    @property
    def _counters(self) -> dict[str, Counter[str]]:
        names = ("routes", "upstream_errors", "retries", "cut_responses")
        return {name: getattr(self, name) for name in names}

    @property
    def _histograms(self) -> dict[str, defaultdict[str, Histogram]]:
        return {"first_byte_s": self.first_byte_s, "total_s": self.total_s}

    def tally(self) -> Tally:
        return Tally(
            requests=[(path, status, count) for (path, status), count in self.requests.items()],
            counters={name: dict(counts) for name, counts in self._counters.items()},
            histograms={
                name: {path: (list(one.counts), one.sum_s) for path, one in histograms.items()}
                for name, histograms in self._histograms.items()
            },
        )

    def in_all(self) -> Tally:
        """With what the others counted."""
        return merged((self.tally(), self.siblings().tally))

    def _in_all(self) -> GatewayMetrics:
        total = GatewayMetrics(self._deployments)
        tally = self.in_all()
        for path, status, count in tally.requests:
            total.requests[path, status] = count
        for name, counts in tally.counters.items():
            total._counters[name].update(counts)
        for name, histograms in tally.histograms.items():
            for path, (buckets, sum_s) in histograms.items():
                total._histograms[name][path].add(buckets, sum_s)
        return total

    def exposition(self) -> bytes:
        self.report()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        total = self._in_all()
        yield from total._data_path()
        yield _durations(
            "time_to_first_byte", "from a whole request to the first byte of its response", total.first_byte_s
        )
        yield _durations("request", "from a whole request to the end of a whole response", total.total_s)
        yield GaugeMetricFamily(
            "midstream_gateway_workers", "gateway processes that listen", value=float(self.workers)
        )
        yield from self._replicas()
        yield from self._turns()

    def _data_path(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "midstream_gateway_requests", "requests answered", labels=["path", "status"]
        )
        for (path, status), count in self.requests.items():
            requests.add_metric([path, str(status)], count)
        yield requests
        for name, help_text, label, counts in (
            ("routes", "placement decisions", "reason", self.routes),
            ("upstream_errors", "replica connections refused or lost", "replica", self.upstream_errors),
            ("retries", "requests sent again before any response byte", "kind", self.retries),
            (
                "cut_responses",
                "responses ended short because the replica went",
                "replica",
                self.cut_responses,
            ),
        ):
            family = CounterMetricFamily(f"midstream_gateway_{name}", help_text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        yield GaugeMetricFamily(
            "midstream_gateway_sessions",
            "sessions with a known replica",
            value=sum(len(d.sessions) for d in self._deployments),
        )
        yield self._per_view("in_flight", "requests on the replica now", lambda view: view.in_flight)
        yield self._per_view("replica_up", "1 when the event stream is up", lambda v: v.report is not None)
        yield self._per_view("replica_usable", "1 when placement may use it", lambda view: view.usable)

    def _turns(self) -> Iterator[Metric]:
        """What replicas measured of their turns, since their processes began."""
        told = [(view.name, view.trajectories.measures) for view in self._views() if view.trajectories]
        for name, help_text in _TURN_HELP.items():
            family = HistogramMetricFamily(f"midstream_turn_{name}", help_text, labels=["replica"])
            for replica, measures in told:
                if name in measures:
                    found = measures[name]
                    family.add_metric([replica], _distribution(name, found), found.sum)
            yield family

    def _views(self) -> list[ReplicaView]:
        return [view for deployment in self._deployments for view in deployment.replicas.views]

    def _per_view(
        self, name: str, help_text: str, value: Callable[[ReplicaView], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"midstream_gateway_{name}", help_text, labels=["replica"])
        for view in self._views():
            family.add_metric([view.name], float(value(view)))
        return family

    def _replicas(self) -> Iterator[Metric]:
        reports = [(view.name, view.report) for view in self._views() if view.report is not None]
        for name, help_text, value in _REPORT_GAUGES:
            gauge = GaugeMetricFamily(f"midstream_{name}", help_text, labels=["replica"])
            for replica, report in reports:
                gauge.add_metric([replica], float(value(report)))
            yield gauge
        for name, help_text, value in _REPORT_COUNTERS:
            counter = CounterMetricFamily(f"midstream_{name}", help_text, labels=["replica"])
            for replica, report in reports:
                counter.add_metric([replica], float(value(report)))
            yield counter
        info = InfoMetricFamily("midstream_replica", "what serves now, and where", labels=["replica"])
        for deployment, view in ((d.name, view) for d in self._deployments for view in d.replicas.views):
            if view.report is not None:
                about = {
                    "deployment": deployment,
                    "snapshot": view.report.snapshot,
                    "stage": str(view.report.stage),
                    "url": view.url,
                }
                info.add_metric([view.name], about)
        yield info


def _distribution(name: str, found: Distribution) -> list[tuple[str, float]]:
    """(upper bound, count at or below it)."""
    bounds = [*map(str, TURN_MEASURES[name]), "+Inf"]
    return list(zip(bounds, map(float, accumulate(found.counts)), strict=True))


def _durations(name: str, help_text: str, histograms: Mapping[str, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"midstream_gateway_{name}_seconds", help_text, labels=["path"])
    for path, histogram in histograms.items():
        family.add_metric([path], histogram.cumulative(), histogram.sum_s)
    return family
