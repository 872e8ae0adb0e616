"""Version constraints: how clients write them, and how gateways and replicas exchange them. Pure.

A gateway reads headers only. The replica reads the constraint of a body. Where it cannot judge it, or does not meet it, it
answers with a Refusal, and the gateway decides again. So no gateway searches or parses a body on its way.

Always holds:
- A constraint means the same in a header and in a body.
- A gateway, which knows the signal order, admits a request on one snapshot. A replica generates for it only under that one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import InvalidRequest, SnapshotNotServed, UnknownField

HEADER_SNAPSHOT = "x-midstream-snapshot"
HEADER_MIN_SNAPSHOT = "x-midstream-min-snapshot"
HEADER_MAX_STALENESS = "x-midstream-max-staleness"
HEADER_SNAPSHOT_WAIT = "x-midstream-snapshot-wait"
BODY_FIELD = "midstream"
#: By which trainers of external rollout services demand a version: an object of `min_version` and `exact_version`.
VERSION_FIELD = "weight_version"

#: Internal, of a request: JSON of an Admitted.
HEADER_ADMITTED = "x-midstream-admitted"
#: Internal, of a 409: JSON of a Refusal.
HEADER_REFUSED = "x-midstream-refused"

IDENTITY_BYTES_MAX = 512
WAIT_S_MAX = 86400.0
STALENESS_MAX = 2**53


class VersionConstraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request demands of the snapshot that serves it. All demands must be met; None is no demand.

    snapshot: exactly this one, to the end of the response. min_snapshot: this one or one signalled after it. max_staleness:
    at most so many snapshots behind the newest. wait_s: how many seconds the request may wait until they are met.
    """

    snapshot: str | None = None
    min_snapshot: str | None = None
    max_staleness: int | None = None
    wait_s: float | None = None

    @property
    def relative(self) -> bool:
        """True if only the signal order decides whether a snapshot meets it."""
        return self.min_snapshot is not None or self.max_staleness is not None

    @property
    def empty(self) -> bool:
        return self.snapshot is None and not self.relative

    def with_(self, other: VersionConstraint) -> VersionConstraint:
        """The demands of both. Raises InvalidRequest when they contradict each other."""
        return VersionConstraint(
            _both(HEADER_SNAPSHOT, self.snapshot, other.snapshot),
            _both(HEADER_MIN_SNAPSHOT, self.min_snapshot, other.min_snapshot),
            _both(HEADER_MAX_STALENESS, self.max_staleness, other.max_staleness),
            _both(HEADER_SNAPSHOT_WAIT, self.wait_s, other.wait_s),
        )


NOTHING = VersionConstraint()


class Admitted(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway's decision. snapshot: which one must serve when the request passes the gate. pinned: it must serve to the end
    of the request; one that stays loaded will do. body: a replica has read the body's constraint, and the snapshot meets it.
    """

    snapshot: str
    pinned: bool = False
    body: bool = False


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a replica did not take a request. serving: the snapshot that serves there. pinnable: requests may be pinned to it.
    constraint: of the body, or of the model's name. here: the snapshot that it asks for stays loaded, though it need not serve.
    """

    serving: str
    pinnable: bool = True
    constraint: VersionConstraint = NOTHING
    here: bool = False


class ConstraintNotMet(SnapshotNotServed):
    """A replica's answer to its gateway."""

    def __init__(self, message: str, refusal: Refusal) -> None:
        super().__init__(message)
        self._refusal = refusal

    def headers(self) -> dict[str, str]:
        return {**super().headers(), HEADER_REFUSED: as_header(self._refusal)}


#: By which a client demands something of the snapshot.
CONSTRAINT_HEADERS = (HEADER_SNAPSHOT, HEADER_MIN_SNAPSHOT, HEADER_MAX_STALENESS, HEADER_SNAPSHOT_WAIT)
_NAMES = tuple(name.encode() for name in CONSTRAINT_HEADERS)
_IN_BODY = ("snapshot", "min_snapshot", "max_staleness", "wait")
_OF_VERSION = ("min_version", "exact_version")
NUMBER_CHARS_MAX = 16


def constraint_of_headers(headers: Mapping[bytes, bytes]) -> VersionConstraint | None:
    """The constraint in the headers; None if they demand nothing. The names in `headers` are lower-case. Raises
    InvalidRequest."""
    snapshot, least, staleness, wait = _NAMES
    if not (snapshot in headers or least in headers or staleness in headers or wait in headers):
        return None
    given = [_text(headers.get(name)) for name in _NAMES]
    return _constraint([*given[:2], _number(given[2], int), _number(given[3], float)], CONSTRAINT_HEADERS)


def constraint_of_body(given: Mapping[str, Any] | None) -> VersionConstraint:
    """The constraint in the body's object `midstream`. Raises InvalidRequest, UnknownField."""
    if given is None:
        return NOTHING
    for name in given:
        if name not in _IN_BODY:
            raise UnknownField(f"{BODY_FIELD}.{name}")
    return _constraint([given.get(name) for name in _IN_BODY], [f"{BODY_FIELD}.{name}" for name in _IN_BODY])


def constraint_of_version(given: Mapping[str, Any] | None) -> VersionConstraint:
    """The constraint in the body's object `weight_version`. Version N is the snapshot of the identity N, and every snapshot is
    at least version 0. Raises InvalidRequest, UnknownField."""
    if given is None:
        return NOTHING
    for name, value in given.items():
        if name not in _OF_VERSION:
            raise UnknownField(f"{VERSION_FIELD}.{name}")
        if value is not None and not (type(value) is int and 0 <= value <= STALENESS_MAX):
            raise _unexpected(f"{VERSION_FIELD}.{name}", "a version, 0 or more", value)
    least, exact = (given.get(name) for name in _OF_VERSION)
    return VersionConstraint(None if exact is None else str(exact), str(least) if least else None)


def version_number(identity: str) -> int | None:
    """The version that a snapshot is, by its identity; None if that is no number."""
    plain = identity.isascii() and identity.isdigit() and len(identity) <= NUMBER_CHARS_MAX
    return int(identity) if plain and str(int(identity)) == identity else None


def as_version(identity: str) -> int | str:
    """A snapshot as trainers of external rollout services know it: the number, or the identity where that is none."""
    number = version_number(identity)
    return identity if number is None else number


def as_header(value: Admitted | Refusal) -> str:
    """JSON in ASCII."""
    return json.dumps(msgspec.to_builtins(value))


_T = TypeVar("_T", bound=msgspec.Struct)


def from_header(value: str | bytes, kind: type[_T]) -> _T | None:
    """The value of a header, decoded; None if it is no such JSON."""
    try:
        return msgspec.json.decode(value, type=kind)
    except NOT_JSON:
        return None


def _constraint(given: Sequence[Any], names: Sequence[str]) -> VersionConstraint:
    snapshot, least, staleness, wait = given
    if staleness is not None and not (type(staleness) is int and 0 <= staleness <= STALENESS_MAX):
        raise _unexpected(names[2], "a whole number of snapshots, 0 or more", staleness)
    if wait is not None and not (type(wait) in (int, float) and 0 <= wait <= WAIT_S_MAX):
        raise _unexpected(names[3], f"0 to {WAIT_S_MAX:g} seconds", wait)
    wait_s = None if wait is None else float(wait)
    return VersionConstraint(_identity(snapshot, names[0]), _identity(least, names[1]), staleness, wait_s)


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
    """The number, or the text itself if it is not one."""
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
