"""The HTTP API as an OpenAPI 3.1 document, made of the code. Pure.

It shows the endpoints of endpoints.py. Bodies are the structs that the server decodes into, answers those that it encodes,
errors those of core/errors.py.
Always holds:
- The document is the same on every server of a version. It has each path of the port, and no other one.
- A body that the server takes fits its schema. Rules between fields are in the documents alone.
- A successful answer fits its schema, which lets an answer have more fields.
- A base URL that names a session is a server of the paths that may be asked below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, get_args

import msgspec
from msgspec import UNSET, UnsetType

from midstream import __version__
from midstream.api import schemas
from midstream.api.answers import Health
from midstream.api.endpoints import PREFIXED, Operation, groups, operations
from midstream.core import headers as h
from midstream.core import versions as v
from midstream.core.endpoints import Endpoint, Parameter
from midstream.core.endpoints import text as _text
from midstream.core.errors import MidstreamError
from midstream.core.resumption import FAILOVER_MODES, HEADER_FAILOVER
from midstream.core.scopes import SCOPES
from midstream.core.session_keys import MAX_KEY_BYTES, SESSION_HEADERS
from midstream.core.traces import RecordsKept
from midstream.core.wires import SESSION_BASES, WIRES, is_read_in_session

Json = dict[str, Any]
Bodies = Mapping[str, type[msgspec.Struct]]


class AnswerTypes(Protocol):
    """whole: the type of an answer that is no stream. event: the type of the data of one event of a stream, or what it is in
    words; None: it has no stream."""

    @property
    def whole(self) -> Any: ...

    @property
    def event(self) -> Any: ...


Answers = Mapping[str, AnswerTypes]

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
    """serving, newest: of `snapshot_not_served`, which snapshot each replica serves. target_version, applied, type, message:
    the same for a version that is a number."""

    error: ErrorDetail
    serving: list[dict[str, Any]] | UnsetType = UNSET
    newest: str | UnsetType | None = UNSET
    target_version: int | UnsetType = UNSET
    applied: int | UnsetType | None = UNSET
    type: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class AnthropicError(msgspec.Struct):
    """An error as Anthropic's clients read it."""

    type: Literal["error"]
    error: ErrorDetail


class TinkerError(msgspec.Struct):
    """An error as Tinker's clients read it."""

    detail: str
    param: str | None


class StreamErrorDetail(ErrorDetail):
    """status_code: what the status would have been. A stream's own was sent before."""

    status_code: int


class StreamError(msgspec.Struct):
    """The last event of a stream that failed."""

    error: StreamErrorDetail


_SESSION_WORDS = "The session. The first of these headers that is given counts, before fields of the body."
#: Which deployment is meant.
_MEANT = (
    _text(h.HEADER_DEPLOYMENT, "The deployment that is meant."),
    _text(h.HEADER_MODEL, "The deployment, by its model; `MODEL@SNAPSHOT` asks for a snapshot."),
)
#: Of every path of inference.
_PLACED = (
    *(_text(name, _SESSION_WORDS, maxLength=MAX_KEY_BYTES) for name in SESSION_HEADERS),
    _text(h.HEADER_FOLLOW_PREFIX, "A new session begins where its prompt is known.", enum=["1"]),
    Parameter(
        h.HEADER_EXPECTED_TOKENS,
        {"type": "integer", "minimum": 1, "maximum": h.EXPECTED_TOKENS_MAX},
        "The tokens that the session is expected to come to, by which a new one waits for room in the KV cache.",
    ),
    _text(v.HEADER_SNAPSHOT, "Exactly this snapshot serves, from the first token to the last."),
    _text(v.HEADER_MIN_SNAPSHOT, "This snapshot or one that was signalled after it serves."),
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
    _text("x-request-id", "It is in the answer and in every log; one is made up without it."),
)
#: Of paths that generate.
_GENERATING = (
    _text(HEADER_FAILOVER, "What becomes of a stream if its replica is lost.", enum=list(FAILOVER_MODES)),
    _text(
        h.HEADER_HISTORY,
        "What follows when a template rewrites an earlier answer: its tokens stay, or it is rendered again.",
        enum=["exact", "template"],
    ),
    _text(
        h.HEADER_RECORDS,
        "What the session's trace keeps of each token.",
        enum=list(get_args(RecordsKept)),
    ),
    # Read by replicas (replica/gate.py, service.py and shared_store.py), which this package does not know.
    Parameter(
        "x-fireworks-hot-load-drain-timeout",
        {"type": "number", "minimum": 0},
        "The seconds that the request waits while a swap commits, before it gets a 425.",
    ),
    _text("x-fireworks-r3-store-id", "The store for columns in files: the URL of the bucket of records."),
    Parameter(
        "x-fireworks-r3-ttl-seconds",
        {"type": "integer", "minimum": 1, "default": 21600},
        "The seconds that such files have to stay, at least.",
    ),
    _text("x-prompt-cache-isolation-key", "Requests with another key share no prompt cache."),
)


