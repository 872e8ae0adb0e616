"""What a response says of the KV that its tokens were conditioned on, also when that was computed again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import MODEL, FakeEngine, running

PROMPT = list(b"ten tokens")
Kv = tuple[tuple[str, int, int], ...]


def choice(
    tmp_path: Path,
    kv: dict[int, Kv],
    *,
    stream: bool,
    max_tokens: int = 8,
    renamed: dict[int, tuple[tuple[str, str], ...]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The last word on a choice whose engine tells `kv` with its tokens, and then `renamed`."""

    async def main() -> dict[str, Any]:
        engine = FakeEngine("hello ")
        engine.kv_with, engine.renamed_with = kv, renamed or {}
        async with running(tmp_path, engine) as here:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "stream": stream, **more}
            answer = await here.http.post("/v1/completions", json={**body, "perf_metrics_in_response": True})
        assert answer.status_code == 200, answer.text
        if not stream:
            return dict(answer.json()["choices"][0])
        data = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
        return next(c for d in data for c in json.loads(d)["choices"] if c["finish_reason"])

    return asyncio.run(main())


def spans(*given: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"snapshot": snapshot, "start": start, "end": end} for snapshot, start, end in given]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_before_kv_was_computed_again_are_told_what_they_stood_on(
    tmp_path: Path, stream: bool
) -> None:
    """Preempted behind three tokens and behind five, under other weights each time."""
    told: dict[int, Kv] = {
        0: (("s1", 0, 10),),
        2: (("s1", 0, 11), ("s2", 11, 12)),
        3: (("s1", 0, 8), ("s2", 8, 13)),
        5: (("s3", 0, 15),),
        7: (("s3", 0, 17),),
    }
    got = choice(tmp_path, told, stream=stream)
    assert got["kv_snapshots"] == spans(("s3", 0, 17))
    assert got["earlier_kv_snapshots"] == [
        {"tokens": 3, "kv_snapshots": spans(("s1", 0, 11), ("s2", 11, 12))},
        {"tokens": 5, "kv_snapshots": spans(("s1", 0, 8), ("s2", 8, 14))},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_kv_that_only_grew_has_no_earlier_one(tmp_path: Path, stream: bool) -> None:
    told: dict[int, Kv] = {
        0: (("s1", 0, 10),),
        4: (("s1", 0, 13), ("s2", 13, 14)),
        6: (("s1", 0, 13), ("s2", 13, 16)),
    }
    got = choice(tmp_path, told, stream=stream)
    assert got["kv_snapshots"] == spans(("s1", 0, 13), ("s2", 13, 17))
    assert "earlier_kv_snapshots" not in got


def test_kv_of_a_snapshot_that_was_overwritten_is_told_by_another_label(tmp_path: Path) -> None:
    """Behind four tokens other files came to serve under the name, and behind six all KV was computed again under them."""
    told: dict[int, Kv] = {
        0: (("s1", 0, 10),),
        4: (("s1@3", 0, 13), ("s1", 13, 14)),
        6: (("s1", 0, 16),),
    }
    got = choice(tmp_path, told, stream=False, renamed={4: (("s1", "s1@3"),)})
    assert got["kv_snapshots"] == spans(("s1", 0, 17))
    assert got["earlier_kv_snapshots"] == [
        {"tokens": 6, "kv_snapshots": spans(("s1@3", 0, 13), ("s1", 13, 15))}
    ]


def test_kv_that_was_computed_again_in_the_step_of_an_overwrite_is_told_as_such(tmp_path: Path) -> None:
    told: dict[int, Kv] = {0: (("s1", 0, 10),), 4: (("s1", 0, 14),)}
    got = choice(tmp_path, told, stream=False, renamed={4: (("s1", "s1@3"),)})
    assert got["kv_snapshots"] == spans(("s1", 0, 17))
    assert got["earlier_kv_snapshots"] == [{"tokens": 4, "kv_snapshots": spans(("s1@3", 0, 13))}]


def test_kv_told_behind_a_stop_string_is_that_of_the_tokens_before(tmp_path: Path) -> None:
    told: dict[int, Kv] = {0: (("s1", 0, 10),), 1: (("s1", 0, 10), ("s2", 10, 11))}
    got = choice(tmp_path, told, stream=False, stop=["lo"])
    assert (got["text"], got["finish_reason"]) == ("hel", "stop")
    # "he" is one token.
    assert got["kv_snapshots"] == spans(("s1", 0, 10), ("s2", 10, 13))
