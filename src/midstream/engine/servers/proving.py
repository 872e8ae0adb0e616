"""What requests may see of a server's new weights before these have passed their check.

The server loads weights in place. So it computes the prompt of the check beside the streams that crossed the switch.
Owns: the standing of the serving weights.
Always holds: what was sampled after a switch leaves the engine once the weights have passed, or never. A request that waits for
weights that fail ends with StreamLost, and its last event is from before the switch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from midstream.core.types import BASE_SNAPSHOT
from midstream.engine.base import StreamLost
from midstream.engine.servers.requests import ServerRequest


class WeightsStanding(enum.Enum):
    PROVED = "proved"
    UNPROVED = "unproved"
    #: They failed their check. Whatever serves next, the server's free KV blocks may hold numbers that are not finite.
    REFUSED = "refused"


class Proving:
    """requests: those inside the engine, by id."""

    def __init__(self, requests: Mapping[str, ServerRequest]) -> None:
        self._requests = requests
        self._snapshot = BASE_SNAPSHOT
        self.standing = WeightsStanding.PROVED

    def __repr__(self) -> str:
        return f"Proving({self._snapshot!r} is {self.standing.value})"

    def started(self) -> None:
        """The server has just been started, with weights that need no check."""
        self._snapshot, self.standing = BASE_SNAPSHOT, WeightsStanding.PROVED

    @property
    def spoilt(self) -> bool:
        """True if the serving weights failed. Their name may mean other files by now, but the cached KV stays spoilt."""
        return self.standing is WeightsStanding.REFUSED

    def begins(self, run: ServerRequest) -> None:
        """A request comes in. Raises StreamLost."""
        if run.request.urgent or self.standing is WeightsStanding.PROVED:
            return
        if self.standing is WeightsStanding.REFUSED:
            raise StreamLost(self._why)
        run.keep_back()

    def switched(self, snapshot: str) -> None:
        self._snapshot, self.standing = snapshot, WeightsStanding.UNPROVED
        for run in self._requests.values():
            if not run.request.urgent:
                run.keep_back()

    def settle(self, snapshot: str, *, sound: bool) -> None:
        """The check of `snapshot` has ended."""
        if snapshot != self._snapshot or self.standing is not WeightsStanding.UNPROVED:
            return
        self.standing = WeightsStanding.PROVED if sound else WeightsStanding.REFUSED
        for run in self._requests.values():
            if sound:
                run.release()
            elif not run.request.urgent:
                run.lose(StreamLost(self._why))

    @property
    def _why(self) -> str:
        return f"the snapshot {self._snapshot} failed its check"
