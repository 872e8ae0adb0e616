"""A Hugging Face model run as its own PyTorch module, with our attention over the paged KV cache.

Owns: the module, the hooks that record each router's choice and its logits, and the way MoE experts are computed.
Always holds: a token's result does not depend on the rest of the batch, as far as PyTorch's kernels allow (attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from midstream.engine.adapter import LowRanks
from midstream.engine.embedded.attention import KVCache, PackedBatch, prefill_span, round_up
from midstream.engine.embedded.batch import alone
from midstream.engine.embedded.blocks import PAD_SLOT
from midstream.engine.embedded.device import settle
from midstream.engine.embedded.module_adapters import AdapterHooks, ModuleAdapter
from midstream.engine.embedded.near_ties import Routers
from midstream.engine.step import StepBatch, near_tie, route_dtype

DENSE_EXPERTS = "midstream_dense"
#: Where modules of experts take what their outputs are multiplied by, and what they call it.
WEIGHTS_AT, WEIGHTS_NAMES = 2, (["top_k_weights"], ["routing_weights"])
#: With at most this many experts, computing all of them is cheaper than sorting tokens by expert.
DENSE_EXPERTS_MAX = 16


class UnsupportedModel(Exception):
    """The checkpoint's architecture cannot run here; the message says why."""


