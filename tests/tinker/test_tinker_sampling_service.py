"""asample against a gateway that refuses, breaks off, waits: what the future ends with."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from sampling_fakes import (
    DEPLOYMENT,
    SERVED,
    TENANT,
    Asked,
    FakeGateway,
    Front,
    Reply,
    completion,
    error,
    fake_gateway,
    front,
)

from midstream_tinker import sampling as module
from midstream_tinker.futures import Future
from midstream_tinker.refusals import TinkerRefusal
from midstream_tinker.trainer.types import WorkFailed
from midstream_tinker.types import SampleBody, decode

Scenario = Callable[[Front, FakeGateway], Awaitable[None]]


@asynccontextmanager
async def run(directory: Path, answers: Any, **options: Any) -> AsyncIterator[tuple[Front, FakeGateway]]:
    """answers: a function of the request (may be async), or what to answer, one after another, with None for a completion."""
    left = list(answers) if isinstance(answers, list) else None

    async def answering(asked: Asked) -> Reply:
        if left is None:
            reply = answers(asked)
            return await reply if asyncio.iscoroutine(reply) else reply
        return left.pop(0) or completion(asked, 4, 5)

    async with fake_gateway(answering) as gateway, front(gateway.url, directory, **options) as made:
        async with asyncio.timeout(120):
            yield made, gateway


def body(session: str | None = None, seq: int | None = 0, **fields: Any) -> SampleBody:
    said = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
        "sampling_session_id": session,
        "seq_id": seq,
        **fields,
    }
    return decode(json.dumps({k: v for k, v in said.items() if v is not None}).encode(), SampleBody)


async def ended(made: Front, request_id: str) -> Future:
    future = made.futures.find(TENANT, request_id)
    assert future is not None
    await future.wait()
    return future


async def failure(made: Front, sample: SampleBody) -> dict[str, Any]:
    request_id, _ = await made.sampling.submit(TENANT, None, sample)
    outcome = (await ended(made, request_id)).outcome
    assert outcome is not None
    told: dict[str, Any] = json.loads(outcome.body)
    return told


async def test_one_completion_with_the_key_the_weights_and_the_callers_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async with run(tmp_path, [None]) as (made, gateway):
        session = made.sampling_session()
        request_id, sequences = await made.sampling.submit(
            TENANT, "tml-secret", body(session.id, 7, num_samples=2)
        )
        assert len(set(sequences)) == 2
        outcome = (await ended(made, request_id)).outcome
        assert outcome is not None
        assert outcome.media_type == "application/x-protobuf"
        (asked,) = gateway.asked
        key = f"{session.id}:7"
        assert asked.headers["x-session-id"] == key
        assert asked.headers["x-midstream-follow-prefix"] == "1"
        assert asked.headers["x-midstream-snapshot"] == "base"
        assert asked.headers["x-api-key"] == "tml-secret"
        assert (asked.body["model"], asked.body["n"]) == (DEPLOYMENT, 2)
        assert outcome.headers == {
            "x-midstream-replica": "replica-1",
            "x-midstream-route-reason": "prefix",
            "x-midstream-snapshot": "base",
            "x-midstream-session-id": key,
        }
        span = {"snapshots": [{"snapshot": "base", "start": 0, "end": 2}]}
        assert json.loads(msgspec.json.encode(outcome.facts)) == {
            "session_id": key,
            "replica": "replica-1",
            "route_reason": "prefix",
            "cached_prompt_tokens": 3,
            "sequences": [span, span],
        }
        line = f"[sticky-routing] dispatch idx=0 model={SERVED.names[0]} session_id={key}"
        assert line in caplog.messages
        assert "tml-secret" not in caplog.text


async def test_a_session_of_a_model_that_was_served_before_a_restart_is_not_served_by_another(
    tmp_path: Path,
) -> None:
    async with run(tmp_path, [None]) as (made, gateway):
        session = made.sampling_session(base_model="Other/Model")
        with pytest.raises(TinkerRefusal, match=r"'Other/Model'.*not served here any more") as caught:
            await made.sampling.submit(TENANT, None, body(session.id))
        assert (caught.value.status, caught.value.param) == (404, "sampling_session_id")
        assert gateway.asked == []


async def test_prompts_that_wait_are_bounded_for_each_key_alone_until_they_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_TOKENS", 5)
    gate = asyncio.Event()

    async def answer(asked: Asked) -> Reply:
        await gate.wait()
        return completion(asked, 4, 5)

    async def scenario(made: Front, gateway: FakeGateway) -> None:
        sample = body(None, None, base_model=SERVED.names[0])
        first, _ = await made.sampling.submit(TENANT, None, sample)
        with pytest.raises(TinkerRefusal, match="3 prompt tokens") as caught:
            await made.sampling.submit(TENANT, None, sample)
        assert caught.value.status == 429
        assert caught.value.headers() == {"retry-after": "5"}
        await made.sampling.submit("another", None, sample)
        gate.set()
        await ended(made, first)
        await asyncio.sleep(0)
        second, _ = await made.sampling.submit(TENANT, None, sample)
        outcome = (await ended(made, second)).outcome
        assert outcome is not None
        assert outcome.media_type == "application/x-protobuf"

    async with run(tmp_path, answer) as at:
        await scenario(*at)


async def test_a_sample_without_seq_id_or_session_has_no_key(tmp_path: Path) -> None:
    async with run(tmp_path, [None, None]) as (made, gateway):
        session = made.sampling_session()
        for sample in (body(session.id, None), body(None, 3, base_model="Qwen/Qwen3-8B-Base")):
            request_id, _ = await made.sampling.submit(TENANT, None, sample)
            await ended(made, request_id)
        for asked in gateway.asked:
            assert "x-session-id" not in asked.headers
            assert "x-midstream-follow-prefix" not in asked.headers
            assert asked.headers["x-midstream-snapshot"] == "base"


async def test_a_submission_whose_answer_was_lost_is_not_sampled_twice(tmp_path: Path) -> None:
    """The SDK sends it again under its session and seq_id. Nobody would ask for the first one, nor end it."""
    gate = asyncio.Event()

    async def answer(asked: Asked) -> Reply:
        await gate.wait()
        return completion(asked, 4, 5)

    async def scenario(made: Front, gateway: FakeGateway) -> None:
        session = made.sampling_session()
        sample = body(session.id, 7, num_samples=2)
        lost = await made.sampling.submit(TENANT, None, sample)
        assert await made.sampling.submit(TENANT, None, sample) == lost
        gate.set()
        # Also once it is done.
        await asyncio.gather(*made.sampling._running)
        assert await made.sampling.submit(TENANT, None, sample) == lost
        assert (await ended(made, lost[0])).outcome is not None
        assert len(gateway.asked) == 1

    async with run(tmp_path, answer) as at:
        await scenario(*at)


@pytest.mark.parametrize(
    "fields",
    [
        {"seq": 8},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 4]}]}},
        {"sampling_params": {"max_tokens": 2, "seed": 1}},
        {"num_samples": 3},
    ],
)
async def test_what_differs_from_an_earlier_submission_is_a_sample_of_its_own(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Clients may keep a trajectory's seq_id over its turns."""

    async with run(tmp_path, [None, None]) as (made, gateway):
        session = made.sampling_session()
        first, _ = await made.sampling.submit(TENANT, None, body(session.id, 7))
        other, _ = await made.sampling.submit(TENANT, None, body(session.id, **{"seq": 7, **fields}))
        assert first != other
        for request_id in (first, other):
            await ended(made, request_id)
        assert len(gateway.asked) == 2


