"""Which session a request belongs to, where each known session lives, and which model a body names.

Always holds: the table never exceeds its bound; the least recently used session goes first. A body is parsed only when no
header names a session, and when the bytes of a field's name with a colon occur in it, even nested. Then the whole body is
parsed, but only the three top-level fields are built. A field name written with escapes is not recognised.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import InvalidRequest
from midstream.core.session_keys import SESSION_BODY_FIELDS, SESSION_HEADERS, check_key, named_in_body
from midstream.core.session_keys import session_key as key_named
from midstream.core.types import Session
from midstream.core.wires import UserField

#: Values of headers whose keys are remembered.
KEYS_MAX = 2**14
_HEADERS = tuple((name.encode(), name) for name in SESSION_HEADERS)

#: By the field that names the user: the names that one looks for before a body is parsed.
_FIELDS: Mapping[UserField, tuple[bytes, ...]] = {
    "user": tuple(f'"{name}"'.encode() for name in SESSION_BODY_FIELDS),
    "metadata.user_id": (b'"prompt_cache_key"', b'"user_id"'),
    "routing_key": (b'"prompt_cache_key"', b'"session_id"', b'"routing_key"'),
}
#: A name that stands so often without a colon is looked for with an expression: steps of Python would take longer.
_LOOKS_MAX = 64
_COLON = re.compile(rb"[ \t\r\n]*:")
_MEMBERS = {
    name: re.compile(re.escape(name) + _COLON.pattern) for names in _FIELDS.values() for name in names
}
#: Sessions of which it is known that several replicas hold them.
BESIDE_MAX = 2**17
# Of a replica that has named none, and its number.
_FIRST_BOOT = ("", 0)


class _BodyFields(msgspec.Struct):
    prompt_cache_key: str | None = None
    session_id: str | None = None
    user: str | None = None


class _RoutingFields(msgspec.Struct):
    prompt_cache_key: str | None = None
    session_id: str | None = None
    routing_key: str | None = None


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _MessagesFields(msgspec.Struct):
    prompt_cache_key: str | None = None
    metadata: _Metadata | None = None


class _BodyModel(msgspec.Struct):
    model: str | None = None


_decoder = msgspec.json.Decoder(_BodyFields)
_routing_decoder = msgspec.json.Decoder(_RoutingFields)
_messages_decoder = msgspec.json.Decoder(_MessagesFields)


class _AdapterModel(msgspec.Struct):
    model: str | None = None
    #: SGLang's name of an adapter. A batch may repeat it for each prompt.
    lora_path: str | list[str | None] | None = None


_model_decoder = msgspec.json.Decoder(_BodyModel)
_adapter_decoder = msgspec.json.Decoder(_AdapterModel)


def session_key(headers: Mapping[bytes, bytes], body: bytes, user: UserField = "user") -> str | None:
    """The session key of a request, or None. `headers` have lower-case names. user: as in core/wires.py.

    Raises InvalidRequest on a value that cannot be a key, and when all that are given are empty. An invalid body, or one with
    such a field of another type, has no key here: the replica names what is wrong with it.
    """
    named: list[tuple[str, str | None]] = []
    for name, text_name in _HEADERS:
        if (value := headers.get(name)) is not None:
            # Nearly all requests of sessions take this branch.
            if key := _key_in(value, text_name):
                return key
            named.append((text_name, ""))
    for field in _FIELDS[user]:
        if field in body and _holds(body, field):
            named += _named_in_body(body, user)
            break
    return key_named(named) if named else None


# A session has many turns.
@lru_cache(KEYS_MAX)
def _key_in(value: bytes, name: str) -> str:
    """The key in a header's value; "" if it is empty. Raises InvalidRequest."""
    key = _text(value).strip(" \t")
    return check_key(key, name) if key else ""


