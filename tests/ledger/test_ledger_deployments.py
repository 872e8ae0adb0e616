"""Deployments in the ledger: made, changed, reset, removed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from ledger_helpers import DEPLOYMENT, MODEL, moved, on_ledger, signal

from midstream.core.errors import Conflict, NotFound
from midstream.core.types import Desired, FileContent, SnapshotCheck, SnapshotContent, Stage
from midstream.ledger import (
    Death,
    DeploymentRow,
    Disagreement,
    FleetReports,
    Ledger,
    NewDeployment,
    Signal,
    Signalled,
)
from midstream.ledger.deployments import FROZEN, TENANT, NameTaken, PolicyLimits

OTHER = "accounts/local/deployments/other"
POLICY = f"{DEPLOYMENT}/policies/red"


async def test_a_deployment_is_made_once_and_keeps_what_it_was_told(url: str) -> None:
    async with on_ledger(url) as ledger:
        fields = {"displayName": "Übung", "annotations": {"a": "b"}, "nothing": None}
        row = await ledger.create_deployment(
            NewDeployment(
                OTHER,
                model="m",
                bucket_url="s3://b/p",
                transition="SYNC",
                replicas_min=0,
                replicas_max=3,
                fields=fields,
            )
        )
        assert row == await ledger.deployment(OTHER)
        assert (row.model, row.bucket_url, row.transition, row.deleting) == ("m", "s3://b/p", "SYNC", False)
        assert (row.replicas_min, row.replicas_max) == (0, 3)
        assert row.fields == {"displayName": "Übung", "annotations": {"a": "b"}}
        assert row.created_at == row.updated_at
        with pytest.raises(Conflict, match=OTHER):
            await ledger.create_deployment(NewDeployment(OTHER, model="m2", bucket_url="s3://b/q"))
        assert await ledger.deployment(OTHER) == row
        assert [d.name for d in await ledger.deployments()] == [DEPLOYMENT, OTHER]


async def test_only_what_is_given_is_changed(url: str) -> None:
    async with on_ledger(url) as ledger:
        before = await ledger.create_deployment(
            NewDeployment(OTHER, model="m", bucket_url="b", fields={"x": 1, "y": 2})
        )
        row = await ledger.update_deployment(OTHER, transition="SYNC", fields={"y": None, "z": [3]})
        assert (row.transition, row.replicas_min, row.bucket_url) == ("SYNC", 1, "b")
        assert row.fields == {"x": 1, "z": [3]}
        assert row.updated_at > before.updated_at == before.created_at == row.created_at
        assert (await ledger.update_deployment(OTHER, deleting=True)).deleting
        assert (await ledger.deployment(OTHER)).fields == {"x": 1, "z": [3]}
        with pytest.raises(NotFound):
            await ledger.update_deployment("nope", replicas_min=2)


async def test_the_transition_of_a_deployment_reaches_what_is_desired(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        await ledger.update_deployment(DEPLOYMENT, transition="SYNC")
        desired = (await ledger.state(DEPLOYMENT)).desired
        assert desired is not None
        assert (desired.transition, desired.generation) == ("SYNC", 1)


async def test_a_removed_deployment_leaves_nothing_behind(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        await ledger.record(DEPLOYMENT, "replica-0", "b", [moved(0, "a", 1, Stage.IDLE)])
        await ledger.record_death(DEPLOYMENT, "b", Death("replica-0", "a", 1, "died"), 1)
        await ledger.disagree(DEPLOYMENT, Disagreement("replica-0", "b", "a", 1, 0, "differs"))
        await ledger.delete_deployment(DEPLOYMENT)
        with pytest.raises(NotFound):
            await ledger.state(DEPLOYMENT)
        with pytest.raises(NotFound):
            await ledger.delete_deployment(DEPLOYMENT)
        await ledger.ensure_deployment(DEPLOYMENT, "another model", "b")
        state = await ledger.state(DEPLOYMENT)
        assert (state.desired, state.deaths, state.disagreements) == (None, (), ())
        assert await ledger.snapshots(DEPLOYMENT) == await ledger.transitions(DEPLOYMENT) == []


async def test_a_reset_forgets_every_snapshot_and_goes_on_counting(url: str) -> None:
    async with on_ledger(url) as ledger:
        assert await ledger.reset_ledger(DEPLOYMENT) == 0, "nothing was signalled"
        await signal(ledger, "a")
        ready = moved(0, "a", 1, Stage.IDLE)
        await ledger.record(DEPLOYMENT, "replica-0", "b", [ready])
        generation = await ledger.reset_ledger(DEPLOYMENT, generation_floor=7)
        assert generation == await ledger.reset_ledger(DEPLOYMENT) == 8
        state = await ledger.state(DEPLOYMENT)
        assert state.desired == Desired(snapshot="base", generation=8, signalled=8)
        assert (state.fallbacks, state.ever_ready, state.first_boots) == ((), False, frozenset())
        assert await ledger.snapshots(DEPLOYMENT) == await ledger.transitions(DEPLOYMENT) == []
        later = moved(1, "base", 8, Stage.IDLE)
        assert await ledger.record(DEPLOYMENT, "replica-0", "b", [ready, later]) == 1, "what was is forgotten"
        again = await signal(ledger, "a")
        assert (again.changed, again.desired.generation) == (True, 9)
        assert await ledger.record(DEPLOYMENT, "replica-0", "c", [ready]) == 0
        (row,) = await ledger.snapshots(DEPLOYMENT)
        assert row.ready_at is None
        assert not (await ledger.state(DEPLOYMENT)).ever_ready


async def test_the_signals_since_the_last_reset_in_order_and_which_of_them_became_ready(url: str) -> None:
    async with on_ledger(url) as ledger:
        for identity in ("a", "b", "c"):
            await signal(ledger, identity)
        rows = [moved(0, "a", 1, Stage.IDLE), moved(1, "b", 2, Stage.ERROR), moved(2, "c", 3, Stage.CHECKING)]
        await ledger.record(DEPLOYMENT, "replica-0", "b", rows)
        a, b, c = Signalled("a", 1, True), Signalled("b", 2, False), Signalled("c", 3, False)
        assert await ledger.signalled(DEPLOYMENT) == (0, [c, b, a])
        assert await ledger.signalled(DEPLOYMENT, after=2) == (0, [c])
        assert await ledger.signalled(DEPLOYMENT, newest=2) == (0, [c, b])
        await signal(ledger, "a")
        assert await ledger.signalled(DEPLOYMENT, after=3) == (0, [Signalled("a", 4, False)])
        await ledger.record(DEPLOYMENT, "replica-0", "b", [moved(3, "a", 4, Stage.IDLE)])
        assert await ledger.signalled(DEPLOYMENT, after=3) == (0, [Signalled("a", 4, True)])
        assert await ledger.reset_ledger(DEPLOYMENT) == 5
        assert await ledger.signalled(DEPLOYMENT) == (5, [])
        await signal(ledger, "d")
        assert await ledger.signalled(DEPLOYMENT, after=5) == (5, [Signalled("d", 6, False)])


async def test_a_success_makes_up_for_the_deaths_before_it(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        for replica in ("replica-0", "replica-1"):
            await ledger.record_death(DEPLOYMENT, "b1", Death(replica, "a", 1, "died"), None)
        await ledger.record(DEPLOYMENT, "replica-0", "b2", [moved(0, "a", 1, Stage.IDLE)])
        assert [death.replica for death in (await ledger.state(DEPLOYMENT)).deaths] == ["replica-1"]
        await ledger.record_death(DEPLOYMENT, "b2", Death("replica-0", "a", 1, "died later"), None)
        deaths = (await ledger.state(DEPLOYMENT)).deaths
        assert [(d.replica, d.detail) for d in deaths] == [("replica-1", "died"), ("replica-0", "died later")]


async def test_a_disagreement_is_stored_once_and_ends_once(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a")
        differs = Disagreement("replica-1", "b", "a", 1, 0, "differs")
        found = await ledger.disagree(DEPLOYMENT, differs, floor=4)
        assert found == Disagreement("replica-1", "b", "a", 1, 5, "differs", "reload")
        assert await ledger.disagree(DEPLOYMENT, differs, floor=9) == found
        assert (await ledger.state(DEPLOYMENT)).disagreements == (found,)
        out = replace(found, verdict="out", detail="differs still")
        assert await ledger.settle_disagreement(DEPLOYMENT, out)
        other = replace(found, boot="other boot", verdict="agreed")
        assert not await ledger.settle_disagreement(DEPLOYMENT, other)
        (now,) = (await ledger.state(DEPLOYMENT)).disagreements
        assert (now.verdict, now.detail) == ("out", "differs still")
        assert (await signal(ledger, "b")).desired.generation == 6, "above the generation of the reload"


@pytest.mark.parametrize(
    ("change", "why"), [({"deleting": True}, "being ended"), ({"fields": {FROZEN: True}}, "is frozen")]
)
async def test_a_policy_that_is_frozen_or_being_ended_takes_no_signal(
    url: str, change: dict[str, Any], why: str
) -> None:
    """Also when that happens between a caller's look and its signal."""

    async with on_ledger(url) as ledger:
        await ledger.create_deployment(NewDeployment(POLICY, model="red", bucket_url="file:///bucket"))
        red = Signal(identity="red-1", url="file:///bucket/red-1")
        assert (await ledger.signal(POLICY, red, FleetReports(), chain_max=1)).changed
        await ledger.update_deployment(POLICY, **change)  # type: ignore[arg-type]
        for identity in ("red-1", "red-2"):
            with pytest.raises(Conflict, match=why):
                await ledger.signal(POLICY, replace(red, identity=identity), FleetReports(), chain_max=1)
        assert (await ledger.state(POLICY)).snapshot == "red-1"


