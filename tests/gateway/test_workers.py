"""What a gateway process beside the first says of itself."""

from __future__ import annotations

from gateway_harness import run

from midstream.fleet.replicas import Member, ReplicaSet
from midstream.gateway.metrics import GatewayMetrics
from midstream.gateway.registry import Deployment, Deployments
from midstream.gateway.workers import DeploymentState, Follower, Leader
from midstream.names import ServedNames
from midstream.types import ReplicaReport

NAMES = ServedNames("m", "d")


def deployments() -> Deployments:
    return Deployments(Deployment(NAMES, ReplicaSet(()), None))


def heard(replica: str) -> ReplicaReport:
    return ReplicaReport(replica=replica, boot=f"boot of {replica}", ready=True)


def test_a_process_is_ready_once_it_can_use_what_the_first_can() -> None:
    async def main() -> None:
        here, there = deployments(), deployments()
        first, second = here.default.replicas, there.default.replicas
        made: dict[str, Deployment] = {}

        def make(state: DeploymentState) -> Deployment:
            return made[state.name]

        follower = Follower(there, make, lambda deployment: None, lambda deployment: None)
        assert not follower.caught_up, "it was told nothing"
        leader = Leader(here, follower.take)

        def told() -> tuple[bool, int]:
            leader.heard("gateway-1", follower.report(GatewayMetrics(there).tally(), listening=True))
            return follower.caught_up, leader.ready

        assert told() == (True, 1), "there is nothing to be used"
        first.set_members([Member("a", "http://a", 1.0, True), Member("b", "http://b", 1.0, True)])
        leader.push()
        assert told() == (True, 1), "the first can use none of them either"
        first.views[0].report = heard("a")
        first.views[0].admitted = True
        assert leader.ready == 1
        leader.push()
        assert leader.ready == 0, "it has not said that it was told"
        assert told() == (False, 0), "it did not hear the replica yet"
        second.views[0].report = heard("a")
        follower.take(leader.state)
        assert told() == (True, 1)
        leader.heard("gateway-1", follower.report(GatewayMetrics(there).tally(), listening=False))
        assert leader.ready == 0
        first.set_members([Member("a", "http://a", 1.0, True)])
        leader.push()
        assert told() == (True, 1)

    run(main)
