"""The swap machine's table, and the driver that carries it out against a fake engine and a fake source."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path

import msgspec
import pytest
from diagrams import mermaid
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from replica_fakes import FakeEngine, FakeSource, make_replica
from tiers import examples

from midstream.core.errors import (
    ReplicaUnavailable,
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    SnapshotNotFinite,
    SnapshotTransition,
)
from midstream.core.table import IllegalMove
from midstream.core.types import BASE_SNAPSHOT, Desired, SnapshotFiles, Stage
from midstream.replica.gate import Door, Gate
from midstream.replica.replica import Replica
from midstream.replica.swap.table import MOVES, SwapEvent, SwapMachine

LOADING = [Stage.FETCHING, Stage.REBUILDING, Stage.VERIFYING, Stage.STAGING, Stage.STAGED]
AFTER_COMMIT = (Stage.COMMITTING, Stage.CHECKING)


def wanted(snapshot: str, generation: int, **more: object) -> Desired:
    return Desired(snapshot=snapshot, generation=generation, url=f"file:///b/{snapshot}", **more)  # type: ignore[arg-type]


class SwapMachineComparedToItsPromises(RuleBasedStateMachine):
    """Drives the machine with legal moves; a model in three variables says what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.machine = SwapMachine(self.tick)
        self.generation = 0
        self.serving = BASE_SNAPSHOT
        self.sound = self.checked = True
        self.moves = 0

    def tick(self) -> float:
        self.now += 1
        return self.now

    @rule(snapshot=st.sampled_from([BASE_SNAPSHOT, "v1", "v2", "v3"]))
    def a_signal_comes(self, snapshot: str) -> None:
        self.generation += 1
        assert self.machine.accept(wanted(snapshot, self.generation))
        assert not self.machine.accept(wanted(snapshot, self.generation))
        assert self.machine.behind

    @precondition(lambda self: self.machine.behind and self.machine.stage not in AFTER_COMMIT)
    @rule()
    def it_is_taken_up(self) -> None:
        self._taken_up()

    @precondition(lambda self: self.machine.behind and self.machine.stage is Stage.CHECKING)
    @rule()
    def a_check_is_given_up_for_other_weights_only(self) -> None:
        accepted = self.machine.accepted
        assert accepted is not None
        assert self.machine.supersedable == (accepted.snapshot != self.serving)
        if self.machine.supersedable:
            self._taken_up()

    def _taken_up(self) -> None:
        accepted = self.machine.accepted
        assert accepted is not None
        same = accepted.snapshot == self.serving
        taken = self.machine.begin()
        assert (taken is None) == (same and self.sound and self.checked), "ready without a check"
        assert self.machine.distrusted == (taken is not None and (same or not self.sound))
        assert self.machine.stage is (Stage.IDLE if taken is None else Stage.FETCHING)
        self.moves += 1

    @precondition(lambda self: self.machine.stage in (*LOADING, *AFTER_COMMIT))
    @rule(whole=st.booleans())
    def it_goes_on(self, whole: bool) -> None:
        event = {
            Stage.FETCHING: SwapEvent.FETCHED if whole else SwapEvent.FETCHED_DELTA,
            Stage.REBUILDING: SwapEvent.REBUILT,
            Stage.VERIFYING: SwapEvent.VERIFIED,
            Stage.STAGING: SwapEvent.STAGED,
            Stage.STAGED: SwapEvent.COMMIT,
            Stage.COMMITTING: SwapEvent.COMMITTED,
            Stage.CHECKING: SwapEvent.CHECKED,
        }[self.machine.stage]
        self.machine.advance(event)
        self.moves += 1
        if event is SwapEvent.COMMITTED:
            assert self.machine.target is not None
            self.serving = self.machine.target.snapshot
            self.checked = False
        elif event is SwapEvent.CHECKED:
            self.sound = self.checked = True

    @precondition(lambda self: self.machine.stage in (*LOADING, *AFTER_COMMIT))
    @rule()
    def it_fails(self) -> None:
        self.sound = self.sound and self.machine.stage is not Stage.CHECKING
        self.machine.fail("the disk is full")
        self.moves += 1
        assert (self.machine.stage, self.machine.error) == (Stage.ERROR, "the disk is full")

    @invariant()
    def it_is_sound_unless_its_last_check_failed(self) -> None:
        assert self.machine.sound == self.sound

    @invariant()
    def what_serves_changed_only_by_a_finished_commit(self) -> None:
        assert self.machine.serving == self.serving

    @invariant()
    def an_error_is_shown_exactly_at_the_error_stage(self) -> None:
        assert (self.machine.error is not None) == (self.machine.stage is Stage.ERROR)

    @invariant()
    def every_move_is_recorded_in_order(self) -> None:
        kept = list(self.machine.transitions)
        assert [t.seq for t in kept] == list(range(max(0, self.moves - 64), self.moves))
        assert [t.at for t in kept] == [float(t.seq + 1) for t in kept]
        assert not kept or kept[-1].stage is self.machine.stage


