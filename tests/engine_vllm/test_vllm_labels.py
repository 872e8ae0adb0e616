"""Which snapshot each token is labelled with, and its KV is said to be of, when weights change under running streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeRequest, FakeVllm, until, weights_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import examples
from vllm_helpers import Reading, asking, attached, begun, swap

from midstream.engine.servers.labels import UNKNOWN, ChoiceLabels, Epochs

Kv = list[tuple[tuple[str, int, int], ...]]


def kv(reading: Reading, index: int = 0) -> Kv:
    return [e.kv_snapshots for e in reading.events if e.index == index and e.kv_snapshots is not None]


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 2), st.sampled_from([1, 2])), min_size=1, max_size=6
    ),
    st.integers(0, 20),
)
@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_label_is_of_the_weights_that_sampled_the_token(
    tmp_path: Path, rounds: list[tuple[int, int, int]], cut: int
) -> None:
    """rounds: tokens of the first choice, tokens of the second, weights switched to; the third has none until the end. Of
    what the first samples, the last was not written yet when the pause began. One request a round begins while paused."""

    async def main() -> None:
        async with attached(tmp_path) as (engine, fake):
            fake.cut = cut
            reading, (one, two, _) = await begun(engine, fake, asking(n=3, max_tokens=40))
            readings, truth = [reading], {"base": 0, "step-1": 1, "step-2": 2}
            for first, second, weights in rounds:
                one.step(*[1] * first)
                if second:
                    two.step(second)
                late = one.sample()
                fake.after["/pause"] = lambda late=late: one.write(late)
                fake.gates["/collective_rpc"] = gate = asyncio.Event()
                switching = asyncio.create_task(swap(engine, tmp_path, weights))
                await until(lambda: "/collective_rpc" in fake.calls)
                fresh, _ = await begun(engine, fake, asking(f"paused-{len(readings)}", max_tokens=2))
                readings.append(fresh)
                gate.set()
                await switching
                fake.calls.clear()
            for request in fake.requests:
                request.to_the_end()
            for each in readings:
                assert (await each.ended()).errors == []
                for index in range(3 if each is reading else 1):
                    records = each.records(index)
                    assert len(records) == (40 if each is reading else 2)
                    assert [truth[r.snapshot] for r in records] == [weights_of(r) for r in records]
            assert [len(reading.records(i)) for i in range(3)] == [40] * 3
            assert set(reading.labels(2)) == {f"step-{rounds[-1][2]}"}

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/pause", "/is_paused"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_tokens_that_come_late_are_of_the_old_weights(tmp_path: Path, path: str, when: str) -> None:
    """They were sampled before the pause, and written only while it is asked for, or asked about."""

    async with attached(tmp_path) as (engine, fake):
        readings, late = [], []
        for i in range(8):
            reading, (request,) = await begun(engine, fake, asking(f"r{i}", max_tokens=6, n=1))
            readings.append(reading)
            late.append((request, request.sample(3)))
        getattr(fake, when)[path] = lambda: [request.write(new) for request, new in late]
        fake.after["/resume"] = lambda: [request.step() for request, _ in late]
        await swap(engine, tmp_path, 1)
        for (request, _), reading in zip(late, readings, strict=True):
            request.to_the_end()
            assert (await reading.ended()).labels() == ["base"] * 3 + ["step-1"] * 3


Spans = list[dict[str, Any]]
LIES: dict[str, Callable[[Spans], Spans | None]] = {
    "none": lambda spans: None,
    "empty": lambda spans: [],
    "one span": lambda spans: [{"version": spans[-1]["version"], "start": 0, "end": spans[-1]["end"]}],
    "early": lambda spans: [spans[0] | {"end": 1}, spans[1] | {"start": 1}],
    "late": lambda spans: [spans[0] | {"end": 3}, spans[1] | {"start": 3}],
    "other name": lambda spans: [spans[0], spans[1] | {"version": "1:step-9"}],
    "other load": lambda spans: [spans[0], spans[1] | {"version": "2:step-1"}],
    "short": lambda spans: [spans[0], spans[1] | {"end": 3}],
    "unnamed": lambda spans: [span | {"version": "default"} for span in spans],
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("routes", [False, True])
async def test_labels_that_vllm_does_not_confirm_are_an_error(tmp_path: Path, lie: str, routes: bool) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(want_routes=routes))
        other, (kept,) = await begun(engine, fake, asking("other"))
        request.lie = LIES[lie]
        request.step(2)
        await until(lambda: routes or len(reading.records()) == 2)
        await swap(engine, tmp_path, 1)
        request.to_the_end()
        await reading.ended()
        assert reading.finishes == {}
        assert len(reading.errors) == 1
        assert reading.died is None
        kept.to_the_end()
        assert (await other.ended()).labels() == ["step-1"] * 4


async def test_without_a_switch_no_word_is_no_doubt_and_a_wrong_one_is(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        for name, lie, fine in (("silent", "none", True), ("wrong", "unnamed", False)):
            reading, (request,) = await begun(engine, fake, asking(name))
            request.lie = LIES[lie]
            request.to_the_end()
            assert ((await reading.ended()).errors == []) == fine


async def test_a_version_that_never_says_which_weights_sampled_gives_labels_by_arrival(
    tmp_path: Path,
) -> None:
    def silent(fake: FakeVllm) -> None:
        fake.confirms = False

    async with attached(tmp_path, set_up=silent) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking())
        request.step(2)
        await until(lambda: len(reading.records()) == 2)
        await swap(engine, tmp_path, 1)
        request.to_the_end()
        await reading.ended()
        assert reading.errors == []
        assert [weights_of(record) for record in reading.records()] == [0, 0, 1, 1]
        assert reading.labels() == ["base", "base", "step-1", "step-1"]


async def test_equal_names_loaded_twice_are_two_loads(tmp_path: Path) -> None:
    """vLLM's spans tell them apart, whatever the snapshots are called."""

    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=6))
        for _ in range(2):
            request.step(2)
            await until(lambda: len(reading.records()) == len(request.tokens))
            await swap(engine, tmp_path, 1, "same")
        request.step(2)
        assert (await reading.ended()).labels() == ["base"] * 2 + ["same"] * 4
        assert reading.errors == []
        assert request.versions == ["0:base"] * 2 + ["1:same"] * 2 + ["2:same"] * 2


