"""The hot-load API and the deployment resources: Starlette routes over the ledger and the replicas' reports.

Always holds:
- A signal is answered 200 only after it is committed in the ledger; it is refused whole when any part of it is not
  understood. Errors are raised as MidstreamError; the app that mounts the routes turns them into responses.
- What GET says is read off the ledger and the reports at that moment; nothing is cached here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from midstream.control.reconcile import failure, serves
from midstream.errors import (
    InvalidRequest,
    PayloadTooLarge,
    ReplicaUnavailable,
    SnapshotError,
    SnapshotMissing,
    SnapshotRefused,
    UnknownField,
)
from midstream.gateway.registry import Deployment, Deployments
from midstream.gateway.replicas import ReplicaView
from midstream.ledger import DeploymentRow, DeploymentState, Fleet, Ledger, Signal, TransitionRow
from midstream.snapshots.identity import check_identity, snapshot_url
from midstream.snapshots.store import snapshot_fingerprint
from midstream.types import ReplicaReport, ResetPromptCache, Stage

HOT_LOAD_PATH = "/hot_load/v1/models/hot_load"
MAX_BODY_BYTES = 2**20
TRANSITIONS_SHOWN = 1000  # of the ledger, unless asked for more or fewer
TRANSITIONS_SHOWN_MAX = 100_000

#: Stages on the wire, in the order a replica goes through them; also how far from ready one is.
_WIRE_STAGE = {
    Stage.FETCHING: "downloading",
    Stage.REBUILDING: "rebuilding",
    Stage.VERIFYING: "verifying",
    Stage.STAGING: "staging",
    Stage.STAGED: "staged",
    Stage.COMMITTING: "committing",
    Stage.CHECKING: "checking",
}
_READY_ORDER = ("error", "pending", *_WIRE_STAGE.values(), "idle", "done")


class _Validation(msgspec.Struct):
    extra_fields_ignore: list[str] = []


class _Signal(msgspec.Struct):
    identity: str
    reset_prompt_cache: Literal["all", "new_session", "none"] | bool | None = None
    incremental_snapshot_metadata: dict[str, Any] | None = None
    validation: _Validation | None = None


def hotload_routes(ledger: Ledger, deployments: Deployments) -> list[BaseRoute]:
    """Routes for the control app; the ledger has every deployment."""
    api = _Api(ledger, deployments)
    resource = f"/v1/{deployments.default.name}"
    return [
        Route(HOT_LOAD_PATH, api.signal, methods=["POST"]),
        Route(HOT_LOAD_PATH, api.status, methods=["GET"]),
        Route(resource.rpartition("/")[0], api.list_deployments, methods=["GET"]),
        Route("/v1/accounts/{account}/deployments/{name}", api.get_deployment, methods=["GET"]),
        Route("/v1/accounts/{account}/deployments/{name}/ledger", api.get_ledger, methods=["GET"]),
    ]


class _Api:
    def __init__(self, ledger: Ledger, deployments: Deployments) -> None:
        self._ledger = ledger
        self._deployments = deployments

    async def signal(self, request: Request) -> Response:
        deployment = self._deployments.named(request.headers)
        signal = parse_signal(await _body(request))
        row = await self._ledger.deployment(deployment.name)
        url = snapshot_url(row.bucket_url, signal.identity)
        source = request.headers.get("x-fireworks-hot-load-source-url")
        if source is not None and source.rstrip("/") != url:
            raise InvalidRequest(
                f"x-fireworks-hot-load-source-url: only {url} can be loaded as {signal.identity!r} so far",
                param="x-fireworks-hot-load-source-url",
            )
        fingerprint = await _fingerprint(url)
        state = await self._ledger.state(deployment.name)
        reports = [view.report for view in deployment.replicas.views if view.report is not None]
        result = await self._ledger.signal(
            deployment.name,
            Signal(
                identity=signal.identity,
                url=url,
                reset_prompt_cache=reset_policy(signal.reset_prompt_cache),
                fingerprint=fingerprint,
            ),
            Fleet(
                failed_generation=_failed_generation(state, reports),
                generation_floor=max((report.generation for report in reports), default=0),
            ),
        )
        deployment.reconciler.signalled()
        desired = result.desired
        return JSONResponse(
            {
                "identity": desired.snapshot,
                "generation": desired.generation,
                "changed": result.changed,
                "reset_prompt_cache": desired.reset_prompt_cache,
            }
        )

    async def status(self, request: Request) -> Response:
        deployment = self._deployments.named(request.headers)
        state = await self._ledger.state(deployment.name)
        return JSONResponse({"replicas": replica_rows(state, deployment.replicas.views)})

    async def list_deployments(self, request: Request) -> Response:
        rows = [await self._resource(deployment) for deployment in self._deployments]
        return JSONResponse({"deployments": rows, "nextPageToken": "", "totalSize": len(rows)})

    async def get_deployment(self, request: Request) -> Response:
        return JSONResponse(await self._resource(self._deployments.get(self._named(request))))

    async def get_ledger(self, request: Request) -> Response:
        name = self._named(request)
        limit = _limit(request)
        newest = await self._ledger.transitions(name, newest=limit + 1)
        transitions: dict[str, list[TransitionRow]] = {}
        for transition in newest[-limit:]:
            transitions.setdefault(transition.identity, []).append(transition)
        snapshots = [
            {
                "identity": row.identity,
                "kind": row.kind,
                "url": row.url,
                "reset_prompt_cache": row.reset_prompt_cache,
                "first_signalled_at": row.first_signalled_at,
                "signalled_at": row.signalled_at,
                "generation": row.generation,
                "fingerprint": row.fingerprint,
                "ready_at": row.ready_at,
                "transitions": [_transition(moved) for moved in transitions.get(row.identity, ())],
            }
            for row in await self._ledger.snapshots(name)
        ]
        state = await self._ledger.state(name)
        generation = state.desired.generation if state.desired else 0
        return JSONResponse(
            {
                "desired_snapshot_identity": state.snapshot,
                "generation": generation,
                "older_transitions_left_out": len(newest) > limit,
                "snapshots": snapshots,
            }
        )

    async def _resource(self, deployment: Deployment) -> dict[str, Any]:
        row = await self._ledger.deployment(deployment.name)
        return deployment_resource(row, await self._ledger.state(row.name), deployment.replicas.views)

    def _named(self, request: Request) -> str:
        name = f"accounts/{request.path_params['account']}/deployments/{request.path_params['name']}"
        return self._deployments.get(name).name


def parse_signal(body: bytes) -> _Signal:
    """The signal in a request body. Raises InvalidRequest, UnknownField or SnapshotRefused, naming the field."""
    try:
        raw = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    _refuse_unknown(raw, _Signal, "")
    if isinstance(raw.get("validation"), dict):
        _refuse_unknown(raw["validation"], _Validation, "validation.")
    try:
        signal = msgspec.convert(raw, _Signal)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=_at_fault(error)) from error
    check_identity(signal.identity)
    if signal.incremental_snapshot_metadata is not None:
        raise InvalidRequest(
            "incremental snapshots are not supported yet: publish a full snapshot and leave "
            "incremental_snapshot_metadata out",
            param="incremental_snapshot_metadata",
        )
    if signal.validation is not None and signal.validation.extra_fields_ignore:
        raise InvalidRequest(
            "ignoring configuration fields is not supported yet: leave validation out", param="validation"
        )
    return signal


def _refuse_unknown(raw: dict[str, Any], known: type[msgspec.Struct], at: str) -> None:
    for field in raw:
        if field not in known.__struct_fields__:
            raise UnknownField(at + field)


def _at_fault(error: msgspec.ValidationError) -> str | None:
    if "missing required field `identity`" in str(error):
        return "identity"
    _, _, path = str(error).partition("`$.")
    return path.rstrip("`") or None


async def _fingerprint(url: str) -> str:
    """Of the files at `url`, which are there before they are signalled."""
    try:
        return await snapshot_fingerprint(url)
    except SnapshotMissing as error:
        raise SnapshotRefused(f"{error}; write the snapshot, then signal it", param="identity") from error
    except SnapshotError as error:
        raise ReplicaUnavailable(f"the bucket cannot be read now: {error}") from error


def _limit(request: Request) -> int:
    asked = request.query_params.get("limit")
    if asked is None:
        return TRANSITIONS_SHOWN
    if not asked.isascii() or not asked.isdecimal() or not 1 <= int(asked[:10]) <= TRANSITIONS_SHOWN_MAX:
        raise InvalidRequest(
            f"limit: must be a whole number from 1 to {TRANSITIONS_SHOWN_MAX}", param="limit"
        )
    return int(asked)


def _failed_generation(state: DeploymentState, reports: list[ReplicaReport]) -> int | None:
    desired = state.desired
    if desired is None or not any(failure(state, report, desired) for report in reports):
        return None
    return desired.generation


def reset_policy(value: str | bool | None) -> ResetPromptCache:
    """The policy a signal asks for: true is `all`, false is `none`, absent is `all`."""
    match value:
        case "new_session" | "none":
            return value
        case False:
            return "none"
        case _:
            return "all"


def replica_rows(state: DeploymentState, views: tuple[ReplicaView, ...]) -> list[dict[str, Any]]:
    """One row per replica, the least ready first: a client that reads only the first one waits for them all."""
    rows = [(view.index, _replica_row(state, view)) for view in views]
    rows.sort(key=lambda at: (_READY_ORDER.index(at[1]["loading_state"]["stage"]), at[1]["readiness"], at[0]))
    return [row for _, row in rows]


def _replica_row(state: DeploymentState, view: ReplicaView) -> dict[str, Any]:
    report = view.report
    stage, target, error = loading_state(state, report)
    timing = report.last_swap if report else None
    return {
        "current_snapshot_identity": report.snapshot if report else None,
        "readiness": view.usable,
        "loading_state": {"stage": stage, "target_snapshot_identity": target},
        "midstream": {
            "replica": view.name,
            "boot": report.boot if report else None,
            "reachable": report is not None,
            "error": error,
            "generation": report.generation if report else None,
            "last_swap": msgspec.to_builtins(timing) if timing else None,
        },
    }


def loading_state(state: DeploymentState, report: ReplicaReport | None) -> tuple[str, str | None, str | None]:
    """(stage on the wire, its target, error message) of one replica.

    `error` is about the desired snapshot only and stays while that is desired, also when the replica went on to load a
    fallback; `pending` says that the replica has not taken up what is desired.
    """
    desired = state.desired
    if report is None:
        return "pending", desired.snapshot if desired else None, "the replica cannot be reached"
    if desired is not None:
        error = failure(state, report, desired)
        if error is not None:
            return "error", desired.snapshot, error
    if report.stage in _WIRE_STAGE:
        return _WIRE_STAGE[report.stage], report.target, None
    if desired is None:
        return "idle", None, None
    if serves(state, report, desired):
        return "done", desired.snapshot, None
    return "pending", desired.snapshot, None


def deployment_resource(
    row: DeploymentRow, state: DeploymentState, views: tuple[ReplicaView, ...]
) -> dict[str, Any]:
    """A deployment as the API shows it."""
    stages = [loading_state(state, view.report)[0] for view in views]
    ready = sum(view.usable for view in views)
    reachable = sum(view.report is not None for view in views)
    if ready == 0:
        condition, code, message = "CREATING", "UNAVAILABLE", "no replica is ready"
    elif all(stage in ("idle", "done") for stage in stages):
        condition, code, message = "READY", "OK", ""
    elif "error" in stages:
        condition, code, message = "READY", "INTERNAL", f"a replica could not load {state.snapshot}"
    else:
        condition, code, message = "UPDATING", "OK", ""
    return {
        "name": row.name,
        "baseModel": row.model,
        "state": condition,
        "status": {"code": code, "message": message},
        "enableHotLoad": True,
        "hotLoadBucketType": row.bucket_url.partition(":")[0].upper(),
        "hotLoadBucketUrl": row.bucket_url,
        "hotLoadTransitionType": row.transition,
        "minReplicaCount": len(views),
        "maxReplicaCount": len(views),
        "desiredReplicaCount": len(views),
        "replicaCount": reachable,
        "replicaStats": {
            "pendingSchedulingReplicaCount": len(views) - reachable,
            "downloadingModelReplicaCount": stages.count("downloading"),
            "initializingReplicaCount": reachable - ready,
            "readyReplicaCount": ready,
        },
    }


def _transition(row: TransitionRow) -> dict[str, Any]:
    return {
        "replica": row.replica,
        "boot": row.boot,
        "seq": row.seq,
        "generation": row.generation,
        "stage": row.stage.value,
        "at": row.at,
        "error": row.detail or None,
    }


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"the body must be at most {MAX_BODY_BYTES} bytes")
    return bytes(body)
