"""Requests that wait for room in the KV cache, over the replica's port: who goes on, who leaves, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from replica_fakes import MODEL, FakeEngine, Running, running

from midstream.core.headers import EXPECTED_TOKENS_MAX, HEADER_EXPECTED_TOKENS, HEADER_SESSION
from midstream.core.kv import KvStats
from midstream.core.types import EngineStats
from midstream.replica.gate import Door

Asked = asyncio.Task[httpx.Response]


class SmallCache(FakeEngine):
    """Its cache has 100 tokens. sessions_over: those that it was told the end of."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions_over: list[str] = []

    def stats(self) -> EngineStats:
        return EngineStats(kv=KvStats(block_tokens=10, total=10))

    def end_session(self, session: str) -> None:
        self.sessions_over.append(session)


def ask(here: Running, key: str | None, says: str | None = None, **more: Any) -> Asked:
    headers = {} if key is None else {HEADER_SESSION: key}
    headers |= {} if says is None else {HEADER_EXPECTED_TOKENS: says}
    body = {"model": MODEL, "prompt": f"hey {key}", "max_tokens": 3, **more}
    return asyncio.create_task(here.http.post("/v1/completions", json=body, headers=headers))


def small(tmp_path: Path, **more: Any) -> AbstractAsyncContextManager[Running]:
    """Its clock stands, so no claim lapses by silence while a test looks."""
    given = {"engine": SmallCache(), "kv_budget": 1.0, "monotonic": lambda: 0.0, **more}
    return running(tmp_path, **given)


async def begun(here: Running, key: str, says: str) -> None:
    answer = await ask(here, key, says)
    assert answer.status_code == 200, answer.text
    assert "x-midstream-queue-position" not in answer.headers


async def waits(here: Running, count: int) -> None:
    await here.until(lambda: len(here.replica.budget.queue) == count)


async def close(here: Running, key: str) -> None:
    answer = await here.http.post("/replica/sessions/close", json={"key": key})
    assert answer.json() == {"closed": True}


async def reward(here: Running, key: str) -> None:
    answer = await here.http.post(
        "/replica/reward", json={"tenant": "", "key": key, "given": {"reward": 1.0}, "look": False}
    )
    assert answer.status_code == 200, answer.text


@asynccontextmanager
async def one_runs_and_one_waits(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[Running, Asked]]:
    async with asyncio.timeout(120), small(tmp_path, **more) as here:
        await begun(here, "first", "60")
        waiting = ask(here, "second", "60")
        await waits(here, 1)
        yield here, waiting


@pytest.mark.parametrize("end", [close, reward])
async def test_a_session_that_ends_lets_the_next_one_begin_which_learns_that_it_waited(
    tmp_path: Path, end: Callable[[Running, str], Awaitable[None]]
) -> None:
    async with one_runs_and_one_waits(tmp_path) as (here, waiting):
        # Those that have begun, and those without a session, go on meanwhile.
        await begun(here, "first", "60")
        assert (await ask(here, None)).status_code == 200
        shown = await here.http.post("/replica/sessions", json={"key": "second"})
        [stats] = shown.json()["sessions"]
        assert (stats["turns"], stats["wait"]["position"], stats["wait"]["needs_tokens"]) == (0, 1, 60)
        assert here.replica.report().kv_waits.waiting == 1
        await end(here, "first")
        answer = await waiting
        assert answer.status_code == 200
        assert answer.headers["x-midstream-queue-position"] == "1"
        assert int(answer.headers["x-midstream-queue-wait-ms"]) >= 0
        assert isinstance(here.engine, SmallCache)
        assert here.engine.sessions_over == ["\0first"]
        assert here.engine.requests[-1].session == "\0second"


async def test_a_client_that_leaves_frees_its_place_and_claims_nothing(tmp_path: Path) -> None:
    async with one_runs_and_one_waits(tmp_path) as (here, waiting):
        third = ask(here, "third", "40")
        await waits(here, 2)
        waiting.cancel()
        # The third fits beside the first.
        assert (await third).status_code == 200
        assert here.replica.budget.account.of_sessions == 100
        here.replica.budget.account.check()


