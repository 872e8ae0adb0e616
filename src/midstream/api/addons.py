"""Fireworks' deployed models: LoRA add-ons that are loaded onto a deployment. Each is a policy of the name of its model.

Owns: `/v1/accounts/A/deployedModels` (docs/fireworks.md). What loading does is a signal's for a policy (updates.py).
Always holds:
- An add-on's files lie in its deployment's bucket, named as its model. A load is answered once every replica serves it.
- `replaceMergedAddon` ends the add-ons that were loaded here before, once the new one is served, and no other policy.
- What this server cannot do is refused by the name of its field. A key sees and changes what is on its deployments.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from midstream.api.adapter_calls import AdapterLoader
from midstream.api.deployments import PAGE_ROWS, PAGE_ROWS_MAX
from midstream.api.policies import PoliciesApi
from midstream.api.resource import Condition, timestamp
from midstream.api.resource_answers import DeployedModel, DeployedModels
from midstream.api.status import SERVED_STAGES, replica_rows
from midstream.api.updates import Update
from midstream.core.endpoints import PAGE_AFTER, PAGE_SIZE, Endpoint, Nothing, flag, text
from midstream.core.errors import Conflict, InvalidRequest, NotFound
from midstream.core.scopes import OBSERVE, PUBLISH, ScopeNeed
from midstream.fleet.access import grant_of, meant
from midstream.fleet.registry import Deployment, Deployments
from midstream.http.bodies import asked_page, page_of
from midstream.ledger import DeploymentRow, DeploymentState, Ledger

COLLECTION = "/v1/accounts/{account}/deployedModels"
REPLACE = "replaceMergedAddon"
_ONE = COLLECTION + "/{model}"
#: Their deployments are named in bodies, or follow from the add-on.
_READ, _PUBLISH = ScopeNeed((PUBLISH, OBSERVE), "some"), ScopeNeed((PUBLISH,), "some")
#: Field of the row of a policy that was loaded here.
_ADDON = "_addon"
_TEXTS = ("displayName", "description")


class DeployedModelBody(msgspec.Struct, frozen=True):
    """The resource's fields. What the server says alone is passed over: a client may send back what it got."""

    model: str | None = None
    deployment: str | None = None
    displayName: str | None = None
    description: str | None = None
    default: bool | None = None
    public: bool | None = None
    serverless: bool | None = None
    name: Any = None
    state: Any = None
    status: Any = None
    createTime: Any = None
    updateTime: Any = None

    def check(self) -> None:
        for field, served in (("default", True), ("public", False), ("serverless", False)):
            if getattr(self, field) not in (None, served):
                raise InvalidRequest(f"{field}: is {str(served).lower()} for every add-on here", param=field)

    @property
    def texts(self) -> dict[str, str]:
        return {name: text for name in _TEXTS if (text := getattr(self, name)) is not None}


