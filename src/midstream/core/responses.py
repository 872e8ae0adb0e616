"""Responses that replicas store: their ids, who holds one, and what a gateway asks of them. Pure.

An id says which replica made its response, so that a gateway finds it without a table. The body of a request may name a
response that another replica holds. No gateway searches bodies: the replica answers with a 404 that says in HEADER_HELD_BY
who may hold it, and the gateway sends the request there.

Always holds: an id has no character that a path or a header would have to quote.
"""

from __future__ import annotations

import re
import uuid
from typing import Literal

import msgspec

from midstream.core.errors import NotFound

ID_PREFIX = "resp_"
#: Internal, of a 404: the replica that may hold the response that the request continues.
HEADER_HELD_BY = "x-midstream-held-by"
_NAME = re.compile(r"[A-Za-z0-9.:-]{1,128}")


def new_id(replica: str) -> str:
    """An id without its prefix. A replica whose name cannot stand in one is not named."""
    return f"{uuid.uuid4().hex}_{replica}" if _NAME.fullmatch(replica) else uuid.uuid4().hex


def holder_of(response_id: str) -> str:
    """The replica that the id names; "": none."""
    name = response_id.removeprefix(ID_PREFIX).partition("_")[2]
    return name if _NAME.fullmatch(name) else ""


class PreviousNotFound(NotFound):
    """holder: the replica that may have it; "": no other one."""

    def __init__(self, response_id: str, holder: str = "") -> None:
        message = (
            f"previous_response_id: there is no response {response_id!r}; it was deleted, dropped or lost"
        )
        super().__init__(message, param="previous_response_id")
        self._holder = holder

    def headers(self) -> dict[str, str]:
        return {HEADER_HELD_BY: self._holder} if self._holder else {}


class ResponseAsked(msgspec.Struct, frozen=True):
    """What a gateway asks a replica for."""

    tenant: str
    id: str
    what: Literal["response", "items", "delete"]


class ResponseFound(msgspec.Struct, frozen=True):
    """The answer: the response, its items in their order, or `true` for what was deleted; null: there is none here."""

    found: msgspec.Raw
