"""What an API key may do: how its scopes are written, and which scope each route needs. Pure.

    SCOPE                the scope on every deployment
    SCOPE:DEPLOYMENT     on this one alone, by the last part of its name

A scope on a deployment is one on all of its policies. SCOPE:DEPLOYMENT/POLICY is kept for single ones, and refused.
Always holds:
- `operate` contains all other scopes, on the same deployments. No other scope contains one.
- A route that is not in the table needs `operate` on every deployment. Tests compare the table with the routes there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from midstream.core.errors import ConfigError, Forbidden
from midstream.core.wires import (
    PREFIXES,
    TRAINER_CHANGES,
    TRAINER_CHANGES_BY_GET,
    TRAINER_HEALTH,
    TRAINER_READS,
    TRAINER_REFUSED,
    WIRES,
)

SAMPLE, PUBLISH, OBSERVE, OPERATE = "sample", "publish", "observe", "operate"
SCOPES = (SAMPLE, PUBLISH, OBSERVE, OPERATE)

_SCOPE = re.compile(r"([a-z]+)(?::([A-Za-z0-9][A-Za-z0-9._-]{0,127})(/[A-Za-z0-9][A-Za-z0-9._-]{0,127})?)?")


@dataclass(frozen=True)
class Grant:
    """The scopes of one key. given: (scope, the deployment's last name), None for every deployment."""

    given: frozenset[tuple[str, str | None]] = frozenset()

    def __str__(self) -> str:
        """As it is written, scopes separated by blanks."""
        return " ".join(sorted(scope if name is None else f"{scope}:{name}" for scope, name in self.given))

    def everywhere(self, scopes: Iterable[str]) -> bool:
        """One of `scopes`, on every deployment, also on those that are not there yet."""
        return any((scope, None) in self.given for scope in (*scopes, OPERATE))

    def anywhere(self, scopes: Iterable[str]) -> bool:
        """One of `scopes`, on some deployment."""
        wanted = {*scopes, OPERATE}
        return any(scope in wanted for scope, _ in self.given)

    def allows(self, scopes: Iterable[str], deployment: str) -> bool:
        """One of `scopes`, on the deployment of this name, in full or its last part."""
        scopes, name = (*scopes, OPERATE), deployment.rpartition("/")[2]
        return any((scope, None) in self.given or (scope, name) in self.given for scope in scopes)


NOTHING = Grant()
EVERYTHING = Grant(frozenset({(OPERATE, None)}))


def parse_scope(text: str) -> tuple[str, str | None]:
    """(scope, deployment or None for all) of one scope as it is written. Raises ConfigError."""
    match = _SCOPE.fullmatch(text)
    if match is None or match[1] not in SCOPES:
        raise ConfigError(
            f"scope {text!r}: expected one of {', '.join(SCOPES)}, alone or as SCOPE:DEPLOYMENT"
        )
    if match[3] is not None:
        raise ConfigError(f"scope {text!r}: a scope is for a whole deployment; name the deployment alone")
    return match[1], match[2]


def parse_grant(scopes: Iterable[str]) -> Grant:
    """Raises ConfigError."""
    return Grant(frozenset(parse_scope(text) for text in scopes))


class Need(NamedTuple):
    """What a route asks of a key.

    scopes: one of them is enough, the least first.
    on: where a key must have it.

    - named: on the deployment in the path.
    - meant: on the deployment that the headers mean, else the default one.
    - every: on every deployment, as the route shows or changes the whole server.
    - some: on any deployment. The route shows and changes what belongs to those alone.
    """

    scopes: tuple[str, ...]
    on: Literal["named", "meant", "every", "some"]


def forbidden(scopes: tuple[str, ...], resource: str) -> Forbidden:
    """resource: as the request names it; whether there is such a thing is not told."""
    wanted = " or ".join(repr(scope) for scope in scopes)
    return Forbidden(f"this API key lacks the scope {wanted} on {resource}")


#: The dashboard's page, its files, which say nothing of the server, and the stream that feeds it.
DASHBOARD = "/dashboard"
DASHBOARD_FILES = (
    "app.js",
    "charts.js",
    "lanes.js",
    "tables.js",
    "trace.js",
    "style.css",
    "uPlot.js",
    "uPlot.css",
    "icon.svg",
)
DASHBOARD_EVENTS = DASHBOARD + "/events"
DASHBOARD_OPEN = (DASHBOARD, *(f"{DASHBOARD}/{name}" for name in DASHBOARD_FILES))
#: The document of the HTTP API, and the page that shows it. Both are the same on every server of a version.
OPENAPI, DOCS = "/openapi.json", "/docs"
DOCS_FILES = ("docs.js", "docs.css", "swagger-ui-bundle.js", "swagger-ui.css")
DOCS_OPEN = (OPENAPI, DOCS, *(f"{DOCS}/{name}" for name in DOCS_FILES))
#: What is served to everybody, as it says nothing of the server but its version.
PAGES_OPEN = (*DASHBOARD_OPEN, *DOCS_OPEN)

#: Routes that need no scope. What they say to whom is theirs to decide.
PUBLIC = frozenset(("GET", path) for path in ("/health", *TRAINER_HEALTH, "/api/v1/healthz", *PAGES_OPEN))
UNKNOWN_ROUTE = Need((OPERATE,), "every")

_ACCOUNTS = "/v1/accounts"
_ONE = _ACCOUNTS + "/{account}/deployments/{name}"
#: Their deployments are named in bodies, or follow from the add-on.
_ADDONS = _ACCOUNTS + "/{account}/deployedModels"
_HOT_LOAD = "/hot_load/v1/models/hot_load"
_READ_ONE = Need((PUBLISH, OBSERVE), "named")
_CHANGE_ONE = Need((OPERATE,), "named")
_LIST = Need(SCOPES, "some")
_SIGNAL, _SIGNALLED = Need((PUBLISH,), "meant"), Need((PUBLISH, OBSERVE), "meant")
_SAMPLE_MEANT = Need((SAMPLE,), "meant")
_INFERENCE = {
    (method, prefix + path): need
    for prefix in PREFIXES
    for method, path, need in (
        ("GET", "/v1/models", _LIST),
        ("GET", "/v1/models/{model:path}", _LIST),
        ("GET", "/v1/sessions", _SAMPLE_MEANT),
        ("GET", "/v1/sessions/{key:path}", _SAMPLE_MEANT),
        ("GET", "/v1/sessions/{key:path}/trace", _SAMPLE_MEANT),
        ("POST", "/v1/sessions/{key:path}/reward", _SAMPLE_MEANT),
        ("DELETE", "/v1/sessions/{key:path}", _SAMPLE_MEANT),
        ("GET", "/v1/responses/{id}", _SAMPLE_MEANT),
        ("DELETE", "/v1/responses/{id}", _SAMPLE_MEANT),
        ("GET", "/v1/responses/{id}/input_items", _SAMPLE_MEANT),
    )
}

#: (method, path as the app spells it) -> what it needs. The gateway's own routes.
GATEWAY_ROUTES: Mapping[tuple[str, str], Need] = {
    **{("POST", path): _SAMPLE_MEANT for path in WIRES},
    **_INFERENCE,
    ("GET", "/sessions/{key:path}/trace"): _SAMPLE_MEANT,
    ("POST", "/sessions/{key:path}/reward"): _SAMPLE_MEANT,
    ("GET", "/metrics"): Need((OBSERVE,), "every"),
    ("GET", DASHBOARD_EVENTS): Need((OBSERVE,), "some"),
    ("GET", _ACCOUNTS): _LIST,
    ("GET", _ACCOUNTS + "/{account}"): _LIST,
    ("GET", _ACCOUNTS + "/{account}/models"): _LIST,
    ("GET", _ACCOUNTS + "/{account}/models/{model}"): _LIST,
    ("POST", _HOT_LOAD): _SIGNAL,
    ("GET", _HOT_LOAD): _SIGNALLED,
    ("POST", _HOT_LOAD + "/hint"): _SIGNAL,
    **{("POST", path): _SIGNAL for path in (*TRAINER_CHANGES, *TRAINER_REFUSED)},
    **{("GET", path): _SIGNAL for path in TRAINER_CHANGES_BY_GET},
    **{("GET", path): _SIGNALLED for path in TRAINER_READS},
    ("GET", _ONE + "/ledger"): _READ_ONE,
    ("DELETE", _ONE + "/ledger"): _CHANGE_ONE,
    ("GET", _ONE + "/policies"): _READ_ONE,
    ("POST", _ONE + "/policies"): Need((PUBLISH,), "named"),
    ("GET", _ONE + "/policies/{policy}"): _READ_ONE,
    ("DELETE", _ONE + "/policies/{policy}"): Need((PUBLISH,), "named"),
    ("GET", _ADDONS): Need((PUBLISH, OBSERVE), "some"),
    ("POST", _ADDONS): Need((PUBLISH,), "some"),
    ("GET", _ADDONS + "/{model}"): Need((PUBLISH, OBSERVE), "some"),
    ("PATCH", _ADDONS + "/{model}"): Need((PUBLISH,), "some"),
    ("DELETE", _ADDONS + "/{model}"): Need((PUBLISH,), "some"),
    ("GET", _ACCOUNTS + "/{account}/deployments"): Need((PUBLISH, OBSERVE), "some"),
    ("POST", _ACCOUNTS + "/{account}/deployments"): Need((OPERATE,), "every"),
    ("GET", _ONE): _READ_ONE,
    ("PATCH", _ONE): _CHANGE_ONE,
    ("DELETE", _ONE): _CHANGE_ONE,
    ("PATCH", _ONE + ":scale"): _CHANGE_ONE,
    ("POST", _ONE + ":scale"): _CHANGE_ONE,
    ("POST", _ONE + ":undelete"): _CHANGE_ONE,
    ("GET", _ONE + "/replicas"): Need((OBSERVE,), "named"),
    ("POST", _ONE + "/replicas"): _CHANGE_ONE,
    ("PATCH", _ONE + "/replicas/{replica}"): _CHANGE_ONE,
    ("DELETE", _ONE + "/replicas/{replica}"): _CHANGE_ONE,
}

_TINKER = "/api/v1/"
_FOR_SAMPLES = ("create_sampling_session", "asample")
_FOR_TRAINING = (
    *("create_model", "load_weights", "forward_backward", "forward"),
    *("optim_step", "save_weights", "save_weights_for_sampler"),
)
_FOR_BOTH = (
    *("client/config", "client/dynamic_config", "create_session", "session_heartbeat", "telemetry"),
    *("sessions/{session_id}/finish", "retrieve_future", "cancel_future", "get_info", "weights_info"),
)
_TINKER_READS = (
    *("get_server_capabilities", "samplers/{sampling_session_id}", "sessions"),
    *(
        "sessions/{session_id}",
        "midstream/requests/{request_id}",
        "training_runs",
        "training_runs/{model_id}",
    ),
    *("training_runs/{model_id}/checkpoints", "checkpoints"),
)

#: The same of the Tinker front, whose deployment is the default one.
TINKER_ROUTES: Mapping[tuple[str, str], Need] = {
    **{("POST", _TINKER + path): Need((SAMPLE,), "meant") for path in _FOR_SAMPLES},
    **{("POST", _TINKER + path): Need((PUBLISH,), "meant") for path in _FOR_TRAINING},
    **{("POST", _TINKER + path): Need((SAMPLE, PUBLISH), "meant") for path in _FOR_BOTH},
    **{("GET", _TINKER + path): Need((SAMPLE, PUBLISH), "meant") for path in _TINKER_READS},
    ("DELETE", _TINKER + "training_runs/{model_id}/checkpoints/{checkpoint_id:path}"): Need(
        (PUBLISH,), "meant"
    ),
}


def need_of(table: Mapping[tuple[str, str], Need], method: str, path: str) -> Need | None:
    """What a request to this route needs; None: nothing. path: as the app spells it."""
    route = ("GET" if method == "HEAD" else method, path)
    return None if route in PUBLIC else table.get(route, UNKNOWN_ROUTE)
