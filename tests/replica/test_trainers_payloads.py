"""The bodies that public trainers post, with the fields of the answers that they read. Taken by name from their wheels.

A path into an answer: `*` is each one of a list, which must not be empty; a value that it ends at must not be null.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from replica_fakes import MODEL, RANK, FakeEngine, ids, running
from test_replica_tool_api import engine_saying
from test_replica_tool_api import play as play_with
from test_replica_wire import refusal

IDS = [65, 66, 67]
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
SESSION = {"X-Session-ID": "s"}
TRL = "trl 1.16.0"
VERIFIERS = "verifiers 0.4.0"
SKYRL = "skyrl 0.3.0"
AREAL = "areal 1.0.4"
ART = "openpipe-art 0.5.18"

#: What the engine says in two tokens.
SAMPLED = (*ids("he"), *ids("l"))
#: Paths of tokens by name, in a choice.
NAMES = ("logprobs.tokens.*", "logprobs.content.*.token")


class Post(NamedTuple):
    """source: the file of the client. reads: paths into the answer that the client reads."""

    client: str
    source: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    reads: tuple[str, ...]


TRL_TURN = {
    "model": MODEL,
    "prompt": IDS,
    "max_tokens": 2,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "n": 1,
    "return_token_ids": True,
    "seed": 2**63 - 1,
}
TRL_SAMPLING = {
    "n": 2,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 2,
}
TRL_CHAT = {
    "model": MODEL,
    **TRL_SAMPLING,
    "logprobs": True,
    "top_logprobs": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "messages": HI,
}
TRL_COMPLETIONS = {
    "model": MODEL,
    "prompt": [IDS, IDS],
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    **TRL_SAMPLING,
    "logprobs": 0,
}
SKYRL_SAMPLING = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 2,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}
SKYRL_GENERATE = {"sampling_params": SKYRL_SAMPLING, "model": MODEL, "token_ids": IDS}
AREAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": 10**8,
    "max_tokens": 2,
    "temperature": 1.0,
    "stop_token_ids": [],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_tokens_as_token_ids": True,
    "logprobs": 0,
    "use_beam_search": False,
    "stream": False,
}
AREAL_SGLANG = {
    "input_ids": IDS,
    "image_data": None,
    "return_logprob": True,
    "stream": False,
    "sampling_params": {
        "top_p": 1.0,
        "top_k": 10**8,
        "max_new_tokens": 2,
        "temperature": 1.0,
        "stop_token_ids": [],
        "ignore_eos": False,
        "skip_special_tokens": True,
        "frequency_penalty": 0.0,
    },
}
TRL_SCORE = {"model": MODEL, "prompt": [IDS, IDS], "max_tokens": 1, "temperature": 1.0}
TRL_FEATURES = {
    "request_id": "trl-0",
    "model": MODEL,
    "token_ids": IDS,
    "sampling_params": {**TRL_SAMPLING, "logprobs": 0, "output_kind": 2},
}
RENDERED = {
    "temperature": 1.0,
    "max_tokens": 2,
    "stop_token_ids": [99],
    "logprobs": 1,
    "skip_special_tokens": False,
}
#: As its rollouts send it. They train on log-probabilities, which they have to ask for here.
ART_CHAT = {
    "model": MODEL,
    "messages": HI,
    "max_tokens": 2,
    "temperature": 1.0,
    "tools": [TOOL],
    "tool_choice": "auto",
}
TOKEN_LOGPROBS = ("choices.*.token_ids.*", "choices.*.logprobs.token_logprobs.*")
CONTENT_LOGPROBS = ("choices.*.token_ids.*", "choices.*.logprobs.content.*.logprob")
CONTENT_NAMES = ("choices.*.logprobs.content.*.token", "choices.*.logprobs.content.*.logprob")

TAKEN: dict[str, Post] = {
    "trl-async-grpo": Post(
        *(TRL, "trl/experimental/async_grpo/async_rollout_worker.py", COMPLETIONS, {}),
        {**TRL_TURN, "logprobs": 0, "min_p": 0.0},
        TOKEN_LOGPROBS,
    ),
    "trl-async-distillation": Post(
        *(TRL, "trl/experimental/async_distillation/async_rollout_worker.py", COMPLETIONS, {}),
        TRL_TURN,
        ("choices.*.token_ids.*",),
    ),
    "trl-teacher": Post(
        *(TRL, "trl/experimental/async_distillation/async_rollout_worker.py", COMPLETIONS, {}),
        {"model": MODEL, "prompt": IDS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 20},
        ("choices.0.prompt_logprobs.1.66.logprob", "choices.0.prompt_logprobs.1.66.rank"),
    ),
    "trl-generate": Post(
        *(TRL, "trl/generation/vllm_client.py", COMPLETIONS, {}),
        TRL_COMPLETIONS,
        (*TOKEN_LOGPROBS, "choices.*.prompt_token_ids.*", "choices.*.logprobs.tokens.*"),
    ),
    "trl-chat": Post(
        *(TRL, "trl/generation/vllm_client.py", CHAT, {}),
        TRL_CHAT,
        ("prompt_token_ids.*", "choices.*.token_ids.*", *CONTENT_NAMES),
    ),
    "trl-chat-tools": Post(
        *(TRL, "trl/generation/vllm_client.py", CHAT, {}),
        {**TRL_CHAT, "tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {"x": 1}},
        ("prompt_token_ids.*", "choices.*.token_ids.*", *CONTENT_NAMES),
    ),
    "trl-sequence-logprobs": Post(
        *(TRL, "trl/generation/vllm_client.py", COMPLETIONS, {}),
        {**TRL_SCORE, "prompt_logprobs": 20},
        ("choices.*.prompt_logprobs.1.66.logprob", "choices.*.prompt_logprobs.1.66.rank"),
    ),
    "verifiers-chat": Post(
        *(VERIFIERS, "verifiers/v1/dialects/chat.py, clients/eval.py", CHAT, SESSION),
        {"model": MODEL, "messages": HI, "tools": [TOOL], "temperature": 1.0, "top_p": 1.0, "max_tokens": 2},
        (
            *("id", "created", "model", "choices.*.message.content", "choices.*.finish_reason"),
            *("usage.prompt_tokens", "usage.completion_tokens"),
        ),
    ),
    "verifiers-responses": Post(
        *(VERIFIERS, "verifiers/v1/dialects/responses.py", "/v1/responses", SESSION),
        {"model": MODEL, "input": "hi", "temperature": 1.0, "top_p": 1.0, "max_output_tokens": 2},
        ("id", "model", "status", "output.*.content.*.text", "usage.input_tokens", "usage.output_tokens"),
    ),
    "verifiers-messages": Post(
        *(VERIFIERS, "verifiers/v1/dialects/anthropic.py", "/v1/messages"),
        {**SESSION, "x-api-key": "KEY", "anthropic-version": "2023-06-01"},
        {"model": MODEL, "messages": HI, "temperature": 1.0, "top_p": 1.0, "max_tokens": 2},
        ("id", "model", "content.*.text", "stop_reason", "usage.input_tokens", "usage.output_tokens"),
    ),
    "verifiers-train": Post(
        *(VERIFIERS, "verifiers/v1/clients/train.py, through renderers/client.py", GENERATE, SESSION),
        {"model": MODEL, "token_ids": IDS, "sampling_params": RENDERED, "cache_salt": "0"},
        ("request_id", *CONTENT_LOGPROBS, "choices.*.logprobs.content.*.token", "choices.*.finish_reason"),
    ),
    "verifiers-train-later-turn": Post(
        *(VERIFIERS, "verifiers/v1/clients/train.py, through renderers/client.py", GENERATE, SESSION),
        {
            "model": MODEL,
            "token_ids": IDS,
            "sampling_params": {**RENDERED, "routed_experts_prompt_start": 2},
        },
        ("request_id", *CONTENT_LOGPROBS, "choices.*.logprobs.content.*.token", "choices.*.finish_reason"),
    ),
    "skyrl-generate": Post(
        *(
            SKYRL,
            "skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py",
            GENERATE,
            SESSION,
        ),
        {**SKYRL_GENERATE, "cache_salt": "0"},
        (*CONTENT_LOGPROBS, "choices.*.finish_reason"),
    ),
    "skyrl-sample": Post(
        *(
            SKYRL,
            "skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py",
            GENERATE,
            SESSION,
        ),
        {
            "sampling_params": {
                "n": 2,
                "logprobs": 0,
                "output_kind": 2,
                "prompt_logprobs": 0,
                "temperature": 1.0,
                "max_tokens": 2,
                "seed": 1,
                "top_k": -1,
                "top_p": 1.0,
                "stop": ["x"],
            },
            "model": MODEL,
            "token_ids": IDS,
        },
        (*CONTENT_LOGPROBS, "choices.*.finish_reason", "prompt_logprobs.1.66.logprob"),
    ),
    "skyrl-tinker-forward": Post(
        *(SKYRL, "skyrl/tinker/extra/skyrl_train_inference_forwarding.py", COMPLETIONS, SESSION),
        {
            "model": MODEL,
            "prompt": IDS,
            "n": 2,
            "seed": None,
            "max_tokens": 2,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": 1,
            "stream": False,
            "return_token_ids": True,
            "stop_token_ids": [99],
        },
        (*TOKEN_LOGPROBS, "choices.*.finish_reason"),
    ),
    "skyrl-tokenize": Post(
        *(SKYRL, "skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py", "/tokenize", {}),
        {"model": MODEL, "prompt": "abc", "add_special_tokens": True},
        ("tokens.*",),
    ),
    "skyrl-detokenize": Post(
        *(
            SKYRL,
            "skyrl/backends/skyrl_train/inference_servers/remote_inference_client.py",
            "/detokenize",
            {},
        ),
        {"model": MODEL, "tokens": IDS},
        ("prompt",),
    ),
    "areal-vllm": Post(
        *(AREAL, "areal/engine/vllm_remote.py", COMPLETIONS, {}),
        {**AREAL_SAMPLING, "prompt": IDS},
        (
            *("choices.0.finish_reason", "choices.*.logprobs.tokens.*"),
            "choices.0.logprobs.token_logprobs.*",
        ),
    ),
    "areal-vllm-chat": Post(
        *(AREAL, "areal/engine/vllm_remote.py", CHAT, {}),
        {**AREAL_SAMPLING, "logprobs": True, "messages": HI},
        ("choices.0.finish_reason", *CONTENT_NAMES),
    ),
    "areal-vllm-score": Post(
        *(AREAL, "areal/engine/vllm_remote.py", COMPLETIONS, {}),
        {
            "prompt": IDS,
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": 1,
            "prompt_logprobs": 1,
            "echo": True,
        },
        ("choices.0.prompt_logprobs.1.66.logprob",),
    ),
    "areal-sglang": Post(
        *(AREAL, "areal/engine/sglang_remote.py", "/generate", {}),
        {**AREAL_SGLANG, "return_routed_experts": True},
        (
            *("meta_info.finish_reason.type", "meta_info.output_token_logprobs.*.0"),
            *("meta_info.output_token_logprobs.*.1", "meta_info.prompt_tokens"),
            *("meta_info.completion_tokens", "meta_info.routed_experts"),
        ),
    ),
    "areal-sglang-score": Post(
        *(AREAL, "areal/engine/sglang_remote.py", "/generate", {}),
        {
            "input_ids": IDS,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 0,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "stream": False,
        },
        ("meta_info.input_token_logprobs.1.0", "meta_info.input_token_logprobs.2.0"),
    ),
    "art-chat": Post(
        *(ART, "art/pipeline_trainer/binary_prefix_tool_pipeline.py", CHAT, {}),
        {**ART_CHAT, "logprobs": True, "return_tokens_as_token_ids": True},
        ("choices.*.message.content", *CONTENT_NAMES, "choices.*.logprobs.content.*.bytes"),
    ),
    "art-group": Post(
        *(ART, "art/pipeline_trainer/yes_no_maybe_pipeline.py", CHAT, {}),
        {
            "model": MODEL,
            "messages": HI,
            "max_tokens": 2,
            "n": 4,
            "logprobs": True,
            "return_tokens_as_token_ids": True,
        },
        ("choices.*.message.content", *CONTENT_NAMES),
    ),
    "art-chat-as-it-is": Post(
        *(ART, "art/pipeline_trainer/binary_prefix_tool_pipeline.py", CHAT, {}),
        ART_CHAT,
        ("choices.*.message.content", "usage.prompt_tokens", "usage.completion_tokens"),
    ),
}

BEAMS = {**AREAL_SAMPLING, "prompt": IDS, "use_beam_search": True}
IMAGE = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
]
#: Path, body, status and the field that the error names.
REFUSED: dict[str, tuple[str, dict[str, Any], int, str | None]] = {
    "trl-images": (GENERATE, {**TRL_FEATURES, "features": {"mm_hashes": {}}}, 400, "features"),
    "trl-chat-template": (CHAT, {**TRL_CHAT, "chat_template": "{{ messages }}"}, 400, "chat_template"),
    "trl-hundred-alternatives": (COMPLETIONS, {**TRL_SCORE, "prompt_logprobs": 100}, 400, "prompt_logprobs"),
    "areal-beams": (COMPLETIONS, BEAMS, 400, "use_beam_search"),
    "areal-images": (CHAT, {**AREAL_SAMPLING, "logprobs": True, "messages": IMAGE}, 400, "messages"),
    "areal-sglang-images": ("/generate", {**AREAL_SGLANG, "image_data": ["AA=="]}, 400, "image_data"),
    "areal-adapter": (COMPLETIONS, {**AREAL_SAMPLING, "prompt": IDS, "model": "lora-v1"}, 404, "model"),
    "areal-sglang-adapter": ("/generate", {**AREAL_SGLANG, "lora_path": "lora-v1"}, 404, "model"),
    "skyrl-routes": ("/skyrl/v1/generate", SKYRL_GENERATE, 404, None),
}


def values(found: Any, path: str) -> list[Any]:
    """What stands at a path. Raises KeyError and IndexError when nothing does."""
    here = [found]
    for name in path.split("."):
        if name == "*":
            assert all(here), path
            here = [each for value in here for each in value]
        else:
            here = [value[int(name)] if isinstance(value, list) else value[name] for value in here]
    return here


@pytest.mark.parametrize("name", TAKEN)
async def test_what_a_trainer_posts_is_taken_and_what_it_reads_is_there(tmp_path: Path, name: str) -> None:
    post = TAKEN[name]

    tools = "tools" in post.body
    entered = play_with(tmp_path, engine_saying("hello")) if tools else running(tmp_path, FakeEngine())
    async with entered as here:
        answer = await here.http.post(post.path, json=post.body, headers=post.headers)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        for path in post.reads:
            assert None not in values(found, path), path
        if tools:
            return
        for choice in found.get("choices", []):
            assert tuple(choice.get("token_ids", SAMPLED)) == SAMPLED
            names = {path: values(choice, path) for path in NAMES if f"choices.*.{path}" in post.reads}
            if post.path == GENERATE or post.body.get("return_tokens_as_token_ids"):
                assert all(found == [f"token_id:{token}" for token in SAMPLED] for found in names.values())


async def test_areal_reads_the_scored_token_first_and_routes_as_int32(tmp_path: Path) -> None:
    """AReaL takes the first entry of each position for the prompt's own token."""

    async with running(tmp_path, FakeEngine()) as here:
        post = TAKEN["areal-vllm-score"]
        scored = (await here.http.post(post.path, json=post.body)).json()["choices"][0]["prompt_logprobs"]
        assert [next(iter(entries.items()))[0] for entries in scored[1:]] == ["66", "67"]
        assert [next(iter(entries.values()))["logprob"] for entries in scored[1:]] == [-1.0, -2.0]
        post = TAKEN["areal-sglang"]
        meta = (await here.http.post(post.path, json=post.body)).json()["meta_info"]
        assert [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]] == [
            (-position, token) for position, token in enumerate(SAMPLED, len(IDS))
        ]
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
        routed = meta["prompt_tokens"] + meta["completion_tokens"] - 1
        assert rows.reshape(routed, -1).tolist() == [[1, 66], [2, 67], [3, SAMPLED[0] % 256], [4, SAMPLED[1]]]
        post = TAKEN["areal-sglang-score"]
        meta = (await here.http.post(post.path, json=post.body)).json()["meta_info"]
        assert [entry[0] for entry in meta["input_token_logprobs"]][-2:] == [-1.0, -2.0]


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path, body, status, param = REFUSED[name]

    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert param is None or refusal(answer)[2] == param, answer.text
        assert not here.engine.requests


async def test_a_token_outside_its_alternatives_has_its_own_rank(tmp_path: Path) -> None:
    """TRL's distillation sorts by rank, and fails on null."""

    async with running(tmp_path, FakeEngine()) as here:
        post = TAKEN["trl-teacher"]
        answer = await here.http.post(
            post.path, json={**post.body, "prompt": [65, 120], "prompt_logprobs": 8}
        )
        (_, entries) = answer.json()["choices"][0]["prompt_logprobs"]
        assert [entry["rank"] for entry in entries.values()] == [RANK, *range(1, 9)]
        assert entries["120"]["logprob"] == -1.0


async def test_tools_that_may_not_be_called_are_in_the_prompt(tmp_path: Path) -> None:
    """TRL sends tool_choice none and expects vLLM's prompt, which lists the tools."""

    async with play_with(tmp_path, engine_saying("hello")) as here:
        sizes = []
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "auto"}):
            answer = await here.http.post(CHAT, json={**TRL_CHAT, **more})
            sizes.append(len(answer.json()["prompt_token_ids"]))
        assert sizes[0] < sizes[1] == sizes[2]