async def test_a_sample_that_its_client_knows_of_can_be_drawn_again(tmp_path: Path) -> None:
    async with run(tmp_path, [None, None, None]) as (made, _gateway):
        sample = body(made.sampling_session().id, 7)
        first, _ = await made.sampling.submit(TENANT, None, sample)
        await ended(made, first)
        again, _ = await made.sampling.submit(TENANT, None, sample)
        assert again != first
        cancelled = made.futures.find(TENANT, again)
        assert cancelled is not None
        cancelled.cancel()
        third, _ = await made.sampling.submit(TENANT, None, sample)
        assert third not in (first, again)
        assert (await ended(made, third)).outcome is not None


async def test_with_the_serving_setting_a_base_model_takes_what_serves(tmp_path: Path) -> None:
    def answers(asked: Asked) -> Reply:
        return completion(asked, 4, snapshot="step-9")

    async with run(tmp_path, answers, served=replace(SERVED, base_policy="serving")) as (made, gateway):
        request_id, _ = await made.sampling.submit(TENANT, None, body(base_model=SERVED.names[0]))
        outcome = (await ended(made, request_id)).outcome
        assert outcome is not None
        assert outcome.headers["x-midstream-snapshot"] == "step-9"
        assert "x-midstream-snapshot" not in gateway.asked[0].headers


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"session": "sampling_0123"}, 404, "sampling_session_id"),
        ({"session": "a:b"}, 400, "sampling_session_id"),
        ({}, 400, "sampling_session_id"),
        ({"base_model": "gpt-5"}, 404, "base_model"),
        ({"model_path": "tinker://x/weights/y"}, 400, "model_path"),
    ],
)
async def test_a_sample_of_nothing_is_refused_at_once(
    tmp_path: Path, fields: dict[str, Any], status: int, param: str
) -> None:
    async with run(tmp_path, []) as (made, gateway):
        with pytest.raises(TinkerRefusal) as refused:
            await made.sampling.submit(TENANT, None, body(**fields))
        assert (refused.value.status, refused.value.param) == (status, param)
        assert gateway.asked == []
        assert len(made.futures) == 0


