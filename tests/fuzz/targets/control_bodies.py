"""Bodies and queries of trainers' control calls, of policies and of add-ons, at the gateway's control app.

Checked: a client's bytes are never a 5xx. A refusal has the one error shape and names the field, the header or the query's
parameter. A place that is taken lies inside the bucket. A refusal leaves no policy behind, and no pause.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
from starlette.requests import Request

from midstream.api import adapter_calls, addons, policies, trainer_calls
from midstream.api.app import control_app
from midstream.api.signals import Place, SignalBody, source_url
from midstream.api.updates import Updates
from midstream.core.errors import Conflict
from midstream.core.text import NOT_JSON
from midstream.core.types import Pause
from midstream.core.versions import ServedNames
from midstream.core.wires import TRAINER_CHANGES, TRAINER_REFUSED
from midstream.fleet.loop import Reconciler
from midstream.fleet.policies import INFIX, PolicyReplicas, names_of
from midstream.fleet.registry import DEPLOYMENT_HEADER, MODEL_HEADER, Deployment, Deployments
from midstream.fleet.replicas import ReplicaSet
from midstream.ledger import Ledger, SignalResult, database, sqlite_url
from midstream.proxy.metrics import GatewayMetrics
from targets.snapshot_files import directory
from targets.target import Target, check, controlled

NAMES = ServedNames("accounts/a/models/m", "accounts/a/deployments/d")
BUCKET = "file:///srv/bucket"
#: A policy that is there before each input, and is not loaded.
POLICY = "red"
ADDONS = "/v1/accounts/a/deployedModels"
#: An update that was read and taken; there are no replicas that could serve it.
TAKEN = "taken by the target"


class Call(NamedTuple):
    """body: what declares the fields of the body; None where nothing of it is read. query: the parameters that are read."""

    method: str
    path: str
    body: type[msgspec.Struct] | None = None
    query: tuple[str, ...] = ()


_UPDATES: Mapping[str, type[msgspec.Struct]] = {
    "/abort_requests": trainer_calls.AbortRequests,
    "/update_weights": trainer_calls.UpdateWeights,
    "/pause_generation": trainer_calls.PauseGeneration,
    "/continue_generation": trainer_calls.ContinueGeneration,
    "/update_weights_from_disk": trainer_calls.UpdateFromDisk,
    "/abort_request": trainer_calls.AbortRequest,
    "/v1/load_lora_adapter": adapter_calls.LoadAdapter,
    "/v1/unload_lora_adapter": adapter_calls.UnloadAdapter,
    "/load_lora_adapter": adapter_calls.LoadAdapter,
}
_PAUSE = ("mode", "wait_for_inflight_requests", "clear_cache")
CALLS = (
    *(Call("POST", path, _UPDATES.get(path), _PAUSE if path == "/pause" else ()) for path in TRAINER_CHANGES),
    Call("POST", TRAINER_REFUSED[0]),
    Call("POST", f"/v1/{NAMES.deployment}/policies", policies._Asked),
    Call("POST", ADDONS, addons.Asked, (addons.REPLACE,)),
    Call("PATCH", f"{ADDONS}/{POLICY}", addons.Asked),
    Call("GET", ADDONS, None, ("filter", "orderBy", "pageSize", "pageToken")),
)
_gateways: list[Gateway] = []


class Gateway:
    """The control app over a ledger of its own. It has no replicas."""

    def __init__(self, place: Path) -> None:
        self._loop = asyncio.new_event_loop()
        # Nothing of it has to outlive a power cut.
        database.SYNCHRONOUS = "OFF"
        self.ledger = Ledger(sqlite_url(place / "control.sqlite"))
        replicas = ReplicaSet([])
        reconciler = Reconciler(self.ledger, replicas, NAMES.deployment)
        self.deployments = Deployments(Deployment(NAMES, replicas, reconciler))
        api = policies.PolicyApi(self.ledger, self.deployments, self._changed, self._take)
        adapters = adapter_calls.Adapters(self.deployments, api, Updates(self.ledger, self._take))
        routes = [
            *api.routes(),
            *addons.AddonApi(self.ledger, self.deployments, api, adapters).routes(),
            *trainer_calls.trainer_routes(self.ledger, self.deployments, self._take, api, adapters),
        ]
        self._app = control_app(self.deployments, GatewayMetrics(self.deployments), extra_routes=routes)
        self.taken: list[str] = []
        self._loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        await self.ledger.ensure_deployment(NAMES.deployment, NAMES.model, BUCKET, "ASYNC")
        await self._made(POLICY)

    async def _made(self, policy: str) -> None:
        names = names_of(NAMES, policy)
        await self.ledger.create_deployment(
            names.deployment, model=names.model, bucket_url=BUCKET, transition="ASYNC"
        )
        await self._changed()

    async def _changed(self) -> None:
        """As launch/gateway.py takes up the ledger. What is being ended is gone at once."""
        rows = {row.name: row for row in await self.ledger.policies()}
        for policy in self.deployments.policies():
            row = rows.pop(policy.name, None)
            if row is None or row.deleting:
                self.deployments.remove(policy)
                if row is not None:
                    await self.ledger.delete_deployment(row.name)
        host = self.deployments.default
        for name, row in rows.items():
            policy_name = name.partition(INFIX)[2]
            replicas = PolicyReplicas(host.replicas, policy_name, row.created_at)
            self.deployments.add(
                Deployment(
                    names_of(NAMES, policy_name),
                    replicas,
                    Reconciler(self.ledger, replicas, name),
                    policy=policy_name,
                    of=host,
                )
            )

    async def _take(
        self,
        request: Request,
        deployment: Deployment,
        body: SignalBody,
        place: Place | None = None,
        *,
        overwrite: bool = False,
    ) -> SignalResult:
        """Looks for no files."""
        assert place is not None
        url, _ = source_url(place.url, (BUCKET,), place.param)
        self.taken.append(url)
        raise Conflict(TAKEN)

    def ask(self, call: Call, query: bytes, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        self.taken.clear()
        return self._loop.run_until_complete(self._ask(call, query, body, headers))

    async def _ask(
        self, call: Call, query: bytes, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        told: list[Any] = []
        scope = {
            "type": "http",
            "method": call.method,
            "path": call.path,
            "raw_path": call.path.encode(),
            "root_path": "",
            "query_string": query,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("gateway", 80),
            "client": None,
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            told.append(message)

        # Starlette raises what it answered with a 500.
        await self._app(scope, receive, send)
        return told[0]["status"], b"".join(message.get("body", b"") for message in told[1:])

    def left(self) -> tuple[list[str], Pause]:
        """The policies, and the pause."""
        state = self._loop.run_until_complete(self.ledger.state(NAMES.deployment))
        return [policy.policy for policy in self.deployments.policies()], state.pause

    def forget(self) -> None:
        """What an input left: policies, texts and the frozen state of the one that stays, a pause."""
        self._loop.run_until_complete(self._forget())

    async def _forget(self) -> None:
        for policy in self.deployments.policies():
            await self.ledger.update_deployment(policy.name, deleting=True)
        await self._changed()
        await self._made(POLICY)
        if (await self.ledger.state(NAMES.deployment)).pause.mode is not None:
            await self.ledger.pause(NAMES.deployment, None)

    def close(self) -> None:
        self.ledger.close()
        self._loop.close()


def gateway() -> Gateway:
    if not _gateways:
        place = directory().parent / "control"
        # Of the one before, in this process.
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        _gateways.append(Gateway(place))
    return _gateways[0]


def close() -> None:
    while _gateways:
        _gateways.pop().close()


def run(data: bytes) -> None:
    """The call, the query up to a line feed, the body. The call's byte also says whether a header names the deployment."""
    control, rest = controlled(data)
    call = CALLS[control % 128 % len(CALLS)]
    query, _, body = rest.partition(b"\n")
    headers = {DEPLOYMENT_HEADER: "d"} if control >= 128 else {}
    server, same = gateway(), False
    try:
        status, answer = server.ask(call, query, body, headers)
        check(status < 500, "a client's bytes are the server's fault", status, answer)
        for url in server.taken:
            path = unquote(urlsplit(url).path)
            check(path.startswith("/srv/bucket/"), "a place outside the bucket", url)
            check(posixpath.normpath(path) == path, "a path that is not plain", path)
        found, pause = server.left()
        if status >= 400:
            check_refusal(call, body, json.loads(answer))
            check(found == [POLICY], "a refusal leaves a policy behind", found, answer)
            check(pause.mode is None, "a refusal leaves a pause behind", pause)
        for policy in found:
            check(policies.NAME.fullmatch(policy), "a name that is none", policy)
        same = status >= 400
    finally:
        if not same:
            server.forget()


