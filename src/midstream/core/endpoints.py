"""An HTTP endpoint as one record: its route, the scope that it needs, what it reads and what it answers. Pure.

Owns: the binding of records to the method that handles their requests. One record decorates the method itself; `serves` takes
several. Routes (http/routes.py), the check of scopes (fleet/access.py), the OpenAPI document (api/openapi.py) and docs/http.md
are made of these records.
Always holds:
- A record is the only place of its route.
- A handler that takes a `body` gets it decoded. Its annotations are the types of that body and of a JSON answer.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from midstream.core.scopes import ScopeNeed
from midstream.core.wires import PREFIX

#: A deployment, as Fireworks names one.
ONE_DEPLOYMENT = "/v1/accounts/{account}/deployments/{name}"

JSON = ("application/json",)
JSON_OR_EVENTS = ("application/json", "text/event-stream")
PLAIN_TEXT = ("text/plain",)
HTML = ("text/html",)

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


class Nothing(msgspec.Struct):
    """An empty object: it is done."""


class Parameter(NamedTuple):
    """A parameter of the query, or a header. schema: JSON Schema of its value."""

    name: str
    schema: Mapping[str, Any]
    words: str


@dataclass(frozen=True)
class Endpoint:
    """path: as Starlette spells it. need: what it asks of a key; None: nothing. summary: one sentence.

    headers: beside those that `need` implies. body: what a JSON body is read into. also_read: the media types of bodies beside
    JSON. answer: the type of a JSON answer; Any: the document does not say it, or other processes give it. answer_of: the path
    of the POST that has the same answer. kinds: the media types of the answer; none: it has no body. status: of success, or
    of what always refuses. prefixed: it is served below Fireworks' prefix, too. files: the values of {file} in the path.
    errors: the shape of its errors.
    """

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    need: ScopeNeed | None
    summary: str
    query: tuple[Parameter, ...] = ()
    headers: tuple[Parameter, ...] = ()
    body: type[msgspec.Struct] | None = None
    also_read: tuple[str, ...] = ()
    answer: Any = Any
    answer_of: str = ""
    kinds: tuple[str, ...] = JSON
    status: int = 200
    prefixed: bool = False
    files: tuple[str, ...] = ()
    errors: Literal["openai", "anthropic", "tinker"] = "openai"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, PREFIX + self.path) if self.prefixed else (self.path,)

    def __call__(self, handler: Handler) -> Handler:
        """As a decorator: has the method handle requests to this endpoint."""
        return serves(self)(handler)


class Bound(NamedTuple):
    """An endpoint of a class. handler: the name of the method. reads: the type of the method's `body`; None: it has none."""

    endpoint: Endpoint
    handler: str
    reads: type[msgspec.Struct] | None


def serves(*endpoints: Endpoint) -> Callable[[Handler], Handler]:
    """Has the method handle requests to all of these endpoints."""

    def bind(handler: Handler) -> Handler:
        hints = typing.get_type_hints(handler)
        reads, answer = hints.get("body"), hints.get("return")
        is_struct = (
            isinstance(answer, type) and issubclass(answer, msgspec.Struct) and answer is not msgspec.Struct
        )
        types: dict[str, Any] = {"answer": answer} if is_struct else {}
        if reads is not None:
            types["body"] = reads
        made = [Bound(replace(one, **types), handler.__name__, reads) for one in endpoints]
        handler._endpoints = made  # type: ignore[attr-defined]
        return handler

    return bind


def bound(api: type) -> Iterator[Bound]:
    """The endpoints of a class, in the order in which they stand there."""
    for member in vars(api).values():
        yield from getattr(member, "_endpoints", ())


def endpoints_of(*apis: type) -> tuple[Endpoint, ...]:
    return tuple(one.endpoint for api in apis for one in bound(api))


def own_letters(path: str) -> int:
    """How much of a path is not a parameter: of two paths that match, the one with more is meant."""
    return len(re.sub(r"{[^}]*}", "", path))


# -- Parameters


def text(name: str, words: str, **schema: Any) -> Parameter:
    return Parameter(name, {"type": "string", **schema}, words)


def number(name: str, words: str, lowest: int, highest: int, default: int) -> Parameter:
    bounds = {"type": "integer", "minimum": lowest, "maximum": highest, "default": default}
    return Parameter(name, bounds, words)


def flag(name: str, words: str, default: bool = False) -> Parameter:
    return Parameter(name, {"type": "boolean", "default": default}, words)


def choice(name: str, words: str, values: tuple[str, ...], default: str | None = None) -> Parameter:
    given = {} if default is None else {"default": default}
    return Parameter(name, {"type": "string", "enum": list(values), **given}, words)


PAGE_AFTER = text("pageToken", "The `nextPageToken` of the page before.")
PAGE_SIZE = number("pageSize", "How many are on a page; 0: 50, and never more than 200.", 0, 2**31 - 1, 0)
