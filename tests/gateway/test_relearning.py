"""Gateways that come to know, or agree on, where sessions live: from replicas that hold a real session table."""

from __future__ import annotations

import asyncio
import time

from gateway_harness import Message, Peer, post
from reports import replica_report
from session_holders import all_usable, gateway, holders, home, until, until_known, where

from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import FAILURES_MAX, DeploymentReplicas

KEYS = [f"s{number}" for number in range(30)]


async def test_a_gateway_that_starts_keeps_every_session_where_it_is_from_its_first_request_on() -> None:
    async with holders(3) as made:
        async with gateway(made) as stage:
            await all_usable(stage)
            before = {key: (await where(stage, key))[0] for key in KEYS}
        assert len(set(before.values())) == 3
        made[2].speaks.clear()
        async with gateway(made, learn_s=1000.0) as stage:
            asked = [asyncio.create_task(where(stage, key)) for key in KEYS]
            await until(lambda: sum(view.usable for view in stage.views) == 2)
            known = [ask for ask, key in zip(asked, KEYS, strict=True) if before[key] != "replica-2"]
            await asyncio.wait(known)
            assert not any(ask.done() for ask in asked if ask not in known)
            made[2].speaks.set()
            found = await asyncio.gather(*asked)
        assert found == [(before[key], "sticky") for key in KEYS]


async def test_a_request_of_a_new_session_waits_no_longer_than_all_replicas_take_to_be_usable() -> None:
    async with holders(2) as made, gateway(made, learn_s=1000.0) as stage:
        assert (await where(stage, "new"))[1] == "new"
        assert not stage.gateway.proxy.deployments.default.replicas.learning


async def test_a_replica_that_says_nothing_holds_requests_up_for_a_while_only() -> None:
    async with holders(2) as made:
        made[1].speaks.clear()
        async with gateway(made, learn_s=1000.0) as stage:
            replicas = stage.gateway.proxy.deployments.default.replicas
            asked = asyncio.create_task(where(stage, "new"))
            await until(lambda: bool(replicas._waiting) and stage.views[0].usable)
            replicas.on_learned()
            assert await asked == ("replica-0", "new")
        async with gateway([], learn_s=0.05) as stage:
            assert (await stage.ask(post())).status == 503, "by itself"


async def test_a_client_that_leaves_while_its_request_waits_leaves_nothing() -> None:
    async with holders(1) as made:
        made[0].speaks.clear()
        async with gateway(made, learn_s=1000.0) as stage:
            replicas = stage.gateway.proxy.deployments.default.replicas
            peer = await stage.connect()
            peer.send(post())
            await until(lambda: bool(replicas._waiting))
            peer.abort()
            await until(lambda: not replicas._waiting)
            made[0].speaks.set()
            await all_usable(stage)
            assert made[0].mock.requests[-1].start.startswith("GET /replica/events ")


async def test_two_gateways_agree_on_new_sessions_and_on_those_that_one_of_them_moved() -> None:
    async with holders(3) as made, gateway(made) as one, gateway(made) as other:
        await all_usable(one)
        await all_usable(other)
        for key in KEYS:
            replica, _ = await where(one, key)
            await until_known(other, key, replica)
            assert await where(other, key) == (replica, "sticky")
        moved = home(one, KEYS[0])
        assert moved is not None
        next(view for view in one.views if view.name == moved).admitted = False
        replica, reason = await where(one, KEYS[0])
        assert (replica != moved, reason) == (True, "moved")
        await until_known(other, KEYS[0], replica)
        assert await where(other, KEYS[0]) == (replica, "sticky")


async def test_a_session_moved_back_is_where_it_was_moved_last_for_every_gateway() -> None:
    async with holders(2) as made, gateway(made) as one, gateway(made) as other:
        await all_usable(one)
        await all_usable(other)
        first, _ = await where(one, "s")
        await until_known(other, "s", first)
        views = {view.name: view for view in one.views}
        views[first].admitted = False
        second, _ = await where(one, "s")
        await until_known(other, "s", second)
        views[first].admitted, views[second].admitted = True, False
        assert await where(one, "s") == (first, "moved")
        await until_known(other, "s", first)
        async with gateway(made, learn_s=1000.0) as third:
            assert await where(third, "s") == (first, "sticky")


async def test_a_session_that_began_beside_a_refused_request_of_it_stays() -> None:
    async with holders(2) as made, gateway(made) as stage:
        await all_usable(stage)
        first, _ = await where(stage, "s")
        holder = next(holder for holder in made if holder.name == first)
        holder.sessions.close(("", "s"))
        await until_known(stage, "s", None)
        handle, refused = holder.mock.handler, asyncio.Event()

        async def refuse(request: Message, peer: Peer) -> None:
            holder.mock.handler = handle
            await refused.wait()
            peer.respond(b"{}", "429 Too Many Requests", "retry-after: 1\r\n")

        holder.mock.handler = refuse
        one = asyncio.create_task(where(stage, "s"))
        await until_known(stage, "s", first)
        await until(lambda: holder.mock.handler is handle)
        sessions = stage.gateway.proxy.deployments.default.sessions
        placed = sessions._homes["", "s"][1]
        await until(lambda: time.time() * 1000 > placed + 2)
        assert await where(stage, "s") == (first, "sticky")
        await until(lambda: sessions._homes["", "s"][1] > placed)
        refused.set()
        assert (await one)[0] != first
        assert await where(stage, "s") == (first, "sticky")


