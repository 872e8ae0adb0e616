"""The reconciler on a real ledger file, with replicas that run the real swap machine behind a lossy network."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reports import replica_report
from tiers import of_tier

from midstream.core.config import SwapOrder
from midstream.core.errors import ReplicaUnavailable
from midstream.core.reports import ReplicaReport
from midstream.core.types import (
    BASE_SNAPSHOT,
    Desired,
    Pause,
    ResetPromptCache,
    SnapshotCheck,
    Stage,
    Transition,
)
from midstream.fleet.known_replica import KnownReplica
from midstream.fleet.loop import Reconciler
from midstream.fleet.reconcile import LOSSES_MAX, failure, serves
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas
from midstream.fleet.view import ReplicaView
from midstream.ledger import FleetReports, Ledger, Signal, Signalled, sqlite_url, stronger_reset
from midstream.replica.swap.table import SwapEvent, SwapMachine

DEPLOYMENT = "accounts/local/deployments/default"
NEXT = {
    Stage.FETCHING: SwapEvent.FETCHED,
    Stage.VERIFYING: SwapEvent.VERIFIED,
    Stage.STAGING: SwapEvent.STAGED,
    Stage.STAGED: SwapEvent.COMMIT,
    Stage.COMMITTING: SwapEvent.COMMITTED,
    Stage.CHECKING: SwapEvent.CHECKED,
}


class Bucket:
    """What becomes of each snapshot: `files` has its fingerprint, loading one in `broken` fails, in `poison` kills."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.poison: set[str] = set()
        self.files: dict[str, int] = {}

    def fingerprint(self, identity: str) -> str:
        return f"files {self.files.setdefault(identity, 0)} of {identity}"


class FakeReplica:
    """One replica process: the real swap machine, stepped by the test."""

    def __init__(self, name: str, bucket: Bucket) -> None:
        self.name, self.bucket, self.boots = name, bucket, 0
        # So many of the next loads leave other weights in the engine.
        self.spoilt = 0
        # Boot, the signal of what served before, the generation of what serves then, policy.
        self.swaps: list[tuple[int, int, int, ResetPromptCache]] = []
        self.reboot()

    def reboot(self) -> None:
        self.boots += 1
        self.machine = SwapMachine(clock=lambda: 7.0)
        self.history: list[Transition] = []
        self.content: Desired | None = None
        self.check: SnapshotCheck | None = None
        self.pause = Pause()

    @property
    def boot(self) -> str:
        return f"{self.name}-boot-{self.boots}"

    def step(self) -> None:
        machine, target = self.machine, self.machine.target
        if machine.behind and machine.stage not in (Stage.COMMITTING, Stage.CHECKING):
            machine.begin()
        elif machine.stage in NEXT and not (machine.stage is Stage.STAGED and machine.held):
            assert target is not None
            self._advance(target)
        seen = len(self.history)
        self.history += [moved for moved in self.machine.transitions if moved.seq >= seen]

    def _advance(self, target: Desired) -> None:
        stage, bucket = self.machine.stage, self.bucket
        if stage is Stage.FETCHING and target.fingerprint not in (None, bucket.fingerprint(target.snapshot)):
            self.machine.fail(f"{target.snapshot} changed")
        elif stage is Stage.VERIFYING and target.snapshot in bucket.broken:
            self.machine.fail(f"{target.snapshot} is broken")
        elif stage is Stage.STAGING and target.snapshot in bucket.poison:
            self.reboot()
        else:
            self.machine.advance(NEXT[stage])
            if stage is Stage.COMMITTING:
                before = self.content.signalled if self.content else 0
                self.swaps.append((self.boots, before, target.generation, target.reset_prompt_cache))
                self.content = target
                self.check = None
            elif stage is Stage.CHECKING:
                weights = "spoilt" if self.spoilt else self.content and self.content.fingerprint
                self.spoilt = max(0, self.spoilt - 1)
                self.check = SnapshotCheck(
                    snapshot=target.snapshot, generation=target.generation, weights=weights, canary=(-1.0,)
                )

    def report(self) -> ReplicaReport:
        machine = self.machine
        idle = machine.stage is Stage.IDLE
        return replica_report(
            replica=self.name,
            boot=self.boot,
            ready=True,
            snapshot=machine.serving,
            signalled=machine.loaded.signalled if machine.loaded else 0,
            generation=machine.accepted.generation if machine.accepted else 0,
            stage=machine.stage,
            target=None if idle or machine.target is None else machine.target.snapshot,
            error=machine.error,
            check=self.check,
            held=machine.stage is Stage.STAGED and machine.held,
            pause=self.pause,
            transitions=tuple(machine.transitions),
        )


