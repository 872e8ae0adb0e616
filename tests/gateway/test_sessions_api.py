"""GET and DELETE of sessions through a gateway whose replicas hold a real session table."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from gateway_harness import Handler, Message, Peer, Stage, get, post
from reports import replica_report
from session_holders import Holder, all_usable, gateway, holders, home, until, until_known, where

from midstream.replica.sessions import Sessions, stamp_of

ALICE, BOB = "authorization: Bearer alice\r\n", "x-api-key: bob\r\n"


async def ask(stage: Stage, path: str, headers: str = "", method: str = "GET") -> tuple[int, Any]:
    answer = await stage.ask(get(path, headers, method))
    return answer.status, json.loads(answer.body)


async def test_a_session_shows_what_its_turns_were_like_wherever_they_were() -> None:
    async with holders(2) as made, gateway(made) as stage:
        await all_usable(stage)
        first, _ = await where(stage, "a/b c")
        await where(stage, "a/b c")
        next(view for view in stage.views if view.name == first).admitted = False
        second, _ = await where(stage, "a/b c")
        status, shown = await ask(stage, "/v1/sessions/a%2Fb%20c")
        assert status == 200
        assert shown["opened_at"] <= shown["used_at"]
        held = {one["replica"]: one["turns"] for one in shown["replicas"]}
        assert held == {first: 2, second: 1}
        expected = {
            "id": "a/b c", "object": "session", "deployment": "accounts/local/deployments/default",
            "replica": second, "turns": 3, "open_turns": 0, "prompt_tokens": 24, "cached_prompt_tokens": 18,
            "cached_share": 0.75, "generated_tokens": 15, "generation_s": 3.0,
            "mean_time_to_first_token_s": 0.25, "last_time_to_first_token_s": 0.25, "mean_inter_token_s": 0.25,
            "unreachable": [],
        }  # fmt: skip
        assert {name: shown[name] for name in expected} == expected


async def test_sessions_are_listed_in_pages_over_all_replicas() -> None:
    async with holders(3) as made, gateway(made) as stage:
        await all_usable(stage)
        keys = [f"s{number:02}" for number in range(11)]
        for key in keys:
            await where(stage, key)
        seen: list[str] = []
        more, after = True, ""
        while more:
            _, page = await ask(stage, f"/v1/sessions?limit=4&after={after}")
            seen += [one["id"] for one in page["data"]]
            more, after = page["has_more"], seen[-1]
        assert seen == keys
        status, refused = await ask(stage, "/v1/sessions?limit=0")
        assert (status, refused["error"]["param"]) == (400, "limit")


async def test_a_session_that_is_deleted_is_closed_on_its_replica_and_new_for_every_gateway() -> None:
    async with holders(2) as made, gateway(made) as stage, gateway(made) as other:
        await all_usable(stage)
        await all_usable(other)
        replica, _ = await where(stage, "s")
        await until_known(other, "s", replica)
        status, shown = await ask(stage, "/v1/sessions/s", method="DELETE")
        assert (status, shown["deleted"], shown["replicas"]) == (200, True, [replica])
        assert home(stage, "s") is None
        await until_known(other, "s", None)
        assert [len(holder.sessions) for holder in made] == [0, 0]
        for method in ("GET", "DELETE"):
            status, shown = await ask(stage, "/v1/sessions/s", method=method)
            assert (status, shown["error"]["code"]) == (404, "not_found_error")
        assert (await where(other, "s"))[1] == "new"


def asked_to_close(made: Sequence[Holder]) -> list[int]:
    """How often each replica was."""
    of = " /replica/sessions/close "
    return [sum(of in request.start for request in holder.mock.requests) for holder in made]


async def test_only_the_replicas_that_hold_turns_of_a_session_are_asked_to_close_it() -> None:
    async with holders(4) as made, gateway(made) as stage:
        await all_usable(stage)
        first, _ = await where(stage, "s")
        await where(stage, "stays")
        at = [holder.name for holder in made].index(first)
        await ask(stage, "/v1/sessions/s", method="DELETE")
        assert asked_to_close(made) == [int(number == at) for number in range(4)]


async def test_a_session_that_moved_is_closed_wherever_it_was() -> None:
    """Also by a gateway that did not move it, and where a replica served one turn of it in passing."""
    async with holders(4) as made, gateway(made) as stage, gateway(made) as other:
        await all_usable(stage)
        await all_usable(other)
        homes = [(await where(stage, "s"))[0]]
        for _ in range(2):
            next(view for view in stage.views if view.name == homes[-1]).admitted = False
            homes.append((await where(stage, "s"))[0])
        assert len(set(homes)) == 3
        await until_known(other, "s", homes[-1])
        status, shown = await ask(other, "/v1/sessions/s", method="DELETE")
        assert (status, sorted(shown["replicas"])) == (200, sorted(homes))
        assert [len(holder.sessions) for holder in made] == [0] * 4
        assert sum(asked_to_close(made)) == 3


async def test_a_session_is_closed_where_a_turn_of_it_failed_once_it_was_let_in() -> None:
    """The gateway takes it for not begun there. The replica holds it all the same."""
    async with holders(3) as made, gateway(made) as stage:
        await all_usable(stage)
        failed: list[Holder] = []

        def fails(holder: Holder) -> Handler:
            serves = holder.mock.handler

            async def handler(request: Message, peer: Peer) -> None:
                if failed or "completions" not in request.start:
                    await serves(request, peer)
                    return
                failed.append(holder)
                with holder.sessions.turn(("", "s"), stamp_of(request.headers)):
                    await until(lambda: home(stage, "s") == holder.name)
                peer.respond(b"{}", "503 Service Unavailable")

            return handler

        for holder in made:
            holder.mock.handler = fails(holder)
        went, _ = await where(stage, "s")
        assert went != failed[0].name
        status, shown = await ask(stage, "/v1/sessions/s", method="DELETE")
        assert (status, sorted(shown["replicas"])) == (200, sorted({went, failed[0].name}))
        assert [len(holder.sessions) for holder in made] == [0] * 3


async def test_a_replica_that_did_not_answer_is_asked_again_when_a_session_of_that_key_is_closed() -> None:
    async with holders(3) as made, gateway(made) as stage:
        await all_usable(stage)
        first, _ = await where(stage, "s")
        at = next(holder for holder in made if holder.name == first)
        serves, deaf = at.mock.handler, [True]

        async def handler(request: Message, peer: Peer) -> None:
            if deaf and "/replica/sessions/close" in request.start:
                peer.abort()
            else:
                await serves(request, peer)

        at.mock.handler = handler
        next(view for view in stage.views if view.name == first).admitted = False
        second, _ = await where(stage, "s")
        _, shown = await ask(stage, "/v1/sessions/s", method="DELETE")
        assert (shown["replicas"], shown["unreachable"]) == ([second], [first])
        deaf.clear()
        assert (await where(stage, "s"))[1] == "new"
        await ask(stage, "/v1/sessions/s", method="DELETE")
        assert [len(holder.sessions) for holder in made] == [0] * 3


async def test_a_replica_whose_event_stream_is_broken_is_asked_to_close_a_session() -> None:
    """Its last report stays for a while. What another gateway brought there meanwhile is in none."""
    async with holders(2) as made, gateway(made) as stage:
        await all_usable(stage)
        first, _ = await where(stage, "s")
        away = next(holder for holder in made if holder.name != first)
        away.speaks.clear()
        away.mock.peers[0].abort()
        await until(lambda: sum("/replica/events" in request.start for request in away.mock.requests) == 2)
        with away.sessions.turn(("", "s"), round(time.time() * 2000)):
            pass
        _, shown = await ask(stage, "/v1/sessions/s", method="DELETE")
        assert (shown["replicas"], len(away.sessions)) == ([holder.name for holder in made], 0)


async def test_all_are_asked_to_close_a_session_if_its_home_does_not_know_it() -> None:
    """A gateway that stood still may not have heard yet where another one brought it."""
    async with holders(3) as made, gateway(made) as stage:
        await all_usable(stage)
        home, _ = await where(stage, "s")
        away = next(holder for holder in made if holder.name != home)
        # Nothing is reported of another table.
        next(holder for holder in made if holder.name == home).sessions = Sessions()
        with away.sessions.turn(("", "s"), 1):
            pass
        status, shown = await ask(stage, "/v1/sessions/s", method="DELETE")
        assert (status, shown["replicas"]) == (200, [away.name])


async def test_a_replica_that_began_again_is_asked_for_what_it_had_before() -> None:
    """Turns outlive the engine, and sessions do not: nothing tells of them."""
    async with holders(3) as made, gateway(made) as stage:
        await all_usable(stage)
        home, _ = await where(stage, "s")
        other = next(index for index, holder in enumerate(made) if holder.name != home)
        stage.views[other].replica.hear(replica_report(made[other].name, "b2"))
        await ask(stage, "/v1/sessions/s", method="DELETE")
        assert {made[index].name for index, asked in enumerate(asked_to_close(made)) if asked} == {
            home,
            made[other].name,
        }


async def test_a_gateway_that_has_just_started_does_not_say_that_a_session_is_missing() -> None:
    async with holders(0) as made, gateway(made) as stage:
        stage.gateway.proxy.deployments.catching_up = True
        for method in ("GET", "DELETE"):
            status, shown = await ask(stage, "/v1/sessions/s", method=method)
            assert (status, shown["error"]["code"]) == (503, "replica_unavailable")
        status, shown = await ask(stage, "/v1/responses/resp_1")
        assert (status, shown["error"]["code"]) == (503, "replica_unavailable")
        stage.gateway.proxy.deployments.catching_up = False
        for path in ("/v1/sessions/s", "/v1/responses/resp_1"):
            assert (await ask(stage, path))[0] == 404


async def test_a_tenant_sees_and_closes_its_own_sessions_only() -> None:
    async with holders(2) as made, gateway(made, api_keys=("alice", "bob")) as stage:
        await all_usable(stage)
        for who, key in ((ALICE, "mine"), (ALICE, "same"), (BOB, "same")):
            assert (await stage.ask(post(headers=f"x-session-id: {key}\r\n{who}"))).status == 200
        assert [one["id"] for one in (await ask(stage, "/v1/sessions", BOB))[1]["data"]] == ["same"]
        assert (await ask(stage, "/v1/sessions/mine", BOB))[0] == 404
        assert (await ask(stage, "/v1/sessions/same", BOB, "DELETE"))[0] == 200
        listed = (await ask(stage, "/v1/sessions", ALICE))[1]["data"]
        assert [one["id"] for one in listed] == ["mine", "same"]
        assert (await ask(stage, "/v1/sessions"))[0] == 401


@pytest.mark.parametrize("key", ["%00", "a%09b", "x" * 513])
async def test_what_cannot_be_a_key_is_refused(key: str) -> None:
    async with holders(1) as made, gateway(made) as stage:
        await all_usable(stage)
        status, shown = await ask(stage, f"/v1/sessions/{key}")
        assert (status, shown["error"]["param"]) == (400, "key")


async def test_a_replica_that_does_not_answer_is_named_and_the_others_are_shown() -> None:
    async with holders(2) as made, gateway(made) as stage:
        await all_usable(stage)
        names = {key: (await where(stage, key))[0] for key in (f"s{n}" for n in range(12))}
        made[1].mock.stop()
        _, page = await ask(stage, "/v1/sessions")
        assert page["unreachable"] == ["replica-1"]
        assert [one["id"] for one in page["data"]] == sorted(k for k, v in names.items() if v == "replica-0")
        lost = next(key for key, name in names.items() if name == "replica-1")
        status, shown = await ask(stage, f"/v1/sessions/{lost}")
        assert (status, shown["error"]["code"]) == (503, "replica_unavailable")


async def test_metrics_have_what_turns_were_like_without_a_session_in_any_label() -> None:
    async with holders(1) as made, gateway(made) as stage:
        await all_usable(stage)
        for _ in range(2):
            await where(stage, "secret-key")
        made[0].sessions.close(("", "secret-key"))
        view = stage.views[0]
        await until(
            lambda: (
                view.replica.trajectories is not None
                and sum(view.replica.trajectories.measures["turns_per_session"].counts) == 1
            )
        )
        text = (await stage.ask(get("/metrics"))).body.decode()
        expected = {
            "turn_time_to_first_token_seconds": 0.5, "turn_inter_token_seconds": 0.5,
            "turn_generation_seconds": 2.0, "turn_cached_prompt_ratio": 1.5, "session_turns": 2.0,
        }  # fmt: skip
        for name, total in expected.items():
            assert f'midstream_{name}_sum{{replica="replica-0"}} {total}\n' in text
        bucket = 'midstream_turn_time_to_first_token_seconds_bucket{le="%s",replica="replica-0"} %s\n'
        assert bucket % ("0.1", "0.0") in text
        assert bucket % ("0.25", "2.0") in text
        labels = set(re.findall(r"midstream_turn_[a-z_]+\{([^}]*)\}", text))
        names = {part.split("=")[0] for found in labels for part in found.split(",")}
        assert names == {"le", "replica", "finish"}
        assert "secret-key" not in text


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ("{}", "reward: this field is required", "reward"),
        ('{"reward": "1"}', "reward: expected float, got str", "reward"),
        ('{"reward": 1, "turn": 0}', "turn: expected int >= 1", "turn"),
        ('{"reward": 1, "turns": 2}', "'turns'", "turns"),
        ('{"reward": 1, "metadata": {"a": "%s"}}' % ("x" * 5000), "metadata: must be at most", "metadata"),
        ("[]", "the body must be a JSON object", None),
        (
            '{"reward": 1, "metadata": {"a": %s}}' % ("[" * 950 + "]" * 950),
            "the body is not valid JSON",
            None,
        ),
    ],
)
async def test_a_reward_that_is_none_is_refused_by_its_field(body: str, said: str, param: str | None) -> None:
    async with holders(1) as made, gateway(made) as stage:
        await all_usable(stage)
        request = post(path="/v1/sessions/s/reward", body=body.encode())
        answer = await stage.ask(request)
        error = json.loads(answer.body)["error"]
        assert (answer.status, error["param"]) == (400, param)
        assert said in error["message"]
