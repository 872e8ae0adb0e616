"""Requests that wait until their grammar is compiled, on a thread beside the steps.

Always holds: requests come out in the order in which they came in, each once, unless they were aborted meanwhile. An abort
of one choice comes out together with its request.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from midstream.core.types import GenerateRequest
from midstream.engine.embedded.background import Background


class GrammarQueue:
    """waiting: of each request in the queue, the choices that were aborted; None stands for the whole request."""

    def __init__(self, prepare: Callable[[str], None]) -> None:
        """prepare: compiles a grammar and keeps the result, good or bad, and raises nothing. Runs on the thread."""
        self._prepare = prepare
        self._background = Background("grammars", niceness=0)
        self._done: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
        self.waiting: dict[str, set[int | None]] = {}

    def put(self, request: GenerateRequest) -> None:
        self.waiting[request.request_id] = set()
        self._background.submit(lambda: self._compile(request))

    def abort(self, request_id: str, index: int | None) -> None:
        self.waiting[request_id].add(index)

    def take(self) -> list[tuple[GenerateRequest, list[int]]]:
        """The requests with compiled grammars, each with the choices that were aborted meanwhile."""
        ready = []
        while not self._done.empty():
            request = self._done.get()
            aborted = self.waiting.pop(request.request_id)
            if None not in aborted:
                ready.append((request, sorted(index for index in aborted if index is not None)))
        return ready

    def _compile(self, request: GenerateRequest) -> None:
        assert request.grammar is not None
        if None not in self.waiting[request.request_id]:
            self._prepare(request.grammar)
        self._done.put(request)