class FakeReplicaSet(ReplicaSet):
    """Views of fake replicas. Reports arrive when the test says so; `drop` counts messages that will be lost."""

    def __init__(self, replicas: list[FakeReplica]) -> None:
        super().__init__(DeploymentReplicas([(r.name, f"http://fake/{i}") for i, r in enumerate(replicas)]))
        self.replicas = replicas
        self.drop = dict.fromkeys((r.name for r in replicas), 0)
        self.sent: list[tuple[str, str, int]] = []
        self.hold: asyncio.Event | None = None
        # How often those who wait for a snapshot were told to look again.
        self.looks = 0

    def _changed(self, *, use: bool = True) -> None:
        """Subscribers are called at once: there may be no loop."""
        self._notify()

    async def send_desired(self, view: ReplicaView, desired: Desired) -> None:
        self.sent.append((view.name, desired.snapshot, desired.generation))
        if self.hold is not None and view.replica.index == 0:
            await self.hold.wait()
        if self.drop[view.name] > 0:
            self.drop[view.name] -= 1
            raise ReplicaUnavailable(f"{view.name} is away")
        self.replicas[view.replica.index].machine.accept(desired)

    async def send_pause(self, view: ReplicaView, pause: Pause) -> None:
        if self.drop[view.name] > 0:
            self.drop[view.name] -= 1
            raise ReplicaUnavailable(f"{view.name} is away")
        self.replicas[view.replica.index].pause = pause

    def look_again(self) -> None:
        self.looks += 1

    def hear(self, index: int) -> None:
        self.views[index].replica.hear(self.replicas[index].report())

    def lose(self, index: int) -> None:
        self.views[index].replica.hear(None)


