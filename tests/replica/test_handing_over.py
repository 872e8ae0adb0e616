"""Turns that another replica is to take, over the replica's port: which are handed over, and which never are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from replica_fakes import MODEL, Running, running
from test_kv_waits import SmallCache, close, waits

from midstream.core.errors import HEADER_HANDED, HandedOver
from midstream.core.headers import (
    HEADER_BOOT,
    HEADER_EXPECTED_TOKENS,
    HEADER_MOVED,
    HEADER_SESSION,
    HEADER_STAY,
)
from midstream.core.kv import KvStats
from midstream.core.price import Handed, Moved, RoomOffer
from midstream.replica.gate import Door
from midstream.replica.kv_account import Beginning
from midstream.replica.kv_budget import KvBudget, KvTurn, beginning
from midstream.replica.moves import Movable, Moves

LONG = "a prompt that is long enough to measure"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ask(
    here: Running, key: str | None, says: int | None = None, prompt: str = LONG, **headers: str
) -> asyncio.Task[httpx.Response]:
    """As a gateway sends it."""
    given = {HEADER_BOOT: here.replica.boot, **headers}
    given |= {} if key is None else {HEADER_SESSION: key}
    given |= {} if says is None else {HEADER_EXPECTED_TOKENS: str(says)}
    body = {"model": MODEL, "prompt": f"{prompt} {key}", "max_tokens": 3}
    return asyncio.create_task(here.http.post("/v1/completions", json=body, headers=given))


async def offer(here: Running, **fields: Any) -> None:
    given = {"room_tokens": 1000, "prefill_tokens_s": 1000.0, **fields}
    body = msgspec.json.encode(RoomOffer(**given))
    assert (await here.http.post("/replica/offer", content=body)).status_code == 202


def handed_over(answer: httpx.Response) -> Handed:
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"] == "1"
    return msgspec.json.decode(answer.headers[HEADER_HANDED], type=Handed)


@asynccontextmanager
async def test(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[Running, Clock]]:
    clock = Clock()

    async with (
        asyncio.timeout(15),
        running(tmp_path, SmallCache(), kv_budget=1.0, monotonic=clock, **more) as here,
    ):
        yield here, clock
        here.replica.budget.account.check()
        assert here.replica.own.service is not None
        assert not here.replica.own.service.called


test.__test__ = False  # type: ignore[attr-defined]


async def two_too_many(here: Running) -> asyncio.Task[httpx.Response]:
    """Three sessions of 44 tokens in a cache of 100, which were shorter when they began: the last one's second turn waits."""
    for key, prompt in (*((key, "a short prompt") for key in "abc"), ("a", LONG), ("b", LONG)):
        answer = await ask(here, key, 10, prompt)
        assert answer.status_code == 200, answer.text
    second = ask(here, "c")
    await waits(here, 1)
    return second


async def test_a_turn_that_waits_is_handed_over_when_that_pays_and_frees_its_claim(tmp_path: Path) -> None:
    async with test(tmp_path) as (here, clock):
        second = await two_too_many(here)
        account = here.replica.budget.account
        claimed = account.claimed
        # It saves nothing yet, and then less than it costs.
        await offer(here)
        clock.now = 4.0
        await offer(here, prefill_tokens_s=4.0)
        assert len(here.replica.budget.queue) == 1
        await offer(here)
        handed = handed_over(await second)
        assert (handed.reason, handed.begun, handed.tokens, handed.saved_s) == ("wait", True, 41, 4.0)
        assert handed.age_s >= 4.0
        assert handed.opened == len("a short prompt c") < handed.tokens
        assert account.claimed < claimed
        assert isinstance(here.engine, SmallCache)
        assert here.replica.report().pace.waiting == 0
        # Its gateway found nobody who takes it for less: it stays, and goes before a session that began meanwhile.
        number = account.number(("", "c"))
        again = ask(here, "c", **{HEADER_STAY: "1"})
        await waits(here, 1)
        await offer(here)
        await close(here, "a")
        assert (await again).status_code == 200
        assert account.opened(("", "c")) == handed.opened, "it is of its group as before"
        assert account.number(("", "c")) == number < account.number(("", "d"))
        assert here.engine.sessions_over == ["\0a"], "what the cache has of a session that came back is kept"


