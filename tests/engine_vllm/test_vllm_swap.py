"""A switch of a vLLM server that fails at any call, in any way: what serves then, who is told, and no label that is wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_vllm import FakeVllm, until, weights_of, write_weights
from vllm_helpers import Reading, asking, attached, begun, swap

from midstream.engine.base import EngineDied, StagingFailed
from midstream.engine.vllm import swap as swap_module
from midstream.engine.vllm.engine import VllmEngine

RELOAD = "/collective_rpc"
KINDS = ("refuse", "close", "done-close", "hang", "done-hang")
STEPS = {
    "/pause": 0,
    "/is_paused": 0,
    "second /is_paused": 1,
    RELOAD: 0,
    "/update_weight_version": 0,
    "/resume": 0,
}
DOUBT = [(step, kind) for step in STEPS for kind in KINDS if (step, kind) != (RELOAD, "refuse")]
DOUBT += [("/is_paused", "odd")]


@contextlib.contextmanager
def faulty(
    monkeypatch: pytest.MonkeyPatch, engine: VllmEngine, fake: FakeVllm, step: str, kind: str
) -> Iterator[None]:
    """A call meets a fault; one that hangs is soon given up, here alone: a busy machine may take longer over sound ones."""
    fault(fake, step, kind)
    with monkeypatch.context() as patch:
        if "hang" in kind:
            patch.setattr(swap_module, "CALL_S_MAX", 0.3)
            patch.setattr(swap_module, "STEP_S_MAX", 0.3)
            patch.setattr(engine._control, "_load_s_max", 0.3)
        yield
    fake.heal()


def fault(fake: FakeVllm, step: str, kind: str) -> None:
    fake.fault(step.removeprefix("second "), *[None] * STEPS[step], kind)


def labelled_right(readings: list[Reading]) -> bool:
    of = {"base": 0} | {f"step-{i}": i for i in range(9)}
    return all(
        weights_of(record) == of[record.snapshot]
        for reading in readings
        for index in range(3)
        for record in reading.records(index)
    )


def wire_order(fake: FakeVllm) -> list[str]:
    return [call.partition("?")[0] for call in fake.calls]


async def test_a_switch_is_these_calls_and_keeps_the_cache(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, requests = await begun(engine, fake, asking(n=2, max_tokens=9))
        requests[0].step(3)
        await until(lambda: len(reading.records(0)) == 3)
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        timing = await engine.commit("step-1")
        assert (timing.snapshot, timing.streams_crossed) == ("step-1", 2)
        assert timing.pause_ms > 0
        assert wire_order(fake) == [
            "/pause",
            "/is_paused",
            "/is_paused",
            RELOAD,
            "/update_weight_version",
            "/resume",
        ]
        assert fake.calls[0] == "/pause?mode=keep&clear_cache=false"
        assert (fake.weights, fake.version) == (1, "1:step-1")
        with pytest.raises(StagingFailed):
            await engine.commit("step-1")
        for request in requests:
            request.to_the_end()
        assert (await reading.ended()).labels(0) == ["base"] * 3 + ["step-1"] * 6
        assert reading.labels(1) == ["step-1"] * 9


@pytest.mark.parametrize("broken", [True, False])
async def test_a_snapshot_that_vllm_refuses_leaves_the_old_one(tmp_path: Path, broken: bool) -> None:
    """broken: its weights were half loaded."""

    async with attached(tmp_path) as (engine, fake):
        reading, (one, two, three) = await begun(engine, fake, asking(n=3, max_tokens=6))
        one.step(2)
        two.step(1)
        await until(lambda: len(reading.records(0)) == 2 and len(reading.records(1)) == 1)
        await engine.stage("bad", write_weights(tmp_path / "bad", -1 if broken else 5))
        if not broken:
            fake.fault(RELOAD, "refuse")
        with pytest.raises(StagingFailed, match="a tensor is missing" if broken else "made up"):
            await engine.commit("bad")
        assert (fake.weights, fake.version, fake.paused) == (0, "0:base", False)
        three.step(1)
        # And the next one loads.
        await swap(engine, tmp_path, 1)
        for request in (one, two, three):
            request.to_the_end()
        await reading.ended()
        assert reading.errors == []
        assert [reading.labels(i).count("step-1") for i in range(3)] == [4, 5, 5]
        assert labelled_right([reading])
        await engine.stage("bad", write_weights(tmp_path / "bad", -1))
        with pytest.raises(StagingFailed):
            await engine.commit("bad")
        # What served, not the base.
        assert fake.weights == 1


@pytest.mark.parametrize(("step", "kind"), DOUBT)
async def test_what_leaves_open_which_weights_serve_ends_the_boot(
    tmp_path: Path, step: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(tmp_path) as (engine, fake):
        reasons: list[str] = []

        async def died(reason: str) -> None:
            reasons.append(reason)

        engine.on_death(died)
        reading, (request,) = await begun(engine, fake, asking(max_tokens=9))
        waiting, (queued,) = await begun(engine, fake, asking("waiting", max_tokens=9))
        request.step(2)
        await until(lambda: len(reading.records()) == 2)
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        with (
            faulty(monkeypatch, engine, fake, step, kind),
            pytest.raises(EngineDied, match="the switch to step-1 left vLLM in doubt"),
        ):
            await engine.commit("step-1")
        with pytest.raises(EngineDied):
            await anext(engine.generate(asking("late")))
        for stream in (reading, waiting):
            assert (await stream.ended()).died is not None
            assert stream.finishes == {}
        await until(lambda: request.gone and queued.gone, "nothing is left running")
        await until(lambda: len(reasons) == 1)
        assert labelled_right([reading, waiting])
        await engine.start()
        assert (fake.weights, fake.version, fake.paused) == (0, "0:base", False)
        again, (request,) = await begun(engine, fake, asking("again"))
        await swap(engine, tmp_path, 2)
        request.to_the_end()
        assert (await again.ended()).labels() == ["step-2"] * 4
        assert labelled_right([again])


@pytest.mark.parametrize(("path", "kind"), [(RELOAD, "refuse"), (RELOAD, "close"), ("/resume", "refuse")])
async def test_a_way_back_that_fails_ends_the_boot_too(tmp_path: Path, path: str, kind: str) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=9))
        request.step(2)
        await engine.stage("bad", write_weights(tmp_path / "bad", -1))
        fake.fault(path, *([None] if path == RELOAD else []), kind)
        with pytest.raises(EngineDied):
            await engine.commit("bad")
        assert (await reading.ended()).died is not None
        await engine.start()
        assert (fake.weights, fake.paused) == (0, False)


async def test_a_paused_engine_stays_paused_through_a_switch(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking())
        await engine.pause()
        await swap(engine, tmp_path, 1)
        await engine.stage("bad", write_weights(tmp_path / "bad", -1))
        with pytest.raises(StagingFailed):
            await engine.commit("bad")
        assert fake.paused
        assert fake.weights == 1
        await engine.resume()
        request.to_the_end()
        assert (await reading.ended()).labels() == ["step-1"] * 4
        await swap(engine, tmp_path, 2)
        assert not fake.paused


async def test_nothing_overtakes_a_switch(tmp_path: Path) -> None:
    """A resume, a pause or another switch that is asked for while weights are half loaded comes after it."""

    async with attached(tmp_path) as (engine, fake):
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        fake.gates[RELOAD] = asyncio.Event()
        gate = fake.gates[RELOAD]
        committing = asyncio.create_task(engine.commit("step-1"))
        await until(lambda: RELOAD in wire_order(fake))
        others = [
            asyncio.create_task(calling)
            for calling in (engine.resume(), engine.pause(), engine.commit("step-1"))
        ]
        calls = list(fake.calls)
        # The loop ran meanwhile.
        fresh, (request,) = await begun(engine, fake, asking("fresh"))
        assert fake.calls == calls
        gate.set()
        await committing
        results = await asyncio.gather(*others, return_exceptions=True)
        assert results[:2] == [None, None]
        assert isinstance(results[2], StagingFailed)
        assert fake.weights == 1
        await engine.resume()
        request.to_the_end()
        assert (await fresh.ended()).labels() == ["step-1"] * 4


async def test_a_switch_that_is_cancelled_half_way_ends_the_boot(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, _ = await begun(engine, fake, asking())
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        fake.gates[RELOAD] = asyncio.Event()
        committing = asyncio.create_task(engine.commit("step-1"))
        await until(lambda: RELOAD in wire_order(fake))
        committing.cancel()
        await asyncio.wait((committing,))
        assert committing.cancelled()
        assert (await reading.ended()).died is not None
        with pytest.raises(EngineDied):
            await engine.commit("step-1")


async def test_switches_one_after_another_go_back_to_the_one_before(tmp_path: Path) -> None:
    """The way back leads to what served, and its directory, not to a copy that is gone."""

    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=12))
        for number in (1, 2, 1):
            request.step(2)
            await until(lambda: len(reading.records()) == len(request.tokens))
            await swap(engine, tmp_path, number)
            await engine.stage("bad", write_weights(tmp_path / "bad", -1))
            with pytest.raises(StagingFailed):
                await engine.commit("bad")
            assert fake.weights == number
        request.to_the_end()
        wanted = ["base"] * 2 + ["step-1"] * 2 + ["step-2"] * 2 + ["step-1"] * 6
        assert (await reading.ended()).labels() == wanted
        assert reading.errors == []
        assert labelled_right([reading])


async def test_a_connection_that_is_lost_while_weights_load_is_lost_alone(tmp_path: Path) -> None:
    """The server is busy with the reload: what it says of its version then tells nothing."""

    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=9))
        other, (kept,) = await begun(engine, fake, asking("other"))
        request.step()
        await until(lambda: reading.records())
        await engine.stage("step-1", write_weights(tmp_path / "step-1", 1))
        fake.gates[RELOAD] = gate = asyncio.Event()
        committing = asyncio.create_task(engine.commit("step-1"))
        await until(lambda: RELOAD in wire_order(fake))
        request.cut()
        await reading.ended()
        assert (reading.died, len(reading.errors)) == (None, 1)
        gate.set()
        assert (await committing).streams_crossed == 1
        kept.to_the_end()
        assert (await other.ended()).labels() == ["step-1"] * 4


async def test_repr_says_what_serves(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, _):
        assert isinstance(engine, VllmEngine)
        assert "base" in repr(engine)
        await swap(engine, tmp_path, 1)
        assert "step-1" in repr(engine)


async def test_events_say_of_which_files_kv_is_and_what_a_refused_commit_announced_is_forgotten(
    tmp_path: Path,
) -> None:
    async with attached(tmp_path) as (engine, fake):

        async def files(name: str) -> list[str]:
            reading, (request,) = await begun(
                engine, fake, asking(name, salt=name.encode(), want_kv_snapshots=True)
            )
            request.to_the_end()
            return [event.kv_files for event in (await reading.ended()).events if event.kv_snapshots]

        assert set(await files("base")) == {""}
        engine.announce("refused", ())
        with pytest.raises(StagingFailed):
            await engine.commit("nothing is staged")
        await swap(engine, tmp_path, 1)
        assert set(await files("not announced")) == {""}
        await engine.stage("step-2", write_weights(tmp_path / "step-2", 2))
        engine.announce("its files", ())
        await engine.commit("step-2")
        assert set(await files("announced")) == {"its files"}
