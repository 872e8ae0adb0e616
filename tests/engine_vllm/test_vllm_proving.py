"""Weights that fail their check, and numbers that are not finite: nothing of them is served, and vLLM is started anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_vllm import FakeVllm, until, write_weights
from vllm_helpers import Reading, asking, attached, begun, swap

from midstream.engine.base import EngineDied, StreamLost
from midstream.engine.vllm.engine import VllmEngine
from midstream.engine.vllm.life import SPOILT
from midstream.engine.vllm.protocol import NOT_FINITE


class Losing(Reading):
    """lost: how the engine gave the request up."""

    lost: StreamLost | None = None

    async def _read(self) -> None:
        try:
            await super()._read()
        except StreamLost as error:
            self.lost = error


async def switched(engine: VllmEngine, folder: Path, number: int) -> None:
    await engine.stage(f"step-{number}", write_weights(folder / f"step-{number}", number))
    await engine.commit(f"step-{number}")


@pytest.mark.parametrize("sound", [True, False])
async def test_what_is_sampled_after_a_switch_waits_for_the_check(tmp_path: Path, sound: bool) -> None:
    """Of a stream that crossed it, of one that ends meanwhile, and of a newcomer; the check itself waits for nothing."""

    async with attached(tmp_path, kind=VllmEngine) as (engine, fake):
        streams = [Losing(engine, asking(f"r{i}", max_tokens=6)) for i in range(2)]
        await until(lambda: len(fake.requests) == 2)
        for request in fake.requests:
            request.step(2)
        await until(lambda: all(len(stream.records()) == 2 for stream in streams))
        await switched(engine, tmp_path, 1)
        streams.append(Losing(engine, asking("newcomer", max_tokens=6)))
        scored = Losing(engine, asking("scored", max_tokens=0, prompt_records=3))
        await until(lambda: len(fake.requests) == 3)
        fake.requests[0].step(1)
        fake.requests[1].to_the_end()
        fake.requests[2].step(3)
        check = Losing(engine, asking("canary", max_tokens=0, prompt_records=3, urgent=True))
        assert (await check.ended()).events[0].prompt is not None
        assert [len(stream.records()) for stream in streams] == [2, 2, 0]
        assert scored.events == []
        engine.settle("step-1", sound=sound)
        if sound:
            fake.requests[0].to_the_end()
            fake.requests[2].to_the_end()
            for stream in streams:
                assert (await stream.ended()).finishes == {0: "length"}
            assert [stream.labels() for stream in streams] == [
                ["base"] * 2 + ["step-1"] * 4,
                ["base"] * 2 + ["step-1"] * 4,
                ["step-1"] * 6,
            ]
            assert (await scored.ended()).events[0].prompt is not None
            return
        for stream in (*streams, scored):
            await stream.ended()
            assert stream.lost is not None
            assert stream.finishes == {}
        assert [stream.labels() for stream in streams] == [["base"] * 2, ["base"] * 2, []]
        await until(lambda: all(request.gone for request in fake.requests), "vLLM computes them no more")
        late = await Losing(engine, asking("late")).ended()
        assert isinstance(late, Losing)
        assert late.lost is not None


async def test_a_request_that_is_aborted_before_the_check_ends_with_what_it_had(tmp_path: Path) -> None:
    async with attached(tmp_path, kind=VllmEngine) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=6))
        request.step(2)
        await until(lambda: len(reading.records()) == 2)
        await switched(engine, tmp_path, 1)
        request.step(2)
        check = await Reading(engine, asking("canary", max_tokens=0, prompt_records=3, urgent=True)).ended()
        assert check.events
        engine.abort("r")
        assert (await reading.ended()).finishes == {0: "abort"}
        assert reading.labels() == ["base"] * 2


async def test_a_log_probability_is_asked_for_though_the_client_wants_none(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(want_logprobs=False))
        assert request.sampling["logprobs"] == 0
        request.to_the_end()
        assert len((await reading.ended()).records()) == 4


@pytest.mark.parametrize("whole_server", [False, True])
async def test_a_token_of_nan_fails_its_request_or_ends_the_boot(tmp_path: Path, whole_server: bool) -> None:
    """whole_server: a prompt of our own has no finite numbers either, so the cache or the weights are to blame."""

    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=9, want_logprobs=False))
        other, (well,) = await begun(engine, fake, asking("other", max_tokens=9))
        fake.nan_scores = whole_server
        request.sample()
        request.write([(0, NOT_FINITE)])
        await reading.ended()
        assert reading.records() == []
        if not whole_server:
            assert "not finite" in reading.errors[0]
            well.to_the_end()
            assert len((await other.ended()).records()) == 9
            return
        assert reading.died is not None
        assert (await other.ended()).died is not None
        # It is not ours to start anew: whoever attaches to it is told.
        with pytest.raises(EngineDied, match="restart it"):
            await engine.start()
        assert fake.version == SPOILT
        fake.nan_scores = False
        await fake.restart()
        await engine.start()
        again, (request,) = await begun(engine, fake, asking("again"))
        request.to_the_end()
        assert len((await again.ended()).records()) == 4


async def test_a_token_of_nan_is_judged_in_a_pause_where_checks_are_computed_in_one(tmp_path: Path) -> None:
    def set_up(fake: FakeVllm) -> None:
        fake.checks_in_pause = fake.by_priority = True

    async with attached(tmp_path, set_up=set_up) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking(max_tokens=9))
        await engine.pause()
        request.write([(0, NOT_FINITE)])
        assert "not finite" in (await reading.ended()).errors[0]


@pytest.mark.parametrize("name", ["step-2", "step-1"])
async def test_the_next_weights_after_a_failed_check_get_a_new_server(tmp_path: Path, name: str) -> None:
    """So do good files that come under the name of those that failed: the KV cache is as bad for them."""

    async with attached(tmp_path, kind=VllmEngine) as (engine, _):
        await switched(engine, tmp_path, 1)
        engine.settle("step-1", sound=False)
        await engine.stage(name, write_weights(tmp_path / "good", 2))
        with pytest.raises(EngineDied):
            await engine.commit(name)
        with pytest.raises(EngineDied, match="restart it"):
            await engine.start()


async def proved(*_: object) -> None:
    pass


async def test_a_server_of_our_own_is_started_anew_within_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(tmp_path, kind=VllmEngine) as (engine, fake):
        await switched(engine, tmp_path, 1)
        engine.settle("step-1", sound=False)
        # As one that this process started, and whose reloads are proved already.
        monkeypatch.setattr(engine, "_attached", False)
        monkeypatch.setattr("midstream.engine.vllm.server_proofs.prove_reload", proved)
        starts: list[str] = []
        start = engine._server.start

        async def started() -> None:
            starts.append("start")
            await fake.restart()
            await start()

        monkeypatch.setattr(engine._server, "start", started)
        fake.calls.clear()
        await switched(engine, tmp_path, 2)
        assert starts == ["start"]
        assert (fake.weights, fake.version) == (2, "1:step-2")
        engine.settle("step-2", sound=True)
        reading, (request,) = await begun(engine, fake, asking())
        request.to_the_end()
        assert (await reading.ended()).labels() == ["step-2"] * 4


async def test_a_pause_holds_up_the_check_and_what_it_waits_for(tmp_path: Path) -> None:
    async with attached(tmp_path) as (engine, fake):
        reading, (request,) = await begun(engine, fake, asking())
        await engine.until_computing()
        await engine.pause()
        waiting = asyncio.create_task(engine.until_computing())
        await swap(engine, tmp_path, 1)
        assert fake.paused
        assert not waiting.done()
        await engine.resume()
        await waiting
        request.to_the_end()
        assert (await reading.ended()).labels() == ["step-1"] * 4
        await engine.pause()
        waiting = asyncio.create_task(engine.until_computing())
        await engine.close()
        with pytest.raises(EngineDied):
            await waiting