class AddonsApi:
    def __init__(
        self, ledger: Ledger, deployments: Deployments, policies: PoliciesApi, adapters: AdapterLoader
    ) -> None:
        self._ledger = ledger
        self._deployments = deployments
        self._policies = policies
        self._adapters = adapters

    @Endpoint(
        "POST",
        COLLECTION,
        _PUBLISH,
        "Loads a LoRA add-on onto a deployment, as a policy of its name.",
        (flag(REPLACE, "It takes the place of the add-ons that were loaded before."),),
    )
    async def load(self, request: Request, body: DeployedModelBody) -> DeployedModel:
        deployment = self._deployment(request, body.deployment)
        self._check_account(request)
        body.check()
        replaces = request.query_params.get(REPLACE, "false").lower()
        if replaces not in ("true", "false"):
            raise InvalidRequest(f"{REPLACE}: must be true or false", param=REPLACE)
        name = self._name(body.model)
        if replaces == "false" and self._adapters.known(deployment, name) is not None:
            raise Conflict(
                f"model: {name!r} is loaded already; unload it first, or set {REPLACE}", param="model"
            )
        bucket = (await self._ledger.deployment(deployment.name)).bucket_url.rstrip("/")
        update = Update(f"{bucket}/{name}", "model", reset=True)
        policy = await self._adapters.load(request, deployment, name, update, "model")
        row = await self._ledger.update_deployment(policy.name, fields={_ADDON: True, **body.texts})
        if replaces == "true":
            await self._end_others(policy)
        return await self._shown(policy, row)

    @Endpoint(
        "GET",
        COLLECTION,
        _READ,
        "Lists the add-ons that are loaded.",
        (
            PAGE_SIZE,
            PAGE_AFTER,
            text("filter", "Refused: all are listed."),
            text("orderBy", "Refused: they are listed by name."),
        ),
    )
    async def list(self, request: Request) -> DeployedModels:
        """The add-ons in the order of their names. A page's token is the last name on it."""
        self._check_account(request)
        for field in ("filter", "orderBy"):
            if request.query_params.get(field):
                raise InvalidRequest(f"{field}: is not served here; all are listed by name", param=field)
        # Another gateway may have loaded some.
        await self._policies.look()
        grant = grant_of(request)
        found = {
            policy.policy: policy
            for of in self._deployments
            if grant.allows((PUBLISH, OBSERVE), of.name)
            for policy in self._deployments.policies(of)
        }
        after, size = asked_page(request, PAGE_ROWS, PAGE_ROWS_MAX)
        names, token = page_of(found, after, size)
        page = {found[name].name: found[name] for name in names}
        shown = [_shown(page[row.name], row, state) for row, state in await self._ledger.listed([*page])]
        return DeployedModels(shown, token, len(found))

    @Endpoint("GET", _ONE, _READ, "Shows an add-on.")
    async def get(self, request: Request) -> DeployedModel:
        policy = await self._one(request, (PUBLISH, OBSERVE))
        return await self._shown(policy, await self._ledger.deployment(policy.name))

    @Endpoint("PATCH", _ONE, _PUBLISH, "Changes the texts that describe an add-on.")
    async def patch(self, request: Request, body: DeployedModelBody) -> DeployedModel:
        """Changes the texts of the add-on. It stays loaded where it is."""
        policy = await self._one(request, (PUBLISH,))
        body.check()
        if body.model is not None and self._name(body.model) != policy.policy:
            raise InvalidRequest("model: cannot be changed; load the other one", param="model")
        if body.deployment is not None and self._deployment(request, body.deployment) is not policy.host:
            raise InvalidRequest("deployment: cannot be changed; load the model there", param="deployment")
        row = await self._ledger.update_deployment(policy.name, fields=body.texts)
        return await self._shown(policy, row)

    @Endpoint("DELETE", _ONE, _PUBLISH, "Unloads an add-on.")
    async def unload(self, request: Request) -> Nothing:
        await self._policies.unload(await self._one(request, (PUBLISH,)))
        return Nothing()

    # -- inside

    async def _end_others(self, policy: Deployment) -> None:
        await self._policies.look()
        others = {p.name: p for p in self._deployments.policies(policy.host) if p is not policy}
        for row, _ in await self._ledger.listed(list(others)):
            if row.fields.get(_ADDON):
                await self._policies.end(others[row.name])

    def _deployment(self, request: Request, name: str | None) -> Deployment:
        """The one that the body names, else the default one. Raises Forbidden, NotFound, InvalidRequest."""

        def find() -> Deployment:
            if name is None:
                return self._deployments.default
            found = self._deployments.find(name, param="deployment")
            if found.policy:
                raise NotFound(f"there is no deployment {name!r}", param="deployment")
            return found

        return meant(grant_of(request), (PUBLISH,), find, name, None)

    async def _one(self, request: Request, scopes: tuple[str, ...]) -> Deployment:
        name = request.path_params["model"]

        def known() -> list[Deployment]:
            return [one for one in self._deployments.called(name) if one.policy == name]

        if not known():
            for deployment in list(self._deployments):
                # Another gateway may have loaded it.
                await self._policies.found(deployment, name)

        def find() -> Deployment:
            self._check_account(request)
            found = known()
            if not found:
                raise self._deployments.missing(f"there is no deployed model {name!r}", "model")
            return found[0]

        return meant(grant_of(request), scopes, find, None, name)

    def _check_account(self, request: Request) -> None:
        if f"accounts/{request.path_params['account']}" != self._deployments.default.names.account:
            raise NotFound(f"there is no account {request.path_params['account']!r}", param="account")

    def _name(self, model: str | None) -> str:
        """The bare name of a model. Raises InvalidRequest."""
        if not model:
            raise InvalidRequest("model: name the add-on's model", param="model")
        return model.removeprefix(f"{self._deployments.default.names.account}/models/")

    async def _shown(self, policy: Deployment, row: DeploymentRow) -> DeployedModel:
        return _shown(policy, row, await self._ledger.state(row.name))


def _shown(policy: Deployment, row: DeploymentRow, state: DeploymentState) -> DeployedModel:
    rows = replica_rows(state, policy)
    errors = [row.midstream.error for row in rows if row.loading_state.stage == "error"]
    loaded = bool(rows) and all(row.loading_state.stage in SERVED_STAGES for row in rows)
    return DeployedModel(
        name=f"{policy.names.account}/deployedModels/{policy.policy}",
        model=policy.model,
        deployment=policy.host.name,
        default=True,
        public=False,
        serverless=False,
        state="UNDEPLOYING" if row.deleting else "DEPLOYED" if loaded else "DEPLOYING",
        status=Condition("FAILED_PRECONDITION" if errors else "OK", (*errors, "")[0] or ""),
        createTime=timestamp(row.created_at),
        updateTime=timestamp(row.updated_at),
        **{name: row.fields[name] for name in _TEXTS if name in row.fields},
    )
