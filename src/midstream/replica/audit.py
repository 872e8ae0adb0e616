"""The continuous audit of a replica: which finished turns are computed again, and when.

Owns: the turns that wait, the auditor, and the counts of what it found.
Always holds:
- Whether a turn is audited follows from the seed, the session and its number alone.
- The auditor computes only while the replica has had no request and no swap for IDLE_S. It is halted in the step of the loop
  in which one comes, before the engine has it.
- It is another process with weights and KV of its own: nothing of the engine's cache or its labels is touched.
- A name that means other files since the turn ended is no mismatch: the turn counts as not audited.
- It ends when no turn has waited for KEEP_S, and when it has been halted for so long, so that a second copy of the weights does
  not stay. The turn that it had waits again then.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from midstream.core.audits import (
    CAUSES,
    ENDED,
    GONE,
    NO_TIME,
    AuditAnswer,
    AuditedTurn,
    AuditJob,
    AuditStats,
)
from midstream.core.text import plain
from midstream.core.traces import TracedTurn
from midstream.core.types import BASE_SNAPSHOT, Session
from midstream.replica.turns.tree import Turn

log = logging.getLogger(__name__)

IDLE_S, KEEP_S = 1.0, 10.0
#: Of the choice.
SEED = 0
#: Turns that wait. An older one makes room for a newer one.
WAITING_MAX = 256
#: `max_dlogprob` is of so many turns.
LATEST = 100
#: Of a turn and the tokens before it. A smaller one takes less than a millisecond.
LARGE_BYTES = 2**17


class AuditorLost(Exception):
    """The auditor's process ended. The message says how."""


class Auditor(abc.ABC):
    """What computes turns again, one at a time."""

    @abc.abstractmethod
    def halt(self) -> None:
        """Compute nothing from now on. Idempotent."""

    @abc.abstractmethod
    def proceed(self) -> None:
        """Idempotent."""

    @abc.abstractmethod
    async def audit(self, job: AuditJob) -> AuditAnswer:
        """Raises AuditorLost."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Idempotent."""


class _Waiting(NamedTuple):
    session: Session
    turn: Turn


#: Of a model's name and a snapshot, its files here.
_Directories = dict[tuple[str, str], Path]