TestSwapMachine = SwapMachineComparedToItsPromises.TestCase
TestSwapMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_a_move_that_the_table_does_not_have_raises_and_changes_nothing() -> None:
    illegal = [pair for pair in product(Stage, SwapEvent) if pair not in MOVES]
    assert len(illegal) + len(MOVES) == len(Stage) * len(SwapEvent)
    for stage, event in illegal:
        machine = SwapMachine(lambda: 0.0)
        machine.accept(wanted("v1", 1))
        machine.begin()
        machine.stage = stage
        with pytest.raises(IllegalMove, match=f"'{event.value}' at '{stage.value}'"):
            machine._move(event, wanted("v1", 1))
        assert (machine.stage, len(machine.transitions)) == (stage, 1)


def test_committing_can_be_left_only_by_its_own_outcome() -> None:
    assert {event: to for (at, event), (to, _) in MOVES.items() if at is Stage.COMMITTING} == {
        SwapEvent.COMMITTED: Stage.CHECKING,
        SwapEvent.FAILED: Stage.ERROR,
    }
    assert {event: to for (at, event), (to, _) in MOVES.items() if at is Stage.CHECKING} == {
        SwapEvent.DESIRED: Stage.FETCHING,
        SwapEvent.CHECKED: Stage.IDLE,
        SwapEvent.FAILED: Stage.ERROR,
    }


def test_weights_whose_check_failed_are_not_sound_until_a_check_passes() -> None:
    machine = SwapMachine(lambda: 0.0)

    def load(snapshot: str, generation: int, outcome: SwapEvent) -> tuple[bool, bool]:
        machine.accept(wanted(snapshot, generation))
        assert machine.begin() is not None, "also when it serves already"
        for event in (
            SwapEvent.FETCHED,
            SwapEvent.VERIFIED,
            SwapEvent.STAGED,
            SwapEvent.COMMIT,
            SwapEvent.COMMITTED,
        ):
            machine.advance(event)
        if outcome is SwapEvent.FAILED:
            machine.fail("canary token 3 is nan")
        else:
            machine.advance(outcome)
        return machine.sound, machine.checked

    assert load("v1", 1, SwapEvent.FAILED) == (False, False)
    assert load("v1", 2, SwapEvent.FAILED) == (False, False)
    assert load("v1", 3, SwapEvent.CHECKED) == (True, True)


def test_the_diagram_shows_the_whole_table() -> None:
    lines = mermaid(MOVES).splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> idle"]
    assert "    staged --> committing: commit" in lines
    assert len(lines) == len(MOVES) + 2


@asynccontextmanager
async def play(
    directory: Path,
) -> AsyncIterator[tuple[Replica, FakeEngine, FakeSource]]:
    engine, source = FakeEngine(), FakeSource()
    replica = make_replica(directory, engine, source, clock=lambda: 5.0)
    await replica.start()
    try:
        yield replica, engine, source
    finally:
        await replica.close()


async def until(replica: Replica, holds: Callable[[], bool]) -> None:
    while not holds():
        await replica.changed(5.0)


async def settled(replica: Replica) -> None:
    machine = replica.own.driver.machine
    await until(replica, lambda: not machine.behind and machine.stage in (Stage.IDLE, Stage.ERROR))


def stages(replica: Replica) -> list[tuple[str, str]]:
    return [(t.snapshot, t.stage.value) for t in replica.report().own.transitions]


async def test_a_change_counts_from_the_call_on_also_before_the_task_that_waits_runs(tmp_path: Path) -> None:
    """The event stream starts a task that waits, then writes the report. What runs before that task may change the report."""

    async with play(tmp_path) as (replica, _engine, _source):
        told = asyncio.create_task(replica.changed(60.0))
        replica.own.gate.set(Door.HELD)
        await asyncio.wait({told}, timeout=30.0)
        assert told.done()


