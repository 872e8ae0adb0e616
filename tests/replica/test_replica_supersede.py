"""A newer target, a cancelled driver, or a failure at every point of a swap: what is reported is what the engine serves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from replica_fakes import FakeEngine, FakeSource, make_replica

from midstream.core.types import BASE_SNAPSHOT, Desired, Stage, SwapTiming
from midstream.replica.gate import Door
from midstream.replica.replica import Replica
from midstream.replica.swap import driver as driver_module
from midstream.replica.swap.table import SwapEvent
from midstream.snapshots.arc2.files import Making

TICKS = range(6)


def wanted(snapshot: str, generation: int, **more: object) -> Desired:
    return Desired(snapshot=snapshot, generation=generation, url=f"file:///b/{snapshot}", **more)  # type: ignore[arg-type]


@asynccontextmanager
async def play(
    directory: Path,
    engine: FakeEngine,
    source: FakeSource,
) -> AsyncIterator[Replica]:
    async with asyncio.timeout(120):
        replica = make_replica(directory, engine, source)
        await replica.start()
        try:
            yield replica
        finally:
            await replica.close()


def paced(stage: int = 0, commit: int = 0, source: int = 0) -> tuple[FakeEngine, FakeSource]:
    engine, files = FakeEngine(), FakeSource()
    engine.stage_ticks, engine.commit_ticks, files.ticks = stage, commit, source
    return engine, files


async def tick(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def until(replica: Replica, holds: Callable[[], bool]) -> None:
    while not holds():
        await replica.changed(5.0)


async def serves(replica: Replica, snapshot: str) -> None:
    machine = replica.own.driver.machine
    await until(replica, lambda: machine.serving == snapshot and machine.stage is Stage.IDLE)


def attempts_left() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("swap to")]


def check_agreement(replica: Replica, engine: FakeEngine, boot: str) -> None:
    """What the replica says of its swaps is what the engine did, in the same order."""
    machine = replica.own.driver.machine
    done = [
        after.snapshot
        for before, after in zip(machine.transitions, list(machine.transitions)[1:], strict=False)
        if (before.stage, after.stage) == (Stage.COMMITTING, Stage.CHECKING)
    ]
    assert done == engine.switches
    assert machine.serving == engine.serving
    assert replica.own.namespaces.admit(None) == len(engine.switches)
    assert (replica.boot, replica.ready, replica.own.gate.door, engine.starts) == (boot, True, Door.OPEN, 1)


@pytest.mark.parametrize("transition", ["ASYNC", "SYNC"])
@pytest.mark.parametrize("stage", TICKS)
@pytest.mark.parametrize("commit", TICKS)
async def test_a_newer_target_at_any_tick_of_a_swap_is_what_serves_in_the_end(
    tmp_path: Path, stage: int, commit: int, transition: str
) -> None:
    for after in range(2 * 2 + stage + commit + 12):
        engine, source = paced(stage, commit, 2)

        async def scenario(replica: Replica, after: int = after, engine: FakeEngine = engine) -> None:
            boot = replica.boot
            replica.desire(wanted("v1", 1, transition=transition))
            await tick(after)
            begun = "commit v1" in engine.calls
            replica.desire(wanted("v2", 2, transition=transition))
            await serves(replica, "v2")
            assert engine.switches == (["v1", "v2"] if begun else ["v2"])
            assert ("commit v1" in engine.calls) == begun
            check_agreement(replica, engine, boot)
            replica.desire(wanted("v3", 3))
            await serves(replica, "v3")

        async with play(tmp_path, engine, source) as replica:
            await scenario(replica)


@pytest.mark.parametrize("between", TICKS)
async def test_a_target_that_is_withdrawn_and_comes_back_is_loaded_after_all(
    tmp_path: Path, between: int
) -> None:
    for after in range(14):
        engine, source = paced(2, 2, 1)

        async def scenario(replica: Replica, after: int = after, engine: FakeEngine = engine) -> None:
            boot = replica.boot
            replica.desire(wanted("v1", 1))
            await tick(after)
            replica.desire(wanted("v2", 2))
            await tick(between)
            replica.desire(wanted("v1", 1))
            machine = replica.own.driver.machine
            await until(replica, lambda: not machine.behind and machine.stage is Stage.IDLE)
            assert machine.serving == "v1"
            check_agreement(replica, engine, boot)

        async with play(tmp_path, engine, source) as replica:
            await scenario(replica)


@pytest.mark.parametrize("commit", TICKS)
async def test_a_driver_cancelled_at_any_tick_leaves_no_attempt_behind_and_no_switch_half_done(
    tmp_path: Path, commit: int
) -> None:
    for after in range(commit + 16):
        engine, source = paced(2, commit, 2)

        async def scenario(replica: Replica, after: int = after, engine: FakeEngine = engine) -> None:
            replica.own.begin()
            driver = replica.own.driver
            # As a replica that has started has it.
            driver.info = engine.info
            task = asyncio.create_task(driver.run())
            driver.desire(wanted("v1", 1))
            await tick(after)
            task.cancel()
            await tick(1)
            task.cancel()
            await asyncio.wait((task,))
            begun = "commit v1" in engine.calls
            assert task.cancelled()
            assert attempts_left() == []
            serving = "v1" if begun else BASE_SNAPSHOT
            assert (engine.serving, driver.machine.serving) == (serving, serving)
            assert replica.own.namespaces.admit(None) == len(engine.switches) == begun
            assert replica.own.gate.door is Door.OPEN
            await tick(20)
            assert engine.serving == serving

        async with play(tmp_path, engine, source) as replica:
            await scenario(replica)


async def test_a_stage_that_ends_in_spite_of_its_cancellation_is_not_committed(tmp_path: Path) -> None:
    class Stubborn(FakeEngine):
        async def stage(self, snapshot: str, directory: Path) -> None:
            try:
                await super().stage(snapshot, directory)
            except asyncio.CancelledError:
                self.staged = snapshot

    engine, source = Stubborn(), FakeSource()

    async with play(tmp_path, engine, source) as replica:
        engine.stage_gate.clear()
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: "stage v1 v1" in engine.calls)
        replica.desire(wanted("v2", 2))
        engine.stage_gate.set()
        await serves(replica, "v2")
        assert engine.switches == ["v2"]
        assert replica.own.gate.door is Door.OPEN


async def test_an_attempt_is_cancelled_once_however_many_targets_follow(tmp_path: Path) -> None:
    """A second cancellation would not wait for what the first one has to clean up."""

    class Tidy(FakeSource):
        def __init__(self) -> None:
            super().__init__()
            self.tidied = asyncio.Event()

        async def fetch(
            self, desired: Desired, *, refetch: bool = False, making: Making | None = None
        ) -> Path | None:
            try:
                return await super().fetch(desired, refetch=refetch, making=making)
            except asyncio.CancelledError:
                await self.tidied.wait()
                self.calls.append(f"tidied {desired.snapshot}")
                raise

    engine, source = FakeEngine(), Tidy()
    source.blocked = {"v1"}

    async with play(tmp_path, engine, source) as replica:
        replica.desire(wanted("v1", 1))
        await source.fetching.wait()
        replica.desire(wanted("v2", 2))
        await tick(3)
        replica.desire(wanted("v3", 3))
        await tick(3)
        source.tidied.set()
        await serves(replica, "v3")
        assert source.calls[:3] == ["fetch v1", "cancelled v1", "tidied v1"]


async def test_what_served_in_the_last_boot_is_taken_from_the_cache_in_the_next(tmp_path: Path) -> None:
    """Only a load of what serves already mistrusts the local files."""
    engine, source = FakeEngine(), FakeSource()

    async with play(tmp_path, engine, source) as replica:
        boot = replica.boot
        replica.desire(wanted("v1", 1))
        await serves(replica, "v1")
        replica.desire(wanted("v1", 2, reload=2))
        await until(replica, lambda: engine.switches == ["v1", "v1"])
        await serves(replica, "v1")
        await engine.die()
        await until(replica, lambda: replica.ready and replica.boot != boot)
        replica.desire(wanted("v1", 2))
        await serves(replica, "v1")
        fetched = [call for call in source.calls if call.startswith("fetch")]
        assert fetched == ["fetch v1", "fetch v1 anew", "fetch v1"]


async def test_a_commit_that_fails_in_a_way_nobody_expected_is_a_new_boot(tmp_path: Path) -> None:
    class Confused(FakeEngine):
        async def commit(self, snapshot: str) -> SwapTiming:
            timing = await super().commit(snapshot)
            if len(self.switches) == 1:
                # It has switched all the same.
                raise OSError("the reply was cut short")
            return timing

    engine, source = Confused(), FakeSource()

    async with play(tmp_path, engine, source) as replica:
        boot = replica.boot
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.ready and replica.boot != boot)
        assert (engine.starts, engine.serving, replica.report().own.snapshot) == (
            2,
            BASE_SNAPSHOT,
            BASE_SNAPSHOT,
        )
        assert engine.calls[-1] == "close"
        replica.desire(wanted("v1", 1))
        await serves(replica, "v1")
        assert engine.serving == "v1"


async def test_a_swap_that_ends_as_if_cancelled_is_a_new_boot(tmp_path: Path) -> None:
    class Interrupted(FakeSource):
        async def fetch(
            self, desired: Desired, *, refetch: bool = False, making: Making | None = None
        ) -> Path | None:
            if not self.calls:
                self.calls.append("interrupted")
                raise asyncio.CancelledError
            return await super().fetch(desired, refetch=refetch, making=making)

    engine = FakeEngine()

    async with play(tmp_path, engine, Interrupted()) as replica:
        boot = replica.boot
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.ready and replica.boot != boot)
        replica.desire(wanted("v1", 1))
        await serves(replica, "v1")


async def test_a_bug_in_the_driver_is_a_new_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    async with play(tmp_path, engine, FakeSource()) as replica:
        boot, machine = replica.boot, replica.own.driver.machine

        def broken(event: SwapEvent) -> None:
            raise ZeroDivisionError(event)

        monkeypatch.setattr(machine, "begin", broken)
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.ready and replica.boot != boot)
        assert engine.starts == 2


async def test_an_unexpected_failure_before_the_commit_keeps_the_boot_and_shows_the_error(
    tmp_path: Path,
) -> None:
    class Buggy(FakeSource):
        async def verify(self, path: Path, desired: Desired) -> None:
            raise KeyError("model.embed_tokens")

    engine = FakeEngine()

    async with play(tmp_path, engine, Buggy()) as replica:
        boot = replica.boot
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.report().own.stage is Stage.ERROR)
        assert replica.report().own.error == "'model.embed_tokens'"
        assert (replica.boot, replica.ready, engine.starts) == (boot, True, 1)


async def test_an_engine_that_dies_while_it_commits_does_not_hold_up_the_next_boot(tmp_path: Path) -> None:
    engine = FakeEngine()

    async with play(tmp_path, engine, FakeSource()) as replica:
        boot = replica.boot
        engine.commit_gate.clear()
        replica.desire(wanted("v1", 1))
        await engine.committing.wait()
        await engine.die()
        await until(replica, lambda: replica.ready)
        assert (replica.boot != boot, replica.report().own.snapshot, engine.switches) == (
            True,
            BASE_SNAPSHOT,
            [],
        )


async def test_the_files_of_a_failed_or_superseded_snapshot_do_not_stay(tmp_path: Path) -> None:
    engine, source = FakeEngine(), FakeSource()

    async with play(tmp_path, engine, source) as replica:
        source.corrupt, source.blocked = {"v1"}, {"v2"}
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.report().own.stage is Stage.ERROR)
        await tick(5)
        source.fetching.clear()
        replica.desire(wanted("v2", 2))
        await source.fetching.wait()
        replica.desire(wanted("v3", 3))
        await serves(replica, "v3")
        await tick(5)
        assert source.calls == [
            "fetch v1", "verify v1", "release all but ['base']",
            "fetch v2", "cancelled v2", "release all but ['base', 'v3']",
            "fetch v3", "verify v3", "release all but ['v3']",
        ]  # fmt: skip


async def test_a_sync_swap_says_how_many_requests_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver_module, "DRAIN_LOG_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, driver_module.__name__)
    logged, emit = asyncio.Event(), caplog.handler.emit

    def watch(entry: logging.LogRecord) -> None:
        emit(entry)
        logged.set()

    monkeypatch.setattr(caplog.handler, "emit", watch)

    async with play(tmp_path, FakeEngine(), FakeSource()) as replica:
        with replica.own.gate.admitted(), replica.own.gate.admitted():
            replica.desire(wanted("v1", 1, transition="SYNC"))
            await logged.wait()
            assert caplog.messages[0] == "the switch to v1 waits for 2 requests to end"
        await serves(replica, "v1")


async def test_a_trainer_that_signals_faster_than_a_load_takes_does_not_starve_its_replica(
    tmp_path: Path,
) -> None:
    engine, source = paced(stage=12, source=12)

    async with play(tmp_path, engine, source) as replica:
        boot = replica.boot
        for generation in range(1, 31):
            replica.desire(wanted(f"step-{generation}", generation))
            await tick(9)
        assert engine.switches, "thirty signals, and still on the base weights"
        await serves(replica, "step-30")
        check_agreement(replica, engine, boot)


async def test_a_check_is_given_up_for_other_weights_and_what_it_left_unchecked_is_never_called_ready(
    tmp_path: Path,
) -> None:
    engine, source = FakeEngine(), FakeSource()

    async with play(tmp_path, engine, source) as replica:
        engine.check_gate.clear()
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.report().own.stage is Stage.CHECKING)
        source.corrupt.add("v2")
        replica.desire(wanted("v2", 2))
        await until(replica, lambda: replica.report().own.stage is Stage.ERROR)
        assert (engine.serving, replica.report().own.snapshot, replica.report().own.check) == (
            "v1",
            "v1",
            None,
        )
        engine.check_gate.set()
        replica.desire(wanted("v1", 3))
        await serves(replica, "v1")
        assert engine.switches == ["v1", "v1"]
        found = replica.report().own.check
        assert found is not None
        assert (found.snapshot, found.generation) == ("v1", 3)


async def test_a_check_is_not_given_up_for_what_is_being_checked(tmp_path: Path) -> None:
    engine, source = FakeEngine(), FakeSource()

    async with play(tmp_path, engine, source) as replica:
        engine.check_gate.clear()
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.report().own.stage is Stage.CHECKING)
        replica.desire(wanted("v1", 2))
        await tick(20)
        assert replica.report().own.stage is Stage.CHECKING
        engine.check_gate.set()
        await until(
            replica,
            lambda: replica.report().own.stage is Stage.IDLE and not replica.own.driver.machine.behind,
        )
        assert engine.switches == ["v1"]
        assert len(engine.canaries) == 2, "of the start and of v1"


async def test_a_check_that_does_not_end_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, source = FakeEngine(), FakeSource()

    async with play(tmp_path, engine, source) as replica:
        monkeypatch.setattr(driver_module, "CHECK_S_MAX", 0.0)
        engine.check_gate.clear()
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.report().own.stage is Stage.ERROR)
        assert engine.switches == ["v1"], "it is not tried again by itself"
        assert replica.report().own.error == "its check did not end within 0 s"
        assert replica.report().own.refused == 0, "the weights may be good"
        assert not replica.report().ready


async def test_a_check_that_waits_behind_other_requests_says_nothing_of_the_weights_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that computes its own prompts in their turn, or is paused while it should check."""
    engine, source = FakeEngine(), FakeSource()
    engine.proves_staged = False

    async with play(tmp_path, engine, source) as replica:
        usual = driver_module.CHECK_S_MAX
        monkeypatch.setattr(driver_module, "CHECK_S_MAX", 0.0)
        engine.check_gate.clear()
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: caplog.text.count("it begins again") >= 2)
        assert replica.report().own.stage is Stage.CHECKING
        monkeypatch.setattr(driver_module, "CHECK_S_MAX", usual)
        engine.check_gate.set()
        await until(replica, lambda: replica.report().own.stage is Stage.IDLE)
        assert replica.report().own.error is None
        assert replica.report().own.snapshot == "v1"
        assert engine.switches == ["v1"]


