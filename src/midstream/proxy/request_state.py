"""The way of one request through the proxy, as a table. Pure; request.py does the I/O, policies (route.py) judge.

Owns: the reasons for which an upstream refuses a request, and what follows each of them (`RULINGS`).
Always holds: every move is one entry of `MOVES`; any other raises. Nothing leads out of OVER. At most one response head
reaches the client. A stream is resumed on another replica once. A response is held only for a reason that has a ruling.
"""

from __future__ import annotations

import enum

from midstream.core.table import Table


class RequestPhase(enum.StrEnum):
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


class RequestEvent(enum.StrEnum):
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
    #: Another replica is to take the turn, as that costs less than it saves, or as this one leaves.
    HANDED_OVER = "handed over"
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


class RequestAction(enum.StrEnum):
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
    #: It goes where its move pays, else back to the replica, which keeps it.
    MOVE = "moves by its price, or goes back"
    #: The replica that the refusal names is asked.
    HOLDER = "the holder, or the client gets it"
    #: The client gets the refusal at once.
    LAST_WORD = "the client gets it"
    #: The next replica is asked. Nothing counts as lost.
    NEXT = "the next replica"


_FIRST = (
    RequestPhase.PLACING,
    RequestPhase.WAITING,
    RequestPhase.CONNECTING,
    RequestPhase.SENT,
    RequestPhase.RECONNECTING,
    RequestPhase.HELD,
)
_AGAIN = (
    RequestPhase.RESUME_PLACING,
    RequestPhase.RESUME_WAITING,
    RequestPhase.RESUME_CONNECTING,
    RequestPhase.RESUME_SENT,
    RequestPhase.RESUME_RECONNECTING,
    RequestPhase.RESUME_HELD,
)
_STREAMING = (*_AGAIN, RequestPhase.PASSING, RequestPhase.RESUMED)

Moves = dict[tuple[RequestPhase, RequestEvent], tuple[RequestPhase, RequestAction]]

#: By reason: what follows if the client has nothing yet, and if its stream is to be continued. None: it cannot happen.
RULINGS: dict[RequestEvent, tuple[Ruling | None, Ruling]] = {
    RequestEvent.ENGINE_LOST: (Ruling.LOSS, Ruling.LOSS),
    RequestEvent.OTHER_BOOT: (Ruling.PLACE_AGAIN, Ruling.PLACE_AGAIN),
    RequestEvent.POLICY_NOT_LOADED: (Ruling.PLACE_AGAIN, Ruling.PLACE_AGAIN),
    RequestEvent.UNFIT: (Ruling.JUDGED_AGAIN, Ruling.NEXT),
    RequestEvent.TRANSITION: (Ruling.LAST_WORD, Ruling.NEXT),
    RequestEvent.BUSY: (Ruling.ANOTHER, Ruling.NEXT),
    RequestEvent.UNAVAILABLE: (Ruling.ANOTHER, Ruling.NEXT),
    RequestEvent.HANDED_OVER: (Ruling.MOVE, Ruling.NEXT),
    RequestEvent.HELD_ELSEWHERE: (Ruling.HOLDER, Ruling.NEXT),
    RequestEvent.CANNOT_RESUME: (None, Ruling.NEXT),
}
#: The client may get the refusal itself.
MAY_PASS = frozenset((Ruling.ANOTHER, Ruling.HOLDER, Ruling.LAST_WORD))


