"""Grammars are compiled beside the engine's steps: streams go on, and who waits keeps its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from engine_helpers import request

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest, GenerationEvent
from midstream.engine.embedded import protocol as m
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.grammar_queue import GrammarQueue
from midstream.engine.embedded.loop import EngineLoop
from midstream.http.ipc import Channel, Disconnected

GRAMMAR = 'start: %json {"type": "boolean"}'
BAD = 'start: %json {"type": "colour"}'


def constrained(name: str, grammar: str = GRAMMAR, **more: Any) -> GenerateRequest:
    return msgspec.structs.replace(request(name, b"abc", echo=0, **more), grammar=grammar)


class Queued:
    """A queue whose grammars are compiled when the test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.queue = GrammarQueue(self._prepare)

    def _prepare(self, grammar: str) -> None:
        self._turn.acquire()
        self.asked.append(grammar)
        self._done.release()

    def compile(self, times: int = 1) -> list[tuple[str, list[int]]]:
        for _ in range(times):
            self._turn.release()
            self._done.acquire()
        taken: list[tuple[str, list[int]]] = []
        while len(taken) < times:
            taken += [(ready.request_id, ended) for ready, ended in self.queue.take()]
        return taken


def test_requests_come_out_in_order_with_the_choices_that_ended_meanwhile() -> None:
    queued = Queued()
    for name in "abc":
        queued.queue.put(constrained(name, grammar=name, n=3))
    assert set(queued.queue.waiting) == {"a", "b", "c"}
    queued.queue.abort("b", 2)
    queued.queue.abort("b", 0)
    assert queued.compile(3) == [("a", []), ("b", [0, 2]), ("c", [])]
    assert (queued.asked, queued.queue.waiting) == (["a", "b", "c"], {})


def test_a_request_that_was_aborted_neither_comes_out_nor_is_compiled() -> None:
    queued = Queued()
    for name in "abc":
        queued.queue.put(constrained(name, grammar=name))
    queued.queue.abort("b", None)
    assert queued.compile(2) == [("a", []), ("c", [])]
    assert queued.asked == ["a", "c"]


class Played(Channel):
    """The replica's end: `commands` at once; disconnects when `enough` says so of what came."""

    def __init__(self, commands: list[m.Command], enough: Callable[[Played], bool]) -> None:
        self.events: list[tuple[str, GenerationEvent]] = []
        self._commands, self._enough = commands, enough

    def send(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Events):
            self.events += reply.events

    def receive(self, timeout_s: float | None) -> Iterator[m.Command]:
        if self._enough(self):
            raise Disconnected
        commands, self._commands = self._commands, []
        yield from commands

    def ended(self, name: str) -> bool:
        return any(
            request_id == name and (event.finish is not None or event.error is not None)
            for request_id, event in self.events
        )


def test_streams_go_on_while_a_grammar_is_compiled(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(tiny_model(), EngineSettings())
    may_compile, prepare = threading.Event(), core.prepare_grammar

    def slow(grammar: str) -> None:
        may_compile.wait()
        prepare(grammar)

    def enough(channel: Played) -> bool:
        if channel.ended("free"):
            may_compile.set()
        return channel.ended("constrained")

    monkeypatch.setattr(core, "prepare_grammar", slow)
    commands = [m.Generate(constrained("constrained")), m.Generate(request("free", b"abc", echo=0))]
    channel = Played(cast("list[m.Command]", commands), enough)
    with pytest.raises(Disconnected):
        EngineLoop(channel, core).run()
    names = [request_id for request_id, _ in channel.events]
    assert names == ["free"] * names.count("free") + ["constrained"] * names.count("constrained")
    assert channel.events[-1][1].error is None


def test_a_grammar_that_does_not_compile_is_compiled_once_and_ends_its_request(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(tiny_model(), EngineSettings())
    assert core._constraints is not None
    compiled: list[str] = []
    real = core._constraints._compile

    def counted(grammar: str) -> Any:
        compiled.append(grammar)
        return real(grammar)

    monkeypatch.setattr(core._constraints, "_compile", counted)
    commands = [m.Generate(constrained("bad", BAD)), m.Generate(constrained("again", BAD))]
    channel = Played(
        cast("list[m.Command]", commands), lambda channel: channel.ended("bad") and channel.ended("again")
    )
    with pytest.raises(Disconnected):
        EngineLoop(channel, core).run()
    assert compiled == [BAD]
    error = channel.events[0][1].error
    assert error is not None
    assert error.startswith("the grammar cannot be used: ")
    assert "\n" not in error
