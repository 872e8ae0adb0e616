"""The published figures of many streams and of two cores are the ones their JSON gives."""

from __future__ import annotations

import json
from typing import Any

import document
from gateway import scale, scale_table
from hardware import RESULTS


def test_the_document_holds_what_the_results_render_to() -> None:
    result = json.loads((RESULTS / "gateway-scale.json").read_text())
    text = document.DOCUMENT.read_text()
    assert document.replaced(text, "gateway-scale", scale_table.render(result)) == text


def _cell(per_s: float, **more: float) -> dict[str, float]:
    return {
        "cpu_us": 25.0,
        "per_s": per_s,
        "p50_us": 1000.0,
        "p99_us": 11_000.0,
        "kb_per_stream": 18.5,
        **more,
    }


def _result(**parts: Any) -> dict[str, Any]:
    found = {
        "at": "2026-11-28T00:00:00Z",
        "hardware": {"cpu": "a CPU", "cores": 2},
        "commit": "a" * 40,
        "versions": {"python": "3.11.7"},
        "configuration": {"rounds": 3},
        "streams": {"streams": 9750, "cells": {"direct": _cell(9750.0), "midstream": _cell(9652.5)}},
        "two_cores": {
            "connections": 64,
            "cells": {
                "direct": _cell(40_000.0),
                "midstream, one gateway": _cell(10_000.0),
                "midstream, two gateways": _cell(15_000.0),
                "haproxy": _cell(20_000.0),
            },
        },
        "absent": {},
    }
    return {**found, **parts}


def test_a_row_has_the_memory_and_the_share_of_chunks_in_time() -> None:
    assert "| midstream | 18.5 | 25.0 | 1.0 | 11.0 | 99.0% |" in scale_table.render(_result())


def test_two_gateways_are_compared_with_one() -> None:
    text = scale_table.render(_result())
    assert "| midstream, two gateways | 15,000 | 1.50 | 25.0 | 11.0 |" in text
    assert "| haproxy, two threads | 20,000 | 2.00 | 25.0 | 11.0 |" in text


def test_who_is_absent_is_named_with_the_reason_and_a_failed_cell_has_no_row() -> None:
    streams = {"streams": 9750, "cells": {"direct": _cell(9750.0), "midstream": {"unserved": 3}}}
    text = scale_table.render(_result(streams=streams, absent={"haproxy": "is not installed\nmore"}))
    assert "- haproxy is absent: is not installed." in text
    assert "| midstream |" not in text


def test_no_more_streams_are_opened_than_files_may_be() -> None:
    assert scale.streams_that_fit(100) == 100
    most = scale.resource.getrlimit(scale.resource.RLIMIT_NOFILE)[1]
    assert scale.streams_that_fit(10**9) * scale.FILES_PER_STREAM + scale.OTHER_FILES <= most
