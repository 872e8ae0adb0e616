"""The routes of a real vLLM server with experts: each number is that of a plain forward pass which is made to take them.

So are the weights of routers.

There are filters, grammars and masks, two choices of a prompt, preemptions, resumes, scored prompts, and a swap under streams.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from recompute import OWN_ROUTE, Passes, Recomputer
from test_vllm_sampling_numbers import (
    BLOCKS,
    COLD,
    KINDS,
    LONG,
    TEMPERATURES,
    TOLERANCE,
    Drawn,
    Served,
    engine_of,
    requests,
    resumed,
)
from tiers import of_tier
from vllm_streams import random_prompt

from midstream.core.types import GenerateRequest, SamplingParams, TokenRecord

TOKENS_MIN = of_tier(fast=2_000, test=2_000, all=10_000)
EXPERTS, TOP_K = 8, 2
# As `midstream verify` has it: four times that of log-probabilities.
WEIGHTS_TOLERANCE = 4 * TOLERANCE
#: Prompts whose records are asked for.
SCORED = 6


def with_routes(request: GenerateRequest) -> GenerateRequest:
    return replace(request, want_routes=True, want_router_weights=request.sampling.seed % 2 == 0)


async def scored(served: Served, number: int) -> tuple[tuple[int, ...], tuple[TokenRecord, ...]]:
    prompt = tuple(random_prompt(f"scored {number}", 50 + 30 * number))
    asked = GenerateRequest(
        request_id=f"scored {number}",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=0),
        prompt_records=len(prompt),
        want_routes=True,
        want_router_weights=True,
    )
    records: list[TokenRecord] = []
    async for event in served.engine.generate(asked):
        assert event.error is None, event.error
        records += event.prompt or ()
    return prompt, tuple(records)


class Routed:
    """Numbers over the routes that were reported."""

    def __init__(self, snapshots: dict[str, Path]) -> None:
        self._passes = Recomputer(snapshots)
        self.checked, self.worst = 0, 0.0
        # Passes whose weights of routers were compared, and the largest difference.
        self.weighed, self.weight_off = 0, 0.0
        # Routes that were compared with what the plain pass would have chosen, and those that were others.
        self.own, self.others = 0, 0

    def check(self, prompt: tuple[int, ...], records: list[TokenRecord]) -> None:
        """records: of the newest tokens behind the prompt."""
        tokens = [record.token_id for record in records]
        labels = [record.snapshot for record in records]
        ids, kv = [*prompt, *tokens[:-1]], [labels[0]] * len(prompt) + labels[1:]
        routes = np.stack([self._route(record) for record in records])
        first = len(ids) - len(records)
        forced = torch.full((len(ids), *routes.shape[1:]), OWN_ROUTE)
        forced[first:] = torch.from_numpy(routes)

        def off(passes: Passes) -> float:
            rows = passes.logprobs[first:].gather(1, torch.tensor(tokens)[:, None])[:, 0]
            return float((rows - torch.tensor([record.logprob for record in records])).abs().max())

        made = self._passes.first_that(lambda passes: off(passes) <= TOLERANCE, ids, kv, forced=forced)
        assert made is not None, (prompt, labels, off(self._passes.passes(ids, kv, forced=forced)))
        self.worst = max(self.worst, off(made))
        self.checked += len(records)
        self._compare(self._passes.passes(ids, kv), routes, first)
        for place, record in enumerate(records):
            if record.router_weights is not None:
                given = np.frombuffer(record.router_weights, "<f4").reshape(routes.shape[1:])
                self.weight_off = max(
                    self.weight_off, float(np.abs(given - made.weights[first + place]).max())
                )
                self.weighed += 1

    def _compare(self, own: Passes, routes: np.ndarray, first: int) -> None:
        """Up to the first choice that a rounding may have made another one."""
        end = min((tie.position for tie in own.ties), default=len(own.routes))
        alike = (np.sort(own.routes[first:end]) == np.sort(routes[: max(0, end - first)])).all(axis=-1)
        self.own += int(alike.size)
        self.others += int((~alike).sum())

    @staticmethod
    def _route(record: TokenRecord) -> np.ndarray:
        assert record.route is not None
        return np.frombuffer(record.route, np.uint8).reshape(-1, TOP_K).astype(np.int64)


def test_numbers_are_those_of_passes_that_take_the_routes_which_came_with_the_tokens(
    vllm_python: Path,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    computed_again: Callable[..., None],
) -> None:
    places = {
        name: tiny_model(seed=seed, experts=EXPERTS, top_k=TOP_K)
        for seed, name in enumerate(("base", "next"))
    }

    async def main() -> tuple[list[Drawn], list[tuple[tuple[int, ...], tuple[TokenRecord, ...]]], int]:
        async with engine_of(places["base"], tmp_path / "cache", BLOCKS) as served:
            card = served.engine._info().card
            assert card.has("routes"), card.why
            assert card.has("router_weights"), card.why
            coming = map(with_routes, requests("routes"))
            every = len(KINDS) * len(TEMPERATURES) + len(COLD)
            while sum(len(one.records) for one in served.drawn) < TOKENS_MIN:
                await served.ask_all(list(itertools.islice(coming, every)))
            preempted = await served.preemptions()
            await served.ask_all(resumed(served.drawn)[:10])
            prompts = await asyncio.gather(*(scored(served, number) for number in range(SCORED)))
            long = [r for r in itertools.islice(coming, every) if r.grammar is None][:: every // 8]
            sampling = {"max_tokens": LONG, "stop_token_ids": (), "min_tokens": 0}
            asked = [replace(r, n=1, sampling=replace(r.sampling, **sampling)) for r in long]
            before = await served.preemptions()
            await served.swap_under(asked, "next", places["next"])
            assert await served.preemptions() == before
            return served.drawn, prompts, preempted

    drawn, prompts, preempted = asyncio.run(main())
    assert preempted > 0
    routed = Routed(places)
    for one in drawn:
        routed.check((*one.request.prompt, *one.emitted), one.records)
    for prompt, records in prompts:
        assert records[0].route is None
        routed.check(prompt[:1], [*records[1:]])
    with capsys.disabled():
        print(
            f"\n{routed.checked} tokens over the routes that came with them, at most {routed.worst:.1e} off; {routed.own} "
            f"choices as the plain pass makes them but for {routed.others}; weights of {routed.weighed} passes, at most "
            f"{routed.weight_off:.1e} off; {preempted} preemptions"
        )
    computed_again(
        "qwen3_moe",
        tokens=routed.checked,
        worst=routed.worst,
        wrong=routed.others,
        choices_of_experts=routed.own,
        passes_with_router_weights=routed.weighed,
        preemptions=preempted,
    )
    assert routed.checked >= TOKENS_MIN
    assert routed.own > TOKENS_MIN
    assert routed.others == 0
    assert routed.weighed > TOKENS_MIN // 4
    assert routed.weight_off <= WEIGHTS_TOLERANCE
