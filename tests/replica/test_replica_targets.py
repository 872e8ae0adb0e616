"""Kinds of targets: incremental ones, held ones, reloads, other content under a known name; and hints before them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import FakeEngine, FakeSource, make_replica, running

from midstream.core.errors import SnapshotCorrupt
from midstream.core.types import BASE_SNAPSHOT, Desired, FileContent, Hint, SnapshotFiles, Stage
from midstream.replica.gate import Door
from midstream.replica.replica import Replica
from midstream.replica.swap import hints
from midstream.replica.swap.attempts import GIVEN_UP_MAX
from midstream.replica.swap.hints import Hints
from midstream.snapshots.arc2.files import Making

FULL = SnapshotFiles(snapshot="v0", url="file:///b/v0", fingerprint="f0")
LOADED = ["fetching", "verifying", "staging", "staged", "committing", "checking", "idle"]


def wanted(snapshot: str, generation: int, **more: object) -> Desired:
    return Desired(snapshot=snapshot, generation=generation, url=f"file:///b/{snapshot}", **more)  # type: ignore[arg-type]


def delta(snapshot: str, generation: int, **more: object) -> Desired:
    return wanted(snapshot, generation, compression="arc_v2", parents=(FULL,), **more)


@asynccontextmanager
async def play(directory: Path, **more: object) -> AsyncIterator[tuple[Replica, FakeEngine, FakeSource]]:
    engine, source = FakeEngine(), FakeSource()
    async with asyncio.timeout(120):
        replica = make_replica(directory, engine, source, **more)
        await replica.start()
        try:
            yield replica, engine, source
        finally:
            await replica.close()


async def until(replica: Replica, holds: Callable[[], bool]) -> None:
    while not holds():
        await replica.changed(5.0)


async def at(replica: Replica, snapshot: str, stage: Stage = Stage.IDLE) -> None:
    machine = replica.own.driver.machine
    await until(
        replica,
        lambda: (
            machine.target is not None
            and (machine.target.snapshot, machine.stage) == (snapshot, stage)
            and not machine.behind
        ),
    )


async def tick(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def stages(replica: Replica, snapshot: str) -> list[str]:
    return [moved.stage.value for moved in replica.report().own.transitions if moved.snapshot == snapshot]


async def test_an_incremental_snapshot_is_rebuilt_before_it_is_verified(tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    async with play(tmp_path, monotonic=clock) as (replica, _engine, source):
        replica.desire(delta("v1", 1))
        await at(replica, "v1")
        assert stages(replica, "v1") == ["fetching", "rebuilding", *LOADED[1:]]
        assert source.calls[:3] == ["fetch v1", "rebuild v1", "verify v1"]
        swap = replica.report().own.last_swap
        assert swap is not None
        assert min(swap.fetch_ms, swap.rebuild_ms, swap.verify_ms, swap.stage_ms, swap.check_ms) > 0
        replica.desire(wanted("v2", 2))
        await at(replica, "v2")
        assert stages(replica, "v2") == LOADED
        swap = replica.report().own.last_swap
        assert swap is not None
        assert (swap.snapshot, swap.rebuild_ms) == ("v2", 0.0)


async def test_a_delta_that_does_not_apply_leaves_the_old_snapshot_and_its_error(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):

        async def rebuild(desired: Desired, making: object) -> Path:
            raise SnapshotCorrupt("v1: checksum of a.weight differs after decoding")

        source.rebuild = rebuild  # type: ignore[method-assign]
        replica.desire(delta("v1", 1))
        await at(replica, "v1", Stage.ERROR)
        assert stages(replica, "v1") == ["fetching", "rebuilding", "error"]
        assert replica.report().own.error == "v1: checksum of a.weight differs after decoding"
        assert (replica.report().own.snapshot, engine.calls) == (BASE_SNAPSHOT, [])


async def test_the_engine_reads_what_a_rebuild_makes_before_it_is_whole(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):
        source.makes = ("embed", "layers.0.w", "norm")
        replica.desire(delta("v1", 1))
        await at(replica, "v1")
        assert engine.calls == ["stage v1 ahead from v1-made", "stage v1 v1", "commit v1"]
        assert engine.ahead_at_stage == source.makes
        assert stages(replica, "v1") == ["fetching", "rebuilding", *LOADED[1:]]


async def test_a_rebuild_that_fails_ends_what_the_engine_has_read_of_it(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):
        source.makes = ("embed", "layers.0.w")
        source.spoilt = SnapshotCorrupt("v1: checksum of layers.1.w differs after decoding")
        replica.desire(delta("v1", 1))
        await at(replica, "v1", Stage.ERROR)
        await until(replica, lambda: engine.ahead is None)
        assert engine.calls == ["stage v1 ahead from v1-made"]
        assert (replica.report().own.snapshot, engine.switches) == (BASE_SNAPSHOT, [])
        source.spoilt = None
        replica.desire(delta("v2", 2))
        await at(replica, "v2")
        assert engine.ahead_at_stage == source.makes


async def test_what_the_engine_has_read_of_a_refused_rebuild_ends_before_it_is_made_again(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as (replica, engine, source):
        read: list[tuple[str, ...] | None] = []

        async def rebuild(desired: Desired, making: Making) -> Path:
            making.begun(Path("/cache/v1-made"))
            making.made("embed")
            for go_on in (lambda: None, making.given_up):
                go_on()
                # The loop has done what it was told until now.
                heard = asyncio.Event()
                asyncio.get_running_loop().call_soon(heard.set)
                await heard.wait()
                read.append(engine.ahead)
            return Path("/cache/v1")

        source.rebuild = rebuild  # type: ignore[assignment, method-assign]
        replica.desire(delta("v1", 1))
        await at(replica, "v1")
        assert read == [("embed",), None]
        assert engine.calls == ["stage v1 ahead from v1-made", "stage v1 v1", "commit v1"]
        assert engine.ahead_at_stage is None


async def test_the_engine_reads_linked_files_before_they_are_proved_and_ends_with_those_that_are_not(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as (replica, engine, source):
        fetch, wrong = source.fetch, ["v1"]

        async def linked(desired: Desired, *, refetch: bool = False, making: Making | None = None) -> Any:
            assert making is not None
            making.begun(Path(f"/cache/{desired.snapshot}-linked"))
            making.made("embed")
            await asyncio.sleep(0)
            if desired.snapshot in wrong:
                raise SnapshotCorrupt("its bytes are not those that this name means")
            return await fetch(desired, refetch=refetch)

        source.fetch = linked  # type: ignore[method-assign]
        replica.desire(wanted("v1", 1))
        await at(replica, "v1", Stage.ERROR)
        await until(replica, lambda: engine.ahead is None)
        assert engine.calls == ["stage v1 ahead from v1-linked"]
        replica.desire(wanted("v2", 2))
        await at(replica, "v2")
        assert engine.calls[1:] == ["stage v2 ahead from v2-linked", "stage v2 v2", "commit v2"]
        assert engine.ahead_at_stage == ("embed",)


async def test_files_that_fail_their_verification_end_what_the_engine_has_read_of_them(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as (replica, engine, source):
        source.makes, source.corrupt = ("embed",), {"v1"}
        replica.desire(delta("v1", 1))
        await at(replica, "v1", Stage.ERROR)
        await until(replica, lambda: engine.ahead is None)
        assert engine.calls == ["stage v1 ahead from v1-made"]


async def test_a_newer_signal_ends_what_the_engine_has_read_of_the_older_snapshot(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, source):
        source.makes, source.ticks = ("embed",), 10_000
        replica.desire(delta("v1", 1))
        await until(replica, lambda: engine.ahead is not None)
        source.ticks = 0
        replica.desire(wanted("v2", 2))
        await at(replica, "v2")
        assert engine.calls == ["stage v1 ahead from v1-made", "stage v2 v2", "commit v2"]
        assert engine.ahead_at_stage is None


async def test_what_serves_is_known_by_all_its_files(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        other = SnapshotFiles(snapshot="v0", url="file:///b/v0", fingerprint="another f0")
        replica.desire(delta("v1", 1, fingerprint="f1"))
        await at(replica, "v1")
        replica.desire(delta("v1", 2, fingerprint="f1"))
        await at(replica, "v1")
        assert engine.switches == ["v1"]
        replica.desire(wanted("v1", 3, fingerprint="f1", compression="arc_v2", parents=(other,)))
        await until(replica, lambda: len(engine.switches) == 2)
        await at(replica, "v1")
        replica.desire(wanted("v1", 4, fingerprint="whole"))
        await until(replica, lambda: len(engine.switches) == 3)


async def test_files_that_are_overwritten_on_purpose_are_loaded_though_size_and_time_are_the_same(
    tmp_path: Path,
) -> None:
    """As `rsync --times` leaves them: only the content tells."""
    one, other = ((FileContent("model.safetensors", 9, digit * 64),) for digit in "12")

    async with play(tmp_path) as (replica, engine, _source):
        replica.desire(wanted("v1", 1, fingerprint="f1", content=one))
        await at(replica, "v1")
        for generation, content in ((2, one), (3, None)):
            replica.desire(wanted("v1", generation, fingerprint="f1", content=content))
            await at(replica, "v1")
        assert engine.switches == ["v1"]
        replica.desire(wanted("v1", 4, fingerprint="f1", content=other))
        await until(replica, lambda: len(engine.switches) == 2)


async def test_what_serves_and_what_is_loaded_next_is_kept_with_its_chain(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, _engine, source):
        kept: list[list[Desired]] = []

        async def release(keep: list[Desired]) -> None:
            kept.append(list(keep))

        source.release = release  # type: ignore[assignment]
        replica.desire(delta("v1", 1))
        await at(replica, "v1")
        await tick(10)
        source.blocked.add("v2")
        source.fetching.clear()
        replica.desire(wanted("v2", 2))
        await source.fetching.wait()
        replica.desire(delta("v3", 3))
        await at(replica, "v3")
        await tick(5)
        assert kept == [[delta("v1", 1)], [delta("v1", 1), delta("v3", 3)], [delta("v3", 3)]]


async def test_a_reload_loads_what_serves_once_more_with_a_new_cache_and_only_once(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        replica.desire(wanted("v1", 1, reset_prompt_cache="none"))
        await at(replica, "v1")
        for _ in range(2):
            replica.desire(wanted("v1", 1, reset_prompt_cache="none", reload=1))
            await until(replica, lambda: len(engine.switches) == 2)
            await at(replica, "v1")
        replica.desire(wanted("v1", 2, reset_prompt_cache="none", reload=1))
        await at(replica, "v1")
        assert engine.switches == ["v1", "v1"]
        assert replica.own.namespaces.admit(None) == 1
        replica.desire(Desired(snapshot=BASE_SNAPSHOT, generation=3, reload=1))
        await at(replica, BASE_SNAPSHOT)
        replica.desire(Desired(snapshot=BASE_SNAPSHOT, generation=3, reload=2))
        await until(replica, lambda: len(engine.switches) == 4)


async def test_the_weights_of_the_start_can_be_reloaded(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        replica.desire(Desired(snapshot=BASE_SNAPSHOT, generation=1))
        await at(replica, BASE_SNAPSHOT)
        assert engine.switches == []
        replica.desire(Desired(snapshot=BASE_SNAPSHOT, generation=1, reload=1))
        await until(replica, lambda: engine.switches == [BASE_SNAPSHOT])


@pytest.mark.parametrize("transition", ["ASYNC", "SYNC"])
async def test_a_held_target_waits_staged_with_the_door_open_until_it_is_let_go(
    tmp_path: Path, transition: str
) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        held = wanted("v1", 1, hold=True, transition=transition)
        replica.desire(held)
        await at(replica, "v1", Stage.STAGED)
        replica.desire(held)
        await tick(20)
        assert (replica.report().own.stage, replica.own.gate.door) == (Stage.STAGED, Door.OPEN)
        assert engine.switches == []
        replica.desire(wanted("v1", 1, transition=transition, reset_prompt_cache="none", max_cache_age=3))
        await at(replica, "v1")
        assert (replica.own.namespaces.admit(None), replica.own.namespaces.kv_age_max) == (0, 3), (
            "not as it was let go"
        )
        # Late: it has been let go.
        replica.desire(held)
        await tick(20)
        assert engine.switches == ["v1"]
        assert stages(replica, "v1") == LOADED
        replica.desire(wanted("v2", 2))
        await at(replica, "v2")


async def test_a_target_that_is_let_go_before_it_is_staged_does_not_wait(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        engine.stage_gate.clear()
        replica.desire(wanted("v1", 1, hold=True))
        await at(replica, "v1", Stage.STAGING)
        replica.desire(wanted("v1", 1))
        engine.stage_gate.set()
        await at(replica, "v1")
        assert engine.calls == ["stage v1 v1", "commit v1"]


async def test_a_replica_whose_turn_never_comes_before_the_next_signal_keeps_what_it_has_staged(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        for generation in range(1, GIVEN_UP_MAX + 2):
            replica.desire(wanted(f"v{generation}", generation, hold=True))
            await at(replica, f"v{generation}", Stage.STAGED)
        for generation in range(GIVEN_UP_MAX + 2, 9):
            replica.desire(wanted(f"v{generation}", generation, hold=True))
            await tick(20)
        kept = f"v{GIVEN_UP_MAX + 1}"
        report = replica.report()
        assert (report.own.stage, report.own.target, report.own.held, report.own.generation) == (
            Stage.STAGED,
            kept,
            True,
            8,
        )
        assert engine.switches == []
        turn = wanted("v8", 8, hold=True, let_go=GIVEN_UP_MAX + 1)
        replica.desire(turn)
        await at(replica, "v8", Stage.STAGED)
        # Late: that was switched.
        replica.desire(turn)
        await tick(20)
        assert engine.switches == [kept]
        assert replica.report().own.held
        replica.desire(wanted("v8", 8))
        await at(replica, "v8")
        assert engine.switches == [kept, "v8"]
        replica.desire(wanted("v9", 9, hold=True))
        await at(replica, "v9", Stage.STAGED)
        replica.desire(wanted("v10", 10, hold=True))
        # Patient again.
        await at(replica, "v10", Stage.STAGED)


async def test_a_held_target_that_is_superseded_while_it_may_not_be_given_up_does_not_wait_for_ever(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        for generation in range(1, 9):
            engine.stage_gate.clear()
            replica.desire(wanted(f"v{generation}", generation, hold=True))
            await tick(8)
        engine.stage_gate.set()
        await at(replica, "v8", Stage.STAGED)
        assert engine.switches == []
        replica.desire(wanted("v8", 8))
        await at(replica, "v8")


async def test_the_report_says_whether_new_requests_are_admitted(tmp_path: Path) -> None:
    async with play(tmp_path) as (replica, engine, _source):
        assert replica.report().own.admitting
        with replica.own.gate.admitted():
            replica.desire(wanted("v1", 1, transition="SYNC"))
            await until(replica, lambda: not replica.report().own.admitting)
            assert (replica.report().own.stage, replica.report().in_flight) == (Stage.STAGED, 1)
        await at(replica, "v1")
        assert replica.report().own.admitting
        engine.commit_gate.clear()
        replica.desire(wanted("v2", 2))
        await engine.committing.wait()
        assert replica.report().own.admitting, "held newcomers are served by the new snapshot"
        engine.commit_gate.set()
        await at(replica, "v2")


async def test_the_age_limit_of_a_snapshot_reaches_the_engine_with_every_request(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(tmp_path, engine) as it:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}

        async def ask() -> None:
            answer = await it.http.post("/v1/completions", json=body | {"model": it.replica.names.model})
            assert answer.status_code == 200, answer.text

        await ask()
        await it.swapped("v1", reset_prompt_cache="none", max_cache_age=2)
        await ask()
        await it.until(lambda: it.replica.report().own.stage is Stage.IDLE)
        await it.swapped("v2", reset_prompt_cache="none")
        await ask()
        assert [request.kv_age_max for request in engine.requests] == [None, 2, None]
        assert len({request.salt for request in engine.requests}) == 1


def hint(snapshot: str, *files: str) -> Hint:
    return Hint(snapshot=snapshot, url=f"file:///b/{snapshot}", files=files or ("model.safetensors",))


async def test_a_hint_fetches_files_early_and_a_load_goes_before_it(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as it:
        source, begun = it.source, asyncio.Event()

        async def prefetch(given: Hint) -> None:
            source.calls.append(f"prefetch {given.snapshot} {given.files[0]}")
            begun.set()
            if given.files[0] == "slow":
                try:
                    await asyncio.Event().wait()
                finally:
                    source.calls.append("stopped")

        it.replica.own.hints._prefetch = prefetch
        for given in (hint("v1", "slow"), hint("v1", "b"), hint("v2", "c")):
            body = {"snapshot": given.snapshot, "url": given.url, "files": given.files}
            assert (await it.http.post("/replica/hint", json=body)).status_code == 202
        await begun.wait()
        await it.swapped("v1")
        await it.until(lambda: it.replica.report().own.stage is Stage.IDLE)
        assert source.calls[:3] == ["prefetch v1 slow", "stopped", "fetch v1"]
        assert "prefetch v2 c" in source.calls
        assert "prefetch v1 b" not in source.calls
        answer = await it.http.post("/replica/hint", json={"snapshot": "v1"})
        assert answer.status_code == 400
        assert "not a hint" in answer.json()["error"]["message"]


async def test_an_interrupted_hint_of_another_snapshot_is_taken_up_again_after_the_load() -> None:
    calls: list[str] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def prefetch(given: Hint) -> None:
        calls.append(given.files[0])
        begun.set()
        await go_on.wait()

    hints = Hints(prefetch)
    hints.add(hint("v2", "a"))
    hints.add(hint("v2", "b"))
    hints.add(hint("v2", "b"))
    await begun.wait()
    async with hints.loading("v1"):
        # Is being fetched anyway.
        hints.add(hint("v1", "x"))
        hints.add(hint("v2", "c"))
        await tick(3)
        assert calls == ["a"]
        go_on.set()
    await tick(8)
    assert calls == ["a", "a", "b", "c"]
    await hints.close()
    hints.add(hint("v3"))
    await tick(3)
    assert calls == ["a", "a", "b", "c"]


async def test_hints_go_on_after_a_load_that_was_given_up_while_it_waited_for_one_to_stop() -> None:
    calls: list[str] = []
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def prefetch(given: Hint) -> None:
        calls.append(given.files[0])
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                # For a thread.
                await stopped.wait()

    async def load() -> None:
        async with hints.loading("v1"):
            raise AssertionError("the prefetch still runs")

    hints = Hints(prefetch)
    hints.add(hint("v2", "a"))
    hints.add(hint("v2", "b"))
    await begun.wait()
    given_up = asyncio.create_task(load())
    await tick(3)
    given_up.cancel()
    await asyncio.wait([given_up])
    assert calls == ["a"]
    stopped.set()
    await tick(8)
    assert calls == ["a", "a", "b"]
    await hints.close()


async def test_no_hint_is_begun_during_a_load_though_one_failed_as_it_was_cancelled() -> None:
    calls: list[str] = []
    begun = asyncio.Event()

    async def prefetch(given: Hint) -> None:
        calls.append(given.files[0])
        begun.set()
        try:
            await asyncio.sleep(0 if len(calls) > 1 else 3600)
        except asyncio.CancelledError:
            raise SnapshotCorrupt("changed while it was read") from None

    hints = Hints(prefetch)
    hints.add(hint("v2", "a"))
    hints.add(hint("v2", "b"))
    await begun.wait()
    async with hints.loading("v1"):
        await tick(8)
        assert calls == ["a"]
    await tick(8)
    assert calls == ["a", "b"]
    await hints.close()


def test_hints_that_fail_or_are_too_many_are_logged_and_harm_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hints, "HINTS_MAX", 3)

    async def main() -> None:
        done: list[str] = []

        async def prefetch(given: Hint) -> None:
            if given.files[0] == "absent":
                raise SnapshotCorrupt("absent: no such file")
            if given.files[0] == "odd":
                raise KeyError("odd")
            done.append(given.files[0])

        hints = Hints(prefetch)
        for name in ("absent", "odd", "good", "too many"):
            hints.add(hint("v1", name))
        await tick(5)
        assert done == ["good"]
        await hints.close()

    asyncio.run(main())
    assert "absent: no such file" in caplog.text
    assert "KeyError: 'odd'" in caplog.text
    assert "3 hints wait already; one of v1 is dropped" in caplog.text