@pytest.mark.parametrize("why", ["no room", "not of a gateway", "stays"])
async def test_a_turn_waits_on_where_there_is_no_room_for_it_or_it_may_not_move(
    tmp_path: Path, why: str
) -> None:
    async with test(tmp_path) as (here, clock):
        for key in "ab":
            assert (await ask(here, key, 50)).status_code == 200
        if why == "not of a gateway":
            body = {"model": MODEL, "prompt": f"{LONG} c", "max_tokens": 3}
            waiting = asyncio.create_task(
                here.http.post("/v1/completions", json=body, headers={HEADER_SESSION: "c"})
            )
        else:
            waiting = ask(here, "c", 50, **({HEADER_STAY: "1"} if why == "stays" else {}))
        await waits(here, 1)
        clock.now = 1.0
        await offer(here, **({"room_tokens": 49} if why == "no room" else {}))
        assert len(here.replica.budget.queue) == 1
        await close(here, "a")
        assert (await waiting).status_code == 200


@pytest.mark.parametrize("why", ["no room", "room", "one stays", "leaves, and one stays"])
async def test_two_turns_of_one_session_that_wait_are_not_parted(tmp_path: Path, why: str) -> None:
    async def work(here: Running, clock: Clock) -> None:
        second = await two_too_many(here)
        third = ask(here, "c", prompt=f"{LONG} too", **({HEADER_STAY: "1"} if "stays" in why else {}))
        await waits(here, 2)
        clock.now = 4.0
        # The session claims 100 tokens.
        room = {"no room": 99, "room": 100}.get(why, 1000)
        await offer(here, room_tokens=room, leaving="leaves" in why)
        if why == "room":
            both = [handed_over(await one) for one in (second, third)]
            assert both[0] == both[1], "so their gateway has one decision"
            assert (both[0].begun, both[0].needs) == (True, 100)
            return
        assert len(here.replica.budget.queue) == 2
        # One that comes now does not go alone either.
        fourth = ask(here, "c")
        await waits(here, 3)
        fourth.cancel()
        await asyncio.gather(fourth, return_exceptions=True)
        for key in "ab":
            await close(here, key)
        assert [(await one).status_code for one in (second, third)] == [200, 200]

    async with test(tmp_path) as at:
        await work(*at)


async def test_a_new_session_that_waits_goes_to_whoever_has_room(tmp_path: Path) -> None:
    async with test(tmp_path) as (here, _clock):
        for key in "ab":
            assert (await ask(here, key, 50)).status_code == 200
        waiting = [ask(here, "c", 60), ask(here, "d", 50)]
        await waits(here, 2)
        await offer(here, room_tokens=100)
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert done == {waiting[0]}, "the first in the queue, and no more than there is room for"
        handed = handed_over(waiting[0].result())
        assert (handed.begun, handed.needs) == (False, 60)
        await close(here, "a")
        assert (await waiting[1]).status_code == 200


async def test_a_replica_that_leaves_hands_over_what_waits_and_what_comes(tmp_path: Path) -> None:
    async with test(tmp_path) as (here, clock):
        second = await two_too_many(here)
        waiting = ask(here, "d", 50)
        await waits(here, 2)
        await offer(here, leaving=True)
        answers = [handed_over(await one) for one in (second, waiting, ask(here, "a"), ask(here, None))]
        assert {one.reason for one in answers} == {"leaving"}
        assert [one.begun for one in answers] == [True, False, True, False]
        # Nobody else can take it.
        assert (await ask(here, "a", **{HEADER_STAY: "1"})).status_code == 200
        # It was taken back.
        clock.now = 3.0
        assert (await ask(here, "a")).status_code == 200


