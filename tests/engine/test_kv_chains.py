"""Cached blocks are joined only to the blocks they were computed on, and what is told of KV is what was read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_helpers import request, run
from msgspec.structs import replace

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest
from midstream.engine.embedded.core import EngineCore

# Six whole blocks and a piece.
PROMPT = random.Random(5).choices(range(256), k=100)
Spans = list[tuple[str, int, int]]


@pytest.fixture
def core(tiny_model: Callable[..., Path]) -> EngineCore:
    return EngineCore(tiny_model(), EngineSettings())


def commit(core: EngineCore, model: Path, snapshot: str) -> None:
    core.set_staged(core.stage(model))
    core.commit(snapshot)


def asked(
    name: str, prompt: list[int], *, age_max: int | None = None, max_tokens: int = 1, echo: int = 0
) -> GenerateRequest:
    plain = request(name, prompt, max_tokens=max_tokens, echo=echo)
    return replace(plain, kv_age_max=age_max, want_kv_snapshots=True)


def test_a_block_is_found_only_behind_the_blocks_it_was_computed_on(
    core: EngineCore, tiny_model: Callable[..., Path]
) -> None:
    """Behind s1's blocks 0 to 32 there is nothing: what base computed for 32 to 96 stands on base's own."""
    run(core, [asked("base", PROMPT)])
    commit(core, tiny_model(seed=1), "s1")
    assert run(core, [asked("short", PROMPT[:40], age_max=0)])["short", 0].cached == 0
    commit(core, tiny_model(seed=2), "s2")
    got = run(core, [asked("mixed", PROMPT, max_tokens=20)])["mixed", 0]
    assert (got.cached, got.kv) == (96, [("base", 0, 96), ("s2", 96, 119)])
    young = run(core, [asked("young", PROMPT, age_max=1, max_tokens=20)])["young", 0]
    assert (young.cached, young.kv) == (32, [("s1", 0, 32), ("s2", 32, 119)])


def test_where_all_of_a_prompt_was_cached_the_first_own_position_is_told_too(
    core: EngineCore, tiny_model: Callable[..., Path]
) -> None:
    """The pass that gives the first token computes no KV; the next one does, under other weights than the prompt's."""
    run(core, [asked("cold", PROMPT[:96])])
    commit(core, tiny_model(seed=1), "s1")
    core.add(asked("warm", PROMPT[:96], max_tokens=4))
    told = [event.kv_snapshots for _ in range(4) for _, event in core.step()]
    base = ("base", 0, 96)
    assert told == [(base,), (base, ("s1", 96, 97)), None, (base, ("s1", 96, 99))]


def test_a_score_from_before_a_preemption_is_not_kept_beside_kv_that_was_computed_again(
    core: EngineCore, tiny_model: Callable[..., Path]
) -> None:
    core.add(asked("stream", PROMPT[:40], max_tokens=30))
    for _ in range(5):
        core.step()
    commit(core, tiny_model(seed=1), "s1")
    for _ in range(3):
        core.step()
    (stream,) = core.scheduler.running
    newest = len(stream.tokens) - 1
    core.scheduler._preempt(stream)
    # Nothing of it is found again.
    for block in [core.pool.allocate() for _ in range(core.pool.available)]:
        core.pool.release(block)
    while not core.idle:
        core.step()
    ids = stream.tokens
    echo = asked("echo", ids, echo=len(ids) - newest)
    got = run(core, [echo])["echo", 0]
    cold = run(EngineCore(tiny_model(seed=1), EngineSettings()), [echo])["echo", 0]
    assert got.kv == [("s1", 0, len(ids))]
    assert [r.logprob for r in got.prompt] == pytest.approx([r.logprob for r in cold.prompt], abs=1e-4)
