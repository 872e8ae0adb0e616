"""Which incremental snapshots may be signalled, and what they stand on: by rule, and in the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_helpers import DEPLOYMENT, moved, on_ledger, signal

from midstream.core.errors import SnapshotRefused
from midstream.core.types import Desired, SnapshotFiles, Stage
from midstream.ledger import Ledger

PREVIOUS = "incremental_snapshot_metadata.previous_snapshot_identity"


async def delta(ledger: Ledger, identity: str, previous: str, files: str | None = None, **fields: Any) -> Any:
    return await signal(
        ledger,
        identity,
        previous=previous,
        compression="arc_v2",
        checksum_format="adler32",
        fingerprint=files or f"files of {identity}",
        **fields,
    )


async def full(ledger: Ledger, identity: str, files: str | None = None, **fields: Any) -> Any:
    return await signal(ledger, identity, fingerprint=files or f"files of {identity}", **fields)


def link(identity: str, compression: Any = None) -> SnapshotFiles:
    return SnapshotFiles(
        snapshot=identity,
        url=f"file:///bucket/{identity}",
        fingerprint=f"files of {identity}",
        compression=compression,
    )


async def refused(work: Any, *words: str, param: str = PREVIOUS) -> None:
    with pytest.raises(SnapshotRefused) as error:
        await work
    assert error.value.param == param
    assert error.value.message.startswith(param)
    for word in words:
        assert word in error.value.message


async def test_a_chain_is_kept_as_it_was_when_it_was_signalled(url: str) -> None:
    async with on_ledger(url) as ledger:
        await full(ledger, "f")
        await delta(ledger, "d1", "f")
        result = await delta(ledger, "d2", "d1", max_cache_age=3, ignore_config=("x", "y"))
        wanted = Desired(
            snapshot="d2",
            generation=3,
            signalled=3,
            url="file:///bucket/d2",
            fingerprint="files of d2",
            compression="arc_v2",
            parents=(link("f"), link("d1", "arc_v2")),
            max_cache_age=3,
            ignore_config=("x", "y"),
        )
        assert result.desired == wanted
        assert (await ledger.state(DEPLOYMENT)).desired == wanted
        row = (await ledger.snapshots(DEPLOYMENT))[2]
        assert (row.kind, row.previous, row.compression, row.checksum_format) == (
            "delta",
            "d1",
            "arc_v2",
            "adler32",
        )
        assert row.parents == wanted.parents
        await full(ledger, "f", files="others")
        assert (await ledger.snapshots(DEPLOYMENT))[2].parents == wanted.parents


async def test_the_first_snapshot_is_full_also_after_the_ledger_is_reset(url: str) -> None:
    async with on_ledger(url) as ledger:
        await refused(delta(ledger, "d", "f"), "the first snapshot must be full")
        await full(ledger, "f")
        await refused(delta(ledger, "d", "base"), "'base'", "full snapshot")
        await ledger.reset_ledger(DEPLOYMENT)
        await refused(delta(ledger, "d", "f"), "the first snapshot must be full", "reset")
        assert (await full(ledger, "f")).changed


async def test_the_parent_is_what_is_desired_or_what_every_ready_replica_serves(url: str) -> None:
    async with on_ledger(url) as ledger:
        await full(ledger, "a")
        await full(ledger, "b")
        await refused(delta(ledger, "d", "a"), "'a' is neither the desired snapshot, 'b'", "full snapshot")
        await refused(delta(ledger, "d", "a", serving=(("a", 1), ("b", 2))), "replicas differ")
        await refused(delta(ledger, "d", "unheard"), "no snapshot 'unheard' in the ledger")
        await refused(delta(ledger, "d", "d"), "delta on itself")
        await refused(delta(ledger, "d", "a", serving=(("a", 0), ("a", 1))), "'a' is neither")
        assert (await delta(ledger, "d", "a", serving=(("a", 1), ("a", 1)))).changed
        assert (await delta(ledger, "e", "d")).desired.parents == (link("a"), link("d", "arc_v2"))


async def test_after_a_failed_delta_comes_a_full_one_or_a_delta_on_what_still_serves(url: str) -> None:
    async with on_ledger(url) as ledger:
        await full(ledger, "f")
        await delta(ledger, "d", "f")
        row = moved(0, "d", 2, Stage.ERROR, "checksum of layer 3")
        await ledger.record(DEPLOYMENT, "replica-0", "boot", [row])
        serving = (("f", 1), ("f", 1))
        await refused(delta(ledger, "e", "d", serving=serving), "'d' failed on a replica", "serves 'f'")
        assert (await delta(ledger, "e", "f", serving=serving)).desired.parents == (link("f"),)
        again = await delta(ledger, "d", "f", files="mended", serving=serving)
        assert (again.changed, again.desired.fingerprint) == (True, "mended")
        assert (await full(ledger, "g")).changed


async def test_asking_again_for_the_same_delta_changes_nothing_and_going_back_to_one_is_allowed(
    url: str,
) -> None:
    async with on_ledger(url) as ledger:
        await full(ledger, "f")
        first = await delta(ledger, "d", "f")
        again = await delta(ledger, "d", "f")
        assert (again.changed, again.desired) == (False, first.desired)
        await delta(ledger, "e", "d")
        back = await delta(ledger, "d", "f")
        assert (back.changed, back.desired.parents, back.desired.generation) == (True, (link("f"),), 4)


async def test_a_desired_identity_with_other_files_or_parents_must_be_full(url: str) -> None:
    async with on_ledger(url) as ledger:
        at = "incremental_snapshot_metadata"
        await full(ledger, "f")
        await delta(ledger, "d", "f")
        await refused(delta(ledger, "d", "f", files="others"), "already desired with other files", param=at)
        await refused(full(ledger, "d"), "signalled as an incremental snapshot on 'f'", param=at)
        result = await full(ledger, "d", files="whole")
        assert (result.changed, result.desired.parents, result.desired.compression) == (True, (), None)
        (_, row) = await ledger.snapshots(DEPLOYMENT)
        assert (row.kind, row.previous, row.compression, row.checksum_format) == ("full", None, None, None)
        assert (await ledger.state(DEPLOYMENT)).since["d"] == 3


async def test_no_snapshot_stands_on_itself_through_others(url: str) -> None:
    async with on_ledger(url) as ledger:
        await full(ledger, "a")
        await delta(ledger, "b", "a")
        await refused(delta(ledger, "a", "b"), "'b' stands on 'a' itself")


async def test_a_chain_has_a_limit(url: str) -> None:
    async with on_ledger(url) as ledger:
        await full(ledger, "s0")
        for i in range(1, 4):
            await delta(ledger, f"s{i}", f"s{i - 1}", chain_max=3)
        await refused(delta(ledger, "s4", "s3", chain_max=3), "number 4 on the full snapshot 's0', at most 3")
        assert (await ledger.state(DEPLOYMENT)).snapshot == "s3"
        await full(ledger, "s4")
        assert (await delta(ledger, "s5", "s4", chain_max=3)).changed


async def test_fields_to_ignore_are_asked_for_again_and_cache_rules_only_get_stronger(url: str) -> None:
    async with on_ledger(url) as ledger:
        await full(ledger, "a", reset_prompt_cache="none", max_cache_age=4)
        again = await full(ledger, "a", reset_prompt_cache="none", ignore_config=("x",))
        assert (again.changed, again.desired.generation, again.desired.ignore_config) == (True, 2, ("x",))
        assert again.desired.max_cache_age == 4
        assert (await ledger.state(DEPLOYMENT)).since == {"a": 1}, "the files are those of the first signal"
