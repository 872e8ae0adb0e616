"""Bodies and queries of trainers' control calls, of policies and of add-ons, at the gateway's control app.

Checked: a client's bytes are never a 5xx. A refusal has the one error shape and names the field, the header or the query's
parameter. A place that is taken lies inside the bucket. A refusal leaves no policy behind, and no pause.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from policies_taken_up import take_up_policies
from starlette.requests import Request

from midstream.api import (
    adapter_calls,
    addons,
    delta_calls,
    hotload,
    policies,
    trainer_calls,
    weight_transfer,
)
from midstream.api.signals import NamedDirectory, SignalBody, source_url
from midstream.api.updates import Updates
from midstream.core.config import PushSettings
from midstream.core.endpoints import endpoints_of
from midstream.core.errors import Conflict
from midstream.core.headers import HEADER_DEPLOYMENT
from midstream.core.served_names import names_of
from midstream.core.types import Pause
from midstream.core.wires import TRAINER_REFUSED
from midstream.fleet.loop import Reconciler
from midstream.fleet.push import PushDoor
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.ledger import CHAIN_MAX, NewDeployment, SignalResult
from targets.control_side import NAMES, Call, ControlSide, check_refusal, decoded, fields_of, side
from targets.target import Target, check, controlled

BUCKET = "file:///srv/bucket"
#: A policy that is there before each input, and is not loaded.
POLICY = "red"
ADDONS = "/v1/accounts/a/deployedModels"
#: An update that was read and taken; there are no replicas that could serve it.
TAKEN = "taken by the target"

_TRAINERS = [
    one
    for one in endpoints_of(
        trainer_calls.TrainerApi, delta_calls.DeltaCallsApi, adapter_calls.AdapterCallsApi
    )
    if one.method == "POST" and one.path not in TRAINER_REFUSED
]
_ADDON = fields_of(addons.DeployedModelBody)
CALLS = (
    *(
        Call(
            "POST",
            one.path,
            () if one.body is None else fields_of(one.body),
            tuple(parameter.name for parameter in one.query),
        )
        for one in _TRAINERS
    ),
    Call("POST", TRAINER_REFUSED[0]),
    Call("POST", f"/v1/{NAMES.deployment}/policies", fields_of(policies.PolicyBody)),
    Call("POST", ADDONS, _ADDON, (addons.REPLACE,)),
    Call("PATCH", f"{ADDONS}/{POLICY}", _ADDON),
    Call("GET", ADDONS, (), ("filter", "orderBy", "pageSize", "pageToken")),
)


class Gateway(ControlSide):
    """It has no replicas."""

    def __init__(self) -> None:
        super().__init__()
        replicas = ReplicaSet(DeploymentReplicas([]))
        reconciler = Reconciler(self.ledger, replicas, NAMES.deployment)
        deployments = Deployments(Deployment(NAMES, replicas, reconciler))
        api = policies.PoliciesApi(self.ledger, deployments, self._changed, self._take)
        updates = Updates(self.ledger, self._take)
        adapters = adapter_calls.AdapterLoader(deployments, api, updates)
        door = PushDoor(self.ledger, PushSettings())
        transfer = weight_transfer.WeightTransferApi(
            self.ledger, deployments, cast("Any", None), updates, door
        )
        places = hotload.HotLoadApi(self.ledger, deployments, (), (CHAIN_MAX, 0), lambda _: api)
        deltas = delta_calls.DeltaCallsApi(self.ledger, deployments, updates, places.url_of)
        apis = (
            api,
            addons.AddonsApi(self.ledger, deployments, api, adapters),
            trainer_calls.TrainerApi(self.ledger, deployments, updates, transfer, deltas),
            deltas,
            adapter_calls.AdapterCallsApi(deployments, api, adapters),
        )
        self.serve(deployments, apis)
        self.taken: list[str] = []
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        await self.ledger.ensure_deployment(NAMES.deployment, NAMES.model, BUCKET, "ASYNC")
        await self._made(POLICY)

    async def _made(self, policy: str) -> None:
        names = names_of(NAMES, policy)
        await self.ledger.create_deployment(
            NewDeployment(names.deployment, model=names.model, bucket_url=BUCKET, transition="ASYNC")
        )
        await self._changed()

    async def _changed(self) -> None:
        await take_up_policies(self.ledger, self.deployments)

    async def _take(
        self,
        request: Request,
        deployment: Deployment,
        body: SignalBody,
        place: NamedDirectory | None = None,
        *,
        overwrite: bool = False,
    ) -> SignalResult:
        """Looks for no files."""
        assert place is not None
        url, _ = source_url(place.url, (BUCKET,), place.param)
        self.taken.append(url)
        raise Conflict(TAKEN)

    def left(self) -> tuple[list[str], Pause]:
        """The policies, and the pause."""
        state = self.loop.run_until_complete(self.ledger.state(NAMES.deployment))
        return [policy.policy for policy in self.deployments.policies()], state.pause

    def forget(self) -> None:
        """What an input left: policies, texts and the frozen state of the one that stays, a pause."""
        self.loop.run_until_complete(self._forget())

    async def _forget(self) -> None:
        for policy in self.deployments.policies():
            await self.ledger.update_deployment(policy.name, deleting=True)
        await self._changed()
        await self._made(POLICY)
        if (await self.ledger.state(NAMES.deployment)).pause.mode is not None:
            await self.ledger.pause(NAMES.deployment, None)


def run(data: bytes) -> None:
    """The call, the query up to a line feed, the body. The call's byte also says whether a header names the deployment."""
    control, rest = controlled(data)
    call = CALLS[control % 128 % len(CALLS)]
    query, _, body = rest.partition(b"\n")
    headers = {HEADER_DEPLOYMENT: "d"} if control >= 128 else {}
    server, same = side(Gateway), False
    server.taken.clear()
    try:
        status, answer = server.ask(call, query, body, headers)
        check(status < 500, "a client's bytes are the server's fault", status, answer)
        for url in server.taken:
            path = unquote(urlsplit(url).path)
            check(path.startswith("/srv/bucket/"), "a place outside the bucket", url)
            check(posixpath.normpath(path) == path, "a path that is not plain", path)
        found, pause = server.left()
        if status >= 400:
            check_told(call, body, decoded(answer))
            check(found == [POLICY], "a refusal leaves a policy behind", found, answer)
            check(pause.mode is None, "a refusal leaves a pause behind", pause)
        for policy in found:
            check(policies.NAME.fullmatch(policy), "a name that is none", policy)
        same = status >= 400
    finally:
        if not same:
            server.forget()


