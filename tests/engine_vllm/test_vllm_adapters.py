"""Policies of VllmEngine: which adapter a token is of, what a swap leaves alone, and what is refused instead of computed."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import (
    LOAD,
    ON_BASE,
    OWN,
    UNLOAD,
    FakeVllm,
    until,
    weights_of,
    write_adapter,
    write_weights,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiers import examples
from vllm_helpers import Reading, asking, attached, begun

from midstream.core.types import SwapTiming
from midstream.engine.base import EngineDied, StagingFailed
from midstream.engine.vllm import adapters as adapters_module
from midstream.engine.vllm.adapters import FOLDER
from midstream.engine.vllm.engine import VllmEngine
from midstream.snapshots.adapter import AdapterSpec, read_adapter

_NUMBERS = itertools.count(1)


async def publish(engine: VllmEngine, folder: Path, policy: str, number: int) -> SwapTiming:
    """An adapter of that number, whose directory is gone afterwards, as the cache's may be."""
    directory = write_adapter(folder / f"adapter-{next(_NUMBERS)}", number)
    slot = engine.slot(policy)
    await slot.stage(f"{policy}-{number}", directory)
    timing = await slot.commit(f"{policy}-{number}")
    shutil.rmtree(directory)
    return timing


def asked_for(fake: FakeVllm) -> list[str]:
    return [request.model for request in fake.requests]


async def settled(fake: FakeVllm, count: int) -> None:
    """So many adapters are left at the server."""
    await until(lambda: len(fake.adapters) == count, f"{count} adapters, not {list(fake.adapters)}")


async def test_every_token_is_of_its_policy_and_says_so(tmp_path: Path) -> None:
    async with attached(tmp_path, places=4) as (engine, fake):
        await publish(engine, tmp_path, "red", 3)
        await publish(engine, tmp_path, "blue", 5)
        readings = {}
        for policy in ("red", "blue", ""):
            readings[policy], (request,) = await begun(engine, fake, asking(policy or "own", policy=policy))
            request.to_the_end()
        of = {"red": ("red-3", 3), "blue": ("blue-5", 5), "": ("base", 0)}
        for policy, reading in readings.items():
            await reading.ended()
            assert reading.errors == []
            label, number = of[policy]
            assert {(r.snapshot, weights_of(r)) for r in reading.records()} == {(label, number)}
        assert len(set(asked_for(fake))) == 3
        assert asked_for(fake)[2] == OWN


def keeping(fake: FakeVllm) -> None:
    """As a version whose running requests keep their adapter."""
    fake.deaf_in_place = True


def ours(engine: VllmEngine) -> None:
    """As one that this process started, so that it was seen to load full weights under adapters."""
    engine._no_full = ""


def both_of(label: str) -> int:
    """The number of the weights of a label: of an adapter, and of the base that it stands on."""
    adapter, _, base = label.partition("@")
    return int(adapter.rpartition("-")[2]) + ON_BASE * int(base.rpartition("-")[2] or 0)


async def test_running_requests_cross_a_swap_of_their_policy_and_no_others_do(tmp_path: Path) -> None:
    async with attached(tmp_path, places=4) as (engine, fake):
        assert (await engine.start()).card.has("policy_crossing")
        await publish(engine, tmp_path, "red", 1)
        await publish(engine, tmp_path, "blue", 5)
        readings, requests = {}, {}
        for policy in ("red", "blue", ""):
            asked = asking(policy or "own", policy=policy, max_tokens=9, want_kv_snapshots=True)
            readings[policy], (requests[policy],) = await begun(engine, fake, asked)
            requests[policy].step(1, 1)
        await until(lambda: all(len(reading.records()) == 2 for reading in readings.values()))
        for number in (2, 3):
            timing = await publish(engine, tmp_path, "red", number)
            assert timing.streams_crossed == 1
            for request in requests.values():
                request.step(1, 1)
            await until(lambda n=number: all(len(r.records()) == 2 * n for r in readings.values()))
        for policy, reading in readings.items():
            requests[policy].to_the_end()
            await reading.ended()
            assert reading.errors == []
        expected = ["red-1"] * 2 + ["red-2"] * 2 + ["red-3"] * 5
        assert readings["red"].labels() == expected
        assert [weights_of(r) for r in readings["red"].records()] == [both_of(name) for name in expected]
        assert {(r.snapshot, weights_of(r)) for r in readings["blue"].records()} == {("blue-5", 5)}
        assert {(r.snapshot, weights_of(r)) for r in readings[""].records()} == {("base", 0)}
        known = {name: reading.events[-1].kv_snapshots for name, reading in readings.items()}
        assert known["red"] == (("?", 0, 11),)
        assert known["blue"] == (("blue-5", 0, 11),)


