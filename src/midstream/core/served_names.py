"""Resource names of what is served, and which of them a request may use. Pure.

Always holds: a name is compared whole; a snapshot is named by the part after the first `@`.
"""

from __future__ import annotations

import msgspec

from midstream.core.config import Settings
from midstream.core.errors import InvalidRequest, NotFound
from midstream.core.headers import HEADER_MODEL

#: In the full name of a policy, between its deployment's name and its own.
POLICY_INFIX = "/policies/"


def model_resource(settings: Settings, model_name: str) -> str:
    return f"accounts/{settings.account}/models/{model_name}"


def deployment_resource(settings: Settings) -> str:
    return f"accounts/{settings.account}/deployments/{settings.deployment.name}"


def served_model_name(model: str, snapshot: str) -> str:
    """`accounts/A/models/M@identity`, the `model` field of every response."""
    return f"{model}@{snapshot}"


def split_model(name: str) -> tuple[str, str, str | None]:
    """(resource, deployment, snapshot) of what a client calls a model: RESOURCE, and #DEPLOYMENT and @SNAPSHOT behind it."""
    named, at, snapshot = name.partition("@")
    resource, _, deployment = named.partition("#")
    return resource, deployment, snapshot if at else None


class ServedNames(msgspec.Struct, frozen=True):
    """The one model and deployment behind a gateway or a replica."""

    # accounts/A/models/M
    model: str
    # accounts/A/deployments/D
    deployment: str

    @property
    def account(self) -> str:
        return "/".join(self.model.split("/")[:2])

    def accepted(self) -> frozenset[str]:
        """What a client may call the deployment or its model, less an @snapshot: both names, in full and bare."""
        resources = (self.model, self.deployment)
        return frozenset(resources) | {resource.rpartition("/")[2] for resource in resources}

    def is_on(self, deployment: str) -> bool:
        """True if it is the deployment of this name, in full or bare, or one of its policies."""
        own = self.deployment.partition(POLICY_INFIX)[0]
        return deployment in (own, own.rpartition("/")[2])

    def split(self, name: str) -> str | None:
        """The snapshot a request's `model` asks for by `@snapshot`, None if any will do. Raises NotFound."""
        resource, deployment, snapshot = split_model(name)
        if resource not in self.accepted() or (deployment and not self.is_on(deployment)):
            raise NotFound(f"model {name!r} is not served here; this server has {self.model}", param="model")
        return snapshot

    def wanted(self, model: str, header: str = "") -> str | None:
        """The snapshot that a request asks for by name, in its body's `model` or else in the header `fireworks-model`.

        None if any will do. Raises NotFound, and InvalidRequest for an empty one.
        """
        wanted, param = self.split(model), "model"
        if wanted is None and "@" in header:
            wanted, param = self.split(header), HEADER_MODEL
        if wanted == "":
            raise InvalidRequest(f"{param}: the snapshot named after @ must not be empty", param=param)
        return wanted


def names_of(deployment: ServedNames, policy: str) -> ServedNames:
    """What a policy is called: as a model, and as a part of its deployment."""
    return ServedNames(
        f"{deployment.account}/models/{policy}", f"{deployment.deployment}{POLICY_INFIX}{policy}"
    )


def split_name(name: str) -> tuple[str, str]:
    """(deployment, policy) of a row's name; the policy is "" for a deployment's own row."""
    deployment, _, policy = name.partition(POLICY_INFIX)
    return deployment, policy