class World:
    """A deployment of fake replicas, one ledger file, and a gateway that can be restarted."""

    def __init__(self, path: Path, replicas: int = 3, swap_order: SwapOrder = "together") -> None:
        self.swap_order = swap_order
        self.runner = asyncio.Runner()
        self.url = sqlite_url(path / "ledger.sqlite")
        self.time = 0.0
        self.bucket = Bucket()
        self.broken, self.poison = self.bucket.broken, self.bucket.poison
        self.replicas = [FakeReplica(f"replica-{i}", self.bucket) for i in range(replicas)]
        self.time = 1.0
        # Generation, policy.
        self.signals: list[tuple[int, ResetPromptCache]] = []
        self.ledger: Ledger | None = None
        self.restart_gateway()

    def restart_gateway(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
        self.ledger = Ledger(self.url, now=self.wall_clock)
        self.run(self.ledger.ensure_deployment(DEPLOYMENT, "m", "file:///bucket", "ASYNC"))
        self.set = FakeReplicaSet(self.replicas)
        self.reconciler = Reconciler(
            self.ledger,
            self.set,
            DEPLOYMENT,
            swap_order=self.swap_order,
            monotonic=lambda: self.time,
        )

    def close(self) -> None:
        assert self.ledger is not None
        self.ledger.close()
        self.runner.close()

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def wall_clock(self) -> float:
        return 1000.0 + self.time

    def signal(self, identity: str, policy: ResetPromptCache = "all") -> None:
        assert self.ledger is not None
        url, fingerprint = f"file:///bucket/{identity}", self.bucket.fingerprint(identity)
        signal = Signal(identity=identity, url=url, reset_prompt_cache=policy, fingerprint=fingerprint)
        reports = [view.report for view in self.set.views if view.report]
        fleet = FleetReports(boots=tuple(one.boot for one in reports if one.own.snapshot == BASE_SNAPSHOT))
        result = self.run(self.ledger.signal(DEPLOYMENT, signal, fleet))
        if result.changed:
            self.signals.append((result.desired.generation, policy))
        self.reconciler.signalled()

    def reconcile(self) -> None:
        async def one_pass() -> None:
            await self.reconciler.reconcile_once()
            await self.reconciler.settle()

        self.time += 0.3
        self.run(one_pass())

    def calm(self, rounds: int = 80) -> None:
        """No more faults: messages and reports arrive, replicas work."""
        for _ in range(rounds):
            for i, replica in enumerate(self.replicas):
                self.set.drop[replica.name] = 0
                replica.step()
                self.set.hear(i)
            self.reconcile()

    def serving(self) -> list[tuple[str, bool]]:
        return [(r.machine.serving, v.admitted) for r, v in zip(self.replicas, self.set.views, strict=True)]

    def state(self) -> Any:
        assert self.ledger is not None
        return self.run(self.ledger.state(DEPLOYMENT))

    def stored(self, replica: FakeReplica) -> list[tuple[int, str, int, Stage, str]]:
        assert self.ledger is not None
        rows = self.run(self.ledger.boot_transitions(DEPLOYMENT, replica.name, replica.boot))
        return [(r.seq, r.identity, r.generation, r.stage, r.detail) for r in rows]

    def content(self) -> list[tuple[str | None, str | None]]:
        return [
            (r.content.snapshot, r.content.fingerprint) if r.content else (None, None) for r in self.replicas
        ]


def reported(replica: FakeReplica) -> list[tuple[int, str, int, Stage, str]]:
    return [(t.seq, t.snapshot, t.generation, t.stage, t.detail) for t in replica.history]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the fakes have no events; the test's timeout bounds it
        await asyncio.sleep(0)


def test_replicas_start_on_base_and_all_converge_on_a_signal(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.calm(2)
    assert world.serving() == [("base", True)] * 3
    world.signal("a")
    world.calm(10)
    assert world.serving() == [("a", True)] * 3
    assert [world.stored(r) for r in world.replicas] == [reported(r) for r in world.replicas]
    assert sorted(world.set.sent) == [(f"replica-{i}", "a", 1) for i in range(3)]
    world.close()


def test_the_order_of_signals_is_the_ledgers_whoever_signalled(tmp_path: Path) -> None:
    here = World(tmp_path)

    def order() -> list[tuple[str, int | None]]:
        return [(name, here.reconciler.order.position(name)) for name in ("base", "v1", "v2", "v3")]

    here.signal("v1")
    here.calm()
    here.signal("v2")
    here.reconcile()
    looks = here.set.looks
    assert order() == [("base", 0), ("v1", 1), ("v2", 2), ("v3", None)]
    assert here.reconciler.order.newest(()) == 1, "v2 is ready nowhere"
    here.calm()
    assert (here.reconciler.order.newest(()), here.set.looks) == (2, looks)
    # Signalled here.
    here.reconciler.order.learn([Signalled("v3", 4, False)])
    assert here.ledger is not None
    # The first of them by another gateway.
    for identity in ("v1", "v3"):
        here.run(here.ledger.signal(DEPLOYMENT, Signal(identity=identity, url="file:///bucket/x")))
    here.time += 2
    here.reconcile()
    assert order() == [("base", 0), ("v1", 3), ("v2", 2), ("v3", 4)]
    here.restart_gateway()
    here.reconcile()
    assert order() == [("base", 0), ("v1", 3), ("v2", 2), ("v3", 4)]
    assert here.reconciler.order.newest(()) == 2
    here.run(here.ledger.reset_ledger(DEPLOYMENT))
    here.time += 2
    here.reconcile()
    assert order() == [("base", 0), ("v1", None), ("v2", None), ("v3", None)]
    here.close()


def test_a_rebooted_replica_joins_only_after_it_serves_the_desired_snapshot(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=2)
    world.signal("a")
    world.calm(10)
    world.replicas[0].reboot()
    world.set.hear(0)
    joined_on = []
    for _ in range(10):
        world.reconcile()
        joined_on += [world.replicas[0].machine.serving] if world.set.views[0].admitted else []
        world.replicas[0].step()
        world.set.hear(0)
    assert set(joined_on) == {"a"}
    assert world.serving() == [("a", True), ("a", True)]
    world.close()


def test_a_rebooted_replica_that_fails_on_the_desired_snapshot_serves_the_last_ready_one(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, replicas=2)
    for identity in ("a", "b"):
        world.signal(identity)
        world.calm(10)
    world.broken.add("c")
    world.signal("c")
    world.calm(10)
    assert world.serving() == [("b", True), ("b", True)]
    world.replicas[1].reboot()
    world.calm(20)
    assert world.serving() == [("b", True), ("b", True)]
    sent = [identity for name, identity, _ in world.set.sent if name == "replica-1"]
    assert sent == ["a", "b", "c", "c", "b"]
    world.broken.clear()
    world.signal("c")
    world.calm(10)
    assert world.serving() == [("c", True), ("c", True)]
    world.close()


def test_stage_changes_from_while_the_gateway_was_down_are_stored(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=1)
    world.signal("a")
    world.set.hear(0)
    world.reconcile()
    world.restart_gateway()
    for _ in range(8):
        world.replicas[0].step()
    assert world.stored(world.replicas[0]) == []
    world.set.hear(0)
    world.reconcile()
    assert world.serving() == [("a", True)]
    stages = [stage for _, _, _, stage, _ in world.stored(world.replicas[0])]
    assert stages == ["fetching", "verifying", "staging", "staged", "committing", "checking", "idle"]
    world.close()


def test_a_replica_that_is_lost_while_it_is_written_down_costs_the_others_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=2)
    world.signal("a")
    for number in (0, 1):
        world.set.hear(number)
    world.reconcile()
    for _ in range(8):
        world.replicas[0].step()
        world.replicas[1].step()
    for number in (0, 1):
        world.set.hear(number)
    assert world.ledger is not None
    real = world.ledger.record

    async def record(*given: Any) -> int:
        world.set.views[0].replica.hear(None)
        return await real(*given)

    world.ledger.record = record  # type: ignore[method-assign]
    world.reconcile()
    assert len(world.stored(world.replicas[0])) == len(world.stored(world.replicas[1])) == 7
    assert [view.admitted for view in world.set.views] == [False, True]
    world.close()


def test_a_lost_message_is_sent_again(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=1)
    world.set.drop["replica-0"] = 2
    world.signal("a")
    world.set.hear(0)
    for _ in range(9):
        world.reconcile()
    assert world.set.sent == [("replica-0", "a", 1)] * 3
    world.replicas[0].step()
    assert world.replicas[0].machine.stage is Stage.FETCHING
    world.close()


def test_a_target_tells_which_report_it_was_chosen_by(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=1)
    told: list[tuple[int, int | None]] = []
    send = world.set.send_desired

    async def heard(view: ReplicaView, desired: Desired) -> None:
        told.append((desired.generation, desired.seen))
        await send(view, desired)

    world.set.send_desired = heard  # type: ignore[method-assign]
    for snapshot in ("a", "b"):
        world.signal(snapshot)
        world.set.hear(0)
        world.reconcile()
    assert told == [(1, 0), (2, 1)]
    world.close()


def test_a_fault_while_a_replica_is_told_is_logged_and_the_message_sent_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, replicas=1)
    world.set.hear(0)
    for send, told in ((world.set.send_desired, "to load a"), (world.set.send_pause, "of a pause")):
        faults = [RuntimeError("a fault of this process")]

        async def once(*message: Any, send: Any = send, faults: list[RuntimeError] = faults) -> None:
            if faults:
                raise faults.pop()
            await send(*message)

        setattr(world.set, send.__name__, once)
        assert world.ledger is not None
        if told == "of a pause":
            world.run(world.ledger.pause(DEPLOYMENT, "keep"))
        else:
            world.signal("a")
        with caplog.at_level("ERROR"):
            world.reconcile()
        assert f"replica-0 did not get {told}" in caplog.text
        assert "a fault of this process" in caplog.text
        world.time += 10
        world.reconciler.signalled()
        world.reconcile()
        world.set.hear(0)
    assert world.replicas[0].machine.accepted is not None
    assert world.replicas[0].pause.mode == "keep"
    world.close()


