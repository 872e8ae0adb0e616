"""The Deployment resource as JSON: which fields a request may have, and how an answer shows one. Pure.

Always holds: a field that is not of the API, and a value that its field cannot have, is refused by the field's name. A field
of the API without a meaning here is stored and shown again as it was given. Stored names that begin with `_` are ours and not
shown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from midstream.core.errors import InvalidRequest, UnknownField
from midstream.core.types import TransitionType
from midstream.fleet.desired_state import replica_count
from midstream.fleet.registry import Deployment
from midstream.http.bodies import json_object
from midstream.ledger import DeploymentRow

REPLICAS_MAX = 1024
_Count = Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Texts = dict[str, str]
_Object = dict[str, Any]

#: What a request may say, by the API's names. Of the stored ones only the type is checked.
_MEANT: Mapping[str, Any] = {
    "baseModel": str,
    "displayName": Annotated[str, msgspec.Meta(max_length=63)],
    "description": Annotated[str, msgspec.Meta(max_length=4096)],
    "enableHotLoad": bool,
    "hotLoadBucketType": Literal["FW_HOSTED", "S3", "MINIO", "NEBIUS"],
    "hotLoadBucketUrl": Annotated[str, msgspec.Meta(max_length=2048)],
    "hotLoadTransitionType": Literal["ASYNC", "SYNC"],
    "minReplicaCount": _Count,
    "maxReplicaCount": _Count,
    # This server's own.
    "unknownFields": Literal["REFUSE", "IGNORE"],
}
_STORED: Mapping[str, Any] = {
    **dict.fromkeys(("hotLoadTrainerJob", "acceleratorType", "deploymentShape", "deploymentTemplate"), str),
    **dict.fromkeys(("activeModelVersion", "targetModelVersion", "draftModel", "directRouteType"), str),
    **dict.fromkeys(("expireTime", "precision", "pricingPlanId", "region"), str),
    **dict.fromkeys(("annotations", "extraValues"), _Texts),
    **dict.fromkeys(("placement", "autoscalingPolicy", "autoTune"), _Object),
    **dict.fromkeys(("extraArgs",), list[str]),
    **dict.fromkeys(("acceleratorCount", "draftTokenCount", "ngramSpeculationLength"), _Number),
    **dict.fromkeys(("maxContextLength", "maxWithRevocableReplicaCount"), _Number),
    **dict.fromkeys(("forTraining", "preemptible", "enableAddons", "enableHotReloadLatestAddon"), bool),
    **dict.fromkeys(("enableMtp", "enableSessionAffinity", "disableDeploymentSizeValidation"), bool),
}
_FIELDS = {**_MEANT, **_STORED}
#: Said by the server only. In a body they are passed over: a client may send back what it got.
_OUTPUT = {"name", "state", "status", "replicaCount", "desiredReplicaCount", "replicaStats"} | {
    *("createTime", "updateTime", "deleteTime", "createdBy")
}
# A secret, which has no place in the ledger.
_UNNAMEABLE = "directRouteApiKeys"
#: A request's body as a type. parse_body reads one field by field, for the sake of its errors.
DeploymentBody = msgspec.defstruct(
    "DeploymentBody",
    [
        *((name, kind | None, None) for name, kind in _FIELDS.items()),
        *((name, Any, None) for name in sorted(_OUTPUT)),
    ],
    kw_only=True,
    namespace={"__doc__": "Null says nothing. What only the server says, such as `name`, is passed over."},
)
StatusCode = Literal["OK", "UNAVAILABLE", "INTERNAL", "FAILED_PRECONDITION"]


class Condition(msgspec.Struct):
    """message: empty where all is well."""

    code: StatusCode
    message: str


class ReplicaStats(msgspec.Struct):
    pendingSchedulingReplicaCount: int
    downloadingModelReplicaCount: int
    initializingReplicaCount: int
    readyReplicaCount: int


class _DeploymentSaid(msgspec.Struct, kw_only=True):
    name: str
    displayName: str
    description: str
    baseModel: str
    state: Literal["CREATING", "UPDATING", "READY", "FAILED", "DELETING"]
    status: Condition
    enableHotLoad: bool
    hotLoadBucketType: Literal["FW_HOSTED", "S3", "MINIO", "NEBIUS"]
    hotLoadBucketUrl: str
    hotLoadTransitionType: Literal["ASYNC", "SYNC"]
    minReplicaCount: int
    maxReplicaCount: int
    desiredReplicaCount: int
    replicaCount: int
    replicaStats: ReplicaStats
    createTime: str
    updateTime: str


_SAID = {field.name for field in msgspec.structs.fields(_DeploymentSaid)}
#: What only Fireworks' server says, and this one never.
_UNSAID = {"deleteTime", "createdBy"}
DeploymentShown = msgspec.defstruct(
    "Deployment",
    [
        (field.name, field.type | UnsetType, UNSET)
        for field in msgspec.structs.fields(DeploymentBody)
        if field.name not in _SAID | _UNSAID
    ],
    bases=(_DeploymentSaid,),
    kw_only=True,
    namespace={
        "__doc__": "Times are in RFC 3339. A field that was never given is absent. replicaCount: those that can be reached."
    },
)
DeploymentsShown = msgspec.defstruct(
    "Deployments",
    [("deployments", list[DeploymentShown]), ("nextPageToken", str), ("totalSize", int)],  # type: ignore[valid-type]
    namespace={"__doc__": "nextPageToken: empty on the last page."},
)


_DEFAULTS: Mapping[str, Any] = {"minReplicaCount": 0, "maxReplicaCount": 1, "enableHotLoad": True}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def parse_body(body: bytes) -> dict[str, Any]:
    """What a request says of a deployment, by the API's names; null and X_UNSPECIFIED say nothing. Raises InvalidRequest."""
    raw = json_object(body or b"{}")
    if _UNNAMEABLE in raw:
        raise InvalidRequest(f"{_UNNAMEABLE}: keys are set in the server's settings", param=_UNNAMEABLE)
    given: dict[str, Any] = {}
    for name, value in raw.items():
        if name in _OUTPUT or value is None:
            continue
        if name not in _FIELDS:
            raise UnknownField(name)
        if isinstance(value, str) and value.endswith("_UNSPECIFIED"):
            continue
        try:
            given[name] = msgspec.convert(value, _FIELDS[name])
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{name}: {error}", param=name) from error
    return given


