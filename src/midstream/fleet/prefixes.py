"""Where the beginning of a prompt is cached, for requests without a session, or with one that is not known.

The bytes of the body from its `messages` or `prompt` on are cut at fixed bounds. The end of each piece is hashed with what came
before it. A turn that continues an earlier one repeats its bytes, so the longest beginning that is known says which replica
computed it.

Requests that run at the same time and share a beginning are a group, of samples of one prompt for example. `Known.shared` says
so, and placement spreads a group by load instead of filling one replica with it.

Sessions whose first prompts are equal to the end are a group, too. Sessions that share a system prompt are none. Samples of one
task come one after the other, so the last prompts are kept: to compare a long one takes a third of the time that it takes to
find its end and to digest it.

Always holds: the table never exceeds its bound; the least recently used beginning goes first. A body is never parsed for its
beginnings, and of each piece at most PIECE_BYTES are hashed. Equal prompts of two tenants are different ones. A wrong guess
costs a cache miss, nothing else.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import InvalidRequest
from midstream.core.headers import HEADER_FOLLOW_PREFIX
from midstream.core.types import Session

# Share of a prompt's bytes. A shorter common beginning decides nothing.
FOLLOWED_FROM = 0.5
# Bytes. Shorter prompts are cheap to compute anywhere.
FIRST_BOUND = 512
# The bound for a client that asks to be followed.
SHORT_BOUND = 64
# Only so many bytes of a prompt are looked at.
LAST_BOUND = 2**20
PIECE_BYTES = 512
BEGINNINGS_MAX = 200_000
#: So many of the last prompts are kept, of those with so many bytes at least; and so many bytes of one are looked for.
KEPT, KEPT_FROM, LOOKED_FOR = 4, 4096, 64
# Within a prompt there are no fields of such a name.
_KEPT_NAMES = (b'"messages"', b'"prompt"')

_FOLLOW = HEADER_FOLLOW_PREFIX.encode()
_VALUE = re.compile(rb'"(?:messages|prompt)"[ \t\r\n]*:')


class _Prompts(msgspec.Struct):
    """As the wires name it. The first that is there counts: with `input`, `text` is a format."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Prompts)


def _bounds() -> tuple[int, ...]:
    """Each a quarter more than the one before: of a known beginning at most a fifth is missed."""
    bounds = [SHORT_BOUND]
    while bounds[-1] < FIRST_BOUND:
        bounds.append(min(FIRST_BOUND, bounds[-1] + (bounds[-1] >> 2)))
    while bounds[-1] < LAST_BOUND:
        bounds.append(bounds[-1] + (bounds[-1] >> 2))
    return tuple(bounds)


BOUNDS = _bounds()
_FIRST = BOUNDS.index(FIRST_BOUND)


@dataclass(frozen=True, slots=True)
class PromptBeginnings:
    """The beginnings of a prompt, the shortest first, as hashes; size: of the prompt, in bytes; first: of the shortest, its
    place in BOUNDS."""

    beginnings: tuple[int, ...]
    size: int
    first: int


def read_prompt(tenant: str, body: bytes, *, short: bool = False) -> PromptBeginnings | None:
    """None when it is too short to matter, or there is none. short: beginnings below FIRST_BOUND matter too."""
    if len(body) <= (SHORT_BOUND if short else FIRST_BOUND):
        return None
    found = _VALUE.search(body)
    if found is None:
        return None
    start = found.end()
    size = len(body) - start
    view = memoryview(body)
    beginnings = []
    chain, at = hash(tenant), start
    for bound in BOUNDS[: bisect_left(BOUNDS, size)]:
        end = start + bound
        chain = hash((chain, hash(view[max(at, end - PIECE_BYTES) : end])))
        at = end
        beginnings.append(chain)
    first = 0 if short else _FIRST
    kept = tuple(beginnings[first:])
    return PromptBeginnings(kept, min(size, LAST_BOUND), first) if kept else None


def follows(headers: Mapping[bytes, bytes]) -> bool:
    """Whether an unknown session begins where its prompt's beginning is known. Raises InvalidRequest."""
    value = headers.get(_FOLLOW)
    if value is not None and value.strip() != b"1":
        raise InvalidRequest(f"{HEADER_FOLLOW_PREFIX} is 1, or is left out", param=HEADER_FOLLOW_PREFIX)
    return value is not None


def _prompt_in(body: bytes) -> memoryview:
    """As the body has it; empty if there is none."""
    try:
        found = _decoder.decode(body)
    except NOT_JSON:
        # The replica says what is wrong with it.
        return memoryview(b"")
    return memoryview(
        found.messages or found.prompt or found.input or found.token_ids or found.input_ids or found.text
    )


