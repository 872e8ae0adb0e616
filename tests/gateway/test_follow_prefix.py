"""Session keys that nobody knows, followed to where the beginning of their prompt is known when the request asks for that."""

from __future__ import annotations

from gateway_harness import Message, Stage, post, respond_ok, staged
from test_prefixes import chat, text

from midstream.fleet.prefixes import read_prompt

FOLLOW = "x-midstream-follow-prefix: 1\r\n"


async def ask(stage: Stage, body: bytes, key: str, headers: str = FOLLOW) -> tuple[str, str]:
    answer: Message = await stage.ask(post(body, headers=f"x-session-id: {key}\r\n{headers}"))
    assert answer.status == 200
    return answer.headers["x-midstream-replica"], answer.headers["x-midstream-route-reason"]


async def test_a_rollout_whose_key_changes_every_turn_stays_on_its_replica() -> None:
    async with staged(*[respond_ok] * 4) as stage:
        strangers = set()
        for number in range(8):
            turns = [text(f"question {number} ", 2000)]
            replica, reason = await ask(stage, chat(*turns), f"sampling:{number}.0")
            assert reason == "new"
            for turn in range(1, 6):
                turns.append(text(f"answer {number}.{turn} ", 600))
                followed = await ask(stage, chat(*turns), f"sampling:{number}.{turn}")
                assert followed == (replica, "prefix")
                assert await ask(stage, chat("short"), f"sampling:{number}.{turn}") == (replica, "sticky")
                strangers.add(await ask(stage, chat(*turns), f"other:{number}.{turn}", headers=""))
        assert {reason for _, reason in strangers} == {"new"}, "only who asks for it follows"
        assert len(strangers) == 4


async def test_a_known_key_stays_at_home_and_teaches_where_its_prompt_is() -> None:
    async with staged(*[respond_ok] * 3) as stage:
        home, _ = await ask(stage, chat("begin"), "known")
        body = chat(text("long ", 3000))
        elsewhere = home
        for number in range(50):
            elsewhere, _ = await ask(stage, body, f"k{number}", headers="")
            if elsewhere != home:
                break
        assert elsewhere != home
        prompt = read_prompt("", body)
        assert prompt is not None
        stage.gateway.proxy.deployments.default.prefixes.learn(prompt, elsewhere)
        assert await ask(stage, body, "known") == (home, "sticky")
        assert await ask(stage, body, "unknown") == (home, "prefix")


async def test_a_prompt_that_all_rollouts_begin_with_does_not_crowd_them_on_few_replicas() -> None:
    async with staged(*[respond_ok] * 8) as stage:
        system = text("the same for all ", 3000)
        for number in range(24):
            replica, _ = await ask(stage, chat(system, f"question {number}"), f"key {number}")
            # It goes on.
            next(view for view in stage.views if view.name == replica).replica.in_flight += 1
        assert sum(stage.in_flight()) == 24
        assert max(stage.in_flight()) <= 5, stage.in_flight()
        assert sum(load >= 2 for load in stage.in_flight()) >= 6, stage.in_flight()
        for view in stage.views:
            view.replica.in_flight = 0


async def test_an_overloaded_replica_is_not_followed() -> None:
    async with staged(*[respond_ok] * 3) as stage:
        body = chat(text("long ", 3000))
        replica, _ = await ask(stage, body, "a")
        view = next(view for view in stage.views if view.name == replica)
        view.replica.in_flight += 5
        other, reason = await ask(stage, body, "b")
        view.replica.in_flight -= 5
        assert (other != replica, reason) == (True, "new")


async def test_other_values_are_refused_by_name_and_the_replica_never_sees_the_header() -> None:
    async with staged(*[respond_ok] * 2) as stage:
        for value in ("0", "true", ""):
            answer = await stage.ask(post(headers=f"x-midstream-follow-prefix: {value}\r\n"))
            assert answer.status == 400
            assert answer.error["param"] == "x-midstream-follow-prefix"
        assert not any(mock.requests for mock in stage.mocks)
        await ask(stage, chat("x"), "a")
        (request,) = [request for mock in stage.mocks for request in mock.requests]
        assert "x-midstream-follow-prefix" not in request.headers
