"""What full weights come to for the policies of their deployment, and what a policy's snapshot stands on."""

from __future__ import annotations

import pytest
from ledger_helpers import DEPLOYMENT, MODEL, on_ledger, signal

from midstream.core.errors import Conflict
from midstream.ledger import FleetReports, Ledger, NewDeployment, Signal

OTHER = "accounts/local/deployments/other"


async def make(ledger: Ledger, *names: str, host: str = DEPLOYMENT) -> None:
    for name in names:
        await ledger.create_deployment(NewDeployment(f"{host}/policies/{name}", MODEL, "file:///bucket"))


async def publish(ledger: Ledger, policy: str, identity: str) -> None:
    url = f"file:///bucket/{identity}"
    await ledger.signal(
        f"{DEPLOYMENT}/policies/{policy}", Signal(identity=identity, url=url), FleetReports(), chain_max=64
    )


async def ended(ledger: Ledger) -> list[str]:
    return [row.name.rpartition("/")[2] for row in await ledger.policies() if row.deleting]


async def test_full_weights_are_refused_while_there_are_policies(url: str) -> None:
    async with on_ledger(url) as ledger:
        await signal(ledger, "a", policies="refuse")
        await make(ledger, "red", "blue")
        with pytest.raises(Conflict, match="policies: 2 stand on the weights that serve, blue among them"):
            await signal(ledger, "b", policies="refuse")
        state = await ledger.state(DEPLOYMENT)
        assert state.snapshot == "a"
        # It is served already.
        assert not (await signal(ledger, "a", policies="refuse")).changed
        assert await ended(ledger) == []
        for name in ("red", "blue"):
            await ledger.update_deployment(f"{DEPLOYMENT}/policies/{name}", deleting=True)
        assert (await signal(ledger, "b", policies="refuse")).changed


async def test_full_weights_end_the_policies_of_their_deployment_alone(url: str) -> None:
    async with on_ledger(url) as ledger:
        await ledger.create_deployment(NewDeployment(OTHER, MODEL, "file:///bucket"))
        await ledger.create_deployment(NewDeployment(f"{DEPLOYMENT}-2", MODEL, "file:///bucket"))
        await make(ledger, "red", "blue")
        await make(ledger, "green", host=OTHER)
        await make(ledger, "gold", host=f"{DEPLOYMENT}-2")
        await publish(ledger, "red", "red-1")
        seen = (await ledger.changes(None)).serial
        result = await signal(ledger, "a", policies="end")
        assert await ended(ledger) == ["blue", "red"]
        assert result.desired.ends_before == result.desired.generation
        changed = (await ledger.changes(seen)).rows
        assert {name.rpartition("/")[2] for name in changed} == {"default", "red", "blue"}
        # What follows says so, too, until policies are ended again.
        later = await signal(ledger, "b", policies="rebase")
        assert later.desired.ends_before == result.desired.generation


async def test_weights_that_are_desired_already_end_policies_and_no_later_ones(url: str) -> None:
    async with on_ledger(url) as ledger:
        await make(ledger, "red")
        await signal(ledger, "a", policies="rebase")
        result = await signal(ledger, "a", policies="end")
        assert await ended(ledger) == ["red"]
        assert result.changed
        assert result.desired.ends_before == result.desired.generation
        # As a client that got no answer.
        await make(ledger, "blue")
        assert not (await signal(ledger, "a", policies="end")).changed
        assert await ended(ledger) == ["red"]


async def test_a_policys_snapshot_says_which_weights_it_stands_on(url: str) -> None:
    async with on_ledger(url) as ledger:
        await make(ledger, "red")
        name = f"{DEPLOYMENT}/policies/red"

        async def stands_on() -> int:
            desired = (await ledger.state(name)).desired
            assert desired is not None
            return desired.stands_on

        await publish(ledger, "red", "red-1")
        assert await stands_on() == 0
        first = await signal(ledger, "a", policies="rebase")
        assert await stands_on() == 0
        await publish(ledger, "red", "red-2")
        assert await stands_on() == first.desired.generation
        await ledger.update_deployment(name, fields={"_frozen": True})
        assert await stands_on() == first.desired.generation


async def test_a_sync_deployment_rebases_no_policies(url: str) -> None:
    async with on_ledger(url) as ledger:
        await ledger.update_deployment(DEPLOYMENT, transition="SYNC")
        await signal(ledger, "a", policies="rebase")
        await make(ledger, "red")
        with pytest.raises(Conflict, match="a SYNC deployment cannot rebase them"):
            await signal(ledger, "b", policies="rebase")
