"""The way of one request through the proxy, as a table. Pure; request.py does the I/O, policies (route.py) judge.

Owns: the reasons for which an upstream refuses a request, and what follows each of them (`RULINGS`).
Always holds: every move is one entry of `MOVES`; any other raises. Nothing leads out of OVER. At most one response head
reaches the client. A stream is resumed on another replica once. A response is held only for a reason that has a ruling.
"""

from __future__ import annotations

import enum

from midstream.core.table import Table


class Phase(enum.StrEnum):
    """Where a request stands. `resume_` and RESUMED: its stream had begun and its replica was lost."""

    PLACING = "placing"
    WAITING = "waiting"
    CONNECTING = "connecting"
    SENT = "sent"
    #: The upstream may have seen the request: the connection that it was sent over is gone, and a fresh one is opened.
    RECONNECTING = "reconnecting"
    HELD = "held"
    PASSING = "passing"
    RESUME_PLACING = "resume_placing"
    RESUME_WAITING = "resume_waiting"
    RESUME_CONNECTING = "resume_connecting"
    RESUME_SENT = "resume_sent"
    RESUME_RECONNECTING = "resume_reconnecting"
    RESUME_HELD = "resume_held"
    RESUMED = "resumed"
    OVER = "over"


class Event(enum.StrEnum):
    #: An upstream was chosen.
    PLACED = "placed"
    #: No upstream can take it yet, but one may be able to later.
    NOT_YET = "not yet"
    #: What it waits for may have come, or its time is up.
    WOKEN = "woken"
    CONNECTED = "connected"
    #: A pooled connection was closed before the upstream saw the request.
    STALE = "stale"
    #: The head of the response that the client gets; in RESUME_SENT, of the rest of its stream.
    HEAD = "head"
    # The reasons of a refusal. Each is the head of a response that is read to its end before it is judged.
    #: The replica's engine was lost while it worked on the request.
    ENGINE_LOST = "engine lost"
    #: The boot that the request was placed on is gone.
    OTHER_BOOT = "other boot"
    #: The replica does not hold the request's policy.
    POLICY_NOT_LOADED = "policy not loaded"
    #: Another snapshot serves than the request asks for.
    UNFIT = "unfit"
    #: A synchronous swap is under way.
    TRANSITION = "transition"
    #: The replica has too much to do.
    BUSY = "busy"
    #: It cannot take the request, and does not say why.
    UNAVAILABLE = "unavailable"
    #: Another replica holds the response that the request continues.
    HELD_ELSEWHERE = "held elsewhere"
    #: The replica cannot continue this stream.
    CANNOT_RESUME = "cannot resume"
    #: Another upstream is to be tried.
    ELSEWHERE = "elsewhere"
    #: A stream lost its replica, and another one may continue it.
    LOST = "lost"
    #: The response is whole.
    END = "end"
    #: It ends with an error.
    FAILED = "failed"
    CLIENT_GONE = "client gone"


class Action(enum.StrEnum):
    """What the I/O does in a move. All that lead to PLACING or OVER let go of the upstream first."""

    PLACE = "place"
    WAIT = "wait"
    CONNECT = "connect"
    CONNECT_AFRESH = "connect afresh"
    SEND = "send"
    PASS_HEAD = "pass head"
    HOLD = "hold"
    CONTINUE = "continue"
    FINISH = "finish"
    ANSWER_ERROR = "answer error"
    END_SHORT = "end short"
    COUNT_LEFT = "count left"
    LEAVE = "leave"


class Ruling(enum.StrEnum):
    """What follows a refusal once it has been read."""

    #: The replica counts as lost with the request (poison.py). Another one is asked.
    LOSS = "counts as a loss, then another replica"
    #: Nothing was done for the request: it is placed as if it had just come.
    PLACE_AGAIN = "placed again"
    #: Its version constraint is judged again.
    JUDGED_AGAIN = "judged again"
    #: Another replica is asked, unless the session has to stay; else the client gets the refusal.
    ANOTHER = "another replica, or the client gets it"
    #: The replica that the refusal names is asked.
    HOLDER = "the holder, or the client gets it"
    #: The client gets the refusal at once.
    LAST_WORD = "the client gets it"
    #: The next replica is asked. Nothing counts as lost.
    NEXT = "the next replica"


_FIRST = (
    Phase.PLACING,
    Phase.WAITING,
    Phase.CONNECTING,
    Phase.SENT,
    Phase.RECONNECTING,
    Phase.HELD,
)
_AGAIN = (
    Phase.RESUME_PLACING,
    Phase.RESUME_WAITING,
    Phase.RESUME_CONNECTING,
    Phase.RESUME_SENT,
    Phase.RESUME_RECONNECTING,
    Phase.RESUME_HELD,
)
_STREAMING = (*_AGAIN, Phase.PASSING, Phase.RESUMED)

Moves = dict[tuple[Phase, Event], tuple[Phase, Action]]

