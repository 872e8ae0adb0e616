"""What a server answers a trainer: client/server.py with its calls, and training records of the traces that it tells.

Checked: only PublishError comes out, and ValueError of a trace that is none. Its message is bounded. What is read of replicas
can be asked and shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx

from midstream.client import PublishError, ServerClient
from midstream.client.export import jsonl_records
from midstream.client.records import sequences_of
from midstream.client.status import Status
from midstream.core.text import plain
from targets.target import Target, check, controlled, outcome

STATUSES = (200, 202, 409, 503)
MESSAGE_MAX = 4096
DEPLOYMENT = "accounts/a/deployments/d"
_now = [0.0]


def shown(status: Status) -> None:
    for identity in ("s", ""):
        status.serves(identity)
        status.failed(identity)
        status.stands_on(identity, 1)
    str(status).encode()


def told(trace: Any) -> None:
    outcome(ValueError, lambda: jsonl_records(sequences_of(trace, unscored="mask")))


CALLS: tuple[Callable[[ServerClient], Any], ...] = (
    lambda server: shown(server.snapshots.status(retry_s=0)),
    lambda server: server.snapshots.wait_until_ready("s", 0.5),
    lambda server: server.deployments.all(retry_s=0),
    lambda server: server.deployments.policies(DEPLOYMENT, retry_s=0),
    lambda server: server.deployments.ledger(DEPLOYMENT, retry_s=0),
    lambda server: [*zip(range(3), server.sessions.keys(page=1, retry_s=0), strict=False)],
    lambda server: told(server.sessions.trace("s", retry_s=0)),
    lambda server: server.sessions.reward("s", 1.0, retry_s=0),
    lambda server: server.snapshots.signal("s", retry_s=1),
    lambda server: server.snapshots.hint("s", ["config.json"], None, "arc_v2"),
    lambda server: server.metrics(retry_s=0),
)


def sleep(seconds: float) -> None:
    check(0 <= seconds < 1e9, "a pause that is none", seconds)
    _now[0] += seconds


def run(data: bytes) -> None:
    """The call, its status, Retry-After up to a line feed, the body. The same answer comes to each request."""
    control, rest = controlled(data)
    after, _, body = rest.partition(b"\n")
    status = STATUSES[control // len(CALLS) % len(STATUSES)]
    headers = [(b"retry-after", after), (b"content-type", b"application/json")]
    transport = httpx.MockTransport(lambda request: httpx.Response(status, headers=headers, content=body))
    _now[0] = 0.0
    with httpx.Client(transport=transport) as http:
        server = ServerClient("http://gateway", http=http, sleep=sleep, monotonic=lambda: _now[0])
        _, refused = outcome(PublishError, partial(CALLS[control % len(CALLS)], server))
    if refused is not None:
        check(len(plain(str(refused))) < MESSAGE_MAX, "a message without a bound", str(refused))


def seeds() -> Iterator[bytes]:
    row = {
        "current_snapshot_identity": "s",
        "readiness": True,
        "loading_state": {"stage": "done", "target_snapshot_identity": "s"},
        "midstream": {"replica": "r", "error": None, "generation": 1, "last_swap": {"fetch_ms": 1.0}},
    }
    failed = row | {"loading_state": {"stage": "error", "target_snapshot_identity": "s"}, "readiness": False}
    turn = {"turn": 1, "parent": 0, "model": "m", "added": [1], "token_ids": [2], "finish_reason": "stop"}
    turn |= {
        "logprobs": [-1.0],
        "sampling_logprobs": None,
        "routing_matrix": None,
        "routing_matrix_dtype": None,
    }
    turn |= {"routing_matrix_shape": None, "snapshots": [{"snapshot": "s", "start": 0, "end": 1}]}
    trace = {"id": "s", "traces": [{"replica": "r", "turns": [turn], "rewards": []}], "unreachable": []}
    bodies: tuple[Any, ...] = (
        {"replicas": [row]},
        {"replicas": [row, failed]},
        {"accounts": [{"name": "accounts/a"}], "deployments": [{"name": DEPLOYMENT}]},
        {"policies": [{"policy": "red"}]},
        {"snapshots": []},
        {"data": [{"id": "a"}, {"id": "b"}], "has_more": True, "unreachable": []},
        trace,
        {"id": "s", "object": "session.reward"},
        {"identity": "s", "generation": 1},
        {},
        {},
    )
    for number, body in enumerate(bodies):
        yield bytes([number]) + b"\n" + json.dumps(body).encode()
        yield bytes([number + 3 * len(CALLS)]) + b"2\n" + json.dumps({"error": {"message": "m"}}).encode()
    date = b"Wed, 21 Oct 2026 07:28:00 GMT"
    yield bytes([8 + 3 * len(CALLS)]) + date + b"\n{}"
    yield bytes([6]) + b"\n" + json.dumps(trace | {"unreachable": ["r1"]}).encode()


WORDS: tuple[bytes, ...] = (
    *(
        b'"replicas":[',
        b'"loading_state":{',
        b'"stage":"',
        b'"midstream":{',
        b'"generation":',
        b'"readiness":',
    ),
    *(b'"data":[', b'"id":"', b'"has_more":true', b'"unreachable":[', b'"traces":[', b'"error":{"message":'),
    *(
        b"null",
        b"true",
        b"[" * 32,
        b"NaN",
        b"Infinity",
        b"1e999",
        b'"\\ud800"',
        b"\xff",
        b"9" * 64,
        b"GMT",
        b"-0000",
    ),
)
TARGET = Target(run, seeds, WORDS, 2048)