async def test_a_session_that_moved_here_waits_as_one_that_is_as_old_and_its_tokens_are_counted(
    tmp_path: Path,
) -> None:
    async with test(tmp_path) as (here, clock):
        for key in "ab":
            assert (await ask(here, key, 50)).status_code == 200
        waiting = ask(here, "new", 50)
        await waits(here, 1)
        clock.now = 1.0
        moved = msgspec.json.encode(Moved(age_s=500.0)).decode()
        older = ask(here, "older", 50, **{HEADER_MOVED: moved})
        await waits(here, 2)
        assert here.replica.budget.queue.position(("", "older")) == 1
        await close(here, "a")
        usage = (await older).json()["usage"]
        pace = here.replica.report().pace
        assert (pace.moved, pace.moved_tokens) == (
            1,
            usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"],
        )
        await close(here, "older")
        assert (await waiting).status_code == 200


@pytest.mark.parametrize("why", ["waits", "leaves"])
async def test_a_session_that_moved_here_has_its_history_before_its_first_turn_here(
    tmp_path: Path, why: str
) -> None:
    """It is not free to go as one that has nothing to lose, and its turns go along when it has to."""

    async def work(here: Running, clock: Clock) -> None:
        for key in "ab":
            assert (await ask(here, key, 50)).status_code == 200
        moved = {HEADER_MOVED: msgspec.json.encode(Moved(age_s=500.0)).decode()}
        if why == "leaves":
            await offer(here, leaving=True)
            handed = handed_over(await ask(here, "c", 50, **moved))
            assert (handed.begun, handed.age_s) == (True, 500.0)
            return
        waiting = ask(here, "c", 50, **moved)
        await waits(here, 1)
        clock.now = 4.0
        await offer(here)
        assert len(here.replica.budget.queue) == 1
        await offer(here, leaving=True)
        handed = handed_over(await waiting)
        assert (handed.begun, handed.age_s) == (True, 504.0)
        # It comes back, as nobody takes it. Once it is closed, one of its name has nothing to lose.
        again = ask(here, "c", 50, **{HEADER_STAY: "1"})
        await waits(here, 1)
        await close(here, "a")
        assert (await again).status_code == 200
        await close(here, "c")
        assert not handed_over(await ask(here, "c", 50)).begun

    async with test(tmp_path) as at:
        await work(*at)


async def test_the_age_of_a_session_that_moved_here_is_no_wait(tmp_path: Path) -> None:
    async with test(tmp_path) as (here, clock):
        for key in "ab":
            assert (await ask(here, key, 50)).status_code == 200
        waiting = ask(here, "new", 50)
        await waits(here, 1)
        moved = {HEADER_MOVED: msgspec.json.encode(Moved(age_s=500.0)).decode()}
        older = ask(here, "older", 50, **moved)
        await waits(here, 2)
        clock.now = 2.0
        found = here.replica.session(("", "older"))
        assert found is not None
        assert found.wait is not None
        assert (found.wait.position, found.wait.waited_s) == (1, 2.0)
        # Whoever takes it back is told how old it is, and it has its place again.
        await offer(here, leaving=True)
        handed = [handed_over(await one) for one in (older, waiting)]
        assert [(one.age_s, one.saved_s) for one in handed] == [(502.0, 0.0), (2.0, 0.0)]
        again = [ask(here, key, 50, **{HEADER_STAY: "1"}) for key in ("new", "older")]
        await waits(here, 2)
        assert here.replica.budget.queue.position(("", "older")) == 1
        await close(here, "a")
        assert (await again[1]).status_code == 200
        await close(here, "b")
        assert (await again[0]).status_code == 200


