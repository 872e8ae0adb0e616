"""Holds answers that tests get against the OpenAPI document.

Owns: a validator of the JSON Schema that the document has, and what puts it around apps and clients of other tests.
Always holds: the check is stricter than the document, as it takes no field that the document does not tell.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from midstream.api.endpoints import Operation, operations
from midstream.api.openapi import _plain
from midstream.core.wires import WIRES
from midstream.launch.reference import behind, document

#: Each endpoint under each of its paths.
SHOWN = tuple(operations(behind()[2]))
#: How many answers were held against a schema, by operation.
HELD: Counter[tuple[str, str]] = Counter()
#: What the validator knows beside types and objects. Bounds of texts are not checked.
_LOOSE = {
    "exclusiveMinimum",
    "maxLength",
    "minLength",
    "pattern",
    "prefixItems",
    "minItems",
    "maxItems",
    "items",
}


@functools.cache
def the_document() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(msgspec.json.encode(document()))
    return made


def is_of_front(one: Operation) -> bool:
    """Whether the Tinker front serves it."""
    return one.endpoint.errors == "tinker"


def resolved(reference: str) -> Any:
    found: Any = the_document()
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def misfit(value: Any, of: Mapping[str, Any], where: str = "$", *, strict: bool = False) -> str | None:
    """Why a value does not fit a schema; None: it does. It fails on a keyword that it does not know. strict: an object whose
    members are told has no other ones."""
    of = {k: v for k, v in of.items() if k not in ("title", "description", "default")}
    if "$ref" in of:
        return misfit(value, resolved(of["$ref"]), where, strict=strict)
    if "anyOf" in of:
        told = [misfit(value, one, where, strict=strict) for one in of["anyOf"]]
        return None if None in told else f"{where}: none of {told}"
    kind = of.pop("type", None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        None: True,
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": is_number,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    if not fits[kind] or ("enum" in of and value not in of["enum"]):
        return f"{where}: {value!r} is no {kind} of {of.get('enum')}"
    if is_number and not (of.get("minimum", value) <= value <= of.get("maximum", value)):
        return f"{where}: {value!r} is out of bounds"
    if kind == "object":
        return _misfit_of_object(value, of, where, strict)
    if kind == "array":
        return _misfit_of_array(value, of, where, strict)
    unknown = of.keys() - {"enum", "minimum", "maximum"} - _LOOSE
    assert not unknown, unknown
    return None


def _misfit_of_array(value: list[Any], of: Mapping[str, Any], where: str, strict: bool) -> str | None:
    if not of.get("minItems", 0) <= len(value) <= of.get("maxItems", len(value)):
        return f"{where}: has {len(value)} items"
    first, items = of.get("prefixItems", []), of.get("items", {})
    kinds = [*first, *[items] * (len(value) - len(first))]
    told = (misfit(one, kind, f"{where}[]", strict=strict) for one, kind in zip(value, kinds, strict=False))
    return next(filter(None, told), None)


def _misfit_of_object(value: dict[str, Any], of: Mapping[str, Any], where: str, strict: bool) -> str | None:
    properties = of.get("properties", {})
    more = of.get("additionalProperties", not (strict and "properties" in of))
    for name in of.get("required", ()):
        if name not in value:
            return f"{where}.{name} is missing"
    for name, one in value.items():
        if name not in properties and more is False:
            return f"{where}.{name} is not known"
        inner = properties.get(name, more if isinstance(more, dict) else {})
        if why := misfit(one, inner, f"{where}.{name}", strict=strict):
            return why
    return None


@functools.cache
def _paths() -> list[tuple[str, re.Pattern[str], str]]:
    """(method, of targets as they are asked for, path in the document), those with the most letters of their own first."""
    found = []
    for one in SHOWN:
        parts = re.split(r"({\w+(?::path)?})", one.path)
        pattern = "".join(
            (".+" if ":path" in part else "[^/]+") if part.startswith("{") else re.escape(part)
            for part in parts
        )
        own = sum(len(part) for part in parts if not part.startswith("{"))
        found.append((own, one.method, re.compile(pattern), _plain(one.path)))
    found.sort(key=lambda at: -at[0])
    return [at[1:] for at in found]


def misfit_of_answer(method: str, target: str, status: int, kind: str, body: bytes) -> str | None:
    """Why a successful answer is not what the document says; None: it is, or the document says nothing. target: without a
    query, decoded. kind: the media type."""
    if not 200 <= status < 300 or not body:
        return None
    kind = kind.partition(";")[0].strip()
    path = next((p for m, pattern, p in _paths() if m == method and pattern.fullmatch(target)), None)
    if path is None:
        return None
    told = the_document()["paths"][path][method.lower()]["responses"].get(str(status))
    where = f"{method} {target}"
    if told is None or kind not in told["content"]:
        return f"{where}: {status} with {kind} is not told"
    content = told["content"][kind]
    if kind == "application/json" and "schema" in content:
        HELD[method, path] += 1
        return misfit(json.loads(body), content["schema"], where, strict=True)
    if kind == "text/event-stream" and "x-event-schema" in content:
        HELD[method, path] += 1
        return _misfit_of_events(body, content["x-event-schema"], where)
    return None


def _misfit_of_events(body: bytes, of: Mapping[str, Any], where: str) -> str | None:
    datas = re.findall(r"^data: (.*)$", body.decode(), re.MULTILINE)
    events = [json.loads(one) for one in datas if one != "[DONE]"]
    told = (misfit(one, of, where, strict=True) for one in events)
    return next(filter(None, told), None)


class Checked:
    """An ASGI app whose successful answers are held against the document. misfits: what did not fit. Each is raised, too, for
    clients that call the app themselves."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.misfits: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        head: dict[str, Any] = {}
        body = []

        async def seen(message: Any) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            elif message["type"] == "http.response.body":
                body.append(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, seen)
        if scope["type"] != "http" or not head:
            return
        target = scope["path"]
        if not scope.get("raw_path", b"/trace").endswith(b"/trace"):
            # Its slash was written %2F: it is the end of a session's key.
            target = target.removesuffix("/trace")
        kinds = {name.lower(): value for name, value in head["headers"]}
        kind = kinds.get(b"content-type", b"").decode()
        why = misfit_of_answer(scope["method"], target, head["status"], kind, b"".join(body))
        if why is not None:
            self.misfits.append(why)
            raise AssertionError(why)


class CheckedClient(httpx.AsyncClient):
    """A client of a replica that holds what it reads whole against the document."""

    async def send(self, request: httpx.Request, *, stream: bool = False, **more: Any) -> httpx.Response:
        answer = await super().send(request, stream=stream, **more)
        # What it answers elsewhere goes to its gateway.
        if not stream and request.url.path in WIRES:
            kind = answer.headers.get("content-type", "")
            why = misfit_of_answer(request.method, request.url.path, answer.status_code, kind, answer.content)
            assert why is None, why
        return answer
