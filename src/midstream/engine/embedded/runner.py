"""The serving model, the one staged beside it, and the KV cache they share.

Always holds: `forward` uses one model object from its first to its last layer; `switch` replaces that reference and
nothing else, so its cost does not depend on the model's size; what is replaced waits in `retired` for somebody to `dispose`
of it off the step path, and what the allocator kept of loading then goes back to the system.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from midstream.engine.embedded.batch import pack
from midstream.engine.embedded.loading import LoadedModel
from midstream.engine.embedded.scheduler import Work
from midstream.types import ModelInfo


class Runner:
    def __init__(self, model: LoadedModel, *, block_size: int, num_blocks: int) -> None:
        self.model = model
        self.block_size = block_size
        self.cache = model.decoder.new_cache(num_blocks * block_size)
        self.staged: LoadedModel | None = None
        self.retired: list[LoadedModel] = []  # neither serve nor will
        # Slots whose KV the last forward computed (scratch included).
        self.written = np.zeros(0, dtype=np.int64)

    @torch.inference_mode()
    def forward(
        self, works: Sequence[Work], logit_rows: Sequence[int]
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Run the packed tokens of `works`, decodes first.

        logit_rows: indices into the packed tokens. Returns logits [rows, vocab] in the model's dtype, and the routes of
        all packed tokens, [tokens, moe_layers, top_k] uint8 or uint16 (None on a dense model).
        """
        batch = pack(works, self.block_size)
        self.written = batch.slots
        return self.model.decoder.forward(batch, self.cache, np.array(logit_rows, dtype=np.int64))

    @property
    def router_ties(self) -> np.ndarray:
        """Of each packed token of the last forward, uint8: 1 where a router's choice was a near tie."""
        return self.model.decoder.router_ties

    def switch(self) -> None:
        """Serve the staged model from the next forward on."""
        assert self.staged is not None
        self.retired.append(self.model)
        self.model, self.staged = self.staged, None

    def set_staged(self, model: LoadedModel | None) -> None:
        """What `switch` will serve; one that was staged before is retired."""
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
    """Free models that nothing uses any more; not on the thread that steps.

    A snapshot is loaded in tensors of all sizes by several threads: glibc's arenas keep most of that, several models in
    all, unless they are told to give it back.
    """
    if not models:
        return
    for model in models:
        model.decoder.release()
    trim = getattr(
        ctypes.CDLL(None), "malloc_trim", None
    )  # other C libraries return large blocks by themselves
    if trim is not None:
        trim(0)


def eos_token_ids(generation: GenerationConfig | None, config: Any) -> tuple[int, ...]:
    """The token ids that end generation by default: the generation config's, else the model config's."""
    for source in (generation, config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return (value,) if isinstance(value, int) else tuple(value)
    return ()
