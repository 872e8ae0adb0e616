"""What policies see of the replicas of their deployment: the own weights and another policy, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from reports import replica_report

from midstream.core.reports import PolicyReport, ReplicaReport
from midstream.core.types import POLICIES_MAX
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas, Member

FIRST, SECOND = ("replica-0", "http://127.0.0.1:1"), ("replica-1", "http://127.0.0.1:2")


def report(name: str, policies_max: int = POLICIES_MAX, boot: str = "b") -> ReplicaReport:
    policy = PolicyReport(policy="red", made=5.0, snapshot="red-1", generation=1)
    return replica_report(name, boot=boot, ready=True, policies=(policy,), policies_max=policies_max)


class World:
    """Two replicas that hold the policy, and its views beside those of the own weights."""

    def __init__(self, policies_max: int = POLICIES_MAX) -> None:
        self.facts = DeploymentReplicas([FIRST, SECOND])
        self.own, self.red = ReplicaSet(self.facts), ReplicaSet(self.facts, "red", 5.0)
        for replica in self.facts.members:
            replica.hear(report(replica.name, policies_max))
        self.admit()

    @property
    def first(self) -> KnownReplica:
        return self.facts.members[0]

    def admit(self) -> None:
        for view in (*self.own.views, *self.red.views):
            view.admitted = True

    def usable(self) -> list[list[bool]]:
        return [[view.usable for view in views.views] for views in (self.own, self.red)]


def run(work: Callable[[], None]) -> None:
    async def main() -> None:
        work()

    asyncio.run(main())


def test_a_new_boot_has_to_be_admitted_for_each_policy() -> None:
    def work() -> None:
        world = World()
        assert world.usable() == [[True, True], [True, True]]
        world.first.hear(report("replica-0", boot="c"))
        assert world.usable() == [[False, True], [False, True]]
        world.admit()
        world.first.hear(None)
        world.first.hear(report("replica-0", boot="c"))
        assert world.usable() == [[True, True], [True, True]], "the same boot is heard again"

    run(work)


def test_a_replica_that_left_and_returned_has_to_be_admitted_for_each_policy() -> None:
    def work() -> None:
        world = World()
        world.facts.set_members([FIRST, SECOND], {"replica-0"})
        assert world.usable() == [[True], [True]]
        assert [view.name for view in world.red.leaving] == ["replica-0"]
        world.facts.set_members([FIRST, SECOND])
        assert world.usable() == [[False, True], [False, True]]

    run(work)


def test_a_gone_replicas_word_that_it_lacks_a_policy_changes_nothing_even_if_that_is_gone_too() -> None:
    def work() -> None:
        world = World()
        view = world.red.views[0]
        world.facts.set_members([SECOND])
        assert (view.report, view.usable, view.replica.standing) == (None, False, "gone")
        world.red.mark_missing(view)
        other = world.red.views[0]
        world.red.close()
        world.red.mark_missing(view)
        world.red.mark_missing(other)
        other.replica.hear(report("replica-1"))
        assert [view.usable for view in world.own.views] == [True]

    run(work)


def test_a_replica_that_lacks_a_policy_is_not_used_for_it_before_it_reports_it_again() -> None:
    def work() -> None:
        world = World()
        world.red.mark_missing(world.red.views[0])
        assert world.usable() == [[True, True], [False, True]]
        world.first.hear(report("replica-0"))
        world.admit()
        assert world.usable() == [[True, True], [True, True]]

    run(work)


async def test_another_weight_is_news_for_each_policy() -> None:
    world = World()
    told: list[str] = []
    world.own.subscribe(lambda: told.append("own"))
    world.red.subscribe(lambda: told.append("red"))
    world.facts.set_members([Member(*FIRST, weight=3.0), SECOND])
    await asyncio.sleep(0)
    assert told == ["own", "red"]
    assert [[member.weight for member in views.fleet.members] for views in (world.own, world.red)] == [
        [3.0, 1.0],
        [3.0, 1.0],
    ]
    world.facts.set_members([Member(*FIRST, weight=3.0), SECOND])
    await asyncio.sleep(0)
    assert told == ["own", "red"], "the same list changes nothing"


async def test_a_report_that_says_nothing_new_of_a_policy_is_no_news_for_it() -> None:
    world = World()
    told: list[str] = []
    world.own.subscribe(lambda: told.append("own"))
    world.red.subscribe(lambda: told.append("red"))
    busy = report("replica-0")
    world.first.hear(replica_report("replica-0", boot="b", in_flight=3, policies=busy.others))
    await asyncio.sleep(0)
    assert told == ["own"]


def test_failures_with_a_policy_count_only_while_it_follows_demand() -> None:
    def work() -> None:
        world = World()
        view = world.red.views[0]
        world.red.judged(view, failed=True)
        assert (world.red.by_demand, view.failed_until) == (False, 0.0)
        crowded = World(policies_max=0)
        view = crowded.red.views[0]
        crowded.red.judged(view, failed=True)
        assert crowded.red.by_demand
        assert view.failed_until > 0.0
        assert not crowded.own.by_demand
        assert list(crowded.own.holders) == list(crowded.own.views)

    run(work)
