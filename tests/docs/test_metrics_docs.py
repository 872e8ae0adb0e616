"""docs/metrics.md lists what the code shows; the dashboard and the alerts ask only for that, and every alert has its page."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics_tables import DOCUMENT, tables, written
from promql import DASHBOARD, alerts, dashboard_queries, selectors, unknown

from midstream.proxy.families import FAMILIES, shown_name

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"
#: Each metric with its labels, as the table in the code has them. tests/gateway shows that /metrics is that table.
SHOWN = {
    shown_name(name) + end: set(family.labels) | ({"le"} if end == "_bucket" else set())
    for name, family in FAMILIES.items()
    for end in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
}


def test_the_tables_are_those_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert written(text) == text, "python tests/docs/metrics_tables.py writes them"
    assert tables().count("| `midstream_") + tables().count("| `vllm:") == len(FAMILIES)


def test_names_follow_prometheus_conventions() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"(midstream_|vllm:)[a-z0-9]+(_[a-z0-9]+)*", name)
        assert not name.endswith(("_total", "_info", "_count", "_sum", "_bucket"))
        units = re.findall(r"_(milliseconds|ms|percent|kb|mb|kib|mib|minutes)(?:_|$)", name)
        assert units == [], f"{name}: seconds, bytes and ratios"
        assert family.help
        assert family.help[0].islower() or family.help[0].isdigit()
        if family.kind == "histogram" and not name.startswith("vllm:"):
            assert name.endswith(("_seconds", "_tokens", "_ratio", "_turns", "_crossed"))


def test_a_dashboards_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len(panels) >= 30
    assert [id for id, count in Counter(panel["id"] for panel in panels).items() if count > 1] == []
    cells = Counter(
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    )
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) == 23
    assert all(panel["title"] for panel in panels)


def queries() -> Iterator[tuple[str, str]]:
    yield from dashboard_queries()
    yield from ((rule["alert"], rule["expr"]) for rule in alerts())


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_a_query_asks_for_metrics_and_labels_that_there_are(where: str, query: str) -> None:
    assert list(selectors(query))
    assert unknown(query, SHOWN) == []


def test_the_dashboard_shows_what_becomes_of_pushes() -> None:
    asked = {metric for _, query in dashboard_queries() for metric, _ in selectors(query)}
    wanted = ("push_groups", "push_updates_total", "push_received_bytes_total", "push_seconds_bucket")
    assert {f"midstream_{name}" for name in wanted} <= asked


def test_a_query_for_what_is_not_there_is_found() -> None:
    assert unknown("rate(midstream_swaps_total[5m])", SHOWN) == []
    assert unknown("sum by (outcom) (midstream_swaps_total)", SHOWN) == ["outcom"]
    assert unknown('midstream_swaps_total{session="s"}', SHOWN) == ["midstream_swaps_total{session}"]
    assert unknown("max(midstream_replica_ready / midstream_swap_pause_milliseconds)", SHOWN) == [
        "midstream_swap_pause_milliseconds"
    ]


def test_each_alert_says_what_it_is_and_has_a_page_in_the_runbook() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) >= 8
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert [name for name in headings if name.startswith("Midstream")] == names
    for rule in alerts():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"[0-9]+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_alerts_are_one_group_that_prometheus_reads() -> None:
    read = yaml.safe_load((DASHBOARD.parent / "alerts.yaml").read_text())
    assert [set(group) for group in read["groups"]] == [{"name", "rules"}]