async def test_provenance_of_kv(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):

        async def ask(name: str, salt: bytes = b"", count: int = 1) -> tuple[Reading, list[FakeRequest]]:
            asked = asking(name, range(10), max_tokens=6, want_kv_snapshots=True, salt=salt, n=count)
            return await begun(engine, fake, asked)

        clean, (one,) = await ask("clean")
        crossing, (two,) = await ask("crossing")
        queued, (three,) = await ask("queued")
        one.to_the_end()
        assert kv(await clean.ended()) == [(("base", 0, 10),), (("base", 0, 15),)]
        two.step(3)
        await until(lambda: len(crossing.records()) == 3)
        await swap(engine, tmp_path, 1)
        two.to_the_end()
        # Behind a switch vLLM may preempt it and compute any of its KV again, or find it where others left theirs.
        unknown = [((UNKNOWN, 0, 13),), ((UNKNOWN, 0, 15),)]
        assert kv(await crossing.ended()) == [(("base", 0, 12),), *unknown]
        # Its prompt may have been computed before, or in part.
        three.to_the_end()
        assert kv(await queued.ended())[-1] == ((UNKNOWN, 0, 15),)
        # Finds what others left under this salt.
        after, (four,) = await ask("after")
        four.to_the_end()
        assert {span[0][0] for span in kv(await after.ended())} == {UNKNOWN}
        assert four.reused != []
        fresh, (five,) = await ask("fresh", b"another")
        five.to_the_end()
        assert kv(await fresh.ended())[-1] == (("step-1", 0, 15),)
        assert five.reused == []


async def test_nobody_is_told_of_kv_who_did_not_ask(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking())
        request.step(2)
        await until(lambda: reading.records())
        await swap(engine, tmp_path, 1)
        request.to_the_end()
        assert kv(await reading.ended()) == []


@given(st.lists(st.integers(0, 3), max_size=8), st.integers(1, 9), st.booleans())
def test_spans_of_kv_have_no_gap_and_no_overlap(takes: list[int], prompt: int, clean: bool) -> None:
    """takes: tokens before each switch."""
    epochs = Epochs("base")
    told = ChoiceLabels(epochs, prompt, clean=clean)
    for number, tokens in enumerate(takes, start=1):
        for _ in range(tokens):
            told.take(1)
        epochs.begin(f"step-{number}")
        told.switched()
    if told.take(1):
        spans = told.kv()
        assert spans[0][1] == 0
        assert spans[-1][2] == prompt + told.count - 1
        assert [start for _, start, _ in spans[1:]] == [end for _, _, end in spans[:-1]]
        assert all(start < end for _, start, end in spans)
        assert {name for name, _, _ in spans} == ({UNKNOWN} if takes or not clean else {"base"})
