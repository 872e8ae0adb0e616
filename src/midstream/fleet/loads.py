"""The loads of a deployment's replicas side by side, for placement among hundreds of them.

Always holds:
- After `read`, the place of each listed replica has its load.
- A replica notes a change here once until the next `read`. So a turn of a known session, which reads nothing, costs no write.
- A table is as long as it was made. When other replicas belong to the deployment, they are listed in another table, and no one
  reads this one any more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol


class Listed(Protocol):
    """A replica in a table. noted: the table knows that its load changed, or there is no table."""

    load: int
    place: int
    noted: bool


class LoadTable:
    def __init__(self, replicas: Sequence[Listed]) -> None:
        """The replicas get their places here in this order."""
        # Numpy reads it without a copy.
        self._loads = array("d", [replica.load for replica in replicas])
        #: Of all of them, as `read` found them.
        self.total = sum(self._loads)
        self.changed: list[Listed] = []
        for place, replica in enumerate(replicas):
            replica.place, replica.noted = place, False

    def __repr__(self) -> str:
        return f"LoadTable({len(self._loads)} replicas, {len(self.changed)} changed)"

    def __len__(self) -> int:
        return len(self._loads)

    def read(self) -> array[float]:
        """The loads by place, as they are now: always the same array."""
        for replica in self.changed:
            self.total += replica.load - self._loads[replica.place]
            self._loads[replica.place] = replica.load
            replica.noted = False
        self.changed.clear()
        return self._loads
