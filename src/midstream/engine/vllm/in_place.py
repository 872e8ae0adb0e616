"""vLLM's own weight transfer, fenced: its ranks take a trainer's weights into those that serve, and nothing else happens then.

Owns: what is known of the weights in the server, as a table.
Always holds:
- From the hold on the server computes nothing, until the ordinary switch has labelled what was written, or the update is over.
- Weights that anything may have been written to are uncertain. Such a server is killed, unless the switch comes in time.
- The control lock is held while ranks join and while tensors may come, so no other switch begins. It is free again however
  that ends.
- A call of a group that is over by the time the lock is free does nothing.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream.core.table import Table
from midstream.engine.base import EngineDied, InPlaceWeights, Tee, Teed, TransferFailed, TransferRefused
from midstream.engine.servers.boot import ServerBoot
from midstream.engine.servers.control import ServerRefused
from midstream.engine.vllm.swap import Control
from midstream.http.call import CallFailed
from midstream.snapshots.layout import WEIGHTS_FILE
from midstream.snapshots.tasks import all_of

logger = logging.getLogger(__name__)

#: A gateway ends its own phases first.
LONGER_S = 20.0
INIT, SHUTDOWN = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
#: Methods of the worker extension.
OPEN_TEE, CLOSE_TEE = "midstream_open_tee", "midstream_close_tee"
_ERRORS = (CallFailed, ServerRefused, EngineDied)


class HoldPhase(enum.StrEnum):
    #: No call of a group is under way.
    FREE = "free"
    #: The ranks wait for the trainer, and compute nothing else.
    JOINING = "joining"
    #: The server is being paused.
    PAUSING = "pausing"
    #: The same, and the update is over already.
    PAUSED_IN_VAIN = "paused in vain"
    #: Nothing is computed. The weights are those that served.
    HELD = "held"
    #: The server is about to compute again, with the weights that served.
    RESUMING = "resuming"
    #: Tensors may have come.
    UNCERTAIN = "uncertain"
    #: All tensors have come. No check has passed.
    WRITTEN = "written"
    #: The server is killed, or gone.
    LOST = "lost"


class HoldEvent(enum.StrEnum):
    JOIN = "join"
    ANSWERED = "answered"
    HOLD = "hold"
    STANDS_STILL = "stands still"
    WRITE = "write"
    FINISHED = "finished"
    #: A switch, to what was written or to files.
    SWITCHED = "switched"
    GIVE_UP = "give up"
    RESUMED = "resumed"
    #: The server ended.
    ENDED = "ended"
    #: Another server began.
    BEGAN = "began"


class HoldAction(enum.StrEnum):
    NOTHING = "nothing"
    RESUME = "resume"
    KILL = "kill"


_P, _E, _A = HoldPhase, HoldEvent, HoldAction
HOLDS: Table[HoldPhase, HoldEvent, HoldAction] = Table(
    _P.LOST,
    {
        (_P.FREE, _E.JOIN): (_P.JOINING, _A.NOTHING),
        (_P.JOINING, _E.ANSWERED): (_P.FREE, _A.NOTHING),
        (_P.FREE, _E.HOLD): (_P.PAUSING, _A.NOTHING),
        (_P.PAUSING, _E.STANDS_STILL): (_P.HELD, _A.NOTHING),
        (_P.PAUSING, _E.GIVE_UP): (_P.PAUSED_IN_VAIN, _A.NOTHING),
        (_P.PAUSED_IN_VAIN, _E.GIVE_UP): (_P.PAUSED_IN_VAIN, _A.NOTHING),
        (_P.PAUSED_IN_VAIN, _E.STANDS_STILL): (_P.RESUMING, _A.RESUME),
        (_P.HELD, _E.WRITE): (_P.UNCERTAIN, _A.NOTHING),
        (_P.UNCERTAIN, _E.WRITE): (_P.UNCERTAIN, _A.NOTHING),
        (_P.UNCERTAIN, _E.FINISHED): (_P.WRITTEN, _A.NOTHING),
        (_P.FREE, _E.SWITCHED): (_P.FREE, _A.NOTHING),
        (_P.WRITTEN, _E.SWITCHED): (_P.FREE, _A.NOTHING),
        (_P.FREE, _E.GIVE_UP): (_P.FREE, _A.NOTHING),
        (_P.JOINING, _E.GIVE_UP): (_P.LOST, _A.KILL),
        (_P.HELD, _E.GIVE_UP): (_P.RESUMING, _A.RESUME),
        (_P.RESUMING, _E.GIVE_UP): (_P.RESUMING, _A.NOTHING),
        (_P.RESUMING, _E.RESUMED): (_P.FREE, _A.NOTHING),
        (_P.UNCERTAIN, _E.GIVE_UP): (_P.LOST, _A.KILL),
        (_P.WRITTEN, _E.GIVE_UP): (_P.LOST, _A.KILL),
        (_P.LOST, _E.GIVE_UP): (_P.LOST, _A.NOTHING),
        **{(phase, _E.ENDED): (_P.LOST, _A.NOTHING) for phase in HoldPhase},
        **{(phase, _E.BEGAN): (_P.FREE, _A.NOTHING) for phase in HoldPhase},
    },
)
#: The control lock is held.
_LOCKED = (_P.JOINING, _P.PAUSING, _P.PAUSED_IN_VAIN, _P.HELD, _P.RESUMING, _P.UNCERTAIN)


class VllmInPlace(InPlaceWeights):
    """control: of the server that runs. lock: the engine's control lock. stand_still: stops the server; move_on: lets it
    compute again, unless it is paused for another reason. kill: ends the boot for a reason."""

    def __init__(
        self,
        backend: str,
        control: Callable[[], Control],
        boot: ServerBoot,
        lock: asyncio.Lock,
        stand_still: Callable[[], Coroutine[Any, Any, None]],
        move_on: Callable[[], Coroutine[Any, Any, None]],
        kill: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.backend = backend
        self.phase = HOLDS.first
        self._control = control
        self._boot = boot
        self._lock = lock
        self._stand_still = stand_still
        self._move_on = move_on
        self._kill = kill
        # Of the file that has what was written.
        self._file: tuple[int, ...] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # How often what is under way was given up.
        self._given_up = 0
        # Checks that are being computed, and whether there are none.
        self._checks = 0
        self._unchecked = asyncio.Event()
        self._unchecked.set()

    def __repr__(self) -> str:
        return f"VllmInPlace({self.backend}, {self.phase.value})"

    @property
    def is_free(self) -> bool:
        """No call of a group is under way, and nothing waits that it has written."""
        return self.phase is HoldPhase.FREE

    @property
    def keeps_still(self) -> bool:
        """Nothing is computed, and the control lock is held for that."""
        return self.phase in (HoldPhase.HELD, HoldPhase.UNCERTAIN)

    @property
    def awaits_commit(self) -> bool:
        """Nothing but a switch has the server compute again."""
        return self.phase in (HoldPhase.UNCERTAIN, HoldPhase.WRITTEN)

    @property
    def has_hold(self) -> bool:
        """The weights are a trainer's, or are about to be: no check may begin."""
        return self.phase is HoldPhase.PAUSING or self.keeps_still or self.awaits_commit

    @contextmanager
    def checking(self) -> Iterator[None]:
        """A check is computed in it."""
        self._checks += 1
        self._unchecked.clear()
        try:
            yield
        finally:
            self._checks -= 1
            if not self._checks:
                self._unchecked.set()

    async def until_unheld(self) -> None:
        while self.phase in _LOCKED:
            async with self._lock:
                pass

    async def until_unchecked(self) -> None:
        await self._unchecked.wait()

    @property
    def has_written(self) -> bool:
        """Nothing is computed until the next switch, for which the control lock is free."""
        return self.phase is HoldPhase.WRITTEN

    # -- of the engine

    def began(self) -> None:
        """A server was started, with weights that need no proof."""
        self._move(HoldEvent.BEGAN)

    def ended(self, reason: str) -> None:
        """The server is over, and with it the part of its ranks in a group."""
        before = self.phase
        self._move(HoldEvent.ENDED)
        if before is not HoldPhase.LOST:
            self.on_end(reason)

    def switched(self) -> None:
        """What serves was switched to in order."""
        self._move(HoldEvent.SWITCHED)

    def holds(self, directory: Path) -> bool:
        """Whether the server has the weights of this directory already, not labelled yet. Raises OSError."""
        if self.phase is not HoldPhase.WRITTEN:
            return False
        try:
            return _identity(directory / WEIGHTS_FILE) == self._file
        except FileNotFoundError:
            # A checkpoint of several files.
            return False

    # -- of a group

    async def join(self, init_info: Mapping[str, Any], within_s: float) -> None:
        now = asyncio.get_running_loop().time
        until = now() + within_s
        await self._take_lock(within_s)
        self._move(HoldEvent.JOIN)
        try:
            await self._call(INIT, {"init_info": init_info}, max(0.0, until - now()))
        except _ERRORS as error:
            message = f"vLLM did not join the group: {error}"
            if not isinstance(error, ServerRefused) or not 400 <= error.status < 500:
                # vLLM answers for the first rank that fails. Others may wait for the trainer still.
                raise TransferFailed(message) from error
            self._move(HoldEvent.ANSWERED)
            raise TransferRefused(message) from error
        self._move(HoldEvent.ANSWERED)

    def check_ready(self) -> None:
        self._boot_runs()
        if self.phase in (HoldPhase.UNCERTAIN, HoldPhase.WRITTEN):
            raise TransferFailed(f"the weights of an update before are {self.phase.value} in vLLM")

    async def hold(self, within_s: float) -> None:
        await self._take_lock(within_s)
        self._move(HoldEvent.HOLD)
        try:
            await self._boot.while_alive(self._stand_still())
        except EngineDied as error:
            raise TransferFailed(str(error)) from error
        except (CallFailed, ServerRefused) as error:
            self._doubt(f"vLLM did not stand still: {error}")
            raise TransferFailed(str(error)) from error
        if self._move(HoldEvent.STANDS_STILL) is HoldAction.RESUME:
            self._boot.in_background(self._resume(), "vLLM computes again")
            raise TransferFailed("the update is over")

    async def write(self, update_info: Any, tee: Tee, within_s: float) -> Teed:
        self._boot_runs()
        first = self.phase is HoldPhase.HELD
        if not first and self.phase is not HoldPhase.UNCERTAIN:
            raise TransferFailed(f"vLLM does not stand still for this update: it is {self.phase.value}")
        self._move(HoldEvent.WRITE)
        places = {name: list(place) for name, place in tee.places.items()}
        opened = {"path": str(tee.path), "places": places, "part_bytes": tee.part_bytes}
        ready: list[Coroutine[Any, Any, Any]] = [self._rpc(OPEN_TEE, opened, within_s)]
        if first:
            # Not earlier: from here on vLLM has no whole model. What it sampled is read beside that, long before the switch.
            ready += [self._call(START, None, within_s), self._read_all(within_s)]
        try:
            async with asyncio.timeout(within_s):
                await all_of(ready)
                await self._call(UPDATE, {"update_info": update_info}, within_s)
                seen = await self._rpc(CLOSE_TEE, {}, within_s)
        except TimeoutError as error:
            raise TransferFailed(f"vLLM did not take the tensors within {within_s:g} s") from error
        except _ERRORS as error:
            raise TransferFailed(f"vLLM did not take the tensors: {error}") from error
        if (why := _unlike(seen)) is not None:
            raise TransferFailed(f"vLLM's backend {self.backend} took the tensors {why}")
        first_rank = next(rank for rank in seen if rank["first"])
        parts = {int(begin): bytes.fromhex(digest) for begin, digest in first_rank["parts"].items()}
        return Teed(parts, first_rank["finite"])

    async def finish(self, within_s: float) -> None:
        self._boot_runs()
        if self.phase is not HoldPhase.UNCERTAIN:
            raise TransferFailed(f"vLLM has no tensors of this update: it is {self.phase.value}")
        try:
            await self._call(FINISH, {}, within_s)
        except _ERRORS as error:
            raise TransferFailed(f"vLLM did not finish the update: {error}") from error
        self._move(HoldEvent.FINISHED)
        late = f"no switch to the weights that a trainer wrote came within {within_s:g} s"
        self._timer = asyncio.get_running_loop().call_later(within_s + LONGER_S, self.give_up, late)

    def written(self, file: Path) -> None:
        self._file = _identity(file)

    def give_up(self, reason: str) -> None:
        self._given_up += 1
        action = self._move(HoldEvent.GIVE_UP)
        if action is HoldAction.KILL:
            logger.warning("vLLM is killed, as its weights are uncertain: %s", reason)
            self._kill(reason)
        elif action is HoldAction.RESUME:
            self._boot.in_background(self._resume(), "vLLM computes again")

    def give_up_unfinished(self, reason: str) -> None:
        self._given_up += 1
        if self.phase is not HoldPhase.WRITTEN:
            self.give_up(reason)

    def give_up_written(self, reason: str) -> None:
        if self.phase is HoldPhase.WRITTEN:
            self.give_up(reason)

    async def leave(self, within_s: float) -> None:
        if self.phase is not HoldPhase.FREE:
            return
        try:
            await self._call(SHUTDOWN, None, within_s)
        except _ERRORS as error:
            # A server that hangs is noticed by the engine's watch.
            logger.info("vLLM did not leave a trainer's group in order: %s", error)

    # -- steps of them

    async def _take_lock(self, within_s: float) -> None:
        """For a call of a group that is not over. Raises TransferFailed unless the server is free then."""
        before = self._given_up
        try:
            async with asyncio.timeout(within_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise TransferFailed(f"another switch of vLLM did not end within {within_s:g} s") from error
        try:
            self._boot_runs()
            if self._given_up != before:
                raise TransferFailed("the update is over")
            if self.phase is not HoldPhase.FREE:
                raise TransferFailed(f"the weights of an update before are {self.phase.value} in vLLM")
        except TransferFailed:
            self._lock.release()
            raise

    async def _resume(self) -> None:
        try:
            await self._boot.while_alive(self._move_on())
        except EngineDied:
            return
        except (CallFailed, ServerRefused) as error:
            self._doubt(f"vLLM did not compute again: {error}")
            return
        if self.phase is HoldPhase.RESUMING:
            self._move(HoldEvent.RESUMED)

    def _doubt(self, reason: str) -> None:
        if self.phase is not HoldPhase.LOST:
            self._kill(reason)

    def _boot_runs(self) -> None:
        try:
            self._boot.check()
        except EngineDied as error:
            raise TransferFailed(str(error)) from error

    async def _call(self, path: str, body: object, within_s: float) -> None:
        await self._boot.while_alive(self._control().transfer(path, body, within_s))

    async def _read_all(self, within_s: float) -> None:
        await self._boot.while_alive(self._control().read_all(within_s))

    async def _rpc(self, method: str, arguments: Mapping[str, Any], within_s: float) -> list[Any]:
        return await self._boot.while_alive(self._control().ask_workers(method, arguments, within_s))

    def _move(self, event: HoldEvent) -> HoldAction:
        before = self.phase
        self.phase, action = HOLDS.move(before, event)
        if before in _LOCKED and self.phase not in _LOCKED:
            self._lock.release()
        if self.phase is not HoldPhase.WRITTEN:
            self._file = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return action


def _unlike(seen: Sequence[Mapping[str, Any]]) -> str | None:
    """How the ranks were not all given what lies in the file; None: they were. seen: what each rank's tee says."""
    first = next((rank for rank in seen if rank["first"]), None)
    if first is None or first["missing"]:
        names = ", ".join([] if first is None else first["missing"][:3])
        return f"in a way that cannot be seen: {names or 'no rank saw them'}"
    for number, rank in enumerate(seen):
        for name, digest in rank["digests"].items():
            # A rank may have no use for some of them.
            if digest != first["digests"].get(name):
                return f"in different ways: rank {number} was given other bytes of {name} than the first one"
    return None


def _identity(file: Path) -> tuple[int, ...]:
    """Of a file that nobody writes to any more, wherever it is moved. Raises OSError."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