def test_a_replica_that_fetches_what_was_pushed_is_told_once_of_others_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    told: list[tuple[str, ...]] = []

    async def deliver(replica: KnownReplica, desired: Desired) -> None:
        if replica.name == "replica-0":
            told.append(desired.peers)
            world.replicas[0].machine.accept(desired)

    monkeypatch.setattr(FakeReplicaSet, "send_desired", ReplicaSet.send_desired)
    monkeypatch.setattr(world.set.facts, "send_desired", deliver)
    monkeypatch.setattr(world.bucket, "fingerprint", lambda identity: f"content:{identity}")
    for index in (0, 1):
        world.set.hear(index)
    world.signal("pushed")
    world.reconcile()
    assert told == [("http://fake/1",)]
    world.replicas[0].step()
    accepted = world.replicas[0].machine.accepted
    world.set.hear(0)
    world.reconcile()
    assert len(told) == 1, "there is nothing new"
    world.set.hear(2)
    for _ in range(3):
        world.time += 10.0
        world.reconcile()
    assert told[1:] == [("http://fake/1", "http://fake/2")]
    # It goes on as it was.
    assert world.replicas[0].machine.accepted == accepted
    assert world.replicas[0].machine.stage is Stage.FETCHING
    world.close()


def test_a_slow_replica_holds_up_no_other(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=2)

    async def scenario() -> None:
        world.set.hold = asyncio.Event()
        for i in range(2):
            world.set.hear(i)
        await world.reconciler.reconcile_once()
        await until(lambda: world.replicas[1].machine.accepted is not None)
        await until(lambda: "replica-1" not in world.reconciler._sending)
        assert world.replicas[0].machine.accepted is None
        assert repr(world.reconciler).endswith("sending=1>")
        world.set.hold.set()
        await world.reconciler.settle()
        assert world.replicas[0].machine.accepted is not None

    world.signal("a")
    world.run(scenario())
    world.close()