async def test_what_one_more_new_session_costs_does_not_grow_with_what_waits_while_others_have_room() -> None:
    """Of 4,000 that wait, each was judged again at each arrival: 6 ms."""
    judged = 0

    class Counted(Moves):
        def of_waiting(self, waiting: Sequence[Movable], now: float) -> dict[int, Handed]:
            nonlocal judged
            judged += len(waiting)
            return super().of_waiting(waiting, now)

    budget = KvBudget(
        share=1.0,
        waiting_max=500,
        stats=lambda: KvStats(block_tokens=1, total=100),
        known=lambda session: False,
        ended=lambda session: None,
        monotonic=lambda: 0.0,
        moves=Counted(),
    )

    def turn(number: int) -> KvTurn:
        return KvTurn(("", str(number)), (number,) * 10, said=90, movable=True)

    first = turn(0)
    await budget.enter(first)
    budget.offered(RoomOffer(room_tokens=1))
    turns = [asyncio.create_task(budget.enter(turn(number))) for number in range(1, 101)]
    await asyncio.sleep(0)
    assert (len(budget.queue), judged) == (100, 1)
    budget.offered(RoomOffer(room_tokens=180))
    assert (len(budget.queue), judged) == (98, 101)
    went = await asyncio.gather(*turns[:2], return_exceptions=True)
    assert [type(one) for one in went] == [HandedOver, HandedOver]
    for one in turns:
        one.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    budget.leave(first, 0)


async def test_what_a_turn_waited_at_a_gate_is_no_prefill(tmp_path: Path) -> None:
    async with test(tmp_path) as (here, clock):
        gate = here.replica.own.gate
        gate.set(Door.HELD)
        asked = ask(here, "s")
        await here.until(lambda: gate.waiting == 1)
        clock.now = 30.0
        gate.set(Door.OPEN)
        assert (await asked).status_code == 200
        # Its clock stood while it was computed.
        assert here.replica.report().pace.prefill_tokens_s == 0.0


async def test_a_replica_that_had_no_request_yet_says_how_much_room_it_has(tmp_path: Path) -> None:
    async with test(tmp_path) as (here, _clock):
        waits = here.replica.report().kv_waits
        assert (waits.budget_tokens, waits.claimed_tokens) == (100, 0)


def test_a_session_that_moved_is_of_the_group_that_it_was_of() -> None:
    """Else each one that moves claims the group's prompt again, and others wait for room that is there."""
    first = tuple(range(40))
    prompt = (*first, *range(100, 150))

    def of(moved: Moved | None, prompt: tuple[int, ...] = prompt) -> Beginning:
        return beginning(KvTurn(("", "s"), prompt, moved=moved))

    group = of(None, first)
    assert of(Moved(url="http://before", opened=40)) == group._replace(size=40)
    # Its home before may be of an older version, or the history was cut since. It shares what its family does.
    for unknown in (of(Moved(url="http://before")), of(Moved(url="http://before", opened=99))):
        assert (unknown.family, unknown.size) == (group.family, 0)
        assert unknown.group != group.group
    # It has not begun, or brings nothing.
    for new in (of(Moved(url="http://before", begun=False, opened=40)), of(Moved())):
        assert new == of(None)


async def test_a_call_meant_for_a_boot_of_another_process_is_refused(tmp_path: Path) -> None:
    """It was lost on its way to the process that had the address before, and is sent again to this one."""
    async with test(tmp_path) as (here, _clock):
        body, first = msgspec.json.encode(RoomOffer()), here.replica.boot
        for boot, status in ((first, 202), ("another", 503)):
            answer = await here.http.post("/replica/offer", content=body, headers={HEADER_BOOT: boot})
            assert answer.status_code == status, answer.text
        # What outlives the engine, as the turns of sessions do, is still reached.
        await here.engine.die()
        await here.until(lambda: here.replica.ready)
        assert here.replica.boot != first
        for boot in (first, here.replica.boot):
            answer = await here.http.post("/replica/offer", content=body, headers={HEADER_BOOT: boot})
            assert answer.status_code == 202, answer.text


async def test_what_is_no_offer_is_refused(tmp_path: Path) -> None:
    async with test(tmp_path) as (here, _clock):
        for body in (b"{", b'{"room_tokens": -1}', b'{"prefill_tokens_s": 1e99}'):
            assert (await here.http.post("/replica/offer", content=body)).status_code == 400
