"""Attention over the paged KV cache, registered with Hugging Face models as `midstream_paged`.

Owns: the KV tensors and the one function that reads and writes them.
Always holds: the KV of a step is written before it is read. A sequence reads only slots of its own block table. KV that must
not count is written to the scratch slot. Positions are absolute, so a query sees exactly the KV at positions 0..its own.

Batch layout: the tokens of all sequences packed as [1, tokens]; first the sequences with one query token (decode), then
the others (prefill chunks), each contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from midstream.engine.embedded.blocks import PAD_SLOT

IMPLEMENTATION = "midstream_paged"

# PyTorch's CPU kernel works on tiles of keys. In a last, smaller tile it rounds differently (in bfloat16 for 0.2 % of rows).
# With whole tiles, a token's result does not depend on where its prompt was cut into chunks. Decodes never depend on that.
QUERY_TILE = 32
KEY_TILE = 512


@dataclass(frozen=True)
class PrefillSpan:
    """Query tokens first..last-1 of the batch belong to one sequence and are the last of positions 0..end-1.

    slots: [end rounded up to KEY_TILE] int64, padded with the pad slot. masks: by sliding window, made when first needed.
    """

    first: int
    last: int
    end: int
    slots: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """[queries rounded up to QUERY_TILE, slots] bool, True where a query may look."""
        if window not in self.masks:
            queries, keys = round_up(self.last - self.first, QUERY_TILE), self.slots.shape[0]
            # The position of the first query.
            offset = self.end - (self.last - self.first)
            mask = torch.ones((queries, keys), dtype=torch.bool, device=self.slots.device)
            mask.tril_(diagonal=offset)
            if window is not None:
                mask.triu_(diagonal=offset - window + 1)
                # Padding queries must look somewhere.
                mask[self.last - self.first :, 0] = True
            self.masks[window] = mask
        return self.masks[window]


@dataclass(frozen=True)
class PackedBatch:
    """The batch of a step, for attention. The first `decodes` tokens are one-token sequences.

    write_slots: [tokens] int64. decode_slots: [decodes, longest] int64, padded with the pad slot.
    decode_lengths: [decodes] int64.
    """

    write_slots: torch.Tensor
    decodes: int
    decode_slots: torch.Tensor
    decode_lengths: torch.Tensor
    prefills: tuple[PrefillSpan, ...]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[decodes, 1, 1, longest] additive, 0 or -inf, in the model's dtype."""
        if window not in self.masks:
            positions = torch.arange(self.decode_slots.shape[1], device=self.decode_slots.device)
            lengths = self.decode_lengths.unsqueeze(1)
            hidden = positions >= lengths
            if window is not None:
                hidden |= positions < lengths - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.masks[window] = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self.masks[window]


