"""Text for people and for wires: a line, a table, a duration, a size; what an engine can do; server-sent events. Pure.

Whoever reads JSON of another process catches all of NOT_JSON, so that any bytes raise the reader's own error. A client's body
is read by `decoded`, so that nobody meets the recursion limit later.

Server-sent events. Always holds: an event holds no character at which a client could split lines, except its own line feeds.
Python's `str.splitlines`, and so httpx's `iter_lines`, also splits at U+0085, U+2028 and U+2029, which JSON allows in strings
as they are; here they are escaped. (JSON itself escapes all line breaks below U+0020.)

What engines can do, in words: an engine's name, what it has and lacks, how a refusal for want of a feature reads.
types.ENGINE_FEATURES says which features there are; replica/request/checked.py and api/status.py which request and which signal
needs one. Always holds: a refusal names the field, the engine and the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec

from midstream.core.errors import MidstreamError
from midstream.core.types import ENGINE_FEATURES, EngineCard, ModelInfo

#: Nested too deeply it is a RecursionError, and not UTF-8 in a text a UnicodeDecodeError.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


_T = TypeVar("_T")
#: Of the recursion limit, what is left to those who write or show a decoded value.
FRAMES_LEFT = 100

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
# As UTF-8. These bytes occur in JSON only inside a string, so an escape can replace them.
_NEXT_LINE, _LINE_SEPARATOR, _PARAGRAPH_SEPARATOR = b"\xc2\x85", b"\xe2\x80\xa8", b"\xe2\x80\xa9"
_SEPARATORS_LEAD = b"\xe2\x80"


def decoded(decode: Callable[[bytes], _T], data: bytes) -> _T:
    """`decode(data)`, which fails FRAMES_LEFT frames before the recursion limit. Raises NOT_JSON."""
    return _below(FRAMES_LEFT, decode, data)


def _below(frames: int, decode: Callable[[bytes], _T], data: bytes) -> _T:
    return _below(frames - 1, decode, data) if frames else decode(data)


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
    event = sse_event(error.event_body())
    return event if error.shape == "openai" else b"event: error\n" + event


def plain(text: str) -> str:
    """On one line, with nothing a terminal acts on: names in messages come from files that anybody may have written."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their cells. No line ends in blanks, and no character acts on a terminal."""
    rows = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = []
    for row in (heads, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def seconds(value: float) -> str:
    """A duration, as short as it can be understood."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"


def declared(info: ModelInfo) -> EngineCard:
    """The engine's card for the model it serves: without grammars when this model's tokenizer does not work with them."""
    card = info.card
    if info.grammars or not card.has("grammars"):
        return card
    return msgspec.structs.replace(card, features=tuple(f for f in card.features if f != "grammars"))


def engine_name(card: EngineCard) -> str:
    """e.g. `vllm 0.32.0`; the kind alone when the version is not known."""
    return f"{card.kind} {card.version}".rstrip()


def refusal(param: str, card: EngineCard, feature: str, words: str) -> str:
    """words: what the engine does not do, as in `does not {words}`."""
    why = f": {card.why[feature]}" if feature in card.why else ""
    return (
        f"{param}: this deployment's engine ({engine_name(card)}) does not {words} (feature {feature}){why}"
    )


def in_order(features: Collection[str]) -> list[str]:
    """As ENGINE_FEATURES has them; names that it does not have are left out."""
    return [feature for feature in ENGINE_FEATURES if feature in features]
