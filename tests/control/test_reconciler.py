"""The reconciler on a real ledger file, with replicas that run the real swap machine behind a lossy network."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from midstream.control.loop import Reconciler
from midstream.control.reconcile import failure
from midstream.errors import ReplicaUnavailable
from midstream.gateway.replicas import ReplicaView
from midstream.ledger import Ledger, sqlite_url
from midstream.replica.swap import Event, SwapMachine
from midstream.types import BASE_SNAPSHOT, Desired, ReplicaReport, Stage, Transition

DEPLOYMENT = "accounts/local/deployments/default"
NEXT = {
    Stage.FETCHING: Event.FETCHED,
    Stage.VERIFYING: Event.VERIFIED,
    Stage.STAGING: Event.STAGED,
    Stage.STAGED: Event.COMMIT,
    Stage.COMMITTING: Event.COMMITTED,
}


class FakeReplica:
    """One replica process: the real swap machine, stepped by the test; loading a snapshot in `broken` fails."""

    def __init__(self, name: str, broken: set[str]) -> None:
        self.name, self.broken, self.boots = name, broken, 0
        self.reboot()

    def reboot(self) -> None:
        self.boots += 1
        self.machine = SwapMachine(clock=lambda: 7.0)
        self.history: list[Transition] = []

    @property
    def boot(self) -> str:
        return f"boot-{self.boots}"

    def step(self) -> None:
        machine = self.machine
        if machine.behind and machine.stage is not Stage.COMMITTING:
            machine.begin()
        elif machine.stage is Stage.VERIFYING and machine.target and machine.target.snapshot in self.broken:
            machine.fail(f"{machine.target.snapshot} is broken")
        elif machine.stage in NEXT:
            machine.advance(NEXT[machine.stage])
        seen = len(self.history)
        self.history += [moved for moved in machine.transitions if moved.seq >= seen]

    def report(self) -> ReplicaReport:
        machine = self.machine
        return ReplicaReport(
            replica=self.name,
            boot=self.boot,
            ready=True,
            snapshot=machine.serving,
            generation=machine.accepted.generation if machine.accepted else 0,
            stage=machine.stage,
            target=machine.target.snapshot if machine.target else None,
            error=machine.error,
            transitions=tuple(machine.transitions),
        )


class FakeReplicaSet:
    """Views of fake replicas. Reports arrive when the test says so; `drop` counts messages that will be lost."""

    def __init__(self, replicas: list[FakeReplica]) -> None:
        self.replicas = replicas
        self.views = tuple(ReplicaView(i, r.name, f"http://fake/{i}") for i, r in enumerate(replicas))
        self.drop = dict.fromkeys((r.name for r in replicas), 0)
        self.sent: list[tuple[str, str, int]] = []
        self.hold: asyncio.Event | None = None
        self._boots: dict[str, str] = {}
        self._callback: Callable[[], None] = lambda: None

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    async def send_desired(self, view: ReplicaView, desired: Desired) -> None:
        self.sent.append((view.name, desired.snapshot, desired.generation))
        if self.hold is not None and view.index == 0:
            await self.hold.wait()
        if self.drop[view.name] > 0:
            self.drop[view.name] -= 1
            raise ReplicaUnavailable(f"{view.name} is away")
        self.replicas[view.index].machine.accept(desired)

    def hear(self, index: int) -> None:
        view, report = self.views[index], self.replicas[index].report()
        if self._boots.get(view.name) != report.boot:
            self._boots[view.name] = report.boot
            view.admitted = False
        view.report = report
        self._callback()

    def lose(self, index: int) -> None:
        self.views[index].report = None
        self._callback()


class World:
    """A deployment of fake replicas, one ledger file, and a gateway that can be restarted."""

    def __init__(self, path: Path, replicas: int = 3) -> None:
        self.runner = asyncio.Runner()
        self.url = sqlite_url(path / "ledger.sqlite")
        self.broken: set[str] = set()
        self.replicas = [FakeReplica(f"replica-{i}", self.broken) for i in range(replicas)]
        self.time = 0.0
        self.ledger: Ledger | None = None
        self.restart_gateway()

    def restart_gateway(self) -> None:
        if self.ledger is not None:
            self.ledger.close()
        self.ledger = Ledger(self.url, now=lambda: 1.0)
        self.run(self.ledger.ensure_deployment(DEPLOYMENT, "m", "file:///bucket", "ASYNC"))
        self.set = FakeReplicaSet(self.replicas)
        self.reconciler = Reconciler(
            self.ledger,
            self.set,  # type: ignore[arg-type]
            DEPLOYMENT,
            monotonic=lambda: self.time,
        )

    def close(self) -> None:
        assert self.ledger is not None
        self.ledger.close()
        self.runner.close()

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def signal(self, identity: str) -> None:
        assert self.ledger is not None
        self.run(self.ledger.signal(DEPLOYMENT, identity, f"file:///bucket/{identity}"))
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
    assert stages == ["fetching", "verifying", "staging", "staged", "committing", "idle"]
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
        await world.ledger.signal(DEPLOYMENT, "a", "file:///bucket/a")
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


IDENTITIES = ["a", "b", "c"]
REPLICAS = st.integers(0, 2)


class Convergence(RuleBasedStateMachine):
    """Signals, slow and lossy messages, reboots, bad files and gateway restarts in any order."""

    @initialize()
    def start(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.world = World(Path(self.directory.name))
        self.joined: dict[str, str] = {}

    @rule(identity=st.sampled_from(IDENTITIES))
    def signal(self, identity: str) -> None:
        self.world.signal(identity)

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

    @rule(index=REPLICAS)
    def reboot(self, index: int) -> None:
        self.world.replicas[index].reboot()
        self.world.set.lose(index)

    @rule(index=REPLICAS, count=st.integers(1, 3))
    def drop_messages(self, index: int, count: int) -> None:
        self.world.set.drop[f"replica-{index}"] += count

    @rule()
    def reconcile(self) -> None:
        """Whoever joins on base weights does so because no published snapshot was ever ready."""
        views = self.world.set.views
        out = [view for view in views if not view.admitted]
        self.world.reconcile()
        joined = {view.report.snapshot for view in out if view.admitted and view.report}
        state = self.world.state()
        if BASE_SNAPSHOT in joined:
            assert state.desired is None or state.fallbacks == ()

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
            assert world.stored(replica) == reported(replica)
            machine, report = replica.machine, view.report
            assert report is not None
            assert machine.stage in (Stage.IDLE, Stage.ERROR)
            if state.desired is None or machine.serving == state.desired.snapshot:
                assert view.admitted
                continue
            assert failure(report, state.desired) == f"{state.desired.snapshot} is broken"
            if machine.serving == BASE_SNAPSHOT:
                assert all(failure(report, fallback) for fallback in state.fallbacks) or view.admitted
            else:
                assert view.admitted
        before = len(world.set.sent)
        world.calm(5)
        assert len(world.set.sent) == before
        world.close()
        self.directory.cleanup()


TestConvergence = Convergence.TestCase
TestConvergence.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