def test_a_wake_is_acted_on_without_waiting_for_the_poll(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=1)
    world.reconciler._poll_s = 3600.0

    async def scenario() -> None:
        task = asyncio.create_task(world.reconciler.run())
        world.set.hear(0)
        assert world.ledger is not None
        fleet = FleetReports(boots=(world.replicas[0].boot,))
        await world.ledger.signal(DEPLOYMENT, Signal(identity="a", url="file:///bucket/a"), fleet)
        world.reconciler.signalled()
        await until(lambda: world.replicas[0].machine.behind)
        while world.replicas[0].machine.serving != "a":
            world.replicas[0].step()
            world.set.hear(0)
        await until(lambda: world.set.views[0].admitted)
        task.cancel()
        await asyncio.wait([task])

    world.run(scenario())
    assert world.set.sent == [("replica-0", "a", 1)]
    world.close()


def test_continuous_publishing_cannot_keep_a_rebooted_replica_out(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=2)
    world.signal("s0")
    world.calm(10)
    world.replicas[0].reboot()
    for n in range(1, 12):
        world.calm(6)
        world.signal(f"s{n}")
        if world.set.views[0].admitted:
            break
    assert world.set.views[0].admitted
    assert world.replicas[0].machine.serving != BASE_SNAPSHOT
    world.close()


def test_a_restarted_replica_waits_for_the_bucket_and_joins_when_it_is_back(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=2)
    world.signal("a")
    world.calm(10)
    world.broken.add("a")
    world.replicas[1].reboot()
    world.calm(300)
    assert world.serving() == [("a", True), ("base", False)]
    tries = [generation for name, _, generation in world.set.sent if name == "replica-1"]
    assert tries == [1, 1, 2, 3, 4, 5, 6], "after 2, 4, 8, 16 and 32 of 90 seconds"
    assert [name for name, _, _ in world.set.sent].count("replica-0") == 1, "a retry is for one replica"
    world.broken.clear()
    world.calm(200)
    assert world.serving() == [("a", True), ("a", True)]
    world.signal("b")
    world.calm(10)
    assert world.serving() == [("b", True), ("b", True)]
    world.close()


def test_two_restarted_replicas_wait_each_for_itself(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=2)
    world.signal("a")
    world.calm(10)
    world.broken.add("a")
    for replica in world.replicas:
        replica.reboot()
    world.calm(20)
    assert world.serving() == [("base", False), ("base", False)]
    world.broken.clear()
    world.calm(40)
    assert world.serving() == [("a", True), ("a", True)]
    world.close()


def test_a_snapshot_that_kills_the_engine_is_given_up_for_the_fallback(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=1)
    (replica,) = world.replicas
    world.signal("good")
    world.calm(10)
    world.poison.add("killer")
    world.signal("killer")
    world.calm(60)
    assert world.serving() == [("good", True)]
    assert replica.boots == 3, "it was given two boots"
    why = "the engine died while loading it (stage: staging)"
    assert failure(world.state(), replica.report(), world.state().desired) == why
    rows = world.run(world.ledger.transitions(DEPLOYMENT))  # type: ignore[union-attr]
    killed = [(r.boot, r.detail) for r in rows if r.identity == "killer" and r.stage is Stage.ERROR]
    assert killed == [("replica-0-boot-1", why), ("replica-0-boot-2", why)]
    world.restart_gateway()
    replica.reboot()
    world.calm(60)
    assert (world.serving(), replica.boots) == ([("good", True)], 4), "the ledger remembers"
    world.poison.clear()
    world.signal("killer")
    world.calm(20)
    assert world.serving() == [("killer", True)]
    world.close()


def dies_on_one_after_another(world: World, count: int) -> None:
    """Every snapshot kills the replica once and is superseded before it can kill it again."""
    (replica,) = world.replicas
    for number in range(count):
        world.poison.add(f"killer-{number}")
        world.signal(f"killer-{number}")
        boots = replica.boots
        for _ in range(10):
            replica.step()
            if replica.boots > boots:
                break
            world.set.hear(0)
            world.reconcile()


