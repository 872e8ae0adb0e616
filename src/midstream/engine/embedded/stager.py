"""Loads snapshots beside the serving model, one at a time.

Always holds: one load runs at a time, in the order in which policies asked. A policy's newer request replaces its waiting one.
The result of a load that was overtaken or dropped is thrown away. Every request gets exactly one result, and every model has
exactly one owner.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from pathlib import Path

from midstream.core.errors import MidstreamError
from midstream.engine.embedded.background import Job
from midstream.engine.embedded.protocol import StageSnapshot
from midstream.engine.embedded.weights import Weights, reason

logger = logging.getLogger(__name__)

SUPERSEDED = "superseded by a newer snapshot"
DROPPED = "its caller was cancelled"


#: A request and its weights, or the reason why there are none.
Staged = tuple[StageSnapshot, Weights | str]


class Stager:
    """Use it from the engine's loop.

    submit: starts a job on the background thread, at some time. unwanted: takes weights that were loaded in vain.
    """

    def __init__(
        self,
        load: Callable[[Path], Weights],
        submit: Callable[[Job], None],
        unwanted: Callable[[Weights], None],
    ) -> None:
        self._load = load
        self._submit = submit
        self._unwanted = unwanted
        self._running: StageSnapshot | None = None
        # The running load was dropped.
        self._dropped = False
        # By policy.
        self._waiting: dict[str, StageSnapshot] = {}
        self._finished: queue.SimpleQueue[Staged] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        return self._running is not None

    def submit(self, request: StageSnapshot) -> list[Staged]:
        """Load it as soon as no other load runs. Returns the result of the waiting request that this one replaces, if any."""
        before = self._waiting.pop(request.policy, None)
        self._waiting[request.policy] = request
        self._start()
        return [] if before is None else [(before, SUPERSEDED)]

    def drop(self, policy: str) -> list[Staged]:
        """Drop the policy's running and waiting request. Returns the result of the waiting one, if any."""
        waiting = self._waiting.pop(policy, None)
        if self._running is not None and self._running.policy == policy:
            self._dropped = True
        return [] if waiting is None else [(waiting, DROPPED)]

    def take(self) -> list[Staged]:
        """The results that have become ready since the last call."""
        done: list[Staged] = []
        while not self._finished.empty():
            request, result = self._finished.get()
            newer = request.policy in self._waiting
            reason = SUPERSEDED if newer else DROPPED if self._dropped else None
            self._running, self._dropped = None, False
            if reason is not None and not isinstance(result, str):
                self._unwanted(result)
            done.append((request, reason or result))
            self._start()
        return done

    def _start(self) -> None:
        if self._running is None and self._waiting:
            request = self._running = self._waiting.pop(next(iter(self._waiting)))
            self._submit(lambda: self._run(request))

    def _run(self, request: StageSnapshot) -> None:
        try:
            result: Weights | str = self._load(Path(request.directory))
        except BaseException as error:
            # This includes the panic of a native library: the request must get its result.
            # What is wrong with somebody's files is said in one line.
            known = isinstance(error, MidstreamError)
            policy = request.policy.partition("#")[0]
            called = f"{request.snapshot} of policy {policy}" if policy else request.snapshot
            logger.warning("staging %s failed: %s", called, error, exc_info=not known)
            result = reason(error)
        self._finished.put((request, result))
