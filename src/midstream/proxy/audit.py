"""The audit log: one line for each control call on the gateway's port, written when the call is answered.

Owns: the logger `midstream.audit`, where it writes, which calls it has and what it says of them.
Always holds:
- Every call that is not GET or HEAD, and not inference, has one line, also when it is refused before its body is read. Calls
  that the Tinker API repeats in every training step have none (UNAUDITED). A GET that changes something has one.
- A line is one JSON object of bounded size in printable ASCII, so nothing that a client sends begins a line of its own.
- No API key, no query string, no header but the ones named here, and no field of a body but the ones named here is in it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import MidstreamError
from midstream.core.headers import HEADER_DEPLOYMENT, HEADER_MODEL, HEADER_OVERWRITE
from midstream.core.private import private_file
from midstream.core.wires import CHANGES_BY_GET
from midstream.fleet.registry import Deployments
from midstream.http.auth import Caller
from midstream.http.bodies import MAX_BODY_BYTES
from midstream.http.message import Request

logger = logging.getLogger("midstream.audit")
# Whatever the level of the other loggers is.
logger.setLevel(logging.INFO)

# Of each text of a client's.
SHOWN_CHARS = 200
_READS = (b"GET", b"HEAD")
_FRONT = "/api/v1/"
#: Calls of the Tinker API that only read, or that come many times in a training step.
UNAUDITED = frozenset(
    _FRONT + path
    for path in (
        *("client/config", "client/dynamic_config", "telemetry", "session_heartbeat"),
        *("asample", "retrieve_future", "cancel_future", "forward_backward", "forward", "optim_step"),
        *("get_info", "weights_info"),
    )
)
_IN_PATH = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"/v1/accounts/[^/]+/deployments/(?P<deployment>[^/:]+)(?:/replicas/(?P<replica>.+))?",
        r"/v1/accounts/[^/]+/deployedModels/(?P<model>[^/]+)",
        r"(?:/inference)?/v1/sessions/(?P<session>.+)",
        r"/api/v1/sessions/(?P<session>[^/]+)/finish",
        r"/api/v1/training_runs/(?P<model_id>[^/]+)/checkpoints/(?P<checkpoint>.+)",
    )
)


_ADDONS = re.compile(r"/v1/accounts/[^/]+/deployedModels(/|\Z)")


class _AuditedFields(msgspec.Struct):
    """What a line shows of a body. Any JSON value fits: the endpoint judges it."""

    identity: Any = None
    policy: Any = None
    model: Any = None
    deployment: Any = None
    baseModel: Any = None
    minReplicaCount: Any = None
    maxReplicaCount: Any = None
    replicaCount: Any = None
    url: Any = None
    weight_dir: Any = None
    source_dir: Any = None
    sync_dir: Any = None
    uri: Any = None
    target_version: Any = None
    lora_name: Any = None
    lora_path: Any = None
    weight_version: Any = None
    mode: Any = None
    rid: Any = None
    weight: Any = None
    drain: Any = None
    session_id: Any = None
    model_id: Any = None
    base_model: Any = None
    model_path: Any = None
    path: Any = None


#: Fields that hold a URL, and those that hold a path or a URL.
_URLS = ("url", "lora_path")
_PLACES = (*_URLS, "weight_dir", "model_path", "path", "source_dir", "sync_dir", "uri")

_decoder = msgspec.json.Decoder(_AuditedFields)


def write_to(where: str) -> None:
    """where: as the setting `gateway.audit_log`. Raises OSError and ConfigError when the file cannot be written."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.disabled = where == "off"
    logger.propagate = where in ("log", "off")
    if logger.propagate:
        return
    file = _File(private_file(Path(where)), encoding="ascii")
    file.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(file)


class _File(WatchedFileHandler):
    """Opens the file again when it was moved away. Standard error gets the reason why a line is missing: it fails no call."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)


class AuditLog:
    """The audit log of one gateway process."""

    def __init__(
        self,
        deployments: Deployments,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._deployments = deployments
        self._now = now

    def answered(
        self, request: Request, caller: Caller, client: str, status: int, made: str | None = None
    ) -> None:
        """A request that is not inference was answered. made: the name that the server gave to what it made."""
        if logger.disabled:
            return
        target, _, query = request.target.decode("latin-1").partition("?")
        if not target.startswith("/"):
            # It was refused as it is, and may name a user and a password.
            target = "-"
        path = unquote(target)
        reads = request.method in _READS and path not in CHANGES_BY_GET
        if reads or path in UNAUDITED:
            return
        what = _what(path, query, request)
        deployment = made or what.pop("deployment", None) or self._meant(path, request.first)
        line = {
            "time": self._now().isoformat(timespec="milliseconds"),
            "request": _header(request.first, "x-request-id") or "-",
            "key": caller.fingerprint,
            "tenant": caller.tenant or "-",
            "client": client,
            "method": request.method.decode("latin-1"),
            "path": _cut(target),
            "deployment": _cut(str(deployment).rpartition("/")[2]),
            "what": what,
            "status": status,
        }
        logger.info("%s", json.dumps(line, ensure_ascii=True))

    def _meant(self, path: str, headers: Mapping[bytes, bytes]) -> str:
        if path.startswith(_FRONT):
            return self._deployments.default.name
        deployment, model = _header(headers, HEADER_DEPLOYMENT), _header(headers, HEADER_MODEL)
        if path.startswith("/v1/accounts/"):
            return "-"
        try:
            return (self._deployments.decide(deployment, model) or self._deployments.default).name
        except MidstreamError:
            return deployment or model or "-"


def _what(path: str, query: str, request: Request) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pattern in _IN_PATH:
        if match := pattern.match(path):
            found |= {name: value for name, value in match.groupdict().items() if value is not None}
    asked = parse_qs(query)
    if asked.get("deploymentId"):
        found.setdefault("deployment", asked["deploymentId"][0])
    found |= {
        name: True for name in ("hard", "validateOnly", "replaceMergedAddon") if asked.get(name) == ["true"]
    }
    if path == "/pause" and asked.get("mode"):
        found["mode"] = asked["mode"][0]
    if HEADER_OVERWRITE.encode() in request.first:
        found["overwrite"] = _header(request.first, HEADER_OVERWRITE)
    fields = _in_body(request.body)
    if not _ADDONS.match(path):
        # Elsewhere they are no fields of a body, and would speak over the path.
        fields = {name: value for name, value in fields.items() if name not in ("model", "deployment")}
    found |= fields
    return {name: _shown(value) for name, value in found.items()}


def _in_body(body: bytes) -> dict[str, Any]:
    # Longer ones are refused.
    if len(body) > MAX_BODY_BYTES:
        return {}
    try:
        fields = msgspec.structs.asdict(_decoder.decode(body))
    except NOT_JSON:
        return {}
    for name in _PLACES:
        value = fields[name]
        if isinstance(value, str) and (name in _URLS or "://" in value):
            # It may hold a password, and its query a signature.
            fields[name] = value.rpartition("@")[2].partition("?")[0]
    return {name: value for name, value in fields.items() if isinstance(value, str | int | float)}


def _shown(value: Any) -> Any:
    """A number has no bound either."""
    if isinstance(value, int) and value.bit_length() > 64:
        return _cut(str(value))
    return _cut(value) if isinstance(value, str) else value


def _header(headers: Mapping[bytes, bytes], name: str) -> str | None:
    value = headers.get(name.encode())
    return None if not value else _cut(value.decode("utf-8", "replace"))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