async def test_another_tenants_session_is_unknown(tmp_path: Path) -> None:
    async with run(tmp_path, []) as (made, _gateway):
        session = made.sampling_session()
        with pytest.raises(TinkerRefusal) as refused:
            await made.sampling.submit("somebody else", None, body(session.id))
        assert refused.value.status == 404


async def test_what_passes_is_tried_again_with_the_same_request(tmp_path: Path) -> None:
    """Overloaded, a swap, a replica lost, a gateway that restarts: none of it reaches the client."""
    answers: list[Any] = [
        error(429, "queue full"),
        error(425, "a snapshot is being switched"),
        error(503, "no replica"),
        Reply(cut=True),
        error(502, "bad gateway"),
        error(504, "timeout"),
        None,
    ]

    async with run(tmp_path, answers) as (made, gateway):
        session = made.sampling_session()
        request_id, _ = await made.sampling.submit(TENANT, "tml-k", body(session.id, 4))
        outcome = (await ended(made, request_id)).outcome
        assert outcome is not None
        assert outcome.media_type == "application/x-protobuf"
        assert len(gateway.asked) == len(answers)
        assert all(asked == gateway.asked[0] for asked in gateway.asked)


@pytest.mark.parametrize(
    ("status", "category"), [(400, "user"), (404, "user"), (413, "user"), (422, "user"), (500, "server")]
)
async def test_what_is_final_is_told_once(tmp_path: Path, status: int, category: str) -> None:
    async with run(tmp_path, [error(status, "temperature: too hot")]) as (made, gateway):
        told = await failure(made, body(made.sampling_session().id))
        assert told == {"error": "temperature: too hot", "category": category}
        assert len(gateway.asked) == 1


async def test_advice_about_options_that_tinker_lacks_is_left_out(tmp_path: Path) -> None:
    message = "max_tokens: too many; lower max_tokens"

    answers = [error(400, f"{message} or set context_length_exceeded_behavior: truncate")]
    async with run(tmp_path, answers) as (made, _gateway):
        told = await failure(made, body(made.sampling_session().id))
        assert told["error"] == message


def not_served(serving: str, newest: str) -> Reply:
    entries = [{"replica": "replica-0", "snapshot": serving, "stage": "idle"}]
    return error(409, "no replica can serve", serving=entries, newest=newest)


