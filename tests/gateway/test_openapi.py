"""The OpenAPI document: it is one, it has what the port answers and nothing else, and its schemas are the decoders'."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openapi_answers import SHOWN, is_of_front, misfit, resolved, the_document
from test_access import world
from test_scopes import routes_of, whole_front, whole_gateway

import midstream
import midstream_tinker
from midstream.api import addons, openapi, policies, resource, trainer_calls
from midstream.api.openapi import errors_by_status, need_in_words
from midstream.api.signals import parse_signal
from midstream.core.endpoints import bound
from midstream.core.errors import (
    ContextExceeded,
    InvalidRequest,
    MidstreamError,
    UnknownField,
    UnknownTools,
)
from midstream.core.pages import DOCS_FILES
from midstream.core.traces import RewardGiven
from midstream.core.wires import (
    HOT_LOAD_PATH,
    NO_ROLLOUTS,
    SESSION_BASES,
    TRAINER_REFUSED,
    WIRES,
    split_session,
    wire_of,
)
from midstream.fleet.membership import ReplicaBody
from midstream.http.bodies import fields_of
from midstream.launch.reference import request_bodies
from midstream.proxy.service import _OPEN
from midstream.replica import gate, service
from midstream.replica.request import schema
from midstream.replica.stored import Shelf, StoredResponses
from midstream.replica.turns.history import policy_of
from midstream.replica.wire import messages, responses, sglang, textcalls, vllm
from midstream.replica.wire.bodies import BODIES
from midstream.replica.wire.table import GENERATING
from midstream_tinker.app import SUBMISSIONS, _Front
from midstream_tinker.json_losses import LossesBody
from midstream_tinker.runs import Runs
from midstream_tinker.types import RetrieveBody

SOURCE, BUILDING = Path(midstream.__file__).parent, Path(midstream_tinker.__file__).parent
BODIES_OF = request_bodies()
DOCUMENT = the_document()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
#: What a path item may hold beside operations.
METHODS = ("get", "post", "patch", "delete")


def operations_of(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in item.items() if name in METHODS}


OPERATIONS = [
    (path, method, one)
    for path, item in DOCUMENT["paths"].items()
    for method, one in operations_of(item).items()
]


def within(value: Any) -> Iterator[Any]:
    """Every object in a JSON value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from within(inner)


# -- the document as such


def test_it_has_the_parts_of_an_openapi_document() -> None:
    assert DOCUMENT.keys() == {"openapi", "info", "servers", "tags", "paths", "components"}
    assert DOCUMENT["openapi"] == "3.1.0"
    assert (DOCUMENT["info"]["title"], DOCUMENT["info"]["version"]) == ("midstream", midstream.__version__)
    for kind, components in DOCUMENT["components"].items():
        assert kind in ("schemas", "responses", "parameters", "securitySchemes")
        assert [name for name in components if not re.fullmatch(r"[A-Za-z0-9._-]+", name)] == []
    tags = [tag["name"] for tag in DOCUMENT["tags"]]
    assert len(tags) == len(set(tags))
    assert {tag for _, _, one in OPERATIONS for tag in one["tags"]} == set(tags)


def test_every_reference_leads_to_something_and_every_component_is_used() -> None:
    used = {one["$ref"] for one in within(DOCUMENT) if isinstance(one.get("$ref"), str)}
    for reference in used:
        assert resolved(reference)
    made = {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "responses", "parameters")
        for name in DOCUMENT["components"][kind]
    }
    assert made - used == set()


def test_every_operation_is_whole() -> None:
    ids = [one["operationId"] for _, _, one in OPERATIONS]
    assert len(ids) == len(set(ids))
    for path, method, one in OPERATIONS:
        assert path.startswith("/"), path
        assert one["responses"], path
        assert all(re.fullmatch(r"[2-5](\d\d|XX)", status) for status in one["responses"]), path
        assert all(
            response.get("description") or "$ref" in response for response in one["responses"].values()
        )
        parameters = [resolved(p["$ref"]) if "$ref" in p else p for p in one.get("parameters", ())]
        assert len({(p["in"], p["name"].lower()) for p in parameters}) == len(parameters), path
        in_path = [p["name"] for p in parameters if p["in"] == "path"]
        assert in_path == re.findall(r"{(\w+)}", path)
        assert all(p["required"] for p in parameters if p["in"] == "path")
        assert method in ("post", "patch") or "requestBody" not in one, path


def test_every_operation_has_one_sentence() -> None:
    for path, method, one in OPERATIONS:
        summary = one["summary"]
        assert re.fullmatch(r"[A-Z][^\n]*\.", summary), (method, path)
        assert ". " not in summary, (method, path)
        assert len(summary.split()) <= 25, (method, path)