def key_in_path(session: bytes, headers: Mapping[bytes, bytes]) -> str:
    """The session key of a request with a session in its path. session: percent-decoded.

    The path wins over the body, since its fields may name an end user. Raises InvalidRequest when it cannot be a key, and when
    a header names another one.
    """
    key = check_key(_text(session), "path")
    for name, text_name in _HEADERS:
        value = headers.get(name)
        if value is not None and _text(value).strip(" \t") not in ("", key):
            raise InvalidRequest(f"{text_name} names another session than the path", param=text_name)
    return key


def _named_in_body(body: bytes, user: UserField) -> Iterable[tuple[str, str | None]]:
    try:
        if user != "metadata.user_id":
            fields = (_decoder if user == "user" else _routing_decoder).decode(body)
            return named_in_body(*msgspec.structs.astuple(fields))
        given = _messages_decoder.decode(body)
    except NOT_JSON:
        return ()
    names = (given.prompt_cache_key, given.metadata.user_id if given.metadata else None)
    return zip(("prompt_cache_key", user), names, strict=True)


def _holds(body: bytes, name: bytes) -> bool:
    """Whether the name stands somewhere with a colon after it.

    One expression for all names would try each quote of the body, which takes a second for 60 MB of them.
    """
    at = -len(name)
    for _ in range(_LOOKS_MAX):
        at = body.find(name, at + len(name))
        if at < 0:
            return False
        if _COLON.match(body, at + len(name)):
            return True
    return _MEMBERS[name].search(body, at) is not None


