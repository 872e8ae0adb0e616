"""Two gateways' reconcilers on one ledger, over the same replicas: neither undoes what the other began."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_reconciler import DEPLOYMENT, FakeReplicaSet, World

from midstream.core.types import Stage
from midstream.fleet.loop import Reconciler
from midstream.ledger import DeploymentState, Ledger, LedgerUnavailable, Signal


class Cut(Ledger):
    """May be cut off from the database."""

    away = False

    async def state(self, deployment: str) -> DeploymentState:
        if self.away:
            raise LedgerUnavailable("the database does not answer")
        return await super().state(deployment)


class Other:
    """The second gateway of a world: a connection, views and a reconciler of its own. Signals go to the first one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledger = Cut(world.url, now=world.wall_clock)
        self.set = FakeReplicaSet(world.replicas)
        self.reconciler = Reconciler(
            self.ledger,
            self.set,  # type: ignore[arg-type]
            DEPLOYMENT,
            monotonic=lambda: world.time,
        )

    def looks(self) -> None:
        async def one_pass() -> None:
            await self.reconciler.reconcile_once()
            await self.reconciler.settle()

        for index in range(len(self.world.replicas)):
            self.set.hear(index)
        self.world.run(one_pass())

    @property
    def serving(self) -> list[str]:
        return [replica.machine.serving for replica in self.world.replicas]


@contextmanager
def two(path: Path) -> Iterator[tuple[World, Other]]:
    world = World(path)
    other = Other(world)
    try:
        yield world, other
    finally:
        other.ledger.close()
        world.close()


def works(world: World, other: Other, rounds: int) -> None:
    for _ in range(rounds):
        world.calm(1)
        other.looks()


@pytest.mark.parametrize("steps", range(8))
def test_a_signal_that_one_gateway_got_is_not_undone_by_the_other(tmp_path: Path, steps: int) -> None:
    """steps: how far the replicas are with it when the other one hears of them, which read the ledger just before."""
    with two(tmp_path) as (world, other):
        world.signal("a")
        works(world, other, 20)
        assert other.serving == ["a"] * 3
        world.time += 2
        other.looks()
        world.signal("b")
        world.reconcile()
        for _ in range(steps):
            for replica in world.replicas:
                replica.step()
        before = len(other.set.sent)
        other.looks()
        assert [sent for sent in other.set.sent[before:] if sent[1] != "b"] == []
        works(world, other, 20)
        assert other.serving == ["b"] * 3
        for replica in world.replicas:
            assert [moved.snapshot for moved in replica.history if moved.stage is Stage.IDLE] == ["a", "b"]


def test_a_gateway_without_its_ledger_leaves_what_others_load_alone(tmp_path: Path) -> None:
    with two(tmp_path) as (world, other):
        world.signal("a")
        works(world, other, 20)
        other.ledger.away = True
        world.signal("b")
        works(world, other, 40)
        assert other.serving == ["b"] * 3
        assert [sent for sent in other.set.sent if sent[1] == "b"] == []
        world.replicas[0].reboot()
        works(world, other, 40)
        assert other.serving == ["b"] * 3
        other.ledger.away = False
        world.time += 2
        works(world, other, 5)
        world.run(other.ledger.signal(DEPLOYMENT, Signal(identity="c", url="file:///bucket/c")))
        other.reconciler.signalled()
        works(world, other, 20)
        assert other.serving == ["c"] * 3


def test_a_ledger_that_begins_anew_is_believed_all_the_same(tmp_path: Path) -> None:
    """Its generations are lower than what replicas took up from the one before."""
    (tmp_path / "two").mkdir()
    with two(tmp_path) as (world, other):
        for identity in ("a", "b", "c"):
            world.signal(identity)
            works(world, other, 20)
        with two(tmp_path / "two") as (anew, _):
            anew.replicas = world.replicas
            anew.restart_gateway()
            anew.signal("d")
            anew.calm(20)
            assert other.serving == ["d"] * 3