def test_deaths_of_different_snapshots_add_up_and_the_replica_is_spared_for_a_while(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=1)
    (replica,) = world.replicas
    world.signal("good")
    world.calm(10)
    dies_on_one_after_another(world, 12)
    assert replica.boots < 10, "each would have killed it"
    assert replica.boots > 1 + LOSSES_MAX, "it was asked again, under a steady flow of signals too"
    world.calm(20)
    assert world.serving() == [("good", True)]
    why = failure(world.state(), replica.report(), world.state().desired)
    assert why is not None
    assert why.startswith("its engine died ")
    assert "times in a row while it loaded snapshots, the last time on killer-" in why
    world.restart_gateway()
    boots = replica.boots
    world.calm(5)
    assert replica.boots == boots, "the ledger remembers"
    world.signal("healthy")
    world.calm(5)
    assert world.serving() == [("good", True)], "whatever is signalled next waits a while"
    world.time += 61
    world.calm(30)
    assert world.serving() == [("healthy", True)]
    world.signal("next")
    world.calm(8)
    assert world.serving() == [("next", True)], "what it loaded makes up for those before"
    world.close()


def test_a_replica_that_never_served_a_snapshot_is_not_spared_for_good(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=1)
    dies_on_one_after_another(world, 8)
    world.signal("healthy")
    world.time += 61
    world.calm(10)
    world.time += 61
    world.calm(30)
    assert world.serving() == [("healthy", True)]
    world.close()


def test_a_death_that_nobody_heard_of_counts_too(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=1)
    (replica,) = world.replicas
    world.signal("good")
    world.calm(10)
    world.poison.add("killer")
    world.signal("killer")
    for _ in range(2):
        world.reconcile()
        for _ in range(4):
            replica.step()
        world.set.hear(0)
    world.calm(10)
    assert (world.serving(), replica.boots) == ([("good", True)], 3)
    world.close()


def test_a_gateway_that_restarts_during_the_first_swap_keeps_everybody_in(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=2)
    world.calm(2)
    world.signal("a")
    world.reconcile()
    world.replicas[0].step()
    world.restart_gateway()
    for i in range(2):
        world.set.hear(i)
    world.reconcile()
    assert world.serving() == [("base", True), ("base", True)]
    world.replicas[1].reboot()
    world.set.hear(1)
    world.reconcile()
    assert world.serving() == [("base", True), ("base", False)]
    world.calm(10)
    assert world.serving() == [("a", True), ("a", True)]
    world.close()


def test_overwritten_files_reach_every_replica_once_they_are_signalled_and_none_before(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, replicas=2)
    world.signal("a")
    world.calm(10)
    world.bucket.files["a"] += 1
    world.replicas[1].reboot()
    world.calm(20)
    assert world.content() == [("a", "files 0 of a"), (None, None)]
    assert world.serving() == [("a", True), ("base", False)]
    world.signal("a")
    world.calm(20)
    assert world.content() == [("a", "files 1 of a")] * 2
    assert world.serving() == [("a", True)] * 2
    world.close()


def test_a_snapshot_asked_for_again_is_sent_only_to_those_that_failed(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=3)
    world.signal("a")
    for i in range(3):
        world.set.hear(i)
    world.reconcile()
    for _ in range(3):
        world.replicas[0].step()
    while world.replicas[1].machine.stage is not Stage.IDLE or world.replicas[1].machine.serving != "a":
        world.replicas[1].step()
    world.broken.add("a")
    for _ in range(4):
        world.replicas[2].step()
    world.broken.clear()
    for i in range(3):
        world.set.hear(i)
    world.reconcile()
    assert [r.machine.stage for r in world.replicas] == ["staging", "idle", "error"]
    world.signal("a")
    world.calm(10)
    assert world.set.sent[3:] == [("replica-2", "a", 2)]
    assert world.serving() == [("a", True)] * 3
    world.close()


def test_a_superseded_policy_is_not_lost(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=2)
    world.signal("s1", "none")
    world.calm(10)
    world.set.lose(1)
    for identity, policy in (("s2", "all"), ("s3", "new_session")):
        world.signal(identity, policy)  # type: ignore[arg-type]
        for _ in range(10):
            world.replicas[0].step()
            world.set.hear(0)
            world.reconcile()
    world.signal("s4", "none")
    world.calm(10)
    assert [policy for *_, policy in world.replicas[0].swaps] == ["none", "all", "new_session", "none"]
    assert [policy for *_, policy in world.replicas[1].swaps] == ["none", "all"]
    world.close()


