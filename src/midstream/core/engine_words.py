"""What engines can do, in words: an engine's name, its features, how a refusal for want of a feature reads.

types.ENGINE_FEATURES says which features there are; replica/request/checked.py and api/status.py which request and which signal
needs one. Always holds: a refusal names the field, the engine and the feature.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from midstream.core.types import ENGINE_FEATURES, EngineCard, ModelInfo


def declared(info: ModelInfo) -> EngineCard:
    """The engine's card for the model it serves: without grammars when this model's tokenizer does not work with them."""
    card = info.card
    if info.grammars or not card.has("grammars"):
        return card
    return msgspec.structs.replace(card, features=tuple(f for f in card.features if f != "grammars"))


def engine_name(card: EngineCard) -> str:
    """e.g. `vllm 0.32.0`; the kind alone when the version is not known."""
    return f"{card.kind} {card.version}".rstrip()


def refusal(param: str, card: EngineCard, feature: str, words: str) -> str:
    """words: what the engine does not do, as in `does not {words}`."""
    why = f": {card.why[feature]}" if feature in card.why else ""
    return (
        f"{param}: this deployment's engine ({engine_name(card)}) does not {words} (feature {feature}){why}"
    )


def in_order(features: Collection[str]) -> list[str]:
    """The features in the order of ENGINE_FEATURES, without unknown names."""
    return [feature for feature in ENGINE_FEATURES if feature in features]
