"""An engine's silence is counted only while somebody listened."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from engine_helpers import request

from midstream.core.config import EngineSettings
from midstream.engine.base import EngineDied
from midstream.engine.embedded.engine import EmbeddedEngine
from midstream.engine.silence import CHECK_INTERVAL_S, SilenceTimer, StillnessTimer, cpu_ticks

pytestmark = pytest.mark.slow


def test_the_time_in_which_nobody_looked_is_not_silence() -> None:
    silence = SilenceTimer(100.0)
    assert silence.update(101.0) == 1.0
    assert silence.update(102.5) == 2.5
    assert silence.update(190.0) == 2.5 + 2 * CHECK_INTERVAL_S
    silence.heard()
    assert silence.update(191.0) == 1.0


def test_a_process_that_computes_is_not_still() -> None:
    stillness = StillnessTimer(0.0)
    assert [stillness.update(float(now), now) for now in range(1, 60)] == [1.0] * 59
    assert [stillness.update(float(now), 59) for now in range(60, 64)] == [2.0, 3.0, 4.0, 5.0]
    stillness.heard()
    assert stillness.update(64.0, 59) == 1.0


def test_a_process_whose_time_is_unknown_is_not_still() -> None:
    stillness = StillnessTimer(0.0)
    assert [stillness.update(float(now), None) for now in range(1, 60)] == [1.0] * 59
    assert cpu_ticks(2**22 + 1) is None


def test_the_time_of_a_process_grows_while_it_computes() -> None:
    before = cpu_ticks(os.getpid())
    assert before is not None
    while cpu_ticks(os.getpid()) == before:
        pass


async def test_a_stopped_engine_is_found_long_before_one_that_computes_for_long(
    tiny_model: Callable[..., Path],
) -> None:
    assert EngineSettings().hang_s_max == 8.0
    settings = EngineSettings(kv_cache_tokens=8192, silence_s_max=3600.0, hang_s_max=1.5)

    engine = EmbeddedEngine(tiny_model(), settings)
    dead = asyncio.Event()

    async def died(reason: str) -> None:
        dead.set()

    engine.on_death(died)
    await engine.start()
    stream = engine.generate(request("r", [1, 2, 3], max_tokens=4000, echo=0))
    await anext(stream)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineDied):
        await engine.commit("step-1")
    with pytest.raises(EngineDied):
        async for _ in stream:
            pass
    await dead.wait()
    await engine.close()


def hold_the_interpreter(lasts_s: float) -> None:
    """As a native call does that keeps the interpreter lock: no other thread of the process gets on."""
    ctypes.PyDLL(None).usleep(int(lasts_s * 1e6))


def test_an_engine_is_not_killed_because_the_replicas_own_loop_stood_still(
    tiny_model: Callable[..., Path],
) -> None:
    settings = EngineSettings(kv_cache_tokens=8192, silence_s_max=4.0)

    async def main() -> None:
        engine = EmbeddedEngine(tiny_model(), settings)
        await engine.start()
        pid = engine.pid
        for name in ("before", "after"):
            got = [event async for event in engine.generate(request(name, [1, 2, 3], max_tokens=2, echo=0))]
            assert got[-1].finish == "length"
            if name == "before":
                await asyncio.to_thread(hold_the_interpreter, settings.silence_s_max + 1)
                await asyncio.sleep(0.1)
        assert engine.pid == pid
        await engine.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
