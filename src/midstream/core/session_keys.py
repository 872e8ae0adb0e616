"""Which session a request belongs to. Pure; used by the gateway (placement) and by a replica that is asked directly.

Order: the path (core/wires.py) > `x-multi-turn-session-id` > `x-session-affinity` > `X-Session-ID` > `X-SMG-Routing-Key` > body
`prompt_cache_key` > body `session_id` > body `user` > none. An empty one is passed over if another names a session.
Always holds: the key is compared whole, never by prefix. Equal keys of two tenants are different sessions: a table of keys
pairs each with its tenant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from midstream.core.errors import InvalidRequest

SESSION_HEADERS = ("x-multi-turn-session-id", "x-session-affinity", "x-session-id", "x-smg-routing-key")
SESSION_BODY_FIELDS = ("prompt_cache_key", "session_id", "user")
MAX_KEY_BYTES = 512
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def session_key(named: Iterable[tuple[str, str | None]]) -> str | None:
    """The key of a request, from the fields that may name it in their order, each with its value or None; None without any.

    An empty value is passed over when a later field names a session. Reads no field behind the one that does. Raises
    InvalidRequest on a value that cannot be a key, and when all that are given are empty.
    """
    empty = None
    for name, value in named:
        if value:
            return check_key(value, name)
        if value is not None and empty is None:
            empty = name
    return None if empty is None else check_key("", empty)


def named_in_headers(headers: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """For `session_key`. `headers` have lower-case names."""
    for name in SESSION_HEADERS:
        value = headers.get(name)
        yield name, None if value is None else value.strip(" \t")


def named_in_body(
    prompt_cache_key: str | None, session_id: str | None, user: str | None
) -> Iterator[tuple[str, str | None]]:
    """For `session_key`."""
    return zip(SESSION_BODY_FIELDS, (prompt_cache_key, session_id, user), strict=True)


def check_key(value: str, param: str) -> str:
    """`value`, or InvalidRequest when it is empty, over 512 bytes of UTF-8, or holds control characters."""
    if not value:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > MAX_KEY_BYTES:
        raise InvalidRequest(f"{param} must be at most {MAX_KEY_BYTES} bytes, got {size}", param=param)
    if _CONTROL_CHARACTERS.search(value):
        raise InvalidRequest(f"{param} must not contain control characters", param=param)
    return value
