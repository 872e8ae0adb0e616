"""Shows names and values from a snapshot's files in error messages. Pure.

Always holds: the text is short, on one line, and can be encoded as UTF-8, whatever the files hold. So a user who can write into
a bucket cannot forge a line of a log.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from midstream.core.text import plain

NAME_CHARS = 100
NAMES_LISTED = 5
#: Characters of a value, or of another program's message.
TEXT_CHARS = 300

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = NAME_CHARS
_REPR.maxlevel = 3


def shown(text: str, limit: int = NAME_CHARS) -> str:
    """`text`, cut to about `limit` characters. Characters that cannot be shown are escaped."""
    return plain(text if len(text) <= limit else text[:limit] + "...")


def shown_value(value: object) -> str:
    """A JSON value as Python writes it, cut in depth and length."""
    return shown(_REPR.repr(value), TEXT_CHARS)


def listed(names: Sequence[str]) -> str:
    """The first few names, and the number of the others."""
    first = ", ".join(shown(name) for name in names[:NAMES_LISTED])
    return first + and_more(len(names) - NAMES_LISTED)


def and_more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""