def _key_of(tenant: str, prompt: memoryview) -> Session | None:
    """What new sessions with exactly this prompt have in common, for all gateways. None: it is too short to matter."""
    return (tenant, f"{zlib.crc32(prompt):08x}-{len(prompt)}") if len(prompt) > FIRST_BOUND else None


def _field_of(body: bytes, prompt: memoryview) -> bytes:
    """The prompt with its name before it; empty where something before it begins alike."""
    value = bytes(prompt)
    # To look for all of it would take as long as to digest it ten times.
    at = body.find(value[:LOOKED_FOR])
    if not body.startswith(value, at):
        return b""
    return body[body.rfind(b'"', 0, max(0, body.rfind(b'"', 0, at))) : at] + value


class SessionGroup(NamedTuple):
    """Of a new session. home: where the last session of it was placed; "": nowhere that is known."""

    key: Session
    home: str = ""


class Known(NamedTuple):
    """replica: which computed it last; share: of the prompt's bytes that it knows; alone: no other one ever computed them;
    shared: requests that run now begin with them, too."""

    replica: str
    share: float
    alone: bool
    shared: bool = False


class PrefixTable:
    """Beginning -> name of the replica that computed it last, and whether it alone ever did; how many running requests have
    each beginning. Group -> where its last session was placed."""

    def __init__(self, beginnings_max: int = BEGINNINGS_MAX) -> None:
        self._max = beginnings_max
        self._homes: OrderedDict[int, tuple[str, bool]] = OrderedDict()
        # Only counts above 0.
        self._running: dict[int, int] = {}
        # The last long prompts of groups, the latest first, each with its name before it and its group's key.
        self._kept: deque[tuple[bytes, Session]] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        return f"PrefixTable({len(self._homes)} of at most {self._max} beginnings)"

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, prompt: PromptBeginnings) -> Known | None:
        """The replica that knows enough of it to be followed."""
        for place in range(len(prompt.beginnings) - 1, -1, -1):
            share = BOUNDS[prompt.first + place] / prompt.size
            if share < FOLLOWED_FROM:
                return None
            home = self._homes.get(prompt.beginnings[place])
            if home is not None:
                return Known(home[0], share, home[1], prompt.beginnings[place] in self._running)
        return None

    def group(self, tenant: str, body: bytes) -> SessionGroup | None:
        """Of a new session with this first request."""
        if not FIRST_BOUND < len(body) <= LAST_BOUND:
            return None
        key = self._key_again(tenant, body)
        if key is None:
            prompt = _prompt_in(body)
            key = _key_of(tenant, prompt)
            if key is None:
                return None
            if len(prompt) >= KEPT_FROM and (field := _field_of(body, prompt)).startswith(_KEPT_NAMES):
                self._kept.appendleft((field, key))
        home = self._homes.get(hash(key))
        return SessionGroup(key) if home is None else SessionGroup(key, home[0])

    def _key_again(self, tenant: str, body: bytes) -> Session | None:
        """That of a prompt which is kept, if the body has the same. A value of JSON cannot begin as another one and go on."""
        for field, key in self._kept:
            if key[0] == tenant and (at := body.find(field[:LOOKED_FOR])) >= 0 and body.startswith(field, at):
                return key
        return None

    def joined(self, group: SessionGroup, replica: str) -> None:
        """A session of the group was placed."""
        number = hash(group.key)
        self._homes[number] = replica, True
        self._homes.move_to_end(number)
        if len(self._homes) > self._max:
            self._homes.popitem(last=False)

    def begin(self, prompt: PromptBeginnings) -> None:
        """A request with this prompt runs from now on, until `end`."""
        for beginning in prompt.beginnings:
            self._running[beginning] = self._running.get(beginning, 0) + 1

    def end(self, prompt: PromptBeginnings) -> None:
        """It runs no longer. Call it once for each `begin`."""
        for beginning in prompt.beginnings:
            left = self._running[beginning] - 1
            if left:
                self._running[beginning] = left
            else:
                del self._running[beginning]

    def learn(self, prompt: PromptBeginnings, replica: str) -> None:
        """The replica computes it."""
        homes, alone, shared = self._homes, (replica, True), (replica, False)
        for beginning in prompt.beginnings:
            before = homes.get(beginning, alone)
            homes[beginning] = alone if before == alone else shared
            homes.move_to_end(beginning)
        while len(homes) > self._max:
            homes.popitem(last=False)
