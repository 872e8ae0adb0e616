"""What each dialect names a thing that all answers have: how a choice ended, and how many tokens a request has. Pure.

Always holds: END_NAMES has every EndReason of an answer (response/answer.py). The shapes of errors are in core/errors.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import UNSET

from midstream.core.types import FinishReason
from midstream.replica.response.answer import EndReason, TokenCounts
from midstream.replica.response.shapes import CachedDetails, Usage
from midstream.replica.wire.answers import (
    InputTokensDetails,
    ItemStatus,
    MessagesUsage,
    OutputTokensDetails,
    ResponsesUsage,
)


class EndNames(NamedTuple):
    """openai: also vLLM's. sglang: no call is parsed there."""

    openai: FinishReason
    sglang: str
    messages: str
    responses: ItemStatus


END_NAMES: Mapping[EndReason, EndNames] = {
    "end": EndNames("stop", "stop", "end_turn", "completed"),
    "stop": EndNames("stop", "stop", "stop_sequence", "completed"),
    "length": EndNames("length", "length", "max_tokens", "incomplete"),
    "context": EndNames("length", "length", "model_context_window_exceeded", "incomplete"),
    "tool_calls": EndNames("tool_calls", "stop", "tool_use", "completed"),
    "abort": EndNames("abort", "abort", "max_tokens", "incomplete"),
    "dead_end": EndNames("dead_end", "dead_end", "max_tokens", "incomplete"),
}
#: What SGLang's reason says beside its name.
SGLANG_MESSAGES: Mapping[EndReason, str] = {
    "abort": "a trainer ended this request",
    "dead_end": "no token may follow, by what the answer must match",
}
#: How choices end for which the Messages API and the Responses API have no name: `midstream` tells it.
UNNAMED: tuple[EndReason, ...] = ("abort", "dead_end")


def openai_usage(counts: TokenCounts) -> Usage:
    details = UNSET if counts.cached is None else CachedDetails(counts.cached)
    return Usage(counts.prompt, counts.completion, counts.prompt + counts.completion, details)


def messages_usage(counts: TokenCounts) -> MessagesUsage:
    return MessagesUsage(counts.prompt - (counts.cached or 0), counts.completion, counts.cached)


def responses_usage(counts: TokenCounts, reasoning: int) -> ResponsesUsage:
    return ResponsesUsage(
        counts.prompt,
        InputTokensDetails(counts.cached, 0),
        counts.completion,
        OutputTokensDetails(reasoning),
        counts.prompt + counts.completion,
    )
