"""Results in the media type that a client accepts.

Always holds: what exists as JSON only, errors too, is given as JSON whatever the client accepts.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from midstream.core.beside import beside, stepwise_json
from midstream_tinker.futures import JSON, Outcome
from midstream_tinker.refusals import TinkerRefusal


async def response_to(accept: str, outcome: Outcome) -> Response:
    """accept: the client's Accept header. Raises TinkerRefusal (406)."""
    content, media_type = await _in_accepted_form(outcome, accept)
    headers = {name: _printable(value) for name, value in outcome.headers.items()}
    return Response(content, outcome.status, media_type=media_type, headers=headers)


async def _in_accepted_form(outcome: Outcome, accept: str) -> tuple[bytes, str]:
    """The body and its media type. Raises TinkerRefusal (406)."""
    if outcome.as_json is None:
        return outcome.body, outcome.media_type
    form = preferred(accept, (outcome.media_type, JSON))
    if form is None:
        message = f"accept: this result is {outcome.media_type} or {JSON}, and the request accepts neither"
        raise TinkerRefusal(406, message, "accept")
    if form == outcome.media_type:
        return outcome.body, form
    as_json = outcome.as_json
    return await beside.run(len(outcome.body), lambda: stepwise_json(as_json(outcome.body))), JSON


def preferred(accept: str, offered: Sequence[str]) -> str | None:
    """Which of the media types `offered` an Accept header asks for (RFC 9110, 12.5.1); of equals the first; None: none of them.

    A header without any readable range accepts everything.
    """
    weights = dict(filter(None, map(_media_range, accept.split(","))))
    if not weights:
        return offered[0]

    def weight(media_type: str) -> float:
        ranges = (media_type, media_type.partition("/")[0] + "/*", "*/*")
        return next((weights[one] for one in ranges if one in weights), 0.0)

    best = max(offered, key=weight)
    return best if weight(best) > 0 else None


def _media_range(text: str) -> tuple[str, float] | None:
    name, *parameters = (part.strip().lower() for part in text.split(";"))
    quality = next((p.partition("=")[2] for p in parameters if p.startswith("q=")), "1")
    try:
        return (name, float(quality)) if "/" in name else None
    except ValueError:
        return (name, 0.0)


def _printable(value: str) -> str:
    """What a header can hold: a snapshot may be called anything."""
    if value.isascii() and value.isprintable():
        return value
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in value)
