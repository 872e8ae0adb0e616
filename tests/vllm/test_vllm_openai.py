"""The OpenAI API over real vLLM servers: their numbers are those of a plain forward pass over the tokens that are shown."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer
from vllm_bed import BLOCK, Bed, logprobs_of
from vllm_streams import random_prompt

from midstream.core.masks import kept_ids
from midstream.replica.text.chat import TextModel

# Nats, in float32.
TOLERANCE = 1e-3
MESSAGES = [{"role": "system", "content": "You count."}, {"role": "user", "content": "Wie weit? — до десяти"}]


@pytest.fixture(scope="module")
def http(bed: Bed) -> Iterator[httpx.Client]:
    with bed.http() as client:
        yield client


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(f"/v1/{path}", json={"model": "default", "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    fields = {"model": "default", "stream": True, "ignore_eos": True, **body}
    with http.stream("POST", f"/v1/{path}", json=fields) as answer:
        # A model that says any bytes says U+0085 too, where iter_lines() ends a line.
        lines = answer.read().split(b"\n")
    data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert data[-1] == b"[DONE]"
    return [json.loads(item) for item in data[:-1]]


def assert_scored(bed: Bed, prompt: list[int], choice: dict[str, Any]) -> None:
    """A choice's logprobs are those of transformers, given its prompt."""
    content = choice["logprobs"]["content"]
    ids = prompt + [entry["token_id"] for entry in content]
    expected = logprobs_of(bed.reference, ids)[len(prompt) - 1 :]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=TOLERANCE)


def test_a_chat_is_served_as_the_tokens_that_the_models_own_template_gives(
    bed: Bed, http: httpx.Client
) -> None:
    wanted = AutoTokenizer.from_pretrained(bed.checkpoint).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    text = TextModel.load(bed.checkpoint)
    # So does the embedded engine.
    assert list(text.encode_rendered(text.render(MESSAGES))) == wanted
    fields = {"messages": MESSAGES, "max_tokens": 24, "logprobs": True, "return_token_ids": True}
    answer = ask(http, "chat/completions", **fields)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == wanted
    assert answer["usage"]["prompt_tokens"] == len(wanted)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == 24
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert text.tokenizer.decode(choice["token_ids"]) == choice["message"]["content"]
    assert_scored(bed, wanted, choice)


def test_a_stream_is_the_plain_answer_in_pieces(bed: Bed, http: httpx.Client) -> None:
    for path, prompt in (
        ("completions", {"prompt": "Once upon a time"}),
        ("chat/completions", {"messages": MESSAGES}),
    ):
        fields = {**prompt, "max_tokens": 40, "seed": 11, "logprobs": True, "return_token_ids": True}
        # On one replica.
        fields |= {"user": "a stream in pieces", "temperature": 0.9, "top_p": 0.95}
        (plain,) = ask(http, path, **fields)["choices"]
        events = [event["choices"][0] for event in streamed(http, path, **fields)]
        ids = [token for event in events for token in event["token_ids"]]
        said = [event["delta"].get("content", "") if "delta" in event else event["text"] for event in events]
        numbers = [
            e["logprob"] for event in events if event["logprobs"] for e in event["logprobs"]["content"]
        ]
        assert ids == plain["token_ids"]
        assert "".join(said) == (plain["message"]["content"] if "message" in plain else plain["text"])
        assert numbers == pytest.approx([e["logprob"] for e in plain["logprobs"]["content"]], abs=TOLERANCE)
        assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["length"]


def test_every_choice_of_n_is_sampled_for_itself_and_numbered(bed: Bed, http: httpx.Client) -> None:
    prompt = random_prompt(1, 40)
    fields = {"prompt": prompt, "n": 3, "max_tokens": 30, "logprobs": True}
    plain = ask(http, "completions", **fields)["choices"]
    joined: dict[int, list[Any]] = {}
    for event in streamed(http, "completions", **fields):
        for choice in event["choices"]:
            entries = choice["logprobs"]["content"] if choice["logprobs"] else []
            joined.setdefault(choice["index"], []).extend(entries)
    several = [choice["logprobs"]["content"] for choice in plain]
    assert [choice["index"] for choice in plain] == sorted(joined) == [0, 1, 2]
    for choices in (several, list(joined.values())):
        assert len({tuple(entry["token_id"] for entry in content) for content in choices}) == 3
        for content in choices:
            assert len(content) == 30
            assert_scored(bed, prompt, {"logprobs": {"content": content}})


def test_a_stop_string_ends_the_text_before_it_also_behind_a_cached_prompt(
    bed: Bed, http: httpx.Client
) -> None:
    prompt = random_prompt(2, 3 * BLOCK + 10)
    fields = {"prompt": prompt, "max_tokens": 64, "temperature": 0, "user": "stop", "return_token_ids": True}
    whole = ask(http, "completions", **fields)
    text: str = whole["choices"][0]["text"]
    at = next(
        i
        for i in range(4, len(text))
        if text[i].isascii() and text[i].isprintable() and text[i] not in text[:i]
    )
    for _ in range(2):
        answer = ask(http, "completions", **fields, stop=[text[at]])
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[:at], "stop")
        shown = choice["token_ids"]
        assert shown == whole["choices"][0]["token_ids"][: len(shown)]
        # vLLM had not said it yet.
        assert "prompt_tokens_details" not in answer["usage"]
    token = whole["choices"][0]["token_ids"][4]
    ended = ask(http, "completions", **fields, stop_token_ids=[token])
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 * BLOCK


