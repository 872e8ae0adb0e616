"""The serving model, the model staged beside it, and the KV cache that they share.

Always holds: `forward` uses one model object from its first to its last layer. `switch` replaces that reference and nothing
else, so its cost does not depend on the size of the model. A replaced model waits in `retired` until a thread beside the
steps disposes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from midstream.core.types import ModelInfo
from midstream.engine.embedded.batch import pack
from midstream.engine.embedded.loading import LoadedModel
from midstream.engine.embedded.scheduler import Work
from midstream.http.heap import trim_memory


class ModelRunner:
    def __init__(self, model: LoadedModel, *, block_size: int, num_blocks: int) -> None:
        self.model = model
        self.block_size = block_size
        self.cache = model.decoder.new_cache(num_blocks * block_size)
        self.staged: LoadedModel | None = None
        # Models that neither serve nor will.
        self.retired: list[LoadedModel] = []
        # The slots whose KV the last forward pass computed, the scratch slot included.
        self.written = np.zeros(0, dtype=np.int64)

    @torch.inference_mode()
    def forward(self, works: list[Work], logit_rows: Sequence[int]) -> tuple[torch.Tensor, np.ndarray | None]:
        """Run the tokens of `works`, decodes first; see loading.Decoder. logit_rows: indices of tokens in the batch."""
        batch = pack(works, self.block_size)
        self.written = batch.slots
        return self.model.decoder.forward(batch, self.cache, np.array(logit_rows, dtype=np.int64))

    @property
    def router_ties(self) -> np.ndarray:
        """See loading.Decoder."""
        return self.model.decoder.router_ties

    def switch(self) -> None:
        """Serve the staged model from the next forward pass on."""
        assert self.staged is not None
        self.retired.append(self.model)
        self.model, self.staged = self.staged, None

    def set_staged(self, model: LoadedModel | None) -> None:
        """Set the model that `switch` will serve. The model that was staged before is retired."""
        if self.staged is not None:
            self.retired.append(self.staged)
        self.staged = model

    def take_retired(self) -> list[LoadedModel]:
        retired, self.retired = self.retired, []
        return retired

    def info(self, max_model_len: int) -> ModelInfo:
        model = self.model
        decoder = model.decoder
        return ModelInfo(
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
            moe_layers=decoder.moe_layers,
            top_k=decoder.top_k,
            num_experts=decoder.num_experts if decoder.moe_layers else 0,
            eos_token_ids=eos_token_ids(model.generation_config, model.config),
        )


def dispose(models: Sequence[LoadedModel]) -> None:
    """Free models that nothing uses any more. Call it on a thread that does not step.

    Several threads load a snapshot, in tensors of all sizes. The arenas of glibc keep most of that memory, several models in
    all, until they are told to give it back.
    """
    if not models:
        return
    for model in models:
        model.decoder.release()
    # Other C libraries return large blocks by themselves.
    trim_memory()


def eos_token_ids(generation: GenerationConfig | None, config: Any) -> tuple[int, ...]:
    """The token ids that end generation by default: those of the generation config, else those of the model config."""
    for source in (generation, config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return (value,) if isinstance(value, int) else tuple(value)
    return ()