async def test_an_adapter_that_vllm_refuses_in_the_pause_leaves_streams_the_one_before(
    tmp_path: Path,
) -> None:
    async with attached(tmp_path, places=3) as (engine, fake):
        await publish(engine, tmp_path, "red", 1)
        reading, (request,) = await begun(engine, fake, asking(policy="red", max_tokens=6))
        request.step(1, 1)
        await until(lambda: len(reading.records()) == 2)
        slot = engine.slot("red")
        await slot.stage("red-2", write_adapter(tmp_path / "second", 2))
        fake.fault(LOAD, "refuse")
        with pytest.raises(StagingFailed, match="made up by the test"):
            await slot.commit("red-2")
        assert not fake.paused
        # Whatever vLLM reads again is what it had.
        fake.loaded = {}
        request.to_the_end()
        await reading.ended()
        assert [(r.snapshot, weights_of(r)) for r in reading.records()] == [("red-1", 1)] * 6


@pytest.mark.parametrize("how", ["done-close", "close", "odd"])
async def test_a_crossing_that_leaves_open_what_streams_compute_with_ends_the_boot(
    tmp_path: Path, how: str
) -> None:
    async with attached(tmp_path, places=3) as (engine, fake):
        await publish(engine, tmp_path, "red", 1)
        reading, (request,) = await begun(engine, fake, asking(policy="red", max_tokens=6))
        request.step(1, 1)
        await until(lambda: len(reading.records()) == 2)
        slot = engine.slot("red")
        await slot.stage("red-2", write_adapter(tmp_path / "second", 2))
        fake.fault("/update_weight_version" if how == "odd" else LOAD, "refuse" if how == "odd" else how)
        with pytest.raises(EngineDied, match="in doubt"):
            await slot.commit("red-2")
        await reading.ended()
        assert reading.died is not None
        assert reading.labels() == ["red-1"] * 2


async def test_full_weights_are_switched_under_policies_and_labels_name_both(tmp_path: Path) -> None:
    async with attached(tmp_path, places=4) as (engine, fake):
        ours(engine)
        await publish(engine, tmp_path, "red", 1)
        readings, requests = {}, {}
        for policy in ("red", ""):
            asked = asking(policy or "own", range(20), policy=policy, max_tokens=6, salt=policy.encode())
            readings[policy], (requests[policy],) = await begun(engine, fake, asked)
            requests[policy].step(1, 1)
        await until(lambda: all(len(reading.records()) == 2 for reading in readings.values()))
        await engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        assert (await engine.commit("step-2")).streams_crossed == 2
        for policy, reading in readings.items():
            requests[policy].to_the_end()
            await reading.ended()
            assert reading.errors == []
        assert readings["red"].labels() == ["red-1"] * 2 + ["red-1@step-2"] * 4
        assert [weights_of(r) for r in readings["red"].records()] == [1] * 2 + [1 + 2 * ON_BASE] * 4
        assert readings[""].labels() == ["base"] * 2 + ["step-2"] * 4
        # What comes now, and what is loaded now, stands on it.
        await publish(engine, tmp_path, "blue", 5)
        for policy, label in (("red", "red-1@step-2"), ("blue", "blue-5@step-2")):
            asked = asking(f"late {policy}", range(20), policy=policy, salt=policy.encode(), kv_age_max=0)
            reading, (request,) = await begun(engine, fake, asked)
            request.to_the_end()
            await reading.ended()
            assert request.reused == []
            assert {(r.snapshot, weights_of(r)) for r in reading.records()} == {(label, both_of(label))}


