"""The way of one request through the proxy, as a table. Pure; request.py does the I/O, policies (route.py) judge.

Always holds: every move is one entry of `MOVES`; any other raises. Nothing leads out of OVER. At most one response head
reaches the client. A stream is resumed on another replica once.
"""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """Where a request stands. `resume_` and RESUMED: its stream had begun and its replica was lost."""

    PLACING = "placing"
    WAITING = "waiting"
    CONNECTING = "connecting"
    SENT = "sent"
    HELD = "held"
    PASSING = "passing"
    RESUME_PLACING = "resume_placing"
    RESUME_WAITING = "resume_waiting"
    RESUME_CONNECTING = "resume_connecting"
    RESUME_SENT = "resume_sent"
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
    #: The head of a response that is read to its end before it is judged.
    REFUSED = "refused"
    #: Another upstream is to be tried.
    ELSEWHERE = "elsewhere"
    #: A stream lost its replica, and another one may go on with it.
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
    GO_ON = "go on"
    FINISH = "finish"
    ANSWER_ERROR = "answer error"
    END_SHORT = "end short"
    COUNT_LEFT = "count left"
    LEAVE = "leave"


_FIRST = (Phase.PLACING, Phase.WAITING, Phase.CONNECTING, Phase.SENT, Phase.HELD)
_AGAIN = (
    Phase.RESUME_PLACING,
    Phase.RESUME_WAITING,
    Phase.RESUME_CONNECTING,
    Phase.RESUME_SENT,
    Phase.RESUME_HELD,
)
_STREAMING = (*_AGAIN, Phase.PASSING, Phase.RESUMED)

Moves = dict[tuple[Phase, Event], tuple[Phase, Action]]


def _asking(placing: Phase, waiting: Phase, connecting: Phase, sent: Phase, held: Phase) -> Moves:
    """Finding an upstream, the same way for a request and for the rest of a stream."""
    return {
        (placing, Event.PLACED): (connecting, Action.CONNECT),
        (placing, Event.NOT_YET): (waiting, Action.WAIT),
        (waiting, Event.WOKEN): (placing, Action.PLACE),
        (connecting, Event.CONNECTED): (sent, Action.SEND),
        (connecting, Event.ELSEWHERE): (placing, Action.PLACE),
        (sent, Event.STALE): (connecting, Action.CONNECT_AFRESH),
        (sent, Event.ELSEWHERE): (placing, Action.PLACE),
        (sent, Event.REFUSED): (held, Action.HOLD),
        (held, Event.ELSEWHERE): (placing, Action.PLACE),
    }


#: The legal moves, all of them.
MOVES: Moves = {
    **_asking(*_FIRST),
    (Phase.SENT, Event.HEAD): (Phase.PASSING, Action.PASS_HEAD),
    (Phase.HELD, Event.HEAD): (Phase.PASSING, Action.PASS_HEAD),
    (Phase.PASSING, Event.END): (Phase.OVER, Action.FINISH),
    (Phase.PASSING, Event.LOST): (Phase.RESUME_PLACING, Action.PLACE),
    **_asking(*_AGAIN),
    (Phase.RESUME_SENT, Event.HEAD): (Phase.RESUMED, Action.GO_ON),
    (Phase.RESUMED, Event.END): (Phase.OVER, Action.FINISH),
    **{(phase, Event.FAILED): (Phase.OVER, Action.ANSWER_ERROR) for phase in _FIRST},
    **{(phase, Event.FAILED): (Phase.OVER, Action.END_SHORT) for phase in _STREAMING},
    **{(phase, Event.CLIENT_GONE): (Phase.OVER, Action.COUNT_LEFT) for phase in _FIRST},
    **{(phase, Event.CLIENT_GONE): (Phase.OVER, Action.LEAVE) for phase in _STREAMING},
}

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
#: Another replica is asked to go on with a stream, and has not begun to.
RESUMING = frozenset(_AGAIN)


class IllegalMove(RuntimeError):
    """A move that the table does not have: a bug, never a user's or a replica's mistake."""


class RequestState:
    """phase: where the request stands; it begins with PLACING."""

    __slots__ = ("phase",)

    def __init__(self) -> None:
        self.phase = Phase.PLACING

    def __repr__(self) -> str:
        return f"RequestState({self.phase})"

    def move(self, event: Event) -> Action:
        """What the I/O is to do now. Raises IllegalMove."""
        found = MOVES.get((self.phase, event))
        if found is None:
            raise IllegalMove(f"{event.value!r} at {self.phase.value!r}")
        self.phase, action = found
        return action


def mermaid() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.PLACING}"]
    lines += [f"    {at} --> {to}: {event} / {action}" for (at, event), (to, action) in MOVES.items()]
    return "\n".join(lines) + "\n"