def check_told(call: Call, body: bytes, told: Any) -> None:
    if call.path in ("/update_weights_from_disk", "/pull_weights"):
        check(told["success"] is False, "a refusal that is none to SGLang's clients", told)
    # No trainer's group is open.
    in_order = told["error"]["code"] != Conflict.code
    if in_order and call.path not in TRAINER_REFUSED:
        check_refusal(call, body, told)


def seeds() -> Iterator[bytes]:
    numbers = {call.path: number for number, call in enumerate(CALLS) if call.method == "POST"}
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("/pause", "mode=keep&clear_cache=false", {}),
        ("/pause", "wait_for_inflight_requests=true", {}),
        ("/pause", "clear_cache=0", {"mode": "keep", "clear_cache": False}),
        ("/resume", "", {}),
        ("/abort_requests", "", {"request_ids": ["a", "b"]}),
        ("/abort_requests", "", {"request_ids": "a"}),
        ("/update_weights", "", {"weight_dir": "/srv/bucket/step 1", "skip_prefix_cache_reset": True}),
        ("/update_weights", "", {"update_info": {}, "version_uid": None}),
        (
            "/update_weights",
            "",
            {"update_info": {"target_version": 1, "sync_dir": "/srv/bucket/s", "version": 1}},
        ),
        (
            "/pull_weights",
            "",
            {"source_dir": "/srv/bucket/u", "target_version": 1, "local_checkpoint_dir": "/x"},
        ),
        ("/fetch_weights", "", {"uri": f"{BUCKET}/s/delta-00000001", "target_version": 1}),
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
