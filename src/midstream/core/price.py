"""What a session's move to another replica costs and saves, in seconds. Pure.

A replica measures what its turns are like and reports it (`TurnPace`). A gateway tells a replica whose turns wait what another
one offers (`RoomOffer`). That replica alone decides which of its turns go there, as it knows their tokens and their waits,
and hands them back to the gateway (`Handed`). So several gateways have one decision. A gateway sends the turn on with `Moved`.

Always holds:
- A session moves only if the time it saves is more than what computing its history costs, by MARGIN and GAIN_S_MIN. It leaves
  a busy engine for an idle one only if that saves SLOW_GAIN_S_MIN.
- A session that moved here moves again only if that saves what both moves cost, and not within MOVE_EVERY_S. So no session
  moves back and forth.
- A session that has not begun has nothing to lose: it goes where there is room for it.
- What was not measured is no gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

#: A gain is by so much more than the cost, as both are measured on the past. What a busy engine costs is measured less well
#: than a wait: other requests end before the answer does.
MARGIN, GAIN_S_MIN, SLOW_GAIN_S_MIN = 1.25, 0.25, 1.0
MOVE_EVERY_S = 60.0
#: An offer counts for so long. A gateway repeats it more often while it holds.
OFFER_S = 3.0
#: Of a replica whose cache is not known.
ROOM_UNKNOWN = 2**31

_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: Of a number in a report, an offer or a header.
NUMBER_MAX = 1e9
_Time = Annotated[float, msgspec.Meta(ge=0, le=NUMBER_MAX)]
#: A turn waits at its home; it would share a busy engine; its home leaves.
MoveReason = Literal["wait", "slow", "leaving"]


class TurnPace(msgspec.Struct, frozen=True, kw_only=True):
    """What turns of a replica are like. waiting: turns that wait now, for room in the KV cache or in the engine.

    wait_s: how long a turn of a session that has begun is likely to wait; 0: none waits. prefill_tokens_s: tokens of prompts
    that were computed per second. token_s: from one token of an answer to the next. answer_tokens: of an answer. Each is 0
    where nothing was measured. moved: sessions that moved here. moved_tokens: that were computed again for them.
    """

    waiting: _Whole = 0
    wait_s: _Time = 0.0
    prefill_tokens_s: _Time = 0.0
    token_s: _Time = 0.0
    answer_tokens: _Time = 0.0
    moved: _Whole = 0
    moved_tokens: _Whole = 0


class RoomOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway tells a replica of the best other one. room_tokens: what sessions may claim there. The rest is as in
    TurnPace. idle: nothing runs there. leaving: this replica is asked to leave, and others take its turns."""

    room_tokens: _Whole = 0
    prefill_tokens_s: _Time = 0.0
    token_s: _Time = 0.0
    idle: bool = False
    leaving: bool = False


class Handed(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of a turn that it hands over. tokens: of its prompt, which will be computed again. needs: what its
    session will claim. Both are of all turns of the session that go with it, so all have one decision. saved_s: by going at
    once. age_s: since the session began, or the turn came. prefill_tokens_s: measured at home. opened: tokens of the session's
    first prompt, which others of its group have; 0: not known."""

    reason: MoveReason
    tokens: _Whole
    needs: _Whole
    saved_s: _Time
    age_s: _Time
    begun: bool
    prefill_tokens_s: _Time
    opened: _Whole = 0


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway says of a session to its new home. url: of the one before, which has its turns; "": it has none, or is
    gone. begun: its history is computed again. age_s, opened: as in Handed; 0 where the session was not handed over."""

    url: str = ""
    begun: bool = True
    age_s: _Time = 0.0
    opened: _Whole = 0


class Target(NamedTuple):
    """A replica that takes new work. room_tokens: of its KV budget. load: requests on it."""

    name: str
    room_tokens: int
    load: int
    pace: TurnPace


def cost_s(tokens: int, prefill_tokens_s: float) -> float | None:
    """To compute so many tokens; None: not measured."""
    return tokens / prefill_tokens_s if prefill_tokens_s > 0 else None


def pays(
    saved_s: float,
    tokens: int,
    prefill_tokens_s: float,
    paid_tokens: int = 0,
    least_s: float = GAIN_S_MIN,
) -> bool:
    """Whether a move saves more than it costs. paid_tokens: what the session's move to its home cost. least_s: of the gain."""
    cost = cost_s(tokens + paid_tokens, prefill_tokens_s)
    return cost is not None and saved_s > cost * MARGIN + least_s


def slow_s(home: TurnPace, running: int, offer: RoomOffer) -> float:
    """What an answer of the usual length saves on an idle replica, beside those that run at home."""
    if not offer.idle or running < 1 or not offer.token_s:
        return 0.0
    return home.answer_tokens * max(0.0, home.token_s - offer.token_s)


def is_open(target: Target) -> bool:
    """Whether sessions may move there: nothing waits there, and there is room."""
    return not target.pace.waiting and target.room_tokens > 0


def offers(homes: Sequence[str], targets: Iterable[Target]) -> dict[str, RoomOffer]:
    """What each home is offered, by its name: the one with the most room, shared equally by the homes that it is offered to.

    homes: replicas with turns that wait, the longest wait first, and others whose turns may move.
    """
    able = sorted(filter(is_open, targets), key=lambda one: (one.load > 0, -one.room_tokens, one.name))
    chosen: dict[str, Target] = {}
    for at, home in enumerate(homes):
        others = [one for one in able if one.name != home]
        if others:
            chosen[home] = others[at % len(others)]
    shares = Counter(one.name for one in chosen.values())
    found = {}
    for home, one in chosen.items():
        found[home] = RoomOffer(
            room_tokens=one.room_tokens // shares[one.name],
            prefill_tokens_s=one.pace.prefill_tokens_s,
            token_s=one.pace.token_s,
            idle=one.load == 0,
        )
    return found


def best(handed: Handed, targets: Iterable[Target]) -> tuple[Target, float] | None:
    """Where a turn that was handed over goes, and what that costs in seconds; None: it pays nowhere."""
    found: list[tuple[float, int, str, Target]] = []
    for one in targets:
        if not is_open(one) or one.room_tokens < handed.needs or (handed.reason == "slow" and one.load):
            continue
        rate = one.pace.prefill_tokens_s or handed.prefill_tokens_s
        cost = cost_s(handed.tokens, rate) if handed.begun else 0.0
        if handed.reason == "leaving":
            cost = cost or 0.0
        elif cost is None or (handed.begun and cost >= handed.saved_s):
            continue
        found.append((cost, -one.room_tokens, one.name, one))
    if not found:
        return None
    cost, _, _, target = min(found)
    return target, cost
