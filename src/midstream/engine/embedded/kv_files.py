"""KV on its way between a replica process and its engine process: in memory that both map, as a file without a name.

The channel between them is read between steps, a little at a time. A piece of KV in it would hold up every command behind it.
Owns: both ends of such a file. Imports no torch.
Always holds: a file is made for one call, and lives until the engine has answered it or is gone. The engine opens the file that
was meant, and no other one that has got its number since.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable

import numpy as np

from midstream.engine.base import StagingFailed
from midstream.engine.embedded import protocol as m
from midstream.engine.kv_copies import KvCopies, KvForm, KvPiece, KvPlace, KvRefused
from midstream.snapshots.tasks import finished

Call = Callable[[Callable[[int], m.Command]], Awaitable[m.CallDone]]


def mapped(file: m.KvFile) -> tuple[bytes, np.ndarray]:
    """The tokens in a file, and the bytes behind them. Raises KvRefused."""
    try:
        opened = os.open(f"/proc/{file.process}/fd/{file.number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(opened)
            if (found.st_dev, found.st_ino, found.st_size) != (file.device, file.inode, file.size):
                raise KvRefused("the file is another one by now")
            data = np.frombuffer(mmap.mmap(opened, file.size), dtype=np.uint8)
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:
        raise KvRefused(f"the file of a piece: {error}") from error
    return data[: file.tokens].tobytes(), data[file.tokens :]


class EmbeddedCopies(KvCopies):
    """call: as _PolicySlot has it."""

    def __init__(self, form: KvForm, call: Call) -> None:
        self.form = form
        self._call = call

    async def give(
        self, place: KvPlace, first: int, most: int, kv_age_max: int | None
    ) -> tuple[KvPiece, bytes]:
        room = most * self.form.block_bytes

        def command(call: int, file: m.KvFile) -> m.Command:
            return m.GiveKv(call, file, place.salt, place.policy, first, most, kv_age_max)

        done, content = await self._between(place.tokens, b"", room, command)
        if done.kv is None:
            raise KvRefused("the engine gives nothing")
        return done.kv, content[: done.kv.count * self.form.block_bytes]

    async def take(self, place: KvPlace, part: KvPiece, content: bytes, session: str, kept_s: float) -> int:
        def command(call: int, file: m.KvFile) -> m.Command:
            return m.TakeKv(call, file, place.salt, place.policy, part, session, kept_s)

        done, _ = await self._between(place.tokens, content, 0, command)
        return done.kv_blocks

    async def _between(
        self, tokens: bytes, content: bytes, room: int, command: Callable[[int, m.KvFile], m.Command]
    ) -> tuple[m.CallDone, bytes]:
        """Who leaves early takes no file from under the engine."""
        left = asyncio.Event()
        task = asyncio.ensure_future(self._called(tokens, content, room, command, left))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(task)
        finally:
            # From now on the session may end, and the engine may hear of that first.
            left.set()

    async def _called(
        self,
        tokens: bytes,
        content: bytes,
        room: int,
        command: Callable[[int, m.KvFile], m.Command],
        left: asyncio.Event,
    ) -> tuple[m.CallDone, bytes]:
        try:
            number = os.memfd_create("midstream-kv", os.MFD_CLOEXEC)
        except OSError as error:
            raise KvRefused(str(error)) from error
        try:
            await finished(_fill, number, tokens, content, room)
            found = os.fstat(number)
            file = m.KvFile(
                os.getpid(), number, found.st_dev, found.st_ino, found.st_size, tokens=len(tokens)
            )
            if left.is_set():
                raise KvRefused("nobody waits for it")
            done = await self._call(lambda call: command(call, file))
            return done, await finished(os.pread, number, room, len(tokens)) if room else b""
        except (StagingFailed, OSError) as error:
            raise KvRefused(str(error)) from error
        finally:
            os.close(number)


def _fill(number: int, tokens: bytes, content: bytes, room: int) -> None:
    os.ftruncate(number, len(tokens) + len(content) + room)
    at = 0
    for data in (tokens, content):
        while data:
            done = os.pwrite(number, data, at)
            at, data = at + done, data[done:]
