"""The gateway's resume log of a stream, and the request by which another replica continues it. Pure.

Owns: the log's lines (core/resumption.py) of the events that the client has, and what is known of the rest of the stream.
Always holds: a client gets whole chunks of whole events of such a stream only. A stream whose lines exceed the log's bounds
is not resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import EngineFailed, InvalidRequest, MidstreamError, RequestLostReplicas
from midstream.core.resumption import (
    FAILOVER_MODES,
    GIVEN_UP,
    HEADER_FAILOVER,
    HEADER_RESUMABLE,
    LAST,
    snapshot_to_resume_under,
)
from midstream.core.types import BASE_SNAPSHOT
from midstream.fleet.view import ReplicaView

#: Bytes of a stream that are gathered before the lines are picked out of them.
GATHERED_BYTES_MAX = 8192
#: Bytes of the lines of one stream.
LINES_BYTES_MAX = 16 * 2**20
#: Bytes of an event that is held until it is whole. A stream with a longer event cannot be resumed.
UNFINISHED_BYTES_MAX = 2**20
RESUMABLE = HEADER_RESUMABLE.encode()
#: The end of a chunked response.
END = b"0\r\n\r\n"
_FAILOVER = HEADER_FAILOVER.encode()
#: Ends a chunk of whole events, and is nowhere else.
_WHOLE = b"\n\n\r\n"
_ENDS = (_WHOLE, END)
_LINE = b"\n: m "
_DONE = b"\n" + LAST + b"\n"
_GIVEN_UP = GIVEN_UP + b"\n"


class _Problem(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Problem


def _not_yet(data: bytes) -> None:
    """What comes with the head is written with it."""


class ResumeLog:
    """Passes on whole chunks of a resumable stream, and keeps their lines.

    forgotten: there were more lines than are kept. lost: a chunk was too long to hold, so the client's bytes may end anywhere.
    tail: the last of them then. write: writes to the client, once its head is written.
    """

    __slots__ = (
        *("_gathered", "_held", "_lines", "_lines_size", "_size"),
        *("forgotten", "lost", "tail", "write"),
    )

    def __init__(self) -> None:
        self._gathered: list[bytes] = []
        self._size = 0
        self._lines: list[bytes] = []
        self._lines_size = 0
        self.forgotten = False
        #: The beginning of a chunk.
        self._held = b""
        self.lost = False
        self.tail = b""
        self.write: Callable[[bytes], object] = _not_yet

    def take(self, data: bytes) -> bytes:
        """Write the bytes that may be passed on after `data` came, which are returned, too."""
        if self.lost:
            return self._pass_lost(data)
        if self._held:
            data, self._held = self._held + data, b""
        if not data.endswith(_ENDS):
            end = data.rfind(_WHOLE) + len(_WHOLE)
            if end < len(_WHOLE):
                # No chunk is whole.
                end = 0
            self._held, data = data[end:], data[:end]
            if len(self._held) > UNFINISHED_BYTES_MAX:
                self.lost = True
                held, self._held = self._held, b""
                return self._pass_lost(data + held)
            if not data:
                return data
        self._gathered.append(data)
        self._size = size = self._size + len(data)
        if size > GATHERED_BYTES_MAX:
            self._pick_out()
        write = self.write
        write(data)
        return data

    def _pass_lost(self, data: bytes) -> bytes:
        self.tail = (self.tail + data[-len(_WHOLE) :])[-len(_WHOLE) :]
        self.write(data)
        return data

    @property
    def between_events(self) -> bool:
        """The client has whole events."""
        return not self.lost or self.tail == _WHOLE

    def rest(self) -> bytes:
        """The bytes that are still held when the response is whole: its end, in another form than END."""
        held, self._held = self._held, b""
        return held

    def lines(self) -> bytes | None:
        """The lines so far, or None when they are not known."""
        self._pick_out()
        return None if self.lost or self.forgotten else b"".join(self._lines)

    def _pick_out(self) -> None:
        # An expression would try every byte of the stream.
        _, *begun = b"".join(self._gathered).split(_LINE)
        # Each line has an end.
        lines = b"\n".join((*[rest.partition(b"\n")[0] for rest in begun], b""))
        self._gathered.clear()
        self._size = 0
        self._lines.append(lines)
        self._lines_size += len(lines)
        if self._lines_size > LINES_BYTES_MAX:
            self.forgotten = True
            self._lines.clear()


@dataclass(slots=True)
class Rest:
    """The rest of a stream, which another replica is to continue.

    lost: the replica that the stream was on. snapshot: the only one under which it continues; "": any. pinned: of the version
    constraint only the pin counts, as something was computed that the stream stands on.
    """

    lost: str
    snapshot: str = ""
    pinned: bool = False
    #: Why no replica could continue it so far.
    why: str = ""

    def asked(self, target: bytes, body: bytes, lines: bytes, exact: bool) -> bytes:
        """The body for PATH_RESUME. target, body: of the client's request. lines: of the log. Raises EngineFailed."""
        return resume_body(target, self.lost, exact, self.read(lines, exact), body)

    def read(self, lines: bytes, exact: bool) -> str:
        """Learns from the lines where it continues; they as text. Raises EngineFailed."""
        try:
            state = lines.decode().removesuffix("\n")
            snapshot = snapshot_to_resume_under(state) if exact else None
        except (MidstreamError, UnicodeDecodeError) as error:
            raise EngineFailed(str(error)) from error
        self.snapshot, self.pinned = snapshot or "", not exact or snapshot is not None
        if snapshot is not None:
            self.why = f"no other replica serves snapshot {snapshot!r} now"
        return state

    def lacking(self, views: Iterable[ReplicaView], policy: str) -> set[str]:
        """Names of those that could not continue exactly. Where the snapshot only stays loaded, its pinned streams continue.
        policy: of the deployment; "": none."""
        found = set()
        for view in views if self.snapshot else ():
            report = view.report
            if policy and report is not None and report.own.snapshot == BASE_SNAPSHOT:
                # It may load the snapshot yet, and looks itself whether that is the one.
                continue
            if report is None or self.snapshot not in (report.own.snapshot, *report.own.resident):
                found.add(view.name)
        return found

    def failed(self, error: MidstreamError, *, last: bool) -> MidstreamError:
        """The error for the client if no replica continues it. last: the bound of replicas that fail with it is reached."""
        if isinstance(error, RequestLostReplicas):
            return error
        why = error.message if last else self.why or error.message
        what = f"{self.lost} failed in the middle of the response"
        return EngineFailed(f"{what} and no other replica could continue it: {why}")


