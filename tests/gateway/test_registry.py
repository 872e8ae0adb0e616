"""Which deployment a name means."""

import pytest
from gateway_harness import NAMES, reconciler

from midstream.core.errors import InvalidRequest, MidstreamError, NotFound
from midstream.core.served_names import ServedNames
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas

A = "accounts/local"


def deployment(name: str, model: str) -> Deployment:
    replicas = ReplicaSet(DeploymentReplicas())
    names = ServedNames(f"{A}/models/{model}", f"{A}/deployments/{name}")
    return Deployment(names, replicas, reconciler(replicas))


@pytest.fixture
def deployments() -> Deployments:
    """default (tiny-moe), b and c (both `other`), d (tiny-moe)"""
    replicas = ReplicaSet(DeploymentReplicas())
    found = Deployments(Deployment(NAMES, replicas, reconciler(replicas)))
    for name, model in (("b", "other"), ("c", "other"), ("d", "tiny-moe")):
        found.add(deployment(name, model))
    return found


@pytest.mark.parametrize(
    ("name", "means"),
    [
        (f"{A}/deployments/b", "b"),
        ("b", "b"),
        (f"{A}/deployments/d@s1", "d"),
        # D has it too, but the default one comes first.
        (f"{A}/models/tiny-moe", "default"),
        ("tiny-moe@s1", "default"),
        (" default ", "default"),
        # Fireworks' way to name one of several.
        ("other#c", "c"),
        (f"{A}/models/other#{A}/deployments/b@s1", "b"),
        ("tiny-moe#d", "d"),
    ],
)
def test_a_name_means_one_deployment(deployments: Deployments, name: str, means: str) -> None:
    assert deployments.find(name, param="model").name == f"{A}/deployments/{means}"


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("other", InvalidRequest, f"name one of {A}/deployments/b, {A}/deployments/c"),
        (f"{A}/models/other@s1", InvalidRequest, "fits several deployments"),
        ("nobody", NotFound, f"this server has {A}/models/tiny-moe, {A}/models/other"),
        ("accounts/x/deployments/b", NotFound, "not served here"),
        ("", NotFound, "not served here"),
        ("other#d", NotFound, "not served here"),
        (f"tiny-moe#{A}/deployments/none", NotFound, "not served here"),
    ],
)
def test_a_name_that_means_none_or_several_is_an_error(
    deployments: Deployments, name: str, error: type[MidstreamError], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        deployments.find(name, param="model")
    assert raised.value.param == "model"


def test_headers_decide_together_and_none_means_the_default_deployment(deployments: Deployments) -> None:
    def named(**headers: str) -> str:
        return deployments.named({k.replace("_", "-"): v for k, v in headers.items()}).name

    assert named() == named(fireworks_model="", fireworks_deployment="") == f"{A}/deployments/default"
    assert named(fireworks_deployment="c", fireworks_model="other") == f"{A}/deployments/c"
    assert named(fireworks_deployment=f"{A}/deployments/b") == f"{A}/deployments/b"
    with pytest.raises(NotFound, match="serves accounts/local/models/other, not tiny-moe") as raised:
        named(fireworks_deployment="b", fireworks_model="tiny-moe")
    assert raised.value.param == "fireworks-model"


def test_a_deployments_own_name_counts_before_a_models_in_the_header_that_names_one(
    deployments: Deployments,
) -> None:
    deployments.add(deployment("tiny-moe", "other"))
    assert deployments.named({"fireworks-deployment": "tiny-moe"}).name == f"{A}/deployments/tiny-moe"
    assert deployments.find("tiny-moe", param="model") is deployments.default


def test_one_that_is_being_deleted_has_no_name_for_requests_but_can_be_looked_at(
    deployments: Deployments,
) -> None:
    leaver = deployments.get(f"{A}/deployments/c")
    leaver.deleting = True
    assert deployments.find("other", param="model").name == f"{A}/deployments/b"
    with pytest.raises(NotFound):
        deployments.find("c", param="model")
    assert deployments.get(leaver.name) is leaver
    deployments.remove(leaver)
    with pytest.raises(NotFound, match="there is no deployment"):
        deployments.get(leaver.name)


def test_no_two_replicas_are_called_the_same(deployments: Deployments) -> None:
    names = []
    for one in deployments:
        one.wanted = 2
        names += one.replica_names
    assert names[:3] == ["replica-0", "replica-1", "b-replica-0"]
    assert len(set(names)) == 8
