"""The pauses of one deployment: which one the ledger has, and which replicas have carried it out.

Always holds:
- A pause that its trainer does not end ends after PAUSE_S_MAX.
- A boot joins only once it is paused as the ledger has it.
- A replica's pause that the ledger does not know is ended by a greater serial.
- A policy pauses with its deployment. What its replicas report of pauses is the deployment's alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection

from midstream.core.reports import ReplicaReport
from midstream.core.served_names import POLICY_INFIX
from midstream.core.types import Pause
from midstream.fleet.view import ReplicaView
from midstream.ledger import Ledger, LedgerUnavailable

logger = logging.getLogger(__name__)

#: Of one pause, as this process knows of it. The trainer that paused may have died.
PAUSE_S_MAX = 3600.0


class Pauses:
    """poll_s: the time before a message is repeated. current: the pause that the ledger has."""

    def __init__(
        self, ledger: Ledger, deployment: str, poll_s: float, monotonic: Callable[[], float]
    ) -> None:
        self._ledger = ledger
        self._deployment = deployment
        self._of_policy = POLICY_INFIX in deployment
        self._poll_s = poll_s
        self._monotonic = monotonic
        self.current = Pause()
        self._since = 0.0
        # Replica to its boot, the pause that was sent, and when.
        self._sent: dict[str, tuple[str, Pause, float]] = {}

    def __repr__(self) -> str:
        return f"Pauses({self._deployment}, {self.current})"

    def forget_leavers(self, members: Collection[str]) -> None:
        self._sent = {name: sent for name, sent in self._sent.items() if name in members}

    async def end_if_old(self, pause: Pause) -> bool:
        """Take over what the ledger has. Returns whether it was ended here."""
        now = self._monotonic()
        if pause != self.current:
            self.current, self._since = pause, now
        if pause.mode is None or now - self._since < PAUSE_S_MAX:
            return False
        logger.warning("%s was paused for %g s; it resumes", self._deployment, PAUSE_S_MAX)
        with contextlib.suppress(LedgerUnavailable):
            await self._ledger.pause(self._deployment, None, only=pause.serial)
        return True

    async def outdo(self, views: Collection[ReplicaView]) -> bool:
        """Outdo a pause of a replica that outlived an older ledger. Returns whether a replica is ahead of the ledger until
        this was stored, and read."""
        pause, reports = self.current, [self._heard(view) for view in views]
        seen = max((report.pause.serial for report in reports if report is not None), default=0)
        if seen <= pause.serial:
            return False
        with contextlib.suppress(LedgerUnavailable):
            # Nothing, where another gateway has paused meanwhile.
            await self._ledger.pause(self._deployment, pause.mode, only=pause.serial, floor=seen)
        return True

    def lets_join(self, view: ReplicaView) -> bool:
        return self.current.mode is None or (self._heard(view) is not None and not self.lags(view))

    def lags(self, view: ReplicaView) -> bool:
        """Whether the replica reports an older pause."""
        heard = self._heard(view)
        return heard is not None and heard.pause.serial < self.current.serial

    def due(self, view: ReplicaView) -> bool:
        """Whether the replica is to be sent the current pause now."""
        heard = self._heard(view)
        if heard is None or not self.lags(view):
            return False
        now, boot = self._monotonic(), heard.boot
        *last, last_at = self._sent.get(view.name, ("", None, float("-inf")))
        if last == [boot, self.current] and now - last_at < self._poll_s:
            return False
        self._sent[view.name] = (boot, self.current, now)
        return True

    def _heard(self, view: ReplicaView) -> ReplicaReport | None:
        return None if self._of_policy else view.replica.heard
