"""What the prompt tokens of a run were computed for: the first time, once more, or because the cache had dropped them.

Owns: the split of each turn's computed tokens. Pure; it knows lengths and times only.
Always holds: computed = first + again + evicted, for each turn and for a run.

    first     no replica had begun to compute them, so somebody had to
    again     a replica had, but not the one that got this turn; or this one had not ended yet, as when streams of a group begin
    evicted   this replica had them since an earlier turn ended, and did not find them: evicted and needed

Tokens are found in whole blocks, so those of a block that was never full are computed for the first time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentic.trace import Trace, Trajectory


@dataclass(frozen=True)
class Served:
    """A turn that was answered whole. place: of its trajectory in the trace. Times are seconds of one clock."""

    place: int
    replica: str
    began_s: float
    ended_s: float
    prompt: int
    cached: int
    answer: int


@dataclass(frozen=True)
class Books:
    """Prompt tokens."""

    prompt: int = 0
    cached: int = 0
    first: int = 0
    again: int = 0
    evicted: int = 0

    @property
    def computed(self) -> int:
        return self.first + self.again + self.evicted

    def __add__(self, other: Books) -> Books:
        return Books(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class Known:
    """Which prefixes of which trajectories were computed somewhere."""

    def __init__(self) -> None:
        self._own = dict[int, int]()
        self._groups = set[int]()

    def add(self, place: int, one: Trajectory, tokens: int) -> None:
        self._own[place] = max(tokens, self._own.get(place, 0))
        self._groups.add(one.group)

    def of(self, place: int, one: Trajectory, shared_len: int) -> int:
        """Tokens of this trajectory that are known: its own, else its group's prompt, else what all share."""
        if place in self._own:
            return self._own[place]
        if one.group in self._groups:
            return one.prompt_len
        return shared_len if self._groups else 0


def split(
    trace: Trace, turns: Sequence[Served], block: int, lost: Iterable[tuple[str, float]] = ()
) -> list[Books]:
    """Of each turn. lost: a replica and when its process died with all it had."""
    begun, there = Known(), defaultdict[str, Known](Known)
    # Ends before beginnings of the same moment, since the next turn begins when the last one ends.
    events = [(one.ended_s, 0, number) for number, one in enumerate(turns)]
    events += [(one.began_s, 1, number) for number, one in enumerate(turns)]
    deaths = sorted(lost, key=lambda death: death[1])
    found: dict[int, Books] = {}
    for at, begins, number in sorted(events):
        while deaths and deaths[0][1] <= at:
            there.pop(deaths.pop(0)[0], None)
        turn = turns[number]
        one = trace.trajectories[turn.place]
        if not begins:
            there[turn.replica].add(turn.place, one, turn.prompt + turn.answer - 1)
            continue
        # At least the last token of a prompt is computed.
        somewhere, here = (
            min(known.of(turn.place, one, trace.shared_len), turn.prompt - 1) // block * block
            for known in (begun, there[turn.replica])
        )
        begun.add(turn.place, one, turn.prompt + turn.answer - 1)
        found[number] = _of_turn(turn, somewhere, here)
    return [found[number] for number in range(len(turns))]


def _of_turn(turn: Served, somewhere: int, here: int) -> Books:
    evicted = max(0, here - turn.cached)
    again = max(0, somewhere - max(here, turn.cached))
    first = turn.prompt - turn.cached - evicted - again
    return Books(turn.prompt, turn.cached, first, again, evicted)


def total(books: Iterable[Books]) -> Books:
    return sum(books, Books())
