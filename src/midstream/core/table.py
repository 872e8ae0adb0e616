"""A state machine as a table: from which phase, upon which event, to which phase, with what to do. Pure.

Owns: the one class of such tables, what an illegal move is, and the diagram that the documents show.
Always holds: every move is one entry of a table; any other raises IllegalMove.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Generic, TypeVar

Phase = TypeVar("Phase", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Action = TypeVar("Action", bound=StrEnum | None)


class IllegalMove(RuntimeError):
    """A move that the table does not have: a bug, never a user's or a replica's mistake."""


class Table(Mapping[tuple[Phase, Event], tuple[Phase, Action]], Generic[Phase, Event, Action]):
    """moves: (phase, event) -> (phase, action). An action of None: the phase says it all. first: where a machine begins."""

    __slots__ = ("_moves", "first")

    def __init__(self, first: Phase, moves: Mapping[tuple[Phase, Event], tuple[Phase, Action]]) -> None:
        self.first = first
        self._moves = dict(moves)

    def __repr__(self) -> str:
        return f"Table({len(self._moves)} moves from {self.first})"

    def __getitem__(self, at: tuple[Phase, Event]) -> tuple[Phase, Action]:
        return self._moves[at]

    def __iter__(self) -> Iterator[tuple[Phase, Event]]:
        return iter(self._moves)

    def __len__(self) -> int:
        return len(self._moves)

    def move(self, at: Phase, event: Event) -> tuple[Phase, Action]:
        """Raises IllegalMove."""
        found = self._moves.get((at, event))
        if found is None:
            raise IllegalMove(f"{event.value!r} at {at.value!r}")
        return found

    def mermaid(self) -> str:
        """The table as a Mermaid state diagram, for the documentation."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.first}"]
        for (at, event), (to, action) in self._moves.items():
            lines.append(f"    {at} --> {to}: {event}" + ("" if action is None else f" / {action}"))
        return "\n".join(lines) + "\n"
