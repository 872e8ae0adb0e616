"""The memory of large bodies, given back to the system.

Owns: when the C library's heaps of this process are trimmed, and how large a block is mapped instead. A body, what it was
decoded to and their copies are freed piece by piece, and lie between pieces that are in use: the library keeps their pages.
Hundreds of megabytes stayed after a few bodies.
Always holds: after the last large body there is a trim; at most one each TRIM_AFTER_S, and none without large bodies.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable

#: Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Of one connection, in bytes. Smaller bodies leave room that the next ones use.
LARGE = 2**19
#: For what still refers to a body when its connection lets go of it.
TRIM_AFTER_S = 1.0


def trim_memory() -> None:
    """Free pages go back to the system. With a C library that has no such call nothing is done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_memory() -> None:
    """Have the memory of a large body go back to the system when the body is freed.

    glibc raises its thresholds for that to the size of the largest block that was freed. Setting them fixes them. With another
    C library nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Blocks above 1 MiB are mapped, and 16 MiB at most are kept at the end of the heap.
        mallopt(_M_MMAP_THRESHOLD, 2**20)
        mallopt(_M_TRIM_THRESHOLD, 16 * 2**20)


def _trim_beside() -> None:
    """On a thread of its own: hundreds of megabytes take longer than a stream should wait."""
    threading.Thread(target=trim_memory, name="trim", daemon=True).start()


class Heap:
    def __init__(self, trim: Callable[[], None] = _trim_beside) -> None:
        self._trim = trim
        # The loop that a trim waits in. A loop that has ended runs none.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._again = False

    def freed(self, size: int) -> None:
        """Note that so many bytes of bodies are not needed any more, or not for long. Call in a running event loop."""
        if size < LARGE:
            return
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            self._again = True
        else:
            self._loop, self._again = loop, False
            loop.call_later(TRIM_AFTER_S, self._run)

    def _run(self) -> None:
        self._trim()
        self._loop, again, self._again = None, self._again, False
        if again:
            # Bodies that went since then may not have been free yet.
            self.freed(LARGE)


#: Of this process.
heap = Heap()
