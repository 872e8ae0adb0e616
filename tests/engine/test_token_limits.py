"""allowed_token_ids, bad words and min_tokens in the embedded engine, and the order of requests that wait."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import needs_compiler, request, run

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.limits import TokenLimiter
from midstream.engine.step import SampleRow

PROMPT = list(b"the sum of all parts")


@pytest.fixture(scope="module", params=["native", "torch"])
def core(tiny_model: Callable[..., Path], request: pytest.FixtureRequest) -> EngineCore:
    needs_compiler(request.param)
    return EngineCore(tiny_model(), EngineSettings(kernels=request.param))


def tokens(core: EngineCore, **more: Any) -> list[int]:
    (got,) = run(core, [request("r", PROMPT, max_tokens=24, echo=0, **more)]).values()
    assert got.error is None
    return [record.token_id for record in got.tokens]


def allowed(limits: TokenLimiter) -> set[int]:
    mask = limits.mask()
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def limits(vocab: int = 40, **sampling: Any) -> TokenLimiter:
    return TokenLimiter(SamplingParams(max_tokens=8, **sampling), vocab, None)


def test_a_mask_covers_the_whole_vocabulary_and_no_more() -> None:
    assert allowed(limits(min_tokens=1)) == set(range(40))
    assert allowed(limits(allowed_token_ids=(3, 39))) == {3, 39}


def test_bad_tokens_are_forbidden_where_their_beginning_was_generated_last() -> None:
    given = limits(allowed_token_ids=(1, 2, 3), bad_tokens=((1,), (2, 3), (2, 2, 2)))
    assert allowed(given) == {2, 3}
    given.accept(2)
    assert allowed(given) == {2}
    given.accept(2)
    assert given.mask() is None
    assert given.error == "allowed_token_ids, bad_words, min_tokens and the grammar together leave none"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_generated(core: EngineCore, temperature: float) -> None:
    assert set(tokens(core, allowed_token_ids=(65, 66, 67), temperature=temperature)) <= {65, 66, 67}


def test_a_bad_word_never_comes_and_nothing_else_changes_before_it(core: EngineCore) -> None:
    free = tokens(core, seed=4)
    bad = (free[6], free[7])
    held = tokens(core, seed=4, bad_tokens=(bad,))
    assert held[:7] == free[:7]
    assert held[7] != free[7]
    assert bad not in list(pairwise(held))


def test_no_end_token_comes_before_min_tokens(core: EngineCore) -> None:
    free = tokens(core, temperature=0.0)
    stop = free[2]
    assert len(tokens(core, temperature=0.0, stop_token_ids=(stop,))) <= 3
    held = tokens(core, temperature=0.0, stop_token_ids=(stop,), min_tokens=5)
    assert len(held) >= 6
    assert stop not in held[:5]


def test_log_probabilities_stay_the_raw_models_under_limits(core: EngineCore) -> None:
    scored = core._sampler  # the functions that draw
    logits = torch.randn(2, 264, generator=torch.Generator().manual_seed(1))
    plain = SamplingParams(max_tokens=1, seed=1)
    own = TokenLimiter(SamplingParams(max_tokens=1, seed=1, allowed_token_ids=(5, 6)), 264, None).mask()
    rows = [SampleRow(plain, 0, 3, [], 0, 0), SampleRow(plain, 0, 3, [], 0, 0, own)]
    sampled = scored.sample(logits, rows)
    raw = logits.log_softmax(-1)
    both = raw[1, [5, 6]].log_softmax(-1)
    assert sampled.tokens[1] in (5, 6)
    assert sampled.logprobs[1] == pytest.approx(raw[1, sampled.tokens[1]].item(), abs=1e-5)
    assert sampled.sampling_logprobs[1] == pytest.approx(both[sampled.tokens[1] - 5].item(), abs=1e-5)
    # The row beside it is drawn as if it were alone.
    assert sampled.tokens[0] == scored.sample(logits[:1], rows[:1]).tokens[0]


def test_a_request_that_may_generate_nothing_is_at_a_dead_end(core: EngineCore) -> None:
    (got,) = run(core, [request("r", PROMPT, echo=0, allowed_token_ids=(65,), bad_tokens=((65,),))]).values()
    assert (got.finish, got.error, got.tokens) == ("dead_end", None, [])
    assert got.cached is not None


def test_a_resumed_choice_counts_what_was_emitted(core: EngineCore) -> None:
    sampling = {"bad_tokens": ((65, 66),), "allowed_token_ids": (65, 66), "min_tokens": 3}
    whole = tokens(core, **sampling)
    given = request("r", PROMPT, max_tokens=24, echo=0, **sampling)
    resumed = GenerateRequest(
        **{
            name: getattr(given, name)
            for name in ("request_id", "prompt", "sampling", "want_routes", "prompt_records")
        },
        emitted=(tuple(whole[:9]),),
    )
    (got,) = run(core, [resumed]).values()
    assert [record.token_id for record in got.tokens] == whole[9:]