def check_id(deployment_id: str) -> None:
    """Raises InvalidRequest unless it can be the last part of a deployment's name."""
    if not _ID.fullmatch(deployment_id):
        raise InvalidRequest(
            "deploymentId: expected letters, digits, '.', '_' and '-', at most 63, the first a letter or digit",
            param="deploymentId",
        )


def mask_of(update_mask: str | None, given: Mapping[str, Any]) -> list[str]:
    """The fields that a PATCH changes, by the API's names: those of its mask, or those it gives when it has none.

    Raises InvalidRequest on a path that is no field that can be changed.
    """
    paths = [path.strip() for path in (update_mask or "*").split(",") if path.strip()]
    fields: list[str] = []
    for path in paths:
        if path == "*":
            fields += given
            continue
        field = _camel(path)
        if field not in _FIELDS:
            raise InvalidRequest(
                f"updateMask: {path!r} is no field of a deployment that can be changed", param="updateMask"
            )
        fields.append(field)
    return list(dict.fromkeys(fields))


def counts(given: Mapping[str, Any], fields: Collection[str], now: tuple[int, int] | None) -> tuple[int, int]:
    """(min, max) replicas after a request; `now`: before it, None for a new deployment. Raises InvalidRequest.

    A least number alone takes the greatest along, when that would be below it.
    """
    before = now or (_DEFAULTS["minReplicaCount"], _DEFAULTS["maxReplicaCount"])
    least = given.get("minReplicaCount", 0) if "minReplicaCount" in fields else before[0]
    most = given.get("maxReplicaCount", 1) if "maxReplicaCount" in fields else before[1]
    if least > most:
        if "maxReplicaCount" not in fields:
            most = least
        elif "minReplicaCount" not in fields:
            least = most
        else:
            raise InvalidRequest(
                f"minReplicaCount: must be at most maxReplicaCount, got {least} and {most}",
                param="minReplicaCount",
            )
    return least, most


