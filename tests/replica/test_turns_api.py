"""Exact sessions from outside: what reaches the engine, what responses say, and streams that another replica goes on with."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import MODEL, FakeEngine, Running, ids, mask_at, running, sse
from test_resume_pipeline import (
    CHAT,
    COMPLETIONS,
    RESUMABLE,
    SGLANG,
    VLLM,
    by_choice,
    events,
    play,
    resume,
    units,
)

from midstream.client.records import sequences_of
from midstream.core.errors import InvalidRequest
from midstream.core.traces import REWARDS_MAX, Reward
from midstream.replica.turns.rewards import Rewards

SESSION = {"x-midstream-session": "s"}
USER = {"role": "user", "content": "he said"}
#: As a tokenizer would not cut it: it has a token for "he".
LETTERS = tuple(b"hello ")
#: Of two tokens the first one shows nothing.
HALVES = tuple("ü".encode())


def an_engine(reply: tuple[int, ...] = LETTERS) -> FakeEngine:
    engine = FakeEngine()
    engine.reply = reply
    engine.tells_kv = True
    return engine


async def reward(here: Running, reward: float, tenant: str = "", **more: Any) -> Any:
    look = more.pop("look", False)
    asked = {"tenant": tenant, "key": "s", "given": {"reward": reward, **more}, "look": look}
    return (await here.http.post("/replica/reward", json=asked)).json()


async def turn(here: Running, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    headers = {**SESSION, **more.pop("headers", {})}
    body = {"model": MODEL, "messages": messages, "max_tokens": 6, **more}
    answer = await here.http.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        return dict(answer.json())
    chunks = sse(answer.text)
    assert chunks.pop() == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    said = {"role": "assistant", "content": "".join(delta.get("content", "") for delta in deltas)}
    first = chunks[0].get("midstream")
    told = {} if first is None else {"midstream": first}
    assert all("midstream" not in chunk for chunk in chunks[1:])
    return {"choices": [{"message": said}], **told}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_begins_with_the_very_tokens_of_the_last(tmp_path: Path, stream: bool) -> None:
    engine = an_engine()

    async with running(tmp_path, engine) as here:
        messages = [USER]
        for number in range(3):
            answer = await turn(here, messages, stream=stream)
            assert "midstream" not in answer
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"{number}"}]
    first, second, third = (request.prompt for request in engine.requests)
    added = ids("<|im_end|><|im_start|>user\n0<|im_end|><|im_start|>assistant\n")
    assert second == first + LETTERS + added
    assert third[: len(second) + 6] == second + LETTERS


async def test_a_request_without_a_session_is_rendered_as_ever(tmp_path: Path) -> None:
    engine = an_engine()

    async with running(tmp_path, engine) as here:
        answer = await turn(here, [USER], headers={"x-midstream-session": ""})
        again = [USER, answer["choices"][0]["message"], USER]
        answer = await turn(here, again, headers={"x-midstream-session": ""})
        assert "midstream" not in answer
    assert ids("hello ")[0] in engine.requests[1].prompt[len(engine.requests[0].prompt) :]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_branch_is_said_once_in_the_response(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, an_engine()) as here:
        unknown = await turn(here, [USER, {"role": "assistant", "content": "?"}, USER], stream=stream)
        assert unknown["midstream"] == {"branch": {"why": "unknown", "messages": 0}}
        answer = await turn(here, [USER], stream=stream)
        # Its messages are where the other one began.
        assert answer["midstream"] == {"branch": {"why": "new", "messages": 1}}
        edited = [
            USER,
            answer["choices"][0]["message"],
            USER,
            {"role": "assistant", "content": "!"},
            USER,
        ]
        answer = await turn(here, edited, stream=stream)
        assert answer["midstream"] == {"branch": {"why": "edited", "messages": 2, "turn": 2}}


async def test_a_closed_session_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        answer = await turn(here, [USER])
        assert here.replica.trees.size
        closed = await here.http.post("/replica/sessions/close", json={"tenant": "", "key": "s"})
        assert closed.json() == {"closed": True}
        assert here.replica.trees.size == 0
        again = await turn(here, [USER, answer["choices"][0]["message"], USER])
        assert again["midstream"]["branch"]["why"] == "unknown"


async def test_turns_of_two_tenants_are_apart(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        answer = await turn(here, [USER], headers={"x-midstream-tenant": "a"})
        again = [USER, answer["choices"][0]["message"], USER]
        other = await turn(here, again, headers={"x-midstream-tenant": "b"})
        assert other["midstream"]["branch"]["why"] == "unknown"
        assert "midstream" not in await turn(here, again, headers={"x-midstream-tenant": "a"})


async def test_a_client_that_leaves_has_no_turn_and_each_choice_is_one(tmp_path: Path) -> None:
    engine = an_engine()
    async with running(tmp_path, engine) as here:
        engine.allow(2)
        body = {"model": MODEL, "messages": [USER], "max_tokens": 6, "stream": True}
        async with here.http.stream("POST", CHAT, json=body, headers=SESSION) as answer:
            async for _ in answer.aiter_text():
                break
        await engine.any_aborted.wait()
        assert here.replica.trees.size == 0
        engine.allow(10_000)
        await turn(here, [USER], n=3)
        tree = here.replica.trees.of(("", "s"))
        assert tree is not None
        assert [tuple(turn.sampled) for turn in tree.turns] == [LETTERS] * 3


async def test_a_continued_turn_is_resumed_on_a_replica_that_never_had_the_session(tmp_path: Path) -> None:
    """Cut after every write. The prompt is not what the other replica would render, so the log carries it."""

    async with play(tmp_path, an_engine) as (here, there):
        answer = await turn(here, [USER])
        again = [USER, answer["choices"][0]["message"], USER]
        body = {"messages": again, "max_tokens": 5, "seed": 3, "return_token_ids": True}
        asked = {"model": MODEL, "stream": True, **body}
        whole = await here.http.post(CHAT, json=asked, headers={**RESUMABLE, **SESSION})
        writes = units(whole.text)
        expected = by_choice(events("".join(writes)))
        for cut in range(1, len(writes)):
            rest = await resume(there, CHAT, body, writes[:cut])
            assert rest.status_code == 200, rest.text
            assert by_choice(events("".join(writes[:cut]) + rest.text)) == expected


BRANCHES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 5},
    COMPLETIONS: {"prompt": "else", "max_tokens": 5},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/responses": {"input": "else", "max_output_tokens": 16, "store": False},
    VLLM: {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5}},
    SGLANG: {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}},
}


@pytest.mark.parametrize("path", BRANCHES)
async def test_whenever_its_replica_is_lost_a_branch_says_so_in_every_api(tmp_path: Path, path: str) -> None:
    """Cut after every write, also those that show nothing of the answer."""
    body = {"model": MODEL, "stream": True, **BRANCHES[path]}
    said = '"branch":{"why":"new"'

    async def scenario(here: Running, there: Running) -> None:
        await here.http.post(
            COMPLETIONS, json={"model": MODEL, "prompt": [9], "max_tokens": 2}, headers=SESSION
        )
        whole = await here.http.post(path, json=body, headers={**RESUMABLE, **SESSION})
        plain = await here.http.post(path, json={**body, "stream": False}, headers=SESSION)
        assert shown(whole.text).count(said) == plain.text.count(said) == 1
        writes = [": m " + part for part in whole.text.split(": m ")[1:]]
        for cut in range(1, len(writes)):
            rest = await resume(there, path, body, writes[:cut])
            assert rest.status_code == 200, rest.text
            assert said in shown("".join(writes[:cut]) + rest.text)

    def shown(text: str) -> str:
        return "".join(line for line in text.split("\n") if not line.startswith(":"))

    async with play(tmp_path, lambda: an_engine(HALVES)) as (here, there):
        await scenario(here, there)


async def test_a_turn_that_was_resumed_is_continued_where_it_ended(tmp_path: Path) -> None:
    async with play(tmp_path, an_engine) as (here, there):
        answer = await turn(here, [USER])
        again = [USER, answer["choices"][0]["message"], USER]
        asked = {"model": MODEL, "stream": True, "messages": again, "max_tokens": 5, "seed": 3}
        whole = await here.http.post(CHAT, json=asked, headers={**RESUMABLE, **SESSION})
        writes = units(whole.text)
        state = "\n".join(
            line[4:] for write in writes[:3] for line in write.split("\n") if line.startswith(": m ")
        )
        sent = {"path": CHAT, "lost": "a", "exact": True, "state": state, "body": asked}
        rest = await there.http.post(
            "/replica/resume", json=sent, headers={**SESSION, "x-midstream-records": "masks"}
        )
        assert rest.status_code == 200, rest.text
        tokens = here.engine.requests[1].prompt + LETTERS[:5]
        further = [*again, {"role": "assistant", "content": "hello"}, USER]
        answer = await turn(there, further)
        assert "midstream" not in answer
        assert there.engine.requests[-1].prompt[: len(tokens)] == tokens
        # Of the tokens that the lost replica made, nobody here knows the numbers.
        first = (await trace(there))["turns"][0]
        assert first["token_ids"] == list(LETTERS[:5])
        assert first["logprobs"] is first["routing_matrix"] is first["sampling_masks"] is None
        # Writes are a token each behind the one that opens the stream.
        assert first["resumed"] == 2
        with pytest.raises(ValueError, match="lost after 2 of 5 tokens, and another one went on"):
            sequences_of({"id": "s", "traces": [await trace(there) | {"replica": "b"}]})


async def test_a_prompt_that_outgrows_the_context_is_refused_and_the_session_stays(tmp_path: Path) -> None:
    engine = an_engine()
    async with running(tmp_path, engine) as here:
        answer = await turn(here, [USER])
        again = [USER, answer["choices"][0]["message"], {"role": "user", "content": "x" * 100}]
        body = {"model": MODEL, "messages": again}
        refused = await here.http.post(CHAT, json=body, headers=SESSION)
        assert refused.status_code == 400
        assert "maximum context length is 128 tokens" in refused.json()["error"]["message"]
        assert "midstream" not in await turn(here, [*again[:2], USER])


async def trace(here: Running, session: str = "s") -> Any:
    asked = {"tenant": "", "key": session}
    return (await here.http.post("/replica/trace", json=asked)).json()["trace"]


async def test_a_trace_has_every_turn_with_its_records_though_no_response_told_them(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        assert await trace(here) is None
        records = {"headers": {"x-midstream-records": "routes"}}
        bare = await turn(here, [USER], headers={"x-midstream-session": "other"})
        answer = await turn(here, [USER], **records)
        # The client sees what it asked for, and nothing of the records.
        assert answer["choices"] == bare["choices"]
        again = [USER, answer["choices"][0]["message"], USER]
        await turn(here, again, **records)
        await turn(here, [{"role": "user", "content": "else"}])
        told = await trace(here)
        first, second, other = told["turns"]
        assert (told["forgotten"], [one["turn"] for one in told["turns"]]) == (False, [1, 2, 3])
        assert [one["parent"] for one in told["turns"]] == [0, 1, 0]
        assert tuple(first["added"] + first["token_ids"] + second["added"]) == here.engine.requests[2].prompt
        at = len(first["added"])
        # The fake engine's numbers say the position.
        assert first["logprobs"] == [-float(at + i) for i in range(6)]
        assert first["sampling_logprobs"] == [-(at + i) / 2 for i in range(6)]
        routes = [base64.b64encode(bytes([(at + i) % 256, t])).decode() for i, t in enumerate(LETTERS)]
        assert (first["routing_matrix"], first["routing_matrix_dtype"]) == (routes, "uint8")
        assert (first["routing_matrix_shape"], other["routing_matrix_shape"]) == ([1, 2], None)
        assert first["loss_mask"] == [0] * at + [1] * 6
        assert first["snapshots"] == [{"snapshot": "base", "start": 0, "end": 6}]
        assert first["kv_snapshots"][0]["snapshot"] == "base"
        assert (first["finish_reason"], first["model"], first["branch"]) == ("length", MODEL, None)
        assert other["branch"] == {"why": "new", "messages": 0}
        assert other["logprobs"] is other["routing_matrix"] is None
        assert (await trace(here, "other"))["turns"][0]["token_ids"] == list(LETTERS)


@pytest.mark.parametrize(
    ("kept", "asked", "has"),
    [("masks", False, True), ("routes", True, True), ("routes", False, False), ("logprobs", True, False)],
)
async def test_a_trace_has_the_masks_that_its_header_or_the_request_asks_for(
    kept: str, asked: bool, has: bool, tmp_path: Path
) -> None:
    async with running(tmp_path, an_engine()) as here:
        fields = {"logprobs": True, "return_sampling_mask": True} if asked else {}
        answer = await turn(here, [USER], headers={"x-midstream-records": kept}, **fields)
        (told,) = (await trace(here))["turns"]
        at = len(told["added"])
        masks = [base64.b64encode(mask_at(at + i, t)).decode() for i, t in enumerate(LETTERS)]
        assert told["sampling_masks"] == (masks if has else None)
        assert (told["routing_matrix"] is not None) == (kept != "logprobs")
        said = answer["choices"][0]["logprobs"]
        assert (said and [entry["sampling_mask"] for entry in said["content"]]) == (masks if asked else None)


async def test_a_trace_tells_what_earlier_tokens_stood_on_as_the_response_does(tmp_path: Path) -> None:
    """Preempted behind three tokens, under other weights."""

    engine = an_engine()
    async with running(tmp_path, engine) as here:
        first = len(ids("<|im_start|>user\nhe said<|im_end|>\n<|im_start|>assistant\n"))
        engine.tells_kv, engine.kv_with = False, {0: (("s1", 0, first),), 3: (("s2", 0, first + 3),)}
        records = {"x-midstream-records": "routes"}
        answer = await turn(here, [USER], headers=records, perf_metrics_in_response=True)
        (told,), said = (await trace(here))["turns"], answer["choices"][0]
        assert [one["tokens"] for one in said["earlier_kv_snapshots"]] == [3]
        for name in ("kv_snapshots", "earlier_kv_snapshots"):
            assert told[name] == said[name]


async def test_records_nobody_knows_are_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        body = {"model": MODEL, "messages": [USER]}
        answer = await here.http.post(CHAT, json=body, headers={**SESSION, "x-midstream-records": "all"})
        said = "x-midstream-records: expected none, logprobs, routes or masks, got 'all'"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


async def test_a_session_that_is_closed_under_a_request_is_not_kept_after_it(tmp_path: Path) -> None:
    engine = an_engine()
    async with running(tmp_path, engine) as here:
        engine.allow(2)
        asked = asyncio.create_task(turn(here, [USER]))
        await here.until(lambda: here.replica.own.gate.inside == 1)
        closed = await here.http.post("/replica/sessions/close", json={"tenant": "", "key": "s"})
        assert closed.json() == {"closed": True}
        engine.allow(10_000)
        await asked
        assert here.replica.trees.size == 0


async def test_a_replica_that_knows_more_turns_goes_on_with_a_stream_as_it_was_rendered(
    tmp_path: Path,
) -> None:
    async with play(tmp_path, an_engine) as (here, there):
        # The first turn ran there, where the second one's stream is resumed; here it was rendered.
        answer = await turn(there, [USER])
        again = [USER, answer["choices"][0]["message"], USER]
        body = {"messages": again, "max_tokens": 5, "seed": 3}
        asked = {"model": MODEL, "stream": True, **body}
        whole = await here.http.post(CHAT, json=asked, headers={**RESUMABLE, **SESSION})
        writes = units(whole.text)
        state = "\n".join(
            line[4:] for write in writes[:2] for line in write.split("\n") if line[:4] == ": m "
        )
        sent = {"path": CHAT, "lost": "a", "exact": True, "state": state, "body": asked}
        rest = await there.http.post("/replica/resume", json=sent, headers=SESSION)
        assert rest.status_code == 200, rest.text


async def test_a_session_that_its_engines_end_closed_can_still_be_deleted(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        await turn(here, [USER])
        here.replica.sessions.close_all()
        assert await trace(here) is not None
        closed = await here.http.post("/replica/sessions/close", json={"tenant": "", "key": "s"})
        assert closed.json() == {"closed": True}
        assert await trace(here) is None


async def test_a_reward_stays_with_the_turns_of_its_tenant_and_goes_with_them(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        assert await reward(here, 1.0) == {"has": False, "taken": False}
        await turn(here, [USER])
        before = here.replica.trees.size
        assert await reward(here, 1.0, tenant="b") == {"has": False, "taken": False}
        assert await reward(here, 1.0, turn=2) == {"has": True, "taken": False}
        assert await reward(here, 1.0, look=True) == {"has": True, "taken": True}
        assert (await trace(here))["rewards"] == []
        for value in (1.0, -0.5):
            assert await reward(here, value) == {"has": True, "taken": True}
        size = here.replica.trees.size
        await reward(here, 2.0, turn=1, name="judge", metadata={"why": ["x"]})
        told = [{**one, "created": 0} for one in (await trace(here))["rewards"]]
        assert told == [
            {"reward": -0.5, "turn": None, "name": "reward", "metadata": None, "created": 0},
            {"reward": 2.0, "turn": 1, "name": "judge", "metadata": {"why": ["x"]}, "created": 0},
        ]
        assert before < size < here.replica.trees.size
        await here.http.post("/replica/sessions/close", json={"tenant": "", "key": "s"})
        assert here.replica.trees.size == 0


async def test_rewards_are_summed_by_the_snapshot_that_sampled_the_end_of_what_is_rewarded(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, an_engine()) as here:
        first = await turn(here, [USER])
        message = first["choices"][0]["message"]
        await turn(here, [USER, message, {"role": "user", "content": "more"}])
        [one, two] = (await trace(here))["turns"]
        tree = here.replica.trees.of(("", "s"))
        assert tree is not None
        # The second turn crossed a swap.
        record = tree.turns[1].record
        assert record is not None
        tree.turns[1].record = record._replace(
            snapshots=(("base", 0, 1), ("step-1", 1, len(two["token_ids"])))
        )
        assert [span["snapshot"] for span in one["snapshots"]] == ["base"]
        await reward(here, 1.0, turn=1)
        await reward(here, 0.5)
        await reward(here, 7.0, name="judge")

        def told() -> list[tuple[str, str, int, float]]:
            found = here.replica.trajectories().rewards
            return [(row.snapshot, row.name, row.count, row.sum) for row in found]

        assert told() == [
            ("base", "reward", 1, 1.0),
            ("step-1", "reward", 1, 0.5),
            ("step-1", "judge", 1, 7.0),
        ]
        # One that replaces another counts once.
        await reward(here, 0.25)
        assert told()[1] == ("step-1", "reward", 1, 0.25)
        stats = here.replica.sessions.one(("", "s"))
        assert stats is not None
        assert stats.last_reward == 0.25
        here.replica.close_session(("", "s"))
        assert len(told()) == 3


def test_the_sums_of_rewards_have_a_bound() -> None:
    rewards = Rewards(sums_max=3)
    for number in range(5):
        rewards.give("", f"s{number}", Reward(reward=1.0, created=float(number)))
    assert [row.snapshot for row in rewards.report()] == ["s2", "s3", "s4"]


async def test_a_session_takes_so_many_rewards_and_the_last_of_a_name_still_counts(tmp_path: Path) -> None:
    async with running(tmp_path, an_engine()) as here:
        await turn(here, [USER])
        for number in range(REWARDS_MAX):
            here.replica.trees.reward(("", "s"), Reward(reward=1.0, name=f"n{number}", created=0.0))
        with pytest.raises(InvalidRequest, match="a session takes at most 4096"):
            here.replica.trees.reward(("", "s"), Reward(reward=1.0, created=0.0))
        here.replica.trees.reward(("", "s"), Reward(reward=3.0, name="n7", created=0.0))
        assert (await trace(here))["rewards"][7]["reward"] == 3.0