def test_a_policy_made_again_is_later_whatever_the_clock_says(url: str) -> None:
    times = [1000.0] * 3 + [5.0] * 3 + [1001.0] * 10

    async def run() -> list[float]:
        ledger = Ledger(url, now=lambda: times.pop(0))
        try:
            await ledger.ensure_deployment(DEPLOYMENT, MODEL, "file:///bucket", "ASYNC")
            made = []
            for _ in range(6):
                row = await ledger.create_deployment(NewDeployment(POLICY, model="red", bucket_url="b"))
                made.append(row.created_at)
                await ledger.delete_deployment(POLICY)
            with pytest.raises(NotFound):
                await ledger.create_deployment(
                    NewDeployment(f"{OTHER}/policies/red", model="red", bucket_url="b")
                )
            return made
        finally:
            ledger.close()

    made = asyncio.run(run())
    assert made == sorted(set(made))


async def test_policies_of_a_deployment_and_of_a_tenant_have_a_limit_that_the_refusal_names(url: str) -> None:
    limits = PolicyLimits(all=4, tenant=2)

    async with on_ledger(url) as ledger:

        async def make(name: str, tenant: str | None, host: str = DEPLOYMENT) -> None:
            await ledger.create_deployment(
                NewDeployment(f"{host}/policies/{name}", model=name, bucket_url="b", fields={TENANT: tenant}),
                limits=limits,
            )

        await ledger.create_deployment(NewDeployment(OTHER, model="m", bucket_url="b"), limits=limits)
        for name in ("a1", "a2"):
            await make(name, "a")
        with pytest.raises(Conflict, match="max_policies_per_tenant allows 2"):
            await make("a3", "a")
        with pytest.raises(NameTaken):
            await make("a1", "a")
        # Another deployment, and another tenant, are counted by themselves.
        await make("a3", "a", OTHER)
        for name in ("n1", "n2"):
            await make(name, None)
        with pytest.raises(Conflict, match="max_policies allows 4"):
            await make("b1", "b")
        await ledger.delete_deployment(f"{DEPLOYMENT}/policies/a1")
        await make("a4", "a")


