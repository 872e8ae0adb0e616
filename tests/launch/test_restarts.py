"""How a running server is asked to replace its gateways, and what it says of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

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
