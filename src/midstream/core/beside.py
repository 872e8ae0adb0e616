"""Work on large bodies and results, done beside the event loop.

Owns: the one thread that does it, and how a thread lets others go first.
Always holds: one job runs at a time, in the order in which they came. So jobs take no more of the interpreter than one thread
does. A thread helps where a job is many short steps: one call into C may hold the interpreter's lock as long as it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

_T = TypeVar("_T")
#: Reading as much takes a millisecond or two.
SMALL_BYTES = 2**16


#: So many items are written in one step.
STEP_ITEMS = 2**14


def stepwise_json(value: Any) -> bytes:
    """The bytes of msgspec.json.encode(value), which has no struct with a tag. It writes a long list in steps, so that no step
    holds the lock for long."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, msgspec.Struct):
        fields = zip(value.__struct_encode_fields__, msgspec.structs.astuple(value), strict=True)
        value = {name: item for name, item in fields if item is not UNSET}
    if isinstance(value, dict):
        yield b"{"
        for number, (name, item) in enumerate(value.items()):
            yield b"," * bool(number) + msgspec.json.encode(name) + b":"
            yield from _pieces(item)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | list | msgspec.Struct):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from _pieces(item)
        yield b"]"
    elif isinstance(value, list):
        yield b"["
        for at in range(0, len(value), STEP_ITEMS):
            yield b"," * bool(at) + msgspec.json.encode(value[at : at + STEP_ITEMS])[1:-1]
        yield b"]"
    else:
        yield msgspec.json.encode(value)


class Beside:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="beside")

    async def run(self, size: int, job: Callable[[], _T]) -> _T:
        """`job()`, which works on about `size` bytes: at once where that is little. A caller that is cancelled leaves it
        running."""
        return job() if size <= SMALL_BYTES else await self.always(job)

    async def always(self, job: Callable[[], _T]) -> _T:
        """Like `run`, for jobs that may take long whatever the size."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)


def lower_priority(niceness: int) -> None:
    """Lower the priority of this thread, and of the threads that it starts."""
    # On other systems this would change the priority of the whole process.
    if sys.platform == "linux" and niceness:
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            now = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, now + niceness)


#: Of this process.
beside = Beside()
