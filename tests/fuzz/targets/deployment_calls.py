"""Bodies and queries of the Deployments API, and of replicas that join: api/deployments.py and fleet/membership.py.

Checked: a client's bytes are never a 5xx. A refusal has the one error shape, names a field, and leaves neither a row nor a
directory behind. A bucket that is taken lies inside the server's own. What is shown may be sent back and changes nothing. A
replica that joins is reached at the host and the port of its name, which is an allowed one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httptools

from midstream.api import resource
from midstream.api.deployments import DeploymentsApi, lies_in
from midstream.core.served_names import ServedNames
from midstream.fleet.desired_state import DesiredState, Running, replica_count
from midstream.fleet.loop import Reconciler
from midstream.fleet.membership import MembershipApi, ReplicaBody
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.view import ReplicaEntry
from midstream.ledger import DeploymentRow
from targets.control_side import (
    NAMES,
    Call,
    ControlSide,
    check_refusal,
    decoded,
    fields_of,
    files_in,
    side,
)
from targets.target import Target, check, controlled

COLLECTION = "/v1/accounts/a/deployments"
#: A deployment beside the default one, and a replica of the default one. Both are there before each input.
BESIDE = "beside"
JOINED = "10.0.0.7:9000"
ALLOWED = ("10.0.0.7", "other:1", "::1")
ELSEWHERE = "s3://allowed/here"

_FIELDS = frozenset(resource._FIELDS)
_MASK = ("updateMask", "update_mask")
RESOURCES = (
    Call("POST", COLLECTION, _FIELDS, ("deploymentId", "validateOnly")),
    Call("PATCH", f"{COLLECTION}/{BESIDE}", _FIELDS, _MASK),
    Call("PATCH", f"{COLLECTION}/d", _FIELDS, _MASK),
    Call("POST", f"{COLLECTION}/{BESIDE}:scale", ("replicaCount",)),
    Call("DELETE", f"{COLLECTION}/{BESIDE}", (), ("hard",)),
    Call("GET", COLLECTION, (), ("pageSize", "pageToken")),
)
_MEMBER = fields_of(ReplicaBody)
MEMBERS = (
    Call("POST", f"{COLLECTION}/d/replicas", _MEMBER),
    Call("POST", f"{COLLECTION}/{BESIDE}/replicas", _MEMBER),
    Call("PATCH", f"{COLLECTION}/d/replicas/{JOINED}", _MEMBER),
)


class DeploymentSide(ControlSide):
    """A gateway that takes up every change of the ledger, beside a supervisor that starts no replica."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = self.place / "bucket"
        self.now = 0.0
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        row = await self.ledger.ensure_deployment(
            NAMES.deployment, NAMES.model, self.bucket.as_uri(), "ASYNC"
        )
        deployments = Deployments(self._run_time(row), ("other",))
        self._desired = DesiredState(self.ledger, deployments, self._run_time, lambda wanted: None)
        self._desired.running(Running())
        changed = self._desired.look_once
        self.serve(
            deployments,
            [
                DeploymentsApi(
                    self.ledger,
                    deployments,
                    bucket=self.bucket.as_uri(),
                    allowed_buckets=(ELSEWHERE,),
                    changed=changed,
                ),
                MembershipApi(self.ledger, deployments, allowed=ALLOWED, changed=changed),
            ],
        )
        await self._fill()

    def _run_time(self, row: DeploymentRow) -> Deployment:
        replicas = ReplicaSet(DeploymentReplicas())
        reconciler = Reconciler(self.ledger, replicas, row.name)
        return Deployment(ServedNames(row.model, row.name), replicas, reconciler, wanted=replica_count(row))

    def rows(self) -> list[DeploymentRow]:
        return self.loop.run_until_complete(self.ledger.deployments())

    def forget(self) -> None:
        self.loop.run_until_complete(self._forget())

    async def _forget(self) -> None:
        for row in await self.ledger.deployments():
            if row.name == NAMES.deployment:
                await self.ledger.update_deployment(
                    row.name,
                    bucket_url=self.bucket.as_uri(),
                    transition="ASYNC",
                    replicas_min=1,
                    replicas_max=1,
                    fields=dict.fromkeys(row.fields),
                )
            else:
                await self.ledger.delete_deployment(row.name)
        await self._desired.look_once()
        await self._fill()

    async def _fill(self) -> None:
        shutil.rmtree(self.bucket, ignore_errors=True)
        for call, query, body in (
            (RESOURCES[0], f"deploymentId={BESIDE}".encode(), {}),
            (MEMBERS[0], b"", {"url": f"http://{JOINED}"}),
        ):
            status, answer = await self.answer(
                call, query, json.dumps({"baseModel": "m"} | body if query else body).encode()
            )
            assert status == 200, answer


