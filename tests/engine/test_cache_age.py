"""`kv_age_max`: which cached blocks a request may use, counted in commits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from engine_helpers import request, run

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest
from midstream.engine.embedded.blocks import HISTORIES_MAX
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.scheduler import URGENT_TOKENS

# Four whole blocks.
PROMPT = random.Random(3).choices(range(256), k=64)


def asked(
    name: str, age_max: int | None, *, prompt: list[int] = PROMPT, max_tokens: int = 1
) -> GenerateRequest:
    plain = request(name, prompt, max_tokens=max_tokens, echo=0)
    return msgspec.structs.replace(plain, kv_age_max=age_max)


def commit(core: EngineCore, model: Path, snapshot: str) -> None:
    core.set_staged(core.stage(model))
    core.commit(snapshot)


def cached(core: EngineCore, name: str, age_max: int | None, **more: object) -> int | None:
    return run(core, [asked(name, age_max, **more)])[name, 0].cached  # type: ignore[arg-type]


@pytest.fixture
def core(tiny_model: Callable[..., Path]) -> EngineCore:
    return EngineCore(tiny_model(), EngineSettings(kernels="torch"))


@pytest.mark.parametrize(
    ("commits", "age_max", "expected"),
    [(0, 0, 64), (0, None, 64), (1, 0, 0), (1, 1, 64), (2, 1, 0), (2, 2, 64), (3, None, 64)],
)
def test_a_block_is_reused_up_to_its_age(
    core: EngineCore, tiny_model: Callable[..., Path], commits: int, age_max: int | None, expected: int
) -> None:
    assert cached(core, "cold", None) == 0
    for number in range(commits):
        commit(core, tiny_model(seed=1), f"step-{number}")
    assert cached(core, "warm", age_max) == expected


def test_a_recomputed_block_is_found_by_the_next_request_in_place_of_the_old_one(
    core: EngineCore, tiny_model: Callable[..., Path]
) -> None:
    cached(core, "cold", None)
    commit(core, tiny_model(seed=1), "step-1")
    assert cached(core, "again", 0) == 0
    assert cached(core, "found", 0) == 64
    found = msgspec.structs.replace(asked("any age", None), want_kv_snapshots=True)
    assert run(core, [found])["any age", 0].kv == [("step-1", 0, 64)]
    commit(core, tiny_model(seed=2), "step-2")
    assert cached(core, "one commit old", 1) == 64


def test_what_was_computed_again_and_again_is_kept_a_few_times_only(
    core: EngineCore, tiny_model: Callable[..., Path]
) -> None:
    for number in range(HISTORIES_MAX + 3):
        assert cached(core, f"cold-{number}", 0) == 0
        commit(core, tiny_model(seed=1 + number % 2), f"step-{number}")
    assert len(core.pool._loose) == HISTORIES_MAX * 4


def test_what_stands_on_old_kv_is_as_old_as_that(core: EngineCore, tiny_model: Callable[..., Path]) -> None:
    """The end of a stream that crossed a swap was computed after it, but over KV from before."""
    crossing = request("crossing", PROMPT, max_tokens=64, echo=0)

    def swap(step: int) -> None:
        if step == 1:
            commit(core, tiny_model(seed=1), "step-1")

    rollout = run(core, [crossing], swap)["crossing", 0]
    assert {record.snapshot for record in rollout.tokens} == {"base", "step-1"}
    whole = PROMPT + [record.token_id for record in rollout.tokens]
    # Recomputed, and found from now on.
    assert cached(core, "prompt", 0) == 0
    assert cached(core, "prompt again", 0) == 64
    assert cached(core, "whole", 0, prompt=whole) == 64
    assert cached(core, "whole again", 0, prompt=whole) == 128
    assert cached(core, "any age", None, prompt=whole) == 128


def test_a_turn_that_stands_on_a_cached_prefix_is_as_old_as_the_prefix(
    core: EngineCore, tiny_model: Callable[..., Path]
) -> None:
    longer = [*PROMPT, *PROMPT]
    cached(core, "first turn", 1)
    commit(core, tiny_model(seed=1), "step-1")
    assert cached(core, "second turn", 1, prompt=longer) == 64
    commit(core, tiny_model(seed=2), "step-2")
    assert cached(core, "third turn", 1, prompt=longer) == 0
    assert cached(core, "fourth turn", 1, prompt=longer) == 128


def test_a_running_stream_keeps_its_kv_whatever_its_age(
    core: EngineCore, tiny_model: Callable[..., Path]
) -> None:
    told: list[tuple[tuple[str, int, int], ...]] = []
    stream = msgspec.structs.replace(asked("stream", 0, max_tokens=40), want_kv_snapshots=True)
    core.add(stream)
    for step in range(60):
        if step in (5, 10):
            commit(core, tiny_model(seed=step), f"at-{step}")
        told += [event.kv_snapshots for _, event in core.step() if event.kv_snapshots]
    assert core.idle
    assert [(name, start) for name, start, _ in told[-1]] == [("base", 0), ("at-5", 68), ("at-10", 73)]


def test_choices_share_the_block_that_their_prompt_was_recomputed_into(
    core: EngineCore, tiny_model: Callable[..., Path]
) -> None:
    cached(core, "cold", None)
    commit(core, tiny_model(seed=1), "step-1")
    before = core._steps
    many = msgspec.structs.replace(asked("many", 0), n=4)
    got = run(core, [many])
    assert [got["many", i].cached for i in range(4)] == [0, 64, 64, 64]
    assert core._steps - before <= 3


def test_an_urgent_request_goes_before_those_that_wait_and_beside_as_many_as_run(
    tiny_model: Callable[..., Path],
) -> None:
    core = EngineCore(tiny_model(), EngineSettings(kernels="torch", max_running=2))
    for number in range(4):
        core.add(request(f"r{number}", [number] * 16, max_tokens=50, echo=0))
    core.step()
    core.add(msgspec.structs.replace(request("urgent", [9] * 16, max_tokens=0), urgent=True))
    ended = [name for _ in range(16 // URGENT_TOKENS) for name, event in core.step() if event.finish]
    assert ended == ["urgent"]
    assert (len(core.scheduler.running), len(core.scheduler.waiting)) == (2, 2)
