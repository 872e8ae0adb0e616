"""Record files that are gone, and the turns that left columns to them: what a reader of records says of them.

Always holds: every turn is counted, and only the first FILES_NAMED files are named.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from midstream.core.text import seconds

FILES_NAMED = 1000
#: Of those, how many a line for people has.
_SHOWN = 3


class GoneTurn(NamedTuple):
    """A turn without the columns that it left to `file`. where: its record. created: when it ended, since the epoch."""

    file: str
    where: str
    session: str
    created: float


@dataclass
class GoneFiles:
    """turns: that left columns to files that are gone. files: their names, with the turns of each."""

    turns: int = 0
    files: dict[str, int] = field(default_factory=dict)
    oldest: float = 0.0
    newest: float = 0.0
    more_files: int = 0
    _last: str = ""

    def add(self, turn: GoneTurn) -> None:
        self.oldest = min(self.oldest, turn.created) if self.turns else turn.created
        self.newest = max(self.newest, turn.created)
        self.turns += 1
        if turn.file in self.files or len(self.files) < FILES_NAMED:
            self.files[turn.file] = self.files.get(turn.file, 0) + 1
        elif turn.file != self._last:
            self.more_files += 1
        self._last = turn.file

    def summary(self) -> str:
        """For people: how many, which, and how old."""
        now = time.time()
        count = len(self.files) + self.more_files
        named = ", ".join([*self.files][:_SHOWN])
        rest = f" and {count - _SHOWN} more" if count > _SHOWN else ""
        ages = seconds(max(0.0, now - self.newest))
        if self.newest > self.oldest:
            ages += f" to {seconds(max(0.0, now - self.oldest))}"
        are = "are" if count > 1 else "is"
        return (
            f"{count} record file{'s' if count > 1 else ''} {are} gone, so {self.turns} turns, {ages} old, are without "
            f"their columns: {named}{rest}"
        )

    def facts(self) -> dict[str, Any]:
        """For a statement."""
        return {
            "turns": self.turns,
            "oldest": self.oldest,
            "newest": self.newest,
            "files": dict(sorted(self.files.items())),
            "more_files": self.more_files,
        }