class ModuleDecoder:
    def __init__(self, module: Any) -> None:
        """Raises UnsupportedModel."""
        config = module.config
        self.module = module
        experts = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
        self.num_experts = int(experts or 0)
        self.moe_layers = 0
        # Of the last forward pass and each MoE layer: the chosen experts [tokens, top_k], router logits [tokens, experts].
        self._captured: list[torch.Tensor] = []
        self._chosen_by: list[torch.Tensor] = []
        # Likewise what the experts' outputs were multiplied by, [tokens, top_k].
        self._multiplied: list[torch.Tensor] = []
        self.gives_router_weights = False
        self.router_ties = np.zeros(0, np.uint8)
        self._routers: Routers | None = None
        dense = 0 < self.num_experts <= DENSE_EXPERTS_MAX
        if dense:
            module.set_experts_implementation(DENSE_EXPERTS)
        self._hooks = AdapterHooks(module, dense_experts=dense)
        _check_rotary(module)
        self._hook_routers()
        self.top_k = int(getattr(config, "num_experts_per_tok", 0) or 0) if self.moe_layers else 0
        if self.num_experts and not self.moe_layers:
            raise UnsupportedModel(
                f"{type(module).__name__}: has experts, but no router module was found to record"
            )

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.module.parameters()).device
        return device

    def new_cache(self, slots: int) -> KVCache:
        trial = KVCache(1)
        self.forward(alone(np.zeros(1, dtype=np.int64), 1), trial, np.zeros(1, dtype=np.int64))
        return trial.resized(slots)

    def forward(
        self, batch: StepBatch, cache: KVCache, rows: np.ndarray, router_weights: np.ndarray | None = None
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """See loading.Decoder."""
        self._forget()
        device = self.device
        self._hooks.begin(batch.adapters, batch.spans[:, 1], rows)
        output = self.module(
            input_ids=torch.from_numpy(batch.ids).to(device).unsqueeze(0),
            position_ids=torch.from_numpy(batch.positions).to(device).unsqueeze(0),
            attention_mask=None,
            use_cache=False,
            logits_to_keep=torch.from_numpy(rows).to(device),
            midstream_batch=packed(batch, device),
            midstream_cache=cache,
        )
        if not self.moe_layers:
            self.router_ties = np.zeros(len(batch.ids), np.uint8)
            return output.logits[0], None
        if router_weights is not None:
            assert len(self._multiplied) == self.moe_layers, "experts did not run in this forward"
            router_weights[...] = torch.stack(self._multiplied, dim=1).float().cpu().numpy()
        return output.logits[0], self._routes()

    def adapter(self, maps: LowRanks) -> ModuleAdapter:
        """See loading.Decoder."""
        for path, low in maps.items():
            if (why := self._hooks.refuses(path, low)) is not None:
                raise UnsupportedModel(why)
        return ModuleAdapter(maps, self.device)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()

    def release(self) -> None:
        """Free the weights, once no kernel reads them."""
        if self.module is not None:
            settle(self.device)
        self._forget()
        self.module, self._routers = None, None
        del self._hooks

    def _forget(self) -> None:
        self._captured.clear()
        self._chosen_by.clear()
        self._multiplied.clear()

    def _routes(self) -> np.ndarray:
        assert len(self._captured) == self.moe_layers, "a router did not run in this forward"
        # [tokens, moe_layers, top_k].
        stacked = torch.stack(self._captured, dim=1)
        if self._routers is not None and len(self._chosen_by) == self.moe_layers:
            ties = self._routers.ties(torch.stack(self._chosen_by, dim=1), stacked)
            self.router_ties = ties.cpu().numpy().view(np.uint8)
        else:
            # The logits that the routers choose by are not known, so no choice is known to be clear.
            self.router_ties = np.ones(len(stacked), np.uint8)
        self._forget()
        return stacked.cpu().numpy().astype(route_dtype(self.num_experts))

    def _hook_routers(self) -> None:
        module = self.module
        recorder = getattr(module, "_can_record_outputs", None) or {}
        if "router_logits" not in recorder:
            base = getattr(module, module.base_model_prefix, module)
            recorder = getattr(base, "_can_record_outputs", None) or {}
        target = getattr(recorder.get("router_logits"), "target_class", None)
        if target is None:
            return

        def note(_module: Any, _inputs: Any, output: Any) -> None:
            chosen = [t for t in output if isinstance(t, torch.Tensor) and not t.is_floating_point()]
            if len(chosen) != 1:
                raise UnsupportedModel(f"{target.__name__}: its output does not hold the chosen experts")
            self._captured.append(chosen[0].reshape(-1, chosen[0].shape[-1]))
            scores = (t for t in output if isinstance(t, torch.Tensor) and t.is_floating_point())
            by = next((t for t in scores if t.shape[-1] == self.num_experts), None)
            if by is not None:
                self._chosen_by.append(by.reshape(-1, self.num_experts))

        def note_weights(_module: Any, inputs: tuple[Any, ...]) -> None:
            if len(inputs) > WEIGHTS_AT:
                self._multiplied.append(inputs[WEIGHTS_AT])

        routers, experts = [], 0
        for part in module.modules():
            if isinstance(part, target):
                part.register_forward_hook(note)
                routers.append(part)
            elif [*signature(type(part).forward).parameters][WEIGHTS_AT + 1 :][:1] in WEIGHTS_NAMES:
                part.register_forward_pre_hook(note_weights)
                experts += 1
        self.gives_router_weights = experts == len(routers)
        self.moe_layers = len(routers)
        if routers:
            self._routers = Routers(routers, near_tie(next(module.parameters()).dtype))


def _check_rotary(module: Any) -> None:
    """Raises UnsupportedModel if a token's rotary embedding depends on the length of other sequences in the batch."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", ())
        if "longrope" in (kinds.values() if isinstance(kinds, dict) else (kinds,)):
            raise UnsupportedModel(
                f"{type(module).__name__}: a rotary embedding of type longrope takes its frequencies from the longest "
                "sequence of a batch, so a token would depend on what shares its step"
            )


def packed(batch: StepBatch, device: torch.device) -> PackedBatch:
    """The batch for attention.py: the leading sequences of one token are decodes, the others are prefills."""
    sizes = batch.spans[:, 1]
    longer = np.flatnonzero(sizes > 1)
    decodes = int(longer[0]) if len(longer) else len(sizes)
    tables = [batch.table(i) for i in range(len(sizes))]
    longest = round_up(max((len(t) for t in tables[:decodes]), default=0), batch.block_size)
    padded = np.full((decodes, longest), PAD_SLOT, dtype=np.int64)
    for row, table in zip(padded, tables, strict=False):
        row[: len(table)] = table
    lengths = np.array([len(t) for t in tables[:decodes]], dtype=np.int64)
    prefills = [
        prefill_span(int(first), int(first + size), torch.from_numpy(table).to(device))
        for (first, size, _, _), table in zip(batch.spans[decodes:], tables[decodes:], strict=True)
    ]
    return PackedBatch(
        write_slots=torch.from_numpy(batch.slots).to(device),
        decodes=decodes,
        decode_slots=torch.from_numpy(padded).to(device),
        decode_lengths=torch.from_numpy(lengths).to(device),
        prefills=tuple(prefills),
    )


def dense_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run all experts on all tokens and combine them by router weight, so that no token depends on the rest of the batch.

    hidden_states: [tokens, hidden]. top_k_index, top_k_weights: [tokens, top_k].
    """
    tokens = hidden_states.shape[0]
    up = _every_expert(self, "gate_up_proj" if self.has_gate else "up_proj", hidden_states.unsqueeze(0))
    # [experts, tokens, inner], then [experts, tokens, hidden].
    inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)
    down = _every_expert(self, "down_proj", inner)
    if self.has_post_expert_norm:
        down = self.post_expert_norm(down)
    # [top_k, tokens, hidden].
    picked = down[top_k_index.T, torch.arange(tokens, device=down.device)]
    return (picked * top_k_weights.T.unsqueeze(-1)).sum(dim=0).to(hidden_states.dtype)


def _every_expert(experts: Any, name: str, inputs: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)
    output = torch.matmul(inputs, weight if experts.is_transposed else weight.transpose(1, 2))
    if experts.has_bias:
        output = output + getattr(experts, f"{name}_bias").unsqueeze(1)
    adapt = getattr(experts, "midstream_adapt", {}).get(name)
    return output if adapt is None else adapt(inputs, output)


ALL_EXPERTS_FUNCTIONS.register(DENSE_EXPERTS, dense_experts)