#: By reason: what follows if the client has nothing yet, and if its stream is to be continued. None: it cannot happen.
RULINGS: dict[Event, tuple[Ruling | None, Ruling]] = {
    Event.ENGINE_LOST: (Ruling.LOSS, Ruling.LOSS),
    Event.OTHER_BOOT: (Ruling.PLACE_AGAIN, Ruling.PLACE_AGAIN),
    Event.POLICY_NOT_LOADED: (Ruling.PLACE_AGAIN, Ruling.PLACE_AGAIN),
    Event.UNFIT: (Ruling.JUDGED_AGAIN, Ruling.NEXT),
    Event.TRANSITION: (Ruling.LAST_WORD, Ruling.NEXT),
    Event.BUSY: (Ruling.ANOTHER, Ruling.NEXT),
    Event.UNAVAILABLE: (Ruling.ANOTHER, Ruling.NEXT),
    Event.HELD_ELSEWHERE: (Ruling.HOLDER, Ruling.NEXT),
    Event.CANNOT_RESUME: (None, Ruling.NEXT),
}
#: The client may get the refusal itself.
MAY_PASS = frozenset((Ruling.ANOTHER, Ruling.HOLDER, Ruling.LAST_WORD))


def _asking(
    placing: Phase, waiting: Phase, connecting: Phase, sent: Phase, reconnecting: Phase, held: Phase
) -> Moves:
    """Finding an upstream, the same way for a request and for the rest of a stream."""
    return {
        (placing, Event.PLACED): (connecting, Action.CONNECT),
        (placing, Event.NOT_YET): (waiting, Action.WAIT),
        (waiting, Event.WOKEN): (placing, Action.PLACE),
        (connecting, Event.CONNECTED): (sent, Action.SEND),
        (connecting, Event.ELSEWHERE): (placing, Action.PLACE),
        (sent, Event.STALE): (reconnecting, Action.CONNECT_AFRESH),
        (sent, Event.ELSEWHERE): (placing, Action.PLACE),
        (reconnecting, Event.CONNECTED): (sent, Action.SEND),
        (reconnecting, Event.ELSEWHERE): (placing, Action.PLACE),
        (held, Event.ELSEWHERE): (placing, Action.PLACE),
    }


def _refused() -> Moves:
    """What is held, by the rulings."""
    moves: Moves = {}
    for reason, (first, _) in RULINGS.items():
        if first is Ruling.LAST_WORD:
            moves[Phase.SENT, reason] = (Phase.PASSING, Action.PASS_HEAD)
        elif first is not None:
            moves[Phase.SENT, reason] = (Phase.HELD, Action.HOLD)
        moves[Phase.RESUME_SENT, reason] = (Phase.RESUME_HELD, Action.HOLD)
    return moves


#: The legal moves, all of them.
MOVES: Table[Phase, Event, Action] = Table(
    Phase.PLACING,
    {
        **_asking(*_FIRST),
        **_refused(),
        (Phase.SENT, Event.HEAD): (Phase.PASSING, Action.PASS_HEAD),
        (Phase.HELD, Event.HEAD): (Phase.PASSING, Action.PASS_HEAD),
        (Phase.PASSING, Event.END): (Phase.OVER, Action.FINISH),
        (Phase.PASSING, Event.LOST): (Phase.RESUME_PLACING, Action.PLACE),
        **_asking(*_AGAIN),
        (Phase.RESUME_SENT, Event.HEAD): (Phase.RESUMED, Action.CONTINUE),
        (Phase.RESUMED, Event.END): (Phase.OVER, Action.FINISH),
        **{(phase, Event.FAILED): (Phase.OVER, Action.ANSWER_ERROR) for phase in _FIRST},
        **{(phase, Event.FAILED): (Phase.OVER, Action.END_SHORT) for phase in _STREAMING},
        **{(phase, Event.CLIENT_GONE): (Phase.OVER, Action.COUNT_LEFT) for phase in _FIRST},
        **{(phase, Event.CLIENT_GONE): (Phase.OVER, Action.LEAVE) for phase in _STREAMING},
    },
)

#: The client has the head of a response.
ANSWERED = frozenset((*_STREAMING, Phase.OVER))
#: A connection is being opened, or the request was sent over one.
AT_UPSTREAM = frozenset(Phase) - {
    Phase.PLACING,
    Phase.WAITING,
    Phase.RESUME_PLACING,
    Phase.RESUME_WAITING,
    Phase.OVER,
}
#: Another replica is asked to continue a stream, and has not begun to.
RESUMING = frozenset(_AGAIN)
#: The upstream may have seen the request.
SEEN = AT_UPSTREAM - {Phase.CONNECTING, Phase.RESUME_CONNECTING}


class RequestState:
    """phase: where the request stands; it begins with PLACING. refusal: the reason why a response was held last."""

    __slots__ = ("phase", "refusal")

    def __init__(self) -> None:
        self.phase = Phase.PLACING
        self.refusal: Event | None = None

    def __repr__(self) -> str:
        return f"RequestState({self.phase}, refusal={self.refusal})"

    def move(self, event: Event) -> Action:
        """What the I/O is to do now. Raises IllegalMove."""
        self.phase, action = MOVES.move(self.phase, event)
        if action is Action.HOLD:
            self.refusal = event
        return action


def ruling(phase: Phase, reason: Event) -> Ruling:
    """What follows a refusal for this reason, of a request in this phase."""
    first, again = RULINGS[reason]
    found = again if phase in RESUMING else first
    assert found is not None, f"{reason!r} at {phase!r}"
    return found


def rulings_table() -> str:
    """The rulings as a Markdown table, for the documentation."""
    lines = ["| the replica refuses because | a request | the rest of a stream |", "|---|---|---|"]
    lines += [f"| {reason} | {first or 'never'} | {again} |" for reason, (first, again) in RULINGS.items()]
    return "\n".join(lines) + "\n"
