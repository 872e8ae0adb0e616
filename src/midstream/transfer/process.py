"""The replica's end of a receiver process. Imports no torch.

Owns: the process, the calls under way, and the files of an update until they are handed over.
Always holds: a call that is not answered in time kills the process, and so does one that fails. When the process ends, every
call ends with ReplicaUnavailable, which says why. What it leaves is removed when the process is gone. Nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from midstream.core.errors import InvalidRequest, ReplicaUnavailable
from midstream.core.transfer import STORE_PREFIX, Received, Rendezvous, SentTensors, TrainerState
from midstream.core.types import FileContent
from midstream.http import ipc
from midstream.replica.transfer import Receiver
from midstream.snapshots.layout import CONFIG_FILE, WEIGHTS_FILE, CheckpointSpec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.tasks import finished
from midstream.transfer import protocol as m
from midstream.transfer.files import UpdateFiles
from midstream.transfer.layout import UpdateLayout
from midstream.transfer.trainer_store import TrainerStore

log = logging.getLogger(__name__)

#: The time limits of torch are longer than the replica's by so much: the replica's decide.
LONGER_S = 60.0
#: The process is asked so often whether it lives, in seconds. One that does not answer for SILENT_S stands still.
PING_S = 5.0
SILENT_S = 30.0


class _ReceiverLink(ipc.Link[m.OrderDone]):
    """Our end of the socket. calls: those under way, by number."""

    def __init__(self, calls: dict[int, asyncio.Future[m.OrderDone]]) -> None:
        super().__init__(m.done_decoder)
        self._calls = calls

    def received(self, message: m.OrderDone) -> None:
        future = self._calls.get(message.call)
        if future is not None and not future.done():
            future.set_result(message)


class GlooReceiver(Receiver[Rendezvous, SentTensors]):
    """base: of the served model. base_directory: has its configuration. cache: has room for updates."""

    def __init__(self, base: CheckpointSpec, base_directory: Path, cache: SnapshotCache) -> None:
        self._base = base
        self._files = UpdateFiles(base_directory / CONFIG_FILE, cache)
        self._process: subprocess.Popen[bytes] | None = None
        self._link: _ReceiverLink | None = None
        self._calls: dict[int, asyncio.Future[m.OrderDone]] = {}
        self._numbers = itertools.count(1)
        self._rendezvous: Rendezvous | None = None
        self._trainer: TrainerStore | None = None
        self._layout: UpdateLayout | None = None
        # Why it ended; None: it has not.
        self._reason: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self._pings: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"GlooReceiver(pid={self.pid}, calls={len(self._calls)}, {self._layout!r})"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def join(self, rendezvous: Rendezvous, within_s: float) -> None:
        _check_rendezvous(rendezvous)
        self._rendezvous = rendezvous
        now = asyncio.get_running_loop().time
        until = now() + within_s
        process, link = await ipc.spawn("midstream.transfer.receiver", lambda: _ReceiverLink(self._calls))
        self._process, self._link = process, link
        self._watch = asyncio.create_task(self._watch_end(process, link), name="end of the receiver process")
        if self._reason is not None:
            # Ended while it was started.
            process.kill()
        await self._call(
            lambda call: m.JoinGroup(
                call,
                rendezvous.master_address,
                rendezvous.master_port,
                rendezvous.world_size,
                rendezvous.rank_offset,
                f"{STORE_PREFIX}/{rendezvous.key}",
                within_s + LONGER_S,
            ),
            within_s,
            f"form its group of {rendezvous.world_size}",
        )
        trainer = TrainerStore(rendezvous.master_address, rendezvous.master_port)
        if not await trainer.mark(max(0.0, until - now())):
            self.end(f"the trainer's store does not answer ({trainer!r})")
            raise ReplicaUnavailable(self._reason or "")
        self._trainer = trainer
        self._pings = asyncio.create_task(self._ask_for_life(), name="questions to the receiver process")

    async def begin(self, within_s: float) -> None:
        # Headers of large models are megabytes: in threads, here and in `finish`.
        layout = await finished(UpdateLayout, self._base)
        await self._files.make(layout.bytes_max)
        path = str(self._files.weights)
        try:
            await self._call(lambda call: m.OpenFile(call, path), within_s, "open its file")
        except BaseException:
            await self._files.remove()
            raise
        self._layout = layout

    def check(self, sent: SentTensors) -> None:
        self._open_layout.check(sent)

    async def receive(self, sent: SentTensors, within_s: float) -> None:
        assert self._rendezvous is not None
        ranges = self._open_layout.place(sent)
        piece_bytes = None
        if self._rendezvous.packed:
            ranges = [(ranges[0][0], ranges[-1][1])]
            piece_bytes = self._rendezvous.packed_buffer_size_bytes
        await self._call(
            lambda call: m.ReceiveRanges(call, ranges, piece_bytes, within_s + LONGER_S),
            within_s,
            f"get {len(sent.names)} tensors",
            f"lost the trainer at {self._rendezvous.master_address}:{self._rendezvous.master_port}, "
            "or another member of its group: ",
        )

    def check_complete(self) -> None:
        self._open_layout.check_complete()

    async def finish(self, within_s: float) -> Received:
        layout = self._open_layout
        # Its end removes the files, which its part may hear of later.
        self._living()
        try:
            config = await self._files.config_content()
        except OSError:
            self._living()
            raise
        header = await finished(layout.header)
        answer = await self._call(
            lambda call: m.CloseFile(call, header, layout.end), within_s, "close its file"
        )
        if answer.finite:
            await self._files.note_finite()
        weights = FileContent(WEIGHTS_FILE, layout.end, answer.digest)
        return Received(content=(config, weights), received_bytes=layout.sent_bytes)

    def hand_over(self) -> Path:
        self._layout = None
        return self._files.hand_over()

    def drop(self) -> None:
        self._layout = None
        self._files.drop()
        if self._link is not None and not self._link.transport.is_closing():
            self._link.send(m.ForgetFile(next(self._numbers)))

    async def trainer_state(self, within_s: float) -> TrainerState:
        if self._trainer is None:
            # It is about to join.
            return TrainerState.UNKNOWN
        return await self._trainer.look(within_s)

    def end(self, reason: str) -> None:
        if self._reason is not None:
            return
        self._reason = reason
        if self._process is not None:
            self._process.kill()
        self._fail_calls()

    async def ended(self) -> str:
        if self._watch is not None:
            await asyncio.shield(self._watch)
        return self._reason or "the receiver was not started"

    @property
    def _open_layout(self) -> UpdateLayout:
        assert self._layout is not None
        return self._layout

    async def _call(
        self, build: Callable[[int], m.Order], within_s: float, what: str, failed: str = ""
    ) -> m.OrderDone:
        """what: the process is to do. failed: begins the message when it cannot. Raises ReplicaUnavailable."""
        link = self._living()
        try:
            async with asyncio.timeout(within_s):
                answer = await self._answer(link, build)
        except TimeoutError:
            self.end(f"the receiver did not {what} within {within_s:g} s")
        else:
            if answer.error is None:
                return answer
            self.end(f"{failed}the receiver could not {what}: {answer.error}")
        raise ReplicaUnavailable(self._reason or "")

    def _living(self) -> _ReceiverLink:
        """Raises ReplicaUnavailable once it has ended."""
        link = self._link
        if self._reason is not None or link is None or link.transport.is_closing():
            raise ReplicaUnavailable(self._reason or "the receiver process has ended")
        return link

    async def _answer(self, link: _ReceiverLink, build: Callable[[int], m.Order]) -> m.OrderDone:
        number = next(self._numbers)
        future: asyncio.Future[m.OrderDone] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            link.send(build(number))
            return await future
        finally:
            self._calls.pop(number, None)

    def _fail_calls(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ReplicaUnavailable(self._reason or ""))

    async def _ask_for_life(self) -> None:
        """Ends a process that stands still, and does not leave its trainer in a broadcast until the deadline."""
        with contextlib.suppress(ReplicaUnavailable):
            while True:
                await asyncio.sleep(PING_S)
                answer = asyncio.ensure_future(self._answer(self._living(), m.Ping))
                # Nobody may wait for it any more when the process ends.
                answer.add_done_callback(lambda done: done.cancelled() or done.exception())
                looks = SILENT_S / PING_S
                # Counted in looks: one stall of this loop is no silence.
                while looks > 0 and not (await asyncio.wait((answer,), timeout=PING_S))[0]:
                    looks -= 1
                if not answer.done():
                    self.end(f"the receiver process has not answered for {SILENT_S:g} s")
                await answer

    async def _watch_end(self, process: subprocess.Popen[bytes], link: _ReceiverLink) -> None:
        await link.lost.wait()
        # A process that still lives sent something that cannot be understood.
        process.kill()
        if self._pings is not None:
            self._pings.cancel()
        code = await asyncio.to_thread(process.wait)
        if self._reason is None:
            self._reason = f"the receiver process ended {_how(code)}"
            log.error("receiver process %s: %s", process.pid, self._reason)
        self._fail_calls()
        await self._files.remove()


def _check_rendezvous(rendezvous: Rendezvous) -> None:
    """Raise InvalidRequest, which names the field, for what no group can have."""
    sound = {
        "master_port": 0 < rendezvous.master_port < 2**16,
        "rank_offset": 0 < rendezvous.rank_offset < rendezvous.world_size,
        "packed_buffer_size_bytes": rendezvous.packed_buffer_size_bytes > 0,
    }
    for field, holds in sound.items():
        if not holds:
            raise InvalidRequest(
                f"init_info.{field}: {getattr(rendezvous, field)} is not possible", param=f"init_info.{field}"
            )


def _how(code: int) -> str:
    try:
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    except ValueError:
        return f"with code {code}"
