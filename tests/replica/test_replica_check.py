"""What is proved of the weights that serve, at the start and after every switch, and what follows when it fails."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from replica_fakes import FakeEngine, FakeSource, make_replica

from midstream.core.errors import AnotherBoot, SnapshotTransition
from midstream.core.types import (
    BASE_SNAPSHOT,
    Desired,
    GenerationEvent,
    ModelInfo,
    Pause,
    SnapshotCheck,
    Stage,
)
from midstream.engine.base import StagingFailed
from midstream.replica.gate import Door
from midstream.replica.replica import Replica
from midstream.replica.swap.checker import Checker, NotSound, canary_prompt

NAN = math.nan


def wanted(snapshot: str, generation: int, **more: object) -> Desired:
    return Desired(snapshot=snapshot, generation=generation, url=f"file:///b/{snapshot}", **more)  # type: ignore[arg-type]


@asynccontextmanager
async def play(
    directory: Path, engine: FakeEngine | None = None
) -> AsyncIterator[tuple[Replica, FakeEngine, FakeSource]]:
    used, source = engine or FakeEngine(), FakeSource()
    async with asyncio.timeout(120):
        replica = make_replica(directory, used, source)
        await replica.start()
        try:
            yield replica, used, source
        finally:
            await replica.close()


async def until(replica: Replica, holds: Callable[[], bool]) -> None:
    while not holds():
        await replica.changed(5.0)


async def at(replica: Replica, snapshot: str, stage: Stage) -> None:
    """`snapshot` serves and its last stage was that one."""
    machine = replica.own.driver.machine
    await until(replica, lambda: (machine.serving, machine.stage) == (snapshot, stage) and not machine.behind)


def stages(replica: Replica) -> list[str]:
    return [moved.stage.value for moved in replica.report().own.transitions]


LOADED = ["fetching", "verifying", "staging", "staged", "committing", "checking"]


async def test_the_base_weights_are_checked_before_the_replica_is_ready(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, _engine, _source):
        assert replica.report().own.check == SnapshotCheck(
            snapshot=BASE_SNAPSHOT, generation=0, weights="digest of base", canary=(-1.0,) * 31
        )


async def test_a_replica_whose_base_weights_are_not_sound_does_not_start(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.canary[BASE_SNAPSHOT] = [NAN]
    replica = make_replica(tmp_path, engine, FakeSource())
    with pytest.raises(NotSound, match="canary token 1 is nan"):
        await replica.start()
    assert (replica.ready, replica.own.gate.door) == (False, Door.DOWN)
    await replica.close()


async def test_what_the_check_found_is_reported_once_the_snapshot_is_ready(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        engine.canary["v1"], engine.digests["v1"] = [-2.5], None
        engine.check_gate.clear()
        replica.desire(wanted("v1", 7))
        await at(replica, "v1", Stage.CHECKING)
        report = replica.report()
        assert (report.own.check, report.own.target, report.ready) == (None, "v1", True)
        assert replica.own.gate.door is Door.OPEN, "requests go on while it is checked"
        engine.check_gate.set()
        await at(replica, "v1", Stage.IDLE)
        assert replica.report().own.check == SnapshotCheck(
            snapshot="v1", generation=7, weights=None, canary=(-2.5,) * 31
        )


@pytest.mark.parametrize("digested", [True, False], ids=["by digest", "by canary"])
async def test_weights_that_served_before_are_told_when_they_come_under_another_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, digested: bool
) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        found = {BASE_SNAPSHOT: "a", "v1": "a", "v2": "b", "v3": "b", "v4": "c", "v5": "b"}
        for snapshot, weights in found.items():
            engine.digests[snapshot] = weights if digested else None
            engine.canary[snapshot] = [-1.0] if digested else [-1.0 - ord(weights)]
        same = []
        for generation, snapshot in enumerate(("v1", "v2", "v3", "v4", "v5"), start=1):
            replica.desire(wanted(snapshot, generation))
            await at(replica, snapshot, Stage.IDLE)
            swap = replica.report().own.last_swap
            assert swap is not None
            same.append(swap.same_weights_as)
        # The base weights are checked at the start, before this test says what they are.
        assert same[1:] == ["", "v2", "", ""]
        counts = replica.sessions.measures.counts["swaps"]
        assert (counts["unchanged"], counts["ready"]) == (1, 4)
    warned = [line.getMessage() for line in caplog.records if "same weights" in line.getMessage()]
    assert warned == [
        "v3 has the same weights as v2, which served before: does the trainer send what it trains?"
    ]


async def test_base_weights_that_a_trainer_publishes_are_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        engine.digests["v1"] = f"digest of {BASE_SNAPSHOT}"
        replica.desire(wanted("v1", 1))
        await at(replica, "v1", Stage.IDLE)
        swap = replica.report().own.last_swap
        assert swap is not None
        assert swap.same_weights_as == BASE_SNAPSHOT
        assert replica.sessions.measures.counts["swaps"]["unchanged"] == 0
    assert not [line for line in caplog.records if "same weights" in line.getMessage()]


async def test_the_canary_is_urgent_scores_all_and_shares_its_cache_with_nothing(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        for generation in (1, 2):
            replica.desire(wanted(f"v{generation}", generation))
            await at(replica, f"v{generation}", Stage.IDLE)
        assert len(engine.canaries) == 3
        for canary in engine.canaries:
            assert canary.urgent
            assert canary.prompt == canary_prompt(engine.info)
            assert (canary.prompt_records, canary.sampling.max_tokens) == (32, 0)
        assert len({canary.salt for canary in engine.canaries}) == 3
        assert len({canary.request_id for canary in engine.canaries}) == 3


@pytest.mark.parametrize(
    ("vocab", "longest", "experts", "size"),
    [(2, 4096, 8, 32), (151_936, 4096, 8, 32), (151_936, 4096, 0, 8), (259, 9, 8, 8), (259, 5, 0, 4)],
)
def test_the_canary_fits_the_model(vocab: int, longest: int, experts: int, size: int) -> None:
    """A token goes through all weights of a dense model. Experts are chosen by some tokens."""
    prompt = canary_prompt(ModelInfo(max_model_len=longest, vocab_size=vocab, num_experts=experts))
    assert len(prompt) == size
    assert all(0 <= token < vocab for token in prompt)
    assert len(set(prompt)) == min(vocab, size)


async def test_weights_that_fail_their_check_are_not_tried_again_by_themselves(tmp_path: Path) -> None:
    """Also not in a pause, whose call was answered with the failure."""

    async with play(tmp_path) as (replica, engine, _source):
        before = replica.own.namespaces.admit(("", "s"))
        replica.pause(Pause(serial=1, mode="keep"))
        engine.canary["v1"] = [NAN, -1.0]
        replica.desire(wanted("v1", 1, reset_prompt_cache="none"))
        await until(replica, lambda: replica.report().own.stage is Stage.ERROR)
        for _ in range(20):
            await asyncio.sleep(0)
        report = replica.report()
        assert stages(replica) == [*LOADED, "error"]
        assert engine.switches == ["v1"]
        assert (report.ready, report.own.snapshot, report.own.target, report.own.check) == (
            False,
            "v1",
            "v1",
            None,
        )
        assert report.own.error == "the log-probability of canary token 1 is nan"
        assert report.own.refused == 1, "the weights are at fault"
        replica.desire(wanted("v1", 2, reset_prompt_cache="none"))
        await at(replica, "v1", Stage.IDLE)
        assert engine.switches == ["v1", "v1"], "its user asked again"
        assert replica.report().ready
        assert replica.own.namespaces.admit(("", "s")) != before, "KV of unsound weights may be found"


@pytest.mark.parametrize("proved", [True, False])
async def test_nobody_enters_under_weights_that_failed_their_check(tmp_path: Path, proved: bool) -> None:
    async with play(tmp_path, unproved() if not proved else None) as (replica, engine, _source):
        engine.canary["v1"] = [NAN]
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.report().own.stage is Stage.ERROR)
        assert replica.own.gate.door is Door.UNSOUND
        with pytest.raises(AnotherBoot, match="failed their check"):
            await replica.own.gate.enter()
        engine.check_gate.clear()
        replica.desire(wanted("v2", 2, reset_prompt_cache="none"))
        await at(replica, "v2", Stage.CHECKING)
        assert replica.own.gate.door is not Door.OPEN, "nothing has passed a check yet"
        engine.check_gate.set()
        await at(replica, "v2", Stage.IDLE)
        assert replica.report().ready
        await replica.own.gate.enter()
        assert replica.own.namespaces.admit(None) == 2, "KV of unsound weights may be found"


def unproved() -> FakeEngine:
    """As vLLM: it loads weights in place, so that they are proved only once they serve."""
    engine = FakeEngine()
    engine.proves_staged = False
    return engine


async def test_nothing_waits_for_a_digest_where_requests_wait_for_the_check(tmp_path: Path) -> None:
    """A digest takes longer the larger the model is."""

    def weights(replica: Replica) -> str | None:
        check = replica.report().own.check
        return None if check is None else check.weights

    async with play(tmp_path, unproved()) as (replica, engine, _source):
        await until(replica, lambda: weights(replica) == f"digest of {BASE_SNAPSHOT}")
        engine.digest_gate.clear()
        for generation, name in enumerate(("v1", "v2"), start=1):
            replica.desire(wanted(name, generation))
            await at(replica, name, Stage.IDLE)
            assert replica.own.gate.door is Door.OPEN
            check = replica.report().own.check
            assert check is not None
            assert (check.snapshot, check.weights) == (name, None)
        # One that fails before its switch leaves open what serves.
        engine.refuse_stage = True
        replica.desire(wanted("v3", 3))
        await at(replica, "v2", Stage.ERROR)
        engine.digest_gate.set()
        await until(replica, lambda: weights(replica) == "digest of v2")


async def test_a_replica_that_serves_the_run_does_not_wait_for_a_digest(tmp_path: Path) -> None:
    """One that serves its first snapshot may be about to join the others, and waits. So does every second one of a fast run,
    and one whose canary cannot tell it from the weights before."""
    engine = FakeEngine()
    reads: list[str] = []

    async def read() -> str | None:
        reads.append(engine.serving)
        await engine.digest_gate.wait()
        return f"digest of {engine.serving}"

    engine.weights_digest = read  # type: ignore[method-assign]

    async def scenario(replica: Replica, engine: FakeEngine, source: FakeSource) -> None:
        def digest() -> str | None:
            return None if replica.own.driver.check is None else replica.own.driver.check.weights

        for number in (1, 2, 3, 4):
            engine.canary[f"v{number}"] = [-float(number)]
        engine.canary["v5"] = engine.canary["v4"]
        waits = []
        for number in (1, 2, 3, 4, 5):
            engine.digest_gate.clear()
            replica.desire(wanted(f"v{number}", number))
            await until(replica, lambda: reads[-1] == engine.serving == f"v{number}")  # noqa: B023
            waits.append(replica.report().own.stage is Stage.CHECKING)
            if waits[-1] or number == 4:
                engine.digest_gate.set()
                await until(replica, lambda: digest() is not None)
                assert digest() == f"digest of v{number}"
            await at(replica, f"v{number}", Stage.IDLE)
        assert waits == [True, False, True, False, True]

    async with play(tmp_path, engine) as (replica, engine, source):
        await scenario(replica, engine, source)


async def test_a_digest_under_way_goes_on_when_an_attempt_ends_before_its_switch(tmp_path: Path) -> None:
    """Else a replica with targets that fail, one after the other, would never have one."""
    engine = unproved()
    reads: list[str] = []

    async def read() -> str | None:
        reads.append(engine.serving)
        await engine.digest_gate.wait()
        return f"digest of {engine.serving}"

    engine.weights_digest = read  # type: ignore[method-assign]

    def accepted(replica: Replica, generation: int) -> Callable[[], bool]:
        return lambda: replica.report().own.generation == generation

    async def scenario(replica: Replica, engine: FakeEngine, source: FakeSource) -> None:
        await until(
            replica, lambda: replica.own.driver.check is not None and not replica.own.driver.check.unread
        )
        engine.digest_gate.clear()
        replica.desire(wanted("v1", 1))
        await at(replica, "v1", Stage.IDLE)
        engine.refuse_stage = True
        for generation in (2, 3):
            replica.desire(wanted(f"v{generation}", generation))
            await until(replica, accepted(replica, generation))
            await at(replica, "v1", Stage.ERROR)
        engine.digest_gate.set()
        await until(
            replica, lambda: replica.own.driver.check is not None and not replica.own.driver.check.unread
        )
        assert replica.own.driver.check is not None
        assert replica.own.driver.check.weights == "digest of v1"
        assert reads == [BASE_SNAPSHOT, "v1"]

    async with play(tmp_path, engine) as (replica, engine, source):
        await scenario(replica, engine, source)


@pytest.mark.parametrize("differs", [True, False])
async def test_a_digest_that_comes_later_says_whether_the_weights_are_those_of_before(
    tmp_path: Path, differs: bool
) -> None:
    async with play(tmp_path, unproved()) as (replica, engine, _source):
        driver = replica.own.driver
        for generation, snapshot in enumerate(("v1", "v2"), start=1):
            engine.canary[snapshot] = [-1.0]
            engine.digests[snapshot] = snapshot if differs else "equal"
            await until(replica, lambda: driver.check is not None and not driver.check.unread)
            engine.digest_gate.clear()
            replica.desire(wanted(snapshot, generation))
            await at(replica, snapshot, Stage.IDLE)
            if snapshot == "v2":
                assert driver.swaps[-1].same_weights_as == "v1", "the canaries are equal"
            engine.digest_gate.set()
        await until(replica, lambda: driver.check is not None and not driver.check.unread)
        swap = replica.report().own.last_swap
        assert swap is not None
        assert swap.same_weights_as == ("" if differs else "v1")


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("transition", ["ASYNC", "SYNC"])
async def test_newcomers_wait_for_the_check_of_weights_that_were_not_proved_before(
    tmp_path: Path, transition: str, sound: bool
) -> None:
    async def scenario(replica: Replica, engine: FakeEngine, source: FakeSource) -> None:
        engine.canary["v1"] = [-1.0 if sound else NAN]
        engine.check_gate.clear()
        replica.desire(wanted("v1", 1, transition=transition))
        await at(replica, "v1", Stage.CHECKING)
        if transition == "SYNC":
            with pytest.raises(SnapshotTransition):
                await replica.own.gate.enter()
            engine.check_gate.set()
            await until(replica, lambda: replica.report().own.stage in (Stage.IDLE, Stage.ERROR))
            assert replica.own.gate.door is (Door.OPEN if sound else Door.UNSOUND)
            return
        newcomer = asyncio.create_task(replica.own.gate.enter())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not newcomer.done(), "it would be served by weights that nobody has looked at"
        engine.check_gate.set()
        if sound:
            await newcomer
        else:
            with pytest.raises(AnotherBoot, match="failed their check"):
                await newcomer

    async with play(tmp_path, unproved()) as (replica, engine, source):
        await scenario(replica, engine, source)


async def test_the_check_of_weights_that_were_not_proved_before_is_not_given_up(tmp_path: Path) -> None:
    """The newer snapshot may fail to load, and then nobody had looked at what serves."""

    async with play(tmp_path, unproved()) as (replica, engine, source):
        engine.check_gate.clear()
        replica.desire(wanted("v1", 1))
        await at(replica, "v1", Stage.CHECKING)
        source.corrupt.add("v2")
        replica.desire(wanted("v2", 2))
        for _ in range(20):
            await asyncio.sleep(0)
        assert replica.report().own.stage is Stage.CHECKING
        assert replica.own.gate.door is Door.HELD
        engine.check_gate.set()
        await until(replica, lambda: replica.report().own.stage is Stage.ERROR)
        assert (replica.report().own.snapshot, replica.own.gate.door) == ("v1", Door.OPEN)
        assert replica.report().own.check is not None


async def test_a_newer_target_takes_the_place_of_what_is_not_sound(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        engine.canary["v1"] = [NAN]
        engine.check_gate.clear()
        replica.desire(wanted("v1", 1))
        await at(replica, "v1", Stage.CHECKING)
        replica.desire(wanted("v2", 2))
        engine.check_gate.set()
        await at(replica, "v2", Stage.IDLE)
        assert engine.switches == ["v1", "v2"]


async def test_going_back_to_what_is_not_sound_loads_it_again(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        engine.canary["v1"] = [NAN, -1.0]
        replica.desire(wanted("v1", 1))
        await until(replica, lambda: replica.report().own.stage is Stage.ERROR)
        replica.desire(wanted("v1", 2))
        await at(replica, "v1", Stage.IDLE)
        assert engine.switches == ["v1"] * 2
        assert replica.report().ready


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (GenerationEvent(error="snapshot v1 gave a logit that is not finite"), "the canary prompt failed: snapshot v1"),
        (GenerationEvent(prompt=(), finish="length"), "has 32 tokens, 0 were scored"),
    ],
)  # fmt: skip
def test_a_canary_without_its_numbers_is_not_sound(event: GenerationEvent, message: str) -> None:
    class Broken(FakeEngine):
        async def _score(self, request: object) -> GenerationEvent:
            return event

    engine = Broken()
    with pytest.raises(NotSound, match=message):
        asyncio.run(Checker(engine, lambda: "id").check(engine.info, "v1", 1))


def test_weights_that_cannot_be_read_have_no_digest_but_are_sound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unreadable(FakeEngine):
        async def weights_digest(self) -> str | None:
            raise StagingFailed("RuntimeError: no")

    engine = Unreadable()
    found = asyncio.run(Checker(engine, lambda: "id").check(engine.info, "v1", 1))
    assert (found.weights, len(found.canary)) == (None, 31)
    assert "RuntimeError: no" in caplog.text


async def test_an_engine_that_dies_while_it_is_checked_is_a_new_boot(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        boot = replica.boot
        engine.check_gate.clear()
        replica.desire(wanted("v1", 1))
        await at(replica, "v1", Stage.CHECKING)
        await engine.die()
        await until(replica, lambda: replica.ready)
        assert replica.boot != boot
        assert (replica.report().own.snapshot, replica.report().own.check) == (
            BASE_SNAPSHOT,
            SnapshotCheck(
                snapshot=BASE_SNAPSHOT, generation=0, weights="digest of base", canary=(-1.0,) * 31
            ),
        )


@pytest.mark.parametrize("transition", ["ASYNC", "SYNC"])
async def test_a_swap_opens_no_gate_of_a_replica_that_takes_no_more_requests(
    tmp_path: Path, transition: str
) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        engine.stage_gate.clear()
        replica.desire(wanted("v1", 7, transition=transition))
        await until(replica, lambda: replica.own.driver.machine.stage is Stage.STAGING)
        await replica.drained()
        engine.stage_gate.set()
        await at(replica, "v1", Stage.IDLE)
        assert replica.own.gate.door is Door.DOWN
