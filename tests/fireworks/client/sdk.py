"""What the scripts share: arguments in as JSON on standard input, a result out as JSON on standard output."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from fireworks.training.sdk.deployment import DeploymentManager
from fireworks.training.sdk.sampling import DeploymentSampler, SampledCompletion

#: The client looks every few seconds at how far a load is, for whole models. Here they are small.
LOOK_AGAIN_S = 0.25
_sleep = time.sleep
time.sleep = lambda seconds: _sleep(min(seconds, LOOK_AGAIN_S))

logging.basicConfig(level=logging.INFO, stream=sys.stderr)


def arguments() -> SimpleNamespace:
    return SimpleNamespace(**json.load(sys.stdin))


def answer(result: Any) -> None:
    json.dump(result, sys.stdout)


def manager(given: SimpleNamespace) -> DeploymentManager:
    return DeploymentManager(api_key=given.api_key, base_url=given.url)


def sampler(given: SimpleNamespace) -> DeploymentSampler:
    return DeploymentSampler(
        inference_url=given.url,
        model=f"accounts/acme/deployments/{given.deployment}",
        api_key=given.api_key,
        tokenizer=BytesTokenizer(),
    )


def as_json(completion: SampledCompletion) -> dict[str, Any]:
    return asdict(completion)


def samples(given: SimpleNamespace, prompt: list[int], **options: Any) -> list[dict[str, Any]]:
    """Completions of `prompt` with everything a trainer keeps."""
    asked = {"logprobs": True, "echo": True, "include_routing_matrix": True, **options}

    async def run() -> list[SampledCompletion]:
        return await sampler(given).sample_with_prompt_tokens(prompt, **asked)

    return [as_json(completion) for completion in asyncio.run(run())]


class BytesTokenizer:
    """The built-in model's tokenizer, as far as the sampler uses one: token i is byte i."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_options: Any) -> list[int]:
        start, end, newline = 257, 258, 10
        tokens: list[int] = []
        for message in messages:
            tokens += [start, *f"{message['role']}\n{message['content']}".encode(), end, newline]
        return [*tokens, start, *b"assistant\n"]

    def decode(self, token_ids: list[int], **_options: Any) -> str:
        return bytes(token_ids).decode()
