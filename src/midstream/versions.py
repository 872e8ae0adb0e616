"""Which snapshots a request takes: what a client says, and what a gateway and a replica tell each other of it. Pure.

A gateway reads headers only. What a body asks for is read by the replica, which answers with a Refusal where it cannot judge or
does not fit, and the gateway decides again with that. So no body is searched or parsed on its way.

Always holds: a wish means the same in a header and in a body; a replica generates for a request with a known wish only while
the snapshot serves that the gateway, which knows the order of the signals, judged by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from midstream.errors import InvalidRequest, SnapshotNotServed, UnknownField

HEADER_SNAPSHOT = "x-midstream-snapshot"
HEADER_MIN_SNAPSHOT = "x-midstream-min-snapshot"
HEADER_MAX_STALENESS = "x-midstream-max-staleness"
HEADER_SNAPSHOT_WAIT = "x-midstream-snapshot-wait"
BODY_FIELD = "midstream"

#: Internal, of a request: what the gateway admitted it on. JSON of an Admitted.
HEADER_ADMITTED = "x-midstream-admitted"
#: Internal, of a 409: JSON of a Refusal.
HEADER_REFUSED = "x-midstream-refused"

IDENTITY_BYTES_MAX = 512
WAIT_S_MAX = 86400.0
STALENESS_MAX = 2**53


class Wish(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request asks of the snapshot that serves it; all of it must hold. None: not asked for.

    snapshot: exactly this one, to the end of the response. min_snapshot: this one or one signalled after it. max_staleness:
    at most so many snapshots behind the newest. wait_s: seconds that it may wait for that.
    """

    snapshot: str | None = None
    min_snapshot: str | None = None
    max_staleness: int | None = None
    wait_s: float | None = None

    @property
    def relative(self) -> bool:
        """Whether it takes the order of the signals to judge it."""
        return self.min_snapshot is not None or self.max_staleness is not None

    @property
    def empty(self) -> bool:
        return self.snapshot is None and not self.relative

    def with_(self, other: Wish) -> Wish:
        """Both. Raises InvalidRequest when they ask for different things."""
        return Wish(
            _both(HEADER_SNAPSHOT, self.snapshot, other.snapshot),
            _both(HEADER_MIN_SNAPSHOT, self.min_snapshot, other.min_snapshot),
            _both(HEADER_MAX_STALENESS, self.max_staleness, other.max_staleness),
            _both(HEADER_SNAPSHOT_WAIT, self.wait_s, other.wait_s),
        )


NOTHING = Wish()


class Admitted(msgspec.Struct, frozen=True, omit_defaults=True):
    """snapshot: what is to serve when the request passes the gate. pinned: and to its end. body: what the body asks for was
    told by a replica and is met."""

    snapshot: str
    pinned: bool = False
    body: bool = False


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a replica did not take a request. serving: its snapshot; pinnable: and requests may be pinned to it. wish: of the
    body, or of the model's name."""

    serving: str
    pinnable: bool = True
    wish: Wish = NOTHING


class Refused(SnapshotNotServed):
    """A replica's answer to its gateway."""

    def __init__(self, message: str, refusal: Refusal) -> None:
        super().__init__(message)
        self._refusal = refusal

    def headers(self) -> dict[str, str]:
        return {**super().headers(), HEADER_REFUSED: as_header(self._refusal)}


_HEADERS = (HEADER_SNAPSHOT, HEADER_MIN_SNAPSHOT, HEADER_MAX_STALENESS, HEADER_SNAPSHOT_WAIT)
_NAMES = tuple(name.encode() for name in _HEADERS)
_IN_BODY = ("snapshot", "min_snapshot", "max_staleness", "wait")


def wish_of_headers(headers: Mapping[bytes, bytes]) -> Wish | None:
    """None: no header asks for anything. `headers` have lower-case names. Raises InvalidRequest."""
    snapshot, least, staleness, wait = _NAMES
    if not (snapshot in headers or least in headers or staleness in headers or wait in headers):
        return None
    given = [_text(headers.get(name)) for name in _NAMES]
    return _wish([*given[:2], _number(given[2], int), _number(given[3], float)], _HEADERS)


def wish_of_body(given: Mapping[str, Any] | None) -> Wish:
    """Of the object `midstream`. Raises InvalidRequest."""
    if given is None:
        return NOTHING
    for name in given:
        if name not in _IN_BODY:
            raise UnknownField(f"{BODY_FIELD}.{name}")
    return _wish([given.get(name) for name in _IN_BODY], [f"{BODY_FIELD}.{name}" for name in _IN_BODY])


def as_header(value: Admitted | Refusal) -> str:
    return json.dumps(msgspec.to_builtins(value))  # ASCII


_T = TypeVar("_T", Admitted, Refusal)


def from_header(value: str | bytes, kind: type[_T]) -> _T | None:
    """None: it is none."""
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _wish(given: Sequence[Any], names: Sequence[str]) -> Wish:
    snapshot, least, staleness, wait = given
    if staleness is not None and not (type(staleness) is int and 0 <= staleness <= STALENESS_MAX):
        raise _unexpected(names[2], "a whole number of snapshots, 0 or more", staleness)
    if wait is not None and not (type(wait) in (int, float) and 0 <= wait <= WAIT_S_MAX):
        raise _unexpected(names[3], f"0 to {WAIT_S_MAX:g} seconds", wait)
    wait_s = None if wait is None else float(wait)
    return Wish(_identity(snapshot, names[0]), _identity(least, names[1]), staleness, wait_s)


def _identity(value: Any, name: str) -> str | None:
    if value is None:
        return None
    if (
        not isinstance(value, str)
        or not 0 < len(value.encode("utf-8", "surrogatepass")) <= IDENTITY_BYTES_MAX
    ):
        raise _unexpected(name, f"the identity of a snapshot, at most {IDENTITY_BYTES_MAX} bytes", value)
    return value


def _number(text: str | None, kind: type[int] | type[float]) -> int | float | str | None:
    """What is no number stays the text that it is."""
    if text is None or not text.isascii() or "_" in text:
        return text
    try:
        value = kind(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def _text(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return value.strip().decode()
    except UnicodeDecodeError:
        return value.strip().decode("latin-1")


def _unexpected(name: str, expected: str, value: Any) -> InvalidRequest:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequest(f"{name}: expected {expected}, got {shown}", param=name)


_V = TypeVar("_V", str, int, float)


def _both(name: str, one: _V | None, other: _V | None) -> _V | None:
    if one is not None and other is not None and one != other:
        raise InvalidRequest(f"{name}: the request asks for {one!r} and for {other!r}", param=name)
    return other if one is None else one
