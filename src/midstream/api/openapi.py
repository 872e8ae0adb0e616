"""The HTTP API as an OpenAPI 3.1 document, made of the code. Pure.

Paths, methods and scopes are those of core/scopes.py, the sentences those of operations.py, bodies the structs that the server
decodes into, errors those of core/errors.py. Answers are types, too: those that are encoded, or those of answers.py.
Always holds:
- The document is the same on every server of a version. It has each path of the port, and no other one.
- A body that the server takes fits its schema. Rules between fields are in the documents alone.
- A successful answer fits its schema, which lets an answer have more fields.
- A base URL that names a session is a server of the paths that may be asked below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, get_args

import msgspec
from msgspec import UNSET, UnsetType

from midstream import __version__
from midstream.api import schemas
from midstream.api.operations import FILES, GROUPS, Operation, Parameter
from midstream.core import headers as h
from midstream.core import versions as v
from midstream.core.errors import MidstreamError
from midstream.core.resumption import FAILOVER_MODES, HEADER_FAILOVER
from midstream.core.scopes import GATEWAY_ROUTES, PUBLIC, SCOPES, TINKER_ROUTES, Need
from midstream.core.sessions import MAX_KEY_BYTES, SESSION_HEADERS
from midstream.core.traces import RecordsKept
from midstream.core.wires import SESSION_BASES, TRAINER_HEALTH, WIRES, is_read_in_session
from midstream.fleet.registry import DEPLOYMENT_HEADER, MODEL_HEADER
from midstream.proxy.front import PREFIX as _FRONT

Json = dict[str, Any]
Bodies = Mapping[str, type[msgspec.Struct]]


class Answer(Protocol):
    """whole: the type of an answer that is no stream. event: the type of the data of one event of a stream, or what it is in
    words; None: it has no stream."""

    @property
    def whole(self) -> Any: ...

    @property
    def event(self) -> Any: ...


Answers = Mapping[str, Answer]

PREFIX = "/inference"
#: The group of the paths that clients of Fireworks write.
PREFIXED = "With Fireworks' prefix"
_TINKER = _FRONT.decode()
#: Their JSON bodies are those of SDKs up to 0.18. Later ones send protobuf, in the SDK's messages.
_LOSSES = (_TINKER + "forward_backward", _TINKER + "forward")
_HEALTH = ("/health", *TRAINER_HEALTH)
_SCHEMAS = schemas.REFERENCE
#: Of inference alone: the gate is closed for a swap, or replicas were lost with the request.
_OF_INFERENCE = (422, 425)
_WHERE = {
    "named": "on the deployment in the path",
    "meant": "on the deployment meant",
    "every": "on every deployment",
    "some": "on any deployment",
}


class ErrorDetail(msgspec.Struct):
    """message: for a person. param: the field at fault."""

    message: str
    type: str
    code: str
    param: str | None


class Error(msgspec.Struct):
    """serving, newest: of `snapshot_not_served`, which snapshot each replica serves."""

    error: ErrorDetail
    serving: list[dict[str, Any]] | UnsetType = UNSET
    newest: str | UnsetType | None = UNSET


class AnthropicError(msgspec.Struct):
    """As Anthropic's clients read errors."""

    type: Literal["error"]
    error: ErrorDetail


class TinkerError(msgspec.Struct):
    """As Tinker's clients read errors."""

    detail: str
    param: str | None


class StreamErrorDetail(ErrorDetail):
    """status_code: what the status would have been. A stream's own was sent before."""

    status_code: int


class StreamError(msgspec.Struct):
    """The last event of a stream that failed."""

    error: StreamErrorDetail


def _text_parameter(name: str, words: str, **schema: Any) -> Parameter:
    return Parameter(name, {"type": "string", **schema}, words)


