"""Body fields that no wire knows, passed over where the deployment's setting says so. Pure.

Always holds: only members of the body itself are passed over, and each is told by name. A known field is never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar
from urllib.parse import quote

import msgspec

from midstream.core.errors import UnknownField
from midstream.replica.request.schema import members

#: A body with more unknown fields is no request of this API.
IGNORED_MAX = 256
_NAME_MAX = 64
_HEADER_MAX = 4096

_Read = TypeVar("_Read")


def read_known(read: Callable[[bytes], _Read], body: bytes) -> tuple[_Read, list[str]]:
    """What `read` makes of the body without its unknown fields, and their names. Raises InvalidRequest, as `read` does."""
    try:
        return read(body), []
    except UnknownField as error:
        sent = members(body)
        ignored = [name for name in sent if name not in error.known]
        # Without `known`, it is a member of a known field, where it changes what that field means.
        if not error.known or len(ignored) > IGNORED_MAX:
            raise
    return read(msgspec.json.encode({name: sent[name] for name in sent if name not in ignored})), ignored


def header_value(names: Iterable[str]) -> str:
    """The names, percent-encoded and cut, as the value of a header."""
    told = ", ".join(quote(name[:_NAME_MAX], safe="", errors="replace") for name in names)
    return told if len(told) <= _HEADER_MAX else told[:_HEADER_MAX].rpartition(", ")[0] + ", ..."
