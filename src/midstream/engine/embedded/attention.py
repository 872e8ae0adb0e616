"""Attention over the paged KV cache, registered with Hugging Face models as `midstream_paged`.

Owns: the KV tensors and the one function that reads and writes them.
Always holds: a step's tokens are written before they are read; a sequence reads only slots of its own block table; tokens
whose KV must not count are written to the scratch slot. Positions are absolute, so a query sees exactly the KV at
positions 0..its own.

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

# The CPU kernel works on tiles of keys and rounds differently in a last, smaller tile (bfloat16: about 0.2 % of rows).
# Whole tiles make a token's result independent of where its prompt was cut into chunks; decode is independent as it is.
QUERY_TILE = 32
KEY_TILE = 512


@dataclass(frozen=True)
class PrefillSpan:
    """Query tokens first..last-1 of the packed batch belong to one sequence and are the last of positions 0..end-1."""

    first: int
    last: int
    end: int
    slots: torch.Tensor  # [end rounded up to KEY_TILE] int64, padded with the pad slot
    mask: torch.Tensor  # [queries rounded up to QUERY_TILE, slots] bool, True where a query may look


@dataclass(frozen=True)
class PackedBatch:
    """What attention must know of a step."""

    write_slots: torch.Tensor  # [tokens] int64
    decodes: int  # the first `decodes` tokens are one-token sequences
    decode_slots: torch.Tensor  # [decodes, longest] int64, padded with the pad slot
    decode_mask: torch.Tensor  # [decodes, 1, 1, longest] additive, 0 or -inf, in the model's dtype
    prefills: tuple[PrefillSpan, ...]


@dataclass
class KVCache:
    """Per layer keys and values, [slots, kv_heads, head_dim]; allocated when a layer is first used."""

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
    heads, kv_heads, width = query.shape[1], key.shape[1], value.shape[-1]
    tokens = query[0].transpose(0, 1)  # [tokens, heads, head_dim]
    output = tokens.new_empty((tokens.shape[0], heads, width))
    if batch.decodes:
        output[: batch.decodes] = _decode(tokens[: batch.decodes], keys, values, batch, kv_heads, scaling)
    for span in batch.prefills:
        output[span.first : span.last] = _prefill(tokens[span.first : span.last], keys, values, span, scaling)
    return output.unsqueeze(0), None


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: PackedBatch,
    kv_heads: int,
    scaling: float | None,
) -> torch.Tensor:
    """One query token per sequence; the query heads of a KV group are folded into the query length."""
    count, heads, head_dim = query.shape
    slots = batch.decode_slots.reshape(-1)
    shape = (count, batch.decode_slots.shape[1], kv_heads, -1)
    gathered_keys = keys.index_select(0, slots).view(shape).transpose(1, 2)
    gathered_values = values.index_select(0, slots).view(shape).transpose(1, 2)
    folded = query.reshape(count, kv_heads, heads // kv_heads, head_dim)
    output = F.scaled_dot_product_attention(
        folded, gathered_keys, gathered_values, attn_mask=batch.decode_mask, scale=scaling
    )
    return output.reshape(count, heads, -1)


def _prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: PrefillSpan, scaling: float | None
) -> torch.Tensor:
    """query: [chunk, heads, head_dim] at the last `chunk` of positions 0..end-1."""
    chunk, heads, head_dim = query.shape
    padded = query.new_zeros((span.mask.shape[0], heads, head_dim))
    padded[:chunk] = query
    output = F.scaled_dot_product_attention(
        padded.transpose(0, 1).unsqueeze(0),
        keys.index_select(0, span.slots).transpose(0, 1).unsqueeze(0),
        values.index_select(0, span.slots).transpose(0, 1).unsqueeze(0),
        attn_mask=span.mask,
        scale=scaling,
        enable_gqa=heads != keys.shape[1],
    )
    return output[0, :, :chunk].transpose(0, 1)


def prefill_span(first: int, last: int, slots: torch.Tensor) -> PrefillSpan:
    """slots: [end] int64, those of positions 0..end-1; the span's queries are the last of them."""
    end, queries = slots.shape[0], last - first
    padded = slots.new_full((round_up(end, KEY_TILE),), PAD_SLOT)
    padded[:end] = slots
    mask = torch.ones((round_up(queries, QUERY_TILE), padded.shape[0]), dtype=torch.bool, device=slots.device)
    return PrefillSpan(first, last, end, padded, mask.tril_(diagonal=end - queries))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


AttentionInterface.register(IMPLEMENTATION, paged_attention)
