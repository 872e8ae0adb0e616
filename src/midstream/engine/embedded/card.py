"""The features that the embedded engine declares. Imports no torch.

Always holds: a declared feature holds for the serving model, its tokenizer and the device.
"""

from __future__ import annotations

from midstream import __version__
from midstream.core.types import ENGINE_FEATURES, EngineCard


def embedded_card(*, grammars: bool, reproducible: bool) -> EngineCard:
    """grammars: the tokenizer works with grammars. reproducible: no bit of a token's logits depends on the batch."""
    absent = {"grammars": not grammars, "reproducible_sampling": not reproducible}
    features = tuple(feature for feature in ENGINE_FEATURES if not absent.get(feature, False))
    return EngineCard(kind="embedded", version=__version__, features=features)