def assert_raw_beside_what_was_allowed(bed: Bed, prompt: list[int], content: list[dict[str, Any]]) -> None:
    """Forbidding tokens can only raise the others' log-probabilities, and raises some of a JSON text's to certainty."""
    if not bed.has_ranks:
        assert {entry["logprob_of"] for entry in content} == {"allowed"}
        return
    assert_scored(bed, prompt, {"logprobs": {"content": content}})
    assert all("logprob_of" not in entry for entry in content)
    pairs = [(entry["sampling_logprob"], entry["logprob"]) for entry in content]
    assert all(raw - TOLERANCE <= of_allowed <= 0 for of_allowed, raw in pairs)
    assert any(of_allowed > raw + 1 for of_allowed, raw in pairs)


def test_a_forced_tool_call_with_logprobs_is_a_call_with_both_numbers(bed: Bed, http: httpx.Client) -> None:
    colour = {"type": "object", "properties": {"to": {"enum": ["red", "green"]}}, "required": ["to"]}
    tool = {"type": "function", "function": {"name": "paint", "parameters": colour}}
    fields = {"model": "default", "messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    fields |= {"max_tokens": 200, "logprobs": True, "return_token_ids": True}
    # A model that was never trained may go on with blanks and further calls.
    for seed in range(20):
        answer = http.post("/v1/chat/completions", json={**fields, "seed": seed})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] != "length":
            break
    assert choice["finish_reason"] == "tool_calls"
    called = choice["message"]["tool_calls"][0]["function"]
    assert called["name"] == "paint"
    assert json.loads(called["arguments"])["to"] in ("red", "green")
    assert_raw_beside_what_was_allowed(bed, answer.json()["prompt_token_ids"], choice["logprobs"]["content"])


def test_an_answer_has_the_tokens_that_each_draw_was_from(bed: Bed, http: httpx.Client) -> None:
    if not bed.has_ranks:
        pytest.skip("a version that gives tokens no rank")
    fields = {"messages": MESSAGES, "max_tokens": 24, "top_k": 7, "temperature": 0.8, "logprobs": True}
    plain = ask(http, "chat/completions", **fields, top_logprobs=7, return_sampling_mask=True)["choices"][0]
    pieces = streamed(http, "chat/completions", **fields, top_logprobs=7, return_sampling_mask=True)
    events = [event["choices"][0]["logprobs"] for event in pieces if event["choices"][0]["logprobs"]]
    for content in (plain["logprobs"]["content"], [entry for one in events for entry in one["content"]]):
        assert len(content) == 24
        for entry in content:
            kept = kept_ids(base64.b64decode(entry["sampling_mask"]), entry["token_id"])
            best = {top["token_id"]: top["logprob"] / 0.8 for top in entry["top_logprobs"]}
            assert kept is not None
            assert set(kept) == best.keys()
            total = sum(math.exp(value) for value in best.values())
            own = best[entry["token_id"]] - math.log(total)
            assert entry["sampling_logprob"] == pytest.approx(own, abs=TOLERANCE)


def test_an_answer_to_a_schema_is_json_of_it(bed: Bed, http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "colour": {"enum": ["red", "green"]}},
        "required": ["n", "colour"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = {"model": "default", "messages": MESSAGES, "response_format": form, "max_tokens": 400}
    answers = [http.post("/v1/chat/completions", json={**fields, "seed": seed}) for seed in range(8)]
    finished = [a.json()["choices"][0] for a in answers if a.status_code == 200]
    assert len(finished) == 8, [a.text for a in answers]
    parsed = [json.loads(c["message"]["content"]) for c in finished if c["finish_reason"] == "stop"]
    assert parsed, "no answer came to its end"
    for value in parsed:
        assert value.keys() == {"n", "colour"}
        assert isinstance(value["n"], int)
        assert value["colour"] in ("red", "green")
    scored = http.post("/v1/chat/completions", json={**fields, "logprobs": True, "return_token_ids": True})
    assert scored.status_code == 200, scored.text
    content = scored.json()["choices"][0]["logprobs"]["content"]
    assert_raw_beside_what_was_allowed(bed, scored.json()["prompt_token_ids"], content)


def test_an_echo_scores_the_prompt_as_a_plain_forward_pass_does(bed: Bed, http: httpx.Client) -> None:
    prompt = random_prompt(3, 300)
    answer = ask(http, "completions", prompt=prompt, max_tokens=6, echo=True, logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]
    ids = [entry["token_id"] for entry in content]
    assert ids[:300] == prompt
    assert len(ids) == 306
    expected = logprobs_of(bed.reference, ids)
    assert [entry["logprob"] for entry in content[1:]] == pytest.approx(expected, abs=TOLERANCE)


def test_what_vllm_cannot_do_is_refused_with_the_reason(http: httpx.Client) -> None:
    (entry,) = http.get("/v1/models").json()["data"]
    assert entry["midstream"]["engine"]["kind"] == "vllm"
    lacks = entry["midstream"]["engine"]["lacks"]
    assert {"policies", "reproducible_sampling"} <= {*lacks}
    fields = {"model": "default", "prompt": [20, 21], "max_tokens": 1, "temperature": 0.005}
    refused = http.post("/v1/completions", json=fields)
    assert refused.status_code == 400
    assert (
        "temperature: vLLM takes what lies between 0 and 0.01 as 0.01" in refused.json()["error"]["message"]
    )