async def test_a_reader_is_told_what_changed_since_it_looked_and_nothing_else(url: str) -> None:
    async with on_ledger(url) as ledger:
        first = await ledger.changes()
        assert (first.whole, set(first.rows)) == (True, {DEPLOYMENT})
        seen = first.serial

        async def told() -> dict[str, DeploymentRow | None]:
            nonlocal seen
            found = await ledger.changes(seen)
            assert not found.whole
            seen = found.serial
            return dict(found.rows)

        assert await told() == {}
        made = await ledger.create_deployment(NewDeployment(POLICY, model="red", bucket_url="b"))
        assert await told() == {POLICY: made}, "the deployment itself did not change"
        await ledger.signal(POLICY, Signal(identity="v1", url="file:///b/v1"))
        assert await told() == {POLICY: await ledger.deployment(POLICY)}
        row = await ledger.update_deployment(DEPLOYMENT, fields={"x": 1})
        assert await told() == {DEPLOYMENT: row}
        await ledger.record(POLICY, "replica-0", "b", [moved(0, "v1", 1, Stage.STAGING)])
        assert await told() == {}, "what a replica is at is no part of the state"
        for _ in range(2):
            await ledger.record(POLICY, "replica-0", "b", [moved(1, "v1", 1, Stage.IDLE)])
        assert set(await told()) == {POLICY}
        assert await told() == {}
        await ledger.delete_deployment(POLICY)
        assert await told() == {POLICY: None}
        again = await ledger.create_deployment(NewDeployment(POLICY, model="red", bucket_url="b"))
        await ledger.pause(DEPLOYMENT, "keep")
        found = await told()
        assert (found[POLICY], set(found)) == (again, {POLICY, DEPLOYMENT})
        await ledger.delete_deployment(DEPLOYMENT)
        assert await told() == {DEPLOYMENT: None, POLICY: None}


