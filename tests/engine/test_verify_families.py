"""Every family of models: records of a storm of swaps, cache policies and preemptions are verified, and each number counts."""

from __future__ import annotations

import itertools
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, write_model
from test_kv_storm import Storm, Stream
from tiers import slow, variant

from midstream.core.config import EngineSettings
from midstream.engine.embedded.core import EngineCore
from midstream.verify.claims import gather
from midstream.verify.findings import Cause
from midstream.verify.jobs import Computer
from midstream.verify.paged import PagedComputer
from midstream.verify.plain import PlainComputer
from midstream.verify.verifier import Report, Verifier

TOKENS = 250
#: Of a cache so small that sequences are preempted, and their KV computed again.
SMALL = 320


def spans(names: list[str]) -> list[dict[str, Any]]:
    found, at = [], 0
    for name, run in itertools.groupby(names):
        size = sum(1 for _ in run)
        found.append({"snapshot": name, "start": at, "end": at + size})
        at += size
    return found


def records_of(storm: Storm, layers: int, top_k: int) -> Iterator[dict[str, Any]]:
    """As a replica would keep them: each stream is a turn of a session of its own."""
    streams = [stream for stream in storm.streams if stream.tokens]
    for number, stream in enumerate(streams, start=1):
        about = {
            "n": number,
            "replica": "replica-0",
            "boot": "b",
            "kind": "turn",
            "segment": "s",
            "line": number,
        }
        session = {"deployment": "d", "tenant": "", "session": f"s-{number}", "tree": number}
        yield {**about, **session, "turn": turn_of(stream, number, layers, top_k)}


def turn_of(stream: Stream, number: int, layers: int, top_k: int) -> dict[str, Any]:
    records, ids = stream.tokens, stream.ids
    whole = [spans(era.kv) for era in stream.eras]
    later = [era.first for era in stream.eras[1:]]
    return {
        "turn": 1,
        "parent": 0,
        "model": "m",
        "added": ids[: len(ids) - len(records)],
        "token_ids": [record.token_id for record in records],
        "loss_mask": [],
        "finish_reason": "length",
        "created": float(number),
        "logprobs": [record.logprob for record in records],
        "sampling_logprobs": [record.sampling_logprob for record in records],
        "routing_matrix": [b64encode(record.route or b"").decode() for record in records] if layers else None,
        "routing_matrix_dtype": "uint8" if layers else None,
        "routing_matrix_shape": [layers, top_k] if layers else None,
        "router_weights": [b64encode(record.router_weights or b"").decode() for record in records]
        if layers
        else None,
        "snapshots": spans([record.snapshot for record in records]),
        "kv_snapshots": whole[-1],
        "earlier_kv_snapshots": [
            {"tokens": until, "kv_snapshots": kv} for until, kv in zip(later, whole[:-1], strict=True)
        ],
    }


def verified(records: list[dict[str, Any]], computer: Computer, reference: PlainComputer) -> Report:
    found = gather(records, [])
    assert found.findings == []
    verifier = Verifier(
        computer, lambda _: None, lambda _: False, tolerance=2e-4, with_ties=reference.with_ties
    )
    return verifier.verify(found.trees)


IN_TEST = ("qwen3-moe", "deepseek-v3")


@pytest.mark.parametrize(
    "family", [slow(one) if one in IN_TEST else variant(one) for one in sorted(FAMILIES)]
)
def test_records_of_every_family_are_verified_by_engine_and_transformers(family: str, tmp_path: Path) -> None:
    directories = [write_model(family, tmp_path / str(seed), seed) for seed in range(3)]
    settings = EngineSettings(max_batch_tokens=64, max_running=8, kv_cache_tokens=SMALL, router_weights=True)
    core = EngineCore(directories[0], settings)
    storm = Storm(core, [core.stage(directory) for directory in directories], 3)
    storm.run(TOKENS)
    layers, info = FAMILIES[family][2], core.info()
    records = list(records_of(storm, layers, info.top_k))
    assert any(record["turn"]["earlier_kv_snapshots"] for record in records)
    files: Callable[[str], Path] = storm.checkpoints(directories).__getitem__
    reference = PlainComputer(files, "base")
    # Their cache holds a part of the sequences at a time.
    paged = PagedComputer(files, "base", EngineSettings(kv_cache_tokens=1024, threads=1))
    for computer in (paged, reference):
        report = verified(records, computer, reference)
        assert [finding.lines() for finding in report.findings] == []
        assert (report.turns, report.unverified) == (len(records), {})
        assert report.tokens == sum(len(record["turn"]["token_ids"]) for record in records)
        assert report.weights == ({"computed": report.tokens} if layers else {})
    assert paged.routes == ((layers, info.top_k) if layers else None)
    # What is verified is sensitive to each number.
    changed = records[len(records) // 2]["turn"]
    changed["logprobs"][-1] -= 1e-3
    [finding] = verified(records, paged, reference).findings
    assert (finding.cause, finding.tokens[0].token) == (Cause.LOGPROB, len(changed["token_ids"]) - 1)
