"""What the replicas of a deployment offer each other's waiting turns, and where a turn goes that its home hands over.

The price itself is in core/price.py. A home decides by what it measures; a gateway says what others reported last.
Always holds:
- The gateway sends a replica an offer only while turns wait there, while an idle one stands beside it, or if it is asked to
  leave. A turn of a known session costs no look here.
- The gateway asks a replica to leave only while another one is usable. An offer lapses by itself.
- What was promised to sessions that move is no room for others until the new home has reported it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

import msgspec

from midstream.core.errors import ReplicaUnavailable
from midstream.core.price import ROOM_UNKNOWN, Handed, RoomOffer, Target, best, is_open, offers
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.placement import Decision
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.view import ReplicaView

#: How often all reports are looked at, and for how long one replica may take to hear an offer.
LOOK_S, TELL_S = 0.5, 1.0
#: After so long a home's report has what moved there.
PROMISED_S = 1.0
#: From so many requests on, a replica is busy.
BUSY_FROM = 2
_LEAVE, _NOTHING = RoomOffer(leaving=True), RoomOffer()


class Mover:
    """replicas: as the deployment's own weights see them. monotonic: in seconds."""

    def __init__(self, replicas: ReplicaSet, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._replicas = replicas
        self._monotonic = monotonic
        # By replica: what sessions that move there need, and until when it may be in no report.
        self._promised: dict[KnownReplica, deque[tuple[float, int]]] = {}
        self._told: set[str] = set()
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"Mover({self._replicas!r})"

    async def run(self) -> None:
        """Until cancelled."""
        self._replicas.subscribe(self._on_change)
        while True:
            self._news.clear()
            await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    async def look(self) -> None:
        """Tell every replica what it is to know now."""
        for replica in [one for one in self._promised if one.standing == "gone"]:
            del self._promised[replica]
        leaving = {view.name for view in self._replicas.leaving}
        back, self._told = self._told - leaving, leaving
        made = self.made()
        # One that was to leave, and is not any more, keeps its turns at once.
        offered = {view.name for view, _ in made}
        made += [(view, _NOTHING) for view in self._replicas.views if view.name in back - offered]
        if made:
            await asyncio.gather(*(self._tell(view, offer) for view, offer in made))

    async def _tell(self, view: ReplicaView, offer: RoomOffer) -> None:
        # The next offer follows soon.
        with contextlib.suppress(ReplicaUnavailable):
            body = msgspec.json.encode(offer)
            await self._replicas.post(view, "/replica/offer", body, 202, TELL_S)

    def _on_change(self) -> None:
        if {view.name for view in self._replicas.leaving} != self._told:
            self._news.set()

    # -- what is offered

    def made(self) -> list[tuple[ReplicaView, RoomOffer]]:
        """The replicas that get an offer now, each with its offer."""
        views, leaving = self._replicas.views, self._replicas.leaving
        heard = [view for view in views if view.replica.heard is not None]
        found: list[tuple[ReplicaView, RoomOffer]] = []
        if leaving and any(view.usable for view in views):
            found += [(view, _LEAVE) for view in leaving if view.replica.heard is not None]
        if not any(_waiting(view) or view.replica.load >= BUSY_FROM for view in heard):
            # Nearly always.
            return found
        targets = self._targets(heard)
        idle = any(not target.load for target in targets if is_open(target))
        homes = {
            view.name: view for view in heard if _waiting(view) or (idle and view.replica.load >= BUSY_FROM)
        }
        order = sorted(homes, key=lambda name: (-_wait_s(homes[name]), name))
        return found + [(homes[name], offer) for name, offer in offers(order, targets).items()]

    def _targets(self, views: Iterable[ReplicaView]) -> list[Target]:
        return [self._target(view) for view in views if view.usable and view.admitting]

    def _target(self, view: ReplicaView) -> Target:
        replica = view.replica
        report = replica.heard
        assert report is not None
        waits = report.kv_waits
        room = waits.budget_tokens - waits.claimed_tokens if waits.budget_tokens else ROOM_UNKNOWN
        return Target(view.name, room - self._promises(replica), replica.load, report.pace)

    def _promises(self, replica: KnownReplica) -> int:
        promised, now = self._promised.get(replica), self._monotonic()
        while promised and promised[0][0] <= now:
            promised.popleft()
        if not promised:
            self._promised.pop(replica, None)
            return 0
        return sum(tokens for _, tokens in promised)

    # -- where a turn goes

    def place(
        self,
        handed: Handed,
        home: str,
        tried: Collection[str] = (),
        eligible: Callable[[ReplicaView], bool] | None = None,
        of: ReplicaSet | None = None,
    ) -> tuple[ReplicaView, Decision] | None:
        """Where a turn goes that its home hands over; None: it pays nowhere. of: as the turn's policy sees the replicas."""
        able = {
            view.name: view
            for view in (of or self._replicas).views
            if view.usable and view.admitting and view.name not in (home, *tried)
            if view.replica.heard is not None and (eligible is None or eligible(view))
        }
        found = best(handed, map(self._target, able.values()))
        if found is None:
            return None
        target, cost = found
        view = able[target.name]
        promised = self._promised.setdefault(view.replica, deque())
        promised.append((self._monotonic() + PROMISED_S, handed.needs))
        why = f"{home} hands it over ({handed.reason}): {handed.tokens} tokens cost {cost:.2g} s there"
        if handed.reason != "leaving":
            why += f", and {handed.saved_s:.2g} s are saved"
        return view, Decision(view.name, "priced", why)


def _waiting(view: ReplicaView) -> int:
    report = view.replica.heard
    return 0 if report is None else report.pace.waiting


def _wait_s(view: ReplicaView) -> float:
    report = view.replica.heard
    return 0.0 if report is None else report.pace.wait_s
