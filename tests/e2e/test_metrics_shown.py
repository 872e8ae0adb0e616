"""/metrics of a real server after requests and swaps: what the dashboard and the alerts ask for is there, with true numbers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from promql import alerts, dashboard_queries, unknown
from serving import Server, serve

from midstream.client import SnapshotFailed, SnapshotPublisher

REPLICA = {"replica": "replica-0"}


class Shown:
    """One look at /metrics."""

    def __init__(self, server: Server) -> None:
        text = httpx.get(f"{server.url}/metrics").raise_for_status().text
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        (found,) = [one.value for one in self.samples if one.name == name and one.labels == labels]
        return found

    def names(self) -> dict[str, set[str]]:
        names: dict[str, set[str]] = {}
        for sample in self.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
        return names


@pytest.mark.variant
def test_what_queries_ask_for_is_shown_and_adds_up(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    with serve(tmp_path / "state", "--replicas", "1", "--no-tinker") as server:
        prompt, cached, made, finishes = 0, 0, 0, {"stop": 0, "length": 0}
        for number in range(3):
            body = {"model": server.model, "prompt": [1, 2, 3] * 20, "max_tokens": 4 + number, "seed": number}
            answer = (
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
            )
            usage = answer["usage"]
            prompt += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
            made += usage["completion_tokens"]
            finishes[answer["choices"][0]["finish_reason"]] += 1
        for _ in range(5):
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert httpx.head(f"{server.url}/v1/models").status_code < 500
        assert cached > 0
        shutil.copytree(tiny_model(seed=1, dtype="bfloat16"), server.bucket / "step-1")
        shutil.copytree(tiny_model(seed=2, dtype="bfloat16"), server.bucket / "broken")
        for file in (server.bucket / "broken").glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-64])
        with SnapshotPublisher(server.url, server.bucket.as_uri()) as publisher:
            publisher.snapshots.signal("step-1")
            publisher.snapshots.wait_until_ready("step-1", timeout_s=120)
            try:
                publisher.snapshots.signal("broken")
                publisher.snapshots.wait_until_ready("broken", timeout_s=120)
            except SnapshotFailed:
                pass
            else:
                raise AssertionError("a broken snapshot was served")
        shown = _once(
            server, lambda shown: shown.value("midstream_swaps_total", **REPLICA, outcome="failed") > 0
        )

        assert shown.value("midstream_swaps_total", **REPLICA, outcome="ready") == 1
        assert shown.value("midstream_swap_pause_seconds_count", **REPLICA) == 1
        assert shown.value("midstream_swap_check_seconds_count", **REPLICA) == 1
        assert shown.value("midstream_replica_snapshots_behind", **REPLICA) == 1
        assert shown.value("midstream_replica_disagrees", **REPLICA) == 0
        named = {"model_name": server.model, "engine": "replica-0"}
        for name, total in (("prompt", prompt), ("generated", made), ("generation", made)):
            if name != "generation":
                assert shown.value(f"midstream_turn_{name}_tokens_sum", **REPLICA) == total
            if name != "generated":
                assert shown.value(f"vllm:request_{name}_tokens_sum", **named) == total
        assert shown.value("vllm:generation_tokens_total", **named) == made
        assert shown.value("vllm:prefix_cache_hits_total", **named) == cached
        for finish, count in finishes.items():
            assert shown.value("midstream_turn_choices_total", **REPLICA, finish=finish) == count
            assert shown.value("vllm:request_success_total", **named, finished_reason=finish) == count
        assert shown.value("vllm:e2e_request_latency_seconds_count", **named) == 3
        assert shown.value("midstream_gateway_requests_total", path="completions", status="200") == 3
        counted = {
            one.labels["path"] for one in shown.samples if one.name == "midstream_gateway_requests_total"
        }
        assert counted <= {"completions", "control"}
        deployment = {"deployment": server.deployment}
        assert shown.value("midstream_deployment_replicas_usable", **deployment) == 1

        names = shown.names()
        # Nothing was lost or sent again here: these have no samples. tests/gateway shows them with some.
        quiet = {
            f"midstream_gateway_{name}_total": {label}
            for name, label in (
                ("upstream_errors", "replica"),
                ("cut_responses", "replica"),
                ("retries", "kind"),
            )
        }
        # Nothing was pushed. tests/control shows what pushes count.
        quiet["midstream_push_groups"] = {"deployment", "phase"}
        quiet["midstream_push_received_bytes_total"] = {"replica"}
        # Nothing that an audit would compute is wrong. tests/e2e/test_turns_audited.py shows what is counted then.
        quiet["midstream_audit_mismatches_total"] = {"replica", "cause"}
        queries = [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in alerts())]
        assert len(queries) > 50
        assert {where: gone for where, query in queries if (gone := unknown(query, quiet | names))} == {}


def _once(server: Server, holds: Callable[[Shown], bool]) -> Shown:
    deadline = time.monotonic() + 120
    while not holds(shown := Shown(server)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return shown