def failover_mode(headers: Mapping[bytes, bytes]) -> str:
    """One of FAILOVER_MODES: what the client wants when the replica of its stream is lost. Raises InvalidRequest."""
    given = headers.get(_FAILOVER, b"").strip().lower().decode("latin-1")
    if given and given not in FAILOVER_MODES:
        expected = ", ".join(FAILOVER_MODES)
        raise InvalidRequest(
            f"{HEADER_FAILOVER}: expected one of {expected}, got {given!r}", param=HEADER_FAILOVER
        )
    return given or "exact"


def resume_body(target: bytes, lost: str, exact: bool, state: str, body: bytes) -> bytes:
    """A resumption.Resume in JSON, with the request's body as it came."""
    fields = {"path": target.decode("latin-1"), "lost": lost, "exact": exact, "state": state}
    return msgspec.json.encode(fields)[:-1] + b',"body":' + body + b"}"


def unable(lines: bytes | None, exact: bool, views: Sequence[ReplicaView], policy: str) -> set[str]:
    """Names of replicas that could not continue a stream after these lines, if there are any."""
    if not lines:
        return set()
    rest = Rest("")
    try:
        rest.read(lines, exact)
    except EngineFailed:
        return {view.name for view in views}
    return rest.lacking(views, policy)


def has_ended(lines: bytes) -> bool:
    """True if the lines contain the last event of the stream."""
    return lines.endswith(_DONE)


def without_giving_up(lines: bytes) -> tuple[bytes, bool]:
    """The lines to continue after, and whether the replica gave the stream up itself: then it does not count as lost."""
    return lines.removesuffix(_GIVEN_UP), lines.endswith(_GIVEN_UP)


def reason_of(body: bytes) -> str:
    """The reason in a replica's answer for not going on with a stream."""
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except NOT_JSON:
        return "its answer is no stream"
