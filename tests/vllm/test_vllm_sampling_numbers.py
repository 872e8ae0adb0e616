"""The raw and the sampling log-probability of real vLLM servers are those of plain forward passes, whatever is asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from recompute import Recomputer
from resampling import drawn_from, is_firm, log_softmax, scores_of
from tiers import of_tier, variant
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm_bed import PYTHON, skip_without_ranks
from vllm_streams import random_prompt

from midstream.core.masks import kept_ids
from midstream.core.server_settings import VllmSettings
from midstream.core.types import GenerateRequest, SamplingParams, TokenRecord
from midstream.engine.embedded.constraint import Constraints
from midstream.engine.step import near_tie
from midstream.engine.vllm.arguments import NUMBERS
from midstream.engine.vllm.engine import VllmEngine
from midstream.http.call import call
from midstream.models.tiny_moe import VOCAB_SIZE, build_tokenizer

# Nats, in float32.
TOLERANCE = 1e-4
TOKENS_MIN = of_tier(fast=2_000, test=2_000, all=10_000)
END = 258
BESIDE = 32
TOKENS, LONG = 48, 160
#: Blocks of 128 tokens. BESIDE streams that begin in one block and end in two need more, so vLLM preempts some.
BLOCKS = "--num-gpu-blocks-override=40"
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "colour": {"enum": ["red", "green"]}},
    "required": ["n", "colour"],
    "additionalProperties": False,
}
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}"
WORDS = ("q", "zx")
#: Fields of SamplingParams, or of GenerateRequest.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 12},
    {"min_p": 0.2},
    {"top_p": 0.8, "top_k": 30, "min_p": 0.05},
    {"presence_penalty": 1.2, "frequency_penalty": -0.4},
    {"repetition_penalty": 1.4, "top_p": 0.95},
    {"logit_bias": {40: 3.0, 41: -4.0, 200: 2.5}, "top_k": 40},
    {"allowed_token_ids": tuple(range(60, 110)), "top_p": 0.9},
    {"bad_words": WORDS, "stop_token_ids": (END, 40, 50), "min_tokens": 12},
    {"grammar": GRAMMAR, "stop_token_ids": (END,), "top_p": 0.95},
    {"grammar": GRAMMAR, "stop_token_ids": (END,), "repetition_penalty": 1.2, "logit_bias": {END: 5.0}},
)
COLD: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "presence_penalty": 0.8},
    {"temperature": 0.0, "grammar": GRAMMAR, "stop_token_ids": (END,)},
)

DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    # Under min_tokens vLLM forbids it, too.
    "eos_token_id": END,
}
CLASSES: dict[str, Any] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


@dataclass
class Drawn:
    """One choice. emitted: tokens that it was resumed behind."""

    request: GenerateRequest
    index: int
    emitted: tuple[int, ...]
    records: list[TokenRecord] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [record.token_id for record in self.records]


@pytest.fixture(scope="session")
def snapshots(weights: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a family, what is served at first and what is loaded into it."""

    def of(family: str) -> dict[str, Path]:
        if family == "qwen3_moe":
            return {"base": weights(0), "next": weights(1)}
        made = {}
        for seed, name in enumerate(("base", "next")):
            config, model = CLASSES[family]
            made[name] = tmp_path_factory.mktemp(family)
            torch.manual_seed(seed)
            model(config(**DENSE)).save_pretrained(made[name])
            build_tokenizer().save_pretrained(made[name])
        return made

    return of


def requests(name: str) -> Iterator[GenerateRequest]:
    """Of all kinds, some with two choices and some with alternatives."""
    every = [{"temperature": t, **kind} for kind in KINDS for t in TEMPERATURES] + list(COLD)
    for number in itertools.count():
        for place, given in enumerate(every):
            kind = dict(given)
            grammar = kind.pop("grammar", None)
            sampling = SamplingParams(**{"max_tokens": TOKENS, "seed": number, **kind})
            yield GenerateRequest(
                request_id=f"{name} {number} {place}",
                prompt=tuple(random_prompt(f"{name} {number} {place}", 60 + place)),
                sampling=sampling,
                n=2 if place % 5 == 0 else 1,
                top_logprobs=(0, 0, 1, 5, 20)[(place + number) % 5],
                grammar=grammar,
                reproducible=number % 2 == 0,
                want_masks=place % 3 != 1,
                # vLLM preempts by it.
                priority=place % 3,
            )


