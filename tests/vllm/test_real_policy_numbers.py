"""Adapters together with filters on a real vLLM server: both numbers, masks and labels of policies and of the base.

Each is computed again by transformers and PEFT, over the KV that it is said to stand on. Adapters and full weights are switched
in turn, under streams of all kinds of sampling.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_claims import Stream
from msgspec.structs import replace
from test_real_policy_provenance import FLAGS, KNOWN, PolicyStorm
from test_real_provenance import POLICIES as CACHES
from test_vllm_sampling_numbers import (
    COLD,
    KINDS,
    TEMPERATURES,
    TOLERANCE,
    Recomputed,
    Served,
    continues,
    engine_of,
)
from test_vllm_sampling_numbers import snapshots as snapshots
from tiers import of_tier, variant
from vllm_bed import needs_provenance

from midstream.core.types import GenerateRequest
from midstream.engine.servers.labels import UNKNOWN
from midstream.engine.vllm.arguments import NUMBERS
from midstream.engine.vllm.engine import VllmEngine

TOKENS_MIN = of_tier(fast=4_000, test=4_000, all=10_000)
EVERY: list[dict[str, Any]] = [{"temperature": t, **kind} for kind in KINDS for t in TEMPERATURES] + list(
    COLD
)
#: What is switched, in turn, and how often at least.
TURNS = ("red", "blue", "")
ROUNDS = 2 * len(TURNS)
#: Streams whose labels are also exchanged for others, to see that the numbers tell them apart.
EXCHANGED = 20


class DrawnStorm(PolicyStorm):
    """Its streams have filters, penalties, grammars and masks."""

    def __init__(self, engine: VllmEngine, places: dict[str, Path], folder: Path) -> None:
        super().__init__(engine, places, folder)
        self._kinds = itertools.cycle(enumerate(EVERY))
        self._turns = itertools.cycle(TURNS)

    def is_of(self, label: str) -> tuple[str, Path]:
        """The adapter and the files of the weights under it, which several snapshots share."""
        name, _, base = label.partition("@")
        adapter = name if name in self.seeds else ""
        return adapter, self.serving[(base or "base") if adapter else name]

    def _request(self) -> GenerateRequest:
        request, (place, given) = super()._request(), next(self._kinds)
        kind = dict(given)
        grammar = kind.pop("grammar", None)
        return replace(
            request,
            sampling=replace(request.sampling, **kind),
            grammar=grammar,
            top_logprobs=(0, 0, 1, 5, 20)[place % 5],
            want_masks=place % 3 != 1,
            reproducible=place % 2 == 0,
        )

    def _resumed(self) -> list[GenerateRequest]:
        return [request for request in super()._resumed() if continues(request)]


def rows_of(stream: Stream, passes: Any, exchanged: Callable[[str], str] = str) -> Iterator[torch.Tensor]:
    """The logits behind each token of a stream. exchanged: takes a label for another one."""
    for kv, records in stream.claims():
        if records:
            count = max(position for position, _ in records) + 1
            named = [exchanged(name) for name in kv]
            again = {p: exchanged(r.snapshot) for p, r in records if r.snapshot != kv[p]}
            logits = passes.passes(stream.ids[:count], named, again).logits
            yield from (logits[position] for position, _ in records)


def borne_out(stream: Stream, rows: Iterator[torch.Tensor]) -> int:
    """How many of a stream's tokens have the number of these rows."""
    every = zip(stream.tokens, rows, strict=True)
    return sum(abs(float(row.log_softmax(-1)[r.token_id]) - r.logprob) <= TOLERANCE for r, row in every)


@pytest.mark.parametrize("family", ["qwen3", variant("llama")])
def test_both_numbers_masks_and_labels_of_policies_beside_full_weights_are_those_of_plain_passes(
    family: str,
    vllm_python: Path,
    snapshots: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    computed_again: Callable[..., None],
) -> None:
    places = snapshots(family)

    async def main() -> tuple[DrawnStorm, int]:
        async with engine_of(places["base"], tmp_path / "cache", *FLAGS) as served:
            card = served.engine._info().card
            needs_provenance(card.why)
            assert all(map(card.has, ("policies", "policy_crossing", "full_snapshots", *NUMBERS))), card.why
            storm = DrawnStorm(served.engine, places, tmp_path / "adapters")
            for policy in ("red", "blue"):
                await storm.stage(policy)
                await storm.publish(policy)
            rounds = 0
            while sum(len(s.tokens) for s in storm.streams) < TOKENS_MIN or rounds < ROUNDS:
                await storm.round(*CACHES[rounds % len(CACHES)])
                rounds += 1
            return storm, await Served(served.engine).preemptions()

    storm, preempted = asyncio.run(main())
    streams = storm.streams
    labels = sorted({name for s in streams for era in s.eras for name in era.kv})
    assert UNKNOWN not in labels
    recomputed = Recomputed(places)
    for label in labels:
        recomputed.passes.add_model(label, storm.module(label))
    worst, by_policy = 0.0, dict.fromkeys(KNOWN, 0)
    for stream in streams:
        logits = torch.stack([*rows_of(stream, recomputed.passes)]).double().numpy()
        emitted = stream.request.emitted_of(stream.index)
        worst = max(worst, recomputed.check_rows(stream.request, emitted, stream.tokens, logits))
        by_policy[stream.request.policy] += len(stream.tokens)
    count = sum(by_policy.values())
    # The number of a token tells its label from those of other weights.
    other = {label: next(o for o in labels if storm.is_of(o) != storm.is_of(label)) for label in labels}
    some = streams[:EXCHANGED]
    mistaken = sum(borne_out(s, rows_of(s, recomputed.passes, other.__getitem__)) for s in some)
    with capsys.disabled():
        print(
            f"\nfilters over policies of {family}: {count} tokens {by_policy}, at most {worst:.1e} off; {recomputed.marked} "
            f"near ties, {recomputed.masked} masks, {preempted} preemptions, {storm.crossed} choices crossed a swap of their "
            f"adapter, {len(labels)} labels; {mistaken} of {sum(len(s.tokens) for s in some)} fit another label"
        )
    found = {"tokens": count, "worst": worst, "wrong": 0, "labels": len(labels), "masks": recomputed.masked}
    computed_again(family, **found, preemptions=preempted)
    assert worst <= TOLERANCE
    assert count >= TOKENS_MIN
    assert min(by_policy.values()) > count // 10
    assert recomputed.marked > 0
    assert recomputed.masked > count // 10
    assert preempted > 0
    assert storm.crossed > 0
    assert mistaken < sum(len(s.tokens) for s in some) // 20
