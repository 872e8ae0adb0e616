"""What an identity means: its bytes and the weights made of them, from the first replica that serves it on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from ledger_helpers import DEPLOYMENT, on_ledger

from midstream.core.errors import Conflict, SnapshotRefused
from midstream.core.types import Content, FileContent, SnapshotCheck, SnapshotContent, Stage, Transition
from midstream.ledger import Begun, Event, Ledger, NewDeployment, Signal
from midstream.ledger.deployments import TENANT, PolicyLimits
from midstream.ledger.schema import (
    SCHEMA_VERSION,
    change_counter,
    changes,
    contents,
    machine_clock,
    policy_counts,
    rebases,
    transfer_updates,
    transfers,
    weights,
)

#: In an order in which they may be dropped.
TRANSFERS = (transfer_updates, transfers)

ONE: Content = (FileContent("config.json", 2, "1" * 64), FileContent("model.safetensors", 9, "2" * 64))
OTHER: Content = (ONE[0], FileContent("model.safetensors", 9, "3" * 64))
SIZES = {"config.json": 2, "model.safetensors": 9}


def signal(identity: str = "a", **more: Any) -> Signal:
    fields = {"url": f"file:///bucket/{identity}", "fingerprint": f"files of {identity}", "sizes": SIZES}
    return Signal(identity=identity, **fields | more)


def found(identity: str = "a", files: Content = ONE, fingerprint: str | None = None) -> SnapshotContent:
    given = fingerprint or f"files of {identity}"
    return SnapshotContent(snapshot=identity, fingerprint=given, files=files)


def check(weights: str | None, generation: int = 1) -> SnapshotCheck:
    return SnapshotCheck(snapshot="a", generation=generation, weights=weights)


async def test_what_a_replica_serves_first_goes_with_the_snapshot_from_then_on(url: str) -> None:
    async with on_ledger(url) as ledger:
        first = await ledger.signal(DEPLOYMENT, signal())
        assert first.desired.content is None
        await ledger.learn_content(DEPLOYMENT, found())
        # Of a slower replica.
        await ledger.learn_content(DEPLOYMENT, found(files=OTHER))
        await ledger.signal(DEPLOYMENT, signal("b"))
        back = await ledger.signal(DEPLOYMENT, signal())
        assert (back.changed, back.desired.content) == (True, ONE)
        state = await ledger.state(DEPLOYMENT)
        assert state.desired is not None
        assert state.desired.content == ONE
        assert [(row.identity, row.content) for row in await ledger.snapshots(DEPLOYMENT)] == [
            ("a", ONE),
            ("b", None),
        ]


async def test_each_link_of_a_chain_carries_its_content(url: str) -> None:
    async with on_ledger(url) as ledger:
        await ledger.signal(DEPLOYMENT, signal())
        delta = signal("b", previous="a", compression="arc_v2", content=OTHER)
        sent = (await ledger.signal(DEPLOYMENT, delta)).desired
        assert [(link.snapshot, link.content) for link in sent.files] == [("a", None), ("b", OTHER)]
        # Loaded only now.
        await ledger.learn_content(DEPLOYMENT, found())
        again = (await ledger.state(DEPLOYMENT)).desired
        assert again is not None
        assert [link.content for link in again.files] == [ONE, OTHER]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"content": OTHER}, f"model.safetensors has the digest {'3' * 64} instead of {'2' * 64}"),
        ({"sizes": {**SIZES, "model.safetensors": 8}}, "model.safetensors has 8 bytes instead of 9"),
        ({"sizes": {"config.json": 2}}, "model.safetensors is missing"),
    ],
)
async def test_other_files_under_a_served_name_are_refused_unless_they_are_said_to_replace_it(
    url: str, other: dict[str, Any], says: str
) -> None:
    async with on_ledger(url) as ledger:
        await ledger.signal(DEPLOYMENT, signal())
        await ledger.learn_content(DEPLOYMENT, found())
        await ledger.learn_weights(DEPLOYMENT, check("k:w"))
        changed = signal(fingerprint="others", **other)
        with pytest.raises(SnapshotRefused, match=says) as refused:
            await ledger.signal(DEPLOYMENT, changed)
        assert refused.value.param == "identity"
        assert (await ledger.state(DEPLOYMENT)).desired == (await ledger.signal(DEPLOYMENT, signal())).desired
        taken = await ledger.signal(DEPLOYMENT, replace(changed, overwrite=True))
        assert (taken.changed, taken.desired.content) == (True, other.get("content"))
        assert (await ledger.state(DEPLOYMENT)).weights == {}
        again = await ledger.signal(DEPLOYMENT, replace(changed, overwrite=True))
        assert not again.changed, "the same signal, sent again"
        # From a replica that serves the old files still.
        await ledger.learn_content(DEPLOYMENT, found())
        state = await ledger.state(DEPLOYMENT)
        assert state.desired is not None
        assert state.desired.content == other.get("content")


async def test_what_only_a_manifest_said_gives_way(url: str) -> None:
    async with on_ledger(url) as ledger:
        await ledger.signal(DEPLOYMENT, signal(content=ONE))
        mended = await ledger.signal(DEPLOYMENT, signal(content=OTHER, fingerprint="mended"))
        assert mended.desired.content == OTHER
        plain = await ledger.signal(DEPLOYMENT, signal(fingerprint="plain"))
        assert plain.desired.content is None


def serves(identity: str, generation: int) -> list[Transition]:
    return [
        Transition(seq=generation, at=1.0, snapshot=identity, generation=generation, stage=Stage.CHECKING)
    ]


@pytest.mark.parametrize("other", [{"content": OTHER}, {"sizes": {"config.json": 2}}])
async def test_what_a_manifest_said_stays_once_a_replica_has_served_it(
    url: str, other: dict[str, Any]
) -> None:
    async with on_ledger(url) as ledger:
        first = await ledger.signal(DEPLOYMENT, signal(content=ONE))
        await ledger.record(DEPLOYMENT, "r0", "boot", serves("a", first.desired.generation))
        with pytest.raises(SnapshotRefused, match=r"are not those that were served under this name: model"):
            await ledger.signal(DEPLOYMENT, signal(fingerprint="others", **other))
        plain = await ledger.signal(DEPLOYMENT, signal(fingerprint="copied without its manifest"))
        assert plain.desired.content == ONE, "the replicas refuse other bytes"
        taken = await ledger.signal(DEPLOYMENT, signal(fingerprint="others", overwrite=True, **other))
        assert (taken.changed, taken.desired.content) == (True, other.get("content"))


async def test_what_manifests_said_of_a_chain_stays_once_a_replica_has_served_its_end(url: str) -> None:
    async with on_ledger(url) as ledger:
        await ledger.signal(DEPLOYMENT, signal(content=ONE))
        delta = signal("b", previous="a", compression="arc_v2", content=ONE)
        sent = (await ledger.signal(DEPLOYMENT, delta)).desired
        await ledger.record(DEPLOYMENT, "r0", "boot", serves("b", sent.generation))
        with pytest.raises(SnapshotRefused, match="'a' are not those"):
            await ledger.signal(DEPLOYMENT, signal(fingerprint="others", content=OTHER))


async def test_a_late_word_of_a_replica_proves_nothing_of_a_manifest_that_came_since(url: str) -> None:
    async with on_ledger(url) as ledger:
        first = await ledger.signal(DEPLOYMENT, signal(content=ONE))
        await ledger.signal(DEPLOYMENT, signal("b"))
        await ledger.signal(DEPLOYMENT, signal(content=OTHER, fingerprint="mended"))
        await ledger.record(DEPLOYMENT, "r0", "boot", serves("a", first.desired.generation))
        again = await ledger.signal(DEPLOYMENT, signal(content=ONE, fingerprint="mended again"))
        assert again.desired.content == ONE


async def test_each_kind_of_engine_has_one_digest_and_a_reset_forgets_all(url: str) -> None:
    async with on_ledger(url) as ledger:
        await ledger.signal(DEPLOYMENT, signal())
        await ledger.learn_content(DEPLOYMENT, found())
        for text in ("k:w", "k:x", "other:y", None):
            await ledger.learn_weights(DEPLOYMENT, check(text))
        assert (await ledger.state(DEPLOYMENT)).weights == {"a": {"k": "w", "other": "y"}}
        await ledger.signal(DEPLOYMENT, signal(fingerprint="copied again"))
        # Of before these files.
        await ledger.learn_weights(DEPLOYMENT, check("third:z"))
        state = await ledger.state(DEPLOYMENT)
        assert state.weights == {"a": {"k": "w", "other": "y"}}, "the bytes are held to be the same"
        await ledger.reset_ledger(DEPLOYMENT)
        fresh = await ledger.signal(DEPLOYMENT, signal(content=OTHER))
        assert fresh.desired.content == OTHER
        assert (await ledger.state(DEPLOYMENT)).weights == {}


@pytest.mark.parametrize(
    ("version", "lacked"),
    [
        (3, (contents, weights, change_counter, changes, policy_counts, *TRANSFERS, rebases, machine_clock)),
        (4, (change_counter, changes, policy_counts, *TRANSFERS, rebases, machine_clock)),
        (5, (*TRANSFERS, rebases, machine_clock)),
        (6, (rebases, machine_clock)),
        (7, (machine_clock,)),
        (8, ()),
    ],
)
async def test_a_ledger_of_a_version_before_is_opened_and_keeps_what_it_has(
    url: str, version: int, lacked: tuple[sa.Table, ...]
) -> None:
    async def make(ledger: Ledger, name: str) -> None:
        await ledger.create_deployment(
            NewDeployment(f"{DEPLOYMENT}/policies/{name}", model=name, bucket_url="b", fields={TENANT: "a"}),
            limits=PolicyLimits(tenant=3),
        )

    async def before(ledger: Ledger) -> None:
        await ledger.signal(DEPLOYMENT, signal())
        for name in ("red", "blue"):
            await make(ledger, name)

    async def after(ledger: Ledger) -> None:
        assert (await ledger.state(DEPLOYMENT)).snapshot == "a"
        await ledger.learn_content(DEPLOYMENT, found())
        assert (await ledger.snapshots(DEPLOYMENT))[0].content == ONE
        assert (await ledger.changes()).rows.keys() == {
            DEPLOYMENT, f"{DEPLOYMENT}/policies/red", f"{DEPLOYMENT}/policies/blue"
        }  # fmt: skip
        # The policies that were there before are counted.
        await make(ledger, "green")
        with pytest.raises(Conflict, match="max_policies_per_tenant allows 3"):
            await make(ledger, "yellow")
        # Columns that a table lacked are there, too.
        group = await ledger.open_transfer(DEPLOYMENT, "g", (), "t:1", 9.0)
        group = await ledger.move_transfer(group, Event.JOINED)
        group = await ledger.move_transfer(group, Event.START, within_s=9.0, begun=Begun("b", "end"))
        update = await ledger.last_update(group)
        assert update is not None
        assert (update.identity, update.policies) == ("b", "end")

    async with on_ledger(url) as ledger:
        await before(ledger)
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as db:
        for table in lacked:
            table.drop(db)
        if transfer_updates not in lacked:
            db.exec_driver_sql("ALTER TABLE transfer_updates DROP COLUMN policies")
        db.exec_driver_sql(f"UPDATE midstream_schema SET version = {version}")
    async with on_ledger(url) as ledger:
        await after(ledger)
    with engine.connect() as db:
        found_version = db.exec_driver_sql("SELECT version FROM midstream_schema").scalar_one()
    engine.dispose()
    assert found_version == SCHEMA_VERSION
