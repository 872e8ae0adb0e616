"""What an event loop that stood still reports afterwards, and what of it was its own process's doing."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

from midstream.core.pulse import BEAT_S, KEPT_S, STALL_S, Pulse, ThreadTimes, own_s


def test_a_delay_is_told_for_a_while_and_a_beat_in_time_is_none(caplog: pytest.LogCaptureFixture) -> None:
    told: list[float] = []
    pulse = Pulse("replica-0")
    pulse.on_change = lambda: told.append(pulse.stalled_s)
    now_s = 0.0
    for late_s in (0.0, 0.4, 3.0, 1.0, *[0.0] * int(KEPT_S / BEAT_S + 1)):
        now_s += BEAT_S + late_s
        pulse.look(now_s, late_s, 0.0, late_s)
    assert told == [3.0, 3.0, 0.0]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "replica-0: the event loop stood still for 3.0 s",
        "replica-0: the event loop stood still for 1.0 s",
    ]


@pytest.mark.parametrize(
    ("computed_s", "unserved_s", "stall_s"),
    [
        # It computed, and had a core all the time.
        (0.2, 0.0, 0.2),
        # It blocked in a call.
        (0.001, 0.0, 0.2),
        # It was ready, and others had the cores.
        (0.001, 0.199, 0.001),
        (0.08, 0.12, 0.08),
        # The system does not tell.
        (0.2, None, 0.2),
        (0.001, None, 0.001),
        # Two threads had no core.
        (0.001, 0.39, 0.001),
        (0.15, 0.39, 0.15),
    ],
)
def test_a_stall_is_what_the_process_did_and_not_what_a_busy_machine_took(
    computed_s: float, unserved_s: float | None, stall_s: float
) -> None:
    assert own_s(0.2, computed_s, unserved_s) == pytest.approx(stall_s)
    found: list[float] = []
    pulse = Pulse("tinker")
    pulse.on_stall = found.append
    pulse.look(1.0, 0.2, computed_s, unserved_s)
    assert found == ([pytest.approx(stall_s)] if stall_s > STALL_S else [])


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize("step", [compute, time.sleep])
def test_a_step_that_computes_or_blocks_is_counted_once(
    step: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadTimes, "unserved_s", lambda self: 0.0)
    found: list[float] = []

    async def stand_still() -> None:
        pulse, heard = Pulse("gateway"), asyncio.Event()

        def hear(seconds: float) -> None:
            found.append(seconds)
            heard.set()

        pulse.on_stall = hear
        pulse.start()
        try:
            step(4 * STALL_S)
            await heard.wait()
        finally:
            pulse.stop()

    asyncio.run(asyncio.wait_for(stand_still(), 30.0))
    assert len(found) == 1
    assert found[0] > STALL_S


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells it")
def test_the_system_says_how_long_threads_had_no_core_and_those_that_ended_are_passed_over() -> None:
    scheduler, over = ThreadTimes(), threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    files = len(os.listdir("/proc/self/fd"))
    assert scheduler.unserved_s() == 0.0
    over.set()
    thread.join()
    told = scheduler.unserved_s()
    assert told is not None
    assert 0.0 <= told < 60.0
    scheduler.close()
    assert len(os.listdir("/proc/self/fd")) == files