async def test_a_full_queue_is_a_429_that_says_when_to_come_again(tmp_path: Path) -> None:
    async with one_runs_and_one_waits(tmp_path, kv_waiting_max=1) as (here, waiting):
        refused = await ask(here, "third", "60")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded_error"
        assert here.replica.report().kv_waits.refused == 1
        await close(here, "first")
        assert (await waiting).status_code == 200


async def test_a_replica_that_ends_refuses_what_waits(tmp_path: Path) -> None:
    async with one_runs_and_one_waits(tmp_path) as (here, waiting):
        await here.replica.drained()
        assert (await waiting).status_code == 503
        assert len(here.replica.budget.queue) == 0


async def test_an_engine_that_dies_refuses_what_waits_and_the_next_boot_begins_with_clean_books(
    tmp_path: Path,
) -> None:
    async with one_runs_and_one_waits(tmp_path) as (here, waiting):
        await here.engine.die()
        assert (await waiting).status_code == 503
        await here.until(lambda: here.replica.ready)
        account = here.replica.budget.account
        assert (len(account), account.claimed) == (0, 0)
        await begun(here, "second", "60")


async def test_a_trainer_that_aborts_everything_ends_what_waits(tmp_path: Path) -> None:
    async with one_runs_and_one_waits(tmp_path) as (here, waiting):
        assert (await here.http.post("/replica/abort", content=b"null")).json() == {"aborted": 1}
        answer = await waiting
        assert answer.json()["choices"][0]["finish_reason"] == "abort"


async def test_a_budget_of_zero_makes_nobody_wait(tmp_path: Path) -> None:
    async with small(tmp_path, kv_budget=0.0) as here:
        for key in "abc":
            await begun(here, key, "90")


async def test_a_header_that_is_no_number_is_refused_before_it_waits(tmp_path: Path) -> None:
    async with one_runs_and_one_waits(tmp_path) as (here, waiting):
        refused = await ask(here, "third", "lots")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, HEADER_EXPECTED_TOKENS)
        await close(here, "first")
        assert (await waiting).status_code == 200
        assert here.replica.own.service is not None
        assert not here.replica.own.service.called


async def test_a_sync_swap_refuses_none_of_those_that_waited_before_it(tmp_path: Path) -> None:
    """Each was let in to be refused, and freed the place of the next one: one swap emptied the queue."""

    async with one_runs_and_one_waits(tmp_path) as (here, waiting):
        third = ask(here, "third", "60")
        await waits(here, 2)
        gate = here.replica.own.gate
        gate.set(Door.CLOSED)
        await close(here, "first")
        # A newcomer is refused as ever.
        assert (await ask(here, "fourth", "10")).status_code == 425
        assert len(here.replica.budget.queue) == 2
        gate.set(Door.OPEN)
        assert (await waiting).status_code == 200
        await close(here, "second")
        assert (await third).status_code == 200
        here.replica.budget.account.check()


async def test_a_gate_that_nobody_passes_any_more_refuses_what_waits_at_once(tmp_path: Path) -> None:
    async with one_runs_and_one_waits(tmp_path) as (here, waiting):
        here.replica.own.gate.set(Door.UNSOUND)
        assert (await waiting).status_code == 503
        assert here.replica.budget.account.claimed == 60


async def test_a_client_that_says_too_much_claims_no_more_than_one_context_can_have(tmp_path: Path) -> None:
    engine = SmallCache()
    engine.info = msgspec.structs.replace(engine.info, max_model_len=40)
    async with small(tmp_path, engine=engine) as here:
        for key in "ab":
            await begun(here, key, str(EXPECTED_TOKENS_MAX))