@pytest.mark.parametrize("where", ["its files are read", "vLLM loads it"])
async def test_an_adapter_that_is_staged_while_the_base_is_switched_has_a_label_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async with attached(tmp_path, places=4) as (engine, fake):
        ours(engine)
        gate = threading.Event()
        if where == "vLLM loads it":
            fake.gates[LOAD] = loads = asyncio.Event()
            gate.set()
        else:

            def read_late(*arguments: Any) -> AdapterSpec:
                assert gate.wait(60)
                return read_adapter(*arguments)

            monkeypatch.setattr(adapters_module, "read_adapter", read_late)
        staging = asyncio.create_task(publish(engine, tmp_path, "red", 1))
        await until(lambda: engine._adapters is not None and engine._adapters._coming)
        await engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        await engine.commit("step-2")
        gate.set()
        if where == "vLLM loads it":
            loads.set()
        await staging
        reading, (request,) = await begun(engine, fake, asking(policy="red"))
        request.to_the_end()
        await reading.ended()
        assert [(r.snapshot, weights_of(r)) for r in reading.records()] == [
            ("red-1@step-2", 1 + 2 * ON_BASE)
        ] * 4


async def test_after_full_weights_that_failed_their_check_the_next_ones_begin_with_a_new_boot(
    tmp_path: Path,
) -> None:
    """A server that was only restarted would have none of its adapters."""

    async with attached(tmp_path, places=4, kind=VllmEngine) as (engine, fake):
        ours(engine)
        await publish(engine, tmp_path, "red", 1)
        await engine.stage("bad", write_weights(tmp_path / "bad", 2))
        await engine.commit("bad")
        engine.settle("bad", sound=False)
        # As one that this process started.
        engine._attached = False
        await engine.stage("good", write_weights(tmp_path / "good", 3))
        with pytest.raises(EngineDied):
            await engine.commit("good")
        assert fake.weights == 2


