"""Prompts without a session key: followed to where their beginning is known."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from typing import Any

import pytest
from gateway_harness import Message, Peer, Stage, post, respond_ok, staged
from session_holders import until

from midstream.core.types import Session
from midstream.fleet import prefixes
from midstream.fleet.prefixes import BOUNDS, FIRST_BOUND, LAST_BOUND, PrefixTable, read_prompt


def chat(*turns: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": turn} for turn in turns]
    return json.dumps({"model": "m", **more, "messages": messages, "temperature": 1}).encode()


def text(seed: str, size: int) -> str:
    return (seed * size)[:size]


def test_a_prompt_that_goes_on_is_found_and_another_is_not() -> None:
    table = PrefixTable()
    first, second = text("abc", 4000), text("xyz", 3000)
    prompt = read_prompt("", chat(first))
    assert prompt is not None
    table.learn(prompt, "r1")
    longer = read_prompt("", chat(first, second, top_p=0.5))
    assert longer is not None
    found = table.find(longer)
    assert found is not None
    assert found[0] == "r1"
    assert 0.5 <= found[1] <= 4100 / longer.size
    for other in (chat(text("q", 4000)), chat(first[:1000], text("q", 3000)), chat(first, text("q", 9000))):
        other_prompt = read_prompt("", other)
        assert other_prompt is not None
        assert table.find(other_prompt) is None


def test_a_short_prompt_is_followed_for_who_asks() -> None:
    table = PrefixTable()
    tokens = list(range(100, 140))

    def body(count: int) -> bytes:
        return json.dumps({"model": "m", "n": 1, "temperature": 1, "prompt": tokens[:count]}).encode()

    for count in range(20, 40):
        prompt = read_prompt("", body(count), short=True)
        assert prompt is not None
        assert count == 20 or table.find(prompt) is not None, count
        table.learn(prompt, "r1")
        assert read_prompt("", body(count)) is None
    long, asked = (read_prompt("", chat(text("abc", 4000)), short=short) for short in (False, True))
    assert long is not None
    assert asked is not None
    table.learn(long, "r2")
    assert table.find(asked) == table.find(long) == ("r2", pytest.approx(1, abs=0.3), True, False)


def test_a_beginning_that_several_replicas_computed_is_not_held_to_be_known_on_one_alone() -> None:
    table = PrefixTable()
    system = text("the same for all ", 2000)
    mine, other = (read_prompt("", chat(system, text(name, 1000))) for name in ("mine", "other"))
    assert mine is not None
    assert other is not None
    table.learn(mine, "r1")
    assert table.find(other) == ("r1", pytest.approx(0.6, abs=0.1), True, False)
    table.learn(other, "r2")
    table.learn(mine, "r1")
    assert table.find(mine) == ("r1", pytest.approx(0.9, abs=0.1), True, False), (
        "all of it is known there alone"
    )
    third = read_prompt("", chat(system, text("third", 1000)))
    assert third is not None
    assert table.find(third) == ("r1", pytest.approx(0.6, abs=0.1), False, False)


def test_a_beginning_is_shared_while_another_request_with_it_runs() -> None:
    table = PrefixTable()
    system = text("the same for all ", 2000)
    mine, other = (read_prompt("", chat(system, text(name, 1000))) for name in ("mine", "other"))
    assert mine is not None
    assert other is not None
    table.begin(mine)
    table.learn(mine, "r1")
    table.begin(mine)
    for prompt in (mine, other):
        assert table.find(prompt) == ("r1", pytest.approx(0.75, abs=0.25), True, True)
    table.end(mine)
    table.begin(other)
    table.end(mine)
    found = table.find(mine)
    assert found is not None
    assert not found.shared, "the other one shares the system prompt only, and more of it is known"
    table.end(other)
    assert not table._running


def test_tenants_do_not_follow_each_other() -> None:
    table = PrefixTable()
    mine, theirs = read_prompt("a", chat(text("x", 900))), read_prompt("b", chat(text("x", 900)))
    assert mine is not None
    assert theirs is not None
    table.learn(mine, "r1")
    assert table.find(theirs) is None


@pytest.mark.parametrize(
    "body",
    [b"", chat("short"), b'{"input":"' + b"x" * 2000 + b'"}', b'{"a":1, "prompt" : "short"}' + b" " * 400],
)
def test_what_is_short_or_no_prompt_is_not_looked_at(body: bytes) -> None:
    assert read_prompt("", body) is None


def test_beginnings_of_a_huge_prompt_and_the_table_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = read_prompt("", b'{"prompt":"' + b"x" * (3 * prefixes.LAST_BOUND) + b'"}')
    assert prompt is not None
    assert len(prompt.beginnings) == len(BOUNDS) - BOUNDS.index(FIRST_BOUND) < 40
    table = PrefixTable(10)
    table.learn(prompt, "r1")
    assert len(table) == 10
    assert table.find(prompt) == ("r1", pytest.approx(1, abs=0.3), True, False)


async def ask(stage: Stage, body: bytes, headers: str = "") -> tuple[str, str]:
    answer: Message = await stage.ask(post(body, headers=headers))
    assert answer.status == 200
    return answer.headers["x-midstream-replica"], answer.headers["x-midstream-route-reason"]


async def test_turns_without_a_key_stay_together_and_bodies_pass_unchanged() -> None:
    async with staged(*[respond_ok] * 4) as stage:
        for number in range(8):
            turns = [text(f"question {number} ", 2000)]
            replica, reason = await ask(stage, chat(*turns))
            assert reason == "balanced"
            for turn in range(5):
                turns.append(text(f"answer {number}.{turn} ", 600))
                body = chat(*turns)
                assert await ask(stage, body) == (replica, "prefix")
                mock = stage.mocks[int(replica[-1])]
                assert mock.requests[-1].body == body
        assert [len(mock.requests) for mock in stage.mocks] == [12] * 4


async def test_a_key_wins_over_a_known_prompt_and_a_replica_that_is_gone_is_not_followed() -> None:
    async with staged(*[respond_ok] * 3) as stage:
        body = chat(text("long ", 3000))
        replica, _ = await ask(stage, body)
        assert (await ask(stage, body, "x-session-id: s\r\n"))[1] == "new"
        next(view for view in stage.views if view.name == replica).admitted = False
        moved, reason = await ask(stage, body)
        assert (moved != replica, reason) == (True, "balanced")
        assert await ask(stage, body) == (moved, "prefix")


async def test_an_overloaded_replica_is_not_followed() -> None:
    async with staged(*[respond_ok] * 3) as stage:
        body = chat(text("long ", 3000))
        replica, _ = await ask(stage, body)
        view = next(view for view in stage.views if view.name == replica)
        view.replica.in_flight += 5
        assert (await ask(stage, body))[1] == "balanced"
        view.replica.in_flight -= 5


async def test_following_can_be_switched_off() -> None:
    async with staged(*[respond_ok] * 3, follow_prefixes=False) as stage:
        body = chat(text("long ", 3000))
        reasons = [(await ask(stage, body))[1] for _ in range(3)]
        assert reasons == ["balanced"] * 3
        assert len(body) > FIRST_BOUND


@pytest.mark.parametrize(("size", "replicas"), [(8, 2), (8, 4), (16, 4), (16, 2)])
async def test_a_group_of_samples_of_one_prompt_spreads_over_replicas_by_load(
    size: int, replicas: int
) -> None:
    async def held(request: Message, peer: Peer) -> None:
        await over.wait()
        await respond_ok(request, peer)

    over = asyncio.Event()
    async with staged(*[held] * replicas) as stage:

        def placed(count: int) -> bool:
            return sum(stage.in_flight()) == count

        body = chat(text("solve this ", 3000), n=1)
        asked = []
        for number in range(size):
            asked.append(asyncio.create_task(ask(stage, body)))
            await until(partial(placed, number + 1))
        assert stage.in_flight() == [size // replicas] * replicas
        over.set()
        reasons = [reason for _, reason in await asyncio.gather(*asked)]
        assert set(reasons) == {"balanced", "prefix"}
        assert not stage.gateway.proxy.deployments.default.prefixes._running
        turn = chat(text("solve this ", 3000), text("thinking ", 500), n=1)
        assert (await ask(stage, turn))[1] == "prefix", "a later turn follows as before"


# -- groups of sessions


def group_of(tenant: str, body: bytes, table: PrefixTable | None = None) -> Session | None:
    found = (table or PrefixTable()).group(tenant, body)
    return None if found is None else found.key


def test_a_group_is_of_one_prompt_to_its_end() -> None:
    system = text("the same for all ", 40_000)
    one = group_of("", chat(system, "task 1"))
    assert one is not None
    assert group_of("", chat(system, "task 1", seed=7, user="somebody else")) == one
    assert group_of("t", chat(system, "task 1")) != one, "another tenant"
    tasks = {group_of("", chat(system, f"task {number}")) for number in range(100)}
    assert len(tasks) == 100, "a system prompt makes no group"
    ids = json.dumps({"prompt": list(range(1000)), "messages_of": {"messages": 1}}).encode()
    assert group_of("", ids) is not None


@pytest.mark.parametrize("name", ["messages", "prompt", "input", "token_ids", "input_ids", "text"])
def test_each_wire_has_groups(name: str) -> None:
    one, other = (
        group_of("", json.dumps({"text": {"format": "x" * 600}, name: [*range(1000), end]}).encode())
        for end in (1, 2)
    )
    assert one is not None
    assert other is not None
    assert one != other


@pytest.mark.parametrize(
    "body",
    [
        b"",
        chat("short"),
        chat("short", metadata=text("long ", 2000)),
        b'{"messages":[' + b"1," * 1000,
        b"[" * 3000,
        chat(text("x", LAST_BOUND)),
    ],
)
def test_what_is_short_or_long_or_no_prompt_has_no_group(body: bytes) -> None:
    assert group_of("", body) is None


@pytest.mark.parametrize("seed", range(20))
def test_what_was_asked_before_changes_no_group(seed: int) -> None:
    """Gateways agree on groups, whatever each has seen. Long prompts of before are compared instead of digested."""
    draw, table = random.Random(seed), PrefixTable()
    long = text("the same for all ", 9000)

    def body() -> bytes:
        task = draw.choice(["", "a", "ab", 'ab"', "ab\\", "b"])
        prompt = long + task
        message, part = {"role": "user", "content": prompt}, {"type": "text", "text": prompt}
        said: dict[str, Any] = draw.choice(
            [
                {"messages": [message]},
                {"messages": [message, {"role": "user", "content": "x"}]},
                {"messages": [{"role": "user", "content": [part]}]},
                {"prompt": prompt},
                {"prompt": [*range(2500), len(task)]},
                {"input": prompt, "text": {"format": task}},
                {"text": prompt},
            ]
        )
        return json.dumps({"model": "m"} | said | {"seed": draw.random()}).encode()

    groups = []
    for _ in range(60):
        asked, tenant = body(), draw.choice(["", "t"])
        groups.append(group_of(tenant, asked, table))
        assert groups[-1] == group_of(tenant, asked)
    assert len(set(groups)) > 20


async def test_sessions_of_one_prompt_go_to_one_replica_and_those_of_a_system_prompt_do_not() -> None:
    system = text("the same for all ", 3000)

    async def placed(stage: Stage, key: str, task: str) -> str:
        answer = await stage.ask(post(chat(system, task, seed=len(key)), headers=f"x-session-id: {key}\r\n"))
        assert (answer.status, answer.headers["x-midstream-route-reason"]) == (200, "new")
        return answer.headers["x-midstream-replica"]

    async with staged(*[respond_ok] * 4) as stage:
        for task in ("one", "two", "three"):
            group = {await placed(stage, f"{task}-{number}", task) for number in range(3)}
            assert len(group) == 1, task
        assert len({await placed(stage, f"alone-{number}", f"{number}") for number in range(16)}) == 4
    async with staged(*[respond_ok] * 4, follow_prefixes=False) as stage:
        assert len({await placed(stage, f"off-{number}", "one") for number in range(8)}) > 1
