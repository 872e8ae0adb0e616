"""A stream whose replica is lost goes on, on another one, from behind the last event that its client has.

Owns: what a stream told of itself (resumption.py) where it passes through Python; asking another replica to go on with it.
Always holds:
- A stream that can be resumed reaches its client in whole events, and nothing of it twice.
- A response of which nothing reached its client is asked for again, from its beginning.
- Another replica is asked only for what it can do exactly, unless the client takes any; what nobody can go on with ends with an
  error event.
- A session moves to where its stream was resumed. A stream is resumed once: LOST_SENDS_MAX replicas may be lost with it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from midstream.errors import EngineFailed, InvalidRequest, MidstreamError, RequestLostReplicas
from midstream.gateway.admission import VersionedExchange
from midstream.gateway.inference import HELD_BYTES_MAX, LOST_SENDS_MAX, InferenceExchange
from midstream.resumption import (
    FAILOVER_MODES,
    HEADER_FAILOVER,
    HEADER_RESUMABLE,
    LAST,
    PATH_RESUME,
    snapshot_to_resume_under,
)

if TYPE_CHECKING:
    from midstream.gateway.proxy import Placed

logger = logging.getLogger(__name__)

GATHERED_BYTES_MAX = 8192  # of a stream, before what it told is picked out of it
TOLD_BYTES_MAX = 16 * 2**20  # of one stream
UNFINISHED_BYTES_MAX = (
    2**20
)  # of one event that is held until it is whole; a stream with a longer one cannot be resumed
_RESUMABLE = HEADER_RESUMABLE.encode()
_ASKED = _RESUMABLE + b": 1"
_FAILOVER = HEADER_FAILOVER.encode()
_WHOLE = b"\n\n\r\n"  # ends a chunk of whole events, and is nowhere else
_END = b"0\r\n\r\n"
_TOLD = re.compile(rb"\n: m (.*)")
_DONE = LAST + b"\n"


class _Problem(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Problem


class Passed:
    """What of a resumable stream was passed on: whole chunks only, and what they told."""

    __slots__ = ("_gathered", "_held", "_size", "_told", "_told_bytes", "forgotten", "lost")

    def __init__(self) -> None:
        self._gathered: list[bytes] = []
        self._size = 0
        self._told: list[bytes] = []
        self._told_bytes = 0
        self.forgotten = False  # they told more than is kept
        self._held = b""  # the beginning of a chunk
        self.lost = False  # a chunk was too long to hold; what was passed on may end anywhere

    def take(self, data: bytes) -> bytes:
        """What may be passed on now that `data` came."""
        if self.lost:
            return data
        if self._held:
            data = self._held + data
        if data.endswith((_WHOLE, _END)):
            self._held = b""
        else:
            end = data.rfind(_WHOLE) + len(_WHOLE)
            if end < len(_WHOLE):  # not found
                end = 0
            self._held, data = data[end:], data[:end]
            if len(self._held) > UNFINISHED_BYTES_MAX:
                self.lost = True
                return data + self._held
        self._gathered.append(data)
        self._size += len(data)
        if self._size > GATHERED_BYTES_MAX:
            self._pick_out()
        return data

    def rest(self) -> bytes:
        """What is held still when the response is whole: its end, in a form of its own."""
        held, self._held = self._held, b""
        return held

    def told(self) -> bytes | None:
        """The lines so far; None: not known."""
        self._pick_out()
        return None if self.lost or self.forgotten else b"".join(self._told)

    def _pick_out(self) -> None:
        told = b"".join(line + b"\n" for line in _TOLD.findall(b"".join(self._gathered)))
        self._gathered.clear()
        self._size = 0
        self._told.append(told)
        self._told_bytes += len(told)
        if self._told_bytes > TOLD_BYTES_MAX:
            self.forgotten = True
            self._told.clear()


class ResumableExchange(VersionedExchange):
    """An inference request whose stream, if it is one, outlives its replica."""

    _mode = "exact"
    _passed: Passed | None = None
    _told: bytes | None = None  # by a wire, of a stream that broke
    _lost = ""  # the replica that was lost with the stream; from then on another one is to go on with it
    _goes_on = False  # and does
    _refusal: bytes | None = None  # instead, so far
    _why = ""  # it could not be resumed

    def start(self) -> None:
        try:
            self._mode = failover_mode(self._request.first)
        except MidstreamError as error:
            self._fail(error)
            return
        self._resumable = self._mode != "off" and not self._request.http10
        super().start()

    def give_up(self, reason: str, together: Collection[InferenceExchange] = ()) -> None:
        if not self._answered:
            super().give_up(reason, together)
            return
        self._lost_here = True
        in_chunk = self._leave()
        self._lose_stream(reason, in_chunk)

    # -- upstream.ResponseSink

    def response_head(
        self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> None:
        if self._lost:
            self._answer_to_resume(status, headers, body)
            return
        if self._resumable and status == 200 and any(name == _RESUMABLE for name, _ in headers):
            self._passed = Passed()
            body = self._passed.take(body)
        super().response_head(status, reason, headers, body)

    def response_body(self, data: bytes) -> None:
        if self._passed is not None:
            data = self._passed.take(data)
            if data:
                super().response_body(data)
        elif self._refusal is not None:
            self._refusal += data[: HELD_BYTES_MAX - len(self._refusal)]
        else:
            super().response_body(data)

    def relay_stood(self, *, chunked: bool, events: bool, between_events: bool, marks: bytes | None) -> None:
        super().relay_stood(chunked=chunked, events=events, between_events=between_events, marks=marks)
        self._told = marks

    def response_end(self) -> None:
        if self._refusal is None:
            if self._passed is not None and (rest := self._passed.rest()):
                self._client.write(rest)
            super().response_end()
            return
        self._why, self._refusal, self._connection = _message(self._refusal), None, None
        self._lost_here = False
        self._go_elsewhere(died=False)

    def upstream_lost(self, reason: str, *, answered: bool) -> None:
        connection = self._connection
        if not self._answered and not (answered and connection is not None and not connection.malformed):
            super().upstream_lost(reason, answered=answered)
            return
        self._connection = None
        self._lost_here = True
        if not self._answered:  # a part of the response came, and is nobody's
            self._held = None
            self._unreachable(reason)
        elif self._lost and not answered and not self._fresh:  # a pooled connection was perhaps only stale
            self._proxy.metrics.retries["stale_connection"] += 1
            self._send(fresh=True)
        else:
            self._lose_stream(reason, connection is not None and connection.in_chunk)

    # -- another replica

    def _lose_stream(self, reason: str, in_chunk: bool) -> None:
        if self._lost and not self._goes_on:
            self._refusal = None
            self._unreachable(reason)
            return
        told = self._told if self._passed is None else self._passed.told()
        ended = told is not None and told.endswith(b"\n" + _DONE)
        error = None if ended else self._lost_with_it()
        if error is not None:
            self._left()
            self._end_early(error, in_chunk)
        elif self._goes_on or told is None:
            self._cut_short(in_chunk, reason)
        elif ended:  # only the end of the response is missing
            self._passed = None  # and what it holds, if anything, is the beginning of that
            self._client.write(_END)
            self.response_end()
        else:
            self._passed = None
            self._resume(told, reason)

    def _resume(self, told: bytes, reason: str) -> None:
        view, request = self._view, self._request
        assert view is not None
        self._lost, self._resumable = view.name, False
        logger.warning("%s failed in the middle of a stream: %s", view.name, reason)
        self._proxy.metrics.upstream_errors[view.name] += 1
        self._left()
        self._deployment.replicas.failed(view)
        if not told:  # the client has the head of the response and nothing else
            self._go_elsewhere(died=True)
            return
        try:
            state = told.decode().removesuffix("\n")
            snapshot = snapshot_to_resume_under(state) if self._mode == "exact" else None
        except (MidstreamError, UnicodeDecodeError) as error:
            self._fail(EngineFailed(str(error)))
            return
        self._exclude(snapshot)
        self._begun = self._mode == "any" or snapshot is not None
        self._target = PATH_RESUME.encode()
        self._body = resume_body(request.target, view.name, self._mode == "exact", state, request.body)
        self._go_elsewhere(died=True)

    def _exclude(self, snapshot: str | None) -> None:
        """Those that serve another snapshot could not go on exactly."""
        if snapshot is None:
            return
        self._why = f"no other replica serves snapshot {snapshot!r} now"
        for view in self._deployment.replicas.views:
            if view.report is None or view.report.snapshot != snapshot:
                self._tried.add(view.name)

    def _answer_to_resume(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        if status != 200 or (b"transfer-encoding", b"chunked") not in headers:
            self._refusal = body[:HELD_BYTES_MAX]
            return
        self._goes_on = True
        self._proxy.metrics.retries["resumed"] += 1
        logger.info("%s goes on with a stream of %s", self._where(), self._lost)
        if body:
            self.response_body(body)

    def _place(self) -> Placed | None:
        """With the stream its session moves, also from a replica that seems to be usable."""
        placed = super()._place()
        if placed is not None and placed.stamp == 0 and self._lost and self._session is not None:
            placed.stamp = self._deployment.sessions.settle(self._session, placed.view.name)
        return placed

    def _upstream_headers(self) -> list[bytes]:
        lines = super()._upstream_headers()
        if self._resumable:
            lines.append(_ASKED)
        return lines

    def _fail(self, error: MidstreamError) -> None:
        if not self._lost:
            super()._fail(error)
            return
        self._left()
        if isinstance(error, RequestLostReplicas):
            self._end_early(error, False)
            return
        what = f"{self._lost} failed in the middle of the response and no other replica could go on with it"
        why = error.message if self._lost_sends >= LOST_SENDS_MAX else self._why or error.message
        self._end_early(EngineFailed(f"{what}: {why}"), False)


def failover_mode(headers: Mapping[bytes, bytes]) -> str:
    """What a client wants done with a stream whose replica is lost. Raises InvalidRequest."""
    given = headers.get(_FAILOVER, b"").strip().lower().decode("latin-1")
    if given and given not in FAILOVER_MODES:
        expected = ", ".join(FAILOVER_MODES)
        raise InvalidRequest(
            f"{HEADER_FAILOVER}: expected one of {expected}, got {given!r}", param=HEADER_FAILOVER
        )
    return given or "exact"


def resume_body(target: bytes, lost: str, exact: bool, state: str, body: bytes) -> bytes:
    """A resumption.Resume, the request's body in it as it came."""
    fields = {"path": target.decode("latin-1"), "lost": lost, "exact": exact, "state": state}
    return msgspec.json.encode(fields)[:-1] + b',"body":' + body + b"}"


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "it answered what is no stream"