def transition_of(given: Mapping[str, Any]) -> TransitionType:
    return "SYNC" if given.get("hotLoadTransitionType") == "SYNC" else "ASYNC"


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True):
    """The number of replicas that a `:scale` asks for."""

    replica_count: _Count = msgspec.field(name="replicaCount")

    @classmethod
    def read(cls, body: bytes) -> ScaleBody:
        """Raises InvalidRequest."""
        try:
            return msgspec.convert(json_object(body), cls)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"replicaCount: {error}", param="replicaCount") from error


def stored(given: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """What goes into the ledger as it is; None: to be removed."""
    elsewhere = (
        "baseModel",
        "hotLoadBucketUrl",
        "hotLoadTransitionType",
        "minReplicaCount",
        "maxReplicaCount",
    )
    return {name: given.get(name) for name in fields if name not in elsewhere}


def shown(
    row: DeploymentRow, deployment: Deployment | None, stages: Collection[str], error: str | None
) -> msgspec.Struct:
    """A deployment as the API shows it, a DeploymentShown.

    deployment: None when this gateway has not taken it up yet. stages: of its replicas, on the wire. error: what the last
    snapshot failed with somewhere.
    """
    views = () if deployment is None else deployment.replicas.views
    wanted = replica_count(row) if deployment is None else deployment.wanted_in_all
    ready = sum(view.usable for view in views)
    reachable = sum(view.report is not None for view in views)
    state, code, message = _condition(row, deployment, stages, error)
    bucket_type = row.fields.get("hotLoadBucketType")
    # A later version may have stored others.
    known = DeploymentShown.__struct_fields__
    given = {name: value for name, value in row.fields.items() if name in known}
    own = {
        "name": row.name,
        "baseModel": row.model,
        "state": state,
        "status": Condition(code, message),
        "hotLoadBucketType": bucket_type or ("S3" if row.bucket_url.startswith("s3") else "FW_HOSTED"),
        "hotLoadBucketUrl": row.bucket_url,
        "hotLoadTransitionType": row.transition,
        "minReplicaCount": row.replicas_min,
        "maxReplicaCount": row.replicas_max,
        "desiredReplicaCount": wanted,
        "replicaCount": reachable,
        "replicaStats": ReplicaStats(
            pendingSchedulingReplicaCount=max(0, wanted - reachable),
            downloadingModelReplicaCount=sum(stage == "downloading" for stage in stages),
            initializingReplicaCount=reachable - ready,
            readyReplicaCount=ready,
        ),
        "createTime": timestamp(row.created_at),
        "updateTime": timestamp(row.updated_at),
    }
    return DeploymentShown(**{"displayName": "", "description": "", "enableHotLoad": True} | given | own)


def _condition(
    row: DeploymentRow, deployment: Deployment | None, stages: Collection[str], error: str | None
) -> tuple[str, StatusCode, str]:
    """(state, status code, message)"""
    wanted = replica_count(row) if deployment is None else deployment.wanted_in_all
    if row.deleting:
        return "DELETING", "OK", ""
    if deployment is None:
        return "CREATING", "UNAVAILABLE", "no replica is ready"
    replicas = deployment.replicas
    ready = sum(view.usable for view in replicas.views)
    troubles = sorted(deployment.troubles.items())
    problem = "; ".join(why if why.startswith(f"{name}: ") else f"{name}: {why}" for name, why in troubles)
    if ready == 0 and wanted:
        return (
            ("FAILED", "INTERNAL", problem) if problem else ("CREATING", "UNAVAILABLE", "no replica is ready")
        )
    if problem:
        return "UPDATING", "INTERNAL", problem
    if ready != wanted or replicas.leaving or len(replicas.views) != wanted:
        return "UPDATING", "OK", f"{ready} of {wanted} replicas are ready"
    if error is not None:
        return "READY", "INTERNAL", error
    if not all(stage in ("idle", "done") for stage in stages):
        return "UPDATING", "OK", ""
    return "READY", "OK", "" if wanted else "it has no replicas: none are asked for"


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _camel(path: str) -> str:
    first, *rest = path.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)
