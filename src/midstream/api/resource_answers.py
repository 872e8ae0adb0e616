"""What the control app answers of the account, policies and add-ons. Pure.

Owns: the fields of those answers, as answers.py does of the others.
Always holds: a field is in every answer unless its type has UnsetType. Null is only where the type has None.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from midstream.api.answers import HotLoadRow
from midstream.api.resource import Condition

# -- The account


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
    status: Condition


class AccountModels(msgspec.Struct):
    models: list[AccountModel]
    nextPageToken: str
    totalSize: int


# -- Policies and add-ons


class Policy(msgspec.Struct):
    """snapshot: null before its first signal. bytes: of the snapshot's own files; null: not known. unloaded: the replicas that
    are not to hold it. waits_for: the replicas that its end waits for, as they do not report. replicas: as in a hot load's
    status."""

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
    waits_for: list[str]


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
    status: Condition
    createTime: str
    updateTime: str
    displayName: str | UnsetType = UNSET
    description: str | UnsetType = UNSET


class DeployedModels(msgspec.Struct):
    """nextPageToken: empty on the last page."""

    deployedModels: list[DeployedModel]
    nextPageToken: str
    totalSize: int
