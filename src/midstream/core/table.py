"""A state machine as a table: from which phase, upon which event, to which phase, with what to do. Pure.

Owns: the one class of such tables, and what an illegal move is.
Always holds: every move is one entry of a table; any other raises IllegalMove.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

Phase = TypeVar("Phase", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Action = TypeVar("Action")


class IllegalMove(RuntimeError):
    """A move that the table does not have: a bug, never a user's or a replica's mistake."""


class Table(dict[tuple[Phase, Event], tuple[Phase, Action]], Generic[Phase, Event, Action]):
    """moves: (phase, event) -> (phase, action). An action of None: the phase says it all. first: where a machine begins.

    Looking up a move that is none raises IllegalMove.
    """

    __slots__ = ("first",)

    def __init__(self, first: Phase, moves: Mapping[tuple[Phase, Event], tuple[Phase, Action]]) -> None:
        super().__init__(moves)
        self.first = first

    def __repr__(self) -> str:
        return f"Table({len(self)} moves from {self.first})"

    def __missing__(self, move: tuple[Phase, Event]) -> tuple[Phase, Action]:
        at, event = move
        raise IllegalMove(f"{event.value!r} at {at.value!r}")

    def move(self, at: Phase, event: Event) -> tuple[Phase, Action]:
        """Raises IllegalMove."""
        return self[at, event]