async def test_claims_of_silent_sessions_are_reported_as_free_where_nothing_waits(tmp_path: Path) -> None:
    """Gateways place new sessions by it, also while this replica has no request that looks."""

    now = [0.0]
    async with small(tmp_path, monotonic=lambda: now[0]) as here:
        await begun(here, "first", "60")
        assert here.replica.report().kv_waits.claimed_tokens == 60
        now[0] = 1000.0
        assert here.replica.report().kv_waits.claimed_tokens == 0


async def test_equal_prompts_that_may_not_share_kv_are_both_claimed(tmp_path: Path) -> None:
    async with small(tmp_path) as here:
        for key in "ab":
            one = await ask(here, key, prompt="x" * 40, prompt_cache_isolation_key=key)
            assert one.status_code == 200
        assert here.replica.budget.account.live >= 80


async def test_a_turn_that_is_refused_leaves_the_claim_of_another_one_of_its_session(tmp_path: Path) -> None:
    async with small(tmp_path) as here:
        gate = here.replica.own.gate
        gate.set(Door.HELD)
        patient = ask(here, "both", "60")
        await here.until(lambda: gate.waiting == 1)
        refused = await here.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": "hey both", "max_tokens": 3},
            headers={HEADER_SESSION: "both", "x-fireworks-hot-load-drain-timeout": "0"},
        )
        assert refused.status_code == 425
        assert here.replica.budget.account.claimed == 60
        gate.set(Door.OPEN)
        assert (await patient).status_code == 200


async def test_a_request_of_several_prompts_and_choices_claims_all_of_them_while_it_runs(
    tmp_path: Path,
) -> None:
    async with small(tmp_path) as here:
        gate, account = here.replica.own.gate, here.replica.budget.account
        gate.set(Door.HELD)
        asked = [ask(here, "a")]
        await here.until(lambda: gate.waiting == 1)
        prompt = account.live
        asked.append(ask(here, "b", prompt=["hey b", "hey b"], n=2))
        await here.until(lambda: gate.waiting == 2)
        assert account.live == 3 * prompt + 3 * 3
        # Likewise of one that names no session.
        asked.append(ask(here, None, prompt=["hey c"] * 2))
        await here.until(lambda: gate.waiting == 3)
        assert account.claimed - account.live == 2 * prompt + 3
        gate.set(Door.OPEN)
        assert {(await one).status_code for one in asked} == {200}
        assert account.live == account.between


async def test_a_client_that_a_long_swap_refused_has_its_place_before_those_that_came_later(
    tmp_path: Path,
) -> None:
    now = [0.0]
    async with small(tmp_path, monotonic=lambda: now[0]) as here:
        await begun(here, "first", "60")
        impatient = {HEADER_SESSION: "third", "x-fireworks-hot-load-drain-timeout": "0"}
        body = {"model": MODEL, "prompt": "hey third", "max_tokens": 3}
        here.replica.own.gate.set(Door.HELD)
        refused = await here.http.post("/v1/completions", json=body, headers=impatient)
        assert refused.status_code == 425
        here.replica.own.gate.set(Door.OPEN)
        now[0] = 1.0
        fourth = ask(here, "fourth", "60")
        await waits(here, 1)
        now[0] = 2.0
        again = ask(here, "third", "60")
        await waits(here, 2)
        queue = here.replica.budget.queue
        assert [queue.position(("", key)) for key in ("third", "fourth")] == [1, 2]
        for key, answer in (("first", again), ("third", fourth)):
            await close(here, key)
            assert (await answer).status_code == 200


async def test_a_turn_that_waits_as_its_session_is_closed_goes_on_as_a_new_session(tmp_path: Path) -> None:
    async with small(tmp_path) as here:
        for key in ("old", "young"):
            await begun(here, key, "20")
        # The old one comes to more than anybody expected.
        long = ask(here, "old", prompt="x" * 95)
        assert (await long).status_code == 200
        turn = ask(here, "young")
        await waits(here, 1)
        await close(here, "young")
        assert len(here.replica.budget.queue) == 1
        assert not here.replica.budget.queue.find(("", "young")).begun  # type: ignore[union-attr]
        await close(here, "old")
        assert (await turn).status_code == 200
        here.replica.budget.account.check()