async def test_a_snapshot_is_fetched_verified_staged_and_committed(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):
        replica.desire(wanted("v1", 3))
        assert replica.report().own.generation == 3
        await settled(replica)
        assert stages(replica) == [
            ("v1", s)
            for s in ("fetching", "verifying", "staging", "staged", "committing", "checking", "idle")
        ]
        assert engine.calls == ["stage v1 v1", "commit v1"]
        await source.released.wait()
        assert source.calls == ["fetch v1", "verify v1", "release all but ['v1']"]
        report = replica.report()
        assert (report.own.snapshot, report.own.target, report.own.error, report.ready) == (
            "v1",
            None,
            None,
            True,
        )
        assert report.own.last_swap is not None
        assert (report.own.last_swap.snapshot, report.own.last_swap.pause_ms) == ("v1", 1.5)
        assert report.own.last_swap.streams_crossed == 2
        assert {t.at for t in report.own.transitions} == {5.0}


async def test_a_failed_verification_keeps_the_old_snapshot_and_shows_the_error(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):
        replica.desire(wanted("v1", 1))
        await settled(replica)
        source.corrupt = {"v2"}
        replica.desire(wanted("v2", 2))
        await settled(replica)
        report = replica.report()
        assert (report.own.snapshot, report.own.stage, report.own.target) == ("v1", Stage.ERROR, "v2")
        assert report.own.error == "v2: checksum of a.weight differs"
        assert report.own.refused == 2, "the files in the bucket are at fault"
        assert report.own.transitions[-1].detail == report.own.error
        assert (engine.serving, report.ready, replica.own.gate.door) == ("v1", True, Door.OPEN)
        assert "stage v2 v2" not in engine.calls


@pytest.mark.parametrize("compression", [None, "arc_v2"])
async def test_damaged_files_of_this_replica_are_fetched_once_more_and_nobody_is_blamed(
    tmp_path: Path, compression: str | None
) -> None:
    async with play(tmp_path) as (replica, _engine, source):
        source.rotten = {"v1"}
        parents = () if compression is None else (SnapshotFiles(snapshot="v0", url="s3://b/v0"),)
        replica.desire(wanted("v1", 1, compression=compression, parents=parents))
        await settled(replica)
        report = replica.report()
        assert (report.own.snapshot, report.own.stage, report.own.refused) == ("v1", Stage.IDLE, 0)
        calls = [call for call in source.calls if call.partition(" ")[0] in ("fetch", "rebuild", "verify")]
        rebuilt = ["rebuild v1"] if compression else []
        assert calls == ["fetch v1", "verify v1", "fetch v1", *rebuilt, "verify v1"]


async def test_what_is_damaged_in_the_bucket_too_is_to_blame(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, _engine, source):
        source.rotten, source.corrupt = {"v1"}, {"v1"}
        replica.desire(wanted("v1", 1))
        await settled(replica)
        report = replica.report()
        assert (report.own.stage, report.own.refused) == (Stage.ERROR, 1)
        assert source.calls.count("fetch v1") == 2


@pytest.mark.parametrize(
    ("error", "fingerprint", "refused"),
    [
        (SnapshotCorrupt("a checksum differs"), "etags", 1),
        (SnapshotMissing("a file is not there"), "etags", 1),
        (SnapshotNotFinite("a is NaN"), "content:f", 1),
        # What was pushed is in the server's hands from then on.
        (SnapshotCorrupt("a checksum differs"), "content:f", 0),
        (SnapshotMissing("its files are not in the bucket yet"), "content:f", 0),
        (SnapshotError("s3://b does not answer"), "etags", 0),
        (OSError(28, "No space left on device"), "etags", 0),
    ],
)
async def test_a_report_says_whether_what_was_published_is_to_blame(
    tmp_path: Path, error: Exception, fingerprint: str, refused: int
) -> None:
    async with play(tmp_path) as (replica, _engine, source):
        source.fails = error
        replica.desire(wanted("v1", 1, fingerprint=fingerprint))
        await settled(replica)
        report = replica.report()
        assert (report.own.stage, report.own.refused) == (Stage.ERROR, refused)


async def test_files_that_were_written_to_after_they_were_verified_do_not_serve(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):
        source.written_to = True
        replica.desire(wanted("v1", 1))
        await settled(replica)
        report = replica.report()
        assert (report.own.snapshot, report.own.stage, report.ready) == (BASE_SNAPSHOT, Stage.ERROR, True)
        assert report.own.error == "model.safetensors was opened for writing while it was loaded"
        assert engine.switches == []
        source.written_to = False
        replica.desire(wanted("v1", 2))
        await settled(replica)
        assert replica.report().own.snapshot == "v1"


