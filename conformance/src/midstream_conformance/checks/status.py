"""Status codes: how requests that cannot be served are refused."""

from __future__ import annotations

from typing import Any

import httpx

from midstream.core.wires import HOT_LOAD_PATH
from midstream_conformance.answers import Json
from midstream_conformance.endpoint import NO_KEY, error_of, refusal
from midstream_conformance.outcome import expect
from midstream_conformance.rows import OWN, PROTOCOL, Evidence, row
from midstream_conformance.session import Session

FIELDS = f"{PROTOCOL}: Inference request fields beyond OpenAI's"
NAMES = f"{PROTOCOL}: Paths and names"
OK: Json = {"prompt": [20, 21, 22], "max_tokens": 1}


@row("status.model", "An unknown model is a 404", NAMES)
async def model(session: Session) -> Evidence:
    response = await session.endpoint.post("/completions", {**OK, "model": "accounts/nobody/models/none"})
    return _refused(response, 404)


@row("status.deployment", "An unknown deployment in fireworks-deployment is a 404", NAMES)
async def deployment(session: Session) -> Evidence:
    headers = {"fireworks-deployment": "accounts/nobody/deployments/none"}
    return _refused(await session.endpoint.post("/completions", OK, headers), 404)


@row("status.names", "model may be a bare name, or the model with the snapshot that serves", NAMES)
async def names(session: Session) -> Evidence:
    full = (await session.endpoint.complete([20, 21], max_tokens=1)).model
    asked = [full.partition("@")[0].rpartition("/")[2], full]
    for name in asked:
        response = await session.endpoint.post("/completions", {**OK, "model": name})
        expect(response.status_code == 200, f"model {name!r}: {refusal(response)}")
    return {"models": asked}


@row(
    "status.unknown_field", "An unknown body field is a 400 that names it, in the words clients match", FIELDS
)
async def unknown_field(session: Session) -> Evidence:
    response = await session.endpoint.post("/completions", {**OK, "no_such_field": 1})
    evidence = _refused(response, 400)
    wanted = {
        "code": "invalid_request_error",
        "message": "Extra inputs are not permitted, field: 'no_such_field'",
    }
    found = {name: error_of(response).get(name) for name in wanted}
    expect(found == wanted, f"{wanted} was expected", got=found)
    return evidence


@row("status.param", "A field with an impossible value is a 400 that names it", FIELDS)
async def param(session: Session) -> Evidence:
    cases: dict[str, Any] = {
        "max_tokens": -1,
        "temperature": 99,
        "top_p": "high",
        "n": 0,
        "prompt": [10**9],
        "stop": [1],
    }
    for name, value in cases.items():
        response = await session.endpoint.post("/completions", {**OK, name: value})
        _refused(response, 400)
        error = error_of(response)
        named = error.get("param") == name or name in str(error.get("message"))
        expect(named, f"{name}={value!r}: the error names another field", error=error)
    return {"fields": sorted(cases)}


@row("status.context", "context_length_exceeded_behavior error makes too many tokens a 400", FIELDS)
async def context(session: Session) -> Evidence:
    fields: dict[str, Any] = {**OK, "max_tokens": 10**7, "context_length_exceeded_behavior": "error"}
    return _refused(await session.endpoint.post("/completions", fields), 400)


@row("status.json", "A body that is not JSON is a 400", FIELDS)
async def not_json(session: Session) -> Evidence:
    path = f"{session.endpoint.prefix}/completions"
    return _refused(await session.endpoint.request("POST", path, b'{"model": '), 400)


@row(
    "status.stream",
    "A streamed request that cannot be served is refused by its status, not inside a stream",
    FIELDS,
)
async def stream(session: Session) -> Evidence:
    return _refused(
        await session.endpoint.post("/completions", {**OK, "stream": True, "max_tokens": -1}), 400
    )


@row(
    "status.key",
    "A wrong API key, or none, is a 401 on every path, as a Bearer token and in X-Api-Key; the right one is served in either",
    f"{PROTOCOL}: Paths and names, Auth",
    ("keys",),
)
async def key(session: Session) -> Evidence:
    endpoint, target = session.endpoint, session.target
    completions = f"{endpoint.prefix}/completions"
    body = {"model": endpoint.model, **OK}
    asked: list[tuple[str, str, Json | None]] = [
        ("POST", completions, body),
        ("GET", HOT_LOAD_PATH, None),
        # No server takes that, whatever the key.
        ("POST", HOT_LOAD_PATH, {"identity": ""}),
    ]
    if target.transition is not None:
        path = f"/v1/{target.deployment}?updateMask=hot_load_transition_type"
        asked.append(("PATCH", path, {"hotLoadTransitionType": target.transition}))
    if target.midstream and target.deployment is not None:
        asked.append(("GET", f"/v1/{target.deployment}/ledger", None))
    for method, path, sent in asked:
        for name, wrong in (("a wrong key", "no-such-key"), ("no key", NO_KEY)):
            response = await endpoint.request(method, path, sent, key=wrong)
            _refused(response, 401, f"{method} {path} with {name}: ")
    response = await endpoint.request("POST", completions, body, key="no-such-key", x_api_key=True)
    evidence = _refused(response, 401, "a wrong key in X-Api-Key: ")
    response = await endpoint.request("POST", completions, body, x_api_key=True)
    expect(response.status_code == 200, f"the right key in X-Api-Key: {refusal(response)}")
    return {**evidence, "paths": len(asked)}


@row(
    "status.version",
    "A snapshot that no replica serves is a 409 that says what is served",
    f"{OWN}: Which snapshot serves a request",
    ("midstream",),
)
async def version(session: Session) -> Evidence:
    fields: dict[str, Any] = {**OK, "midstream": {"snapshot": "conformance-nobodys", "wait": 0}}
    response = await session.endpoint.post("/completions", fields)
    evidence = _refused(response, 409)
    serving = response.json().get("serving")
    expect(isinstance(serving, list) and serving, "the answer does not say what is served", serving=serving)
    expect("retry-after" in response.headers, "there is no Retry-After")
    return {**evidence, "serving": [row["snapshot"] for row in serving]}


def _refused(response: httpx.Response, status: int, what: str = "") -> dict[str, Any]:
    """The status, and an error object with a message. what: was asked."""
    expect(
        response.status_code == status,
        f"{what}{status} was expected, got {refusal(response)}",
        status=response.status_code,
    )
    error = error_of(response)
    sound = isinstance(error.get("message"), str) and error["message"] and "code" in error
    expect(sound, "the body is not {'error': {'message', 'code', ...}}", body=response.text[:200])
    return {"status": status, "code": error["code"]}
