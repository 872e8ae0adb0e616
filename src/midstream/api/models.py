"""The models and policies that are served, as OpenAI's clients list them.

Always holds: a model is listed once, as it stands with the deployment that its name means to the key that asks.
"""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request

from midstream.api.answers import Model, ModelList
from midstream.api.capabilities import engines, max_model_len
from midstream.core.endpoints import Endpoint
from midstream.core.scopes import ANY, SCOPES, Grant
from midstream.fleet.access import grant_of, meant, shown_only
from midstream.fleet.registry import Deployment, Deployments


class ModelsApi:
    """created: when the model came to be served, in seconds since the epoch."""

    def __init__(self, deployments: Deployments, created: int) -> None:
        self._deployments = deployments
        self._created = created

    @Endpoint(
        "GET",
        "/v1/models",
        ANY,
        "Lists the served models and policies, with each replica's snapshot.",
        prefixed=True,
    )
    async def models(self, request: Request) -> ModelList:
        return ModelList("list", self._models(grant_of(request)))

    @Endpoint("GET", "/v1/models/{model:path}", ANY, "Shows one served model or policy.", prefixed=True)
    async def model(self, request: Request) -> Model:
        asked = str(request.path_params["model"])

        def find() -> Deployment:
            return self._deployments.find(asked, param="model")

        return self._model(meant(grant_of(request), SCOPES, find, None, asked))

    def _models(self, grant: Grant) -> list[Model]:
        """Each once, as it stands with the deployment that its name means to this key; then the policies that are served."""
        served: dict[str, Deployment] = {}
        for deployment in shown_only(grant, SCOPES, self._deployments):
            if not deployment.deleting:
                served.setdefault(deployment.model, deployment)
        policies = [
            policy
            for policy in self._deployments.policies()
            if not (policy.deleting or policy.host.deleting)
            and grant.allows(SCOPES, policy.host.name)
            and policy.served
        ]
        return [self._model(one) for one in (*served.values(), *policies)]

    def _model(self, deployment: Deployment) -> Model:
        views = deployment.replicas.views
        reports = [view.report for view in views]
        # As vLLM shows adapters: under the name that they were loaded by, with what they stand on.
        is_adapter = bool(deployment.policy)
        return Model(
            id=deployment.policy or deployment.model,
            object="model",
            created=self._created,
            owned_by=deployment.names.account.rpartition("/")[2],
            deployment=deployment.name,
            snapshots={view.name: view.report.own.snapshot if view.report else None for view in views},
            root=deployment.model if is_adapter else UNSET,
            parent=deployment.host.model if is_adapter else UNSET,
            # Where trainers look for it, as vLLM has it there.
            max_model_len=max_model_len(reports),
            midstream=engines(reports),
        )
