"""Why replicas refuse, one reason at a time: what follows for a request, a known session, and the rest of a stream."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import NamedTuple

import pytest
from gateway_harness import Handler, Message, Peer, Stage, post, respond_ok, staged
from reports import replica_report
from test_resume import (
    BODY,
    WHOLE,
    WRITES,
    answer,
    error,
    framed,
    losing,
    numbers,
    resumes,
    troubled,
)

from midstream.core.errors import (
    AnotherBoot,
    EngineLost,
    HandedOver,
    MidstreamError,
    Overloaded,
    PolicyNotLoaded,
    ReplicaUnavailable,
    SnapshotTransition,
)
from midstream.core.responses import PreviousNotFound
from midstream.core.resumption import CannotResume, given_up
from midstream.core.versions import ConstraintNotMet, Refusal, VersionConstraint
from midstream.proxy.refusals import answer as answer_of
from midstream.proxy.request_facts import PLACED_AGAIN_MAX
from midstream.proxy.request_state import RULINGS, RequestEvent, RequestPhase, ruling

REPLICAS = 6
SESSION = "x-multi-turn-session-id: s1\r\n"
HANDED = (
    '{"reason":"wait","tokens":9,"needs":9,"saved_s":9.0,"age_s":9.0,"begun":true,"prefill_tokens_s":99.0}'
)
UNFIT = Refusal("other", constraint=VersionConstraint("base", wait_s=0.0))
ERRORS: dict[RequestEvent, MidstreamError] = {
    RequestEvent.ENGINE_LOST: EngineLost("the engine stopped"),
    RequestEvent.OTHER_BOOT: AnotherBoot("it began anew"),
    RequestEvent.POLICY_NOT_LOADED: PolicyNotLoaded("it is not loaded"),
    RequestEvent.UNFIT: ConstraintNotMet("another one serves", UNFIT),
    RequestEvent.TRANSITION: SnapshotTransition("a snapshot is being switched"),
    RequestEvent.BUSY: Overloaded("it is full"),
    RequestEvent.UNAVAILABLE: ReplicaUnavailable("it is not ready"),
    RequestEvent.HELD_ELSEWHERE: PreviousNotFound("resp_1", "replica-1"),
    RequestEvent.CANNOT_RESUME: CannotResume("not this stream"),
    RequestEvent.HANDED_OVER: HandedOver(HANDED),
}


class Case(NamedTuple):
    """asked: replicas that are asked when all refuse. status: what the client then gets. once: when one alone refuses.
    known: as `once`, of a session that lives on that replica. resumed: replicas that are asked for the rest of a stream when
    all refuse. code: of the error that ends it."""

    asked: int
    status: int
    once: int
    known: int
    resumed: int
    code: str = "engine_error"


REST = REPLICAS - 1
CASES = {
    RequestEvent.ENGINE_LOST: Case(2, 422, 200, 200, 1, "request_lost_replicas"),
    RequestEvent.OTHER_BOOT: Case(REPLICAS, 503, 200, 200, REST),
    RequestEvent.POLICY_NOT_LOADED: Case(PLACED_AGAIN_MAX + 1, 503, 200, 200, PLACED_AGAIN_MAX + 1),
    RequestEvent.UNFIT: Case(REPLICAS, 409, 200, 200, REST),
    RequestEvent.TRANSITION: Case(1, 425, 425, 425, REST),
    RequestEvent.BUSY: Case(2, 429, 200, 429, REST),
    RequestEvent.UNAVAILABLE: Case(2, 503, 200, 503, REST),
    RequestEvent.HELD_ELSEWHERE: Case(2, 404, 200, 200, REST),
    RequestEvent.HANDED_OVER: Case(2, 503, 200, 200, REST),
    # Of no request: it is an answer like others.
    RequestEvent.CANNOT_RESUME: Case(1, 409, 409, 409, REST),
}
EACH = pytest.mark.parametrize("reason", list(RULINGS), ids=str)


def refuse(reason: RequestEvent, peer: Peer) -> None:
    said = ERRORS[reason]
    headers = "".join(f"{name}: {value}\r\n" for name, value in said.headers().items())
    peer.respond(json.dumps(said.body()).encode(), f"{said.status} X", headers)


def refusing(reason: RequestEvent, times: int = 99) -> Handler:
    """Replicas that refuse so many requests in all."""
    left = [times]

    async def handler(request: Message, peer: Peer) -> None:
        left[0] -= 1
        if left[0] >= 0:
            refuse(reason, peer)
        else:
            await respond_ok(request, peer)

    return handler


def path(reason: RequestEvent) -> str:
    return "/v1/responses" if reason is RequestEvent.HELD_ELSEWHERE else "/v1/completions"


def asked(stage: Stage) -> int:
    return sum(len(mock.requests) for mock in stage.mocks)


@EACH
def test_each_reason_is_read_from_an_answer_and_has_a_ruling_in_both_phases(reason: RequestEvent) -> None:
    said = ERRORS[reason]
    headers = [(name.encode(), value.encode()) for name, value in said.headers().items()]
    assert answer_of(RequestPhase.RESUME_SENT, said.status, headers) is reason
    assert ruling(RequestPhase.RESUME_HELD, reason)
    first, _ = RULINGS[reason]
    if first is None:
        assert answer_of(RequestPhase.SENT, said.status, headers) is RequestEvent.HEAD
    else:
        assert answer_of(RequestPhase.SENT, said.status, headers) is reason
        assert ruling(RequestPhase.HELD, reason) is first


def test_what_is_no_refusal_is_the_clients_and_never_the_rest_of_a_stream() -> None:
    assert set(CASES) == set(ERRORS) == set(RULINGS)
    for status in (200, 400, 401, 404, 409, 413, 422, 500):
        assert answer_of(RequestPhase.SENT, status, []) is RequestEvent.HEAD
        assert answer_of(RequestPhase.RESUME_SENT, status, []) is RequestEvent.CANNOT_RESUME
    assert answer_of(RequestPhase.RESUME_SENT, 200, [(b"transfer-encoding", b"chunked")]) is RequestEvent.HEAD


@EACH
async def test_a_request_that_all_refuse_is_shown_to_so_many(reason: RequestEvent) -> None:
    async with staged(*[refusing(reason)] * REPLICAS) as stage:
        said = await stage.ask(post(path=path(reason)))
        assert (said.status, asked(stage)) == (CASES[reason].status, CASES[reason].asked)
        suspects = int(reason is RequestEvent.ENGINE_LOST)
        assert repr(stage.gateway.proxy.suspects) == f"Suspects({suspects} requests, {suspects} refused)"


@EACH
@pytest.mark.parametrize("known", [False, True])
async def test_a_request_that_one_replica_refuses_is_served_by_another_or_the_client_hears_why(
    reason: RequestEvent, known: bool
) -> None:
    async with staged(respond_ok, respond_ok, respond_ok) as stage:
        headers = SESSION if known else ""
        if known:
            assert (await stage.ask(post(headers=headers))).status == 200
        refuses = refusing(reason, 1)
        for mock in stage.mocks:
            mock.handler = refuses
        before = asked(stage)
        said = await stage.ask(post(path=path(reason), headers=headers))
        wanted = CASES[reason].known if known else CASES[reason].once
        assert said.status == wanted
        assert asked(stage) - before == (2 if wanted == 200 else 1)
        if wanted != 200:
            assert said.error["message"] == ERRORS[reason].message
        gone = sum(view.report is None for view in stage.views)
        assert gone == int(reason in (RequestEvent.ENGINE_LOST, RequestEvent.OTHER_BOOT))


@EACH
async def test_the_rest_of_a_stream_goes_on_at_another_replica_when_one_refuses_it(
    reason: RequestEvent,
) -> None:
    async def trouble(request: Message, peer: Peer) -> None:
        refuse(reason, peer)

    async with staged(*[troubled(trouble)] * 3) as stage:
        events, complete = await answer(stage)
        if CASES[reason].code == "engine_error":
            assert (events, complete) == WHOLE
            assert len(resumes(stage)) == 2
        else:
            assert (events[:-1], complete) == (numbers(0, 2), False)


@EACH
async def test_the_rest_of_a_stream_that_all_refuse_is_shown_to_so_many(reason: RequestEvent) -> None:
    async def trouble(request: Message, peer: Peer) -> None:
        refuse(reason, peer)

    async with staged(*[troubled(trouble, 99)] * REPLICAS) as stage:
        events, complete = await answer(stage)
        assert (events[:-1], complete) == (numbers(0, 2), False)
        said = error(events, CASES[reason].code)
        assert len(resumes(stage)) == CASES[reason].resumed
        if CASES[reason].resumed == REST and reason is not RequestEvent.OTHER_BOOT:
            assert ERRORS[reason].message in said


# -- engines that are lost


async def loses_its_engine(request: Message, peer: Peer) -> None:
    refuse(RequestEvent.ENGINE_LOST, peer)


async def test_a_stream_that_costs_an_engine_wherever_it_goes_on_costs_two_of_six() -> None:
    async with staged(*[troubled(loses_its_engine, 99)] * REPLICAS) as stage:
        events, complete = await answer(stage)
        assert (events[:-1], complete) == (numbers(0, 2), False)
        error(events, "request_lost_replicas")
        assert asked(stage) == 2
        assert (await stage.ask(post(BODY))).status == 422
        assert asked(stage) == 2


async def test_a_replica_that_gives_a_stream_up_is_not_lost_with_it() -> None:
    """Its weights failed their check under it. One engine that dies then makes no suspect of the stream."""

    async def gives_up(request: Message, peer: Peer) -> None:
        if "/replica/resume" in request.start:
            refuse(RequestEvent.ENGINE_LOST, peer)
        else:
            await losing(WRITES[0] + WRITES[1] + framed(given_up()))(request, peer)

    async with staged(*[gives_up] * 2) as stage:
        events, complete = await answer(stage)
        assert (events[:-1], complete) == (numbers(0, 2), False)
        error(events, "engine_error")
        assert repr(stage.gateway.proxy.suspects) == "Suspects(0 requests, 0 refused)"


async def test_the_rest_of_a_stream_that_was_given_up_is_asked_for_without_that_word() -> None:
    async with staged(*[losing(WRITES[0] + framed(given_up()), 1)] * 2) as stage:
        assert await answer(stage) == WHOLE
        (told,) = resumes(stage)
        assert "given up" not in told["state"]


async def test_three_such_streams_at_once_cost_no_more_than_two_each() -> None:
    async with staged(*[troubled(loses_its_engine, 99)] * REPLICAS) as stage:
        for ended in await asyncio.gather(*[answer(stage) for _ in range(3)]):
            assert ended[1] is False
        assert asked(stage) <= 6
        assert max(Counter(told["lost"] for told in resumes(stage)).values()) <= 3


async def test_an_engine_that_an_answer_says_is_gone_loses_its_sessions_at_once_and_no_client_sees_it() -> (
    None
):
    async with staged(respond_ok, respond_ok) as stage:
        keys = [f"x-multi-turn-session-id: s{number}\r\n" for number in range(64)]
        homes = [(await stage.ask(post(headers=key))).headers["x-midstream-replica"] for key in keys]
        stage.mocks[0].handler = loses_its_engine
        before = len(stage.mocks[0].requests)
        first = keys[homes.index("replica-0")]
        assert (await stage.ask(post(headers=first))).status == 200
        again = await asyncio.gather(*[stage.ask(post(headers=key)) for key in keys])
        assert [said.status for said in again] == [200] * len(keys)
        assert {said.headers["x-midstream-replica"] for said in again} == {"replica-1"}
        assert len(stage.mocks[0].requests) == before + 1, "nobody else is sent to an engine that is gone"
        assert repr(stage.gateway.proxy.suspects) == "Suspects(0 requests, 0 refused)"


async def test_sessions_under_which_an_engine_dies_are_all_served_elsewhere() -> None:
    async with staged(respond_ok, respond_ok) as stage:
        keys = [f"x-multi-turn-session-id: s{number}\r\n" for number in range(64)]
        homes = [(await stage.ask(post(headers=key))).headers["x-midstream-replica"] for key in keys]
        here = homes.count("replica-0")
        waiting = len(stage.mocks[0].requests) + here
        dies = asyncio.Event()

        async def dies_under_them(request: Message, peer: Peer) -> None:
            await dies.wait()
            refuse(RequestEvent.ENGINE_LOST, peer)

        stage.mocks[0].handler = dies_under_them
        bodies = [b'{"turn": %d}' % number for number in range(len(keys))]
        asking = [
            asyncio.create_task(stage.ask(post(body, headers=key)))
            for body, key in zip(bodies, keys, strict=True)
        ]
        await stage.mocks[0].asked(waiting)
        dies.set()
        assert [(await one).status for one in asking] == [200] * len(keys)


async def test_a_late_word_of_an_engine_that_is_gone_does_not_take_the_next_boot() -> None:
    async with staged(respond_ok, respond_ok) as stage:

        async def late(request: Message, peer: Peer) -> None:
            stage.views[0].replica.hear(replica_report(replica="replica-0", boot="b2", ready=True))
            stage.views[0].admitted = True
            refuse(RequestEvent.ENGINE_LOST, peer)

        stage.mocks[0].handler = late
        said = await stage.ask(post())
        assert (said.status, said.headers["x-midstream-replica"]) == (200, "replica-1")
        assert stage.views[0].usable


async def test_the_only_replicas_lost_engine_is_told_with_a_time_to_come_again() -> None:
    async with staged(loses_its_engine) as stage:
        said = await stage.ask(post(headers=SESSION))
        assert (said.status, said.headers["retry-after"]) == (503, "1")
        assert "the engine of replica-0 stopped while it served this request" in said.error["message"]
