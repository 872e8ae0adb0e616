"""The ledger on every database it can be kept in."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest
from ledger_helpers import DEPLOYMENT, MODEL, moved, on_ledger, opened, signal

from midstream.core.errors import ConfigError, Conflict, NotFound
from midstream.core.types import Desired, Stage
from midstream.ledger import (
    Death,
    DeploymentChange,
    DeploymentRow,
    Disagreement,
    FleetReports,
    Ledger,
    NewDeployment,
    Signal,
    stronger_reset,
)


async def test_nothing_is_desired_before_the_first_signal(url: str) -> None:
    async with on_ledger(url) as ledger:
        state = await ledger.state(DEPLOYMENT)
        assert (state.desired, state.fallbacks, state.snapshot) == (None, (), "base")
        row = await ledger.deployment(DEPLOYMENT)
        assert (row.model, row.transition, row.generation) == (MODEL, "ASYNC", 0)
        assert await ledger.deployments() == [row]


async def test_a_signal_becomes_the_desired_snapshot_and_survives_reopening(url: str) -> None:
    async def first(ledger: Ledger) -> None:
        result = await signal(ledger, "run/step 1", reset_prompt_cache="new_session")
        assert result.changed

    async def second(ledger: Ledger) -> None:
        assert (await ledger.state(DEPLOYMENT)).desired == Desired(
            snapshot="run/step 1",
            generation=1,
            signalled=1,
            url="file:///bucket/run/step 1",
            reset_prompt_cache="new_session",
            transition="ASYNC",
        )
        (row,) = await ledger.snapshots(DEPLOYMENT)
        assert (row.identity, row.kind, row.generation) == ("run/step 1", "full", 1)

    async with on_ledger(url) as ledger:
        await first(ledger)
    async with on_ledger(url) as ledger:
        await second(ledger)


async def test_signalling_what_is_desired_again_changes_nothing(url: str) -> None:
    async with on_ledger(url) as ledger:
        first = await signal(ledger, "a")
        again = await signal(ledger, "a", reset_prompt_cache="none", generation_floor=9)
        assert again.desired == first.desired
        assert (first.changed, again.changed) == (True, False)


async def test_a_failed_snapshot_can_be_asked_for_again(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        await ledger.record(DEPLOYMENT, "replica-0", "b", [moved(0, "a", 1, Stage.ERROR, "file is short")])
        retried = await signal(ledger, "a")
        assert (retried.changed, retried.desired.generation) == (True, 2)
        assert not (await signal(ledger, "a")).changed


async def test_a_failure_the_caller_has_seen_counts_before_its_row_is_written(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        assert (await signal(ledger, "a", failed_generation=1)).desired.generation == 2
        assert not (await signal(ledger, "a", failed_generation=1)).changed


async def test_a_replica_that_failed_and_then_loaded_after_a_reboot_has_not_failed(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        await ledger.record(DEPLOYMENT, "replica-0", "b1", [moved(7, "a", 1, Stage.ERROR, "disk full")])
        await ledger.record(DEPLOYMENT, "replica-0", "b2", [moved(0, "a", 1, Stage.IDLE)])
        assert not (await signal(ledger, "a")).changed


async def test_other_files_under_the_desired_identity_are_another_snapshot(url: str) -> None:
    async with on_ledger(url) as ledger:
        assert (await signal(ledger, "a", fingerprint="f1")).desired.fingerprint == "f1"
        await ledger.record(DEPLOYMENT, "replica-0", "b", [moved(0, "a", 1, Stage.IDLE)])
        assert not (await signal(ledger, "a", fingerprint="f1")).changed
        again = await signal(ledger, "a", fingerprint="f2")
        assert (again.changed, again.desired.generation, again.desired.fingerprint) == (True, 2, "f2")
        state = await ledger.state(DEPLOYMENT)
        assert (state.desired, state.since) == (again.desired, {"a": 2})
        await signal(ledger, "b", fingerprint="g")
        assert (await ledger.state(DEPLOYMENT)).fallbacks == (), "what was ready had other files"
        await signal(ledger, "a", fingerprint="f2")
        assert (await ledger.state(DEPLOYMENT)).since == {"a": 2}, "the files are those of generation 2"


async def test_a_snapshot_asked_for_again_keeps_its_files_and_the_stronger_policy(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a", reset_prompt_cache="new_session")
        retried = await signal(ledger, "a", reset_prompt_cache="none", failed_generation=1)
        assert (retried.desired.generation, retried.desired.reset_prompt_cache) == (2, "new_session")
        state = await ledger.state(DEPLOYMENT)
        assert (state.since, state.reset_all, state.reset_new_session) == ({"a": 1}, 0, 2)
        await signal(ledger, "b", reset_prompt_cache="all")
        await signal(ledger, "c", reset_prompt_cache="none")
        state = await ledger.state(DEPLOYMENT)
        assert (state.reset_all, state.reset_new_session) == (3, 2)


def test_the_stronger_policy_does_what_both_ask_for() -> None:
    order = ["none", "new_session", "all"]
    assert [[stronger_reset(a, b) for a in order] for b in order] == [  # type: ignore[arg-type]
        ["none", "new_session", "all"],
        ["new_session", "new_session", "all"],
        ["all", "all", "all"],
    ]


async def test_a_retry_gets_a_generation_that_no_signal_gets(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        assert [await ledger.new_generation(DEPLOYMENT) for _ in range(2)] == [2, 3]
        assert await ledger.new_generation(DEPLOYMENT, floor=7) == 8
        state = await ledger.state(DEPLOYMENT)
        assert state.desired is not None
        assert (state.desired.generation, state.since) == (1, {"a": 1}), "a retry is no signal"
        await ledger.record(DEPLOYMENT, "replica-0", "b", [moved(0, "a", 8, Stage.ERROR, "gone")])
        assert (await signal(ledger, "a")).desired.generation == 9, "the retry failed too"


async def test_whether_anything_was_ever_ready_outlives_the_snapshot_that_was(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a", fingerprint="f1")
        rows = [
            moved(0, "base", 0, Stage.IDLE),
            moved(1, "unknown", 1, Stage.IDLE),
            moved(2, "a", 1, Stage.STAGED),
        ]
        await ledger.record(DEPLOYMENT, "replica-0", "b", rows)
        assert not (await ledger.state(DEPLOYMENT)).ever_ready
        await ledger.record(DEPLOYMENT, "replica-0", "b", [moved(3, "a", 1, Stage.IDLE)])
        await ledger.record(DEPLOYMENT, "replica-1", "b", [moved(9, "a", 1, Stage.IDLE)])
        await signal(ledger, "a", fingerprint="f2")
        state = await ledger.state(DEPLOYMENT)
        assert (state.ever_ready, state.fallbacks) == (True, ())
        (row,) = await ledger.snapshots(DEPLOYMENT)
        assert (row.ready_at, row.fingerprint) == (8.0, "f2")


@pytest.mark.parametrize(
    ("stages", "ready"),
    [
        ([("a", Stage.CHECKING), ("b", Stage.FETCHING)], True),
        ([("a", Stage.STAGED), ("b", Stage.FETCHING)], False),
        ([("a", Stage.CHECKING)], False),
        ([("a", Stage.CHECKING), ("a", Stage.ERROR), ("b", Stage.FETCHING)], False),
        # Loaded once more, and not checked to the end.
        ([("a", Stage.CHECKING), ("a", Stage.ERROR), ("a", Stage.CHECKING), ("b", Stage.FETCHING)], False),
        ([("a", Stage.FETCHING), ("a", Stage.ERROR), ("a", Stage.CHECKING), ("b", Stage.FETCHING)], True),
        ([("base", Stage.CHECKING), ("b", Stage.FETCHING)], False),
    ],
)
async def test_what_goes_on_serving_without_the_end_of_its_check_was_ready(
    url: str, stages: list[tuple[str, Stage]], ready: bool
) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        await signal(ledger, "b")
        for seq, (identity, stage) in enumerate(stages):
            await ledger.record(DEPLOYMENT, "replica-0", "boot", [moved(seq, identity, 2, stage)])
        state = await ledger.state(DEPLOYMENT)
        assert (state.ever_ready, [one.snapshot for one in state.fallbacks]) == (
            ready,
            ["a"] if ready else [],
        )


async def test_which_boots_served_when_the_first_snapshot_was_signalled_is_remembered(url: str) -> None:
    async with on_ledger(url) as ledger:
        for identity, boots in (("a", ("one", "two")), ("b", ("two", "three"))):
            await ledger.signal(
                DEPLOYMENT, Signal(identity=identity, url=f"file:///b/{identity}"), FleetReports(boots=boots)
            )
            await ledger.update_deployment(DEPLOYMENT, fields={"description": identity})
            assert (await ledger.state(DEPLOYMENT)).first_boots == {"one", "two"}
        await ledger.reset_ledger(DEPLOYMENT)
        assert (await ledger.state(DEPLOYMENT)).first_boots == frozenset()


async def test_the_history_of_a_replica_ends_with_the_boot_before(url: str) -> None:
    async with on_ledger(url) as ledger:
        empty = await ledger.boot_history(DEPLOYMENT, "replica-0", "b1")
        assert (empty.last_seq, empty.previous_boot, empty.tail) == (-1, None, ())
        stages = [Stage.FETCHING, Stage.VERIFYING, Stage.STAGING]
        for replica, boot in (("replica-0", "b1"), ("replica-1", "other")):
            rows = [moved(seq, "a", 1, stage) for seq, stage in enumerate(stages)]
            await ledger.record(DEPLOYMENT, replica, boot, rows)
        known = await ledger.boot_history(DEPLOYMENT, "replica-0", "b1")
        assert (known.last_seq, known.previous_boot, known.tail) == (2, None, ())
        new = await ledger.boot_history(DEPLOYMENT, "replica-0", "b2")
        assert (new.last_seq, new.previous_boot) == (-1, "b1")
        assert [(t.seq, t.stage) for t in new.tail] == [(1, Stage.VERIFYING), (2, Stage.STAGING)]
        silent = await ledger.boot_history(DEPLOYMENT, "replica-0", "b3", ended="b2")
        assert (silent.previous_boot, silent.tail) == ("b2", ())


async def test_a_death_is_stored_once_with_its_stage_change_and_made_up_for_by_a_load_of_that_or_a_later_signal(
    url: str,
) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "old")
        await signal(ledger, "a")
        death = Death("replica-0", "a", 2, "the engine died while loading it")
        assert await ledger.record_death(DEPLOYMENT, "b1", death, 3)
        assert not await ledger.record_death(DEPLOYMENT, "b1", death, 3)
        assert await ledger.record_death(DEPLOYMENT, "b2", death, None)
        assert (await ledger.state(DEPLOYMENT)).deaths == (death, death)
        (row,) = await ledger.transitions(DEPLOYMENT)
        assert (row.boot, row.seq, row.stage, row.detail) == ("b1", 3, Stage.ERROR, death.detail)
        retried = await signal(ledger, "a")
        assert retried.changed, "it failed"
        assert retried.desired.generation == 3
        other = Death("replica-1", "a", 3, death.detail)
        assert await ledger.record_death(DEPLOYMENT, "b1", other, None)
        await ledger.record(DEPLOYMENT, "replica-0", "b3", [moved(0, "old", 3, Stage.IDLE)])
        assert (await ledger.state(DEPLOYMENT)).deaths == (death, death, other), "a fallback was always fine"
        await signal(ledger, "new")
        await ledger.record(DEPLOYMENT, "replica-0", "b3", [moved(1, "new", 4, Stage.IDLE)])
        assert (await ledger.state(DEPLOYMENT)).deaths == (other,)
        await ledger.record(DEPLOYMENT, "replica-1", "b2", [moved(0, "a", 3, Stage.IDLE)])
        assert (await ledger.state(DEPLOYMENT)).deaths == ()


async def test_the_newest_stage_changes_can_be_asked_for(url: str) -> None:
    async with on_ledger(url) as ledger:
        rows = [moved(seq, "a", 1, Stage.FETCHING) for seq in range(5)]
        await ledger.record(DEPLOYMENT, "replica-0", "b", rows)
        assert [t.seq for t in await ledger.transitions(DEPLOYMENT, newest=2)] == [3, 4]
        assert [t.seq for t in await ledger.transitions(DEPLOYMENT)] == [0, 1, 2, 3, 4]


async def test_a_newer_signal_supersedes_and_an_older_identity_is_a_rollback(url: str) -> None:
    async with on_ledger(url) as ledger:
        for identity in ("a", "b", "a"):
            await signal(ledger, identity, reset_prompt_cache="none" if identity == "b" else "all")
        desired = (await ledger.state(DEPLOYMENT)).desired
        assert desired is not None
        assert (desired.snapshot, desired.generation, desired.reset_prompt_cache) == ("a", 3, "all")
        rows = await ledger.snapshots(DEPLOYMENT)
        assert [(r.identity, r.generation) for r in rows] == [("a", 3), ("b", 2)]
        assert rows[0].first_signalled_at < rows[1].signalled_at < rows[0].signalled_at


async def test_a_new_generation_is_above_any_a_replica_has_seen(url: str) -> None:
    async with on_ledger(url) as ledger:
        assert (await signal(ledger, "a", generation_floor=41)).desired.generation == 42


async def test_a_transition_is_stored_once_and_told_apart_by_replica_boot_and_seq(url: str) -> None:
    async with on_ledger(url) as ledger:
        rows = [moved(0, "base", 0, Stage.IDLE), moved(1, "a", 1, Stage.FETCHING)]
        assert await ledger.record(DEPLOYMENT, "replica-0", "b1", rows) == 2
        assert await ledger.record(DEPLOYMENT, "replica-0", "b1", [*rows, moved(2, "a", 1, Stage.IDLE)]) == 1
        assert await ledger.record(DEPLOYMENT, "replica-0", "b2", rows[:1]) == 1
        assert await ledger.record(DEPLOYMENT, "replica-1", "b1", rows[:1]) == 1
        stored = [(r.replica, r.boot, r.seq, r.identity) for r in await ledger.transitions(DEPLOYMENT)]
        assert stored == [
            ("replica-0", "b1", 0, "base"),
            ("replica-0", "b1", 1, "a"),
            ("replica-0", "b1", 2, "a"),
            ("replica-0", "b2", 0, "base"),
            ("replica-1", "b1", 0, "base"),
        ]
        last = (await ledger.boot_transitions(DEPLOYMENT, "replica-0", "b1"))[-1]
        assert (last.stage, last.at, last.detail) == (Stage.IDLE, 7.0, "")


async def test_an_error_message_may_hold_any_character(url: str) -> None:
    """It may quote a file somebody uploaded; PostgreSQL takes no NUL, and no encoding takes half a pair."""

    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        odd = "tensor a\x00b\ud800 \U0001f642 is not in the base model"
        plain = "tensor a\\x00b\\ud800 \U0001f642 is not in the base model"
        assert await ledger.record(DEPLOYMENT, "r", "b1", [moved(0, "a", 1, Stage.ERROR, odd)]) == 1
        assert await ledger.record_death(DEPLOYMENT, "b2", Death("r", "a", 1, odd), 0)
        found = await ledger.disagree(DEPLOYMENT, Disagreement("r", "b2", "a", 1, 0, odd))
        await ledger.settle_disagreement(DEPLOYMENT, replace(found, verdict="out", detail=odd))
        state = await ledger.state(DEPLOYMENT)
        details = [row.detail for row in await ledger.transitions(DEPLOYMENT)]
        details += [row.detail for row in (found, *state.deaths, *state.disagreements)]
        assert details == [plain] * 5


async def test_fallbacks_are_the_snapshots_that_served_the_last_ready_first(url: str) -> None:
    async with on_ledger(url) as ledger:
        for identity in ("a", "b", "broken", "c"):
            await signal(ledger, identity)
        seen = [("base", Stage.IDLE), ("b", Stage.IDLE), ("a", Stage.IDLE), ("broken", Stage.ERROR)]
        rows = [moved(seq, identity, 4, stage) for seq, (identity, stage) in enumerate(seen)]
        await ledger.record(DEPLOYMENT, "replica-0", "b1", rows)
        state = await ledger.state(DEPLOYMENT)
        assert [f.snapshot for f in state.fallbacks] == ["a", "b"]
        assert {f.generation for f in state.fallbacks} == {4}
        assert state.fallbacks[0].url == "file:///bucket/a"
        await ledger.record(DEPLOYMENT, "replica-0", "b1", [moved(4, "c", 4, Stage.IDLE)])
        assert [f.snapshot for f in (await ledger.state(DEPLOYMENT)).fallbacks] == ["a", "b"]


async def test_deployments_are_separate(url: str) -> None:
    async with on_ledger(url) as ledger:
        other = "accounts/local/deployments/other"
        await ledger.ensure_deployment(other, MODEL, "file:///other", "SYNC")
        await signal(ledger, "a")
        await ledger.signal(other, Signal(identity="a", url="file:///other/a"))
        assert (await ledger.state(DEPLOYMENT)).desired != (await ledger.state(other)).desired
        assert [r.url for r in await ledger.snapshots(other)] == ["file:///other/a"]
        assert [d.name for d in await ledger.deployments()] == [DEPLOYMENT, other]


async def test_an_unknown_deployment_is_not_found(url: str) -> None:
    async with on_ledger(url) as ledger:
        for call in (ledger.deployment, ledger.state, ledger.snapshots, ledger.transitions):
            with pytest.raises(NotFound, match="there is no deployment nope"):
                await call("nope")
        with pytest.raises(NotFound):
            await ledger.signal("nope", Signal(identity="a", url="file:///a"))


async def test_settings_follow_the_server_but_snapshots_of_another_model_are_refused(url: str) -> None:
    async with on_ledger(url) as ledger:
        other = await ledger.ensure_deployment(DEPLOYMENT, "m2", "file:///b2", "SYNC")
        assert (other.model, other.bucket_url, other.transition) == ("m2", "file:///b2", "SYNC")
        await signal(ledger, "a")
        with pytest.raises(ConfigError, match=r"serves m2, not m3; use another --state-dir"):
            await ledger.ensure_deployment(DEPLOYMENT, "m3", "file:///b2", "SYNC")
        kept = await ledger.ensure_deployment(DEPLOYMENT, "m2", "file:///b3", "ASYNC")
        assert (kept.bucket_url, kept.desired_snapshot, kept.generation) == ("file:///b3", "a", 1)


@pytest.mark.parametrize("statement", range(1, 3))
async def test_a_crash_between_the_steps_of_a_signal_leaves_the_old_state_whole(
    url: str, statement: int
) -> None:
    """The process dies (no rollback, no close) just after the n-th writing statement of the second signal."""
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
    script = f"""