_SESSION_WORDS = "The session. The first of these headers that is given counts, before fields of the body."
#: Which deployment is meant.
_MEANT = (
    _text_parameter(DEPLOYMENT_HEADER, "The deployment that is meant."),
    _text_parameter(MODEL_HEADER, "The deployment, by its model; `MODEL@SNAPSHOT` asks for a snapshot."),
)
#: Of every path of inference.
_PLACED = (
    *(_text_parameter(name, _SESSION_WORDS, maxLength=MAX_KEY_BYTES) for name in SESSION_HEADERS),
    _text_parameter(h.HEADER_FOLLOW_PREFIX, "A new session begins where its prompt is known.", enum=["1"]),
    _text_parameter(v.HEADER_SNAPSHOT, "Exactly this snapshot serves, from the first token to the last."),
    _text_parameter(v.HEADER_MIN_SNAPSHOT, "This snapshot or one that was signalled after it serves."),
    Parameter(
        v.HEADER_MAX_STALENESS,
        {"type": "integer", "minimum": 0, "maximum": v.STALENESS_MAX},
        "The snapshot that serves is at most so many behind the newest.",
    ),
    Parameter(
        v.HEADER_SNAPSHOT_WAIT,
        {"type": "number", "minimum": 0, "maximum": v.WAIT_S_MAX},
        "The seconds that the request may wait for such a snapshot.",
    ),
    _text_parameter("x-request-id", "It is in the answer and in every log; one is made up without it."),
)
#: Of paths that generate.
_GENERATING = (
    _text_parameter(
        HEADER_FAILOVER, "What becomes of a stream whose replica is lost.", enum=list(FAILOVER_MODES)
    ),
    _text_parameter(
        h.HEADER_HISTORY,
        "What follows when a template rewrites an earlier answer: its tokens stay, or are rendered anew.",
        enum=["exact", "template"],
    ),
    _text_parameter(
        h.HEADER_RECORDS,
        "What the session's trace keeps of each token.",
        enum=list(get_args(RecordsKept)),
    ),
    # Read by replicas (replica/gate.py and replica/service.py), which this package does not know.
    Parameter(
        "x-fireworks-hot-load-drain-timeout",
        {"type": "number", "minimum": 0},
        "The seconds that the request waits while a swap commits, before it gets a 425.",
    ),
    _text_parameter("x-prompt-cache-isolation-key", "Requests with another key share no prompt cache."),
)