def _asking(
    placing: RequestPhase,
    waiting: RequestPhase,
    connecting: RequestPhase,
    sent: RequestPhase,
    reconnecting: RequestPhase,
    held: RequestPhase,
) -> Moves:
    """Finding an upstream, the same way for a request and for the rest of a stream."""
    return {
        (placing, RequestEvent.PLACED): (connecting, RequestAction.CONNECT),
        (placing, RequestEvent.NOT_YET): (waiting, RequestAction.WAIT),
        (waiting, RequestEvent.WOKEN): (placing, RequestAction.PLACE),
        (connecting, RequestEvent.CONNECTED): (sent, RequestAction.SEND),
        (connecting, RequestEvent.ELSEWHERE): (placing, RequestAction.PLACE),
        (sent, RequestEvent.STALE): (reconnecting, RequestAction.CONNECT_AFRESH),
        (sent, RequestEvent.ELSEWHERE): (placing, RequestAction.PLACE),
        (reconnecting, RequestEvent.CONNECTED): (sent, RequestAction.SEND),
        (reconnecting, RequestEvent.ELSEWHERE): (placing, RequestAction.PLACE),
        (held, RequestEvent.ELSEWHERE): (placing, RequestAction.PLACE),
    }


def _refused() -> Moves:
    """What is held, by the rulings."""
    moves: Moves = {}
    for reason, (first, _) in RULINGS.items():
        if first is Ruling.LAST_WORD:
            moves[RequestPhase.SENT, reason] = (RequestPhase.PASSING, RequestAction.PASS_HEAD)
        elif first is not None:
            moves[RequestPhase.SENT, reason] = (RequestPhase.HELD, RequestAction.HOLD)
        moves[RequestPhase.RESUME_SENT, reason] = (RequestPhase.RESUME_HELD, RequestAction.HOLD)
    return moves


#: The legal moves, all of them.
MOVES: Table[RequestPhase, RequestEvent, RequestAction] = Table(
    RequestPhase.PLACING,
    {
        **_asking(*_FIRST),
        **_refused(),
        (RequestPhase.SENT, RequestEvent.HEAD): (RequestPhase.PASSING, RequestAction.PASS_HEAD),
        (RequestPhase.HELD, RequestEvent.HEAD): (RequestPhase.PASSING, RequestAction.PASS_HEAD),
        (RequestPhase.PASSING, RequestEvent.END): (RequestPhase.OVER, RequestAction.FINISH),
        (RequestPhase.PASSING, RequestEvent.LOST): (RequestPhase.RESUME_PLACING, RequestAction.PLACE),
        **_asking(*_AGAIN),
        (RequestPhase.RESUME_SENT, RequestEvent.HEAD): (RequestPhase.RESUMED, RequestAction.CONTINUE),
        (RequestPhase.RESUMED, RequestEvent.END): (RequestPhase.OVER, RequestAction.FINISH),
        **{(phase, RequestEvent.FAILED): (RequestPhase.OVER, RequestAction.ANSWER_ERROR) for phase in _FIRST},
        **{
            (phase, RequestEvent.FAILED): (RequestPhase.OVER, RequestAction.END_SHORT) for phase in _STREAMING
        },
        **{
            (phase, RequestEvent.CLIENT_GONE): (RequestPhase.OVER, RequestAction.COUNT_LEFT)
            for phase in _FIRST
        },
        **{
            (phase, RequestEvent.CLIENT_GONE): (RequestPhase.OVER, RequestAction.LEAVE)
            for phase in _STREAMING
        },
    },
)

#: The client has the head of a response.
ANSWERED = frozenset((*_STREAMING, RequestPhase.OVER))
#: A connection is being opened, or the request was sent over one.
AT_UPSTREAM = frozenset(RequestPhase) - {
    RequestPhase.PLACING,
    RequestPhase.WAITING,
    RequestPhase.RESUME_PLACING,
    RequestPhase.RESUME_WAITING,
    RequestPhase.OVER,
}
#: Another replica is asked to continue a stream, and has not begun to.
RESUMING = frozenset(_AGAIN)
#: The upstream may have seen the request.
SEEN = AT_UPSTREAM - {RequestPhase.CONNECTING, RequestPhase.RESUME_CONNECTING}


def ruling(phase: RequestPhase, reason: RequestEvent) -> Ruling:
    """What follows a refusal for this reason, of a request in this phase."""
    first, again = RULINGS[reason]
    found = again if phase in RESUMING else first
    assert found is not None, f"{reason!r} at {phase!r}"
    return found