async def test_a_swap_leaves_a_running_request_its_adapter_its_label_and_its_files(tmp_path: Path) -> None:
    async with attached(tmp_path, places=3, set_up=keeping) as (engine, fake):
        assert not (await engine.start()).card.has("policy_crossing")
        await publish(engine, tmp_path, "red", 1)
        old, (running,) = await begun(engine, fake, asking("old", policy="red", max_tokens=6, n=1))
        running.step(2)
        await until(lambda: len(old.records()) == 2)
        await publish(engine, tmp_path, "red", 2)
        new, (coming,) = await begun(engine, fake, asking("new", policy="red"))
        coming.to_the_end()
        await new.ended()
        assert [(r.snapshot, weights_of(r)) for r in new.records()] == [("red-2", 2)] * 4
        # vLLM may read the old one's files until its last request is done.
        assert running.model in fake.adapters
        assert sorted(file.name for file in fake.files[running.model].iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        running.to_the_end()
        await old.ended()
        assert [(r.snapshot, weights_of(r)) for r in old.records()] == [("red-1", 1)] * 6
        await settled(fake, 1)
        await until(lambda: not fake.files[running.model].exists())


async def test_no_kv_is_found_by_another_version_nor_by_a_policy_of_the_same_name(tmp_path: Path) -> None:
    async with attached(tmp_path, places=3) as (engine, fake):

        async def reused(salt: bytes) -> list[int]:
            asked = asking("r", range(20), policy="red", salt=salt)
            reading, (request,) = await begun(engine, fake, asked)
            request.to_the_end()
            await reading.ended()
            return request.reused

        await publish(engine, tmp_path, "red", 1)
        assert await reused(b"s") == []
        assert len(await reused(b"s")) == 4
        await publish(engine, tmp_path, "red", 2)
        assert await reused(b"s") == []
        # The same numbers again are another version.
        await publish(engine, tmp_path, "red", 1)
        assert await reused(b"s") == []
        engine.end_policy("red")
        await publish(engine, tmp_path, "red", 1)
        assert await reused(b"s") == []
        assert len(set(asked_for(fake))) == 4


async def test_names_of_an_earlier_boot_mean_nothing(tmp_path: Path) -> None:
    """An attached server has them still."""

    async with attached(tmp_path, places=3) as (engine, fake):
        await publish(engine, tmp_path, "red", 1)
        known = {*fake.adapters}
        await engine.start()
        early = await Reading(engine, asking("early", policy="red")).ended()
        assert early.errors == ["the policy red serves nothing yet"]
        await publish(engine, tmp_path, "red", 2)
        reading, (request,) = await begun(engine, fake, asking("late", policy="red"))
        request.to_the_end()
        await reading.ended()
        assert {weights_of(r) for r in reading.records()} == {2}
        assert {*fake.adapters} > known
        assert request.model not in known


async def test_a_swap_waits_while_requests_run_under_as_many_adapters_as_vllm_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async with attached(tmp_path, places=3, set_up=keeping) as (engine, fake):
        for policy in ("red", "blue"):
            await publish(engine, tmp_path, policy, 1)
        old, (running,) = await begun(engine, fake, asking("old", policy="red"))
        await publish(engine, tmp_path, "red", 2)
        names = {*fake.adapters}
        assert len(names) == 3
        waiting = asyncio.create_task(publish(engine, tmp_path, "blue", 2))
        await until(lambda: "waits" in caplog.text)
        assert {*fake.adapters} == names
        assert not waiting.done()
        with pytest.raises(StagingFailed, match="--max-loras"):
            await publish(engine, tmp_path, "green", 1)
        running.to_the_end()
        await old.ended()
        await waiting
        assert {weights_of(r) for r in old.records()} == {1}
        await settled(fake, 2)


@pytest.mark.parametrize("when", ["its files are read", "it waits for a place"])
async def test_one_that_is_dropped_before_vllm_has_it_takes_no_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    caplog.set_level("INFO")
    reading, read_on = threading.Event(), threading.Event()

    def slowly(*args: Any) -> AdapterSpec:
        reading.set()
        assert read_on.wait(20)
        return read_adapter(*args)

    async with attached(tmp_path, places=2) as (engine, fake):
        await publish(engine, tmp_path, "red", 1)
        old, (running,) = await begun(engine, fake, asking("old", policy="red"))
        await publish(engine, tmp_path, "red", 2)
        names = {*fake.adapters}
        monkeypatch.setattr(adapters_module, "read_adapter", slowly)
        slot = engine.slot("red")
        staging = asyncio.create_task(slot.stage("red-3", write_adapter(tmp_path / "dropped", 3)))
        await until(reading.is_set)
        if when == "its files are read":
            slot.drop_staged()
            read_on.set()
        else:
            read_on.set()
            await until(lambda: "waits: requests run under 2 adapters" in caplog.text)
            slot.drop_staged()
        with pytest.raises(StagingFailed, match="given up"):
            await staging
        assert {*fake.adapters} == names
        running.to_the_end()
        await old.ended()
        await settled(fake, 1)
        await publish(engine, tmp_path, "red", 4)


@pytest.mark.parametrize("kind", ["refuse", "close", "done-close"])
async def test_an_adapter_that_vllm_does_not_load_is_refused_and_what_served_goes_on(
    tmp_path: Path, kind: str
) -> None:
    async with attached(tmp_path, places=2) as (engine, fake):
        await publish(engine, tmp_path, "red", 1)
        fake.fault(LOAD, kind)
        with pytest.raises(StagingFailed, match="vLLM did not load the adapter"):
            await publish(engine, tmp_path, "red", 2)
        with pytest.raises(StagingFailed, match="not staged"):
            await engine.slot("red").commit("red-2")
        reading, (request,) = await begun(engine, fake, asking(policy="red"))
        request.to_the_end()
        await reading.ended()
        assert {(r.snapshot, weights_of(r)) for r in reading.records()} == {("red-1", 1)}
        # It left no trace, and takes no place.
        await settled(fake, 1)
        await publish(engine, tmp_path, "red", 3)
        folder = tmp_path / "cache" / FOLDER
        await until(lambda: len(list(folder.iterdir())) == 1)


async def test_one_that_is_dropped_while_vllm_loads_it_is_unloaded(tmp_path: Path) -> None:
    async with attached(tmp_path, places=2) as (engine, fake):
        gate = fake.gates[LOAD] = asyncio.Event()
        slot = engine.slot("red")
        staging = asyncio.create_task(slot.stage("red-1", write_adapter(tmp_path / "a", 1)))
        await until(lambda: LOAD not in fake.gates)
        slot.drop_staged()
        gate.set()
        with pytest.raises(StagingFailed, match="given up"):
            await staging
        await until(lambda: UNLOAD in fake.calls)
        await settled(fake, 0)


async def test_an_ended_policys_requests_end_as_they_would(tmp_path: Path) -> None:
    async with attached(tmp_path, places=2) as (engine, fake):
        await publish(engine, tmp_path, "red", 1)
        reading, (request,) = await begun(engine, fake, asking(policy="red"))
        request.step(1)
        engine.end_policy("red")
        refused = await Reading(engine, asking("late", policy="red")).ended()
        assert refused.errors == ["the policy red serves nothing yet"]
        request.to_the_end()
        await reading.ended()
        assert (reading.errors, {weights_of(r) for r in reading.records()}) == ([], {1})
        await settled(fake, 0)


async def test_a_label_that_vllm_contradicts_is_an_error(tmp_path: Path) -> None:
    """Somebody else gave the server other base weights."""

    async with attached(tmp_path, places=2) as (engine, fake):
        await publish(engine, tmp_path, "red", 1)
        reading, (request,) = await begun(engine, fake, asking(policy="red"))
        request.lie = lambda spans: [{**span, "version": "another"} for span in spans]
        request.to_the_end()
        await reading.ended()
        assert [error for error in reading.errors if "another" in error]


async def test_a_server_that_was_restarted_ends_the_boot_when_a_policy_is_asked_for(tmp_path: Path) -> None:
    async with attached(tmp_path, places=2) as (engine, fake):
        await publish(engine, tmp_path, "red", 1)
        await fake.restart()
        reading = await Reading(engine, asking(policy="red")).ended()
        assert reading.died is not None
        scored = Reading(engine, asking("scored", policy="red", prompt_records=3, max_tokens=0))
        await scored.ended()
        assert scored.died is not None


async def test_prompts_are_scored_under_the_policys_adapter(tmp_path: Path) -> None:
    async with attached(tmp_path, places=2) as (engine, fake):
        await publish(engine, tmp_path, "red", 4)
        asked = asking(policy="red", prompt_records=3, max_tokens=0)
        reading = await Reading(engine, asked).ended()
        records = [record for event in reading.events for record in event.prompt or ()]
        assert [(r.snapshot, weights_of(r)) for r in records[1:]] == [("red-4", 4)] * 2
        assert fake.scores[-1].model != OWN


class TestTheProofAtTheStart:
    """What a server was not seen to do, it is not trusted with."""

    async def test_with_adapters_there_are_no_full_snapshots_and_nothing_of_the_proof_is_left(
        self, tmp_path: Path
    ) -> None:
        async with attached(tmp_path, places=3) as (engine, fake):
            card = (await engine.start()).card
            assert card.has("policies")
            assert not card.has("full_snapshots")
            assert card.has("policy_crossing")
            assert "which midstream starts itself" in card.why["full_snapshots"]
            assert fake.adapters == {}
            assert not (tmp_path / "cache" / FOLDER).exists()
            with pytest.raises(StagingFailed, match="no full weights"):
                await engine.stage("full", write_weights(tmp_path / "full", 1))

    async def test_without_the_flag_there_are_no_policies(self, tmp_path: Path) -> None:
        async with attached(tmp_path) as (engine, _):
            card = (await engine.start()).card
            assert (card.has("policies"), card.has("full_snapshots")) == (False, True)
            assert card.why["policies"] == "vLLM runs without --enable-lora"
            with pytest.raises(StagingFailed, match="without --enable-lora"):
                await publish(engine, tmp_path, "red", 1)

    async def test_a_map_that_vllm_leaves_out_is_refused_by_its_name(self, tmp_path: Path) -> None:
        def deaf(fake: FakeVllm) -> None:
            fake.ignored = {"down_proj"}

        async with attached(tmp_path, places=2, set_up=deaf) as (engine, _):
            await publish(engine, tmp_path, "red", 1)
            directory = write_adapter(tmp_path / "deaf", 1, "mlp.down_proj")
            with pytest.raises(
                StagingFailed, match=r"model\.layers\.0\.mlp\.down_proj: this vLLM was not seen"
            ):
                await engine.slot("red").stage("red-2", directory)

    @pytest.mark.parametrize("how", ["refuses", "ignores"])
    def test_a_server_that_takes_no_adapters_serves_full_snapshots_and_says_why(
        self, tmp_path: Path, how: str
    ) -> None:
        def useless(fake: FakeVllm) -> None:
            fake.ignored = {"model.layers"} if how == "ignores" else set()
            fake.fault(LOAD, *["refuse"] * (2 if how == "refuses" else 0))

        async def main() -> None:
            async with attached(tmp_path, places=2, set_up=useless) as (engine, fake):
                fake.fault(LOAD, *["refuse"] * (2 if how == "refuses" else 0))
                card = (await engine.start()).card
                assert (card.has("policies"), card.has("full_snapshots")) == (False, True)
                expected = "made up by the test" if how == "refuses" else "no adapter changes"
                assert expected in card.why["policies"]
                await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
                await engine.commit("step-1")

        asyncio.run(main())

    async def test_a_server_that_gives_the_base_weights_an_adapter_is_not_used(self, tmp_path: Path) -> None:
        def leaking(fake: FakeVllm) -> None:
            fake.leaks = True

        with pytest.raises(EngineDied, match="beside adapters vLLM gives the base weights"):
            async with attached(tmp_path, places=2, set_up=leaking):
                pass

    async def test_experts_on_a_cpu_are_refused_before_they_end_the_server(self, tmp_path: Path) -> None:
        def small(fake: FakeVllm) -> None:
            fake.cpu = True

        with pytest.raises(EngineDied, match="cannot compute a model with experts"):
            async with attached(tmp_path, places=2, set_up=small):
                pass
        async with attached(tmp_path, set_up=small):
            pass


POLICIES = ("red", "blue")
OPS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "swap", "serve", "end", "full")), st.sampled_from(POLICIES), st.integers(0, 2)
    ),
    min_size=4,
    max_size=24,
)