async def test_a_failed_snapshot_is_tried_again_only_by_a_new_generation(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        engine.refuse_stage = True
        replica.desire(wanted("v1", 1))
        await settled(replica)
        assert replica.report().own.error == "v1: tensor a.weight has shape [2], expected [3]"
        engine.refuse_stage = False
        replica.desire(wanted("v1", 1))
        assert not replica.own.driver.machine.behind
        replica.desire(wanted("v1", 2))
        await settled(replica)
        assert (replica.report().own.snapshot, replica.report().own.error) == ("v1", None)


async def test_a_fetch_under_way_knows_the_replicas_of_the_newest_message(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, _engine, source):
        source.blocked = {"v1"}
        replica.desire(wanted("v1", 1, peers=("http://a",)))
        await source.fetching.wait()
        replica.desire(wanted("v1", 1, peers=("http://a", "http://b"), hold=True))
        assert source.met == ("http://a", "http://b")
        assert source.calls == ["fetch v1"], "it goes on"


async def test_a_newer_target_cancels_a_fetch_and_takes_its_place(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):
        source.blocked = {"v1"}
        replica.desire(wanted("v1", 1))
        await source.fetching.wait()
        replica.desire(wanted("v2", 2))
        await settled(replica)
        assert source.calls[:4] == ["fetch v1", "cancelled v1", "release all but ['base', 'v2']", "fetch v2"]
        assert engine.calls == ["stage v2 v2", "commit v2"]
        assert stages(replica)[:2] == [("v1", "fetching"), ("v2", "fetching")]
        assert replica.report().own.snapshot == "v2"


async def test_a_newer_target_waits_for_a_commit_that_has_begun(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        engine.commit_gate.clear()
        replica.desire(wanted("v1", 1))
        await engine.committing.wait()
        replica.desire(wanted("v2", 2))
        replica.desire(wanted("v3", 3))
        engine.commit_gate.set()
        await settled(replica)
        assert [t.snapshot for t in replica.report().own.transitions if t.stage is Stage.IDLE] == ["v1", "v3"]
        assert engine.calls == ["stage v1 v1", "commit v1", "stage v3 v3", "commit v3"]


async def test_going_back_to_what_serves_cancels_the_loading_and_is_done_at_once(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):
        replica.desire(wanted("v1", 1))
        await settled(replica)
        source.blocked = {"v2"}
        source.fetching.clear()
        replica.desire(wanted("v2", 2))
        await source.fetching.wait()
        replica.desire(wanted("v1", 3))
        await settled(replica)
        assert stages(replica)[-2:] == [("v2", "fetching"), ("v1", "idle")]
        assert (replica.report().own.generation, replica.report().own.target) == (3, None)
        assert engine.calls == ["stage v1 v1", "commit v1"]


async def test_the_base_snapshot_is_loaded_from_the_model_directory(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):
        replica.desire(wanted("v1", 1))
        await settled(replica)
        replica.desire(Desired(snapshot=BASE_SNAPSHOT, generation=2))
        await settled(replica)
        assert engine.calls[2:] == [f"stage base {tmp_path.name}", "commit base"]
        assert source.calls.count("fetch base") == 0
        assert replica.report().own.snapshot == BASE_SNAPSHOT


async def test_newcomers_wait_at_the_gate_while_an_async_swap_commits(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        engine.commit_gate.clear()
        replica.desire(wanted("v1", 1))
        await engine.committing.wait()
        assert replica.own.gate.door is Door.HELD
        with pytest.raises(SnapshotTransition):
            await replica.own.gate.enter(0)
        patient = asyncio.create_task(replica.own.gate.enter(60))
        await until(replica, lambda: replica.own.gate.waiting == 1)
        engine.commit_gate.set()
        await patient
        assert replica.own.driver.machine.serving == "v1"


@pytest.mark.parametrize(
    ("door", "refusal"),
    [(Door.OPEN, None), (Door.CLOSED, SnapshotTransition), (Door.DOWN, ReplicaUnavailable)],
)
async def test_who_waited_at_the_gate_goes_by_the_door_that_follows(
    door: Door, refusal: type[Exception] | None
) -> None:
    gate = Gate(lambda: None)
    gate.set(Door.HELD)
    request = asyncio.create_task(gate.enter(60))
    await asyncio.sleep(0)
    assert (gate.waiting, gate.choices, request.done()) == (1, 1, False)
    gate.set(door)
    if refusal is None:
        await request
    else:
        with pytest.raises(refusal):
            await request
    assert (gate.waiting, gate.choices) == (0, 0)


async def test_a_sync_swap_refuses_newcomers_and_commits_when_the_last_request_is_done(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        with replica.own.gate.admitted():
            replica.desire(wanted("v1", 1, transition="SYNC"))
            await until(replica, lambda: replica.own.gate.door is Door.CLOSED)
            with pytest.raises(SnapshotTransition) as caught:
                await replica.own.gate.enter(60)
            assert (caught.value.status, caught.value.retry_after_s) == (425, 1)
            assert replica.report().own.stage is Stage.STAGED
            assert "commit v1" not in engine.calls
        await settled(replica)
        assert (replica.report().own.snapshot, replica.own.gate.door) == ("v1", Door.OPEN)


async def test_a_sync_swap_waits_for_each_of_several_requests(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, _engine, _source):
        with replica.own.gate.admitted():
            with replica.own.gate.admitted():
                replica.desire(wanted("v1", 1, transition="SYNC"))
                await until(replica, lambda: replica.own.gate.door is Door.CLOSED)
            drained = asyncio.create_task(replica.own.gate.drained())
            await asyncio.sleep(0)
            assert not drained.done()
            assert replica.report().own.stage is Stage.STAGED
        await drained
        await settled(replica)
        assert replica.report().own.snapshot == "v1"


async def test_a_sync_swap_that_drains_can_still_be_superseded_and_opens_the_gate(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        with replica.own.gate.admitted():
            replica.desire(wanted("v1", 1, transition="SYNC"))
            await until(replica, lambda: replica.own.gate.door is Door.CLOSED)
            replica.desire(wanted(BASE_SNAPSHOT, 2))
            await settled(replica)
            assert replica.own.gate.door is Door.OPEN
        assert "commit v1" not in engine.calls
        assert replica.report().own.snapshot == BASE_SNAPSHOT


async def test_a_dead_engine_starts_again_as_a_new_boot_on_the_base_weights(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        replica.desire(wanted("v1", 4))
        await settled(replica)
        boot, before = replica.boot, replica.own.namespaces.admit(("", "s"))
        await engine.die()
        assert replica.report().ready is False
        await until(replica, lambda: replica.ready)
        report = replica.report()
        assert report.boot != boot
        assert (report.own.snapshot, report.own.generation, report.own.transitions) == (BASE_SNAPSHOT, 0, ())
        assert engine.starts == 2
        assert replica.own.namespaces.admit(("", "s")) != before
        replica.engine_died(boot, "a late stream of the old boot")
        assert replica.ready
        replica.desire(wanted("v1", 4))
        await settled(replica)
        assert replica.report().own.snapshot == "v1"


async def test_an_engine_that_does_not_start_again_is_tried_until_it_does(tmp_path: Path) -> None:
    class Stubborn(FakeEngine):
        async def start(self):  # type: ignore[no-untyped-def]
            info = await super().start()
            if 1 < self.starts < 4:
                raise OSError("no memory")
            return info

    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)
        assert replica.report().own.error == "the engine cannot be started again: no memory"

    engine = Stubborn()
    replica = make_replica(tmp_path, engine, FakeSource(), sleep=sleep)
    await replica.start()
    await engine.die()
    await until(replica, lambda: replica.ready)
    assert replica.report().own.error is None
    await replica.close()
    assert (engine.starts, delays) == (4, [0.5, 1.0])


def test_a_target_that_a_newer_one_overtook_on_its_way_is_passed_over() -> None:
    machine = SwapMachine(lambda: 0.0)
    first = Desired(snapshot="s1", generation=1, url="file:///b/s1", seen=0)
    assert machine.accept(Desired(snapshot="s3", generation=3, url="file:///b/s3", seen=0))
    assert not machine.accept(first)
    assert machine.accepted is not None
    assert machine.accepted.snapshot == "s3"
    # Another ledger, whose generations began refetch: its gateway has seen the higher one.
    assert machine.accept(msgspec.structs.replace(first, seen=3))
    assert machine.accepted.snapshot == "s1"
    # A gateway of an earlier version does not tell.
    assert machine.accept(Desired(snapshot="s3", generation=3, url="file:///b/s3"))
    assert machine.accept(msgspec.structs.replace(first, seen=None))


def test_an_error_that_no_encoder_takes_or_that_is_huge_still_makes_a_report() -> None:
    machine = SwapMachine(lambda: 0.0)
    machine.accept(Desired(snapshot="s", generation=1, url="file:///b/s"))
    machine.begin()
    machine.fail("bad key \ud800 " + "x" * 10_000_000)
    assert machine.error is not None
    assert machine.error.startswith("bad key \\ud800 xxx")
    assert len(msgspec.json.encode(list(machine.transitions))) < 10_000
