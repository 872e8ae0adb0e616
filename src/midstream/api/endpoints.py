"""All endpoints of the gateway's port, in the groups in which documents show them. Pure.

Always holds: a class that serves endpoints of the port is in one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from midstream.api.accounts import AccountsApi
from midstream.api.adapter_calls import AdapterCallsApi
from midstream.api.addons import AddonsApi
from midstream.api.dashboard import DashboardApi
from midstream.api.delta_calls import DeltaCallsApi
from midstream.api.deployments import DeploymentsApi
from midstream.api.health import HealthApi
from midstream.api.hotload import HotLoadApi
from midstream.api.inference import InferencePaths
from midstream.api.models import ModelsApi
from midstream.api.policies import PoliciesApi
from midstream.api.reference import ReferenceApi
from midstream.api.responses import ResponsesApi
from midstream.api.trainer_calls import TrainerApi
from midstream.api.trajectories import SessionsApi
from midstream.api.weight_transfer import WeightTransferApi
from midstream.core.endpoints import Endpoint, endpoints_of
from midstream.fleet.membership import MembershipApi

#: The group of the paths that clients of Fireworks write.
PREFIXED = "With Fireworks' prefix"


class Group(NamedTuple):
    """page: of docs/, with more on it."""

    name: str
    words: str
    page: str
    endpoints: tuple[Endpoint, ...]


def groups(front: tuple[Endpoint, ...]) -> tuple[Group, ...]:
    """front: the endpoints of the Tinker front, another process."""
    return (
        Group(
            "Inference",
            "Generation, tokens and text, in the API that a client speaks.",
            "api",
            endpoints_of(InferencePaths, ResponsesApi, ModelsApi),
        ),
        Group(
            "Rollouts and sessions",
            "Sessions, their traces and their rewards.",
            "exact-sessions",
            endpoints_of(SessionsApi),
        ),
        Group("Hot load", "New weights under running requests.", "publishing", endpoints_of(HotLoadApi)),
        Group(
            "Deployments",
            "Deployments, their replicas, the account and its models.",
            "api",
            endpoints_of(DeploymentsApi, MembershipApi, AccountsApi),
        ),
        Group(
            "Policies",
            "Adapters beside the deployment's own weights.",
            "policies",
            endpoints_of(PoliciesApi, AddonsApi),
        ),
        Group(
            "Trainer calls",
            "Control calls of vLLM, prime-rl and SGLang.",
            "trainer-calls",
            endpoints_of(TrainerApi, WeightTransferApi, DeltaCallsApi, AdapterCallsApi),
        ),
        Group("Tinker", "The Tinker API. Each path answers 404 with `--no-tinker`.", "tinker", front),
        Group(
            "Operations",
            "Health, metrics and pages.",
            "runbook",
            endpoints_of(HealthApi, DashboardApi, ReferenceApi),
        ),
    )


class Operation(NamedTuple):
    """An endpoint under one of its paths, as a document shows it."""

    group: str
    path: str
    endpoint: Endpoint

    @property
    def method(self) -> str:
        return self.endpoint.method


def operations(front: tuple[Endpoint, ...]) -> Iterator[Operation]:
    """All operations of the port. Those with Fireworks' prefix come last."""
    grouped = groups(front)
    for group in grouped:
        for endpoint in group.endpoints:
            yield Operation(group.name, endpoint.path, endpoint)
    for group in grouped:
        for endpoint in group.endpoints:
            for path in endpoint.paths[1:]:
                yield Operation(PREFIXED, path, endpoint)
