"""Who should run: the ledger's deployments against the replicas that the supervisor has."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from gateway_harness import reconciler
from reports import replica_report

from midstream.api.policies import PoliciesApi
from midstream.core.errors import NotFound, ReplicaUnavailable
from midstream.core.served_names import ServedNames
from midstream.fleet.desired_state import HARD, DesiredState, Running, RunningReplica, Wanted, replica_count
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.tally import GatewayReport
from midstream.ledger import DeploymentRow, Ledger, LedgerUnavailable, NewDeployment, sqlite_url
from midstream.proxy.metrics import GatewayMetrics

A = "accounts/local"
DEFAULT, B = f"{A}/deployments/default", f"{A}/deployments/b"


class Stage:
    """A desired state on a ledger; `heard` holds every list the supervisor was given."""

    def __init__(self, ledger: Ledger, row: DeploymentRow) -> None:
        self.ledger = ledger
        self.heard: list[Wanted] = []
        self.made: list[Deployment] = []
        self.now = 0.0
        self.deployments = Deployments(self.make(row))
        self.desired_state = DesiredState(
            ledger, self.deployments, self.make, self.heard.append, monotonic=lambda: self.now
        )

    def make(self, row: DeploymentRow) -> Deployment:
        replicas = ReplicaSet(DeploymentReplicas())
        names = ServedNames(row.model, row.name)
        self.made.append(Deployment(names, replicas, reconciler(replicas), wanted=replica_count(row)))
        return self.made[-1]

    def made_policy(self, row: DeploymentRow, of: Deployment, policy: str) -> Deployment:
        replicas = ReplicaSet(of.replicas.facts, policy, row.created_at)
        names = ServedNames(row.model, row.name)
        return Deployment(names, replicas, reconciler(replicas), policy=policy, of=of)

    async def run(self, *names: str, deployment: str = DEFAULT) -> list[str]:
        """The supervisor has these; what it is then told to have."""
        self.desired_state.running(
            Running(tuple(RunningReplica(name=n, deployment=deployment, url=f"http://{n}") for n in names))
        )
        await self.desired_state.look_once()
        return [replica.name for replica in self.heard[-1].replicas]


@asynccontextmanager
async def stage(path: Path, replicas: int = 2) -> AsyncIterator[Stage]:
    ledger = Ledger(sqlite_url(path / "ledger.sqlite"))
    row = await ledger.ensure_deployment(DEFAULT, f"{A}/models/m", "file:///bucket", "ASYNC", replicas)
    yield Stage(ledger, row)
    ledger.close()


async def test_the_supervisor_is_told_once_and_again_only_when_something_changed(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.desired_state.look_once()
        assert await s.run("replica-0", "replica-1") == ["replica-0", "replica-1"]
        assert len(s.heard) == 1
        assert [view.name for view in s.deployments.default.replicas.views] == ["replica-0", "replica-1"]


async def test_who_leaves_is_wanted_until_its_requests_have_ended(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        both = ("replica-0", "replica-1")
        await s.run(*both)
        leaver = s.deployments.default.replicas.views[1]
        leaver.replica.in_flight = 1
        await s.ledger.update_deployment(DEFAULT, replicas_min=1, replicas_max=1)
        assert await s.run(*both) == [*both]
        assert (leaver.replica.standing, s.deployments.default.replicas.leaving) == ("leaving", (leaver,))
        leaver.replica.in_flight = 0
        assert await s.run(*both) == ["replica-0"]
        await s.run("replica-0")
        assert (leaver.replica.standing, s.deployments.default.replicas.leaving) == ("gone", ())


async def test_requests_that_never_end_hold_a_leaver_for_so_long_only(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        both = ("replica-0", "replica-1")
        await s.run(*both)
        s.deployments.default.replicas.views[1].replica.in_flight = 1
        await s.ledger.update_deployment(DEFAULT, replicas_min=1, replicas_max=1)
        assert await s.run(*both) == [*both]
        s.now = s.deployments.default.drain_s - 1
        assert await s.run(*both) == [*both]
        s.now += 2
        assert await s.run(*both) == ["replica-0"]


async def test_one_that_is_wanted_again_while_it_leaves_stays(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        both = ("replica-0", "replica-1")
        await s.run(*both)
        view = s.deployments.default.replicas.views[1]
        view.replica.in_flight = 1
        await s.ledger.update_deployment(DEFAULT, replicas_min=1, replicas_max=1)
        await s.run(*both)
        await s.ledger.update_deployment(DEFAULT, replicas_min=2, replicas_max=2)
        assert await s.run(*both) == [*both]
        assert s.deployments.default.replicas.views[1] is view
        assert view.replica.standing == "member"
        s.now = 10 * s.deployments.default.drain_s
        await s.ledger.update_deployment(DEFAULT, replicas_min=1, replicas_max=1)
        assert await s.run(*both) == [*both], "its time begins anew"


async def test_a_deployment_is_gone_when_its_last_process_is(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        await s.ledger.create_deployment(
            NewDeployment(B, model=f"{A}/models/m", bucket_url="file:///bucket/b")
        )
        assert await s.run("b-replica-0", deployment=B) == ["replica-0", "replica-1", "b-replica-0"]
        await s.ledger.update_deployment(B, deleting=True)
        assert await s.run("b-replica-0", deployment=B) == ["replica-0", "replica-1"]
        assert [row.name for row in await s.ledger.deployments()] == [B, DEFAULT]
        assert s.deployments.get(B).deleting
        await s.run()
        assert [row.name for row in await s.ledger.deployments()] == [DEFAULT]
        assert [d.name for d in s.deployments] == [DEFAULT]


async def test_a_gateway_that_starts_again_takes_over_what_runs_and_what_was_going_on(tmp_path: Path) -> None:
    async def before(s: Stage) -> None:
        await s.ledger.create_deployment(
            NewDeployment(B, model=f"{A}/models/m", bucket_url="file:///bucket/b", replicas_min=2)
        )
        await s.ledger.create_deployment(
            NewDeployment(f"{A}/deployments/c", model=f"{A}/models/m", bucket_url="file:///c")
        )
        await s.ledger.update_deployment(f"{A}/deployments/c", deleting=True)
        await s.ledger.update_deployment(DEFAULT, replicas_min=1, replicas_max=1)

    async def after(s: Stage) -> None:
        await s.desired_state.look_once()
        told = [replica.name for replica in s.heard[-1].replicas]
        assert told == ["replica-0", "b-replica-0", "b-replica-1"]
        assert len(await s.ledger.deployments()) == 3, "what nobody has spoken of may still run"
        assert await s.run("replica-0", "replica-1") == told
        assert [v.name for v in s.deployments.default.replicas.views] == ["replica-0"]
        assert [v.name for v in s.deployments.default.replicas.leaving] == ["replica-1"]
        assert [row.name for row in await s.ledger.deployments()] == [B, DEFAULT]

    async with stage(tmp_path) as s:
        await before(s)
    async with stage(tmp_path) as s:
        await after(s)


async def test_how_many_replicas_a_row_asks_for(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        for least, most, count in ((0, 0, 0), (0, 1, 1), (0, 5, 1), (2, 5, 2), (3, 3, 3)):
            row = await s.ledger.update_deployment(DEFAULT, replicas_min=least, replicas_max=most)
            assert replica_count(row) == count
        assert replica_count(await s.ledger.update_deployment(DEFAULT, deleting=True)) == 0


@asynccontextmanager
async def two(path: Path) -> AsyncIterator[tuple[Stage, Stage]]:
    """Two gateways on one ledger."""
    async with stage(path) as here:
        yield here, Stage(here.ledger, await here.ledger.deployment(DEFAULT))


async def test_a_deployment_made_anew_under_its_name_is_another_one_for_every_gateway(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other):

        async def create(model: str) -> None:
            bucket = "file:///bucket/b"
            options = {"replicas_min": 0, "replicas_max": 0}
            await one.ledger.create_deployment(
                NewDeployment(B, model=f"{A}/models/{model}", bucket_url=bucket, **options)
            )

        await create("m")
        for gateway in (one, other):
            await gateway.run()
        before = other.deployments.known(B)
        assert before is not None
        await one.ledger.update_deployment(B, deleting=True)
        # Which removes it: it has no replica.
        await one.run()
        assert one.deployments.known(B) is None
        await create("n")
        await one.ledger.update_deployment(B, replicas_min=1, replicas_max=1)
        for gateway in (one, other):
            await gateway.run()
            found = gateway.deployments.known(B)
            assert found is not None
            assert found is not before
            assert found.model == f"{A}/models/n"
            assert [r.model for r in gateway.heard[-1].replicas if r.deployment == B] == [f"{A}/models/n"]


async def test_a_deployment_deleted_without_waiting_is_not_waited_for_by_any_gateway(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other):
        await one.ledger.create_deployment(
            NewDeployment(B, model=f"{A}/models/m", bucket_url="file:///bucket/b")
        )
        for gateway in (one, other):
            assert "b-replica-0" in await gateway.run("b-replica-0", deployment=B)
        found = other.deployments.known(B)
        assert found is not None
        found.replicas.views[0].replica.in_flight = 1
        await one.ledger.update_deployment(B, deleting=True)
        assert "b-replica-0" in await other.run("b-replica-0", deployment=B)
        await one.ledger.update_deployment(B, fields={HARD: True})
        for gateway in (one, other):
            assert "b-replica-0" not in await gateway.run("b-replica-0", deployment=B)


async def test_what_metrics_show_was_reported_before_so_it_outlives_the_process(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        metrics = GatewayMetrics(s.deployments)
        s.desired_state.report = lambda: GatewayReport(
            boot="b", listening=True, ready=True, changes=0, tally=metrics.tally()
        )
        metrics.report = s.desired_state.report_now
        await s.run("replica-0", "replica-1")
        metrics.requests["completions", 200] += 3
        assert b'requests_total{path="completions",status="200"} 3.0' in await metrics.exposition()
        last = s.heard[-1]
        assert last.report is not None
        assert last.report.tally.requests == [("completions", 200, 3)]
        assert [replica.name for replica in last.replicas] == ["replica-0", "replica-1"]


async def test_what_the_ledger_was_not_asked_for_yet_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = f"{DEFAULT}/policies/red"

    async def before(s: Stage) -> None:
        await s.ledger.create_deployment(NewDeployment(B, f"{A}/models/m", "file:///bucket/b"))
        await s.ledger.create_deployment(NewDeployment(policy, f"{A}/models/red", "file:///bucket"))

    async def after(s: Stage) -> None:
        s.desired_state.make_policy = s.made_policy
        api = PoliciesApi(
            s.ledger, s.deployments, s.desired_state.changed, never_taken, look=s.desired_state.look
        )
        monkeypatch.setattr(s.ledger, "changes", out_of_order)
        s.desired_state.running(Running())
        await s.desired_state.look_once()
        for asked in (
            lambda: s.deployments.get(B),
            lambda: s.deployments.find("red", param="model"),
            lambda: s.deployments.find("nothing", param="model"),
        ):
            with pytest.raises(ReplicaUnavailable, match="has just started"):
                asked()
        with pytest.raises(LedgerUnavailable):
            await api.named(s.deployments.default, "red")
        assert not s.desired_state.caught_up
        monkeypatch.undo()
        assert (await api.named(s.deployments.default, "red")).name == policy
        assert s.deployments.get(B).name == B
        assert s.deployments.find("red", param="model").name == policy
        with pytest.raises(NotFound):
            s.deployments.find("nothing", param="model")
        monkeypatch.setattr(s.ledger, "changes", out_of_order)
        with pytest.raises(NotFound):
            s.deployments.find("nothing", param="model")

    async with stage(tmp_path) as s:
        await before(s)
    async with stage(tmp_path) as s:
        await after(s)


async def test_the_log_names_the_replica_that_the_end_of_a_policy_waits_for_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, both = f"{DEFAULT}/policies/red", ("replica-0", "replica-1")

    async with stage(tmp_path) as s:
        s.desired_state.make_policy = s.made_policy
        await s.ledger.create_deployment(NewDeployment(policy, f"{A}/models/red", "file:///bucket"))
        await s.run(*both)
        first, second = s.deployments.default.replicas.facts.members
        await s.ledger.update_deployment(policy, deleting=True)
        for _ in range(3):
            await s.run(*both)
        first.hear(replica_report())
        for _ in range(3):
            await s.run(*both)
        assert s.deployments.known(policy) is not None
        second.hear(replica_report())
        await s.run(*both)
        assert s.deployments.known(policy) is None
    assert [line for line in caplog.messages if "waits for" in line] == [
        f"the end of {policy} waits for replica-0, replica-1: no report came, so it may be there",
        f"the end of {policy} waits for replica-1: no report came, so it may be there",
    ]


async def out_of_order(_: object) -> NoReturn:
    raise LedgerUnavailable("the ledger cannot be used now")


async def never_taken(*_: object, **__: object) -> NoReturn:
    raise AssertionError("no signal was sent")
