"""What the audit log says of a request: proxy/audit.py, which reads a target, headers and a body before anybody judged them.

Checked: every request leaves one line or none. A line is one JSON object of bounded size in printable ASCII. It has no key,
no password and nothing of a body but the fields that it names.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from midstream.core.errors import Unauthorized
from midstream.core.key_settings import KeySettings
from midstream.core.wires import CHANGES_BY_GET
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.http.auth import NOBODY, Authenticator
from midstream.http.message import Request
from midstream.proxy import audit
from targets.control_side import NAMES
from targets.target import Target, check, controlled

METHODS = (b"POST", b"GET", b"DELETE", b"PATCH", b"PUT")
#: Sent with some inputs.
SECRET = "sk-fuzz-0123456789"
LINE_MAX = 40_000
_CLOCK = datetime(2026, 1, 1, tzinfo=UTC)
#: Bits of the control byte: a valid key, and an offer of an invalid one.
KEYED, UNKNOWN = 64, 128
_IN_PATH = {name for pattern in audit._IN_PATH for name in pattern.groupindex}
_IN_QUERY = {"hard", "validateOnly", "replaceMergedAddon", "overwrite"}
_NAMED = {*audit._AuditedFields.__struct_encode_fields__, *_IN_PATH, *_IN_QUERY}
#: Fields that may name a URL.
URLS = ("url", "lora_path", "model_path", "weight_dir", "path")
_keys = Authenticator([KeySettings(key=SECRET, tenant="t", scopes=("operate",))])
_logs: list[audit.AuditLog] = []


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def log() -> audit.AuditLog:
    if not _logs:
        deployments = Deployments(Deployment(NAMES, ReplicaSet(DeploymentReplicas()), _NoReconciler()))  # type: ignore[arg-type]
        _logs.append(audit.AuditLog(deployments, lambda: _CLOCK))
    return _logs[0]


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What the log says meanwhile, which nobody else hears."""
    handler, before = Lines(), audit.logger.propagate
    audit.logger.addHandler(handler)
    audit.logger.propagate = False
    try:
        yield handler.said
    finally:
        audit.logger.removeHandler(handler)
        audit.logger.propagate = before


class _NoReconciler:
    order: object = None


def run(data: bytes) -> None:
    """The method and the key, the target up to a line feed, headers up to an empty line, the body."""
    control, rest = controlled(data)
    target, _, rest = rest.partition(b"\n")
    head, _, body = rest.partition(b"\n\n")
    lines = (line.partition(b":")[::2] for line in head.split(b"\n"))
    headers = [(name.strip().lower(), value.strip()) for name, value in lines]
    if control & KEYED:
        headers.insert(0, (b"authorization", b"Bearer " + SECRET.encode()))
    if control & UNKNOWN:
        headers.insert(0, (b"x-api-key", b"sk-nobody"))
    first = dict(reversed(headers))
    method = METHODS[control % len(METHODS)]
    try:
        caller = _keys.caller(first)
    except Unauthorized:
        caller = NOBODY
    with listening() as said:
        log().answered(Request(method, target, headers, first, body, False, True), caller, "1.2.3.4", 200)
    check(len(said) <= 1, "several lines", said)
    if not said:
        path = target.decode("latin-1").partition("?")[0]
        unsaid = method == b"GET" or "/api/v1/" in path or "%" in path
        check(unsaid and path not in CHANGES_BY_GET, "a call without a line", method, target)
        return
    check_line(said[0], data, control)


def check_line(line: str, data: bytes, control: int) -> None:
    check(line.isascii() and line.isprintable(), "a line that is none", line)
    check(len(line) < LINE_MAX, "a line without a bound", len(line))
    check(SECRET not in line or SECRET.encode() in data, "a key in the log", line)
    told = json.loads(line)
    check(
        told["key"] == "unknown" or control & KEYED or SECRET.encode() in data, "a key that nobody has", told
    )
    what = told["what"]
    check(what.keys() <= _NAMED, "a field that is not named", what)
    check("?" not in told["path"], "a query in the log", told)
    for text in (told["path"], told["deployment"], told["request"], *what.values()):
        size = len(text) if isinstance(text, str) else len(json.dumps(text))
        check(size <= audit.SHOWN_CHARS + len("..."), "a text without a bound", size)
    for name in URLS:
        value = what.get(name)
        if isinstance(value, str) and "://" in value:
            authority = value.partition("://")[2].partition("/")[0]
            check("@" not in authority and "?" not in value, "a password or a query in the log", name, value)


def seeds() -> Iterator[bytes]:
    calls = (
        (0, "/hot_load/v1/models/hot_load", {"identity": "s-1", "policy": "red", "key": "x"}),
        (KEYED, "/v1/accounts/a/deployments?deploymentId=b&validateOnly=true", {"baseModel": "m", "url": 1}),
        (3, "/v1/accounts/a/deployments/d/replicas/r:1", {"weight": 0.5, "drain": True}),
        (UNKNOWN, "/v1/accounts/a/deployments/d/replicas", {"url": "http://u:p@h:1/?k=v"}),
        (0, "/v1/accounts/a/deployedModels/red?replaceMergedAddon=true", {"model": "m", "deployment": "d"}),
        (2, "/inference/v1/sessions/a%2Fb%0A", {}),
        (0, "/update_weights_from_disk", {"model_path": "s3://k:p@b/a?sig=x", "weight_version": "v"}),
        (1, "/pause?mode=keep", {}),
        (0, "/api/v1/save_weights", {"model_id": "i", "path": "tinker://a", "session_id": [1]}),
        (0, "/api/v1/optim_step", {}),
    )
    for control, target, body in calls:
        head = "x-request-id: r\nfireworks-deployment: d\nx-midstream-overwrite: 1"
        yield bytes([control]) + f"{target}\n{head}\n\n".encode() + msgspec.json.encode(body)


WORDS: tuple[bytes, ...] = (
    *(
        b"fireworks-deployment:",
        b"fireworks-model:",
        b"x-request-id:",
        b"x-midstream-overwrite:",
        b"deploymentId=",
    ),
    *(
        b'"url":"http://u:p@',
        b'"model_path":"s3://u:p@',
        b'"lora_path":"',
        b'"weight_dir":"',
        b'"identity":"',
    ),
    *(
        b"%0A",
        b"%00",
        b"%ff",
        b"%2F",
        b"\xff",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b'"\\ud800"',
        b"[" * 32,
        b"9" * 64,
    ),
    *(
        b"/v1/accounts/a/deployments/",
        b"/replicas/",
        b"/api/v1/",
        b"/pause",
        b"mode=",
        b"1e308",
        b"null",
        b"true",
    ),
)
TARGET = Target(run, seeds, WORDS, 4096)
