"""Loads snapshots beside the serving model, one at a time.

Always holds: one load runs at a time, in the order in which policies asked. A policy's newer request replaces its waiting one.
The result of a load that was overtaken or dropped is thrown away. Every request gets exactly one result, and every model has
exactly one owner. A load may begin before its request, on files that are still being made (growing_files.py). If it fails or
does not fit its request, the request is loaded as any other. No request waits for a load that nobody has asked for.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from midstream.core.errors import MidstreamError
from midstream.engine.embedded.background import Background, Job
from midstream.engine.embedded.growing_files import GrowingFiles, GrowingFilesEnded
from midstream.engine.embedded.protocol import StageAhead, StageSnapshot
from midstream.engine.embedded.weights import Weights, reason

logger = logging.getLogger(__name__)

SUPERSEDED = "superseded by a newer snapshot"
DROPPED = "its caller was cancelled"


#: A request and its weights, or the reason why there are none.
Staged = tuple[StageSnapshot, Weights | str]


@dataclass(eq=False)
class _Load:
    """snapshot: of the policy. request: None while nobody has asked for its result. dropped: its result is thrown away."""

    snapshot: str
    policy: str
    request: StageSnapshot | None = None
    growing: GrowingFiles | None = None
    dropped: bool = False

    def takes(self, request: StageSnapshot) -> bool:
        """Whether this load, which began before, is of the files of the request. It is the request's from then on."""
        if self.growing is None or self.request is not None or self.dropped:
            return False
        if (self.snapshot, self.policy) != (request.snapshot, request.policy):
            return False
        if not self.growing.complete(Path(request.directory)):
            return False
        self.request = request
        return True

    def drop(self) -> None:
        self.dropped = True
        if self.growing is not None:
            self.growing.drop()


class Stager:
    """Use it from the engine's loop.

    submit: starts a job on the background thread, at some time. unwanted: takes weights that were loaded in vain. load_ahead:
    loads files that are being made. It waits for them on a thread of its own, where it holds up nothing.
    """

    def __init__(
        self,
        load: Callable[[Path], Weights],
        submit: Callable[[Job], None],
        unwanted: Callable[[Weights], None],
        load_ahead: Callable[[GrowingFiles], Weights],
    ) -> None:
        self._load = load
        self._submit = submit
        self._unwanted = unwanted
        self._load_ahead = load_ahead
        self._ahead = Background("staging")
        self._running: _Load | None = None
        # By policy.
        self._waiting: dict[str, StageSnapshot] = {}
        self._finished: queue.SimpleQueue[tuple[_Load, Weights | str]] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        return self._running is not None

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for the running load to end."""
        running = self._running
        return running is not None and (running.request is not None or bool(self._waiting))

    def begin(self, message: StageAhead) -> None:
        """Load files that are being made, unless another load runs."""
        if self._running is not None:
            if self._running.policy == message.policy:
                self._drop_ahead()
            return
        try:
            growing = GrowingFiles(Path(message.directory))
        except OSError as error:
            logger.debug("%s is not staged ahead: %s", message.snapshot, error)
            return
        load = self._running = _Load(message.snapshot, message.policy, growing=growing)
        work = partial(self._run, load, partial(self._load_ahead, growing))
        # After the jobs that free memory.
        self._submit(lambda: self._ahead.submit(work))

    def made(self, policy: str, tensors: tuple[str, ...]) -> None:
        """These tensors may be read. Nothing to do if no load waits for them."""
        running = self._running
        if running is not None and running.policy == policy and running.growing is not None:
            running.growing.made(tensors)

    def submit(self, request: StageSnapshot) -> list[Staged]:
        """Load it as soon as no other load runs. Returns the result of the waiting request that this one replaces, if any."""
        before = self._waiting.pop(request.policy, None)
        if self._running is None or not self._running.takes(request):
            self._drop_ahead()
            self._waiting[request.policy] = request
            self._start()
        return [] if before is None else [(before, SUPERSEDED)]

    def drop(self, policy: str) -> list[Staged]:
        """Drop the policy's running and waiting request. Returns the result of the waiting one, if any."""
        waiting = self._waiting.pop(policy, None)
        if self._running is not None and self._running.policy == policy:
            self._running.drop()
        return [] if waiting is None else [(waiting, DROPPED)]

    def take(self) -> list[Staged]:
        """The results that have become ready since the last call."""
        done: list[Staged] = []
        while not self._finished.empty():
            load, result = self._finished.get()
            self._running = None
            done += self._result_of(load, result)
            self._start()
        return done

    def _result_of(self, load: _Load, result: Weights | str) -> list[Staged]:
        request = load.request
        newer = load.policy in self._waiting
        ahead = load.growing is not None
        if ahead and request is not None and isinstance(result, str) and not (newer or load.dropped):
            # What is wrong with the files, if anything, their own load says.
            self._waiting[load.policy] = request
            return []
        reason = SUPERSEDED if newer else DROPPED if load.dropped or request is None else None
        if reason is not None and not isinstance(result, str):
            self._unwanted(result)
        return [] if request is None else [(request, reason or result)]

    def _drop_ahead(self) -> None:
        """Give up a load that nobody has asked for, of whatever policy."""
        if self._running is not None and self._running.request is None:
            self._running.drop()

    def _start(self) -> None:
        if self._running is None and self._waiting:
            request = self._waiting.pop(next(iter(self._waiting)))
            load = self._running = _Load(request.snapshot, request.policy, request)
            self._submit(partial(self._run, load, lambda: self._load(Path(request.directory))))

    def _run(self, load: _Load, work: Callable[[], Weights]) -> None:
        try:
            result: Weights | str = work()
        except GrowingFilesEnded as error:
            result = reason(error)
        except BaseException as error:
            # This includes the panic of a native library: the request must get its result.
            # What is wrong with somebody's files is said in one line.
            known = isinstance(error, MidstreamError)
            policy = load.policy.partition("#")[0]
            called = f"{load.snapshot} of policy {policy}" if policy else load.snapshot
            level = logging.WARNING if load.growing is None else logging.DEBUG
            logger.log(level, "staging %s failed: %s", called, error, exc_info=not known)
            result = reason(error)
        if load.growing is not None:
            # It may have ended before its files were whole.
            load.growing.drop()
        self._finished.put((load, result))
