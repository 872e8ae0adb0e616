"""Which weights computed the KV behind tokens of policies, beside swaps of adapters and of the base."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeRequest, FakeVllm, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_vllm_adapters import both_of, ours, publish
from test_vllm_provenance import behind_tokens, reported, scheduling, wanting
from tiers import examples
from vllm_helpers import Reading, attached, begun, swap

from midstream.engine.vllm.arguments import UNTOLD
from midstream.engine.vllm.engine import VllmEngine
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import ANY_AGE

POLICIES = ("red", "blue", "")


def telling(folder: Path, set_up: Callable[[FakeVllm], None] = lambda fake: None) -> Any:
    def both(fake: FakeVllm) -> None:
        scheduling(fake)
        set_up(fake)

    return attached(folder, places=8, set_up=both)


def proved(engine: VllmEngine, fake: FakeVllm) -> None:
    assert engine._info().card.has("kv_provenance"), engine._info().card.why
    fake.unasked = None
    fake.requests.clear()
    ours(engine)


def deaf(fake: FakeVllm) -> None:
    """It takes each switch for one of all weights."""
    every = fake.epochs_of

    def epochs_of(model: str) -> list[int]:
        fake.named = [
            name.replace(f" {name.partition(':')[0].partition(' ')[2]}:", ":") for name in fake.named
        ]
        return every(model)

    fake.epochs_of = epochs_of  # type: ignore[method-assign]


def blind(fake: FakeVllm) -> None:
    """It does not see which requests are of a policy."""
    every = fake.epochs_of
    fake.epochs_of = lambda model: every("")  # type: ignore[method-assign]


def hasty(fake: FakeVllm) -> None:
    """Whatever was switched, all KV is older."""
    find = fake.find

    def found(model: str, salt: str, tokens: Any, age_max: int = ANY_AGE) -> list[int]:
        return find(model, salt, tokens) if age_max == ANY_AGE else []

    fake.find = found  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (deaf, "of a new prompt"),
        (blind, "of a stream's first token"),
        (hasty, "of the base, whose weights are the same"),
    ],
)
async def test_a_server_that_confuses_policies_is_used_without_it(
    tmp_path: Path, fault: Callable[[FakeVllm], None], why: str
) -> None:
    async with telling(tmp_path, fault) as (engine, _):
        card = engine._info().card
        assert not card.has("kv_provenance")
        assert card.has("policy_crossing")
        assert card.why["kv_provenance"].startswith(UNTOLD)
        assert why in card.why["kv_provenance"]


async def test_each_stream_is_told_of_the_switches_of_its_own_weights(tmp_path: Path) -> None:
    async with telling(tmp_path) as (engine, fake):
        proved(engine, fake)
        for policy in ("red", "blue"):
            await publish(engine, tmp_path, policy, 1)
        readings: dict[str, Reading] = {}
        requests: dict[str, FakeRequest] = {}
        for policy in POLICIES:
            asked = wanting(policy or "own", policy=policy)
            readings[policy], (requests[policy],) = await begun(engine, fake, asked)

        async def all_step(count: int) -> None:
            for request in requests.values():
                request.step()
            await until(lambda: all(len(reading.records()) == count for reading in readings.values()))

        await all_step(1)
        await publish(engine, tmp_path, "red", 2)
        await all_step(2)
        await swap(engine, tmp_path, 1)
        await all_step(3)
        for policy, request in requests.items():
            request.to_the_end()
            assert (await readings[policy].ended()).errors == []
        last = {policy: reported(reading)[-1] for policy, reading in readings.items()}
        assert last == {
            "red": (("red-1", 0, 10), ("red-2", 10, 11), ("red-2@step-1", 11, 15)),
            "blue": (("blue-1", 0, 11), ("blue-1@step-1", 11, 15)),
            "": (("base", 0, 11), ("step-1", 11, 15)),
        }
        # Two blocks are cached, of the base and of the policy whose name is the same.
        for policy, expected in (
            ("red", ((0, "red-2@step-1"),)),
            ("blue", ((0, "blue-1"), (8, "blue-1@step-1"))),
            ("", ((0, "base"), (8, "step-1"))),
        ):
            reading, (request,) = await begun(engine, fake, wanting(f"after {policy}", policy=policy))
            request.to_the_end()
            told = reported(await reading.ended())[0]
            assert tuple((start, label) for label, start, _ in told) == expected
            bound = wanting(f"bound {policy}", policy=policy, kv_age_max=0)
            reading, (request,) = await begun(engine, fake, bound)
            request.to_the_end()
            assert [label for label, _, _ in reported(await reading.ended())[0]] == [expected[-1][1]]


OPS = st.lists(
    st.tuples(
        st.sampled_from(["step", "preempt", "base", "publish", "ask"]), st.integers(0, 2), st.integers(0, 3)
    ),
    max_size=30,
)


@given(OPS)
@settings(
    max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_kv_is_said_to_be_of_what_computed_it(tmp_path: Path, ops: list[tuple[str, int, int]]) -> None:
    """Prompts are shared, so cached blocks are found. Weights are known by their numbers, whatever the labels say."""

    async def main() -> None:
        async with telling(tmp_path) as (engine, fake):
            proved(engine, fake)
            # What computed the positions of an epoch that ran under a name.
            weights: dict[tuple[str, int], int] = {}
            truth: dict[int, list[list[int]]] = {}
            asked: list[tuple[Reading, FakeRequest]] = []
            newest = dict.fromkeys(POLICIES, 1)

            async def ask(policy: str, size: int) -> None:
                request = wanting(f"r{len(asked)}", range(8 + size), max_tokens=9, policy=policy)
                reading, (there,) = await begun(engine, fake, request)
                sample = there.sample

                def sampling(count: int = 1) -> Any:
                    new: list[Any] = []
                    for _ in range(count):
                        new += sample(1)
                        own = (there.model, there.kv[-1])
                        assert weights.setdefault(own, there.weights) == there.weights
                        kv = [weights[there.model, epoch] for epoch in there.kv]
                        truth.setdefault(id(there), []).append(kv)
                    return new

                there.sample = sampling  # type: ignore[method-assign]
                asked.append((reading, there))

            for policy in ("red", "blue"):
                await publish(engine, tmp_path, policy, 1)
            for what, which, number in ops:
                if what == "ask" or not asked:
                    await ask(POLICIES[which], number)
                    continue
                there = asked[number % len(asked)][1]
                if what == "base":
                    newest[""] += 1
                    await swap(engine, tmp_path, newest[""])
                elif what == "publish" and which < 2:
                    newest[POLICIES[which]] += 1
                    await publish(engine, tmp_path, POLICIES[which], newest[POLICIES[which]])
                elif what == "preempt" and not there.over:
                    there.preempt()
                elif what == "step" and not there.over:
                    there.step(min(which + 1, 9 - len(there.tokens)))
            for reading, there in asked:
                if not there.over:
                    there.to_the_end()
                assert (await reading.ended()).errors == []
                told = behind_tokens(reading.events, len(there.prompt))
                assert [[number_of(label) for label in kv] for kv in told] == truth[id(there)]

    asyncio.run(main())


def number_of(label: str) -> int:
    if label == "base":
        return 0
    if label.startswith("step-"):
        return int(label.removeprefix("step-"))
    return both_of(label)