class Served:
    """An engine and everything that it has drawn."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.drawn: list[Drawn] = []
        self._beside = asyncio.Semaphore(BESIDE)

    async def ask(self, request: GenerateRequest, moved: Callable[[], None] = lambda: None) -> None:
        choices = {i: Drawn(request, i, request.emitted_of(i)) for i in request.choices}
        self.drawn += choices.values()
        async with self._beside:
            async for event in self.engine.generate(request):
                assert event.error is None, (request, event.error)
                choices[event.index].records += event.tokens
                moved()

    async def ask_all(self, asked: Sequence[GenerateRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            for request in asked:
                group.create_task(self.ask(request))

    async def swap_under(self, asked: Sequence[GenerateRequest], snapshot: str, directory: Path) -> None:
        """Load a snapshot when each of the requests has tokens."""
        first = len(self.drawn)
        begun = asyncio.Event()

        def moved() -> None:
            if all(len(one.records) > 10 for one in self.drawn[first:]):
                begun.set()

        async with asyncio.TaskGroup() as group:
            for request in asked:
                group.create_task(self.ask(request, moved))
            await begun.wait()
            await self.engine.stage(snapshot, directory)
            await self.engine.commit(snapshot)
            self.engine.settle(snapshot, sound=True)
        crossed = [one for one in self.drawn[first:] if len({r.snapshot for r in one.records}) == 2]
        assert len(crossed) > len(asked) // 2

    async def preemptions(self) -> int:
        answer = await call(self.engine._server.url, "GET", "/metrics", None, 30.0, "")
        found = re.findall(rb"^vllm:num_preemptions_total.* ([0-9.]+)$", answer.body, re.MULTILINE)
        return int(sum(map(float, found)))


@asynccontextmanager
async def engine_of(directory: Path, folder: Path, *args: str) -> AsyncIterator[Served]:
    flags = ["--enforce-eager", "--max-model-len", "2048", "--dtype", "float32", *args]
    settings = VllmSettings(python=str(PYTHON), args=flags, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    engine = VllmEngine(directory, settings, folder)
    try:
        card = (await engine.start()).card
        skip_without_ranks(card.why)
        assert all(map(card.has, NUMBERS)), card.why
        yield Served(engine)
    finally:
        await engine.close()


class Recomputed:
    def __init__(self, snapshots: dict[str, Path]) -> None:
        self.passes = Recomputer(snapshots)
        # Tokens with a near tie.
        self.marked = 0
        # Tokens that some were left for, and not all.
        self.masked = 0
        self._constraints = Constraints.load(snapshots["base"], VOCAB_SIZE, (END,))
        encode = build_tokenizer().encode
        self._bad = [encode(word, add_special_tokens=False) for word in WORDS]

    def check(self, one: Drawn) -> float:
        """The largest difference of a number. Raises AssertionError for alternatives of others."""
        prompt = [*one.request.prompt, *one.emitted]
        labels = [record.snapshot for record in one.records]
        kv = [labels[0]] * len(prompt) + labels[1:]
        logits = (
            self.passes.passes([*prompt, *one.tokens[:-1]], kv).logits.double().numpy()[len(prompt) - 1 :]
        )
        return self.check_rows(one.request, one.emitted, one.records, logits)

    def check_rows(
        self,
        request: GenerateRequest,
        resumed_behind: Sequence[int],
        records: Sequence[TokenRecord],
        logits: Any,
    ) -> float:
        """As `check`. logits: [tokens, vocab], what each token was drawn from."""
        matcher = None
        if request.grammar is not None:
            assert self._constraints is not None
            matcher = self._constraints.matcher(request.grammar, request.sampling.stop_token_ids)
        worst, emitted = 0.0, [*resumed_behind]
        for at, (row, record) in enumerate(zip(logits, records, strict=True)):
            raw = log_softmax(row)
            worst = max(worst, abs(raw[record.token_id] - record.logprob))
            assert len(record.top_logprobs) == request.top_logprobs
            if request.top_logprobs:
                best = np.sort(raw)[::-1][: request.top_logprobs]
                assert np.allclose([t.logprob for t in record.top_logprobs], best, atol=TOLERANCE)
                assert np.allclose([raw[t.token_id] for t in record.top_logprobs], best, atol=TOLERANCE)
            assert not record.constrained
            allowed = None
            if matcher is not None:
                allowed = allowed_by(matcher)
                matcher.accept(record.token_id)
            bad = self._bad if request.sampling.bad_words else ()
            ways = drawn_from(row, request.sampling, request.prompt, emitted, allowed, bad)
            assert record.sampling_logprob is not None
            off = min(abs(way[record.token_id] - record.sampling_logprob) for way in ways)
            assert off <= TOLERANCE, (request, at, record, [way[record.token_id] for way in ways])
            worst = max(worst, off)
            scores = scores_of(row, request.sampling, request.prompt, emitted, allowed, bad)
            rounding = near_tie("float32") * float(np.abs(row).max())
            # This pass is rounded otherwise, too. So marks are not compared where a margin is about the threshold.
            firm = is_firm(
                scores, request.sampling, record.token_id, rounding * (2 if record.near_tie else 0.5)
            )
            assert firm == (record.near_tie == 0), (request, at, record)
            self.marked += record.near_tie != 0
            if request.want_masks:
                self.masked += check_mask(record, ways, scores, rounding)
            emitted.append(record.token_id)
        return worst


def check_mask(record: TokenRecord, ways: Sequence[Any], scores: Any, rounding: float) -> bool:
    """Whether it names some tokens. Its border may lie otherwise where another pass rounds otherwise."""
    assert record.mask is not None
    kept = kept_ids(record.mask, record.token_id)
    left = np.full(len(scores), kept is None)
    left[list(kept or ())] = True
    border = scores[left].min()
    odd = [scores[left != (way > -np.inf)] for way in ways]
    assert any((np.abs(those - border) <= 2 * rounding).all() for those in odd), (record, odd, border)
    return kept is not None and len(kept) > 1


def allowed_by(matcher: Any) -> list[int]:
    mask = matcher.mask()
    assert mask is not None, matcher.error
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[:VOCAB_SIZE]
    return [int(token) for token in np.flatnonzero(bits)]


def continues(request: GenerateRequest) -> bool:
    """Whether a stream of it may continue elsewhere: vLLM counts no tokens that it did not draw."""
    s = request.sampling
    return not (s.presence_penalty or s.frequency_penalty or s.bad_words or request.grammar is not None)


def resumed(drawn: Sequence[Drawn]) -> list[GenerateRequest]:
    """Streams that another replica lost, at half of their way."""
    found = []
    for one in drawn:
        request, half = one.request, tuple(one.tokens[: TOKENS // 2])
        if request.n == 1 and continues(request) and len(one.tokens) == TOKENS:
            found.append(replace(request, request_id=f"{request.request_id} again", emitted=(half,)))
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", variant("qwen3"), variant("llama")])
def test_both_numbers_are_those_of_plain_forward_passes_over_swaps_resumes_and_preemptions(
    family: str,
    vllm_python: Path,
    snapshots: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    computed_again: Callable[..., None],
) -> None:
    places = snapshots(family)

    async def main() -> tuple[list[Drawn], int]:
        async with engine_of(places["base"], tmp_path / "cache", BLOCKS) as served:
            coming = requests(family)
            every = len(KINDS) * len(TEMPERATURES) + len(COLD)
            while sum(len(one.records) for one in served.drawn) < TOKENS_MIN:
                await served.ask_all(list(itertools.islice(coming, every)))
            preempted = await served.preemptions()
            await served.ask_all(resumed(served.drawn)[:20])
            # So few that none is preempted: what vLLM computes again is of the new weights.
            long = [r for r in itertools.islice(coming, every) if r.grammar is None][:: every // 12]
            asked = [
                replace(
                    r, n=1, sampling=replace(r.sampling, max_tokens=LONG, stop_token_ids=(), min_tokens=0)
                )
                for r in long
            ]
            before = await served.preemptions()
            await served.swap_under(asked, "next", places["next"])
            assert await served.preemptions() == before
            return served.drawn, preempted

    drawn, preempted = asyncio.run(main())
    assert preempted > 0
    recomputed = Recomputed(places)
    worst = max(recomputed.check(one) for one in drawn)
    count = sum(len(one.records) for one in drawn)
    with capsys.disabled():
        print(
            f"\n{family}: {count} tokens of {len(drawn)} choices, {recomputed.marked} near ties, {recomputed.masked} masks, "
            f"{preempted} preemptions, at most {worst:.1e} off"
        )
    computed_again(family, tokens=count, worst=worst, wrong=0, masks=recomputed.masked, preemptions=preempted)
    assert count >= TOKENS_MIN
    assert recomputed.marked > 0
    assert recomputed.masked > 0
    assert worst <= TOLERANCE
