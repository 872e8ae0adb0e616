"""What a gateway asks of its ledger while nothing happens: one query a poll, however many policies there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from reports import replica_report

from midstream.core.reports import PolicyReport
from midstream.core.served_names import ServedNames, names_of
from midstream.core.types import Desired, EngineCard, Stage, Transition
from midstream.fleet.desired_state import DesiredState, Running
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.loop import Reconciler
from midstream.fleet.registry import Deployment, Deployments
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas, Member
from midstream.ledger import DeploymentRow, Ledger, LedgerUnavailable, NewDeployment, Signal, sqlite_url

NAMES = ServedNames("accounts/a/models/m", "accounts/a/deployments/d")
#: Long enough for a pass to end within it, or the passes would be one.
POLL_S = 0.05


class Asked(Ledger):
    """Counts its transactions, also those under way, and the statements in them. away: none can be made."""

    transactions = under_way = 0
    away = False

    def watch(self) -> list[str]:
        statements: list[str] = []
        sa.event.listen(
            self._database.engine,
            "before_cursor_execute",
            lambda conn, cursor, statement, *rest: statements.append(statement),
        )
        return statements

    async def _run(
        self,
        begin: Callable[[], AbstractContextManager[sa.Connection]],
        work: Callable[[sa.Connection], Any],
    ) -> Any:
        self.transactions += 1
        if self.away:
            raise LedgerUnavailable("the database does not answer")
        self.under_way += 1
        try:
            return await super()._run(begin, work)
        finally:
            self.under_way -= 1


class Obedient(DeploymentReplicas):
    """One replica, which serves at once whatever it is told to."""

    def __init__(self) -> None:
        super().__init__([("replica-0", "http://127.0.0.1:1")])
        self.told: list[Desired] = []
        self.report = replica_report(card=EngineCard())
        self.hear()

    def hear(self) -> None:
        self.members[0].hear(self.report)

    def set_members(self, replicas: Sequence[tuple[str, str] | Member], leaving: object = ()) -> None:
        """It stays."""
        if not self.members:
            super().set_members(replicas)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def send_desired(self, replica: KnownReplica, desired: Desired) -> None:
        self.told.append(desired)
        assert desired.policy is not None
        served = PolicyReport(
            policy=desired.policy,
            made=desired.made,
            snapshot=desired.snapshot,
            generation=desired.generation,
            transitions=(
                Transition(
                    seq=desired.generation - 1,
                    at=1.0,
                    snapshot=desired.snapshot,
                    generation=desired.generation,
                    stage=Stage.IDLE,
                ),
            ),
        )
        others = tuple(one for one in self.report.policies if one.policy != desired.policy)
        self.report = msgspec.structs.replace(self.report, policies=(*others, served))
        self.hear()


class Gateway:
    """The part of a gateway that looks at the ledger."""

    def __init__(self, ledger: Asked) -> None:
        self.ledger, self.replicas = ledger, Obedient()
        own = ReplicaSet(self.replicas)
        host = Deployment(NAMES, own, self._reconciler(own, NAMES.deployment))
        self.deployments = Deployments(host)
        self.desired_state = DesiredState(
            ledger, self.deployments, self._never, lambda wanted: None, poll_s=POLL_S
        )
        self.desired_state.make_policy = self._make
        self.desired_state.running(Running())

    def _reconciler(self, replicas: ReplicaSet, name: str) -> Reconciler:
        return Reconciler(self.ledger, replicas, name, poll_s=POLL_S, signalled_at_once=True)

    def _never(self, row: DeploymentRow) -> Deployment:
        raise AssertionError(row.name)

    def _make(self, row: DeploymentRow, of: Deployment, policy: str) -> Deployment:
        replicas = ReplicaSet(of.replicas.facts, policy, row.created_at)
        reconciler = self._reconciler(replicas, row.name)
        return Deployment(names_of(of.names, policy), replicas, reconciler, policy=policy, of=of)

    def serves(self, name: str, snapshot: str) -> bool:
        policy = self.deployments.known(f"{NAMES.deployment}/policies/{name}")
        return policy is not None and [
            (view.usable, view.report and view.report.own.snapshot) for view in policy.replicas.views
        ] == [(True, snapshot)]

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S / 10)

    async def at_rest(self) -> None:
        """Until some looks in a row asked nothing but their own query, and none waits for a slow disk."""
        while True:
            asked, looks = await self.polls(4)
            if asked <= looks + 1 and not self.ledger.under_way:
                return

    async def polls(self, count: int) -> tuple[int, int]:
        """Transactions, and looks at the ledger, while it looks so many times."""
        looks, ended, look = 0, asyncio.Event(), self.desired_state.look_once

        async def counted() -> None:
            nonlocal looks
            await look()
            looks += 1
            if looks == count:
                ended.set()

        self.desired_state.look_once = counted  # type: ignore[method-assign]
        before = self.ledger.transactions
        await ended.wait()
        asked = self.ledger.transactions - before
        self.desired_state.look_once = look  # type: ignore[method-assign]
        return asked, looks


@asynccontextmanager
async def with_policies(path: Path, count: int, *, url: str | None = None) -> AsyncIterator[Gateway]:
    ledger = Asked(url or sqlite_url(path / "ledger.sqlite"))
    await ledger.ensure_deployment(NAMES.deployment, NAMES.model, "file:///b")
    names = [f"p{number}" for number in range(count)]
    for name in names:
        full = f"{NAMES.deployment}/policies/{name}"
        await ledger.create_deployment(NewDeployment(full, model="m", bucket_url="file:///b"))
        await ledger.signal(full, Signal(identity="v1", url="file:///b/v1"))
    gateway = Gateway(ledger)
    running = asyncio.create_task(gateway.desired_state.run())
    try:
        await gateway.until(lambda: all(gateway.serves(name, "v1") for name in names))
        await gateway.at_rest()
        yield gateway
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        ledger.close()


@pytest.mark.parametrize("policies", [1, 20])
async def test_a_gateway_asks_its_ledger_once_a_poll_whatever_it_serves(
    tmp_path: Path, policies: int
) -> None:
    async with with_policies(tmp_path, policies) as gateway:
        statements = gateway.ledger.watch()
        asked, looks = await gateway.polls(10)
        assert asked <= looks + 1
        queries = [one for one in statements if one.startswith("SELECT")]
        assert len(queries) == len(statements) - sum(one.startswith("BEGIN") for one in statements)
        assert len(queries) <= looks + 1, "each look is one query"


async def test_a_signal_that_another_gateway_took_is_read_by_the_one_policy_alone(tmp_path: Path) -> None:
    async with with_policies(tmp_path, 8) as gateway:
        other = Ledger(sqlite_url(tmp_path / "ledger.sqlite"))
        await other.signal(
            f"{NAMES.deployment}/policies/p3", Signal(identity="v2", url="file:///b/v2"), chain_max=1
        )
        other.close()
        told = len(gateway.replicas.told)
        await gateway.until(lambda: gateway.serves("p3", "v2"))
        assert [(one.policy, one.snapshot) for one in gateway.replicas.told[told:]] == [("p3", "v2")]
        await gateway.at_rest()


async def test_lines_of_the_log_about_a_policy_name_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async with with_policies(tmp_path, 2):
        lines = [record.message for record in caplog.records if record.name == "midstream.fleet.loop"]
        for name in ("p0", "p1"):
            assert f"replica-0, policy {name} serves snapshot v1" in lines
            assert f"replica-0, policy {name} joins with snapshot v1" in lines


async def test_what_a_ledger_that_is_away_could_not_say_is_asked_again(tmp_path: Path) -> None:
    """A reconciler that could not read the ledger is not told a second time that it changed."""

    async with with_policies(tmp_path, 2) as gateway:
        policy = gateway.deployments.known(f"{NAMES.deployment}/policies/p1")
        assert policy is not None
        await gateway.ledger.signal(policy.name, Signal(identity="v2", url="file:///b/v2"))
        gateway.ledger.away = True
        policy.reconciler.signalled()
        before = gateway.ledger.transactions
        await gateway.until(lambda: gateway.ledger.transactions > before + 2)
        gateway.ledger.away = False
        await gateway.until(lambda: gateway.serves("p1", "v2"))


async def test_policies_that_are_made_and_ended_elsewhere_come_and_go(tmp_path: Path) -> None:
    async with with_policies(tmp_path, 4) as gateway:
        other = Ledger(sqlite_url(tmp_path / "ledger.sqlite"))
        name = f"{NAMES.deployment}/policies/new"
        for _ in range(2):
            await other.create_deployment(NewDeployment(name, model="m", bucket_url="file:///b"))
            await gateway.until(lambda: gateway.deployments.known(name) is not None)
            made = gateway.deployments.known(name)
            assert made in gateway.deployments.called("new")
            await other.delete_deployment(name)
            await gateway.until(lambda: gateway.deployments.known(name) is None)
            assert gateway.deployments.called("new") == []
        other.close()
        names = [policy.policy for policy in gateway.deployments.policies()]
        assert names == [f"p{number}" for number in range(4)]
