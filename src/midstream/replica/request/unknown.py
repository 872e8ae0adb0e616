"""Body fields that no wire knows, passed over where the deployment's setting says so. Pure.

Always holds: only members of the body itself and of `stream_options` are ignored, and tools of kinds that the server does not
have. Each is named to the client. A known field is never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar
from urllib.parse import quote

import msgspec

from midstream.core.errors import UnknownField, UnknownTools
from midstream.replica.request.schema import StreamOptions, members

#: A body with more unknown fields is no request of this API.
IGNORED_MAX = 256
_NAME_MAX = 64
_HEADER_MAX = 4096
_OPTIONS = "stream_options"

_Read = TypeVar("_Read")


def read_known(read: Callable[[bytes], _Read], body: bytes) -> tuple[_Read, list[str]]:
    """What `read` makes of the body without its unknown fields, and their names. Raises InvalidRequest, as `read` does."""
    ignored: list[str] = []
    while True:
        try:
            return read(body), ignored
        except UnknownField as error:
            sent = members(body)
            more = _passed_over(sent, error)
            ignored += more
            if not more or len(ignored) > IGNORED_MAX:
                raise
        body = msgspec.json.encode(sent)


def _passed_over(sent: dict[str, msgspec.Raw], error: UnknownField) -> list[str]:
    """Takes unknown fields out of what was sent, and returns their names."""
    if isinstance(error, UnknownTools):
        tools, ignored = msgspec.json.decode(sent.pop("tools"), type=list[msgspec.Raw]), frozenset(error.at)
        if kept := [tool for at, tool in enumerate(tools) if at not in ignored]:
            sent["tools"] = msgspec.Raw(msgspec.json.encode(kept))
        return [f"tools[{at}]" for at in error.at]
    found = [name for name in sent if error.known and name not in error.known]
    for name in found:
        del sent[name]
    if not (error.param or "").startswith(f"{_OPTIONS}."):
        # A member of another known field may change what that field means.
        return found
    options = members(bytes(sent[_OPTIONS]))
    unknown = [name for name in options if name not in StreamOptions.__struct_fields__]
    known = {name: value for name, value in options.items() if name not in unknown}
    sent[_OPTIONS] = msgspec.Raw(msgspec.json.encode(known))
    return found + [f"{_OPTIONS}.{name}" for name in unknown]


def header_value(names: Iterable[str]) -> str:
    """The names, percent-encoded and cut, as the value of a header."""
    named = ", ".join(quote(name[:_NAME_MAX], safe="", errors="replace") for name in names)
    return named if len(named) <= _HEADER_MAX else named[:_HEADER_MAX].rpartition(", ")[0] + ", ..."
