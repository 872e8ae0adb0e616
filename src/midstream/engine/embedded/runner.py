"""The model and one forward pass over a packed batch.

Owns: the serving model object, a staged one beside it, the KV tensors and the capture of MoE routes.
Always holds: `forward` uses one model object from its first to its last layer; `switch` replaces that reference and
nothing else, so its cost does not depend on the model's size; the replaced model is freed on another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from midstream.engine.embedded.attention import (
    IMPLEMENTATION,
    KVCache,
    PackedBatch,
    prefill_span,
    round_up,
)
from midstream.engine.embedded.blocks import PAD_SLOT, SCRATCH_SLOT
from midstream.engine.embedded.scheduler import Work
from midstream.types import ModelInfo

DENSE_EXPERTS = "midstream_dense"
# With few small experts, computing all of them is cheaper than sorting tokens by expert.
DENSE_EXPERTS_MAX = 16
CHECK_TOKENS = 48
CHECK_KL_MAX = 0.1  # bfloat16 rounding gives under 0.01, a missing window or cap over 1


class UnsupportedModel(Exception):
    """The checkpoint's architecture cannot run here; the message says why."""


@dataclass
class LoadedModel:
    """A model on its device, with hooks that note each router's choice."""

    module: Any
    routers: int
    top_k: int
    num_experts: int
    captured: list[torch.Tensor] = field(
        default_factory=list
    )  # per MoE layer: [tokens, top_k], of the last forward


def load_model(directory: Path, dtype: torch.dtype | None, device: str) -> LoadedModel:
    """Load a Hugging Face directory for paged inference. dtype None: the checkpoint's. Raises UnsupportedModel."""
    config = AutoConfig.from_pretrained(directory)
    module = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype or "auto", attn_implementation=IMPLEMENTATION
    )
    module = module.to(device).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.data = (
            parameter.data.clone()
        )  # off the file mapping: the first step must not wait for the disk
    experts = int(getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0) or 0)
    loaded = LoadedModel(module, 0, int(getattr(config, "num_experts_per_tok", 0) or 0), experts)
    if 0 < experts <= DENSE_EXPERTS_MAX:
        module.set_experts_implementation(DENSE_EXPERTS)
    _hook_routers(loaded)
    if experts and not loaded.routers:
        raise UnsupportedModel(
            f"{type(module).__name__}: has experts, but no router module was found to record"
        )
    return loaded


def load_beside(serving: LoadedModel, directory: Path, device: str) -> LoadedModel:
    """Load a snapshot with the serving model's dtypes while that one serves. Raises UnsupportedModel.

    transformers sets the process-wide default dtype to the one it loads in while it builds the module, which a step on
    another thread would see. So load in float32, the default anyway, and cast each tensor: casting up and back is exact.
    """
    loaded = load_model(directory, torch.float32, device)
    for kind in ("named_parameters", "named_buffers"):
        wanted = dict(getattr(serving.module, kind)())
        found = dict(getattr(loaded.module, kind)())
        if {n: t.shape for n, t in wanted.items()} != {n: t.shape for n, t in found.items()}:
            raise UnsupportedModel("its parameters are not those of the serving model")
        for name, tensor in found.items():
            tensor.data = tensor.data.to(wanted[name].dtype)
    probe(loaded, KVCache(2))
    return loaded


