"""The features that the replica of a vLLM server declares. docs/engines.md has the table."""

from __future__ import annotations

from midstream.core.types import ENGINE_FEATURES, EngineCard

#: Missing features and the reasons, for docs/engines.md.
LACKS = {
    "cached_prompt_logprobs": "it computes a prompt whose log-probabilities are asked for from its first token",
    "sampling_logprobs": "vLLM reports one log-probability per token: the raw one",
    "kv_provenance": "vLLM does not say which weights computed a cached block, nor when it preempted a request",
    "reproducible_sampling": "a row's numbers depend on what it is batched with, and a resumed stream draws anew",
    "near_ties": "vLLM does not return what a router or a filter chose by",
    "weights_digest": "its checksums stop the engine while they are computed, and on a CPU they miss packed weights",
    "short_swap": "weights are loaded in place, while the streams stand still",
}


def vllm_features(*, routes: bool) -> tuple[str, ...]:
    """routes: the server was started with --enable-return-routed-experts (which needs a GPU)."""
    lacks = set(LACKS) | (set() if routes else {"routes"})
    return tuple(feature for feature in ENGINE_FEATURES if feature not in lacks)


def vllm_card(version: str, *, routes: bool) -> EngineCard:
    return EngineCard(kind="vllm", version=version, features=vllm_features(routes=routes))
