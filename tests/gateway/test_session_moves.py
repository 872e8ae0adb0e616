"""Sessions that move by their price, over a gateway before mock replicas: where they go, what goes along, who is told what."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from gateway_harness import Handler, Message, Peer, Stage, post, respond_ok, staged
from reports import changed, replica_report
from test_resume import BODY, WHOLE, WRITES, begin, die, go_on, numbers, resumes
from test_resume import answer as stream_of

from midstream.core.errors import HandedOver, Overloaded
from midstream.core.kv import KvWaits
from midstream.core.price import Handed, Moved, RoomOffer, TurnPace
from midstream.fleet.moves import PROMISED_S, Mover
from midstream.fleet.replica_set import ReplicaSet
from midstream.fleet.replicas import DeploymentReplicas

SESSION = "x-multi-turn-session-id: s1\r\n"
FULL = KvWaits(budget_tokens=10_000, claimed_tokens=9_900)
EMPTY = KvWaits(budget_tokens=10_000)
FAST = TurnPace(prefill_tokens_s=1000.0)


def handed(**fields: object) -> Handed:
    usual = {"reason": "wait", "tokens": 2000, "needs": 3000, "saved_s": 10.0, "age_s": 7.0, "begun": True}
    return Handed(**{**usual, "prefill_tokens_s": 500.0, **fields})  # type: ignore[arg-type]


def refuse(peer: Peer, error: HandedOver | Overloaded) -> None:
    headers = "".join(f"{name}: {value}\r\n" for name, value in error.headers().items())
    peer.respond(json.dumps(error.body()).encode(), f"{error.status} X", headers)


def hands_over(says: Handed) -> Handler:
    """A replica that hands over whatever may go."""

    async def handler(request: Message, peer: Peer) -> None:
        if "x-midstream-stay" in request.headers:
            peer.respond()
        else:
            refuse(peer, HandedOver(msgspec.json.encode(says).decode()))

    return handler


def hear(stage: Stage, index: int, **fields: object) -> None:
    view = stage.views[index]
    given = {"kv_waits": EMPTY, "pace": FAST, **fields}
    view.replica.hear(replica_report(view.name, f"boot of {view.name}", **given))  # type: ignore[arg-type]
    view.admitted = True


async def home_of(stage: Stage) -> int:
    """The session's replica, after its first turn."""
    first = await stage.ask(post(headers=SESSION))
    return int(first.headers["x-midstream-replica"][-1])


@contextlib.asynccontextmanager
async def settled(count: int) -> AsyncIterator[tuple[Stage, int]]:
    """So many replicas with room. The session has had a turn on one of them."""
    async with staged(*[respond_ok] * count) as stage:
        for at in range(count):
            hear(stage, at)
        yield stage, await home_of(stage)


def lives(stage: Stage) -> str | None:
    return stage.gateway.proxy.deployments.default.sessions.home(("", "s1"))


def counts(stage: Stage) -> dict[str, int]:
    return dict(stage.metrics.moves)


async def test_a_session_that_its_home_hands_over_lives_where_that_costs_least() -> None:
    async with staged(*[respond_ok] * 3) as stage:
        home = await home_of(stage)
        dear, cheap = [at for at in range(3) if at != home]
        hear(stage, dear, pace=TurnPace(prefill_tokens_s=300.0))
        hear(stage, cheap)
        stage.mocks[home].handler = hands_over(handed(opened=300))
        moved = await stage.ask(post(headers=SESSION))
        assert (moved.status, moved.headers["x-midstream-route-reason"]) == (200, "priced")
        assert moved.headers["x-midstream-replica"] == lives(stage) == f"replica-{cheap}"
        request = stage.mocks[cheap].requests[-1]
        said = msgspec.json.decode(request.headers["x-midstream-moved"], type=Moved)
        assert said == Moved(url=stage.views[home].url, begun=True, age_s=7.0, opened=300)
        assert int(request.headers["x-midstream-placed"]) > 0
        assert (counts(stage), stage.metrics.retries["handed_over"]) == ({"wait": 1}, 1)
        again = await stage.ask(post(headers=SESSION))
        assert again.headers["x-midstream-route-reason"] == "sticky"
        assert "x-midstream-moved" not in stage.mocks[cheap].requests[-1].headers


