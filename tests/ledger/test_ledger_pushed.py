"""Signals of snapshots that are known by their content alone: pushed weights, which no bucket has yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ledger_helpers import DEPLOYMENT, on_ledger

from midstream.core.errors import SnapshotRefused
from midstream.core.types import Content, FileContent, Stage, Transition
from midstream.ledger import FleetReports, Ledger, Signal
from midstream.snapshots.content import content_fingerprint

ONE: Content = (FileContent("config.json", 2, "1" * 64), FileContent("model.safetensors", 9, "2" * 64))
OTHER: Content = (ONE[0], FileContent("model.safetensors", 9, "3" * 64))
SIZES = {"config.json": 2, "model.safetensors": 9}


def pushed(identity: str = "a", content: Content = ONE, **more: Any) -> Signal:
    fields = {"url": f"file:///bucket/{identity}", "fingerprint": content_fingerprint(content)}
    return Signal(identity=identity, content=content, **fields | more)


def published(identity: str = "a", content: Content | None = ONE, **more: Any) -> Signal:
    """As a trainer signals what is in the bucket. content: by the manifest."""
    fields = {"url": f"file:///bucket/{identity}", "fingerprint": f"listing of {identity}", "sizes": SIZES}
    return Signal(identity=identity, content=content, **fields | more)


async def serve(ledger: Ledger, identity: str, generation: int) -> None:
    reached = Transition(
        seq=generation, at=1.0, snapshot=identity, generation=generation, stage=Stage.CHECKING
    )
    await ledger.record(DEPLOYMENT, "r0", "boot", [reached])


@pytest.mark.parametrize("proven", [False, True])
async def test_what_was_pushed_has_its_content_from_the_first_moment_and_once_more_is_no_change(
    url: str, proven: bool
) -> None:
    async with on_ledger(url) as ledger:
        first = await ledger.signal(DEPLOYMENT, pushed())
        assert first.changed
        assert [(link.fingerprint, link.content) for link in first.desired.files] == [
            (content_fingerprint(ONE), ONE)
        ]
        if proven:
            await serve(ledger, "a", first.desired.generation)
        state = await ledger.state(DEPLOYMENT)
        assert state.desired == first.desired
        again = await ledger.signal(DEPLOYMENT, pushed())
        assert (again.changed, again.desired) == (False, first.desired)
        assert [(row.identity, row.content) for row in await ledger.snapshots(DEPLOYMENT)] == [("a", ONE)]


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("how", [pushed, published])
async def test_other_content_under_a_pushed_name_is_refused_unless_it_is_said_to_replace_it(
    url: str, proven: bool, how: Callable[..., Signal]
) -> None:
    async with on_ledger(url) as ledger:
        first = await ledger.signal(DEPLOYMENT, pushed())
        if proven:
            await serve(ledger, "a", first.desired.generation)
        words = "served" if proven else "pushed"
        with pytest.raises(SnapshotRefused, match=f"not those that were {words} under this name: model.safe"):
            await ledger.signal(DEPLOYMENT, how(content=OTHER))
        assert (await ledger.state(DEPLOYMENT)).desired == first.desired
        taken = await ledger.signal(DEPLOYMENT, how(content=OTHER, overwrite=True))
        assert (taken.changed, taken.desired.content) == (True, OTHER)
        assert taken.desired.generation > first.desired.generation


@pytest.mark.parametrize("proven", [False, True])
async def test_the_same_bytes_from_the_bucket_are_no_other_files(url: str, proven: bool) -> None:
    async with on_ledger(url) as ledger:
        first = await ledger.signal(DEPLOYMENT, pushed())
        if proven:
            await serve(ledger, "a", first.desired.generation)
        for overwrite in (False, True):
            kept = await ledger.signal(DEPLOYMENT, published(overwrite=overwrite))
            assert (kept.changed, kept.desired) == (False, first.desired)
        # Rolled back to: its files are still found by their content.
        await ledger.signal(DEPLOYMENT, pushed("b", OTHER))
        back = await ledger.signal(DEPLOYMENT, published())
        assert back.changed
        assert (back.desired.fingerprint, back.desired.content) == (content_fingerprint(ONE), ONE)
        assert (await ledger.state(DEPLOYMENT)).since["a"] == first.desired.generation


async def test_a_copy_without_a_manifest_is_taken_if_its_sizes_agree_and_replicas_check_the_bytes(
    url: str,
) -> None:
    async with on_ledger(url) as ledger:
        await ledger.signal(DEPLOYMENT, pushed())
        with pytest.raises(SnapshotRefused, match=r"model\.safetensors is missing"):
            await ledger.signal(DEPLOYMENT, published(content=None, sizes={"config.json": 2}))
        plain = await ledger.signal(DEPLOYMENT, published(content=None))
        assert (plain.desired.fingerprint, plain.desired.content) == ("listing of a", ONE)


async def test_what_is_in_the_bucket_may_be_pushed_too(url: str) -> None:
    async with on_ledger(url) as ledger:
        first = await ledger.signal(DEPLOYMENT, published())
        await serve(ledger, "a", first.desired.generation)
        with pytest.raises(SnapshotRefused, match="not those that were served"):
            await ledger.signal(DEPLOYMENT, pushed(content=OTHER))
        assert (await ledger.signal(DEPLOYMENT, pushed())).desired.content == ONE


async def test_a_push_that_failed_on_a_replica_is_asked_for_again(url: str) -> None:
    async with on_ledger(url) as ledger:
        first = await ledger.signal(DEPLOYMENT, pushed())
        failed = FleetReports(failed_generation=first.desired.generation)
        again = await ledger.signal(DEPLOYMENT, pushed(), failed)
        assert again.changed
        assert again.desired.generation > first.desired.generation
        assert again.desired.files == first.desired.files


async def test_a_delta_stands_on_what_was_pushed_by_its_content(url: str) -> None:
    async with on_ledger(url) as ledger:
        await ledger.signal(DEPLOYMENT, pushed())
        delta = published("b", OTHER, previous="a", compression="arc_v2")
        sent = (await ledger.signal(DEPLOYMENT, delta)).desired
        expected = [("a", content_fingerprint(ONE), ONE), ("b", "listing of b", OTHER)]
        assert [(link.snapshot, link.fingerprint, link.content) for link in sent.files] == expected
        # The parent is in the bucket by now, and signalled from there: the chain stays.
        await ledger.signal(DEPLOYMENT, published())
        back = (await ledger.signal(DEPLOYMENT, replace(delta))).desired
        assert [(link.snapshot, link.fingerprint, link.content) for link in back.files] == expected


async def test_a_reset_forgets_what_was_pushed(url: str) -> None:
    async with on_ledger(url) as ledger:
        await ledger.signal(DEPLOYMENT, pushed())
        await ledger.reset_ledger(DEPLOYMENT)
        fresh = await ledger.signal(DEPLOYMENT, pushed(content=OTHER))
        assert fresh.desired.content == OTHER
