"""What the embedded engine declares that it can do. No torch.

Always holds: a feature is declared only where it holds for the model, its tokenizer and the device that serve.
"""

from __future__ import annotations

from midstream import __version__
from midstream.types import ENGINE_FEATURES, EngineCard


def embedded_card(*, grammars: bool, reproducible: bool) -> EngineCard:
    """grammars: the model's tokenizer works with them. reproducible: no bit of a token's logits depends on the batch."""
    absent = {"grammars": not grammars, "reproducible_sampling": not reproducible}
    features = tuple(feature for feature in ENGINE_FEATURES if not absent.get(feature, False))
    return EngineCard(kind="embedded", version=__version__, features=features)