import asyncio, os, sqlalchemy as sa
from midstream.ledger import Ledger, Signal
ledger = Ledger({url!r})
left = {statement}
def die(conn, cursor, text, parameters, context, many):
    global left
    if text.startswith(("INSERT", "UPDATE")):
        left -= 1
        if left < 0:
            os._exit(9)
sa.event.listen(ledger._database.engine, "before_cursor_execute", die)
asyncio.run(ledger.signal({DEPLOYMENT!r}, Signal(identity="b", url="file:///bucket/b")))
"""
    command = [sys.executable, "-c", script]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60)
    assert done.returncode == 9, done.stderr.decode()

    async with on_ledger(url) as ledger:
        desired = (await ledger.state(DEPLOYMENT)).desired
        assert desired is not None
        assert (desired.snapshot, desired.generation) == ("a", 1)
        assert [r.identity for r in await ledger.snapshots(DEPLOYMENT)] == ["a"]
        assert (await signal(ledger, "b")).desired.generation == 2


async def test_signals_from_two_ledgers_at_once_each_get_a_generation_of_their_own(url: str) -> None:
    with opened(url) as one, opened(url) as two:
        for ledger in (one, two):
            await ledger.ensure_deployment(DEPLOYMENT, MODEL, "file:///bucket", "ASYNC")
        results = await asyncio.gather(
            *(signal(ledger, f"{name}{i}") for i in range(20) for name, ledger in (("x", one), ("y", two)))
        )
        last = max(results, key=lambda result: result.desired.generation)
        assert sorted(result.desired.generation for result in results) == list(range(1, 41))
        assert (await one.state(DEPLOYMENT)).desired == last.desired
        assert (await two.state(DEPLOYMENT)).desired == last.desired


async def test_of_two_deployments_that_want_one_thing_at_once_one_gets_it(url: str) -> None:
    """Each change sees what the other has written, though each is of a row of its own."""

    names = [f"{DEPLOYMENT}-{number}" for number in range(4)]
    with opened(url) as one, opened(url) as two, opened(url) as three, opened(url) as four:
        for name in names:
            await one.create_deployment(NewDeployment(name, MODEL, "file:///bucket"))

        async def want(ledger: Ledger, name: str, thing: str) -> bool:
            def change(row: DeploymentRow, others: list[DeploymentRow]) -> DeploymentChange:
                assert {row.name, *(other.name for other in others)} == set(names)
                if any(thing in other.fields for other in others):
                    raise Conflict("taken")
                return {"fields": {thing: 1}}

            try:
                await ledger.revise_beside(name, change)
            except Conflict:
                return False
            return True

        for thing in map(str, range(8)):
            wants = zip((one, two, three, four), names, strict=True)
            got = await asyncio.gather(*(want(ledger, name, thing) for ledger, name in wants))
            assert sum(got) == 1
            owners = [row.name for row in await two.deployments() if thing in row.fields]
            assert owners == [names[got.index(True)]]


async def test_the_same_signal_from_two_ledgers_at_once_is_one_signal(url: str) -> None:
    with opened(url) as one, opened(url) as two:
        await one.ensure_deployment(DEPLOYMENT, MODEL, "file:///bucket", "ASYNC")
        results = await asyncio.gather(*(signal(ledger, "a") for ledger in (one, two, one, two)))
        assert sorted(result.changed for result in results) == [False, False, False, True]
        assert {result.desired.generation for result in results} == {1}
