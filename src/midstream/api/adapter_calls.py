"""The calls by which clients of vLLM load and unload LoRA adapters, and prime-rl's: each adapter is a policy of its name.

Owns: those paths' requests and responses (docs/policies.md). What loading does is a signal's for a policy (updates.py).
Always holds:
- A load is answered once every replica serves the adapter. One that fails leaves no policy that was not there before, unless
  another call has given it a snapshot meanwhile.
- An unload is answered once no replica has the adapter, so that its name can be used again.
- A name that is loaded is not loaded again, unless the client says that it may be.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from midstream.api.answers import Done
from midstream.api.policies import PoliciesApi
from midstream.api.updates import Update, Updates, only
from midstream.core.endpoints import PLAIN_TEXT, Endpoint
from midstream.core.errors import InvalidRequest, MidstreamError, NotFound, SnapshotMissing
from midstream.core.scopes import SIGNAL
from midstream.core.served_names import names_of
from midstream.core.types import Desired
from midstream.fleet.registry import Deployment, Deployments

INSTEAD = "write the adapter into the deployment's bucket, or one of gateway.allowed_buckets, and name its directory"


class LoadAdapter(msgspec.Struct, frozen=True):
    """is_3d_lora_weight: how the tensors of experts lie, which is seen in the file."""

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool | None = None


class UnloadAdapter(msgspec.Struct, frozen=True):
    """lora_int_id: of older clients; it means nothing here."""

    lora_name: str = ""
    lora_int_id: Any = None


class AdapterLoader:
    """Loads adapters as policies, whatever API asks for it."""

    def __init__(self, deployments: Deployments, policies: PoliciesApi, updates: Updates) -> None:
        self._deployments = deployments
        self._policies = policies
        self._updates = updates

    def known(self, deployment: Deployment, name: str) -> Deployment | None:
        found = self._deployments.known(names_of(deployment.names, name).deployment)
        return None if found is None or found.deleting else found

    async def load(
        self, request: Request, deployment: Deployment, name: str, update: Update, param: str
    ) -> Deployment:
        """The policy, once every replica serves it. One that fails and was not there before is gone again.

        param: the field that names it. Raises NotFound when nothing lies at the place, and MidstreamError.
        """
        known = self.known(deployment, name)
        try:
            policy = await self._policies.ready(request, deployment, name)
        except MidstreamError as error:
            _rename(error, param)
            raise
        desired: Desired | None = None
        try:
            desired = await self._updates.run(request, policy, update, INSTEAD, waits=False)
            await self._updates.served(policy, desired)
        except MidstreamError as error:
            if known is None and await self._policies.is_as_left(policy, desired):
                await self._policies.unload(policy)
            if isinstance(error.__cause__, SnapshotMissing):
                why = error.message.removeprefix(f"{update.param}: ")
                reason = f"{update.param}: no adapter is there: {why}"
                raise NotFound(reason, param=update.param) from error
            raise
        return policy


class AdapterCallsApi:
    def __init__(self, deployments: Deployments, policies: PoliciesApi, adapters: AdapterLoader) -> None:
        self._deployments = deployments
        self._policies = policies
        self._adapters = adapters

    @Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        SIGNAL,
        "Loads a LoRA adapter as a policy, as vLLM does.",
        kinds=PLAIN_TEXT,
    )
    async def load(self, request: Request, body: LoadAdapter) -> Response:
        deployment = only(self._deployments, request)
        await self._load(request, deployment, body, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @Endpoint("POST", "/load_lora_adapter", SIGNAL, "Loads a LoRA adapter in place, as prime-rl asks for it.")
    async def load_in_place(self, request: Request, body: LoadAdapter) -> Done:
        """prime-rl loads each step's adapter under one name."""
        await self._load(request, only(self._deployments, request), body, in_place=True)
        return Done("ok")

    @Endpoint(
        "POST", "/v1/unload_lora_adapter", SIGNAL, "Unloads a LoRA adapter, as vLLM does.", kinds=PLAIN_TEXT
    )
    async def unload(self, request: Request, body: UnloadAdapter) -> Response:
        deployment = only(self._deployments, request)
        if not body.lora_name:
            raise InvalidRequest(
                "'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name"
            )
        policy = await self._policies.found(deployment, body.lora_name)
        if policy is None or policy.deleting:
            raise NotFound(f"The lora adapter '{body.lora_name}' cannot be found.", param="lora_name")
        await self._policies.unload(policy)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _load(
        self, request: Request, deployment: Deployment, body: LoadAdapter, *, in_place: bool
    ) -> None:
        name = body.lora_name
        if not name or not body.lora_path:
            absent = "lora_path" if name else "lora_name"
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.", param=absent)
        known = self._adapters.known(deployment, name)
        if known is not None and not in_place and known.served:
            raise InvalidRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
                " 'load_inplace' to True.",
                param="lora_name",
            )
        update = Update(body.lora_path, "lora_path", reset=True)
        await self._adapters.load(request, deployment, name, update, "lora_name")


def _rename(error: MidstreamError, param: str) -> None:
    """Make an error about a policy's name be about the client's own field."""
    if error.param == "policy":
        error.param = param
        error.message = f"{param}{error.message.removeprefix('policy')}"
        error.args = (error.message,)
