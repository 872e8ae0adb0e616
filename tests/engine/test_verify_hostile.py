"""What `midstream verify` makes of records and buckets that were forged, and of bounds that are met exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from midstream.core.config import EngineSettings
from midstream.verify.claims import gather
from midstream.verify.jobs import Computer, Numbers, OnComputed, PassJob
from midstream.verify.paged import PagedComputer
from midstream.verify.verifier import Report, Verifier

PROMPT = [3, 4, 5]


class Fixed(Computer):
    """Says the same of every token. tied: as of a router, of each pass."""

    def __init__(self, logprob: float = -5.0, routes: np.ndarray | None = None, tied: bool = False) -> None:
        self.vocab, self.longest, self.dtype, self.about = 256, 64, "float32", {}
        self.routes = None if routes is None else (routes.shape[0], routes.shape[1])
        self._logprob, self._route, self._tied = logprob, routes, tied

    def compute(self, jobs: Sequence[PassJob], done: OnComputed | None = None) -> list[Numbers]:
        return [self._numbers(len(job.ids) - 1 - job.first) for job in jobs]

    def _numbers(self, rows: int) -> Numbers:
        said = np.full(rows, self._logprob)
        routes = None if self._route is None else np.repeat(self._route[None], rows, axis=0)
        return Numbers(said, said, routes, self._tied)


def record(turn: dict[str, Any], number: int = 1) -> dict[str, Any]:
    about = {"n": number, "replica": "r", "boot": "b", "kind": "turn", "segment": "s", "line": number}
    return {**about, "deployment": "d", "tenant": "", "session": f"s-{number}", "tree": number, "turn": turn}


def turn(logprobs: list[float], added: Sequence[int] = PROMPT, **more: Any) -> dict[str, Any]:
    size = len(logprobs)
    kept = {
        "turn": 1,
        "parent": 0,
        "model": "m",
        "added": list(added),
        "token_ids": [7] * size,
        "loss_mask": [],
        "finish_reason": "length",
        "created": 1.0,
        "logprobs": logprobs,
        "sampling_logprobs": None,
        "routing_matrix": None,
        "routing_matrix_dtype": None,
        "routing_matrix_shape": None,
        "snapshots": [{"snapshot": "base", "start": 0, "end": size}],
        "kv_snapshots": [{"snapshot": "base", "start": 0, "end": len(added) + size - 1}],
    }
    return kept | more


def verified(turn: dict[str, Any], computer: Computer, **more: Any) -> Report:
    found = gather([record(turn)], [])
    assert found.findings == []
    return Verifier(computer, lambda _: None, lambda _: False, **more).verify(found.trees)


def test_a_turn_that_fills_the_cache_to_its_last_position_is_verified(
    tiny_model: Callable[..., Path],
) -> None:
    model = tiny_model()
    for size in (40, 32):
        computer = PagedComputer(
            lambda _: model, "base", EngineSettings(kv_cache_tokens=size, threads=1, dtype="float32")
        )
        # The last token has no KV.
        full, longer = (
            turn([0.0], added=range(2, 2 + positions))
            for positions in (computer.longest, computer.longest + 1)
        )
        [numbers] = computer.compute([PassJob([*full["added"], 7], ["base"] * computer.longest, 0)])
        full["logprobs"] = [float(numbers.logprobs[-1])]
        assert (report := verified(full, computer)).clean
        assert (report.tokens, report.unverified) == (1, {})
        report = verified(longer, computer)
        assert (report.clean, report.tokens) == (True, 0)
        assert sum(report.unverified.values()) == 1