class Audits:
    """replica: its name. share: of all turns. base: the files of BASE_SNAPSHOT. model: the replica's own."""

    def __init__(
        self,
        replica: str,
        share: float,
        start: Callable[[], Awaitable[Auditor]],
        *,
        base: Path,
        model: str,
        clock: Callable[[], float],
        idle_s: float = IDLE_S,
        keep_s: float = KEEP_S,
    ) -> None:
        self._replica, self._share, self._start = replica, share, start
        self._base, self._model, self._clock = base, model, clock
        self._idle_s, self._keep_s = idle_s, keep_s
        #: A turn as a record has it.
        self.traced: Callable[[Turn], TracedTurn]
        #: After each turn.
        self.on_change: Callable[[], None] = lambda: None
        self._directories: _Directories = {}
        self._waiting: deque[_Waiting] = deque()
        self._due, self._idle = asyncio.Event(), asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        #: When it was idle last, by the loop's clock.
        self._halted_at = 0.0
        self._auditor: Auditor | None = None
        self._task: asyncio.Task[None] | None = None
        self._audited = 0
        self._latest: deque[float] = deque(maxlen=LATEST)
        self._mismatches, self._not_audited = Counter(dict.fromkeys(CAUSES, 0)), Counter[str]()
        self._last: AuditedTurn | None = None

    def __repr__(self) -> str:
        return f"Audits({self._share}, {len(self._waiting)} waiting, {self._audited} audited)"

    def begin(self) -> None:
        """Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="audits")

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def stats(self) -> AuditStats:
        return AuditStats(
            audited=self._audited,
            waiting=len(self._waiting),
            max_dlogprob=max(self._latest, default=0.0),
            mismatches=dict(self._mismatches),
            not_audited=dict(self._not_audited),
            last=self._last,
        )

    # -- what the replica says

    def turn_ended(self, session: Session, turn: Turn) -> None:
        if not is_chosen(self._share, SEED, session, turn.number):
            return
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft()
            self._not_audited[NO_TIME] += 1
        self._waiting.append(_Waiting(session, turn))
        self._due.set()

    def serves(self, model: str, snapshot: str, directory: Path) -> None:
        """From now on the model's snapshot of this name has these files."""
        old = self._directories
        self._directories = {name: path for name, path in old.items() if path.is_dir()}
        self._directories[model, snapshot] = directory
        # Turns of before were of other files, or of files that are gone: their name may mean others by the time of the audit.
        over = {name for name, path in old.items() if self._directories.get(name) != path}
        left = [one for one in self._waiting if not any(self._names(one.turn, *name) for name in over)]
        self._not_audited[GONE] += len(self._waiting) - len(left)
        self._waiting = deque(left)

    def moved(self, *, busy: bool) -> None:
        """A request or a swap came or went. busy: the replica has any."""
        if busy:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._idle.is_set():
                self._idle.clear()
                self._halted_at = asyncio.get_running_loop().time()
                if self._auditor is not None:
                    self._auditor.halt()
        elif self._timer is None and not self._idle.is_set():
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._proceed)

    # -- the audit

    def _proceed(self) -> None:
        self._timer = None
        self._idle.set()
        if self._auditor is not None:
            self._auditor.proceed()

    async def _run(self) -> None:
        try:
            while True:
                await self._until_due()
                await self._until_idle()
                if self._waiting:
                    await self._audit(self._waiting.popleft())
                    self.on_change()
        finally:
            await self._end_auditor()

    async def _until_due(self) -> None:
        if self._waiting:
            return
        self._due.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self._auditor is None else self._keep_s):
                await self._due.wait()
            return
        await self._end_auditor()

    async def _until_idle(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self._auditor is None else self._keep_s):
                await self._idle.wait()
            return
        await self._end_auditor()
        await self._idle.wait()

    async def _answered(self, auditor: Auditor, job: AuditJob) -> AuditAnswer | None:
        """None: it has been halted for too long. Raises AuditorLost."""
        asked = asyncio.create_task(auditor.audit(job), name="an audit")
        try:
            while not asked.done():
                await asyncio.wait((asked,), timeout=self._keep_s)
                halted_s = asyncio.get_running_loop().time() - self._halted_at
                if not (asked.done() or self._idle.is_set()) and halted_s >= self._keep_s:
                    return None
            return asked.result()
        finally:
            asked.cancel()

    async def _end_auditor(self) -> None:
        auditor, self._auditor = self._auditor, None
        if auditor is not None:
            await auditor.close()

    async def _audit(self, one: _Waiting) -> None:
        files = self._files_of(one.turn)
        record = await self._encoded(one)
        job = AuditJob(record, {name: str(path) for name, path in files.items()})
        try:
            if self._auditor is None:
                # A request may have come while the turn was encoded.
                await self._idle.wait()
                self._auditor = await self._start()
                if not self._idle.is_set():
                    self._auditor.halt()
            answer = await self._answered(self._auditor, job)
        except (AuditorLost, OSError) as error:
            log.warning("%s: a turn is not audited: %s", self._replica, error)
            self._not_audited[ENDED] += 1
            await self._end_auditor()
            return
        if answer is None:
            self._waiting.appendleft(one)
            await self._end_auditor()
            return
        if answer.mismatches and not self._still(one.turn, files):
            answer = AuditAnswer(unaudited=GONE)
        self._take(one, answer)

    def _take(self, one: _Waiting, answer: AuditAnswer) -> None:
        if answer.unaudited:
            self._not_audited[answer.unaudited] += 1
            return
        self._audited += 1
        self._latest.append(answer.worst)
        for found in answer.mismatches[:1]:
            key, number = one.session[1], one.turn.number
            self._mismatches[found.cause] += 1
            self._last = AuditedTurn(
                session=key, turn=number, snapshot=found.snapshot, cause=found.cause, at=self._clock()
            )
            log.error(
                "audit: session %r, turn %d, on %s, snapshot %s: %s: %s; the largest difference is %.3g nats",
                *(key, number, self._replica, plain(found.snapshot), found.cause, plain(found.detail)),
                answer.worst,
            )

    async def _encoded(self, one: _Waiting) -> bytes:
        """What is large is encoded in a thread, as no request is served meanwhile."""
        positions = one.turn.record.kv[-1][2] if one.turn.record is not None and one.turn.record.kv else 0
        if one.turn.size + 4 * positions < LARGE_BYTES:
            return self._record(one)
        return await asyncio.to_thread(self._record, one)

    def _record(self, one: _Waiting) -> bytes:
        """The turn as a record that stands alone."""
        tokens = list(one.turn.tokens)
        added = tokens[: len(tokens) - len(one.turn.sampled)]
        turn = msgspec.structs.replace(
            self.traced(one.turn), parent=0, added=added, loss_mask=[], record_reference=None
        )
        head = {"n": 1, "replica": self._replica, "boot": "", "kind": "turn", "segment": "", "line": 0}
        about = {"deployment": "", "tenant": one.session[0], "session": one.session[1], "tree": 0}
        return msgspec.json.encode({**head, **about, "turn": turn})

    def _files_of(self, turn: Turn) -> dict[str, Path]:
        """Also of other snapshots than it names, as what it says may be wrong."""
        model = self._model_of(turn)
        found = {
            name: path for (of, name), path in self._directories.items() if of == model and path.is_dir()
        }
        return {BASE_SNAPSHOT: self._base} | found

    def _still(self, turn: Turn, files: dict[str, Path]) -> bool:
        """Whether all of these files were there all the time, and are those of their names."""
        now = self._files_of(turn)
        return all(now.get(name) == path for name, path in files.items())

    def _names(self, turn: Turn, model: str, snapshot: str) -> bool:
        return self._model_of(turn) == model and any(name == snapshot for name, *_ in _spans_of(turn))

    def _model_of(self, turn: Turn) -> str:
        return self._model if turn.record is None else turn.record.model or self._model


def _spans_of(turn: Turn) -> list[tuple[str, int, int]]:
    record = turn.record
    if record is None:
        return []
    earlier = [span for _, spans in record.earlier_kv for span in spans]
    return [*record.snapshots, *record.kv, *earlier]


def is_chosen(share: float, seed: int, session: Session, turn: int) -> bool:
    """Of so many turns one is. Equal turns are chosen alike, on every replica."""
    name = f"{seed}\0{session[0]}\0{session[1]}\0{turn}"
    drawn = int.from_bytes(
        hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
    )
    return drawn < share * 2**64
