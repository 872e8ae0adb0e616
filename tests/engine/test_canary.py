"""What the canary of a dense model finds: each weight with a fault in it, by as few tokens as it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from families import write_model

from midstream.core.config import EngineSettings
from midstream.core.errors import SnapshotNotFinite
from midstream.engine.base import canary_ids
from midstream.engine.embedded.loading import LoadedModel, load_model, logits_alone, probe
from midstream.fleet.agree import CANARY_TOLERANCE

#: As they lie in the checkpoint, tensor by tensor.
SETTINGS = EngineSettings(kernels="torch")
LAYERS = 3


def weights_of(model: LoadedModel) -> dict[str, torch.Tensor]:
    """Those that a snapshot has, but for the embedding, of which a prompt has a few rows."""
    named = model.decoder.weights()
    return {name: tensor for name, tensor in named if not {"rotary_emb", "embed_tokens"} & {*name.split(".")}}


def scores(model: LoadedModel) -> torch.Tensor:
    ids = canary_ids(int(model.config.vocab_size), int(model.config.max_position_embeddings), 0)
    logits = logits_alone(model.decoder, np.array(ids, dtype=np.int64)).float().log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@contextmanager
def planted(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Within: tensors have the numbers of others."""
    with torch.inference_mode():
        kept = [(tensor, tensor.clone()) for tensor, _ in pairs]
        given = [(tensor, other.clone()) for tensor, other in pairs]
        for tensor, other in given:
            tensor.copy_(other)
        try:
            yield
        finally:
            for tensor, other in kept:
                tensor.copy_(other)


def next_layer(name: str) -> str | None:
    """The name of the same tensor one layer further; None where there is none."""
    for layer in range(LAYERS - 1):
        if f".{layer}." in name:
            return name.replace(f".{layer}.", f".{layer + 1}.")
    return None


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_canary_of_a_dense_model_finds_a_fault_in_any_of_its_weights(family: str, tmp_path: Path) -> None:
    model = load_model(write_model(family, tmp_path), SETTINGS)
    other = weights_of(load_model(write_model(family, tmp_path / "other", seed=1), SETTINGS))
    weights, good = weights_of(model), scores(model)
    assert len(good) == 7
    faults = 0
    for name, tensor in weights.items():
        # One number of a row or a column that nothing points at.
        bad = tensor.clone()
        bad.reshape(-1)[-1] = float("nan")
        with planted((tensor, bad)), pytest.raises(SnapshotNotFinite):
            probe(model)
        pairs = {"stale": [(tensor, other[name])]}
        if (further := next_layer(name)) is not None:
            pairs["swapped"] = [(tensor, weights[further]), (weights[further], tensor)]
        for kind, pair in pairs.items():
            if torch.equal(*pair[0]):
                # Norms as they are made.
                continue
            faults += 1
            with planted(*pair):
                assert (scores(model) - good).abs().max() > CANARY_TOLERANCE, f"{kind}: {name}"
    assert faults >= 30
    assert torch.equal(scores(model), good)