def document(bodies: Bodies, answers: Answers) -> Json:
    """bodies, answers: by path, of the POSTs that other processes read and answer."""
    paths: dict[str, Json] = {}
    told = schemas.Schemas()
    for method, path, group, operation in operations():
        item = paths.setdefault(_plain(path), {})
        item[method.lower()] = _operation(method, path, group, operation, bodies)
        own = path if method == "POST" else ""
        success = _success(operation, answers.get(operation.answer_of or own), told)
        item[method.lower()]["responses"] = {str(operation.status): success, **_errors(method, path)}
        if servers := _servers(path):
            item["servers"] = servers
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "midstream",
            "version": __version__,
            "summary": "A rollout-serving gateway for RL post-training.",
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            *(
                {"name": one.name, "description": f"{one.words} More in `docs/{one.page}.md`."}
                for one in GROUPS
            ),
            {"name": PREFIXED, "description": "Each path is the one without `/inference`."},
        ],
        "paths": paths,
        "components": {
            "schemas": _schemas(bodies, told),
            "responses": _error_responses(),
            "parameters": {_component(one.name): _parameter(one, "header") for one in _shared_headers()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


_ABOUT = """\
An API key is needed where the server has keys, on every path without "for everybody". An operation names the scopes of which a
key needs one. A key with `operate` has them all.

The deployment meant is the one that the headers name, else the default one. Where a scope on any deployment is enough, the
answer is about the key's deployments alone.

An answer may get new fields: a client has to pass over those that it does not know. `x-event-schema`, beside
`text/event-stream`, is the schema of the data of one event.

The server answers HEAD as GET without its body. Harnesses that can set nothing but a base URL name the session in it: see the
servers of the paths of inference.
"""


def operations() -> Iterator[tuple[str, str, str, Operation]]:
    """(method, path as the app spells it, group, what it is) of each operation, the prefixed ones last."""
    for group in GROUPS:
        for (method, path), operation in group.operations.items():
            yield method, path, group.name, operation
    known = {key: operation for group in GROUPS for key, operation in group.operations.items()}
    for (method, path), operation in known.items():
        if (method, PREFIX + path) in GATEWAY_ROUTES and (method, PREFIX + path) not in known:
            yield method, PREFIX + path, PREFIXED, operation


def need_in_words(method: str, path: str) -> str:
    """The scopes that a key needs, and where. path: as the app spells it."""
    need = _need(method, path)
    if need is None:
        return "any key" if path.startswith(_TINKER) else "for everybody"
    scopes = "any scope" if need.scopes == SCOPES else " or ".join(f"`{scope}`" for scope in need.scopes)
    return f"{scopes} {_WHERE[need.on]}"


def _need(method: str, path: str) -> Need | None:
    if path in FILES or (method, path) in PUBLIC:
        return None
    return (TINKER_ROUTES if path.startswith(_TINKER) else GATEWAY_ROUTES)[method, path]


def _operation(method: str, path: str, group: str, operation: Operation, bodies: Bodies) -> Json:
    parameters = [
        *_path_parameters(path),
        *(_parameter(one, "query") for one in operation.query),
        *(
            {"$ref": f"#/components/parameters/{_component(one.name)}"}
            for one in _implied(method, path, operation)
        ),
        *(_parameter(one, "header") for one in operation.headers),
    ]
    made: Json = {
        "tags": [group],
        "operationId": _operation_id(method, path),
        "summary": operation.summary,
        "description": f"Scope: {need_in_words(method, path)}.",
        "security": _security(method, path),
    }
    if parameters:
        made["parameters"] = parameters
    body = _body(path, operation, bodies) if method == "POST" or operation.body else None
    if body is not None:
        made["requestBody"] = body
    return made


def _success(operation: Operation, answer: Answer | None, told: schemas.Schemas) -> Json:
    """OpenAPI 3.1 has no word for the events of a stream: they are in an extension."""
    content: Json = {kind: {} for kind in operation.kinds}
    whole = operation.answer if answer is None else answer.whole
    if whole is not Any:
        content["application/json"] = {"schema": told.of(whole)}
    if answer is not None and answer.event is not None and "text/event-stream" in operation.kinds:
        event = answer.event
        of = {"description": event} if isinstance(event, str) else told.of(event | StreamError)
        content["text/event-stream"] = {"x-event-schema": of}
    return {"description": "Done.", **({"content": content} if content else {})}


def _operation_id(method: str, path: str) -> str:
    words = re.findall(r"\w+", _plain(path))
    return "_".join((method.lower(), *words, *(("slash",) if path.endswith("/") else ())))


def _body(path: str, operation: Operation, bodies: Bodies) -> Json | None:
    struct = operation.body or bodies.get(path)
    if struct is None:
        return None
    # An empty body is an empty object to the control app, and to no other reader.
    optional = operation.body is not None and not any(
        field.required for field in msgspec.structs.fields(struct)
    )
    schema = {"$ref": _SCHEMAS.format(name=struct.__name__)}
    content: Json = {"application/json": {"schema": schema}}
    if path in _LOSSES:
        content["application/x-protobuf"] = {}
    return {"required": not optional, "content": content}


def _path_parameters(path: str) -> list[Json]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", **({"enum": list(FILES[path])} if path in FILES else {})},
        }
        for name in re.findall(r"{(\w+)", path)
    ]


def _implied(method: str, path: str, operation: Operation) -> tuple[Parameter, ...]:
    """The headers that are read because of what the path is."""
    if path in WIRES:
        generates = "text/event-stream" in operation.kinds
        return (*_MEANT, *_PLACED, *(_GENERATING if generates else ()))
    need = _need(method, path)
    return _MEANT if need is not None and need.on == "meant" and not path.startswith(_TINKER) else ()


def _shared_headers() -> tuple[Parameter, ...]:
    return (*_MEANT, *_PLACED, *_GENERATING)


def _component(name: str) -> str:
    return name.replace("-", "_")


def _parameter(one: Parameter, where: str) -> Json:
    return {"name": one.name, "in": where, "description": one.words, "schema": dict(one.schema)}


def _security(method: str, path: str) -> list[Json]:
    """Each alternative, with the scope as the role that a key must have."""
    need = _need(method, path)
    if need is None and not path.startswith(_TINKER):
        return []
    roles = [[scope] for scope in need.scopes] if need is not None else [[]]
    return [{scheme: role} for role in roles for scheme in ("bearer", "x_api_key")]


