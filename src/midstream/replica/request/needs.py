"""What a request needs of the engine: the table of fields and features. Pure.

Owns: which fields are refused when the engine lacks a feature. Features that are not in the table make a result less exact
and refuse nothing (docs/engines.md says what).
Always holds: what needs a feature that the engine does not have is refused before it waits for anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from midstream.core.engine_words import declared, engine_name, refusal
from midstream.core.errors import InvalidRequest
from midstream.core.resumption import CannotResume
from midstream.core.types import ModelInfo
from midstream.replica.request.checked import Checked
from midstream.replica.request.schema import InferenceBody


class RequestNeed(NamedTuple):
    """feature: what a request of which `asked` holds needs. words: what an engine without it does not do."""

    feature: str
    param: str
    asked: Callable[[Checked, InferenceBody], bool]
    words: str


_PROMPT_LOGPROBS = "return log-probabilities of prompt tokens"
_PENALTIES = "apply penalties"
_LIMITS = "forbid tokens"
_GRAMMARS = "constrain answers to a schema, or not with this model's tokenizer"

REQUEST_NEEDS = (
    RequestNeed("routes", "include_routing_matrix", lambda checked, _: checked.routes, "return MoE routes"),
    RequestNeed(
        "router_weights",
        "return_router_weights",
        lambda checked, _: checked.router_weights,
        "return router weights",
    ),
    RequestNeed(
        "sampling_masks", "return_sampling_mask", lambda checked, _: checked.masks, "return sampling masks"
    ),
    RequestNeed(
        "prompt_logprobs",
        "echo_last",
        lambda checked, body: _scores_prompt(checked) and body.echo_last is not None,
        _PROMPT_LOGPROBS,
    ),
    RequestNeed("prompt_logprobs", "echo", lambda checked, _: _scores_prompt(checked), _PROMPT_LOGPROBS),
    RequestNeed(
        "prompt_logprobs",
        "prompt_logprobs",
        lambda checked, _: checked.prompt_from is not None,
        _PROMPT_LOGPROBS,
    ),
    RequestNeed(
        "grammars", "response_format", lambda checked, _: _answers(checked, "response_format"), _GRAMMARS
    ),
    RequestNeed(
        "grammars",
        "structured_outputs",
        lambda checked, _: _answers(checked, "structured_outputs"),
        _GRAMMARS,
    ),
    RequestNeed(
        "grammars",
        "tools",
        lambda checked, _: checked.tools is not None and checked.tools.constrained,
        _GRAMMARS,
    ),
    RequestNeed(
        "logit_bias", "logit_bias", lambda checked, _: bool(checked.sampling.logit_bias), "take a bias"
    ),
    RequestNeed(
        "logit_bias",
        "repetition_penalty",
        lambda checked, _: checked.sampling.repetition_penalty != 1.0,
        _PENALTIES,
    ),
    RequestNeed(
        "logit_bias",
        "presence_penalty",
        lambda checked, _: checked.sampling.presence_penalty != 0.0,
        _PENALTIES,
    ),
    RequestNeed(
        "logit_bias",
        "frequency_penalty",
        lambda checked, _: checked.sampling.frequency_penalty != 0.0,
        _PENALTIES,
    ),
    RequestNeed("token_limits", "min_tokens", lambda checked, _: checked.sampling.min_tokens > 0, _LIMITS),
    RequestNeed(
        "token_limits",
        "allowed_token_ids",
        lambda checked, _: bool(checked.sampling.allowed_token_ids),
        _LIMITS,
    ),
    RequestNeed("token_limits", "bad_words", lambda checked, _: bool(checked.sampling.bad_words), _LIMITS),
    RequestNeed(
        "priorities", "priority", lambda checked, _: checked.priority != 0, "order requests by priority"
    ),
)


def lacks_any(info: ModelInfo) -> bool:
    """Whether there is a need that the engine does not meet."""
    card = declared(info)
    return any(not card.has(need.feature) for need in REQUEST_NEEDS)


def check_needs(checked: Checked, body: InferenceBody, info: ModelInfo) -> None:
    """Raises InvalidRequest, which names the field, the engine and the feature, for the first need that is not met."""
    card = declared(info)
    for need in REQUEST_NEEDS:
        if not card.has(need.feature) and need.asked(checked, body):
            message = refusal(need.param, card, need.feature, need.words)
            raise InvalidRequest(message, param=need.param)


def check_resume(info: ModelInfo) -> None:
    """Raises CannotResume if the engine cannot continue a stream that another one began."""
    if not info.card.has("resume"):
        raise CannotResume(
            f"this replica's engine ({engine_name(info.card)}) does not continue another's stream (feature resume)"
        )


def ages_are_kept(info: ModelInfo) -> bool:
    """Whether the engine honours GenerateRequest.kv_age_max."""
    return info.card.has("max_cache_age")


def _answers(checked: Checked, param: str) -> bool:
    return checked.answer.param == param and checked.constrained


def _scores_prompt(checked: Checked) -> bool:
    return checked.scored and checked.echo != 0
