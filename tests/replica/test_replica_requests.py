"""What a request may say: fields, ranges, rules between fields, and the words of a refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import DEPLOYMENT, IM_END, MODEL, ids, write_tokenizer

from midstream.core.errors import ConfigError, InvalidRequest, NotFound, UnknownField
from midstream.core.served_names import ServedNames
from midstream.core.types import ModelInfo
from midstream.replica.gate import wait_timeout_s
from midstream.replica.request.checked import (
    Prompt,
    check,
    check_messages,
    sampling_for,
    seed_of_prompt,
    split_prompts,
)
from midstream.replica.request.schema import parse_chat, parse_completion
from midstream.replica.text.chat import TextModel

MOE = ModelInfo(max_model_len=100, vocab_size=300, moe_layers=2, top_k=2, num_experts=8, eos_token_ids=(7,))
DENSE = ModelInfo(max_model_len=100, vocab_size=300)
HI = [{"role": "user", "content": "hi"}]


def completion(info: ModelInfo = MOE, **fields: Any) -> Any:
    return check(parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode()), info)


def chat(info: ModelInfo = MOE, **fields: Any) -> Any:
    return check(parse_chat(json.dumps({"model": "m", "messages": HI, **fields}).encode()), info)


def refusal(call: Any, *arguments: Any, **fields: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        call(*arguments, **fields)
    return caught.value.message, caught.value.param


def test_an_unknown_field_is_refused_in_the_words_clients_match() -> None:
    with pytest.raises(UnknownField) as caught:
        completion(no_such_format="parquet_v1")
    assert caught.value.body()["error"]["message"] == (
        "Extra inputs are not permitted, field: 'no_such_format'"
    )
    assert caught.value.body()["error"]["code"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"temperature": 3}, "temperature: expected float <= 2.0", "temperature"),
        ({"top_p": 0}, "top_p: expected float > 0.0", "top_p"),
        ({"n": 0}, "n: expected int >= 1", "n"),
        ({"max_tokens": "8"}, "max_tokens: expected int | null, got str", "max_tokens"),
        ({"logprobs": 6}, "logprobs: expected int <= 5", "logprobs"),
        ({"logit_bias": {"5": 200}}, "logit_bias[...]: expected float <= 100.0", "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias: expected int, got str", "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias: token ids must be 0 to 299, got 300", "logit_bias"),
        ({"stop": ["a", ""]}, "stop: strings must not be empty", "stop"),
        ({"stop": ["a"] * 65}, "stop: at most 64 strings, got 65", "stop"),
        ({"top_logprobs": 2}, "top_logprobs: requires logprobs: true", "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1 unless the prompt is echoed", "max_tokens"),
        (
            {"max_tokens": 1, "max_completion_tokens": 2},
            "max_completion_tokens: must equal max_tokens when both are given",
            "max_completion_tokens",
        ),
        (
            {"context_length_exceeded_behavior": "cut"},
            "context_length_exceeded_behavior: must be truncate or error, got 'cut'",
            "context_length_exceeded_behavior",
        ),
        (
            {"include_routing_matrix": True},
            "include_routing_matrix: requires logprobs: true",
            "include_routing_matrix",
        ),
        (
            {"include_routing_matrix": True, "logprobs": 2},
            "include_routing_matrix: requires logprobs: true",
            "include_routing_matrix",
        ),
        ({"suffix": "x"}, "suffix: not supported by this server; leave it out", "suffix"),
        ({"best_of": 3}, "best_of: not supported by this server; leave it out", "best_of"),
        (
            {"response_format": {"type": "grammar"}},
            "response_format.type: invalid value 'grammar'",
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name: expected str matching regex '^[a-zA-Z0-9_-]{1,64}$'",
            "response_format",
        ),
    ],
)
def test_a_completion_that_cannot_be_served_names_the_field(
    fields: dict[str, Any], message: str, param: str
) -> None:
    assert refusal(completion, **fields) == (message, param)


def test_routes_of_a_dense_model_are_refused_with_the_reason() -> None:
    message, param = refusal(completion, DENSE, include_routing_matrix=True, logprobs=True)
    assert message == (
        "include_routing_matrix: this model is dense; it has no mixture-of-experts layers and no routes"
    )
    assert param == "include_routing_matrix"


def test_the_neutral_values_of_optional_fields_ask_for_nothing() -> None:
    neutral = chat(tools=[], tool_choice="none", response_format={"type": "text"}, best_of=None)
    assert (neutral.n, neutral.tools, neutral.answer.schema) == (1, None, None)


def test_fields_that_change_no_token_are_ignored() -> None:
    plain = completion()
    assert completion(metadata={"a": "b"}, store=True, service_tier="flex", speculation="x") == plain


def test_bodies_that_are_not_requests_say_what_is_wrong() -> None:
    assert refusal(parse_completion, b"{nonsense")[0].startswith("the body is not valid JSON: ")
    assert refusal(parse_completion, b'{"model": "m"}') == ("prompt: this field is required", "prompt")
    assert refusal(parse_chat, b"[1]")[0].startswith("the body must be a JSON object: ")
    assert refusal(parse_completion, b'{"model": "m", "prompt": [["a"]]}') == (
        "prompt[0][0]: expected int, got str",
        "prompt",
    )


def test_defaults_are_openais() -> None:
    checked = completion()
    assert (checked.max_tokens, checked.n, checked.stream, checked.logprobs, checked.seed) == (
        16,
        1,
        False,
        None,
        None,
    )
    assert (checked.sampling.temperature, checked.sampling.top_p, checked.sampling.top_k) == (1.0, 1.0, 0)
    assert checked.sampling.stop_token_ids == (7,)
    assert chat().max_tokens is None


def test_sampling_fields_reach_the_engine_parameters() -> None:
    sampling = completion(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1,
        frequency_penalty=0.5, logit_bias={"5": -100}, ignore_eos=True,
    ).sampling  # fmt: skip
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (
        1.2,
        -1.0,
        0.5,
    )
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.stop_token_ids == ()


def test_stop_tokens_stand_beside_the_end_token_or_alone() -> None:
    assert completion(stop_token_ids=[9, 5, 9]).sampling.stop_token_ids == (7, 9, 5)
    assert chat(stop_token_ids=[9], ignore_eos=True).sampling.stop_token_ids == (9,)
    assert refusal(completion, stop_token_ids=[300]) == (
        "stop_token_ids: token ids must be 0 to 299, got 300",
        "stop_token_ids",
    )
    assert refusal(completion, stop_token_ids=[1] * 65)[1] == "stop_token_ids"
    schema = {"type": "json_object"}
    assert refusal(chat, stop_token_ids=[7, 9], response_format=schema) == (
        "stop_token_ids: only the model's end tokens can end an answer that must match a schema, got [9]",
        "stop_token_ids",
    )
    # Clients that render prompts themselves send the end tokens with every request.
    assert chat(stop_token_ids=[7], response_format=schema).sampling.stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("logprobs", "top", "expected"),
    [
        (True, None, ("content", 0)),
        (True, 3, ("content", 3)),
        (False, None, (None, 0)),
        (0, None, ("legacy", 0)),
        (4, None, ("legacy", 4)),
    ],
)
def test_a_boolean_asks_for_the_new_logprobs_and_a_number_for_the_legacy_ones(
    logprobs: bool | int, top: int | None, expected: tuple[str | None, int]
) -> None:
    checked = completion(logprobs=logprobs, top_logprobs=top)
    assert (checked.logprobs, checked.top_logprobs) == expected


def test_max_tokens_is_cut_to_the_context_or_refused_as_asked() -> None:
    prompt = Prompt(tuple(range(90)))
    assert sampling_for(completion(max_tokens=64), prompt, 0, 1, MOE).max_tokens == 10
    assert sampling_for(chat(), prompt, 0, 1, MOE).max_tokens == 10
    strict = completion(max_tokens=11, context_length_exceeded_behavior="error")
    message, param = refusal(sampling_for, strict, prompt, 0, 1, MOE)
    assert (
        "maximum context length is 100 tokens, and prompt of 90 tokens and max_tokens 11 exceed it" in message
    )
    assert param == "max_tokens"


def test_a_prompt_that_fills_the_context_can_only_be_scored() -> None:
    full = Prompt(tuple(range(100)))
    message, param = refusal(sampling_for, completion(), full, 0, 1, MOE)
    said = "the prompt has 100 tokens, with at least one to generate"
    assert message == f"prompt: this model's maximum context length is 100 tokens, and {said}"
    assert param == "prompt"
    scored = completion(max_tokens=0, echo=True)
    assert sampling_for(scored, full, 0, 1, MOE).max_tokens == 0
    assert refusal(sampling_for, scored, Prompt(tuple(range(101))), 0, 1, MOE)[1] == "prompt"


def test_further_prompts_sample_with_seeds_of_their_own() -> None:
    assert [seed_of_prompt(5, 0), seed_of_prompt(5, 1) == seed_of_prompt(5, 2)] == [5, False]
    assert seed_of_prompt(5, 1) == seed_of_prompt(5, 1)
    assert 0 <= seed_of_prompt(-(2**63), 3) < 2**63


def test_prompts_come_in_four_forms() -> None:
    assert split_prompts("a", 10) == ["a"]
    assert split_prompts(["a", "b"], 10) == ["a", "b"]
    assert split_prompts([1, 2], 10) == [(1, 2)]
    assert split_prompts([[1, 2], [3]], 10) == [(1, 2), (3,)]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: expected 1 to 256 prompts, got 0"),
        ([[]], "prompt: must hold at least one token"),
        ([1, "a"], "prompt: must not mix token ids with strings or lists"),
        ([1, 10], "prompt: token ids must be 0 to 9, got 10"),
        ([[-1]], "prompt: token ids must be 0 to 9, got -1"),
    ],
)
def test_prompts_that_are_none_of_them_are_refused(prompt: Any, message: str) -> None:
    assert refusal(split_prompts, prompt, 10) == (message, "prompt")


def test_messages_are_checked_and_their_text_parts_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]
    calls = {"role": "assistant", "content": None, "tool_calls": []}
    assert check_messages([calls]) == [{**calls, "content": ""}]
    image = {"role": "user", "content": [{"type": "image_url"}]}
    assert refusal(check_messages, [*HI, image]) == (
        "messages[1].content[0]: only text parts are supported, got 'image_url'",
        "messages",
    )
    assert refusal(check_messages, [])[1] == "messages"
    assert refusal(check_messages, [{"role": "user"}])[0].startswith("messages[0].content: must be a string")
    assert refusal(check_messages, [{"role": "boss", "content": "x"}])[0].startswith("messages[0].role: ")


def test_a_chat_is_rendered_by_the_models_template_and_tokenized(tmp_path: Path) -> None:
    text = TextModel.load(write_tokenizer(tmp_path))
    rendered = text.render(HI)
    assert rendered == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    assert text.encode_rendered(rendered) == ids(rendered)
    assert ids(rendered).count(IM_END) == 1
    message, param = refusal(text.render, [{"role": "tool", "content": "x"}])
    assert message == "messages: the chat template refused them: no tools here"
    assert param == "messages"


def test_a_template_may_stand_in_the_tokenizer_configuration(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert refusal(TextModel.load(tmp_path).render, HI)[0].startswith(
        "messages: this model has no chat template"
    )
    config = {
        "bos_token": {"content": "<|im_start|>"},
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert TextModel.load(tmp_path).render(HI) == "<|im_start|>hi"


def test_a_template_named_for_tools_is_used_when_there_are_tools(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = {
        "default": "plain {{ messages[0].content }}",
        "tool_use": "{{ tools[0].n }} {{ messages[0].content }}",
    }
    listed = [{"name": name, "template": template} for name, template in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    text = TextModel.load(tmp_path)
    assert (text.render(HI), text.render(HI, [{"n": "f"}])) == ("plain hi", "f hi")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file {{ tools[0].n }}")
    assert TextModel.load(tmp_path).render(HI, [{"n": "f"}]) == "file f"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"template": "x"}]}))
    with pytest.raises(ConfigError, match="the tokenizer cannot be read: 'name'"):
        TextModel.load(tmp_path)


def test_a_directory_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        TextModel.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        TextModel.load(tmp_path)


def test_the_model_is_known_by_its_resource_its_name_and_its_deployment() -> None:
    names = ServedNames(MODEL, DEPLOYMENT)
    assert [names.split(name) for name in (MODEL, "tiny", DEPLOYMENT)] == [None, None, None]
    assert [names.split(f"{name}@run/7@2") for name in (MODEL, "tiny", DEPLOYMENT)] == ["run/7@2"] * 3
    with pytest.raises(NotFound, match=f"model 'tin' is not served here; this server has {MODEL}"):
        names.split("tin")


def test_the_drain_timeout_header_is_a_number_of_seconds() -> None:
    assert (wait_timeout_s(None), wait_timeout_s("0"), wait_timeout_s("2.5")) == (None, 0.0, 2.5)
    for value in ("soon", "-1", "nan", "inf"):
        assert refusal(wait_timeout_s, value)[1] == "x-fireworks-hot-load-drain-timeout"
