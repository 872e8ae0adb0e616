"""The published figures of deltas are the ones their JSON gives."""

from __future__ import annotations

import json

import delta_table
import document
import pytest
from hardware import RESULTS


def test_the_document_holds_what_the_results_render_to() -> None:
    result = json.loads((RESULTS / "delta.json").read_text())
    text = document.DOCUMENT.read_text()
    assert document.replaced(text, "delta", delta_table.render(result)) == text


def test_ratios_are_against_the_references_best() -> None:
    speeds = {
        "midstream encode": 2.0,
        "midstream rebuild": 3.0,
        "reference encode, files": 0.4,
        "reference encode, in memory": 0.5,
        "reference rebuild, in memory": 1.25,
        "reference rebuild, over its parent's file": 0.9,
    }
    layout = {
        "rows": {n: {"gb_per_s": s, "cpu_s_per_gb": 1 / s, "others": 0.25} for n, s in speeds.items()},
        "rounds": 5,
        "bytes": 200_000_000,
        "delta_bytes": {"midstream": 5_100_000, "reference": 5_000_000},
        "peak_bytes": {"rebuild": 3_000_000, "encode": 40_000_000},
    }
    packages = ("python", "torch", "zstandard", "zlib-ng", "fireworks-delta-compression")
    text = delta_table.render(
        {
            "at": "2026-01-02T03:04:05Z",
            "commit": "0123456789" + "a" * 30 + "+uncommitted",
            "hardware": {"cpu": "CPU", "cores": 2},
            "versions": dict.fromkeys(packages, "1.0"),
            "layouts": {"one file": layout},
        }
    )
    assert "2026-01-02, commit 0123456789+uncommitted; 2 cores of an CPU" in text
    assert "at most 0.25 cores" in text
    assert "| midstream rebuild | 3.00 (0.33) |" in text
    assert "- one file, rebuild: 2.40 x the reference's best (in memory)." in text
    assert "- one file, encode: 4.00 x the reference's best (in memory)." in text
    assert (
        "delta 5.10 MB, the reference's 5.00 MB; peak memory over the imports 3 MB (rebuild), 40 MB (encode)"
        in text
    )


def test_a_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no part marked"):
        document.replaced("# Benchmarks\n", "delta", "x")
