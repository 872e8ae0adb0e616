"""What the scripts for an SDK's venv share: arguments as JSON on standard input, a result as JSON on standard output."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import tinker
from tinker import types

logging.basicConfig(level=logging.INFO, stream=sys.stderr)


def arguments() -> SimpleNamespace:
    return SimpleNamespace(**json.load(sys.stdin))


def answer(result: Any) -> NoReturn:
    """The last act of a script. It ends at once: the SDK's threads may crash an interpreter that shuts down."""
    json.dump(result, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


def service(given: SimpleNamespace) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=given.url, api_key=given.api_key)


def made(client: Any) -> Any:
    """What a call of ServiceClient made: 0.38 answers with a future of it."""
    return client.result() if hasattr(client, "result") else client


def close(client: tinker.ServiceClient) -> None:
    """0.24 cannot."""
    if hasattr(client, "close"):
        client.close("success").result()


def prompt_of(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def as_json(response: types.SampleResponse) -> dict[str, Any]:
    return {
        "sequences": [
            {"tokens": list(s.tokens), "logprobs": list(s.logprobs), "stop_reason": s.stop_reason}
            for s in response.sequences
        ],
        "prompt_logprobs": response.prompt_logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
        "cached": response.prompt_cache_hit_tokens,
    }


def refusal(call: Callable[[], Any]) -> dict[str, Any]:
    """The exception that a user sees."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return {
            "type": type(error).__name__,
            "status": getattr(error, "status_code", None),
            "text": str(error),
        }
    return {}