def document(bodies: Bodies, answers: Answers, front: tuple[Endpoint, ...]) -> Json:
    """bodies, answers: by path, of the POSTs that other processes read and answer. front: the endpoints of the Tinker front."""
    paths: dict[str, Json] = {}
    made_schemas = schemas.Schemas()
    shown = tuple(operations(front))
    for one in shown:
        item = paths.setdefault(_plain(one.path), {})
        made = item[one.method.lower()] = _operation(one, bodies)
        own = one.path if one.method == "POST" else ""
        success = _success(one.endpoint, answers.get(one.endpoint.answer_of or own), made_schemas)
        made["responses"] = {str(one.endpoint.status): success, **_errors(one)}
        if servers := _servers(one.path):
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
                for one in groups(front)
            ),
            {"name": PREFIXED, "description": "Each path is the one without `/inference`."},
        ],
        "paths": paths,
        "components": {
            "schemas": _schemas(bodies, shown, made_schemas),
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


def need_in_words(endpoint: Endpoint) -> str:
    """The scopes that a key needs, and where."""
    need = endpoint.need
    if need is None:
        # The data path wants a key before the front is asked.
        return "any key" if endpoint.errors == "tinker" else "for everybody"
    scopes = "any scope" if need.scopes == SCOPES else " or ".join(f"`{scope}`" for scope in need.scopes)
    return f"{scopes} {_WHERE[need.on]}"


def _operation(one: Operation, bodies: Bodies) -> Json:
    endpoint = one.endpoint
    parameters = [
        *_path_parameters(one),
        *(_parameter(of, "query") for of in endpoint.query),
        *({"$ref": f"#/components/parameters/{_component(of.name)}"} for of in _implied(one)),
        *(_parameter(of, "header") for of in endpoint.headers),
    ]
    made: Json = {
        "tags": [one.group],
        "operationId": operation_id(one),
        "summary": endpoint.summary,
        "description": f"Scope: {need_in_words(endpoint)}.",
        "security": _security(endpoint),
    }
    if parameters:
        made["parameters"] = parameters
    body = _body(one, bodies) if one.method == "POST" or endpoint.body else None
    if body is not None:
        made["requestBody"] = body
    return made


def _success(endpoint: Endpoint, answer: AnswerTypes | None, made_schemas: schemas.Schemas) -> Json:
    """OpenAPI 3.1 has no word for the events of a stream: they are in an extension."""
    content: Json = {kind: {} for kind in endpoint.kinds}
    whole = endpoint.answer if answer is None else answer.whole
    if whole is not Any:
        content["application/json"] = {"schema": made_schemas.of(whole)}
    if answer is not None and answer.event is not None and "text/event-stream" in endpoint.kinds:
        event = answer.event
        of = {"description": event} if isinstance(event, str) else made_schemas.of(event | StreamError)
        content["text/event-stream"] = {"x-event-schema": of}
    return {"description": "Done.", **({"content": content} if content else {})}


def operation_id(one: Operation) -> str:
    words = re.findall(r"\w+", _plain(one.path))
    return "_".join((one.method.lower(), *words, *(("slash",) if one.path.endswith("/") else ())))


def _body(one: Operation, bodies: Bodies) -> Json | None:
    struct = one.endpoint.body or bodies.get(one.path)
    if struct is None:
        return None
    # An empty body is an empty object to the control app, and to no other reader.
    optional = _is_control(one) and not any(field.required for field in msgspec.structs.fields(struct))
    schema = {"$ref": _SCHEMAS.format(name=struct.__name__)}
    content: Json = {"application/json": {"schema": schema}}
    for kind in one.endpoint.also_read:
        content[kind] = {}
    return {"required": not optional, "content": content}


def _is_control(one: Operation) -> bool:
    """True if the control app reads the body."""
    return one.endpoint.body is not None and one.endpoint.errors != "tinker"


def _path_parameters(one: Operation) -> list[Json]:
    files = {"enum": list(one.endpoint.files)} if one.endpoint.files else {}
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", **files}}
        for name in re.findall(r"{(\w+)", one.path)
    ]


