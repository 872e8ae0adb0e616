"""Tells the engine of files while threads still make or digest them.

Always holds: the engine hears of it in the event loop, in the order of the threads, and in the swap's own context.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from pathlib import Path

from midstream.engine.base import Slot


class Ahead:
    """Has the engine read what a rebuild makes or a fetch links, tensor by tensor. It is their `Making`."""

    def __init__(self, engine: Slot, snapshot: str) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self._loop = asyncio.get_running_loop()
        # Those threads have none of their own.
        self._context = contextvars.copy_context()
        self._made: deque[str] = deque()

    def begun(self, directory: Path) -> None:
        self._soon(self._engine.stage_ahead, self._snapshot, directory)

    def made(self, tensor: str) -> None:
        self._made.append(tensor)
        self._soon(self._tell)

    def given_up(self) -> None:
        self._soon(self._engine.drop_staged)

    def _tell(self) -> None:
        """Several at a time, when the loop was busy."""
        tensors = [self._made.popleft() for _ in range(len(self._made))]
        if tensors:
            self._engine.tensors_made(tensors)

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(call, *arguments, context=self._context)
