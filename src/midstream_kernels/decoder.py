"""A Llama-like decoder in one call of the kernels per step, instead of a tree of PyTorch modules.

Owns: the packed weights of one model, its scratch memory, and the paged KV cache in the layout that the kernels read.
Always holds:
- Every output is a sum in one fixed order (kernels/*.h). So a token's numbers depend on its own sequence alone: not on the
  batch, the chunking, the cache or the number of threads.
- Values are rounded to the model's dtype where transformers rounds them: after each linear map, norm, product and residual.
- `packing.HeadLayout` fills a head up with zeros to whole vectors. That changes no sum.
- KernelsUnavailable refuses a model that differs in anything this module does not know. It then runs as a PyTorch module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from midstream_kernels.adapters import PackedAdapter, StepAdapters
from midstream_kernels.build import KernelsUnavailable, kernels
from midstream_kernels.gang import Gang
from midstream_kernels.memory import Spare, big
from midstream_kernels.packing import HeadLayout, Map, Mlp, Packer, gate_up_order
from midstream_kernels.port import Batch, Factors
from midstream_kernels.tables import AddressTable, Experts, Layer, PackedWeights, addresses

#: Tokens that share a group of the KV cache. A block of the cache consists of whole groups.
GROUP = 16
RENORMALISE, ROUND_WEIGHTS = 1, 2
SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}
#: Types of rotary embeddings whose tables depend on the position alone. For "dynamic" this holds up to
#: max_position_embeddings, and no request goes beyond that.
ROPE_TYPES = frozenset({"default", "dynamic", "linear", "llama3", "yarn"})

#: By class of the causal model: where a layer's sliding window is written, and whether router weights are rounded.
FAMILIES = {
    "LlamaForCausalLM": ("none", False),
    "MistralForCausalLM": ("config", False),
    "MixtralForCausalLM": ("config", False),
    "Qwen2ForCausalLM": ("layer", False),
    "Qwen3ForCausalLM": ("layer", False),
    "Qwen3MoeForCausalLM": ("layer", True),
}

#: By the name of a parameter: tensors that together, one below the other, have the rows of the parameter.
Pieces = dict[str, list[torch.Tensor]]


class PackedCache:
    """Of each layer, keys [groups, kv_heads, units of head_dim, 16] and values [groups, kv_heads, units of 16 tokens,
    head_dim]."""

    def __init__(self, decoder: CpuDecoder, slots: int) -> None:
        groups = -(-slots // GROUP)
        words = groups * decoder.kv_heads * GROUP * decoder.head_dim * decoder.dtype.itemsize // 4
        self.keys = tuple(big(words) for _ in decoder.layers)
        self.values = tuple(big(words) for _ in decoder.layers)
        self.table = AddressTable([tensor.data_ptr() for tensor in (*self.keys, *self.values)])
        self.bytes_per_token = 2 * len(self.keys) * words * 4 // (groups * GROUP)

    def planes(self, blocks: int) -> list[torch.Tensor]:
        """Views of all that the cache holds, as bytes: of each tensor a row for each of `blocks` equal blocks."""
        return [tensor.view(torch.uint8).view(blocks, -1) for tensor in (*self.keys, *self.values)]


class CpuDecoder:
    def __init__(
        self,
        module: Any,
        max_positions: int,
        threads: int,
        near_tie: float,
        pieces: Mapping[str, Sequence[torch.Tensor]] = {},
        spare: Spare | None = None,
        ready: Callable[[str], None] = lambda prefix: None,
    ) -> None:
        """Copies the weights out of `module`, which is not needed afterwards. Raises KernelsUnavailable.

        near_tie: a router's choice is a near tie within this share of its largest logit. pieces: the values of those parameters
        that are on the meta device. spare: of the models that this one serves after. ready: is called before tensors whose
        names begin so are read, and may wait; what it raises ends the copying.
        """
        family = FAMILIES.get(type(module).__name__)
        if family is None:
            raise KernelsUnavailable(f"{type(module).__name__} is not a family the kernels know")
        base, config = module.model, module.config
        attention = base.layers[0].self_attn
        self.dtype: torch.dtype = base.embed_tokens.weight.dtype
        self.threads = threads
        self.hidden = int(config.hidden_size)
        _check(module, self.dtype, pieces)
        cos, sin = _rope_tables(module, max_positions, self.dtype)
        self.head_layout = head = HeadLayout(int(attention.head_dim), cos.shape[1])
        self.head_dim = head.size
        self.heads = attention.q_proj.out_features // head.own
        self.kv_heads = attention.k_proj.out_features // head.own
        self.vocab = module.lm_head.out_features
        self.kernels = kernels(SUFFIX[self.dtype])
        self._pieces = pieces
        self.spare = Spare() if spare is None else spare
        made: list[torch.Tensor] = []
        try:
            with Gang(threads) as gang:
                self._packer = Packer(self.kernels, gang, self.spare, made)
                self._weights = self._copied(module, head.table(cos), head.table(sin), family, ready)
        except BaseException:
            self.spare.put_back(made)
            raise
        layers = self._weights.layers
        self.dense = tuple(isinstance(layer.feed_forward, Mlp) for layer in layers)
        self.router_ties = np.zeros(0, np.uint8)
        self.gives_router_weights = True
        self._numbers = float(config.rms_norm_eps), float(attention.scaling), near_tie
        # As kernels/experts.h writes them.
        self._route_dtype = np.uint8 if self.num_experts <= 256 else np.uint16
        self._scratch = _Scratch(self, 0)
        self._last_adapters: tuple[Any, StepAdapters | None, Any] | None = None
        self._pieces = {}

    def _copied(
        self,
        module: Any,
        cos: torch.Tensor,
        sin: torch.Tensor,
        family: tuple[str, bool],
        ready: Callable[[str], None],
    ) -> PackedWeights:
        """The largest tensors first: who makes the tensors of a snapshot begins with those, too."""
        base, packer, embedding = module.model, self._packer, None
        ready("model.embed_tokens.")
        if module.lm_head.weight is not base.embed_tokens.weight:
            embedding = packer.copied(base.embed_tokens.weight.data)
        ready("lm_head.")
        head, layers = packer.linear([module.lm_head]), []
        for number, layer in enumerate(base.layers):
            ready(f"model.layers.{number}.")
            layers.append(self._layer(number, layer, module.config, *family))
        ready("model.norm.")
        moe = [layer.feed_forward for layer in layers if isinstance(layer.feed_forward, Experts)]
        self.moe_layers = len(moe)
        self.top_k, self.num_experts = (moe[0].top_k, moe[0].count) if moe else (0, 0)
        sizes = (*self._sizes(), self.moe_layers, self.top_k)
        return PackedWeights(embedding, cos, sin, _floats(base.norm.weight), head, layers, sizes)

    @property
    def layers(self) -> Sequence[Layer]:
        return self._weights.layers

    @layers.setter
    def layers(self, layers: Sequence[Layer]) -> None:
        self._weights = replace(self._weights, layers=layers)

    def _sizes(self) -> tuple[int, ...]:
        return self.hidden, self.heads, self.kv_heads, self.head_dim, self.head_layout.own

    def forward(
        self, batch: Batch, cache: PackedCache, rows: np.ndarray, router_weights: np.ndarray | None = None
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """See engine/embedded/loading.Decoder. Raises RuntimeError for a position beyond those of the decoder."""
        spans, groups = _in_groups(batch)
        tokens, wanted = len(batch.positions), len(rows)
        if tokens > self._scratch.tokens:
            self._scratch = _Scratch(self, tokens)
        scratch, adapters = self._scratch, None
        if batch.adapters and (adapters := self._adapters_of(batch)) is not None:
            scratch.widen(self)
        routes = np.empty((tokens, self.moe_layers, self.top_k), self._route_dtype)
        self.router_ties = np.zeros(tokens, np.uint8)
        picked = torch.empty((wanted, self.hidden), dtype=self.dtype)
        logits = torch.empty((wanted, self.vocab), dtype=self.dtype)
        arrays = (batch.ids, batch.positions, batch.slots, spans, groups, rows, routes, self.router_ties)
        *of_tokens, spans_at, groups_at, rows_at, routes_at, ties_at = addresses(arrays)
        refused = self.kernels.forward(
            *(self._weights.table.at, *self._numbers, scratch.table.at, cache.table.at),
            *(None if adapters is None else adapters.table.at, tokens, *of_tokens),
            *(spans_at, len(spans), groups_at, rows_at, wanted, routes_at, ties_at),
            *(None if router_weights is None else router_weights.ctypes.data, picked.data_ptr()),
            *(logits.data_ptr(), self.threads),
        )
        if refused >= 0:
            self._refuse(batch)
        if adapters is not None and adapters.any_head:
            self._adapt_head(adapters, picked, rows, logits)
        return logits, routes if self.moe_layers else None

    def _refuse(self, batch: Batch) -> None:
        """The kernels would read past the end of a table."""
        highest, positions = int(batch.positions.max()), len(self._weights.cos)
        if highest >= positions:
            raise RuntimeError(f"position {highest} in a model with {positions} positions")
        raise IndexError("index out of range in self")

    def new_cache(self, slots: int) -> PackedCache:
        return PackedCache(self, slots)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = self._weights
        for name in ("embedding", "cos", "sin", "norm", "head"):
            yield from _tensors_of(name, getattr(weights, name))
        for number, layer in enumerate(weights.layers):
            yield from _tensors_of(str(number), layer)

    def release(self) -> None:
        """Leave the memory of the weights to the next model. Nothing may read them afterwards."""
        made, self._packer.made = self._packer.made, []
        del self._weights
        self.spare.keep(made)

    def share_scratch(self, serving: CpuDecoder) -> None:
        """Work in the memory of `serving`, a decoder of the same shapes, which is large enough for the largest step that it has
        run. From now on the two may not run at the same time."""
        self._scratch = serving._scratch

    def adapter(self, maps: Mapping[str, Factors]) -> PackedAdapter:
        """An adapter for this decoder, and for every one of the same shapes. Raises KernelsUnavailable."""
        return PackedAdapter(self, maps)

    def _adapters_of(self, batch: Batch) -> StepAdapters | None:
        """Steps of the same streams, one after the other, have the same."""
        key = StepAdapters.key(batch)
        if self._last_adapters is None or self._last_adapters[0] != key:
            made = StepAdapters(batch, len(self.layers)) if any(batch.adapters) else None
            # The batch's adapters are kept with it, so that no other one gets an id of theirs.
            self._last_adapters = key, made, batch.adapters
        return self._last_adapters[1]

    def _adapt_head(
        self, adapters: StepAdapters, picked: torch.Tensor, rows: np.ndarray, logits: torch.Tensor
    ) -> None:
        of, starts = adapters.grouped(adapters.of[rows])
        self.kernels.lora(
            *(picked.data_ptr(), self.hidden, self.hidden, of.ctypes.data, starts.ctypes.data),
            *(len(adapters.adapters), adapters.head.ctypes.data, 1, 1),
            *(logits.data_ptr(), self.vocab, self.threads),
        )

    def _layer(self, number: int, layer: Any, config: Any, window_at: str, round_weights: bool) -> Layer:
        attention, mlp, packer = layer.self_attn, layer.mlp, self._packer
        head, heads = self.head_layout, self.heads + 2 * self.kv_heads
        windows = {"none": None, "config": getattr(config, "sliding_window", None)}
        window = windows.get(window_at, getattr(attention, "sliding_window", None))
        dense = hasattr(mlp, "gate_proj")
        q_norm = head.widened(_floats(attention.q_norm.weight)) if hasattr(attention, "q_norm") else None
        k_norm = head.widened(_floats(attention.k_norm.weight)) if hasattr(attention, "k_norm") else None
        return Layer(
            input_norm=_floats(layer.input_layernorm.weight),
            qkv=packer.linear([attention.q_proj, attention.k_proj, attention.v_proj], head.rows(heads)),
            q_norm=q_norm,
            k_norm=k_norm,
            window=window or 0,
            out=packer.linear([attention.o_proj], widen=head.widened),
            post_norm=_floats(layer.post_attention_layernorm.weight),
            feed_forward=packer.mlp(mlp) if dense else self._experts(number, mlp, round_weights),
        )

    def _experts(self, number: int, mlp: Any, round_weights: bool) -> Experts:
        gate, experts = mlp.gate, mlp.experts
        up, down = experts.gate_up_proj.data, experts.down_proj.data
        inner = up.shape[1] // 2
        order = gate_up_order(inner)
        name = f"model.layers.{number}.mlp.experts"
        up_parts = self._pieces.get(f"{name}.gate_up_proj", [up])
        down_parts = self._pieces.get(f"{name}.down_proj", [down])
        renormalise = RENORMALISE if getattr(gate, "norm_topk_prob", True) else 0
        return Experts(
            router=self._packer.pack([gate.weight.data]),
            gate_up=self._packer.pack(up_parts, order, len(up)),
            down=self._packer.pack(down_parts, None, len(up)),
            count=len(up),
            top_k=int(gate.top_k),
            inner=inner,
            flags=renormalise | (ROUND_WEIGHTS if round_weights else 0),
        )


class _Scratch:
    """The memory that a forward pass of up to `tokens` tokens works in."""

    def __init__(self, decoder: CpuDecoder, tokens: int) -> None:
        def rows(width: int) -> torch.Tensor:
            # Writing touches every page now, so that no step has to.
            return torch.empty((tokens, width), dtype=decoder.dtype).fill_(0)

        self.tokens = tokens
        dense = [x.feed_forward for x in decoder.layers if isinstance(x.feed_forward, Mlp)]
        self._inner = max((mlp.down.k for mlp in dense), default=0)
        attended = decoder.heads * decoder.head_dim
        self._rows = [rows(decoder.hidden), rows(decoder.hidden), rows(decoder.layers[0].qkv.n)]
        self._rows += [rows(attended), rows(self._inner)]
        self._wide = False
        self.table = self._addresses()

    def _addresses(self) -> AddressTable:
        """Scratch of kernels/pass.h."""
        at = [tensor.data_ptr() for tensor in self._rows]
        return AddressTable(at if self._wide else [*at, 0, 0])

    def widen(self, decoder: CpuDecoder) -> None:
        """Room for what adapters add to, from the first batch with one on."""
        if self._wide:
            return
        for width in (2 * self._inner, decoder.hidden):
            self._rows.append(torch.empty((self.tokens, width), dtype=decoder.dtype))
        self._wide = True
        self.table = self._addresses()


def _tensors_of(name: str, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield name, part
    elif isinstance(part, Layer | Map | Mlp | Experts):
        for entry in fields(part):
            yield from _tensors_of(f"{name}.{entry.name}", getattr(part, entry.name))


def _in_groups(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The batch's spans and blocks with blocks of 16 slots, the groups of the kernels."""
    per_block = batch.block_size // GROUP
    if per_block == 1:
        return batch.spans, batch.blocks
    spans = batch.spans * np.array([1, 1, 1, per_block], dtype=np.int32)
    groups = (batch.blocks[:, None] * per_block + np.arange(per_block, dtype=np.int32)).reshape(-1)
    return spans, groups