async def test_what_was_staged_in_vain_does_not_stay_in_the_engine(tmp_path: Path) -> None:
    engine, source = FakeEngine(), FakeSource()

    async with play(tmp_path, engine, source) as replica:
        replica.desire(wanted("v1", 1, hold=True))
        await until(replica, lambda: replica.report().own.held)
        assert engine.staged == "v1"
        source.corrupt.add("v2")
        replica.desire(wanted("v2", 2))
        await until(replica, lambda: replica.report().own.stage is Stage.ERROR)
        assert engine.staged is None
        assert engine.switches == []


@pytest.mark.parametrize("transition", ["ASYNC", "SYNC"])
async def test_nobody_is_woken_for_the_steps_of_an_async_switch_and_all_are_told_after_it(
    tmp_path: Path, transition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "QUIET_S", 600.0)
    engine, source = paced(stage=6, commit=6)

    async with play(tmp_path, engine, source) as replica:
        seen: list[Stage] = []
        replica.desire(wanted("v1", 1, transition=transition))
        while replica.report().own.stage is not Stage.IDLE or not engine.switches:
            await replica.changed(60.0)
            seen.append(replica.report().own.stage)
        assert Stage.STAGING in seen
        assert (Stage.COMMITTING in seen) == (transition == "SYNC")
        told = [moved.stage.value for moved in replica.report().own.transitions]
        assert told == ["fetching", "verifying", "staging", "staged", "committing", "checking", "idle"]