@dataclass(frozen=True)
class Variant:
    """How a layer's attention differs from plain causal softmax.

    window: positions that a query sees, its own included. softcap: scores become cap * tanh(score / cap).
    sinks: [heads], a logit per head that takes part in the softmax and has no value.
    """

    scale: float | None
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass
class KVCache:
    """Keys and values of each layer, [slots, kv_heads, head_dim], allocated when the layer is first used."""

    slots: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [tokens, kv_heads, head_dim]."""
        if layer not in self.keys:
            self.keys[layer] = key.new_zeros((self.slots, *key.shape[1:]))
            self.values[layer] = value.new_zeros((self.slots, *value.shape[1:]))
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def resized(self, slots: int) -> KVCache:
        """An empty cache of another size for the same layers."""
        other = KVCache(slots)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            theirs.update({layer: t.new_zeros((slots, *t.shape[1:])) for layer, t in mine.items()})
        return other

    def planes(self, blocks: int) -> list[torch.Tensor]:
        """Views of all that the cache holds, as bytes: of each tensor a row for each of `blocks` equal blocks."""
        tensors = (*self.keys.values(), *self.values.values())
        return [tensor.view(torch.uint8).view(blocks, -1) for tensor in tensors]

    @property
    def bytes_per_token(self) -> int:
        tensors = [*self.keys.values(), *self.values.values()]
        return sum(t[0].numel() * t.element_size() for t in tensors)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim].

    Returns [1, tokens, heads, head_dim].
    """
    batch: PackedBatch = kwargs["midstream_batch"]
    cache: KVCache = kwargs["midstream_cache"]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cache.write(layer, batch.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    keys, values = cache.keys[layer], cache.values[layer]
    variant = Variant(scaling, sliding_window, softcap, s_aux)
    # [tokens, heads, head_dim].
    tokens = query[0].transpose(0, 1)
    output = tokens.new_empty((*tokens.shape[:2], value.shape[-1]))
    if batch.decodes:
        output[: batch.decodes] = _decode(tokens[: batch.decodes], keys, values, batch, variant)
    for span in batch.prefills:
        output[span.first : span.last] = _prefill(tokens[span.first : span.last], keys, values, span, variant)
    return output.unsqueeze(0), None


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch, variant: Variant
) -> torch.Tensor:
    """Attention of one query token per sequence. The query heads of a KV group are folded into the query length."""
    count, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    slots = batch.decode_slots.reshape(-1)
    shape = (count, batch.decode_slots.shape[1], kv_heads, -1)
    gathered_keys = keys.index_select(0, slots).view(shape).transpose(1, 2)
    gathered_values = values.index_select(0, slots).view(shape).transpose(1, 2)
    folded = query.reshape(count, kv_heads, heads // kv_heads, head_dim)
    mask = batch.decode_mask(variant.window, query.dtype)
    output = _attend(folded, gathered_keys, gathered_values, mask, variant)
    return output.reshape(count, heads, -1)


def _prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: PrefillSpan, variant: Variant
) -> torch.Tensor:
    """query: [chunk, heads, head_dim] at the last `chunk` of positions 0..end-1."""
    chunk, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    mask = span.mask(variant.window)
    padded = query.new_zeros((mask.shape[0], heads, head_dim))
    padded[:chunk] = query
    group_keys = keys.index_select(0, span.slots).transpose(0, 1).unsqueeze(0)
    group_values = values.index_select(0, span.slots).transpose(0, 1).unsqueeze(0)
    if variant.softcap is None and variant.sinks is None:
        output = F.scaled_dot_product_attention(
            padded.transpose(0, 1).unsqueeze(0),
            group_keys,
            group_values,
            attn_mask=mask,
            scale=variant.scale,
            enable_gqa=heads != kv_heads,
        )[0]
    else:
        group = heads // kv_heads
        folded = padded.transpose(0, 1).reshape(1, kv_heads, group * mask.shape[0], head_dim)
        output = _attend(folded, group_keys, group_values, mask.repeat(group, 1), variant)
        output = output.reshape(heads, mask.shape[0], -1)
    return output[:, :chunk].transpose(0, 1)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, variant: Variant
) -> torch.Tensor:
    """query: [batch, kv_heads, group x queries, head_dim], heads of a group outermost. mask: bool or additive."""
    if variant.softcap is None and variant.sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=variant.scale)
    scale = variant.scale if variant.scale is not None else query.shape[-1] ** -0.5
    scores = (torch.matmul(query, key.transpose(-1, -2)) * scale).float()
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if variant.sinks is not None:
        # Queries per head.
        rows = query.shape[2] * query.shape[1] // variant.sinks.shape[0]
        sinks = variant.sinks.float().repeat_interleave(rows).reshape(1, query.shape[1], query.shape[2], 1)
        scores = torch.cat((scores, sinks.expand(scores.shape[0], -1, -1, -1)), dim=-1)
        return torch.matmul(scores.softmax(-1)[..., :-1].to(value.dtype), value)
    return torch.matmul(scores.softmax(-1).to(value.dtype), value)


def prefill_span(first: int, last: int, slots: torch.Tensor) -> PrefillSpan:
    """slots: [end] int64, of positions 0..end-1. The queries of the span are at the last of these positions."""
    end = slots.shape[0]
    padded = slots.new_full((round_up(end, KEY_TILE),), PAD_SLOT)
    padded[:end] = slots
    return PrefillSpan(first, last, end, padded)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


AttentionInterface.register(IMPLEMENTATION, paged_attention)