def test_a_replica_that_fell_back_owes_the_policies_of_all_later_signals(tmp_path: Path) -> None:
    """It computed KV of `a` after the signal that forbade the use of such KV: `b` never became ready there."""
    world = World(tmp_path, replicas=2)
    world.signal("a", "none")
    world.calm(10)
    world.broken.add("b")
    world.signal("b", "all")
    world.calm(10)
    world.replicas[1].reboot()
    world.calm(20)
    assert world.serving() == [("a", True), ("a", True)]
    world.signal("c", "none")
    world.calm(10)
    assert [replica.swaps[-1][-1] for replica in world.replicas] == ["all", "all"]
    world.close()


def test_a_pass_that_fails_unexpectedly_is_logged_and_the_loop_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, replicas=1)
    world.reconciler._poll_s = 0.01
    assert world.ledger is not None
    real, failures = world.ledger.state, 3

    async def state(name: str) -> Any:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ZeroDivisionError("out of the blue")
        return await real(name)

    async def scenario() -> None:
        world.ledger.state = state  # type: ignore[union-attr, method-assign]
        world.reconciler._monotonic = time.monotonic
        task = asyncio.create_task(world.reconciler.run())
        async with asyncio.timeout(100):
            await until(lambda: world.replicas[0].machine.behind)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    world.signal("a")
    world.set.hear(0)
    world.run(scenario())
    logged = [record for record in caplog.records if record.message.startswith("reconciling failed")]
    assert len(logged) == 3
    assert all(record.exc_info is not None for record in logged)
    assert "ZeroDivisionError: out of the blue" in caplog.text
    world.close()


def test_a_row_that_another_gateway_removed_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, replicas=1)
    world.reconciler._poll_s = 0.01
    real, passes = world.reconciler.reconcile_once, 0

    async def reconcile_once() -> None:
        nonlocal passes
        passes += 1
        await real()

    async def scenario() -> None:
        assert world.ledger is not None
        world.reconciler.reconcile_once = reconcile_once  # type: ignore[method-assign]
        await world.ledger.delete_deployment(DEPLOYMENT)
        task = asyncio.create_task(world.reconciler.run())
        async with asyncio.timeout(100):
            await until(lambda: passes >= 3)
        task.cancel()
        await asyncio.wait([task])

    world.set.hear(0)
    world.run(scenario())
    assert not [record for record in caplog.records if record.exc_info is not None]
    world.close()


IDENTITIES = ["a", "b"]
REPLICAS = st.integers(0, 2)