@torch.inference_mode()
def paged_logits(model: LoadedModel, ids: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence through the paged attention. ids, slots: [tokens] int64."""
    logits: torch.Tensor = model.module(
        input_ids=ids.unsqueeze(0),
        position_ids=torch.arange(len(ids), device=ids.device).unsqueeze(0),
        attention_mask=None,
        use_cache=False,
        midstream_batch=PackedBatch(slots, 0, slots, slots, (prefill_span(0, len(ids), slots),)),
        midstream_cache=cache,
    ).logits[0]
    model.captured.clear()
    return logits


def probe(model: LoadedModel, cache: KVCache) -> None:
    """One token through the model on the scratch slot; allocates `cache`. Raises UnsupportedModel on logits not finite."""
    device = next(model.module.parameters()).device
    slot = torch.tensor([SCRATCH_SLOT], device=device)
    if not torch.isfinite(paged_logits(model, torch.zeros_like(slot), cache, slot)).all():
        raise UnsupportedModel("the model's logits are not finite")


@torch.inference_mode()
def check_against_plain_forward(model: LoadedModel) -> None:
    """Refuse an architecture whose attention is more than we know of: its numbers would be wrong without an error.

    Compares a short sequence with the model's own attention. Raises UnsupportedModel.
    """
    device = next(model.module.parameters()).device
    ids = torch.arange(CHECK_TOKENS, device=device) * 7919 % model.module.config.vocab_size
    slots = torch.arange(SCRATCH_SLOT, SCRATCH_SLOT + CHECK_TOKENS, device=device)
    paged = paged_logits(model, ids, KVCache(CHECK_TOKENS + SCRATCH_SLOT), slots).float().log_softmax(-1)
    model.module.set_attn_implementation("eager")
    try:
        plain = model.module(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float().log_softmax(-1)
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)
        model.captured.clear()
    divergence = (plain.exp() * (plain - paged)).sum(-1).mean().item()
    if not divergence < CHECK_KL_MAX:
        name = type(model.module).__name__
        raise UnsupportedModel(
            f"{name}: logits over the paged cache differ from the model's own by {divergence:.3g} nats"
        )


def _hook_routers(loaded: LoadedModel) -> None:
    recorder = getattr(loaded.module, "_can_record_outputs", None) or {}
    if "router_logits" not in recorder:
        base = getattr(loaded.module, loaded.module.base_model_prefix, loaded.module)
        recorder = getattr(base, "_can_record_outputs", None) or {}
    target = getattr(recorder.get("router_logits"), "target_class", None)
    if target is None:
        return

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        chosen = [t for t in output if isinstance(t, torch.Tensor) and not t.is_floating_point()]
        if len(chosen) != 1:
            raise UnsupportedModel(f"{target.__name__}: its output does not hold the chosen experts")
        loaded.captured.append(chosen[0].reshape(-1, chosen[0].shape[-1]))

    for module in loaded.module.modules():
        if isinstance(module, target):
            module.register_forward_hook(note)
            loaded.routers += 1


def dense_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """All experts on all tokens, combined by router weight. hidden_states: [tokens, hidden]; index, weights: [tokens, top_k].

    A token's result does not depend on what else is in the batch.
    """
    tokens = hidden_states.shape[0]
    up = _every_expert(self, "gate_up_proj" if self.has_gate else "up_proj", hidden_states.unsqueeze(0))
    inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)  # [experts, tokens, inner]
    down = _every_expert(self, "down_proj", inner)  # [experts, tokens, hidden]
    if self.has_post_expert_norm:
        down = self.post_expert_norm(down)
    picked = down[top_k_index.T, torch.arange(tokens, device=down.device)]  # [top_k, tokens, hidden]
    return (picked * top_k_weights.T.unsqueeze(-1)).sum(dim=0).to(hidden_states.dtype)


def _every_expert(experts: Any, name: str, inputs: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)
    output = torch.matmul(inputs, weight if experts.is_transposed else weight.transpose(1, 2))
    return output + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else output


class Runner:
    def __init__(self, model: LoadedModel, *, block_size: int, num_blocks: int, device: str) -> None:
        self.model = model
        self.block_size = block_size
        self.device = torch.device(device)
        self.cache = KVCache(num_blocks * block_size)
        self.staged: LoadedModel | None = None
        self.written = np.zeros(
            0, dtype=np.int64
        )  # slots whose KV the last forward computed (scratch included)
        probe(model, self.cache)
        check_against_plain_forward(model)

    @torch.inference_mode()
    def forward(
        self, works: Sequence[Work], logit_rows: Sequence[int]
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Run the packed tokens of `works`, decodes first.

        logit_rows: indices into the packed tokens. Returns logits [rows, vocab] in the model's dtype, and the routes of
        all packed tokens, [tokens, moe_layers, top_k] uint8 or uint16 (None on a dense model).
        """
        model = self.model
        model.captured.clear()
        ids = list(chain.from_iterable(w.seq.tokens[w.first : w.last] for w in works))
        positions = [np.arange(w.first, w.last) for w in works]
        output = model.module(
            input_ids=torch.tensor([ids], device=self.device),
            position_ids=torch.from_numpy(np.concatenate(positions)).to(self.device).unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=torch.tensor(list(logit_rows), dtype=torch.long, device=self.device),
            midstream_batch=self._pack(works),
            midstream_cache=self.cache,
        )
        return output.logits[0], self._routes(model)

    def switch(self) -> None:
        """Serve the staged model from the next forward on."""
        assert self.staged is not None
        old, self.model, self.staged = self.model, self.staged, None
        threading.Thread(target=_dispose, args=(old,), daemon=True).start()

    def info(self, max_model_len: int) -> ModelInfo:
        model = self.model
        moe = model.routers > 0
        return ModelInfo(
            max_model_len=max_model_len,
            vocab_size=model.module.config.vocab_size,
            moe_layers=model.routers,
            top_k=model.top_k if moe else 0,
            num_experts=model.num_experts if moe else 0,
            eos_token_ids=eos_token_ids(model.module.generation_config, model.module.config),
        )

    def _pack(self, works: Sequence[Work]) -> PackedBatch:
        tables = [self._slots(w.seq.blocks, w.last) for w in works]
        write = [
            np.where(np.arange(w.first, w.last) >= w.write_from, slots[w.first : w.last], SCRATCH_SLOT)
            for w, slots in zip(works, tables, strict=True)
        ]
        decodes = sum(1 for w in works if w.size == 1)
        longest = max((len(t) for t in tables[:decodes]), default=0)
        longest = round_up(longest, self.block_size)
        padded = np.full((decodes, longest), PAD_SLOT, dtype=np.int64)
        for row, table in zip(padded, tables, strict=False):
            row[: len(table)] = table
        lengths = np.array([len(t) for t in tables[:decodes]], dtype=np.int64)
        prefills, first = [], decodes
        for work, table in zip(works[decodes:], tables[decodes:], strict=True):
            prefills.append(prefill_span(first, first + work.size, torch.from_numpy(table).to(self.device)))
            first += work.size
        self.written = np.concatenate(write)
        return PackedBatch(
            write_slots=torch.from_numpy(self.written).to(self.device),
            decodes=decodes,
            decode_slots=torch.from_numpy(padded).to(self.device),
            decode_lengths=torch.from_numpy(lengths).to(self.device),
            prefills=tuple(prefills),
        )

    def _slots(self, blocks: Sequence[int], length: int) -> np.ndarray:
        table = np.asarray(blocks, dtype=np.int64)[:, None] * self.block_size + np.arange(self.block_size)
        return table.reshape(-1)[:length]

    def _routes(self, model: LoadedModel) -> np.ndarray | None:
        if not model.routers:
            return None
        assert len(model.captured) == model.routers, "a router did not run in this forward"
        stacked = torch.stack(model.captured, dim=1)  # [tokens, moe_layers, top_k]
        kind = np.uint8 if model.num_experts <= 256 else np.dtype("<u2")
        return stacked.cpu().numpy().astype(kind)


def eos_token_ids(generation: GenerationConfig | None, config: Any) -> tuple[int, ...]:
    """The token ids that end generation by default: the generation config's, else the model config's."""
    for source in (generation, config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return (value,) if isinstance(value, int) else tuple(value)
    return ()


def _dispose(model: LoadedModel) -> None:
    model.captured.clear()
    model.module = None


ALL_EXPERTS_FUNCTIONS.register(DENSE_EXPERTS, dense_experts)
