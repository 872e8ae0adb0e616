"""An engine's silence is counted only while somebody listened."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from engine_helpers import request

from midstream.core.config import EngineSettings
from midstream.engine.base import CHECK_INTERVAL_S, SilenceTimer
from midstream.engine.embedded.engine import EmbeddedEngine

pytestmark = pytest.mark.slow


def test_the_time_in_which_nobody_looked_is_not_silence() -> None:
    silence = SilenceTimer(100.0)
    assert silence.update(101.0) == 1.0
    assert silence.update(102.5) == 2.5
    assert silence.update(190.0) == 2.5 + 2 * CHECK_INTERVAL_S
    silence.heard()
    assert silence.update(191.0) == 1.0


def hold_the_interpreter(lasts_s: float) -> None:
    """As a native call does that keeps the interpreter lock: no other thread of the process gets on."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)
    until = time.monotonic() + lasts_s
    while time.monotonic() < until:
        pass
    sys.setswitchinterval(before)


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