def _implied(one: Operation) -> tuple[Parameter, ...]:
    """The headers that are read because of what the endpoint is."""
    endpoint = one.endpoint
    if one.path in WIRES:
        generates = "text/event-stream" in endpoint.kinds
        return (*_MEANT, *_PLACED, *(_GENERATING if generates else ()))
    need = endpoint.need
    return _MEANT if need is not None and need.on == "meant" and endpoint.errors != "tinker" else ()


def _shared_headers() -> tuple[Parameter, ...]:
    return (*_MEANT, *_PLACED, *_GENERATING)


def _component(name: str) -> str:
    return name.replace("-", "_")


def _parameter(one: Parameter, where: str) -> Json:
    return {"name": one.name, "in": where, "description": one.words, "schema": dict(one.schema)}


def _security(endpoint: Endpoint) -> list[Json]:
    """Each alternative, with the scope as the role that a key must have."""
    need = endpoint.need
    if need is None and endpoint.errors != "tinker":
        return []
    roles = [[scope] for scope in need.scopes] if need is not None else [[]]
    return [{scheme: role} for role in roles for scheme in ("bearer", "x_api_key")]


def _servers(path: str) -> list[Json]:
    """The base URLs at which clients may ask for the path: the root, and those that name a session."""
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


def _schemas(bodies: Bodies, shown: Iterable[Operation], made_schemas: schemas.Schemas) -> Json:
    """What the control app reads has no unknown field at any level; other readers say so by their structs."""
    read = [(one, one.endpoint.body) for one in shown if one.endpoint.body is not None]
    strict = _components({body for one, body in read if _is_control(one)})
    for schema in strict.values():
        schema["additionalProperties"] = False
    of_others = {body for one, body in read if not _is_control(one)}
    others = _components({*bodies.values(), *of_others, Error, AnthropicError, TinkerError})
    twice = (strict.keys() & others.keys()) | (made_schemas.components.keys() & (strict | others).keys())
    assert twice <= _READ_AND_ANSWERED, f"two structs have one name: {twice}"
    return dict(sorted((made_schemas.components | strict | others).items()))


def _components(structs: Iterable[type[msgspec.Struct]]) -> Json:
    found = msgspec.json.schema_components(
        sorted(structs, key=lambda one: one.__name__), ref_template=_SCHEMAS
    )[1]
    return {name: _tidied(schema) for name, schema in found.items()}


def _tidied(schema: Any) -> Any:
    """The schema without defaults of null, which mean "not given", and with the end of a text as JSON Schema's patterns write
    it."""
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
    codes = {
        f"`{one.code}`" + ("" if one.retry_after_s is None else f", retry after {one.retry_after_s} s"): None
        for one in errors
    }
    return "; ".join(codes) + "."


def _errors(one: Operation) -> Json:
    endpoint = one.endpoint
    if endpoint.errors == "tinker":
        of = {"$ref": "#/components/responses/TinkerError"}
        return {"4XX": of, "5XX": of}
    if endpoint.answer is Health:
        return {"503": {"description": "No replica can be used."}}
    if endpoint.need is None:
        return {}
    shape = AnthropicError if endpoint.errors == "anthropic" else Error
    statuses = [of for of in errors_by_status() if one.path in WIRES or of not in _OF_INFERENCE]
    return {str(of): {"$ref": f"#/components/responses/{shape.__name__}{of}"} for of in statuses}


def _plain(path: str) -> str:
    """The path as OpenAPI writes it."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)