async def test_superseded_weights_fail_with_both_names(tmp_path: Path) -> None:
    async with run(tmp_path, [not_served("step-2", "step-2")]) as (made, gateway):
        session = made.sampling_session(snapshot="tinker-a-0-1-x", model_path="tinker://a/sampler_weights/x")
        told = await failure(made, body(session.id))
        assert told["category"] == "user"
        assert "'tinker-a-0-1-x'" in told["error"]
        assert "'step-2'" in told["error"]
        assert len(gateway.asked) == 1


async def test_weights_that_a_restarted_replica_will_serve_again_are_waited_for(tmp_path: Path) -> None:
    async def scenario(made: Front, gateway: FakeGateway) -> None:
        session = made.sampling_session(policy="run", snapshot="tinker-a-0-1", run="tinker-a-0")
        request_id, _ = await made.sampling.submit(TENANT, None, body(session.id))
        outcome = (await ended(made, request_id)).outcome
        assert outcome is not None
        assert outcome.headers["x-midstream-snapshot"] == "tinker-a-0-2"
        assert {asked.headers["x-midstream-min-snapshot"] for asked in gateway.asked} == {"tinker-a-0-1"}

    refusals = [not_served("base", "tinker-a-0-2")] * 3

    def answers(asked: Asked) -> Reply:
        return refusals.pop() if refusals else completion(asked, 4, snapshot="tinker-a-0-2")

    async with run(tmp_path, answers) as at:
        await scenario(*at)


async def test_tokens_of_another_run_never_reach_the_client(tmp_path: Path) -> None:
    async with run(tmp_path, lambda asked: completion(asked, 4, snapshot="tinker-b-0-1")) as (made, _gateway):
        session = made.sampling_session(policy="run", snapshot="tinker-a-0-1", run="tinker-a-0")
        told = await failure(made, body(session.id))
        assert told["category"] == "user"
        assert "'tinker-b-0-1'" in told["error"]


ADAPTER = "tinker-a-0-7-best"


async def test_samples_of_adapters_go_to_their_policies_under_their_own_labels(tmp_path: Path) -> None:
    async def scenario(made: Front, gateway: FakeGateway) -> None:
        snapshots = ["tinker-a-0-7-best", "tinker-a-0-9", "tinker-b-1-2"]
        requests = []
        for snapshot in snapshots:
            session = made.sampling_session(policy="adapter", snapshot=snapshot, run=snapshot[:10])
            requests.append((await made.sampling.submit(TENANT, None, body(session.id)))[0])
        for request_id, snapshot in zip(requests, snapshots, strict=True):
            outcome = (await ended(made, request_id)).outcome
            assert outcome is not None
            assert outcome.headers["x-midstream-snapshot"] == snapshot
        # The fake front has places for two.
        assert made.policies.most == 2
        assert {asked.headers["x-midstream-snapshot"] for asked in gateway.asked} == set(snapshots)

    def answers(asked: Asked) -> Reply:
        asked_for = asked.headers["x-midstream-snapshot"]
        policy = asked.body["model"].removeprefix(f"{DEPLOYMENT}/policies/")
        assert policy == asked_for.removesuffix("-best")
        return completion(asked, 4, snapshot=asked_for)

    async with run(tmp_path, answers) as at:
        await scenario(*at)


@pytest.mark.parametrize("refusal", [error(404, "not served here"), None])
async def test_an_adapter_that_somebody_ended_or_replaced_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Reply | None
) -> None:
    monkeypatch.setattr(module, "LOAD_PAUSE_S", 0.0)

    refusals = [refusal or not_served("step-4", "step-4")] * 2

    def answers(asked: Asked) -> Reply:
        return refusals.pop() if refusals else completion(asked, 4, snapshot=ADAPTER)

    async with run(tmp_path, answers) as (made, _gateway):
        session = made.sampling_session(policy="adapter", snapshot=ADAPTER, run="tinker-a-0")
        request_id, _ = await made.sampling.submit(TENANT, None, body(session.id))
        outcome = (await ended(made, request_id)).outcome
        assert outcome is not None
        assert outcome.headers["x-midstream-snapshot"] == ADAPTER
        assert made.policies.said == [("load", "tinker-a-0-7")] * 3