def _servers(path: str) -> list[Json]:
    """Where clients may ask for the path: here, and below the base URLs that name a session."""
    sample = re.sub(r"{[^}]*}", "x", path).encode()
    if path not in WIRES and not is_read_in_session(b"GET", sample):
        return []
    bases = [
        {"url": base, "variables": {name: {"default": name} for name in re.findall(r"{(\w+)}", base)}}
        for base in SESSION_BASES
    ]
    return [{"url": "/"}, *bases]


#: A rendered request has this part of a request as it was given. The request's schema is true of both.
_READ_AND_ANSWERED = {"StreamOptions"}


def _schemas(bodies: Bodies, told: schemas.Schemas) -> Json:
    """What the control app reads has no unknown field at any level; other readers say so by their structs."""
    control = {operation.body for _, _, _, operation in operations() if operation.body is not None}
    strict = _components(control)
    for schema in strict.values():
        schema["additionalProperties"] = False
    others = _components({*bodies.values(), Error, AnthropicError, TinkerError})
    twice = (strict.keys() & others.keys()) | (told.components.keys() & (strict | others).keys())
    assert twice <= _READ_AND_ANSWERED, f"two structs have one name: {twice}"
    return dict(sorted((told.components | strict | others).items()))


def _components(structs: Iterable[type[msgspec.Struct]]) -> Json:
    found = msgspec.json.schema_components(
        sorted(structs, key=lambda one: one.__name__), ref_template=_SCHEMAS
    )[1]
    return {name: _tidied(schema) for name, schema in found.items()}


def _tidied(schema: Any) -> Any:
    """Without defaults of null, which mean "not given"; with the end of a text as JSON Schema's patterns have it."""
    if isinstance(schema, list):
        return [_tidied(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: _tidied(value) for name, value in schema.items() if not (name == "default" and value is None)
    }
    if isinstance(kept.get("pattern"), str):
        kept["pattern"] = kept["pattern"].replace(r"\Z", "$")
    return kept


def errors_by_status() -> dict[int, list[type[MidstreamError]]]:
    found: dict[int, list[type[MidstreamError]]] = {}
    waiting = [MidstreamError]
    for one in waiting:
        waiting += one.__subclasses__()
        if one.__module__ == MidstreamError.__module__:
            found.setdefault(one.status, []).append(one)
    return dict(sorted(found.items()))


def _error_responses() -> Json:
    responses: Json = {}
    for shape in (Error, AnthropicError, TinkerError):
        schema = {"application/json": {"schema": {"$ref": _SCHEMAS.format(name=shape.__name__)}}}
        if shape is TinkerError:
            responses[shape.__name__] = {"description": "`detail` says why.", "content": schema}
            continue
        for status, errors in errors_by_status().items():
            response = {"description": _causes(errors), "content": schema}
            if any(one.retry_after_s is not None for one in errors):
                seconds = {"description": "Seconds until a retry.", "schema": {"type": "integer"}}
                response["headers"] = {"Retry-After": seconds}
            responses[f"{shape.__name__}{status}"] = response
    return responses


def _causes(errors: Iterable[type[MidstreamError]]) -> str:
    """The codes, each with whether a retry may cure it."""
    told = {
        f"`{one.code}`" + ("" if one.retry_after_s is None else f", retry after {one.retry_after_s} s"): None
        for one in errors
    }
    return "; ".join(told) + "."


def _errors(method: str, path: str) -> Json:
    if path.startswith(_TINKER):
        one = {"$ref": "#/components/responses/TinkerError"}
        return {"4XX": one, "5XX": one}
    if path in _HEALTH:
        return {"503": {"description": "No replica can be used."}}
    if _need(method, path) is None:
        return {}
    wire = WIRES.get(path)
    shape = AnthropicError if wire is not None and wire.errors == "anthropic" else Error
    statuses = [one for one in errors_by_status() if wire is not None or one not in _OF_INFERENCE]
    return {str(one): {"$ref": f"#/components/responses/{shape.__name__}{one}"} for one in statuses}


def _plain(path: str) -> str:
    """As OpenAPI writes it."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)
