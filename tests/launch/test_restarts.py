"""How a running server is asked to replace its gateways, and what it says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midstream.launch.restart import Restarts


def test_a_server_does_not_say_whom_to_ask_before_it_can_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()

    async def restart() -> None: ...

    async def main() -> None:
        restarts = Restarts(path, restart)
        # The signal that asks is not handled yet.
        said_at_once = path.read_bytes()
        restarts.ask()
        while b'"restarts":1' not in path.read_bytes():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        restarts.close()
        assert said_at_once == b""

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_disk_that_takes_no_word_of_a_restart_prevents_no_later_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lock"
    path.touch()
    done = 0

    async def restart() -> None:
        nonlocal done
        done += 1
        # In the first one the file cannot be written.
        if done == 1:
            path.unlink()
        else:
            path.touch()

    async def main() -> None:
        restarts = Restarts(path, restart)
        for asked in (1, 2):
            restarts.ask()
            while done < asked:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        while not path.exists() or b'"restarts":2' not in path.read_bytes():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        restarts.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert f"{path}: cannot be written" in caplog.text