# -- what the port answers


def test_it_has_every_route_of_gateway_and_front_and_no_other_one() -> None:
    assert {(one.method, one.path) for one in SHOWN} == routes_of(whole_gateway()) | routes_of(whole_front())
    shown = {(method.upper(), path) for path, method, _ in OPERATIONS}
    assert shown == {(one.method, re.sub(r":path}", "}", one.path)) for one in SHOWN}
    assert len(shown) == len(SHOWN), "a path is in two groups"
    assert {path for path, item in DOCUMENT["paths"].items() if "post" in item} >= WIRES.keys()


def test_the_roles_of_an_operation_are_the_scopes_of_its_endpoint() -> None:
    by_id = {one["operationId"]: one for _, _, one in OPERATIONS}
    for shown in SHOWN:
        one, need = by_id[openapi.operation_id(shown)], shown.endpoint.need
        asked = {role for choice in one["security"] for roles in choice.values() for role in roles}
        assert asked == set(need.scopes if need else ()), shown.path
        # The data path asks for a key, if for no scope.
        open_to_all = need is None and shown.path != "/api/v1/healthz"
        assert (one["security"] == []) == open_to_all
        assert open_to_all == (need_in_words(shown.endpoint) == "for everybody")


def test_what_needs_no_scope_is_what_the_data_path_lets_through_without_a_key() -> None:
    open_to_all = {
        one.path.replace("{file}", file)
        for one in SHOWN
        if one.endpoint.need is None and not is_of_front(one)
        for file in one.endpoint.files or ("",)
    }
    assert open_to_all == {path.decode() for path in _OPEN}


def test_a_base_url_that_names_a_session_is_a_server_of_the_paths_below_it() -> None:
    for path, item in DOCUMENT["paths"].items():
        below = {server["url"] for server in item.get("servers", ())} - {"/"}
        is_inference = path in WIRES or re.match(r"(/inference)?/v1/(models|responses)(/|$)", path)
        assert below == (set(SESSION_BASES) if is_inference else set()), path
    for base in SESSION_BASES:
        filled = re.sub(r"{\w+}", "r", base)
        session, rest = split_session(f"{filled}/v1/chat/completions".encode())
        assert session in (b"r", b"r/r")
        assert wire_of(rest) is not None


def queries_of_code() -> set[str]:
    """The names of query parameters that are read."""
    reads = {"whole_number", "_flag", "_said", "_count"}
    found = set()
    files = [
        *(SOURCE / "api").glob("*.py"),
        SOURCE / "fleet" / "membership.py",
        SOURCE / "http" / "bodies.py",
        BUILDING / "runs.py",
    ]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            of_query = ast.unparse(node.func).startswith("request.query_params.get")
            helper = isinstance(node.func, ast.Name) and node.func.id in reads
            if of_query or helper:
                name = node.args[1 if helper else 0]
                # A name that is no text is a helper's own parameter, or one of those below.
                found |= {name.value} if isinstance(name, ast.Constant) else set()
    return found | {addons.REPLACE, "filter", "orderBy"}


def test_the_query_parameters_are_those_that_the_code_reads() -> None:
    told = {
        p["name"] for _, _, one in OPERATIONS for p in one.get("parameters", ()) if p.get("in") == "query"
    }
    assert told == queries_of_code()


def test_the_headers_that_replicas_read_are_called_as_they_call_them() -> None:
    told = {one["name"]: one["schema"] for one in DOCUMENT["components"]["parameters"].values()}
    assert {gate.HEADER_DRAIN_TIMEOUT, service.HEADER_ISOLATION} <= told.keys()
    for value in told[openapi.h.HEADER_HISTORY]["enum"]:
        assert policy_of(value) == value
    internal = {openapi.h.HEADER_SESSION, openapi.h.HEADER_TENANT, openapi.h.HEADER_SCOPES}
    assert not told.keys() & internal


# -- errors


def test_every_error_has_the_documented_shape_and_its_status_is_told() -> None:
    told = DOCUMENT["components"]["responses"]
    own = {
        UnknownField: UnknownField("f"),
        UnknownTools: UnknownTools([0], "custom"),
        ContextExceeded: ContextExceeded("m", 2, 1, param="p"),
    }
    for status, errors in errors_by_status().items():
        for kind in errors:
            error = own[kind] if kind in own else kind("m", param="p") if takes_param(kind) else kind("m")
            assert f"`{error.code}`" in told[f"Error{status}"]["description"]
            assert ("Retry-After" in told[f"Error{status}"].get("headers", ())) or error.retry_after_s is None
            assert misfit(error.body(), SCHEMAS["Error"]) is None
            error.shape = "anthropic"
            assert misfit(error.body(), SCHEMAS["AnthropicError"]) is None
    assert misfit({"error": {"message": "m"}}, SCHEMAS["Error"]) is not None


