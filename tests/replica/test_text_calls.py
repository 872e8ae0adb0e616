"""vLLM's tokenize and detokenize against the ids that a request has."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from replica_fakes import HE, IM_END, IM_START, FakeEngine, byte_tokenizer, ids, running
from test_replica_wire import ask, refusal
from test_vllm_fields import write_template
from tokenizers import processors

CHAT = [{"role": "user", "content": "he said"}]


def write_with_first_token(directory: Path) -> Path:
    """A template with a variable, and a tokenizer that adds a token of its own where it is asked to."""
    write_template(directory)
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", IM_END)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


async def test_tokens_are_those_of_a_request_and_their_text_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        said = (await here.http.post("/tokenize", json={"prompt": "he a", "return_token_strs": True})).json()
        assert said == {
            "count": 3, "max_model_len": 128, "tokens": [HE, 32, 97], "token_strs": ["he", "Ġ", "a"],
        }  # fmt: skip
        chat = (await here.http.post("/tokenize", json={"messages": CHAT})).json()
        assert chat["token_strs"] is None
        await ask(here, "/v1/chat/completions", messages=CHAT, max_tokens=1)
        assert tuple(chat["tokens"]) == here.engine.requests[-1].prompt
        whole = {"tokens": [IM_START, *ids("he"), IM_END]}
        answer = await here.http.post("/detokenize", json=whole)
        assert answer.json() == {"prompt": "<|im_start|>he<|im_end|>"}
        assert (await here.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
        told = (await here.http.post("/detokenize", json={**whole, "return_token_texts": True})).json()
        assert told["prompt"] == answer.json()["prompt"]
        assert len(told["token_texts"]) == len(whole["tokens"])
        # These are all of whole characters.
        assert "".join(told["token_texts"]) == told["prompt"]
        nothing = {"tokens": [], "return_token_texts": True}
        assert (await here.http.post("/detokenize", json=nothing)).json() == {"prompt": "", "token_texts": []}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ messages }}"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"mood": "glad"}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a" * 10_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 129}, "tokens"),
    ],
)
async def test_what_is_refused_is_named(tmp_path: Path, path: str, body: dict[str, Any], param: str) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        status, message, named = refusal(await here.http.post(path, json=body))
        assert (status, named) == (400, param), message


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": CHAT, "chat_template_kwargs": {"mood": "glad"}},
        {"messages": CHAT, "chat_template_kwargs": {}, "add_generation_prompt": True},
        {"messages": CHAT, "add_generation_prompt": False},
        {"messages": [*CHAT, {"role": "assistant", "content": "he"}], "continue_final_message": True},
        {"messages": CHAT, "add_special_tokens": True},
        {"prompt": "he", "add_special_tokens": False},
        {"prompt": "he"},
    ],
)
async def test_the_fields_that_shape_a_prompt_shape_its_token_ids(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """NeMo Gym asks for the ids of each turn with the template's variables of the turn."""
    async with running(tmp_path, FakeEngine(), write=write_with_first_token) as here:
        answer = await here.http.post("/tokenize", json=fields)
        assert answer.status_code == 200, answer.text
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        await ask(here, path, max_tokens=1, **fields)
        assert tuple(answer.json()["tokens"]) == here.engine.requests[-1].prompt


async def test_a_rendered_request_is_taken_as_it_is_and_generates_the_same(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        asked = {"messages": CHAT, "max_tokens": 4, "seed": 3, "temperature": 0.5, "stop": ["zz"], "cache_salt": "a",
                 "logprobs": True, "top_logprobs": 1, "logit_bias": {"65": 1.0}}  # fmt: skip
        rendered = (await here.http.post("/v1/chat/completions/render", json=asked)).json()
        assert rendered["sampling_params"]["logprobs"] == 1
        answer = (await here.http.post("/inference/v1/generate", json=rendered)).json()
        await ask(here, "/v1/chat/completions", **asked)
        posted, chat = here.engine.requests[-2:]
        assert posted.prompt == tuple(rendered["token_ids"]) == chat.prompt
        assert (posted.sampling, posted.salt) == (chat.sampling, chat.salt)
        assert len(answer["choices"][0]["logprobs"]["content"]) == 4
        two = (await here.http.post("/v1/completions/render", json={"prompt": ["he", [65]]})).json()
        assert [one["token_ids"] for one in two] == [[HE], [65]]
        assert [one["sampling_params"]["max_tokens"] for one in two] == [16, 16]


async def test_a_rendered_request_asks_for_the_masks_that_the_chat_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        asked = {
            "messages": CHAT,
            "max_tokens": 4,
            "logprobs": True,
            "top_p": 0.9,
            "return_sampling_mask": True,
        }
        rendered = (await here.http.post("/v1/chat/completions/render", json=asked)).json()
        answer = (await here.http.post("/inference/v1/generate", json=rendered)).json()
        assert len(answer["choices"][0]["sampling_mask"]) == 4
        assert here.engine.requests[-1].want_masks


@pytest.mark.parametrize("field", [{"temperature": 0}, {"skip_special_tokens": False}, {"top_k": 0}])
async def test_what_is_nothing_or_false_is_rendered_too(tmp_path: Path, field: dict[str, Any]) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        asked = {"messages": CHAT, "max_tokens": 4, **field}
        rendered = (await here.http.post("/v1/chat/completions/render", json=asked)).json()
        assert rendered["sampling_params"] == {"max_tokens": 4, **field}
        await here.http.post("/inference/v1/generate", json=rendered)
        await ask(here, "/v1/chat/completions", **asked)
        posted, chat = here.engine.requests[-2:]
        # Unless it is given, each has a seed of its own.
        assert replace(posted.sampling, seed=0) == replace(chat.sampling, seed=0)


async def test_trl_reads_ids_and_log_probabilities_of_a_completion(tmp_path: Path) -> None:
    """As asynchronous GRPO of TRL 1.16 asks."""

    async with running(tmp_path, FakeEngine("hello")) as here:
        asked: dict[str, Any] = {"prompt": [65, 66], "n": 1, "logprobs": 0, "return_token_ids": True}
        (choice,) = (await ask(here, max_tokens=3, **asked)).json()["choices"]
        assert choice["token_ids"] == [HE, 108, 108]
        assert choice["logprobs"]["token_logprobs"] == [-2.0, -3.0, -4.0]