@given(OPS)
@example([("swap", "red", 0), *[("full", "red", 0)] * 10, ("ask", "red", 0)])
@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_in_any_order_of_events_numbers_are_those_of_the_label(
    tmp_path: Path, ops: list[tuple[str, str, int]]
) -> None:
    async def main() -> None:
        async with attached(tmp_path / str(next(_NUMBERS)), places=3) as (engine, fake):
            ours(engine)
            readings: list[Reading] = []
            staging: list[asyncio.Task[Any]] = []
            serving: set[str] = set()
            versions = itertools.count(1)

            async def swap(policy: str, number: int) -> None:
                await publish(engine, tmp_path, policy, number)
                serving.add(policy)

            for op, policy, which in ops:
                if op == "ask" and policy in serving:
                    name = f"r{len(readings)}"
                    reading, _ = await begun(engine, fake, asking(name, policy=policy, n=1 + which % 2))
                    readings.append(reading)
                elif op == "swap" and all(task.done() for task in staging):
                    staging.append(asyncio.create_task(swap(policy, next(versions))))
                    await asyncio.sleep(0)
                elif op == "end" and policy in serving and all(task.done() for task in staging):
                    engine.end_policy(policy)
                    serving.discard(policy)
                elif op == "full":
                    number = next(versions)
                    await engine.stage(f"step-{number}", write_weights(tmp_path / f"step-{number}", number))
                    await engine.commit(f"step-{number}")
                elif op == "serve":
                    await until(lambda: not fake.paused)
                    live = [r for r in fake.requests if not r.over and not r.gone]
                    for request in live[which : which + 2]:
                        request.step(1)
            await until(lambda: not fake.paused)
            for request in fake.requests:
                if not request.over:
                    request.to_the_end()
            await asyncio.gather(*staging, *(reading.ended() for reading in readings))
            for reading in readings:
                assert reading.errors == []
                records = [record for index in range(2) for record in reading.records(index)]
                assert len({record.snapshot.partition("-")[0] for record in records}) == 1
                assert [weights_of(record) for record in records] == [both_of(r.snapshot) for r in records]
            await settled(fake, len(serving))

    asyncio.run(main())