def takes_param(kind: type[MidstreamError]) -> bool:
    return kind.__init__ is MidstreamError.__init__


def test_a_path_of_inference_may_answer_with_every_status() -> None:
    for path, wire in WIRES.items():
        answers = DOCUMENT["paths"][path]["post"]["responses"]
        assert {int(status) for status in answers} - {200} == errors_by_status().keys()
        shape = "AnthropicError" if wire.errors == "anthropic" else "Error"
        assert answers["425"]["$ref"].endswith(f"/{shape}425")


def test_what_always_refuses_has_no_success() -> None:
    refusing = {path for path, _, one in OPERATIONS if min(one["responses"]) >= "400"}
    assert refusing == {*TRAINER_REFUSED, "/v1/accounts/{account}/deployments/{name}:undelete"}


# -- bodies


def body_schema(path: str, method: str = "post") -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][path][method]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    return found


def structs() -> dict[str, type[msgspec.Struct]]:
    """By the name of its schema, each body."""
    given = [*BODIES_OF.values(), *(one.endpoint.body for one in SHOWN if one.endpoint.body is not None)]
    return {one.__name__: one for one in given}


@pytest.mark.parametrize("name", sorted(structs()))
def test_every_field_of_a_body_is_there(name: str) -> None:
    fields = msgspec.structs.fields(structs()[name])
    assert SCHEMAS[name]["properties"].keys() == {field.encode_name for field in fields}
    assert set(SCHEMAS[name].get("required", ())) == {field.encode_name for field in fields if field.required}


def test_every_wire_reads_what_is_told() -> None:
    decoders = {
        "completions": schema._completion,
        "chat_completions": schema._chat,
        "messages": messages._messages,
        "count_tokens": messages._count,
        "responses": responses._responses,
        "vllm_generate": vllm._body,
        "sglang_generate": sglang._body,
        "tokenize": textcalls._tokenize,
        "detokenize": textcalls._detokenize,
        "render_completions": schema._completion,
        "render_chat": schema._chat,
    }
    assert {name: decoder.type for name, decoder in decoders.items()} == BODIES
    assert {wire.name for wire in WIRES.values()} == BODIES.keys()


def test_every_body_that_the_tinker_front_decodes_is_told() -> None:
    """A handler whose refusals come in their turn decodes its body itself, by the record; so does a poll."""
    handled = [one for api in (_Front, Runs) for one in bound(api) if one.reads is None]
    told = {one.endpoint.body for one in handled} - {None, LossesBody}
    assert told == {one.body for one in SUBMISSIONS} | {RetrieveBody}


def test_every_json_answer_of_the_tinker_front_has_a_type() -> None:
    front = [one.endpoint for one in SHOWN if is_of_front(one)]
    assert len(front) >= 30
    assert [one.path for one in front if "application/json" in one.kinds and one.answer is Any] == []


CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "temperature": 0.5,
    "logit_bias": {"5": 1.5},
    "stop": ["a"],
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "midstream": {"min_snapshot": "s"},
}
RENDERED = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}, "model": "m", "output_mode": "text"}
TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("chat_completions", CHAT),
    ("completions", {"model": "m", "prompt": [[1, 2], [3]], "n": 2, "logprobs": 3, "seed": -5}),
    (
        "messages",
        {"model": "m", "max_tokens": 4, "messages": CHAT["messages"], "metadata": {"user_id": "u"}},
    ),
    ("responses", {"input": "hi", "model": "m", "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}}),
    ("vllm_generate", RENDERED),
    ("sglang_generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}, "rid": "r"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body"), TAKEN)
def test_a_body_that_a_wire_takes_fits_and_one_that_it_refuses_does_not(
    name: str, body: dict[str, Any]
) -> None:
    shelf = Shelf(StoredResponses("replica-0"), "t", False)
    wire, path = GENERATING[name], next(path for path, one in WIRES.items() if one.name == name)
    wire.read(json.dumps(body).encode(), shelf)
    assert misfit(body, body_schema(path)) is None
    spoilt = [
        body | {"no_such_field": 1},
        body | {"model": 5},
        *(
            {k: v for k, v in body.items() if k != gone}
            for gone in SCHEMAS[BODIES[name].__name__].get("required", ())
        ),
    ]
    for bad in spoilt:
        with pytest.raises(InvalidRequest):
            wire.read(json.dumps(bad).encode(), shelf)
        assert misfit(bad, body_schema(path)) is not None, bad


CONTROL: list[tuple[type[msgspec.Struct], dict[str, Any]]] = [
    (policies.PolicyBody, {"policy": "a", "from": "b", "frozen": True}),
    (addons.DeployedModelBody, {"model": "a", "default": True}),
    (trainer_calls.UpdateFromDisk, {"model_path": "/b/s1", "flush_cache": False}),
    (trainer_calls.AbortRequests, {"request_ids": ["a"]}),
    (RewardGiven, {"reward": 0.5, "turn": 1, "metadata": {"a": [1]}}),
    (ReplicaBody, {"url": "http://h:1", "weight": 0.5}),
]


@pytest.mark.parametrize(("kind", "body"), CONTROL)
def test_a_body_that_the_control_app_takes_fits(kind: type[msgspec.Struct], body: dict[str, Any]) -> None:
    fields_of(body, kind)
    assert misfit(body, SCHEMAS[kind.__name__]) is None
    with pytest.raises((UnknownField, InvalidRequest)):
        fields_of(body | {"no_such_field": 1}, kind)
    assert misfit(body | {"no_such_field": 1}, SCHEMAS[kind.__name__]) is not None


def test_a_signal_and_a_deployment_fit() -> None:
    signal = {
        "identity": "s2",
        "reset_prompt_cache": {"max_age": 3},
        "validation": {"extra_fields_ignore": ["a"]},
    }
    parse_signal(json.dumps(signal).encode())
    assert misfit(signal, body_schema(HOT_LOAD_PATH)) is None
    for inner in ({"reset_prompt_cache": {"max_age": 3, "other": 1}}, {"validation": {"other": 1}}):
        with pytest.raises(UnknownField):
            parse_signal(json.dumps(signal | inner).encode())
        assert misfit(signal | inner, body_schema(HOT_LOAD_PATH)) is not None
    deployment = {
        "baseModel": "m",
        "minReplicaCount": 2,
        "annotations": {"a": "b"},
        "name": "n",
        "region": None,
    }
    resource.parse_body(json.dumps(deployment).encode())
    path = "/v1/accounts/{account}/deployments"
    assert misfit(deployment, body_schema(path)) is None
    for bad in ({"minReplicaCount": -1}, {"other": 1}, {"annotations": {"a": 1}}):
        with pytest.raises(InvalidRequest):
            resource.parse_body(json.dumps(deployment | bad).encode())
        assert misfit(deployment | bad, body_schema(path)) is not None
    assert (
        misfit({"replicaCount": 3}, body_schema("/v1/accounts/{account}/deployments/{name}:scale", "patch"))
        is None
    )


# -- how it is served


async def test_everybody_gets_the_document_and_the_page_and_neither_is_a_rollout() -> None:
    async with world() as here:
        answer = await here.ask(None, "GET", "/openapi.json")
        assert answer.headers["content-type"] == "application/json"
        assert json.loads(answer.body) == DOCUMENT
        again = await here.ask(
            None, "GET", "/openapi.json", headers=f"if-none-match: {answer.headers['etag']}\r\n"
        )
        assert (again.status, again.body) == (304, b"")
        page = await here.ask(None, "GET", "/docs")
        assert page.headers["content-type"].startswith("text/html")
        asked = re.findall(r'(?:src|href)="([^"]+)"', page.body.decode())
        assert {one.removeprefix("docs/") for one in asked} == {*DOCS_FILES, "data:,", "openapi.json"}
        assert (await here.ask("full", "GET", "/docs/swagger-ui.LICENSE")).status == 404
        assert (await here.ask(None, "POST", "/openapi.json", {})).status == 401
        counted = here.stage.gateway.proxy.metrics.requests
        assert sum(counted.values()) > 0
        assert {path for path, _ in counted} <= NO_ROLLOUTS


def test_a_start_makes_no_document_and_making_it_takes_no_tokenizer() -> None:
    program = """
import sys
import midstream.launch.gateway
from midstream.launch.reference import document
before = sys.modules.keys() & {"midstream.api.openapi", "midstream.replica", "midstream_tinker"}
document()
heavy = sys.modules.keys() & {"torch", "tokenizers", "transformers", "jinja2", "llguidance", "safetensors"}
print(sorted(before), sorted(heavy), "midstream.api.openapi" in sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[0] == "[] [] True"