class Convergence(RuleBasedStateMachine):
    """Signals, slow and lossy messages, reboots, bad, overwritten and deadly files and gateway restarts in any order."""

    @initialize(published=st.booleans())
    def start(self, published: bool) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.world = World(Path(self.directory.name))
        self.joined: dict[str, str] = {}
        if published:
            self.world.signal("a", "none")
            self.a_quiet_while_of(10)

    @rule(identity=st.sampled_from(IDENTITIES), policy=st.sampled_from(["none", "new_session", "all"]))
    def signal(self, identity: str, policy: ResetPromptCache) -> None:
        self.world.signal(identity, policy)

    @rule(identity=st.sampled_from(IDENTITIES), signal=st.booleans())
    def overwrite(self, identity: str, signal: bool) -> None:
        self.world.bucket.files[identity] = self.world.bucket.files.get(identity, 0) + 1
        if signal:
            self.world.signal(identity)

    @rule(identity=st.sampled_from(IDENTITIES))
    def poison_or_cure(self, identity: str) -> None:
        self.world.poison ^= {identity}

    @rule(identity=st.sampled_from(IDENTITIES))
    def break_or_mend(self, identity: str) -> None:
        self.world.broken ^= {identity}

    @rule(index=REPLICAS, steps=st.integers(1, 6))
    def work(self, index: int, steps: int) -> None:
        for _ in range(steps):
            self.world.replicas[index].step()

    @rule(index=REPLICAS)
    def hear(self, index: int) -> None:
        self.world.set.hear(index)

    @rule(index=REPLICAS)
    def lose(self, index: int) -> None:
        self.world.set.lose(index)

    @rule(index=REPLICAS, bad=st.none() | st.sampled_from(IDENTITIES))
    def reboot(self, index: int, bad: str | None) -> None:
        """A replica that starts over is where bad files hurt most."""
        self.world.replicas[index].reboot()
        self.world.set.lose(index)
        if bad is not None:
            self.world.broken.add(bad)

    @rule(index=REPLICAS, count=st.integers(1, 3))
    def drop_messages(self, index: int, count: int) -> None:
        self.world.set.drop[f"replica-{index}"] += count

    @rule(rounds=st.integers(6, 12))
    def a_quiet_while(self, rounds: int) -> None:
        """Long enough for a load or two; without it few runs ever get a snapshot ready."""
        self.a_quiet_while_of(rounds)

    def a_quiet_while_of(self, rounds: int) -> None:
        for _ in range(rounds):
            for index, replica in enumerate(self.world.replicas):
                self.world.set.drop[replica.name] = 0
                replica.step()
                self.world.set.hear(index)
            self.reconcile_and_check()

    @rule()
    def reconcile(self) -> None:
        self.reconcile_and_check()

    def reconcile_and_check(self) -> None:
        """Whoever joins on base weights does so because no published snapshot was ever ready, or it began before them."""
        out = [view for view in self.world.set.views if not view.admitted]
        self.world.reconcile()
        joined = [view.report for view in out if view.admitted and view.report]
        state = self.world.state()
        for report in joined:
            if report.own.snapshot == BASE_SNAPSHOT and state.ever_ready:
                assert report.boot in state.first_boots

    @rule()
    def restart_gateway(self) -> None:
        self.world.restart_gateway()
        self.joined.clear()

    @precondition(lambda self: hasattr(self, "world"))
    @invariant()
    def a_boot_that_joined_stays_in(self) -> None:
        for view in self.world.set.views:
            if view.report is None:
                continue
            if self.joined.get(view.name) == view.report.boot:
                assert view.admitted
            if view.admitted:
                self.joined[view.name] = view.report.boot

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.calm()
        state = world.state()
        for replica, view in zip(world.replicas, world.set.views, strict=True):
            self.check_one(state, replica, view)
        self.mend()
        state = world.state()
        for replica, view in zip(world.replicas, world.set.views, strict=True):
            assert view.admitted
            assert not state.ever_ready or replica.machine.serving != BASE_SNAPSHOT
            self.check_policies(replica)
        before = len(world.set.sent)
        world.calm(5)
        assert len(world.set.sent) == before
        world.close()
        self.directory.cleanup()

    def check_one(self, state: Any, replica: FakeReplica, view: ReplicaView) -> None:
        """At the desired snapshot, or known to have failed on it and on the best it can have instead."""
        report, machine = view.report, replica.machine
        assert report is not None
        assert self.world.stored(replica) == reported(replica)
        # A replica that failed is asked again and again, so the calm may end while it tries.
        tries = report.own.stage not in (Stage.IDLE, Stage.ERROR)
        if state.desired is None or serves(state, report, state.desired):
            assert view.admitted
            assert state.desired is None or replica.content is not None
            assert state.desired is None or replica.content.fingerprint == state.desired.fingerprint  # type: ignore[union-attr]
        elif machine.serving != BASE_SNAPSHOT:
            assert tries or failure(state, report, state.desired) is not None
            assert view.admitted
        # It goes on trying.
        elif state.ever_ready:
            assert self.world.reconciler._stuck[replica.name].signal == state.desired.generation
        else:
            assert tries or failure(state, report, state.desired) is not None
            assert view.admitted

    def mend(self) -> None:
        """Every file is as it was signalled and loads again; the longest pause between retries passes."""
        world = self.world
        world.broken.clear()
        world.poison.clear()
        assert world.ledger is not None
        for row in world.run(world.ledger.snapshots(DEPLOYMENT)):
            assert row.fingerprint is not None
            world.bucket.files[row.identity] = int(row.fingerprint.split()[1])
        for _ in range(2):
            world.time += 61
            world.calm(25)

    def check_policies(self, replica: FakeReplica) -> None:
        """No swap applied less than what was asked for since the swap before. A later boot began with an empty cache."""
        for boot, before, after, applied in replica.swaps:
            for generation, policy in self.world.signals:
                if before < generation <= after and (before > 0 or boot == 1):
                    assert stronger_reset(applied, policy) == applied


# Thousands of hops between threads: slow beside other work.
TestConvergence = pytest.mark.timeout(900)(Convergence.TestCase)
TestConvergence.settings = settings(
    max_examples=of_tier(fast=10, test=30, all=300), stateful_step_count=30, deadline=None
)
