"""The OpenAI SDK's Responses API against a running server: plain, streamed, tool loops, stored responses, a lost replica."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Server, descendants, serve, words_of

from midstream.core.versions import HEADER_SNAPSHOT_WAIT

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"where": {"type": "string", "maxLength": 8}},
        "required": ["where"],
        "additionalProperties": False,
    },
    "strict": True,
}
RECORDS = {"logprobs": True, "return_token_ids": True, "include_routing_matrix": True, "seed": 3}
TURNS = 6


@pytest.fixture
def sdk(served: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def ours(response: Any) -> dict[str, Any]:
    return dict(response.model_dump()["midstream"])


def test_a_response_plain_and_streamed(sdk: openai.OpenAI, served: Server) -> None:
    asked: dict[str, Any] = {
        "model": served.model, "input": "What to wear?", "instructions": "Be kind.", "max_output_tokens": 24,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "extra_body": RECORDS,
    }  # fmt: skip
    plain = sdk.responses.create(**asked)
    assert plain.model == f"{served.model}@base"
    assert plain.usage is not None
    records = ours(plain)["logprobs"]["content"]
    assert [entry["token_id"] for entry in records] == ours(plain)["token_ids"]
    assert len(records) == plain.usage.output_tokens
    assert all(entry["routing_matrix"] for entry in records)
    with sdk.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response() if events[-1].type == "response.completed" else None
    last: Any = events[-1]
    if final is not None:
        assert final.output_text == plain.output_text
    assert last.response.output_text == plain.output_text
    assert last.response.status == plain.status
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas: list[Any] = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == plain.output_text
    (message,) = plain.output
    assert message.type == "message"
    (text,) = message.content
    assert text.type == "output_text"
    assert text.logprobs is not None
    assert [s.logprob for e in deltas for s in e.logprobs] == [score.logprob for score in text.logprobs]
    assert all(len(score.top_logprobs) == 2 for score in text.logprobs)


def test_a_schema_holds(sdk: openai.OpenAI, served: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    made = sdk.responses.create(model=served.model, input="x", text=text, max_output_tokens=60)
    assert json.loads(made.output_text) in ({"a": 1}, {"a": 2})


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("resent", [False, True])
def test_every_turn_of_a_tool_loop_begins_with_the_tokens_of_the_one_before(
    sdk: openai.OpenAI, served: Server, resent: bool, named: bool
) -> None:
    """Without a session, each request goes where it may, and what it continues is found."""
    if resent and not named:
        pytest.skip("nothing says that they belong together")
    key = f"loop {resent}"
    headers = {"x-midstream-records": "routes", **({"x-session-id": key} if named else {})}
    items: list[Any] = [{"role": "user", "content": "Begin."}]
    new, answers = list(items), list[Any]()
    for number in range(TURNS):
        more = {} if resent or not answers else {"previous_response_id": answers[-1].id}
        made = sdk.responses.create(
            model=served.model, input=items if resent else new, tools=[TOOL],  # type: ignore[list-item]
            tool_choice="required" if number % 2 else "auto", max_output_tokens=80 if number % 2 else 12,
            extra_headers=headers, extra_body={**RECORDS, "seed": number}, **more,
        )  # fmt: skip
        answers.append(made)
        calls = [item for item in made.output if item.type == "function_call"]
        if number % 2 and made.status == "completed":
            assert calls
        new = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "a wall"} for call in calls
        ]
        new.append({"role": "user", "content": f"And {number}?"})
        items += [*(item.to_dict() for item in made.output), *new]
    told = [ours(answer) for answer in answers]
    assert not any("branch" in one for one in told)
    for before, after in itertools.pairwise(told):
        tokens = before["prompt_token_ids"] + before["token_ids"]
        assert after["prompt_token_ids"][: len(tokens)] == tokens
    trace = httpx.get(f"{served.url}/v1/sessions/{key if named else answers[0].id}/trace").json()
    (one,) = trace["traces"]
    tokens = list[int]()
    assert [turn["parent"] for turn in one["turns"]] == [*range(TURNS)]
    for turn, said in zip(one["turns"], told, strict=True):
        tokens += turn["added"]
        assert tokens == said["prompt_token_ids"]
        tokens += turn["token_ids"]
        assert turn["token_ids"] == said["token_ids"]
        entries = said["logprobs"]["content"]
        assert turn["routing_matrix"] == [entry["routing_matrix"] for entry in entries]
        assert turn["logprobs"] == [entry["logprob"] for entry in entries]
    if not resent:
        listed = list(sdk.responses.input_items.list(answers[-1].id, order="asc", limit=3))
        roles = [getattr(item, "role", None) for item in listed]
        assert roles.count("user") == TURNS
        assert len(listed) == len(items) - len(new) - len(answers[-1].output)
        assert [item.id for item in sdk.responses.input_items.list(answers[-1].id)] == [
            item.id for item in reversed(listed)
        ]


def test_responses_are_retrieved_and_deleted_and_not_kept_where_that_is_asked(
    sdk: openai.OpenAI, served: Server
) -> None:
    asked: dict[str, Any] = {"model": served.model, "input": "a", "max_output_tokens": 4}
    base = f"{served.url}/inference/sessions/S/v1".replace("/inference/sessions", "/sessions")
    in_path = sdk.with_options(base_url=base)
    for client in (sdk, in_path):
        made = client.responses.create(**asked)
        assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
        client.responses.delete(made.id)
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError) as missing:
                ask(made.id)
            assert made.id in missing.value.message
        with pytest.raises(openai.NotFoundError) as gone:
            client.responses.create(**asked, previous_response_id=made.id)
        assert gone.value.param == "previous_response_id"
    unkept = sdk.responses.create(**asked, store=False)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(unkept.id)
    with pytest.raises(openai.ConflictError):
        sdk.responses.create(
            **{**asked, "model": f"{served.model}@never"}, extra_headers={HEADER_SNAPSHOT_WAIT: "0"}
        )
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(**asked, tools=[{"type": "web_search"}])
    assert refused.value.param == "tools[0].type"


@pytest.mark.variant
def test_another_tenants_response_is_a_404(tmp_path: Path) -> None:
    config = tmp_path / "keys.toml"
    keys = ", ".join(f'{{ key = "{t}", scopes = ["sample"], tenant = "{t}" }}' for t in "ab")
    config.write_text(f'[gateway]\napi_keys = [{keys}, {{ key = "looks", scopes = ["observe"] }}]\n')
    with serve(tmp_path / "state", "--replicas", "1", "--config", str(config)) as served:

        def sdk(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)

        made = sdk("a").responses.create(model=served.model, input="a", max_output_tokens=2)
        for ask in (sdk("b").responses.retrieve, sdk("b").responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.NotFoundError):
            sdk("b").responses.create(model=served.model, input="a", previous_response_id=made.id)
        with pytest.raises(openai.PermissionDeniedError):
            sdk("looks").responses.retrieve(made.id)
        assert sdk("a").responses.retrieve(made.id).id == made.id


def test_a_killed_replicas_stream_goes_on_and_its_responses_are_gone(served: Server) -> None:
    # The likeliest tokens never end: a sampled answer had 41 tokens, and was whole before its reader could kill anything.
    asked: dict[str, Any] = {
        "model": served.model, "input": "Which way?", "max_output_tokens": 3500, "temperature": 0, "extra_body": RECORDS,
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=8) as sdk:
        earlier = sdk.responses.create(**{**asked, "max_output_tokens": 2})
        whole = sdk.responses.create(**asked)
        for _ in range(8):
            until_all_serve(served)
            before = boots(served)
            raw = sdk.responses.with_streaming_response.create(**asked, stream=True)
            with raw as answer:
                replica = answer.headers["x-midstream-replica"]
                events = list[Any]()
                for event in answer.parse():
                    events.append(event.to_dict())
                    # Early: on a busy machine the rest is here before its client reads it.
                    if len(events) == 4:
                        os.kill(process_of(served, replica), signal.SIGKILL)
            told = [event.get("midstream", {}) for event in events]
            if any("resumed" in one for one in told):
                break
            # The stream was whole before the kill. Until it is noticed, the killed replica seems to serve.
            until_gone(served, replica, before[replica])
        assert [one["resumed"]["from"] for one in told if "resumed" in one] == [replica]
        assert [token for one in told for token in one.get("token_ids", ())] == ours(whole)["token_ids"]
        last = events[-1]["response"]
        texts = [part["text"] for item in last["output"] for part in item["content"]]
        assert "".join(texts) == whole.output_text
        # It is kept where it ended.
        assert sdk.responses.retrieve(last["id"]).id == last["id"]
        # The SDK asks again for a while only.
        until_all_serve(served)
        if earlier.id.endswith(replica):
            with pytest.raises(openai.NotFoundError):
                sdk.responses.retrieve(earlier.id)
            with pytest.raises(openai.NotFoundError):
                sdk.responses.create(**asked, previous_response_id=earlier.id)


def until_all_serve(served: Server) -> None:
    for _ in range(1200):
        replicas = httpx.get(f"{served.url}/health").json()["replicas"]
        if len(replicas) == 2 and all(one["ready"] and one["usable"] for one in replicas):
            return
        time.sleep(0.1)
    raise AssertionError(replicas)


def boots(served: Server) -> dict[str, str | None]:
    """The boot of each replica that is heard."""
    rows = httpx.get(f"{served.url}/hot_load/v1/models/hot_load").json()["replicas"]
    return {row["midstream"]["replica"]: row["midstream"]["boot"] for row in rows}


def until_gone(served: Server, replica: str, boot: str | None) -> None:
    """It may be back by now, as another boot."""
    for _ in range(1200):
        if boots(served).get(replica) != boot:
            return
        time.sleep(0.01)
    raise AssertionError(f"{replica} is still {boot}")


def process_of(served: Server, replica: str) -> int:
    for pid in descendants(served.process.pid):
        if replica in words_of(pid):
            return pid
    raise AssertionError(f"{replica} does not run")
