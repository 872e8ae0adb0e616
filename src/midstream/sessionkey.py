"""Which session a request belongs to. Pure; used by the gateway (placement) and by a replica that is asked directly.

Order: `x-multi-turn-session-id` > `x-session-affinity` > `X-Session-ID` > body `prompt_cache_key` > body `user` > none.
Always holds: the key is compared whole (never by prefix), and two tenants' equal keys are different sessions: whoever
stores keys pairs them with the tenant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from midstream.errors import InvalidRequest

SESSION_HEADERS = ("x-multi-turn-session-id", "x-session-affinity", "x-session-id")
SESSION_BODY_FIELDS = ("prompt_cache_key", "user")
MAX_KEY_BYTES = 512
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def session_from_headers(headers: Mapping[str, str]) -> str | None:
    """The key in `headers` (lower-case names), or None. Raises InvalidRequest on a value that cannot be a key, an empty one
    too."""
    for name in SESSION_HEADERS:
        value = headers.get(name)
        if value is not None:
            return check_key(value.strip(" \t"), name)
    return None


def session_from_body(prompt_cache_key: str | None, user: str | None) -> str | None:
    """The key in the body fields, or None. Raises InvalidRequest on a value that cannot be a key, an empty one too."""
    if prompt_cache_key is not None:
        return check_key(prompt_cache_key, "prompt_cache_key")
    if user is not None:
        return check_key(user, "user")
    return None


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
