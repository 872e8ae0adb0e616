"""Server-sent events, and JSON on one line. Pure.

Always holds: an event holds no character at which a client could split lines, except its own line feeds.
Python's `str.splitlines`, and so httpx's `iter_lines`, also splits at U+0085, U+2028 and U+2029, which JSON allows in strings
as they are; here they are escaped. (JSON itself escapes all line breaks below U+0020.)
"""

from __future__ import annotations

from typing import Any

import msgspec

from midstream.core.errors import MidstreamError

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
# As UTF-8. These bytes occur in JSON only inside a string, so an escape can replace them.
_NEXT_LINE, _LINE_SEPARATOR, _PARAGRAPH_SEPARATOR = b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9"
_SEPARATORS_LEAD = b"\xe2\x80"


def json_line(value: Any) -> bytes:
    """`value` as JSON without any character that ends a line for any client. Raises TypeError for what JSON cannot hold."""
    encoded = _encode(value)
    if _SEPARATORS_LEAD in encoded:
        encoded = encoded.replace(_LINE_SEPARATOR, rb"\u2028").replace(_PARAGRAPH_SEPARATOR, rb"\u2029")
    return encoded.replace(_NEXT_LINE, rb"\u0085")


def sse_event(value: Any) -> bytes:
    """`value` as one data event. Raises TypeError for what JSON cannot hold."""
    return b"data: " + json_line(value) + b"\n\n"


def error_event(error: MidstreamError) -> bytes:
    """The last event of a stream that failed, as the clients of its wire read it."""
    return error.form.event + sse_event(error.event_body())