def body_model(body: bytes, user: UserField = "user") -> str | None:
    """The model that a body names, as JSON says it; None when there is none, or no text, or no JSON object.

    user: as in core/wires.py. SGLang's bodies name an adapter by `lora_path`, others by `model`.
    """
    try:
        if user != "routing_key":
            return _model_decoder.decode(body).model
        named = _adapter_decoder.decode(body)
    except NOT_JSON:
        return None
    adapters = named.lora_path if isinstance(named.lora_path, list) else [named.lora_path]
    # The replica refuses a batch of several.
    return next((adapter for adapter in adapters if adapter), named.model)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class SessionTable:
    """(tenant, key) -> name of a replica and the stamp of its placing there, bounded.

    Stamps order the placings of a session by any gateway. A stamp is in milliseconds since the epoch, and always more than that
    of the placing before. clock: seconds since the epoch.
    """

    def __init__(self, max_sessions: int, clock: Callable[[], float] = time.time) -> None:
        self._max_sessions = max_sessions
        self._clock = clock
        # Session to its replica, its stamp, and the number of the replica's boot.
        self._homes: OrderedDict[Session, tuple[str, int, int]] = OrderedDict()
        # Replica to its last known boot, and that boot's number.
        self._boots: dict[str, tuple[str, int]] = {}
        # Sessions that live on each replica.
        self.counts: Counter[str] = Counter()
        # Session to the replicas beside its home that hold turns of it, or did when they were last heard.
        self._beside: OrderedDict[Session, set[str]] = OrderedDict()
        #: Session to the stamp by which it moved, unless a later turn was answered at its new home.
        self.moved: dict[Session, int] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def __repr__(self) -> str:
        return f"SessionTable({len(self._homes)} of at most {self._max_sessions} sessions)"

    def home(self, session: Session) -> str | None:
        """Where the session lives; asking counts as use."""
        return None if (found := self.lives(session)) is None else found[0]

    def lives(self, session: Session) -> tuple[str, int] | None:
        """The session's replica and the stamp of its placing there, 0 where that only served it in passing. Counts as use."""
        found = self._homes.get(session)
        if found is None:
            return None
        replica, stamp, number = found
        # The boot that held the session is gone.
        if number != self._boots.get(replica, _FIRST_BOOT)[1]:
            del self._homes[session]
            self.moved.pop(session, None)
            return None
        self._homes.move_to_end(session)
        return replica, stamp

    def holders(self, session: Session) -> set[str] | None:
        """The replicas that hold turns of the session, as far as they are heard. None: it has no home."""
        lives = self.lives(session)
        return None if lives is None else {lives[0], *self._beside.get(session, ())}

    def begin(self, replica: str, boot: str) -> None:
        """The replica names the boot that reports its sessions: those of another boot are gone."""
        known, number = self._boots.get(replica, (boot, 0))
        if known != boot:
            number += 1
            del self.counts[replica]
        self._boots[replica] = (boot, number)

    def _boot(self, replica: str) -> int:
        return self._boots.get(replica, _FIRST_BOOT)[1]

    def closed(self, session: Session, replica: str) -> None:
        """The replica says that it does not hold the session any more."""
        if (beside := self._beside.get(session)) is not None:
            beside.discard(replica)
            if not beside:
                del self._beside[session]
        self.forget(session, replica)

    def over(self, session: Session, silent: Collection[str]) -> bool:
        """It is over everywhere but on these, where they held it. Whether it had a home."""
        held = {self.home(session), *self._beside.pop(session, ())}
        for replica in held.intersection(silent):
            self._holds_too(session, replica)
        return self.forget(session)

    def forget(self, session: Session, replica: str | None = None, stamp: int | None = None) -> bool:
        """The session lives nowhere; or not on `replica`, or not by the placing of this stamp, any more. Whether it did."""
        found = self._homes.get(session)
        if found is None or replica not in (None, found[0]) or stamp not in (None, found[1]):
            return False
        del self._homes[session]
        self.moved.pop(session, None)
        self._left(found)
        return True

    def not_begun(self, session: Session, replica: str, stamp: int, came_from: str) -> None:
        """The placing of this stamp on `replica` came to nothing. If the session moved, it lives on where it came from, unless
        `replica` has answered a later turn, and is there: no other replica knows that turn."""
        stays = came_from and self.moved.get(session) != stamp
        left = not stays and self.forget(session, replica, stamp)
        if left:
            # It may have let the turn in before it failed.
            self._holds_too(session, replica)
        if (left or self.home(session) is None) and came_from:
            self.settle(session, came_from)

    def answered(self, session: Session | None, replica: str, stamp: int | None) -> None:
        """A turn is answered on `replica`. stamp: of the placing that brought its session there; 0, None: none did."""
        if session in self.moved and not stamp and self._homes[session][0] == replica:
            del self.moved[session]

    def settle(self, session: Session, replica: str) -> int:
        """The session lives on `replica` from now on. The stamp of that."""
        stamp = round(self._clock() * 1000)
        before = self._homes.get(session)
        if before is not None:
            stamp = max(stamp, before[1] + 1)
        self._set(session, replica, stamp)
        return stamp

    def learn(self, session: Session, replica: str, stamp: int) -> None:
        """`replica` says that it holds the session: it lives there unless a later placing brought it elsewhere."""
        before = self._homes.get(session)
        if before is None or before[2] != self._boot(before[0]) or (stamp, replica) > (before[1], before[0]):
            self._set(session, replica, stamp)
        elif replica != before[0]:
            self._holds_too(session, replica)

    def _holds_too(self, session: Session, replica: str) -> None:
        self._beside.setdefault(session, set()).add(replica)
        if len(self._beside) > BESIDE_MAX:
            self._beside.popitem(last=False)

    def _set(self, session: Session, replica: str, stamp: int) -> None:
        before = self._homes.get(session)
        if before is not None:
            self._left(before)
            if before[0] != replica:
                self._holds_too(session, before[0])
        self._homes[session] = (replica, stamp, self._boot(replica))
        self._homes.move_to_end(session)
        self.counts[replica] += 1
        if len(self._homes) > self._max_sessions:
            oldest, home = self._homes.popitem(last=False)
            self.moved.pop(oldest, None)
            self._left(home)

    def _left(self, home: tuple[str, int, int]) -> None:
        replica = home[0]
        if home[2] != self._boot(replica):
            # A lost boot's sessions are not counted any more.
            return
        self.counts[replica] -= 1
        if self.counts[replica] == 0:
            del self.counts[replica]
