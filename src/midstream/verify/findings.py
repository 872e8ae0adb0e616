"""What differs, and why: the words of a report. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

#: Tokens that a finding lists.
TOKENS_LISTED = 8


class Cause(StrEnum):
    """The likely cause. The words are those of reports and of docs/verify.md."""

    LABEL = "wrong label"
    ROUTE = "swapped route row"
    WEIGHTS = "router weights"
    LOGPROB = "moved logprob"
    SAMPLING = "other sampling parameters"
    SNAPSHOT = "other snapshot in the bucket"
    STALE_KV = "stale KV"
    TOKENS = "dropped or repeated token"
    OTHER_CHOICE = "other choice's ids"
    ADAPTER = "other adapter version"
    OTHER_SESSION = "other session's turn"
    MASK = "wrong mask id"
    TOKEN_ID = "wrong token id"
    REPEATED_TURN = "repeated turn"
    MISSING_RECORD = "missing record"
    NO_SNAPSHOT = "snapshot not in the bucket"
    FOLLOWS = "follows from its parent turn"
    UNKNOWN = "unknown"


class Place(NamedTuple):
    """Where a turn is recorded. line: in the segment, from 1. session: "" where a record has none; turn: then 0."""

    segment: str
    line: int
    session: str
    replica: str
    turn: int

    def __str__(self) -> str:
        where = f"{self.segment}, line {self.line}"
        return f"{where}: session {self.session!r}, {self.replica}, turn {self.turn}" if self.turn else where


class TokenDifference(msgspec.Struct, frozen=True):
    """token: its number in the turn. column: of the record. recorded, found: what the record says, and what was computed."""

    token: int
    column: str
    recorded: str
    found: str


class Finding(msgspec.Struct, frozen=True):
    """cause: the likely one. detail: what was tried and fits, or what contradicts itself. count: of all tokens that differ."""

    cause: Cause
    place: Place
    detail: str
    tokens: tuple[TokenDifference, ...] = ()
    count: int = 0

    def lines(self) -> list[str]:
        """For a terminal."""
        first = f"{self.place}: {self.cause}: {self.detail}"
        listed = [
            f"  token {one.token}: {one.column} {one.recorded}, computed {one.found}" for one in self.tokens
        ]
        more = self.count - len(self.tokens)
        return [first, *listed, *([f"  and {more} more"] if more > 0 else [])]