async def test_an_adapter_that_cannot_be_loaded_fails_its_sample_in_words(tmp_path: Path) -> None:
    async with run(tmp_path, lambda asked: completion(asked, 4)) as (made, gateway):

        def refuse(what: str, policy: str) -> None:
            if what == "load" and policy == "tinker-a-0-7":
                raise WorkFailed("replica-0 could not load it: NaN", "unknown")

        made.policies.before = refuse
        bad = made.sampling_session(policy="adapter", snapshot=ADAPTER, run="tinker-a-0")
        told = await failure(made, body(bad.id))
        assert told == {"error": "replica-0 could not load it: NaN", "category": "unknown"}
        assert gateway.asked == []
        base = made.sampling_session()
        request_id, _ = await made.sampling.submit(TENANT, None, body(base.id))
        assert (await ended(made, request_id)).outcome is not None


async def test_a_server_that_stays_away_is_given_up(tmp_path: Path) -> None:
    async with run(tmp_path, lambda _: error(503, "no replica"), unreachable_s=20.0) as (made, gateway):
        told = await failure(made, body(made.sampling_session().id))
        assert told["category"] == "server"
        assert "no replica" in told["error"]
        assert len(gateway.asked) > 3


async def test_a_request_that_breaks_every_connection_is_given_up(tmp_path: Path) -> None:
    async with run(tmp_path, lambda _: Reply(cut=True)) as (made, gateway):
        told = await failure(made, body(made.sampling_session().id))
        assert told["category"] == "server"
        assert len(gateway.asked) == 11


async def test_the_gateway_may_move(tmp_path: Path) -> None:
    """A submission that found nobody goes to where the gateway is then."""

    async def answering(asked: Asked) -> Reply:
        return completion(asked, 4)

    async with fake_gateway(answering) as gateway, front("http://127.0.0.1:9", tmp_path) as made:
        request_id, _ = await made.sampling.submit(TENANT, None, body(made.sampling_session().id))
        made.sampling.gateway_url = gateway.url
        outcome = (await ended(made, request_id)).outcome
        assert outcome is not None
        assert outcome.status == 200
        assert outcome.media_type == "application/x-protobuf"


async def test_a_cancelled_sample_ends_its_completion(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def answers(_: Asked) -> Reply:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario(made: Front, gateway: FakeGateway) -> None:
        request_id, _ = await made.sampling.submit(TENANT, None, body(made.sampling_session().id))
        await begun.wait()
        future = made.futures.find(TENANT, request_id)
        assert future is not None
        future.cancel()
        await gateway.left.wait()
        assert future.outcome is not None
        assert future.outcome.status == 410

    async with run(tmp_path, answers) as at:
        await scenario(*at)


async def test_closing_leaves_no_future_open(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def answers(_: Asked) -> Reply:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario(made: Front, gateway: FakeGateway) -> None:
        request_id, _ = await made.sampling.submit(TENANT, None, body(made.sampling_session().id))
        await begun.wait()
        await made.sampling.close()
        future = made.futures.find(TENANT, request_id)
        assert future is not None
        assert future.outcome is not None
        assert future.outcome.status == 410
        await gateway.left.wait()

    async with run(tmp_path, answers) as at:
        await scenario(*at)


async def test_600_samples_at_once_end_each_with_its_own_answer(tmp_path: Path) -> None:
    """All of them are under way before the first is answered."""
    count = 600
    everybody = asyncio.Event()
    came: list[int] = []

    async def answers(asked: Asked) -> Reply:
        number = int(asked.headers["x-session-id"].rpartition(":")[2])
        came.append(number)
        if len(came) == count:
            everybody.set()
        await everybody.wait()
        return completion(asked, 1000 + number)

    async def scenario(made: Front, gateway: FakeGateway) -> None:
        session = made.sampling_session()
        ids = [(await made.sampling.submit(TENANT, None, body(session.id, i)))[0] for i in range(count)]
        for number, request_id in enumerate(ids):
            outcome = (await ended(made, request_id)).outcome
            assert outcome is not None
            assert (1000 + number).to_bytes(4, "little") in outcome.body
        assert sorted(came) == list(range(count))

    async with run(tmp_path, answers) as at:
        await scenario(*at)
