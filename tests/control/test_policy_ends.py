"""A policy that is being ended: replicas that forgot it do not get it back, whoever has not heard of its end."""

from __future__ import annotations

import msgspec
import pytest
from reports import replica_report

from midstream.core.errors import ReplicaUnavailable
from midstream.core.reports import PolicyReport, ReplicaReport
from midstream.core.types import Desired
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas


class Recording(DeploymentReplicas):
    """Tells no replica anything."""

    def __init__(self) -> None:
        super().__init__([("replica-0", "http://127.0.0.1:1")])
        self.desired: list[Desired] = []
        self.posted: list[tuple[str, dict[str, object]]] = []

    async def send_desired(self, replica: KnownReplica, desired: Desired) -> None:
        self.desired.append(desired)

    async def post(
        self, replica: KnownReplica, path: str, body: bytes, expected: int, timeout_s: float | None = None
    ) -> bytes:
        self.posted.append((path, msgspec.json.decode(body)))
        return b"{}"


def report(**policy: object) -> ReplicaReport:
    own = PolicyReport(policy="learner", snapshot="step-1", generation=7, **policy)  # type: ignore[arg-type]
    return replica_report(policies=(own,))


async def test_nothing_is_desired_of_a_policy_once_its_end_has_begun() -> None:
    replicas = Recording()
    policy = ReplicaSet(replicas, "learner", made=5.0)
    desired = Desired(snapshot="step-1", generation=1)
    await policy.send_desired(policy.views[0], desired)
    assert [(one.policy, one.made) for one in replicas.desired] == [("learner", 5.0)]
    policy.ending = True
    await policy.send_desired(policy.views[0], desired)
    assert len(replicas.desired) == 1


async def test_what_a_replica_says_of_an_older_policy_of_the_name_is_not_of_this_one() -> None:
    replicas = Recording()
    policy = ReplicaSet(replicas, "learner", made=5.0)
    for made, found in ((5.0, ("step-1", 7, True)), (4.0, ("base", 0, False))):
        replicas.members[0].hear(report(made=made))
        said = policy.views[0].report
        assert said is not None
        assert (said.own.snapshot, said.own.generation, said.ready) == found


async def test_the_end_is_told_to_whoever_has_the_policy_and_names_the_one_that_is_meant() -> None:
    replicas = Recording()
    older, newer = (ReplicaSet(replicas, "learner", made) for made in (4.0, 5.0))
    replicas.members[0].hear(report(made=5.0))
    assert (older.is_held, newer.is_held) == (False, True)
    await older.send_end()
    assert replicas.posted == []
    await newer.send_end()
    await older.send_end(everywhere=True)
    told = [("/replica/policy/end", {"policy": "learner", "made": made}) for made in (5.0, 4.0)]
    assert replicas.posted == told


@pytest.mark.parametrize("everywhere", [False, True])
async def test_a_drained_replica_is_told_too_as_the_policy_is_not_gone_while_it_has_it(
    everywhere: bool,
) -> None:
    replicas = Recording()
    policy = ReplicaSet(replicas, "learner", made=5.0)
    replicas.set_members([("replica-0", "http://127.0.0.1:1")], leaving=["replica-0"])
    (drained,) = replicas.leaving
    drained.hear(report(made=5.0))
    assert policy.is_held
    await policy.send_end(everywhere)
    assert replicas.posted == [("/replica/policy/end", {"policy": "learner", "made": 5.0})]
    drained.hear(replica_report())
    assert not policy.is_held


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_replica_that_cannot_be_told_of_an_end_keeps_no_other_from_it(lost: int) -> None:
    """A policy that another gateway ended is forgotten here at once, so nobody would tell the others later."""

    class Lossy(Recording):
        async def post(
            self, replica: KnownReplica, path: str, body: bytes, expected: int, timeout_s: float | None = None
        ) -> bytes:
            if replica is self.members[lost]:
                raise ReplicaUnavailable(f"{replica.name}: no connection")
            return await super().post(replica, path, body, expected, timeout_s)

    replicas = Lossy()
    policy = ReplicaSet(replicas, "learner", made=5.0)
    replicas.set_members([(f"replica-{number}", f"http://127.0.0.1:{1 + number}") for number in range(2)])
    for replica in replicas.members:
        replica.hear(report(made=5.0))
    with pytest.raises(ReplicaUnavailable, match=f"replica-{lost}: no connection"):
        await policy.send_end(everywhere=True)
    assert replicas.posted == [("/replica/policy/end", {"policy": "learner", "made": 5.0})]


async def test_a_policy_ends_although_a_drained_replica_is_gone_with_its_machine() -> None:
    """Nobody removed it from the list. A member that is not heard may have the policy, and is waited for."""

    replicas = Recording()
    members = [(f"replica-{number}", f"http://127.0.0.1:{1 + number}") for number in range(2)]
    replicas.set_members(members)
    replicas.members[0].hear(replica_report())
    assert replicas.unheard(1) == ["replica-1"]
    replicas.set_members(members, leaving=["replica-1"])
    assert replicas.unheard(1) == []
    assert replicas.unheard(2) == ["1 that has not started"]