def run(calls: Sequence[Call], data: bytes) -> None:
    """The call, the query up to a line feed, the body."""
    control, rest = controlled(data)
    call = calls[control % len(calls)]
    query, _, body = rest.partition(b"\n")
    server, same = side(DeploymentSide), False
    before, files = server.rows(), files_in(server.bucket)
    try:
        status, answer = server.ask(call, query, body, {})
        check(status < 500, "a client's bytes are the server's fault", status, answer)
        told, rows = decoded(answer), server.rows()
        outside = {
            name for name in files_in(server.place) if not name.startswith(("bucket", "control.sqlite"))
        }
        check(not outside, "a directory outside the bucket", outside)
        if status >= 400:
            check_refusal(call, body, told)
            check(rows == before, "a refusal changes a row", before, rows)
            check(files_in(server.bucket) == files, "a refusal leaves a directory behind", answer)
            same = True
            return
        for row in rows:
            check_row(server, row)
        if call in MEMBERS:
            check_joined(call, body, told)
        elif "name" in told:
            check_sent_back(server, call, told)
    finally:
        if not same:
            server.forget()


def check_row(server: DeploymentSide, row: DeploymentRow) -> None:
    check(resource._ID.fullmatch(row.name.rpartition("/")[2]), "a name that is none", row.name)
    buckets = (server.bucket.as_uri(), ELSEWHERE)
    check(any(lies_in(row.bucket_url, bucket) for bucket in buckets), "a bucket elsewhere", row.bucket_url)
    counts = (row.replicas_min, row.replicas_max)
    check(0 <= counts[0] <= counts[1] <= resource.REPLICAS_MAX, "numbers of replicas that cannot be", counts)
    for name in row.fields:
        check(name in _FIELDS or name.startswith("_replica:"), "a field that no client may set", name)
    deployment = server.deployments.known(row.name)
    check(deployment is not None, "a deployment that is not taken up", row.name)
    assert deployment is not None
    for name, entry in deployment.entries.items():
        check_entry(name, entry)


def check_entry(name: str, entry: ReplicaEntry) -> None:
    """Whoever calls the replica reaches the host and the port of its name, and says no more to it than the path."""
    if entry.url is None:
        return
    check(name in ALLOWED or name.rpartition(":")[0] in ALLOWED, "a replica that may not join", name)
    path = f"{entry.url}/replica/events"
    parts = httptools.parse_url(path.encode())
    check(parts.path == b"/replica/events" and parts.query is None, "another path", entry.url)
    check(parts.userinfo is None and parts.fragment is None, "a URL that says more", entry.url)
    host = (parts.host or b"").decode().lower()
    check(f"{host}:{parts.port}" == name, "another host or port than the name says", name, entry.url)
    read = urlsplit(path)
    check(f"{read.hostname}:{read.port}" == name, "two readers of the URL disagree", name, entry.url)


def check_joined(call: Call, body: bytes, told: Any) -> None:
    said = json.loads(body)
    check(0 < told["weight"] <= 1e6, "a weight that none can have", told)
    for name in ("weight", "drain"):
        if said.get(name) is not None:
            check(told[name] == said[name], "another value than was asked for", told, said)
    drained = told["standing"] == "leaving"
    check(drained == told["drain"], "a replica that is drained and takes requests", told)


def check_sent_back(server: DeploymentSide, call: Call, told: Any) -> None:
    """A client may send back what it got."""
    number = told["name"].rpartition("/")[2]
    if call.method not in ("POST", "PATCH") or server.deployments.known(told["name"]) is None:
        return
    one = Call("PATCH", f"{COLLECTION}/{number}", _FIELDS, _MASK)
    status, answer = server.ask(one, b"", json.dumps(told).encode(), {})
    again = decoded(answer)
    check(status == 200, "what was shown is refused", told, again)
    changed = {name for name in told.keys() | again.keys() if told.get(name) != again.get(name)}
    check(changed <= {"updateTime"}, "what was shown changes something", changed, told, again)


