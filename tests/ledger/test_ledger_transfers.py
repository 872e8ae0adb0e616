"""Groups of trainers and replicas, and their updates, on each kind of database."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from ledger_helpers import DEPLOYMENT, MODEL, on_ledger, opened, signal

from midstream.core.errors import NotFound
from midstream.core.table import IllegalMove
from midstream.core.types import FileContent
from midstream.ledger import Committing, Event, GroupMoved, Ledger, Phase, Signal, Transfer, TransferMember
from midstream.ledger.transfers import MOVES, Order

MEMBERS = (TransferMember("replica-0", "boot0", 1), TransferMember("replica-1", "boot1", 2))
CONTENT = (FileContent("model.safetensors", 7, "d" * 64),)
PRINT = "content:" + "a" * 64


async def opened_group(ledger: Ledger, group: str = "g") -> Transfer:
    return await ledger.open_transfer(DEPLOYMENT, group, MEMBERS, "127.0.0.1:29500", 60.0)


async def moved(ledger: Ledger, seen: Transfer, *events: Event) -> Transfer:
    for event in events:
        within_s = 100.0 if event in (Event.START, Event.FINISH) else None
        seen = await ledger.move_transfer(seen, event, within_s=within_s)
    return seen


async def finishing(ledger: Ledger, group: str = "g") -> Transfer:
    return await moved(
        ledger, await opened_group(ledger, group), Event.JOINED, Event.START, Event.STARTED, Event.FINISH
    )


def pushed(identity: str = "", **fields: Any) -> Signal:
    return Signal(identity=identity, url="", fingerprint=PRINT, content=CONTENT, **fields)


def committing(seen: Transfer, **fields: Any) -> Committing:
    given: dict[str, Any] = {"replicas": ("replica-0", "replica-1"), "keep": True} | fields
    return Committing(transfer=seen, **given)


async def test_a_deployment_has_one_open_group(url: str) -> None:
    async with on_ledger(url) as ledger:
        assert await ledger.transfer(DEPLOYMENT) is None
        first = await opened_group(ledger)
        assert (first.phase, first.number, first.members) == (Phase.JOINING, 0, MEMBERS)
        with pytest.raises(GroupMoved, match="another trainer's group"):
            await opened_group(ledger, "other")
        assert await ledger.transfer(DEPLOYMENT) == first
        ended = await ledger.move_transfer(first, Event.END, reason="the trainer is gone \0")
        assert (ended.phase, ended.deadline, ended.reason) == (Phase.ENDED, None, "the trainer is gone \\x00")
        assert await ledger.transfer(DEPLOYMENT) is None
        assert (await opened_group(ledger, "other")).group == "other"
        with pytest.raises(NotFound):
            await ledger.transfer("accounts/local/deployments/absent")


async def test_of_two_that_saw_one_state_one_moves_the_group(url: str) -> None:
    async with on_ledger(url) as ledger:
        joined = await moved(ledger, await opened_group(ledger), Event.JOINED)
        with opened(url) as other:
            both = (one.move_transfer(joined, Event.START, within_s=9.0) for one in (ledger, other))
            results = await asyncio.gather(*both, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["GroupMoved", "Transfer"]
        seen = await ledger.transfer(DEPLOYMENT)
        assert seen is not None
        assert (seen.phase, seen.number) == (Phase.STARTING, 1)
        # Back in a phase that was seen before it is another state all the same.
        again = await moved(ledger, seen, Event.STARTED, Event.UPDATE, Event.RECEIVED)
        with pytest.raises(GroupMoved):
            await ledger.move_transfer(replace(again, serial=again.serial - 2), Event.UPDATE)
        with pytest.raises(IllegalMove):
            await ledger.move_transfer(again, Event.COMMITTED)


async def test_only_a_group_that_works_has_a_deadline(url: str) -> None:
    async with on_ledger(url) as ledger:
        seen = await opened_group(ledger)
        assert seen.deadline is not None
        seen = await moved(ledger, seen, Event.JOINED)
        assert seen.deadline is None
        seen = await moved(ledger, seen, Event.START)
        until = seen.deadline
        assert until is not None
        seen = await moved(ledger, seen, Event.STARTED, Event.UPDATE)
        assert seen.deadline == until, "one deadline from the start until the call to finish"
        assert (seen.late(until), seen.late(until + 1)) == (False, True)
        assert await ledger.open_transfers() == [seen]
        ended = await ledger.move_transfer(seen, Event.END, reason="late")
        assert not ended.late(until + 1)
        assert await ledger.open_transfers() == []


async def test_an_update_is_committed_with_its_signal_or_not_at_all(url: str) -> None:
    async with on_ledger(url) as ledger:
        seen = await finishing(ledger)
        assert await ledger.committed_update(seen) is None
        await ledger.move_transfer(seen, Event.END, reason="past its deadline")
        with pytest.raises(GroupMoved, match="past its deadline; call /init_weight_transfer_engine"):
            await ledger.signal(DEPLOYMENT, pushed("v1"), committing=committing(seen))
        assert (await ledger.state(DEPLOYMENT)).desired is None, "nothing is signalled for a group that ended"
        seen = await finishing(ledger, "second")
        result = await ledger.signal(DEPLOYMENT, pushed("v1"), committing=committing(seen))
        assert (result.desired.snapshot, result.desired.url) == ("v1", "file:///bucket/v1")
        assert (result.desired.content, result.desired.fingerprint) == (CONTENT, PRINT)
        update = await ledger.committed_update(seen)
        assert update is not None
        assert (update.identity, update.generation, update.kept) == ("v1", 1, "wanted")
        after = await ledger.transfer(DEPLOYMENT)
        assert after is not None
        assert (after.phase, after.deadline) == (Phase.JOINED, None)


async def test_an_update_without_some_replicas_ends_its_group(url: str) -> None:
    async with on_ledger(url) as ledger:
        seen = await finishing(ledger)
        without = committing(seen, replicas=("replica-0",), keep=False, ends="replica-1 was lost")
        await ledger.signal(DEPLOYMENT, pushed("v1"), committing=without)
        assert await ledger.transfer(DEPLOYMENT) is None
        [(group, [update])] = await ledger.newest_transfers(DEPLOYMENT, 5)
        assert (group.phase, group.reason) == (Phase.ENDED, "replica-1 was lost")
        assert (update.replicas, update.kept) == (("replica-0",), "off")
        assert await ledger.unkept_updates() == []


async def test_pushed_weights_without_a_name_get_a_growing_one_in_the_bucket(url: str) -> None:
    async with on_ledger(url) as ledger:
        first = (await ledger.signal(DEPLOYMENT, pushed())).desired
        name = f"update-000001-push-{PRINT.removeprefix('content:')[:12]}"
        assert (first.snapshot, first.url) == (name, f"file:///bucket/{name}")
        again = await ledger.signal(DEPLOYMENT, pushed())
        assert (again.desired.snapshot, again.changed) == (name, False)
        other = Signal(identity="", url="", fingerprint="content:" + "b" * 64)
        assert (await ledger.signal(DEPLOYMENT, other)).desired.snapshot == f"update-000002-push-{'b' * 12}"


async def test_one_gateway_at_a_time_keeps_an_update_until_it_is_kept_or_given_up(url: str) -> None:
    async with on_ledger(url) as ledger:
        seen = await finishing(ledger)
        then = ledger.clock()
        ledger.clock.read = lambda _: then  # type: ignore[method-assign]
        await ledger.signal(DEPLOYMENT, pushed("v1"), committing=committing(seen))
        assert await ledger.updates_waiting_s() == {DEPLOYMENT: 0.0}
        ledger.clock.read = lambda _: then + 30.0  # type: ignore[method-assign]
        [update] = await ledger.unkept_updates()
        assert (update.identity, update.bucket, update.content, update.desired) == (
            "v1", "file:///bucket", CONTENT, True
        )  # fmt: skip
        assert await ledger.claim_keeping(update, 600.0)
        assert not await ledger.claim_keeping(update, 600.0), "another gateway saw the same row"
        assert await ledger.unkept_updates() == []
        assert await ledger.updates_waiting_s() == {DEPLOYMENT: pytest.approx(30.0)}, "a replica works on it"
        await ledger.settle_keeping(update, "wanted", again_s=0.0, tries=1)
        [again] = await ledger.unkept_updates()
        assert (again.tries, again.keep_at > update.keep_at) == (1, True)
        assert await ledger.claim_keeping(again, 600.0)
        await ledger.settle_keeping(again, "kept")
        assert await ledger.updates_waiting_s() == {}
        assert await ledger.unkept_updates() == []
        kept = await ledger.committed_update(seen)
        assert kept is not None
        assert kept.kept == "kept"


async def test_a_late_word_of_an_update_changes_no_other_update(url: str) -> None:
    """Its deployment was deleted and made again meanwhile. SQLite gives the keys of rows again."""

    async with on_ledger(url) as ledger:
        await ledger.signal(DEPLOYMENT, pushed("v1"), committing=committing(await finishing(ledger)))
        [old] = await ledger.unkept_updates()
        await ledger.delete_deployment(DEPLOYMENT)
        await ledger.ensure_deployment(DEPLOYMENT, MODEL, "file:///bucket")
        seen = await finishing(ledger, "second")
        await ledger.signal(DEPLOYMENT, pushed("v1"), committing=committing(seen))
        for kept in ("kept", "given up"):
            await ledger.settle_keeping(old, kept)
        await ledger.settle_keeping(old, "wanted", again_s=600.0, tries=7)
        [update] = await ledger.unkept_updates()
        assert (update.group, update.tries) == ("second", 0)


async def test_what_is_kept_is_not_wanted_again_by_a_gateway_whose_claim_was_over(url: str) -> None:
    async with on_ledger(url) as ledger:
        seen = await finishing(ledger)
        await ledger.signal(DEPLOYMENT, pushed("v1"), committing=committing(seen))
        [update] = await ledger.unkept_updates()
        await ledger.settle_keeping(update, "kept")
        await ledger.settle_keeping(update, "wanted", again_s=0.0, tries=1)
        assert await ledger.unkept_updates() == []
        kept = await ledger.committed_update(seen)
        assert kept is not None
        assert kept.kept == "kept"


async def test_of_an_identity_that_is_not_known_any_more_no_content_is_kept(url: str) -> None:
    async with on_ledger(url) as ledger:
        seen = await finishing(ledger)
        await ledger.signal(DEPLOYMENT, pushed("v1"), committing=committing(seen))
        await signal(ledger, "v1", fingerprint="of a listing")
        [update] = await ledger.unkept_updates()
        assert update.content is None, "it means other files now"
        await ledger.reset_ledger(DEPLOYMENT)
        [update] = await ledger.unkept_updates()
        assert (update.content, update.desired) == (None, False)
        await ledger.delete_deployment(DEPLOYMENT)
        assert await ledger.unkept_updates() == []


def test_every_phase_but_the_last_can_end_and_nothing_leaves_that() -> None:
    for phase in Phase:
        if phase is Phase.ENDED:
            assert not [at for at, _ in MOVES if at is phase]
        else:
            assert MOVES.move(phase, Event.END) == (Phase.ENDED, Order.LEAVE)
