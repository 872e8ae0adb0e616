"""A prompt that does not fit the context is refused in words that clients know, so that they cut their conversation.

What each client looks for is quoted from the files of its package. A client that finds nothing of it ends its run, or asks
again in vain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replica_fakes import MODEL, FakeEngine, running

#: litellm 1.110.2, litellm_core_utils/exception_mapping_utils.py: parts of the error's text in lower case.
LITELLM = (
    "exceed context limit",
    "this model's maximum context length is",
    "requested token count exceeds the model's maximum context length",
    "string too long. expected a string with maximum length",
    "model's maximum context limit",
    "is longer than the model's context length",
    "input tokens exceed the configured limit",
    "`inputs` tokens + `max_new_tokens` must be",
    "exceeds the available context size",
    "exceeds the maximum number of tokens allowed",
    '"code": "context_length_exceeded"',
    "prompt is too long",
)
#: verifiers 0.4.0, v1/harnesses/utils/compaction.py: parts of the error and its body, casefolded, with status 400 or 413.
VERIFIERS = (
    "context_length_exceeded",
    "exceeds the context window",
    "reduce the length of the messages",
    "maximum context length",
    "prompt is too long",
    "request_too_large",
    "request entity too large",
    "exceeds the maximum number of tokens",
    "maximum prompt length is",
)
#: inspect_ai 0.3.285: the code, in model/_openai.py; parts of the message, in model/_providers/vllm.py and anthropic.py.
INSPECT_CODE = "context_length_exceeded"
INSPECT_VLLM = ("maximum context length", "max_tokens must be at least 1")
INSPECT_ANTHROPIC = (
    "prompt is too long",
    "input is too long",
    "input length and `max_tokens` exceed context limit",
)
#: pi, @mariozechner/pi-ai 0.73.1, dist/utils/overflow.js: those of its patterns that are OpenAI's and Anthropic's.
PI = (
    r"prompt is too long",
    r"request_too_large",
    r"exceeds the context window",
    r"reduce the length of the messages",
    r"maximum context length is \d+ tokens",
    r"context[_ ]length[_ ]exceeded",
)
PI_OTHERWISE = (r"^(Throttling error|Service unavailable):", r"rate limit", r"too many requests")


def litellm(status: int, error: dict[str, Any]) -> bool:
    return status == 400 and any(marker in error["message"].lower() for marker in LITELLM)


def verifiers(status: int, error: dict[str, Any]) -> bool:
    return status in (400, 413) and any(marker in str(error).casefold() for marker in VERIFIERS)


def inspect_openai(status: int, error: dict[str, Any]) -> bool:
    in_words = any(marker in error["message"] for marker in INSPECT_VLLM)
    return status == 400 and error["code"] == INSPECT_CODE and in_words


def inspect_anthropic(status: int, error: dict[str, Any]) -> bool:
    return status == 400 and any(marker in error["message"].lower() for marker in INSPECT_ANTHROPIC)


def pi(status: int, error: dict[str, Any]) -> bool:
    found = any(re.search(pattern, error["message"], re.IGNORECASE) for pattern in PI)
    return found and not any(re.search(pattern, error["message"], re.IGNORECASE) for pattern in PI_OTHERWISE)


Known = Callable[[int, dict[str, Any]], bool]
OPENAI: tuple[Known, ...] = (litellm, verifiers, inspect_openai, pi)
ANTHROPIC: tuple[Known, ...] = (litellm, verifiers, inspect_anthropic, pi)
LONG = "a b" * 200
HI = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
#: Each way in which a request is found to be too long: unread, by pieces, rendered, by its ids, with its answer.
TOO_LONG: dict[str, tuple[str, dict[str, Any], tuple[Known, ...]]] = {
    "chat, rendered": (CHAT, {"messages": [{"role": "user", "content": "xy" * 70}]}, OPENAI),
    "chat, unread": (CHAT, {"messages": [{"role": "user", "content": "ab" * 5000}]}, OPENAI),
    "chat, many messages": (CHAT, {"messages": HI * 200}, OPENAI),
    "chat, a stream": (CHAT, {"messages": [{"role": "user", "content": LONG}], "stream": True}, OPENAI),
    "chat, with its answer": (
        CHAT,
        {"messages": HI, "max_tokens": 5000, "context_length_exceeded_behavior": "error"},
        OPENAI,
    ),
    "completions": ("/v1/completions", {"prompt": LONG}, OPENAI),
    "completions of ids": ("/v1/completions", {"prompt": [5] * 200}, OPENAI),
    "completions, the second prompt": ("/v1/completions", {"prompt": ["a", LONG]}, OPENAI),
    "responses": (RESPONSES, {"input": LONG}, OPENAI),
    "responses, unread": (RESPONSES, {"input": [{"role": "user", "content": "ab" * 5000}]}, OPENAI),
    "messages": (MESSAGES, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}, ANTHROPIC),
    "messages, unread": (
        MESSAGES,
        {"messages": [{"role": "user", "content": "ab" * 5000}], "max_tokens": 4},
        ANTHROPIC,
    ),
    "messages, its system": (MESSAGES, {"system": LONG, "messages": HI, "max_tokens": 4}, ANTHROPIC),
}


@pytest.mark.parametrize("name", TOO_LONG)
async def test_clients_know_a_context_that_overflows(tmp_path: Path, name: str) -> None:
    path, body, clients = TOO_LONG[name]

    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.http.post(path, json={"model": MODEL, **body})
        error = answer.json()["error"]
        assert [one.__name__ for one in clients if not one(answer.status_code, error)] == []
        if path == MESSAGES:
            found = re.match(r"prompt is too long: (\d+) tokens > 128 maximum; ", error["message"])
            assert found is not None
            assert int(found[1]) > 128
            assert error["type"] == "invalid_request_error"
        else:
            assert "this model's maximum context length is 128 tokens" in error["message"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
            # It still says which field is too long.
            assert error["message"].startswith((error["param"], "max_tokens"))


async def test_another_refusal_is_no_overflow(tmp_path: Path) -> None:
    async with running(tmp_path, FakeEngine()) as here:
        answer = await here.http.post(CHAT, json={"model": MODEL, "messages": HI, "max_tokens": -1})
        error = answer.json()["error"]
        assert [one.__name__ for one in OPENAI if one(answer.status_code, error)] == []