def seeds(calls: Sequence[Call], rows: Sequence[tuple[int, str, Any]]) -> Iterator[bytes]:
    for number, query, body in rows:
        assert number < len(calls)
        yield bytes([number]) + f"{query}\n".encode() + json.dumps(body).encode()


RESOURCE_ROWS: Sequence[tuple[int, str, Any]] = (
    (0, "deploymentId=new", {"baseModel": "other", "minReplicaCount": 1, "maxReplicaCount": 3}),
    (0, "deploymentId=new&validateOnly=true", {"baseModel": "accounts/a/models/m", "displayName": "N"}),
    (
        0,
        "deploymentId=d",
        {"baseModel": "m", "hotLoadBucketUrl": f"{ELSEWHERE}/x", "hotLoadBucketType": "S3"},
    ),
    (
        0,
        "",
        {"baseModel": "m", "hotLoadTransitionType": "SYNC", "annotations": {"a": "b"}, "extraArgs": ["x"]},
    ),
    (0, "deploymentId=-x", {"baseModel": "m"}),
    (0, "deploymentId=new", {"baseModel": "m", "placement": {"region": ["r"]}, "acceleratorCount": 8}),
    (1, "updateMask=displayName,min_replica_count", {"displayName": "B", "minReplicaCount": 2}),
    (1, "updateMask=*", {"maxReplicaCount": 0, "name": "x", "createTime": "t", "unknownFields": "IGNORE"}),
    (1, "update_mask=description", {}),
    (
        2,
        "",
        {"enableHotLoad": False, "autoTune": {}, "precision": "PRECISION_UNSPECIFIED", "forTraining": None},
    ),
    (2, "", {"minReplicaCount": 3, "maxReplicaCount": 2}),
    (2, "", {"directRouteApiKeys": ["k"]}),
    (3, "", {"replicaCount": 2}),
    (3, "", {"replicaCount": -1}),
    (4, "hard=true", {}),
    (5, "pageSize=1&pageToken=accounts", {}),
)
MEMBER_ROWS: Sequence[tuple[int, str, Any]] = (
    (0, "", {"url": "http://10.0.0.7:9001/", "weight": 2.5}),
    (0, "", {"url": "http://other:1", "drain": True}),
    (0, "", {"url": "http://[::1]:9000"}),
    (0, "", {"url": "http://10.0.0.8:1"}),
    (0, "", {"url": "https://10.0.0.7:9000"}),
    (1, "", {"url": f"http://{JOINED}"}),
    (2, "", {"weight": 0.5, "drain": True}),
    (2, "", {"url": None, "weight": 1000001}),
)
WORDS: tuple[bytes, ...] = (
    *(b"deploymentId=", b"updateMask=", b"validateOnly=true", b"pageToken=", b"pageSize=", b"%00", b"%ff"),
    *(
        b'"hotLoadBucketUrl":"',
        b'"baseModel":"m"',
        b'"minReplicaCount":',
        b'"maxReplicaCount":',
        b'"placement":{',
    ),
    *(b"file:///", b"../", b"%2e%2e", b"s3://allowed/here", b"_UNSPECIFIED", b"_hard", b"_replica:"),
    *(b"null", b"true", b"[" * 32, b'"\\u0000"', b"\xff", b"1e999", b"18446744073709551616", b"9" * 64),
)
MEMBER_WORDS: tuple[bytes, ...] = (
    *(b'"url":"http://', b'"weight":', b'"drain":', b"10.0.0.7", b"10.0.0.7:9000", b"other:1", b"[::1]:9000"),
    *(
        b"@",
        b"?",
        b"#",
        b"\\n",
        b"\\t",
        b"\\u0000",
        b"%25",
        b"%2f",
        b"[",
        b"]",
        b"\xe2\x84\x80",
        b"1e-320",
        b"1e999",
    ),
)
RESOURCE = Target(partial(run, RESOURCES), partial(seeds, RESOURCES, RESOURCE_ROWS), WORDS, 2048)
MEMBER = Target(partial(run, MEMBERS), partial(seeds, MEMBERS, MEMBER_ROWS), MEMBER_WORDS, 512)