async def test_a_session_that_its_replica_closes_is_new_again() -> None:
    async with holders(2) as made, gateway(made) as stage:
        await all_usable(stage)
        replica, _ = await where(stage, "s")
        holder = next(holder for holder in made if holder.name == replica)
        holder.sessions.close(("", "s"))
        await until_known(stage, "s", None)
        assert (await where(stage, "s"))[1] == "new"


async def test_a_replica_that_comes_back_takes_new_sessions_at_once_and_nobody_is_moved_back() -> None:
    async with holders(2) as made, gateway(made) as stage:
        await all_usable(stage)
        before = {key: (await where(stage, key))[0] for key in KEYS}
        made[1].mock.stop()
        await until(lambda: not stage.views[1].usable)
        for key in KEYS:
            reason = "sticky" if before[key] == "replica-0" else "moved"
            assert await where(stage, key) == ("replica-0", reason)
        await made[1].mock.start(made[1].mock.port)
        async with asyncio.timeout(60):
            await all_usable(stage)
        assert {await where(stage, key) for key in KEYS} == {("replica-0", "sticky")}
        fresh = [await where(stage, f"new-{number}") for number in range(10)]
        assert fresh == [("replica-1", "new")] * 10, "it has clearly fewer"


async def test_sessions_of_a_replica_that_died_unasked_are_new_when_it_is_back() -> None:
    async with holders(2) as made, gateway(made) as stage:
        await all_usable(stage)
        before = {key: (await where(stage, key))[0] for key in KEYS}
        made[1].mock.stop()
        await until(lambda: not stage.views[1].usable)
        made[1].boot = "b2"
        made[1].sessions.close_all()
        await made[1].mock.start(made[1].mock.port)
        await all_usable(stage)
        table = stage.gateway.proxy.deployments.default.sessions
        assert table.counts == {"replica-0": sum(home == "replica-0" for home in before.values())}
        for key in KEYS:
            reason = "sticky" if before[key] == "replica-0" else "new"
            assert (await where(stage, key))[1] == reason


async def test_a_replica_that_is_heard_but_fails_requests_is_left_until_it_answers() -> None:
    async with holders(2) as made, gateway(made) as stage:
        await all_usable(stage)
        home_of = {key: (await where(stage, key))[0] for key in KEYS}
        mine = [key for key in KEYS if home_of[key] == "replica-1"]
        made[1].broken = True
        for key in mine[: FAILURES_MAX - 1]:
            assert await where(stage, key) == ("replica-0", "moved")
            assert home(stage, key) == "replica-1", "passed over for this request"
        assert stage.views[1].usable
        assert await where(stage, mine[-2]) == ("replica-0", "moved")
        assert (stage.views[1].usable, stage.views[1].report is not None) == (False, True)
        asked = len(made[1].mock.requests)
        assert await where(stage, mine[-1]) == ("replica-0", "moved")
        assert home(stage, mine[-1]) == "replica-0"
        assert all("completions" not in r.start for r in made[1].mock.requests[asked:])
        made[1].broken = False
        await all_usable(stage)
        assert await where(stage, mine[0]) == ("replica-1", "sticky")


async def test_the_last_replica_is_never_left_for_its_failures_and_one_success_clears_it() -> None:
    async with holders(1) as made, gateway(made) as stage:
        await all_usable(stage)
        made[0].broken = True
        for _ in range(2 * FAILURES_MAX):
            assert (await stage.ask(post())).status == 503
        assert stage.views[0].usable
        made[0].broken = False
        assert (await stage.ask(post())).status == 200
        assert stage.views[0].replica.failures == 0


async def test_who_waits_for_what_replicas_hold_waits_no_longer_than_anybody_listens() -> None:
    async with holders(1) as made:
        made[0].speaks.clear()
        replicas = ReplicaSet(
            DeploymentReplicas([("replica-0", f"http://127.0.0.1:{made[0].mock.port}")], learn_s=1000.0)
        )
        running = asyncio.create_task(replicas.facts.run())
        asked = asyncio.create_task(replicas.learned())
        await until(lambda: bool(replicas.waiting))
        running.cancel()
        await asyncio.wait([running])
        await asked


async def test_learning_ends_when_only_usable_replicas_are_left() -> None:
    members = [(f"replica-{number}", f"http://127.0.0.1:{number + 1}") for number in range(2)]
    replicas = ReplicaSet(DeploymentReplicas(members, learn_s=1000.0))
    for view in replicas.views:
        view.replica.hear(replica_report(view.name))
    replicas.views[0].admitted = True
    assert replicas.learning
    replicas.facts.set_members(members[:1])
    assert not replicas.learning
