"""A replica whose event loop stood still says so afterwards."""

import asyncio

import pytest

from midstream.replica.pulse import BEAT_S, KEPT_S, Pulse


def test_a_stall_is_told_for_a_while_and_a_beat_in_time_is_none(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    late = [0.0, 0.4, 3.0, 1.0, *[0.0] * int(KEPT_S / BEAT_S + 1)]
    told: list[float] = []
    pulse = Pulse("replica-0", lambda: told.append(pulse.stalled_s), lambda: now)

    async def sleep(delay_s: float) -> None:
        nonlocal now
        if not late:
            raise asyncio.CancelledError
        now += delay_s + late.pop(0)

    pulse = Pulse("replica-0", lambda: told.append(pulse.stalled_s), lambda: now, sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(pulse.run())
    assert told == [3.0, 3.0, 0.0]
    assert [record.getMessage() for record in caplog.records] == [
        "replica-0: the event loop stood still for 3.0 s",
        "replica-0: the event loop stood still for 1.0 s",
    ]
