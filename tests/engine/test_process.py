"""The Engine port over a real engine process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from engine_helpers import request

from midstream.config import EngineSettings
from midstream.engine.base import EngineDied, StagingFailed
from midstream.engine.embedded import messages as m
from midstream.engine.embedded.process import EmbeddedEngine
from midstream.types import GenerateRequest, GenerationEvent, TokenRecord


def with_engine(model: Path, body: Callable[[EmbeddedEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(model, EngineSettings(kv_cache_tokens=8192))
        await engine.start()
        try:
            await body(engine)
        finally:
            await engine.close()
        assert engine.pid is None

    asyncio.run(main())


async def records(engine: EmbeddedEngine, wanted: GenerateRequest) -> list[TokenRecord]:
    return [record async for event in engine.generate(wanted) for record in event.tokens]


async def blocks_in_use(engine: EmbeddedEngine, expected: int) -> None:
    """Returns once the engine reports that many; the test's timeout is the other way out."""
    while engine.stats().kv_blocks_used != expected:  # noqa: ASYNC110 - it reports on its own clock
        await asyncio.sleep(0.01)


def test_a_stream_crosses_a_swap_and_an_unstaged_commit_is_refused(tiny_model: Callable[..., Path]) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        stream = engine.generate(request("r", [1, 2, 3], max_tokens=1500, echo=0))
        first = await anext(stream)
        with pytest.raises(StagingFailed, match="not the staged snapshot"):
            await engine.commit("step-1")
        await engine.stage("step-1", tiny_model(seed=1))
        timing = await engine.commit("step-1")
        assert (timing.snapshot, timing.streams_crossed) == ("step-1", 1)
        rest: list[GenerationEvent] = [event async for event in stream]
        labels = [r.snapshot for event in (first, *rest) for r in event.tokens]
        assert len(labels) == 1500
        switch = labels.index("step-1")
        assert labels == ["base"] * switch + ["step-1"] * (1500 - switch)
        assert rest[-1].finish == "length"

    with_engine(tiny_model(), body)


def test_files_that_are_no_model_are_refused_and_the_old_weights_go_on(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        before = await records(engine, request("a", [5, 6], max_tokens=6, echo=0))
        with pytest.raises(StagingFailed):
            await engine.stage("broken", tmp_path)
        after = await records(engine, request("b", [5, 6], max_tokens=6, echo=0))
        assert [r.token_id for r in after] == [r.token_id for r in before]
        assert {r.snapshot for r in after} == {"base"}

    with_engine(tiny_model(), body)


def test_closing_a_stream_frees_its_blocks_and_leaves_the_others_alone(
    tiny_model: Callable[..., Path],
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        other = asyncio.create_task(records(engine, request("other", [9, 9], max_tokens=300, echo=0)))
        stream = engine.generate(request("gone", list(range(200)), max_tokens=4000, echo=0))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert len(await other) == 300
        await blocks_in_use(engine, 0)

    with_engine(tiny_model(), body)


def test_a_pause_stops_steps_and_a_resume_loses_nothing(tiny_model: Callable[..., Path]) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        expected = await records(engine, request("a", [4, 4], max_tokens=200, echo=0))
        task = asyncio.create_task(records(engine, request("b", [4, 4], max_tokens=200, echo=0)))
        await asyncio.sleep(0)
        await engine.pause()
        assert not task.done()
        await engine.resume()
        assert [r.token_id for r in await task] == [r.token_id for r in expected]

    with_engine(tiny_model(), body)


def test_when_the_process_is_killed_streams_raise_and_a_new_start_serves_again(
    tiny_model: Callable[..., Path],
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        reasons: list[str] = []
        told = asyncio.Event()

        async def note(reason: str) -> None:
            reasons.append(reason)
            told.set()

        engine.on_death(note)
        stream = engine.generate(request("r", [1, 2, 3], max_tokens=4000, echo=0))
        await anext(stream)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            async for _ in stream:
                pass
        await told.wait()
        assert reasons == ["the engine process ended with code -9"]
        with pytest.raises(EngineDied):
            await records(engine, request("early", [1], max_tokens=1, echo=0))
        await engine.start()
        assert len(await records(engine, request("again", [1, 2, 3], max_tokens=5, echo=0))) == 5

    with_engine(tiny_model(), body)


def test_a_missing_model_is_reported_with_its_reason(tmp_path: Path) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(tmp_path / "nowhere", EngineSettings())
        with pytest.raises(EngineDied, match="nowhere"):
            await engine.start()
        await engine.close()

    asyncio.run(main())


def test_an_engine_that_does_not_load_in_time_is_ended_and_the_reason_names_the_limit(
    tiny_model: Callable[..., Path],
) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(tiny_model(), EngineSettings(load_s_max=0.01))  # an interpreter takes longer
        with pytest.raises(EngineDied, match=r"not loaded within 0\.01 s \(load_s_max\)"):
            await engine.start()
        assert engine.pid is None
        with pytest.raises(EngineDied, match="not running"):
            await engine.pause()

    asyncio.run(main())


def test_messages_are_whole_however_the_socket_cuts_them() -> None:
    sent: list[m.Command] = [m.Pause(1), m.Abort("r" * 300, 2), m.Resume(3)]
    data = b"".join(map(m.frame, sent))
    for size in (1, 3, 5, len(data)):
        frames = m.Frames()
        cut = [data[i : i + size] for i in range(0, len(data), size)]
        assert [m.command_decoder.decode(body) for part in cut for body in frames.feed(part)] == sent


def test_a_newer_staging_supersedes_the_one_before_and_only_it_can_be_committed(
    tiny_model: Callable[..., Path],
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        snapshots = [tiny_model(seed=i) for i in (1, 2, 3)]
        results = await asyncio.gather(
            *(engine.stage(f"step-{i}", path) for i, path in enumerate(snapshots, start=1)),
            return_exceptions=True,
        )
        assert results[-1] is None
        assert [type(r) for r in results[:-1]] == [StagingFailed, StagingFailed]
        with pytest.raises(StagingFailed):
            await engine.commit("step-2")
        await engine.commit("step-3")
        got = await records(engine, request("r", [1, 2], max_tokens=3, echo=0))
        assert {r.snapshot for r in got} == {"step-3"}

    with_engine(tiny_model(), body)


def test_a_choice_that_is_ended_gives_no_further_event_and_the_iterator_ends_with_the_last(
    tiny_model: Callable[..., Path],
) -> None:
    async def body(engine: EmbeddedEngine) -> None:
        counts = {0: 0, 1: 0}
        async for event in engine.generate(request("r", [1, 2], n=2, max_tokens=60, echo=0)):
            counts[event.index] += len(event.tokens)
            if counts[1] == 3:
                engine.end_choice("r", 1)
        assert counts == {0: 60, 1: 3}
        stream = engine.generate(request("s", [1, 2], max_tokens=4000, echo=0))
        await anext(stream)
        engine.end_choice("s", 0)
        assert [event async for event in stream] == []
        await blocks_in_use(engine, 0)

    with_engine(tiny_model(), body)


def test_an_engine_that_goes_silent_is_killed(tiny_model: Callable[..., Path]) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(tiny_model(), EngineSettings(kv_cache_tokens=8192, silence_s_max=2.0))
        await engine.start()
        stream = engine.generate(request("r", [1, 2, 3], max_tokens=4000, echo=0))
        await anext(stream)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineDied):
            async for _ in stream:
                pass
        await engine.close()

    asyncio.run(main())
