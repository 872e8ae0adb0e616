"""Forward passes over all weights that an engine holds, and the KV cache that they share.

Always holds: a token's pass uses one model and one adapter from its first to its last layer. Sequences of one model are
computed together, whatever their adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from midstream.core.config import EngineSettings
from midstream.core.types import ModelInfo
from midstream.engine.embedded.batch import pack
from midstream.engine.embedded.loading import LoadedModel
from midstream.engine.embedded.scheduler import StepWork
from midstream.engine.embedded.weights import Retired, Weights, WeightStore
from midstream.engine.step import route_dtype
from midstream.http.heap import trim_memory


class ModelRunner:
    """Routes are rows of bytes here: the experts of a token, and behind them the weights of these, where they are kept.

    expert_bytes, route_bytes: of a row, without and with the weights; 0 on a dense model.
    """

    def __init__(self, weights: WeightStore, settings: EngineSettings, num_blocks: int) -> None:
        self.weights = weights
        decoder = self.model.decoder
        experts = decoder.moe_layers * decoder.top_k
        self.expert_bytes = experts * route_dtype(decoder.num_experts).itemsize
        self._shares = (decoder.moe_layers, decoder.top_k) if settings.router_weights and experts else None
        self.route_bytes = self.expert_bytes + 4 * experts * (self._shares is not None)
        self.block_size = settings.block_size
        self.cache = self.model.decoder.new_cache(num_blocks * settings.block_size)
        # Of the last forward pass: the slots that it computed KV for, the scratch slot included; for each, the commit of the
        # weights; and for each token whether a router's choice was a near tie.
        self.written = np.zeros(0, dtype=np.int64)
        self.epochs = np.zeros(0, dtype=np.int32)
        self.router_ties = np.zeros(0, dtype=np.uint8)
        # Entered for each pass.
        self._inference = torch.inference_mode()

    @property
    def model(self) -> LoadedModel:
        return self.weights.serving.model

    def forward(
        self, works: list[StepWork], logit_rows: Sequence[int]
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Run the tokens of `works`, decodes first; see loading.Decoder. Routes are [tokens, route_bytes] uint8.

        logit_rows: indices of tokens in the batch.
        """
        rows = np.array(logit_rows, dtype=np.int64)
        epochs = [work.epoch for work in works]
        sizes = np.array([work.last - work.first for work in works])
        self.epochs = np.array(epochs, dtype=np.int32).repeat(sizes)
        held = {epoch: self.weights.of(epoch) for epoch in dict.fromkeys(epochs)}
        of_work = [held[epoch] for epoch in epochs]
        with self._inference:
            if len({id(weights.model) for weights in held.values()}) == 1:
                logits, routes, self.written, self.router_ties = self._pass(works, of_work, rows)
                return logits, routes
            return self._several(works, of_work, rows, sizes)

    def _pass(
        self, works: list[StepWork], of_work: list[Weights], rows: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray | None, np.ndarray, np.ndarray]:
        """One pass of one model: logits, routes, slots, router ties."""
        decoder = of_work[0].model.decoder
        batch = pack(works, self.block_size)
        if [weights for weights in of_work if weights.adapter is not None]:
            batch = replace(batch, adapters=tuple(weights.adapter for weights in of_work))
        shares = None if self._shares is None else np.empty((len(batch.ids), *self._shares), np.float32)
        logits, routes = decoder.forward(batch, self.cache, rows, shares)
        if routes is not None:
            routes = routes.reshape(len(routes), -1).view(np.uint8)
        if routes is not None and shares is not None:
            routes = np.concatenate((routes, shares.reshape(len(shares), -1).view(np.uint8)), axis=1)
        return logits, routes, batch.slots, decoder.router_ties

    def _several(
        self, works: list[StepWork], of_work: list[Weights], rows: np.ndarray, sizes: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """A pass for each model; the results in the order of one."""
        models = {id(weights.model): weights.model for weights in of_work}
        model_of = np.array([id(weights.model) for weights in of_work])
        of_token = np.repeat(model_of, sizes)
        total = len(of_token)
        self.written = np.zeros(total, dtype=np.int64)
        self.router_ties = np.zeros(total, dtype=np.uint8)
        all_logits: torch.Tensor | None = None
        all_routes: np.ndarray | None = None
        for model in models:
            own = np.flatnonzero(model_of == model)
            tokens = np.flatnonzero(of_token == model)
            wanted = np.flatnonzero(of_token[rows] == model)
            # The place of each wanted token among the model's own.
            inside = np.searchsorted(tokens, rows[wanted])
            logits, routes, slots, ties = self._pass(
                [works[i] for i in own], [of_work[i] for i in own], inside
            )
            if all_logits is None:
                all_logits = logits.new_empty((len(rows), logits.shape[-1]))
                all_routes = None if routes is None else np.empty((total, *routes.shape[1:]), routes.dtype)
            all_logits[torch.from_numpy(wanted).to(all_logits.device)] = logits
            self.written[tokens], self.router_ties[tokens] = slots, ties
            if all_routes is not None and routes is not None:
                all_routes[tokens] = routes
        assert all_logits is not None
        return all_logits, all_routes

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


def dispose(retired: Sequence[Retired]) -> None:
    """Free models and adapters that nothing uses any more. Call it on a thread that does not step.

    Several threads load a snapshot, in tensors of all sizes. The arenas of glibc keep most of that memory, several models in
    all, until they are asked to return it.
    """
    if not retired:
        return
    for each in retired:
        each.release()
    # Other C libraries return large blocks by themselves.
    trim_memory()


def eos_token_ids(generation: GenerationConfig | None, config: Any) -> tuple[int, ...]:
    """The token ids that end generation by default: those of the generation config, else those of the model config."""
    for source in (generation, config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return (value,) if isinstance(value, int) else tuple(value)
    return ()
