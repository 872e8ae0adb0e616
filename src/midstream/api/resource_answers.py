"""What the control app answers of resources: deployments, replicas, the account, policies and add-ons. Pure.

Owns: the fields of those answers, as answers.py does of the others.
Always holds: a field is in every answer unless its type has UnsetType. Null is only where the type has None.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from midstream.api.answers import HotLoadRow
from midstream.api.resource import DeploymentBody
from midstream.fleet.view import Standing


class Nothing(msgspec.Struct):
    """An empty object: it is done."""


# -- Deployments, replicas, the account


class Status(msgspec.Struct):
    """message: empty where all is well."""

    code: Literal["OK", "UNAVAILABLE", "INTERNAL", "FAILED_PRECONDITION"]
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
    status: Status
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
Deployment = msgspec.defstruct(
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
Deployments = msgspec.defstruct(
    "Deployments",
    [("deployments", list[Deployment]), ("nextPageToken", str), ("totalSize", int)],  # type: ignore[valid-type]
    namespace={"__doc__": "nextPageToken: empty on the last page."},
)


class Replica(msgspec.Struct):
    """weight: its part of new work; null: 1. drain: it takes no new requests. in_flight: requests. snapshot: the one that
    serves; null while it cannot be reached."""

    name: str
    url: str
    weight: float | None
    drain: bool
    standing: Standing
    usable: bool
    in_flight: int
    snapshot: str | None


class Replicas(msgspec.Struct):
    replicas: list[Replica]


class Account(msgspec.Struct):
    name: str
    displayName: str
    state: Literal["READY"]
    email: str


class Accounts(msgspec.Struct):
    accounts: list[Account]
    nextPageToken: str
    totalSize: int


class AccountModel(msgspec.Struct):
    name: str
    displayName: str
    kind: Literal["HF_PEFT_ADDON", "HF_BASE_MODEL"]
    state: Literal["READY"]
    status: Status


class AccountModels(msgspec.Struct):
    models: list[AccountModel]
    nextPageToken: str
    totalSize: int


# -- Policies and add-ons


class Policy(msgspec.Struct):
    """snapshot: null before its first signal. bytes: of the snapshot's own files; null: not known. unloaded: the replicas that
    are not to hold it. replicas: as in a hot load's status."""

    name: str
    policy: str
    model: str
    state: Literal["READY", "DELETING"]
    frozen: bool
    snapshot: str | None
    generation: int
    bytes: int | None
    replicas: list[HotLoadRow]
    unloaded: list[str]


class Policies(msgspec.Struct):
    policies: list[Policy]
    nextPageToken: str
    totalSize: int


class PolicyEnding(msgspec.Struct):
    name: str


class DeployedModel(msgspec.Struct):
    """An add-on. Times are in RFC 3339."""

    name: str
    model: str
    deployment: str
    default: bool
    public: bool
    serverless: bool
    state: Literal["DEPLOYING", "DEPLOYED", "UNDEPLOYING"]
    status: Status
    createTime: str
    updateTime: str
    displayName: str | UnsetType = UNSET
    description: str | UnsetType = UNSET


class DeployedModels(msgspec.Struct):
    """nextPageToken: empty on the last page."""

    deployedModels: list[DeployedModel]
    nextPageToken: str
    totalSize: int
