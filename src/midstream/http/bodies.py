"""What requests to the control app carry, read within bounds: bodies, JSON objects, whole numbers in a query. And its answers.

Always holds: whatever a client sends is either read or refused with a 4xx that says why; nothing of it raises anything else.
A field at fault is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from midstream.core.decoding import NOT_JSON, decoded, fault
from midstream.core.errors import InvalidRequest, PayloadTooLarge, UnknownField

MAX_BODY_BYTES = 2**20

Body = TypeVar("Body", bound=msgspec.Struct)


async def read_body(request: Request, most: int = MAX_BODY_BYTES) -> bytes:
    """The whole of it, of `most` bytes. Raises PayloadTooLarge."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise PayloadTooLarge(f"the body must be at most {most} bytes")
    return bytes(body)


async def body_of(request: Request, kind: type[Body]) -> Body:
    """The body as `kind`, which may have a `read` of its own. An empty one is an empty object. Raises MidstreamError."""
    sent = await read_body(request)
    read: Any = getattr(kind, "read", None)
    if read is not None:
        made: Body = read(sent)
        return made
    return fields_of(json_object(sent or b"{}"), kind)


def answered(answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A struct as a JSON answer."""
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


def json_object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest."""
    try:
        raw = decoded(msgspec.json.decode, body)
    except NOT_JSON as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    return raw


def fields_of(raw: dict[str, Any], kind: type[Body]) -> Body:
    """An object that has no other fields than those of `kind`. Raises UnknownField, InvalidRequest."""
    for field in raw:
        if field not in kind.__struct_encode_fields__:
            raise UnknownField(field)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        found = fault(error)
        raise InvalidRequest(str(found), param=found.field or None) from error


def asked_page(request: Request, rows: int, most: int) -> tuple[str, int]:
    """The name that the page of a list begins behind, and how many rows it has: `rows` where none are asked for, `most` at
    most. Raises InvalidRequest."""
    size = whole_number(request, "pageSize", 0, 0, 2**31 - 1)
    return request.query_params.get("pageToken", ""), min(size or rows, most)


def page_of(names: Iterable[str], after: str, size: int) -> tuple[list[str], str]:
    """Of a list: the names on the page that begins behind `after`, in order, and the token of the next; "": it is the last."""
    rest = [name for name in sorted(names) if name > after]
    return rest[:size], rest[size - 1] if len(rest) > size else ""


def whole_number(request: Request, name: str, default: int, lowest: int, highest: int) -> int:
    """A number of the query; `default` if it is not given. Raises InvalidRequest."""
    asked = request.query_params.get(name)
    if asked is None:
        return default
    digits = asked.lstrip("0") or "0"
    fits = asked.isascii() and asked.isdecimal() and len(digits) <= len(str(highest))
    if not fits or not lowest <= int(digits) <= highest:
        raise InvalidRequest(f"{name}: must be a whole number from {lowest} to {highest}", param=name)
    return int(digits)