REFUSED: dict[str, Callable[[Stage, int], None]] = {
    "dear": lambda stage, at: hear(stage, at, pace=TurnPace(prefill_tokens_s=100.0)),
    "turns wait there": lambda stage, at: hear(stage, at, pace=TurnPace(prefill_tokens_s=1e4, waiting=1)),
    "full": lambda stage, at: hear(stage, at, kv_waits=FULL),
    "not usable": lambda stage, at: setattr(stage.views[at], "admitted", False),
    "another snapshot serves there": lambda stage, at: hear(stage, at, snapshot="step-2"),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_a_turn_goes_back_to_a_home_that_keeps_it_where_its_move_does_not_pay(why: str) -> None:
    async with settled(2) as (stage, home):
        REFUSED[why](stage, 1 - home)
        stage.mocks[home].handler = hands_over(handed())
        pinned = SESSION + "x-midstream-snapshot: base\r\n"
        kept = await stage.ask(post(headers=pinned if "snapshot" in why else SESSION))
        assert (kept.status, kept.headers["x-midstream-replica"]) == (200, f"replica-{home}")
        assert stage.mocks[home].requests[-1].headers["x-midstream-stay"] == "1"
        assert stage.mocks[1 - home].requests == []
        assert (lives(stage), counts(stage)) == (f"replica-{home}", {})


async def test_a_replica_that_leaves_gets_no_turn_back_unless_there_is_no_other() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        home = await home_of(stage)
        # It is full, and still the only one there is.
        hear(stage, 1 - home, kv_waits=FULL)
        stage.mocks[home].handler = hands_over(handed(reason="leaving", saved_s=0.0))
        moved = await stage.ask(post(headers=SESSION))
        assert moved.headers["x-midstream-replica"] == lives(stage) == f"replica-{1 - home}"
        assert counts(stage) == {"leaving": 1}
        # One without a session is nobody's, and goes anywhere.
        stage.mocks[1 - home].handler = hands_over(handed(reason="leaving", begun=False))
        stage.mocks[home].handler = respond_ok
        for _ in range(2):
            assert (await stage.ask(post())).headers["x-midstream-replica"] == f"replica-{home}"
    async with staged(hands_over(handed(reason="leaving"))) as stage:
        assert (await stage.ask(post(headers=SESSION))).status == 200
        assert (await stage.ask(post())).status == 200


async def test_a_session_lives_on_at_home_when_its_new_home_is_full_after_all() -> None:
    async with settled(2) as (stage, home):

        async def is_full(request: Message, peer: Peer) -> None:
            refuse(peer, Overloaded("it is full"))

        stage.mocks[home].handler = hands_over(handed())
        stage.mocks[1 - home].handler = is_full
        kept = await stage.ask(post(headers=SESSION))
        assert (kept.status, kept.headers["x-midstream-replica"]) == (200, f"replica-{home}")
        assert lives(stage) == f"replica-{home}"


async def dies(request: Message, peer: Peer) -> None:
    """Its process is gone before it answers."""
    peer.abort()


@pytest.mark.parametrize("back", ["home", "home, which forgot the boot", "a third one"])
async def test_a_session_whose_new_home_dies_before_it_answers_still_has_the_turns_of_its_old_home(
    back: str,
) -> None:
    async with settled(3) as (stage, home):
        new, third = [at for at in range(3) if at != home]
        url = stage.views[home].url
        hear(stage, home, kv_waits=FULL)
        half = KvWaits(budget_tokens=10_000, claimed_tokens=6_000)
        hear(stage, third, kv_waits=half, pace=TurnPace(prefill_tokens_s=300.0))
        sessions = stage.gateway.proxy.deployments.default.sessions

        async def dies_and_returns(request: Message, peer: Peer) -> None:
            sessions.begin(f"replica-{new}", "another boot")
            await dies(request, peer)

        sessions.begin(f"replica-{new}", f"boot of replica-{new}")
        stage.mocks[new].handler = dies_and_returns if "boot" in back else dies
        if back == "a third one":
            leave(stage, home)
        else:
            stage.mocks[home].handler = hands_over(handed())
        answer = await stage.ask(post(headers=SESSION))
        assert answer.status == 200
        assert len(stage.mocks[new].requests) == 1
        if back == "a third one":
            said = stage.mocks[third].requests[-1].headers["x-midstream-moved"]
            assert msgspec.json.decode(said, type=Moved).url == url
        else:
            assert answer.headers["x-midstream-replica"] == lives(stage) == f"replica-{home}"
            assert stage.mocks[home].requests[-1].headers["x-midstream-stay"] == "1"
            assert "x-midstream-moved" not in stage.mocks[home].requests[-1].headers


@pytest.mark.parametrize("streams", [False, True])
async def test_a_session_whose_new_home_dies_in_the_middle_of_its_answer_goes_back(streams: bool) -> None:
    async with settled(2) as (stage, home):
        new = 1 - home

        async def dies_late(request: Message, peer: Peer) -> None:
            if streams:
                peer.start_stream()
                peer.chunk(b"data: 1\n\n")
            else:
                peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbeg")
            await asyncio.sleep(0)
            peer.abort()

        stage.mocks[home].handler = hands_over(handed())
        stage.mocks[new].handler = dies_late
        client = await stage.connect()
        client.send(post(headers=SESSION))
        with contextlib.suppress(ConnectionResetError):
            await client.closed()
        assert len(stage.mocks[new].requests) == 1
        assert lives(stage) == f"replica-{home}"


async def test_a_stream_of_a_new_home_that_another_replica_goes_on_with_brings_no_session_back() -> None:
    """The whole turn is where the stream ended, and the old home would not know it."""

    async with settled(3) as (stage, home):
        new, third = [at for at in range(3) if at != home]
        hear(stage, third, pace=TurnPace(prefill_tokens_s=300.0))

        async def breaks(request: Message, peer: Peer) -> None:
            begin(peer)
            peer.send(WRITES[0] + WRITES[1])
            await die(peer)
            stage.views[new].replica.hear(None)

        async def goes_on(request: Message, peer: Peer) -> None:
            go_on(request, peer)

        stage.mocks[home].handler = hands_over(handed())
        stage.mocks[new].handler = breaks
        stage.mocks[third].handler = goes_on
        asked = asyncio.create_task(stream_of(stage, SESSION))
        await stage.mocks[new].asked(1)
        # The old home is well, and could not go on with it.
        hear(stage, home, snapshot="step-2")
        assert await asked == WHOLE
        assert len(resumes(stage)) == 1
        assert lives(stage) == f"replica-{third}"


@pytest.mark.parametrize("why", ["its connection breaks", "the new home leaves"])
async def test_a_session_stays_where_another_turn_of_it_was_answered(why: str) -> None:
    """The old home would not know that turn."""

    async with settled(3) as (stage, home):
        new, third = [at for at in range(3) if at != home]
        hear(stage, third, pace=TurnPace(prefill_tokens_s=300.0))
        goes, url = asyncio.Event(), stage.views[new].url

        async def answers_the_second(request: Message, peer: Peer) -> None:
            if "x-midstream-placed" not in request.headers:
                peer.respond()
                return
            await goes.wait()
            peer.abort()

        stage.mocks[home].handler = hands_over(handed())
        stage.mocks[new].handler = answers_the_second
        first = asyncio.create_task(stage.ask(post(headers=SESSION)))
        await stage.mocks[new].asked(1)
        second = await stage.ask(post(headers=SESSION))
        assert second.headers["x-midstream-replica"] == f"replica-{new}"
        if why == "the new home leaves":
            leave(stage, new, 0.0)
            stage.gateway.proxy.check_replicas(0.0)
        else:
            goes.set()
        assert (await first).status == 200
        stage.mocks[home].handler = respond_ok
        await stage.ask(post(headers=SESSION))
        if why == "the new home leaves":
            moved = [
                msgspec.json.decode(said, type=Moved).url
                for mock in (stage.mocks[home], stage.mocks[third])
                for request in mock.requests
                if (said := request.headers.get("x-midstream-moved"))
            ]
            assert moved == [url]
        else:
            assert lives(stage) == f"replica-{new}"


async def test_all_turns_of_a_session_that_are_handed_over_go_to_one_home() -> None:
    async with settled(3) as (stage, home):
        together = asyncio.Barrier(2)
        says = HandedOver(msgspec.json.encode(handed()).decode())

        async def both(request: Message, peer: Peer) -> None:
            await together.wait()
            refuse(peer, says)

        stage.mocks[home].handler = both
        turns = await asyncio.gather(*(stage.ask(post(headers=SESSION)) for _ in range(2)))
        assert {turn.headers["x-midstream-replica"] for turn in turns} == {lives(stage)}
        assert lives(stage) != f"replica-{home}"
        assert counts(stage) == {"wait": 1}


@pytest.mark.parametrize("full", [False, True])
async def test_a_session_stays_at_home_when_a_replica_hands_over_a_turn_that_it_served_in_passing(
    full: bool,
) -> None:
    """Its home does not have the snapshot that this turn asks for."""

    async with settled(3) as (stage, home):
        asked, other = [at for at in range(3) if at != home]
        for at in (asked, other):
            hear(stage, at, snapshot="step-2", kv_waits=FULL if full else EMPTY)

        for at in (asked, other):
            stage.mocks[at].handler = hands_over(handed(begun=False))
        served = await stage.ask(post(headers=SESSION + "x-midstream-snapshot: step-2\r\n"))
        assert served.status == 200
        assert served.headers["x-midstream-replica"] != f"replica-{home}"
        assert (lives(stage), counts(stage)) == (f"replica-{home}", {})
        asked_of = [request for mock in stage.mocks for request in mock.requests]
        assert not any("x-midstream-moved" in request.headers for request in asked_of)
        again = await stage.ask(post(headers=SESSION))
        assert again.headers["x-midstream-replica"] == f"replica-{home}"


# -- who is told what


def told(stage: Stage) -> dict[int, RoomOffer]:
    """By replica: the offer that it got last. They are forgotten."""
    found = {}
    for at, mock in enumerate(stage.mocks):
        for request in mock.requests:
            if "/replica/offer" in request.start:
                found[at] = msgspec.json.decode(request.body, type=RoomOffer)
        mock.requests.clear()
    return found


async def take_offers(request: Message, peer: Peer) -> None:
    peer.respond(status="202 Accepted")


async def test_a_replica_whose_turns_wait_is_told_of_the_one_with_most_room_and_a_new_one_counts_at_once() -> (
    None
):
    async with staged(*[take_offers] * 4) as stage:
        mover = stage.gateway.proxy.deployments.default.mover
        for at in range(4):
            hear(stage, at, kv_waits=FULL)
        await mover.look()
        assert told(stage) == {}, "nothing waits"
        waits = TurnPace(prefill_tokens_s=500.0, waiting=3, wait_s=9.0)
        hear(stage, 0, kv_waits=FULL, pace=waits)
        hear(stage, 1, kv_waits=FULL, pace=waits)
        stage.views[3].admitted = False
        await mover.look()
        assert told(stage)[0].room_tokens == 50, "of what is left of a full one, each gets a half"
        # One joins: it is there, and empty.
        hear(stage, 3)
        await mover.look()
        offers = told(stage)
        assert sorted(offers) == [0, 1]
        assert max(offer.room_tokens for offer in offers.values()) == 10_000
        assert [offer.prefill_tokens_s for offer in offers.values()] == [1000.0, 1000.0]


async def test_a_busy_replica_is_told_of_an_idle_one_only() -> None:
    async with staged(*[take_offers] * 2) as stage:
        mover = stage.gateway.proxy.deployments.default.mover
        hear(stage, 0, in_flight=3)
        hear(stage, 1, in_flight=1)
        await mover.look()
        assert told(stage) == {}
        hear(stage, 1)
        await mover.look()
        assert {at: offer.idle for at, offer in told(stage).items()} == {0: True}


def leave(stage: Stage, index: int, leaves_at: float | None = None) -> None:
    views = stage.views
    facts = stage.gateway.proxy.deployments.default.replicas.facts
    facts.set_members([(view.name, view.url) for view in views], {views[index].name})
    views[index].replica.leaves_at = leaves_at


async def test_a_replica_that_leaves_is_told_so_and_its_sessions_take_their_turns_along() -> None:
    async with staged(take_offers, take_offers) as stage:
        for at in range(2):
            hear(stage, at)
            stage.mocks[at].handler = respond_ok
        home = await home_of(stage)
        leave(stage, home)
        for mock in stage.mocks:
            mock.requests.clear()
            mock.handler = take_offers
        await stage.gateway.proxy.deployments.default.mover.look()
        assert told(stage) == {home: RoomOffer(leaving=True)}
        stage.mocks[1 - home].handler = respond_ok
        moved = await stage.ask(post(headers=SESSION))
        assert moved.headers["x-midstream-route-reason"] == "moved"
        said = stage.mocks[1 - home].requests[-1].headers["x-midstream-moved"]
        assert msgspec.json.decode(said, type=Moved).url == stage.views[home].url
        assert counts(stage) == {"leaving": 1}
        # It was taken back.
        views = stage.views
        stage.gateway.proxy.deployments.default.replicas.facts.set_members(
            [(view.name, view.url) for view in views]
        )
        told(stage)
        for mock in stage.mocks:
            mock.handler = take_offers
        await stage.gateway.proxy.deployments.default.mover.look()
        assert told(stage) == {home: RoomOffer()}
        await stage.gateway.proxy.deployments.default.mover.look()
        assert told(stage) == {}


async def test_sessions_of_a_replica_that_leaves_go_where_there_is_most_room_and_bury_nobody() -> None:
    async with staged(*[respond_ok] * 4) as stage:
        for at in range(4):
            hear(stage, at)
        keys = [f"x-multi-turn-session-id: s{number}\r\n" for number in range(40)]
        for key in keys:
            await stage.ask(post(headers=key))
        sessions = stage.gateway.proxy.deployments.default.sessions
        left = [key for key in keys if sessions.home(("", key[25:].strip())) == "replica-0"]
        assert len(left) > 4
        leave(stage, 0)
        hear(stage, 1, kv_waits=FULL)
        hear(stage, 2, kv_waits=FULL)
        for key in left[:-1]:
            moved = await stage.ask(post(headers=key))
            assert moved.headers["x-midstream-replica"] == "replica-3"
        # It has more requests than its share.
        hear(stage, 3, in_flight=50)
        last = await stage.ask(post(headers=left[-1]))
        assert last.headers["x-midstream-replica"] in ("replica-1", "replica-2")


async def test_the_last_replica_is_not_told_to_hand_anything_over() -> None:
    async with staged(take_offers, take_offers) as stage:
        stage.views[1].admitted = False
        leave(stage, 0)
        await stage.gateway.proxy.deployments.default.mover.look()
        assert told(stage) == {}


async def test_what_was_promised_is_no_room_for_others_until_a_report_may_have_it() -> None:
    now = 0.0
    facts = DeploymentReplicas([("a", "http://a:1"), ("b", "http://b:1")])
    replicas = ReplicaSet(facts)
    mover = Mover(replicas, lambda: now)
    for view in replicas.views:
        view.replica.hear(replica_report(view.name, kv_waits=EMPTY, pace=FAST))
        view.admitted = True
    placed = [mover.place(handed(needs=4000), "a") for _ in range(3)]
    assert [found is not None for found in placed] == [True, True, False]
    now = PROMISED_S
    found = mover.place(handed(needs=4000), "a")
    assert found is not None
    assert found[1].reason == "priced"
    assert found[1].explanation == "a hands it over (wait): 2000 tokens cost 2 s there, and 10 s are saved"
    # A fleet whose replicas come and go does not collect them.
    assert list(mover._promised) == [facts.members[1]]
    facts.set_members([("a", "http://a:1")])
    await mover.look()
    assert not mover._promised


# -- a replica whose time is over


async def test_streams_and_requests_of_a_replica_whose_time_is_over_go_on_elsewhere_as_no_loss() -> None:
    async def handler(request: Message, peer: Peer) -> None:
        if "resume" in request.start:
            go_on(request, peer)
        elif request.body == BODY:
            begin(peer)
            peer.send(WRITES[0] + WRITES[1])
            await peer.closed()
        elif peer in stage.mocks[0].peers:
            await peer.closed()
        else:
            peer.respond()

    async with staged(handler, handler) as stage:
        stage.views[1].admitted = False
        streamed = asyncio.create_task(stream_of(stage))
        await stage.mocks[0].asked(1)
        asked = asyncio.create_task(stage.ask(post()))
        await stage.mocks[0].asked(2)
        requests = stage.gateway.proxy.upstream(stage.views[0].replica).requests
        async with asyncio.timeout(60):
            while not any(one.answered for one in requests):  # noqa: ASYNC110 - the head has no event
                await asyncio.sleep(0)
        leave(stage, 0, time.time() + 3600)
        stage.gateway.proxy.check_replicas(0.0)
        assert len(requests) == 2, "it has time"
        stage.views[0].replica.leaves_at = time.time() - 1
        stage.gateway.proxy.check_replicas(0.0)
        assert len(requests) == 2, "nobody else is usable"
        stage.views[1].admitted = True
        stage.gateway.proxy.check_replicas(0.0)
        assert await streamed == WHOLE
        assert (await asked).headers["x-midstream-replica"] == "replica-1"
        assert len(resumes(stage)) == 1
        assert stage.metrics.upstream_errors == {}
        assert repr(stage.gateway.proxy.suspects) == "Suspects(0 requests, 0 refused)"


@pytest.mark.parametrize("other_snapshot", [False, True])
async def test_a_stream_that_nobody_could_go_on_with_stays_on_a_replica_whose_time_is_over(
    other_snapshot: bool,
) -> None:
    """Its replica cannot have streams resumed, or the other one has another snapshot."""

    goes_on = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        begin(peer, *([] if other_snapshot else [""]))
        peer.send(WRITES[0])
        await goes_on.wait()
        for data in WRITES[1:]:
            peer.send(data)
        peer.end_stream()

    async with staged(handler, handler) as stage:
        stage.views[1].admitted = False
        streamed = asyncio.create_task(stream_of(stage))
        await stage.mocks[0].asked(1)
        [request] = stage.gateway.proxy.upstream(stage.views[0].replica).requests
        async with asyncio.timeout(60):
            while not request.answered:  # noqa: ASYNC110 - the head has no event
                await asyncio.sleep(0)
        if other_snapshot:
            hear(stage, 1, snapshot="step-2")
        stage.views[1].admitted = True
        leave(stage, 0, 0.0)
        stage.gateway.proxy.check_replicas(0.0)
        assert stage.mocks[1].requests == []
        goes_on.set()
        events, complete = await streamed
        assert (events[:5], complete) == (numbers(0, 5), True)


async def test_a_request_that_only_a_replica_whose_time_is_over_may_serve_stays_there() -> None:
    goes_on = asyncio.Event()

    async def handler(request: Message, peer: Peer) -> None:
        await goes_on.wait()
        peer.respond()

    async with staged(handler, respond_ok) as stage:
        hear(stage, 0)
        hear(stage, 1, snapshot="step-2")
        asked = asyncio.create_task(stage.ask(post(headers="x-midstream-snapshot: base\r\n")))
        await stage.mocks[0].asked(1)
        leave(stage, 0, 0.0)
        stage.gateway.proxy.check_replicas(0.0)
        goes_on.set()
        served = await asked
        assert (served.status, served.headers["x-midstream-replica"]) == (200, "replica-0")
        assert len(stage.mocks[0].requests) == 1


async def test_a_report_without_a_budget_has_room_unless_turns_wait() -> None:
    """As a replica says that knows nothing of its cache."""

    async with staged(respond_ok, respond_ok) as stage:
        home = await home_of(stage)
        report = stage.views[1 - home].replica.heard
        assert report is not None
        stage.views[1 - home].replica.hear(changed(report, pace=FAST))
        stage.mocks[home].handler = hands_over(handed(needs=10**9))
        moved = await stage.ask(post(headers=SESSION))
        assert moved.headers["x-midstream-replica"] == f"replica-{1 - home}"
