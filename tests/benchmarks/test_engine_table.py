"""The published table is the one its JSON gives."""

from __future__ import annotations

import json

import document
import engine_table
import pytest
from hardware import RESULTS


@pytest.mark.parametrize("name", ["engine", "engine-avx2"])
def test_the_document_holds_what_the_results_render_to(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    text = document.DOCUMENT.read_text()
    assert document.replaced(text, name, engine_table.render(result)) == text


def test_a_row_shows_every_engine_the_ratio_and_how_many_rounds_it_had() -> None:
    columns = {
        name: {
            "tokens_per_s": speed,
            "gap_ms_p50": 1.0,
            "gap_ms_p99": 2.5,
            "rounds": rounds,
            "server_cpu_ms_per_token": 0.25,
        }
        for name, speed, rounds in [("midstream", 3000.0, 5), ("vllm", 2000.0, 3)]
    }
    row = {"model": "m", "kind": "decode", "streams": 16, "prompt": 1024, "new": 128, "late_prompt": 0}
    stamp = {"at": "2026-01-02T03:04:05Z", "commit": "0123456789abcdef"}
    text = engine_table.render(
        {
            "hardware": {"cpu": "CPU", "cores": 2},
            "versions": {"python": "3", "torch": "2", "transformers": "5"},
            "servers": {},
            "lines": [{**row, **stamp, "columns": columns}],
        }
    )
    assert "| 1,024 + 128 | 16 | 3,000 (1 / 2.5) | - | 2,000 (1 / 2.5) | - | 1.50 | 3-5 |" in text
    assert "2026-01-02, commit 0123456789" in text
