"""Runs tests that are coroutines. A folder's conftest says on which event loop.

Always holds: one that hangs fails alone. The time limit of pytest-timeout would end the whole run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

#: Of the time limit that pytest-timeout has for the test.
DEADLINE = 0.8


def run_test(
    item: pytest.Function, run: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
) -> bool | None:
    """For the hook `pytest_pyfunc_call`. None: the test is no coroutine."""
    if not inspect.iscoroutinefunction(item.obj):
        return None
    given = {name: item.funcargs[name] for name in inspect.signature(item.obj).parameters}
    own = item.get_closest_marker("timeout")
    limit_s = float(item.config.getini("timeout") if own is None else own.args[0])

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE * limit_s):
            await item.obj(**given)

    run(bounded)
    return True
