"""The benchmarks over limited links and through vLLM: the bucket keeps to its rate, and the tables are those of the results."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import document
import limited_bucket
import links_table
import pytest
import vllm_push_table
from hardware import RESULTS

from midstream.core.types import SnapshotFiles
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher
from midstream.snapshots.store.listing import list_snapshot

TABLES = {
    "links": links_table.render,
    "link-swap": links_table.render_swap,
    "vllm-push": vllm_push_table.render,
}


@pytest.mark.parametrize("name", TABLES)
def test_the_document_has_the_figures_of_the_result(name: str) -> None:
    text, path = document.DOCUMENT.read_text(), RESULTS / f"{name}.json"
    if not path.exists():
        pytest.skip("it was not measured yet: make bench-push")
    assert document.replaced(text, name, TABLES[name](json.loads(path.read_text()))) == text


def test_what_passes_a_link_is_no_more_than_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(limited_bucket.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(limited_bucket.time, "sleep", sleep)
    link = limited_bucket.Link(1000)
    for _ in range(10):
        link.pass_through(500)
    assert now[0] == pytest.approx(5.0)
    # An idle link saves nothing up.
    now[0] += 60
    link.pass_through(500)
    assert now[0] == pytest.approx(65.5)


async def test_a_replica_fetches_a_snapshot_through_the_limited_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "bucket" / "s0"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(os.urandom(300_000))

    with limited_bucket.limited_bucket(tmp_path / "bucket", 1, 1e6) as (port, _):
        for name, value in limited_bucket.environment(port).items():
            monkeypatch.setenv(name, value)
        url = f"s3://{limited_bucket.BUCKET}/s0"
        known = (await list_snapshot(url)).fingerprint
        chain = [SnapshotFiles(snapshot="s0", url=url, fingerprint=known)]
        found = await ChainFetcher(SnapshotCache(tmp_path / "cache")).fetch(chain)
    assert found is not None
    name = "model.safetensors"
    assert (found / name).read_bytes() == (directory / name).read_bytes()


def test_a_row_of_a_phase_has_what_either_took() -> None:
    phases = dict(zip(vllm_push_table.PHASES, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    swap = {"finish_swap_ms": 9.0, "finish_verify_ms": 1.0, "finish_stage_ms": 2.0, "finish_check_ms": 6.0}
    side: dict[str, Any] = {f"{phase}_ms": value for phase, value in phases.items()}
    line = {"bytes": 10**9, "bare": side, "midstream": {**side, **swap}, "more_ms": phases}
    hardware = {"cores": 2, "cpu": "Some CPU"}
    text = vllm_push_table.render(
        {
            "at": "2026-11-29T20:00:00Z",
            "commit": "0123456789" * 4,
            "hardware": hardware,
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "configuration": {"rounds": 5},
            "lines": [line],
        }
    )
    assert "| update | 3 | 3 | 3 |" in text
    assert "the swap takes 9 ms" in text
