"""Resource names of what is served, and which of them a request may use. Pure.

Always holds: a name is compared whole; a snapshot is named by the part after the first `@`.
"""

from __future__ import annotations

import msgspec

from midstream.core.errors import InvalidRequest, NotFound

HEADER_MODEL = "fireworks-model"


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

    def split(self, name: str) -> str | None:
        """The snapshot a request's `model` asks for by `@snapshot`, None if any will do. Raises NotFound."""
        resource, at, snapshot = name.partition("@")
        if resource not in self.accepted():
            raise NotFound(f"model {name!r} is not served here; this server has {self.model}", param="model")
        return snapshot if at else None

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
