"""The requests of a boot that a trainer may end by name, whole or choice by choice. Pure, except that it notifies the
generation.

Owns: the names of each request and of its choices, and which choices were asked to end.
Always holds: a request is in the table from before it waits at the gate to its end. A choice that was asked to end before its
request was let in never reaches the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from midstream.replica.response.work import Work


class Endable(Protocol):
    """What runs (Generation is one)."""

    def abort(self, choices: Collection[int]) -> None:
        """Ends those that are open, with what they have."""


class Called:
    """One request. whole: names of all its choices. each: names of some. choices: how many there are."""

    def __init__(self, whole: Collection[str], each: Mapping[str, Collection[int]], choices: int) -> None:
        self._whole = set(whole) - {""}
        self._each = dict(each)
        self._all = frozenset(range(choices))
        self._running: Endable | None = None
        self.ended: set[int] = set()

    def __repr__(self) -> str:
        return f"Called({sorted(self._whole | self._each.keys())}, ended={sorted(self.ended)})"

    @property
    def held(self) -> bool:
        """It was not let in yet."""
        return self._running is None

    @property
    def over(self) -> bool:
        """Nothing is left to be generated."""
        return self.ended == self._all

    def let_in(self, work: Work, running: Endable, whole: Collection[str]) -> None:
        """whole: more names. A name of some choices is no name of all."""
        if work.wire.choice_names is not None:
            self._each |= names_of_choices(work, min(whole, key=len))
        self._running, self._whole = running, self._whole | (set(whole) - self._each.keys())
        if self.ended:
            running.abort(self.ended)

    def end(self, ids: Collection[str] | None) -> bool:
        """Ask choices to end; None: all. True if one was not asked before."""
        chosen = self._all
        if ids is not None and self._whole.isdisjoint(ids):
            chosen = frozenset(choice for name in ids for choice in self._each.get(name, ()))
        new = chosen - self.ended
        self.ended |= new
        if new and self._running is not None:
            self._running.abort(new)
        return bool(new)


def called_as(work: Work, request_id: str) -> Called:
    """A request that its client has not heard of yet. request_id: its header's, or empty."""
    each = {} if work.wire.choice_names is None else names_of_choices(work, None)
    # Of several prompts with names, the first one's is the response's id.
    whole = {request_id, work.checked.response_id or ""} - each.keys()
    return Called(whole, each, len(work.prompts) * work.checked.n)


def names_of_choices(work: Work, response_id: str | None) -> dict[str, list[int]]:
    """The choices that the client may name, by name. response_id: None before there is one."""
    each, n, names_of = dict[str, list[int]](), work.checked.n, work.wire.choice_names
    if names_of is None:
        return each
    for choice in range(len(work.prompts) * n):
        for name in names_of(work.details, response_id, n, choice):
            each.setdefault(name, []).append(choice)
    return each
