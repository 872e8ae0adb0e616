"""A real Prometheus scrapes a real server: each alert is evaluated, and each panel of the Grafana dashboard has numbers.

Skipped where there is no `prometheus` (Debian: apt-get install prometheus).
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from promql import DASHBOARD, alerts, dashboard_queries
from serving import Server, serve

from midstream.client import SnapshotPublisher

#: Metrics without samples on a server where nothing went wrong, and where no delta was published and no weights were pushed.
QUIET = ("upstream_errors", "cut_responses", "retries", "swap_rebuild", "midstream_push_")
#: Of a scrape, and of what waits for it.
SCRAPE_S, PATIENCE_S = 1, 60


class Prometheus:
    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def get(self, path: str, **params: str) -> Any:
        answer = self.client.get(f"/api/v1/{path}", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def value(self, query: str) -> list[float]:
        return [float(one["value"][1]) for one in self.get("query", query=query)["result"]]

    def ready(self) -> bool:
        try:
            return self.client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextlib.contextmanager
def prometheus(folder: Path, server: Server, port: int) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus")
    folder.mkdir()
    target = server.url.removeprefix("http://")
    # JSON is YAML.
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(DASHBOARD.parent / "alerts.yaml")],
        "scrape_configs": [{"job_name": "midstream", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        asked = Prometheus(f"http://127.0.0.1:{port}")
        with asked.client:
            _until(asked.ready, (folder / "log").read_text)
            yield asked
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.variant
def test_alerts_are_evaluated_and_panels_have_numbers(
    tmp_path: Path, tiny_model: Callable[..., Path], free_port: int
) -> None:
    with (
        serve(tmp_path / "state", "--replicas", "1", "--no-tinker") as server,
        prometheus(tmp_path / "prometheus", server, free_port) as seen,
    ):
        _until(lambda: seen.value("midstream_gateway_workers") == [1.0])
        # A rate needs a sample from before.
        _until(lambda: seen.value("count_over_time(midstream_turn_request_seconds_count[1m])") >= [2.0])
        turns = 0

        def turn() -> None:
            nonlocal turns
            body = {"model": server.model, "prompt": [1, 2, 3] * 20, "max_tokens": 8, "seed": turns}
            headers = {"x-session-affinity": f"of-prometheus-{turns % 2}"}
            httpx.post(
                f"{server.url}/v1/completions", json=body, headers=headers, timeout=60
            ).raise_for_status()
            turns += 1

        for _ in range(4):
            turn()
        shutil.copytree(tiny_model(seed=1, dtype="bfloat16"), server.bucket / "step-1")
        with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
            publisher.snapshots.signal("step-1")
            publisher.snapshots.wait_until_ready("step-1", timeout_s=120)
        turn()
        for session in range(2):
            httpx.delete(f"{server.url}/v1/sessions/of-prometheus-{session}", timeout=60).raise_for_status()

        _until(lambda: seen.value("midstream_replica_generation") == [1.0])
        # A replica tells its gateways each second.
        shown = {
            "midstream_gateway_requests_total{path='completions'}": turns,
            "midstream_turn_request_seconds_count": turns,
            "midstream_session_turns_count": 2,
            "midstream_swaps_total{outcome='ready'}": 1,
        }
        for query, number in shown.items():
            _until(lambda query=query, number=number: seen.value(query) == [number], query.__str__)

        queries = [query for _, query in dashboard_queries() if not any(quiet in query for quiet in QUIET)]
        assert len(queries) > 50
        assert [query for query in queries if not any(map(math.isfinite, seen.value(query)))] == []
        assert {rule["name"] for rule in _rules(seen)} == {rule["alert"] for rule in alerts()}
        _until(lambda: all(rule["health"] == "ok" for rule in _rules(seen)), lambda: json.dumps(_rules(seen)))
        assert [rule["name"] for rule in _rules(seen) if rule["state"] != "inactive"] == []


def _rules(seen: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in seen.get("rules")["groups"] for rule in group["rules"]]


def _until(holds: Callable[[], bool], what: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)
