"""How one attempt to serve a snapshot went: its stages one after the other, and how it ended. Pure.

Always holds: a stage begins where the one before it ended; a stage that did not end is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from midstream.core.measures import Trajectories
from midstream.core.types import Desired, SwapTiming
from midstream.replica.swap.table import SwapEvent

#: The stage that an event ends, of core.sessions.SWAP_STAGES.
STAGES: dict[SwapEvent, str] = {
    SwapEvent.FETCHED: "fetch",
    SwapEvent.FETCHED_DELTA: "fetch",
    SwapEvent.REBUILT: "rebuild",
    SwapEvent.VERIFIED: "verify",
    SwapEvent.STAGED: "stage",
    SwapEvent.COMMIT: "hold",
    SwapEvent.COMMITTED: "commit",
    SwapEvent.CHECKED: "check",
}


@dataclass(eq=False)
class SwapHistory:
    """Times in seconds on the clock of the driver. timing: None until it has switched."""

    desired: Desired
    began_s: float
    ended_s: float = 0.0
    outcome: Literal["ready", "unchanged", "failed", "superseded", "stopped"] = "superseded"
    error: str = ""
    timing: SwapTiming | None = None
    #: (event, when), in their order.
    marks: list[tuple[SwapEvent, float]] = field(default_factory=list)

    def stages(self) -> Iterator[tuple[str, float, float]]:
        """(stage, its beginning, its end)."""
        since_s = self.began_s
        for event, at_s in self.marks:
            yield STAGES[event], since_s, at_s
            since_s = at_s

    def count(self, measures: Trajectories) -> None:
        measures.count("swaps", self.outcome)
        for stage, since_s, until_s in self.stages():
            measures.observe(f"swap_{stage}_seconds", until_s - since_s)
        if self.timing is not None:
            measures.observe("swap_pause_seconds", self.timing.pause_ms / 1e3)
            measures.observe("swap_streams_crossed", self.timing.streams_crossed)
        if self.outcome in ("ready", "unchanged"):
            measures.observe("swap_seconds", self.ended_s - self.began_s)
