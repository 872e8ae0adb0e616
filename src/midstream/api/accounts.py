"""The account and its models as Fireworks' control plane shows them: `/v1/accounts`, an account, its models, one model.

Always holds: there is one account, the server's; a model is listed once, whether it is deployed or only can be. A key that is
not for every deployment sees only the models of those that it may use. Read only.
"""

from __future__ import annotations

from starlette.requests import Request

from midstream.api.resource import Condition
from midstream.api.resource_answers import Account, AccountModel, AccountModels, Accounts
from midstream.core.endpoints import Endpoint
from midstream.core.errors import NotFound
from midstream.core.scopes import ANY, SCOPES, forbidden
from midstream.fleet.access import grant_of, shown_only
from midstream.fleet.registry import Deployments


class AccountsApi:
    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments

    @Endpoint("GET", "/v1/accounts", ANY, "Lists the server's one account.")
    async def accounts(self, request: Request) -> Accounts:
        return Accounts([self._account()], "", 1)

    @Endpoint("GET", "/v1/accounts/{account}", ANY, "Shows the account.")
    async def account(self, request: Request) -> Account:
        self._check_account(request)
        return self._account()

    @Endpoint(
        "GET", "/v1/accounts/{account}/models", ANY, "Lists the models that are deployed or can be deployed."
    )
    async def models(self, request: Request) -> AccountModels:
        self._check_account(request)
        names = self._names(request)
        adapters = {policy.model for policy in self._deployments.policies()}
        models = [self._model(name, adapter=name in adapters) for name in names]
        return AccountModels(models, "", len(models))

    @Endpoint("GET", "/v1/accounts/{account}/models/{model}", ANY, "Shows one of these models.")
    async def model(self, request: Request) -> AccountModel:
        account = self._check_account(request)
        name = f"{account}/models/{request.path_params['model']}"
        names = self._names(request)
        if name not in names and self._deployments.catching_up:
            raise self._deployments.missing(f"there is no model {name}")
        if name not in names and not grant_of(request).everywhere(SCOPES):
            raise forbidden(SCOPES, f"model {request.path_params['model']!r}")
        if name not in names:
            raise NotFound(f"there is no model {name}; this server has {', '.join(names)}")
        return self._model(name, any(one.policy for one in self._deployments.called(name)))

    def _model(self, name: str, adapter: bool) -> AccountModel:
        return AccountModel(
            name=name,
            displayName=name.rpartition("/")[2],
            kind="HF_PEFT_ADDON" if adapter else "HF_BASE_MODEL",
            state="READY",
            status=Condition("OK", ""),
        )

    def _names(self, request: Request) -> list[str]:
        grant = grant_of(request)
        if grant.everywhere(SCOPES):
            return self._deployments.models
        shown = shown_only(grant, SCOPES, self._deployments)
        return sorted({one.model for of in shown for one in (of, *self._deployments.policies(of))})

    def _account(self) -> Account:
        name = self._deployments.default.names.account
        return Account(name, name.rpartition("/")[2], "READY", "")

    def _check_account(self, request: Request) -> str:
        name, own = f"accounts/{request.path_params['account']}", self._deployments.default.names.account
        if name != own:
            raise NotFound(f"there is no account {name}; this server's is {own}")
        return own