async def test_the_report_names_the_signal_of_what_serves(tmp_path: Path) -> None:
    """A fallback is sent under a later generation than it was signalled under."""
    engine, source = paced()

    async with play(tmp_path, engine, source) as replica:
        assert replica.report().own.signalled == 0
        replica.desire(wanted("a", 7, signalled=2))
        await serves(replica, "a")
        assert (replica.report().own.generation, replica.report().own.signalled) == (7, 2)
        replica.desire(wanted("a", 8, signalled=8))
        await until(replica, lambda: replica.report().own.generation == 8)
        await until(replica, lambda: replica.own.driver.machine.stage is Stage.IDLE)
        assert replica.report().own.signalled == 2, "nothing was switched"


@pytest.mark.parametrize(("since", "kept"), [(5, False), (2, True), (0, True)])
async def test_a_policy_that_was_meant_for_a_newer_snapshot_than_serves_is_not_enough(
    tmp_path: Path, since: int, kept: bool
) -> None:
    """The sender had not heard of the fallback `a`: the signals between `a` and what it knew of are owed, too."""
    engine, source = paced()

    async with play(tmp_path, engine, source) as replica:
        replica.desire(wanted("a", 6, signalled=2))
        await serves(replica, "a")
        before = replica.own.namespaces.admit(None)
        replica.desire(wanted("c", 7, signalled=7, reset_prompt_cache="none", reset_since=since))
        await serves(replica, "c")
        assert (replica.own.namespaces.admit(None) == before) is kept


async def test_what_is_told_during_the_commit_is_not_taken_for_what_was_applied(tmp_path: Path) -> None:
    engine, source = paced()

    async with play(tmp_path, engine, source) as replica:
        engine.commit_gate.clear()
        replica.desire(wanted("a", 3, signalled=3, reset_prompt_cache="none"))
        await engine.committing.wait()
        # Between two signals of `a` there was one of `b`, whose turn has not come.
        replica.desire(wanted("b", 4, signalled=4, hold=True))
        replica.desire(wanted("a", 3, signalled=5, reset_prompt_cache="all"))
        engine.commit_gate.set()
        await serves(replica, "a")
        assert replica.report().own.signalled == 3
