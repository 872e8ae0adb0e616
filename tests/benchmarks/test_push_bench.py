"""The benchmark of pushes: its bare part as it runs, and its table."""

from __future__ import annotations

import json
import subprocess
import sys

import document
import push_table
import pytest
from hardware import RESULTS

MEASURED = RESULTS / "push.json"
LINE = {"bytes": 10**9, "bare_s": 1.0, "sent_s": 1.2, "ratio": 1.2, "served_s": 3.0, "blocked_s": 0.25}


@pytest.mark.variant
def test_the_bare_broadcast_reaches_every_receiver() -> None:
    command = [
        sys.executable,
        "push.py",
        "--bare",
        "--bytes",
        "1000",
        "--replicas",
        "1",
        "2",
        "--rounds",
        "3",
    ]
    done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    assert [line["replicas"] for line in lines] == [1, 2]
    assert all(line["bare_s"] > 0 for line in lines)


def test_a_row_has_the_times_of_its_replicas() -> None:
    result = {
        "at": "2026-11-28T20:00:00Z",
        "commit": "0123456789" * 4,
        "hardware": {"cores": 2, "cpu": "Some CPU"},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "configuration": {"rounds": 5},
        "lines": [{"replicas": 2, **LINE}],
    }
    text = push_table.render(result)
    assert "2026-11-28, commit 0123456789; 2 cores of an Some CPU" in text
    assert "1.00 GB, medians of 5 rounds." in text
    assert "| 2 | 1.00 | 1.20 | 1.20 | 3.00 | 0.25 |" in text


@pytest.mark.skipif(not MEASURED.exists(), reason="no push was measured yet: make bench-push")
def test_the_document_has_the_figures_of_the_result() -> None:
    text = document.DOCUMENT.read_text()
    result = json.loads(MEASURED.read_text())
    assert document.replaced(text, "push", push_table.render(result)) == text
