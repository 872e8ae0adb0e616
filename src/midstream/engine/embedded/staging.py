"""Loads snapshots beside the serving model, one at a time.

Always holds: one load runs at a time. A newer request replaces a waiting one. The result of a load that was overtaken or
dropped is thrown away. Every request gets exactly one result, and every model has exactly one owner.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from pathlib import Path

from midstream.engine.embedded.background import Job
from midstream.engine.embedded.loading import LoadedModel
from midstream.engine.embedded.protocol import StageSnapshot

logger = logging.getLogger(__name__)

SUPERSEDED = "superseded by a newer snapshot"
DROPPED = "nobody waits for it any more"

#: A request and its model, or the reason why there is none.
Staged = tuple[StageSnapshot, LoadedModel | str]


class Stager:
    """Use it from the engine's loop.

    submit: starts a job on the background thread, at some time. unwanted: takes a model that was loaded in vain.
    """

    def __init__(
        self,
        load: Callable[[Path], LoadedModel],
        submit: Callable[[Job], None],
        unwanted: Callable[[LoadedModel], None],
    ) -> None:
        self._load = load
        self._submit = submit
        self._unwanted = unwanted
        self._running: StageSnapshot | None = None
        # The running load was dropped.
        self._dropped = False
        self._next: StageSnapshot | None = None
        self._finished: queue.SimpleQueue[Staged] = queue.SimpleQueue()

    @property
    def busy(self) -> bool:
        return self._running is not None

    def submit(self, request: StageSnapshot) -> list[Staged]:
        """Load it as soon as no other load runs. Returns the result of the waiting request that this one replaces, if any."""
        replaced: list[Staged] = [] if self._next is None else [(self._next, SUPERSEDED)]
        self._next = request
        self._start()
        return replaced

    def drop(self) -> list[Staged]:
        """Drop the running and the waiting request. Returns the result of the waiting one, if any."""
        dropped: list[Staged] = [] if self._next is None else [(self._next, DROPPED)]
        self._next = None
        self._dropped = self._running is not None
        return dropped

    def take(self) -> list[Staged]:
        """The results that have become ready since the last call."""
        done: list[Staged] = []
        while not self._finished.empty():
            request, result = self._finished.get()
            reason = SUPERSEDED if self._next is not None else DROPPED if self._dropped else None
            self._running, self._dropped = None, False
            if reason is not None and not isinstance(result, str):
                self._unwanted(result)
            done.append((request, reason or result))
            self._start()
        return done

    def _start(self) -> None:
        if self._running is None and self._next is not None:
            request = self._running = self._next
            self._next = None
            self._submit(lambda: self._run(request))

    def _run(self, request: StageSnapshot) -> None:
        try:
            result: LoadedModel | str = self._load(Path(request.directory))
        except BaseException as error:
            # This includes the panic of a native library: the request must get its result.
            logger.warning("staging %s failed", request.snapshot, exc_info=True)
            result = f"{type(error).__name__}: {error}"
        self._finished.put((request, result))