async def test_every_change_of_a_state_is_told(url: str) -> None:
    """Each call that changes what `state` returns gives the deployment a new serial."""
    found = SnapshotContent(
        snapshot="a", fingerprint=None, files=(FileContent(name="m.safetensors", size=4, digest="sha256:ab"),)
    )
    calls: list[Callable[[Ledger], Awaitable[object]]] = [
        lambda ledger: signal(ledger, "a"),
        lambda ledger: ledger.record_death(DEPLOYMENT, "b1", Death("replica-0", "a", 1, "died"), None),
        lambda ledger: ledger.record(DEPLOYMENT, "replica-0", "b2", [moved(0, "a", 1, Stage.IDLE)]),
        lambda ledger: ledger.learn_content(DEPLOYMENT, found),
        lambda ledger: ledger.learn_weights(
            DEPLOYMENT, SnapshotCheck(snapshot="a", generation=1, weights="torch:1", canary=(-1.0,))
        ),
        lambda ledger: ledger.disagree(DEPLOYMENT, Disagreement("replica-1", "b", "a", 1, 0, "differs"), 4),
        lambda ledger: ledger.settle_disagreement(
            DEPLOYMENT, Disagreement("replica-1", "b", "a", 1, 5, "differs", "out")
        ),
        lambda ledger: ledger.pause(DEPLOYMENT, "keep"),
        lambda ledger: ledger.update_deployment(DEPLOYMENT, transition="SYNC"),
        lambda ledger: ledger.reset_ledger(DEPLOYMENT),
    ]

    async with on_ledger(url) as ledger:
        for number, call in enumerate(calls):
            before, state = await ledger.changes(), await ledger.state(DEPLOYMENT)
            await call(ledger)
            assert await ledger.state(DEPLOYMENT) != state, f"call {number} changes nothing"
            assert set((await ledger.changes(before.serial)).rows) == {DEPLOYMENT}, f"call {number}"


async def test_a_reader_that_is_too_far_behind_or_of_another_ledger_is_told_everything(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.ledger.changes.KEPT", 3)
    monkeypatch.setattr("midstream.ledger.changes.REMOVED_EVERY", 2)

    async with on_ledger(url) as ledger:
        names = [f"{DEPLOYMENT}/policies/p{number}" for number in range(8)]
        serials = [(await ledger.changes()).serial]
        for name in names:
            await ledger.create_deployment(NewDeployment(name, model="m", bucket_url="b"))
            serials.append((await ledger.changes(serials[-1])).serial)
        for missed, serial in enumerate(reversed(serials)):
            found = await ledger.changes(serial)
            assert found.rows.keys() >= set(names[len(names) - missed :])
            assert found.whole == (missed > 4), missed
        later = await ledger.changes(serials[-1] + 7)
        assert (later.whole, later.serial) == (True, serials[-1]), "this ledger is older than what was read"


async def test_commits_of_several_writers_are_told_in_their_order(url: str) -> None:
    """A reader that saw a serial misses no change with a lower one, whoever commits when."""

    async with on_ledger(url) as ledger:
        others = [Ledger(url) for _ in range(3)]
        names = [f"{DEPLOYMENT}/policies/w{writer}-{n}" for writer in range(3) for n in range(8)]
        for name in names:
            await ledger.create_deployment(NewDeployment(name, model="m", bucket_url="b"))

        async def write(other: Ledger, own: list[str]) -> None:
            for name in own:
                await other.update_deployment(name, fields={"x": 1})

        seen, told = (await ledger.changes()).serial, list[str]()
        writers = [asyncio.create_task(write(other, names[number::3])) for number, other in enumerate(others)]
        while True:
            ended = all(writer.done() for writer in writers)
            found = await ledger.changes(seen)
            seen = found.serial
            told += found.rows
            if ended:
                break
        assert sorted(told) == sorted(names)
        await asyncio.gather(*writers)
        for other in others:
            other.close()


async def test_a_list_has_the_state_of_each_policy(url: str) -> None:
    async with on_ledger(url) as ledger:
        names = [f"{DEPLOYMENT}/policies/{name}" for name in ("blue", "green", "red")]
        for name in names:
            await ledger.create_deployment(NewDeployment(name, model="m", bucket_url="b"))
        files = (FileContent(name="adapter_model.safetensors", size=4, digest="sha256:ab"),)
        await ledger.signal(names[0], Signal(identity="v1", url="file:///b/v1", content=files))
        await ledger.signal(names[2], Signal(identity="v1", url="file:///b/v1"))
        await ledger.record_death(names[2], "b1", Death("replica-0", "v1", 1, "died"), None)
        await ledger.disagree(names[2], Disagreement("replica-1", "b", "v1", 1, 0, "differs"))
        found = await ledger.listed([*reversed(names), f"{DEPLOYMENT}/policies/gone"])
        assert [row for row, _ in found] == [await ledger.deployment(name) for name in names]
        for row, state in found:
            assert state == replace(await ledger.state(row.name), fallbacks=(), weights={})
