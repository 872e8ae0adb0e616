"""Requests whose grammar is compiled first, on a thread beside the steps.

Owns: that thread, and the requests that wait for it.
Always holds: requests come out in the order in which they came in, each once, unless it was aborted meanwhile; an abort of one
of its choices comes out with it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from midstream.types import GenerateRequest


class GrammarQueue:
    def __init__(self, prepare: Callable[[str], None]) -> None:
        """prepare: compiles a grammar and keeps it, good or bad; raises nothing. Called on the thread."""
        self._prepare = prepare
        self._waiting: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
        self._aborted: dict[
            str, set[int | None]
        ] = {}  # of each request that waits, the choices that are not wanted
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"GrammarQueue({len(self._aborted)} requests)"

    @property
    def busy(self) -> bool:
        return bool(self._aborted)

    def holds(self, request_id: str) -> bool:
        return request_id in self._aborted

    def put(self, request: GenerateRequest) -> None:
        self._aborted[request.request_id] = set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        self._waiting.put(request)

    def abort(self, request_id: str, index: int | None) -> None:
        self._aborted[request_id].add(index)

    def take(self) -> list[tuple[GenerateRequest, list[int]]]:
        """Requests whose grammars are compiled, and which choices of them were ended meanwhile."""
        ready = []
        while not self._done.empty():
            request = self._done.get()
            aborted = self._aborted.pop(request.request_id)
            if None not in aborted:
                ready.append((request, sorted(index for index in aborted if index is not None)))
        return ready

    def _work(self) -> None:
        while True:
            request = self._waiting.get()
            assert request.grammar is not None
            if None not in self._aborted[request.request_id]:
                self._prepare(request.grammar)
            self._done.put(request)