def check_refusal(call: Call, body: bytes, told: Any) -> None:
    error = told["error"]
    check({"message", "type", "code", "param"} <= error.keys(), "an error of another shape", told)
    if call.path == "/update_weights_from_disk":
        check(told["success"] is False, "a refusal that is none to SGLang's clients", told)
    message, param = error["message"], error["param"]
    if message == TAKEN or call.path in TRAINER_REFUSED:
        return
    if param is None:
        check(message.startswith("the body "), "a refusal that names no field", message)
        return
    try:
        given = msgspec.json.decode(body)
    except NOT_JSON:
        given = None
    root = re.split(r"[.\[]", param)[0]
    known = {*call.query, DEPLOYMENT_HEADER, MODEL_HEADER, *(given if isinstance(given, dict) else ())}
    known |= set() if call.body is None else {*call.body.__struct_encode_fields__}
    check(root in known or param in known, "a field that this call has not", param, message)


def seeds() -> Iterator[bytes]:
    numbers = {call.path: number for number, call in enumerate(CALLS) if call.method == "POST"}
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("/pause", "mode=keep&clear_cache=false", {}),
        ("/pause", "wait_for_inflight_requests=true", {}),
        ("/resume", "", {}),
        ("/abort_requests", "", {"request_ids": ["a", "b"]}),
        ("/abort_requests", "", {"request_ids": "a"}),
        ("/update_weights", "", {"weight_dir": "/srv/bucket/step 1", "skip_prefix_cache_reset": True}),
        ("/update_weights", "", {"update_info": {}, "version_uid": None}),
        ("/pause_generation", "", {"mode": "in_place"}),
        ("/continue_generation", "", {"torch_empty_cache": False}),
        ("/update_weights_from_disk", "", {"model_path": f"{BUCKET}/a/../b", "weight_version": "s-1"}),
        ("/update_weights_from_disk", "", {"model_path": "/srv/bucket/a", "load_format": "dummy"}),
        ("/update_weights_from_disk", "", {"model_path": "/x", "abort_all_requests": True, "is_async": True}),
        ("/abort_request", "", {"rid": "a", "abort_all": False}),
        ("/v1/load_lora_adapter", "", {"lora_name": "blue", "lora_path": "/srv/bucket/b"}),
        ("/v1/load_lora_adapter", "", {"lora_name": POLICY, "lora_path": "/tmp/b", "load_inplace": True}),
        ("/load_lora_adapter", "", {"lora_name": "m", "lora_path": "/srv/bucket/%2e%2e/b"}),
        ("/v1/unload_lora_adapter", "", {"lora_name": POLICY, "lora_int_id": [1]}),
        (TRAINER_REFUSED[0], "", {}),
        (f"/v1/{NAMES.deployment}/policies", "", {"policy": "blue", "frozen": True}),
        (f"/v1/{NAMES.deployment}/policies", "", {"policy": "blue", "from": POLICY}),
        (ADDONS, "replaceMergedAddon=true", {"model": "accounts/a/models/blue", "displayName": "b"}),
        (ADDONS, "", {"model": "blue", "deployment": NAMES.deployment, "public": False, "state": {}}),
    ]
    for path, query, body in rows:
        yield bytes([numbers[path]]) + f"{query}\n{json.dumps(body)}".encode()
    patch = next(n for n, call in enumerate(CALLS) if call.method == "PATCH")
    yield bytes([patch]) + b'\n{"displayName": "Red", "description": "d", "model": "red"}'
    yield bytes([patch]) + b'\n{"deployment": "elsewhere", "default": false}'
    listed = next(n for n, call in enumerate(CALLS) if call.method == "GET")
    yield bytes([listed]) + b"pageSize=1&pageToken=a\n"
    yield bytes([128 + numbers["/resume"]]) + b"\n{}"


WORDS: tuple[bytes, ...] = (
    *(b"mode=", b"abort", b"keep", b"wait", b"in_place", b"clear_cache=", b"pageSize=", b"%00", b"%ff"),
    *(b'"weight_dir":', b'"model_path":', b'"lora_name":', b'"lora_path":', b'"policy":', b'"from":'),
    *(b'"deployment":', b'"displayName":', b'"request_ids":[', b'"rid":', b'"weight_version":"'),
    *(b"file:///srv/bucket/", b"/srv/bucket/", b"../", b"%2e%2e", b"%2F", b"\\\\", b"#", b"@", b"s3://b/a"),
    *(b"null", b"true", b"[" * 32, b'"\\ud800"', b'"\\u0000"', b"\xff", b"1e999", b"18446744073709551616"),
)
TARGET = Target(run, seeds, WORDS, 2048)
