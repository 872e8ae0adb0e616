"""Which replica is to load a policy that is in demand, where the replicas do not hold all policies. Pure.

A policy is in demand when it is signalled or hinted at, and when a request is for it. What makes way for it is the replica's
decision (replica/policies.py).

Always holds:
- A policy that is loaded or being loaded somewhere is loaded on another replica for two reasons only: the session of a request
  lives there, or all that serve the policy are busy.
- No replica is asked that failed with the policy, or that has all its policies in use.
- Equal inputs give equal answers, so gateways that know the same agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from midstream.fleet.placement import load_limit, rank

#: A replica is busy with so many requests more than another one, while it is over its load limit, too.
SPREAD_MARGIN = 8
#: As the setting load_bound by default.
LOAD_BOUND = 0.25

State = Literal["absent", "coming", "serves", "failed"]


class PolicyPlace(NamedTuple):
    """A replica that is well, as one policy sees it.

    state: of the policy there. room: policies that could be loaded beside those that are; idle: those that could make way.
    load: requests on the replica, of all policies; weight: its part of new work.
    """

    name: str
    state: State = "absent"
    room: int = 0
    idle: int = 0
    load: int = 0
    weight: float = 1.0

    @property
    def takes(self) -> bool:
        return self.state == "absent" and self.room + self.idle > 0

    @property
    def filled(self) -> float:
        return self.load / self.weight


def where(policy: str, places: Sequence[PolicyPlace], home: str | None = None) -> str | None:
    """The replica that is to load the policy now; None: nothing is to be done. home: of the session that asks for it."""
    free = [place for place in places if place.takes]
    if any(place.name == home for place in free):
        return home
    if any(place.state == "coming" for place in places):
        return None
    serving = [place for place in places if place.state == "serves"]
    if serving:
        free = [place for place in free if all(_busy(one, place, places) for one in serving)]
    return max(free, key=lambda place: _fitness(policy, place), default=PolicyPlace("")).name or None


def _busy(serving: PolicyPlace, other: PolicyPlace, places: Sequence[PolicyPlace]) -> bool:
    """Whether it is worth loading the policy on the other one, too."""
    total, weights = sum(place.load for place in places), sum(place.weight for place in places)
    over = serving.load >= load_limit(total, LOAD_BOUND, serving.weight, weights)
    return over and serving.filled >= other.filled + SPREAD_MARGIN


def _fitness(policy: str, place: PolicyPlace) -> tuple[int, float, int]:
    """The most room first, then the least load. Ties are broken as for sessions: a policy comes back to where its files are."""
    return place.room, -place.filled, rank(policy, place.name)
