"""The published figures of the routers are the ones their JSON gives."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import document
import pytest
from gateway import bench, keys, loads, peers, table
from gateway.routers import Midstream, Smg
from hardware import RESULTS


def test_the_document_holds_what_the_routers_results_render_to() -> None:
    result = json.loads((RESULTS / "gateway.json").read_text())
    text = document.DOCUMENT.read_text()
    assert document.replaced(text, "gateway", table.render(result)) == text


def _cell(cpu_us: float, **more: Any) -> dict[str, Any]:
    cell = {
        "cpu_us": cpu_us,
        "per_s": 1e6 / cpu_us,
        "busy": 0.9,
        "others": 0.25,
        "p50_us": 100.0,
        "p99_us": 900.0,
        "rss_mb": 80.0,
    }
    return {**cell, "failed": 0, **more}


def _router(version: str, log_bytes: int = 900, **more: int) -> dict[str, Any]:
    placed = {
        "failed": 0,
        "sticky": 0.995,
        "max_over_mean": 1.126,
        "of_leaver": 2_500,
        "moved_on_leave": 12,
        "moved_on_return": 1_300,
        "new_on_returned": 2_400,
        "moved_on_restart": 7_000,
    }
    return {"version": version, "rss_mb": 61.4, "log_bytes": log_bytes, "keys": {**placed, **more}}


def _result(**cells: dict[str, Any]) -> dict[str, Any]:
    placement = {"idle_ms_per_s": {"midstream": 6.04, "vllm-router": 0.0}, "cells": cells}
    return {
        "at": "2026-01-02T03:04:05Z",
        "commit": "0123456789" + "a" * 30,
        "hardware": {"cpu": "CPU", "cores": 2},
        "versions": {"python": "3.11.7", "uvloop": "0.23.0"},
        "configuration": {"rounds": 5, "mocks": 4, "keys": 10_000},
        "routers": {
            "midstream": _router("this commit"),
            "vllm-router": _router("0.1.17", log_bytes=2_340_000, failed=3),
        },
        "absent": {"nginx": "is not installed\nhere"},
        "placements": [
            {**placement, "router_core": 0},
            {**placement, "router_core": 1},
        ],
    }


def test_costs_ratios_and_refusals_are_told() -> None:
    text = table.render(
        _result(
            **{
                "1 KB": {"direct": _cell(4.0), "midstream": _cell(20.0), "vllm-router": _cell(25.0)},
                "16k ids": {"direct": _cell(8.0), "midstream": _cell(30.0), "vllm-router": {"refused": 422}},
                "paced": {
                    "direct": _cell(1.0, p50_us=10.0, p99_us=200.0),
                    "midstream": _cell(9.0, per_s=1e6),
                    "vllm-router": _cell(10.0, failed=4, per_s=0.5e6),
                },
            }
        )
    )
    assert "2026-01-02, commit 0123456789; 2 cores of an CPU" in text
    assert (
        "vllm-router 0.1.17. Medians of 5 rounds. Other processes of the machine used at most 0.25 cores."
        in text
    )
    assert "the router on core 0 / core 1" in text
    assert "| midstream | 20.0 / 20.0 | 30.0 / 30.0 | 9.00 / 9.00 |" in text
    assert "| vllm-router | 25.0 / 25.0 | refused (422) | 10.0 / 10.0 |" in text
    assert "- 1 KB request: 0.80 / 0.80 x vllm-router's CPU time; goal at most 0.9: met." in text
    assert "- paced chunk: 0.90 / 0.90 x vllm-router's CPU time; goal at most 0.8: not met." in text
    assert "16k token ids: 0" not in text
    assert "straight at the mocks 250,000 / 250,000 per second; every router's core at least 90% busy" in text
    assert "| midstream | 90 / 90 | 700 / 700 |" in text
    assert "| midstream | 50,000 / 50,000 | 61 | 6.0 / 6.0 |" in text
    assert "| midstream | 99.5% | 1.13 | 2,500 + 12 | 1,300 | 2,400 | 7,000 |" in text
    assert "- vllm-router on core 1 passed on only 50% of the paced chunks in time." in text
    assert "- midstream on core" not in text
    assert "- vllm-router wrote 2.3 MB of log." in text
    assert "- midstream wrote" not in text
    assert "- nginx is absent: is not installed." in text
    # 4 at each placement and 3 of its keys.
    assert "- vllm-router failed 11 requests." in text


def test_a_cell_is_the_median_of_its_rounds_and_the_sum_of_its_failures() -> None:
    rounds = [
        _cell(cpu_us, requests=100, served_more=0) | {"failed": failed}
        for cpu_us, failed in ((30.0, 0), (10.0, 2), (20.0, 1))
    ]
    found = bench.median_of(rounds)
    assert (found["cpu_us"], found["cpu_us_range"], found["rounds"]) == (20.0, [10.0, 30.0], 3)
    assert (found["failed"], found["requests"]) == (3, 300)
    assert bench.median_of([{"refused": 400}, {"refused": 400}]) == {"refused": 400}


class _Scripted:
    """A bench whose loads end as it was told, the last one again and again."""

    def __init__(self, *ends: dict[str, Any]) -> None:
        self.ends, self.asked = list(ends), 0
        self.running, self.effort = {"smg": None}, bench.QUICK

    def measure(self, name: str, shape: Any) -> dict[str, Any]:
        if name == bench.DIRECT:
            return _cell(1.0, requests=1, served_more=0)
        self.asked += 1
        return self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]


def test_a_router_that_serves_nothing_is_measured_again_then_marked_and_costs_no_other_its_figures() -> None:
    shapes = [shape for shape in loads.SHAPES if shape.name in ("1 KB", "burst")]
    whole = _cell(20.0, requests=10, served_more=0)
    once = _Scripted({"unserved": 3}, whole)
    cells = bench.run_cells(once, shapes)  # type: ignore[arg-type]
    assert (once.asked, cells["1 KB"]["smg"]["cpu_us"]) == (3, 20.0)
    never = _Scripted({"unserved": 3})
    cells = bench.run_cells(never, shapes)  # type: ignore[arg-type]
    assert never.asked == 2 * bench.MEASURED_MAX
    assert cells["burst"]["smg"] == {"unserved": 3}
    assert cells["burst"]["direct"]["cpu_us"] == 1.0
    some = bench.median_of([{"unserved": 1}, whole])
    assert (some["cpu_us"], some["rounds"], some["unserved_rounds"]) == (20.0, 1, 1)


def test_a_router_that_served_nothing_is_marked_in_every_table() -> None:
    cells = {shape: {"direct": _cell(8.0), "midstream": _cell(30.0)} for shape in ("1 KB", "burst")}
    cells |= {shape: {"direct": _cell(8.0), "midstream": _cell(30.0)} for shape in ("latency", "paced")}
    for routers in cells.values():
        routers["vllm-router"] = {"unserved": 5}
    text = table.render(_result(**cells))
    assert "| vllm-router | served nothing | served nothing | served nothing |" in text
    assert "| vllm-router | served nothing / served nothing | served nothing / served nothing |" in text


@pytest.mark.parametrize(
    ("installed", "found"),
    [(None, None), ("1.12.0", None), ("1.13.0", "bin/smg")],
    ids=["none", "other", "same"],
)
def test_a_peer_in_another_version_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None, found: str | None
) -> None:
    monkeypatch.setattr(peers, "VENVS", tmp_path)
    if installed is not None:
        (tmp_path / "smg" / "lib" / "python3.11" / "site-packages" / f"smg-{installed}.dist-info").mkdir(
            parents=True
        )
    assert peers.program("smg") == (None if found is None else tmp_path / "smg" / found)
    assert (Smg.missing() is None) == (found is not None)


def test_a_peer_that_is_missing_is_reported_absent_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "VENVS", tmp_path / "nothing")
    core = min(os.sched_getaffinity(0))
    with bench.Bench(tmp_path, bench.QUICK, (core, core)) as benched:
        benched.start([Smg, Midstream])
        assert list(benched.running) == ["midstream"]
        assert benched.absent == {"smg": "1.13.0 is not installed"}


def test_moved_keys_are_those_on_another_replica() -> None:
    assert keys.moved("0123", "0213") == 2
    with pytest.raises(ValueError, match="shorter"):
        keys.moved("0123", "012")