def _check(module: Any, dtype: torch.dtype, pieces: Mapping[str, Any]) -> None:
    """Raises KernelsUnavailable."""
    config, base = module.config, module.model
    rope = getattr(base.rotary_emb, "rope_type", "default")
    inner = [w.shape[0] for n, w in module.named_parameters() if n.endswith("gate_proj.weight")]
    inner += [w.shape[1] // 2 for n, w in module.named_parameters() if n.endswith("gate_up_proj")]
    placed = {p.device.type for n, p in module.named_parameters() if n not in pieces}
    checks = [
        (dtype in SUFFIX, f"dtype {dtype}"),
        ({p.dtype for p in module.parameters()} == {dtype}, "parameters of several dtypes"),
        (placed == {"cpu"}, "not on the CPU"),
        (config.hidden_act == "silu", f"activation {config.hidden_act}"),
        (rope in ROPE_TYPES, f"rotary embedding of type {rope}"),
        (config.hidden_size % 16 == 0, f"hidden_size {config.hidden_size}, not a multiple of 16"),
        (all(i % 16 == 0 for i in inner), f"inner sizes {sorted(set(inner))}, not multiples of 16"),
    ]
    for holds, reason in checks:
        if not holds:
            raise KernelsUnavailable(reason)


def _rope_tables(module: Any, positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [positions, rotary / 2] float32, rounded to `dtype` as the module rounds them. Raises KernelsUnavailable."""
    rotary, most = module.model.rotary_emb, int(module.config.max_position_embeddings)
    if getattr(rotary, "rope_type", "default") == "dynamic" and positions > most:
        raise KernelsUnavailable(
            f"rotary embedding of type dynamic, of {most} positions where {positions} are needed"
        )
    at = torch.arange(positions).unsqueeze(0)
    cos, sin = (t[0].float() for t in rotary(torch.empty(0, dtype=dtype), at))
    half = cos.shape[1] // 2
    if not (torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:])):
        raise KernelsUnavailable("a rotary embedding of another layout")
    return cos[:, :half].contiguous(), sin[:, :half].contiguous()


def _floats(weight: torch.Tensor) -> torch.Tensor:
    # A copy in any case: the memory of the weight is freed.
    return weight.data.to(torch.float32, copy=True).contiguous()
