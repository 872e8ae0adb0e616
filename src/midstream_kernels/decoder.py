"""A Llama-like decoder in a few kernel calls per layer, instead of a tree of PyTorch modules.

Owns: the packed weights of one model, its scratch memory, and the paged KV cache in the layout that the kernels read.
Always holds:
- Every output is a sum in one fixed order (kernels/*.h). So a token's numbers depend on its own sequence alone: not on the
  batch, the chunking, the cache or the number of threads.
- Values are rounded to the model's dtype where transformers rounds them: after each linear map, norm, product and residual.
- `packing.HeadLayout` fills a head up with zeros to whole vectors. That changes no sum.
- KernelsUnavailable refuses a model that differs in anything this module does not know. It then runs as a PyTorch module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from midstream_kernels.adapters import (
    DOWN,
    GATE_UP,
    OUT,
    QKV,
    LayerAdapters,
    PackedAdapter,
    StepAdapters,
)
from midstream_kernels.build import KernelsUnavailable, kernels
from midstream_kernels.memory import big, copied, give_back
from midstream_kernels.packing import HeadLayout, Map, Mlp, Packer, gate_up_order, pointer
from midstream_kernels.port import Batch, Factors

#: Tokens that share a group of the KV cache. A block of the cache consists of whole groups.
GROUP = 16
STORE, ADD, SILU_MUL = 0, 1, 2
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
        self.keys = [big(words) for _ in decoder.layers]
        self.values = [big(words) for _ in decoder.layers]
        self.bytes_per_token = 2 * len(self.keys) * words * 4 // (groups * GROUP)


@dataclass(frozen=True)
class _Experts:
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    count: int
    top_k: int
    inner: int
    flags: int


@dataclass(frozen=True)
class _Layer:
    """head_norms_at: the addresses of q_norm and k_norm."""

    input_norm: torch.Tensor
    qkv: Map
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    window: int
    out: Map
    post_norm: torch.Tensor
    feed_forward: Mlp | _Experts
    head_norms_at: tuple[int | None, int | None] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_norms_at", (pointer(self.q_norm), pointer(self.k_norm)))


class CpuDecoder:
    def __init__(
        self,
        module: Any,
        max_positions: int,
        threads: int,
        near_tie: float,
        pieces: Mapping[str, Sequence[torch.Tensor]] = {},
    ) -> None:
        """Copies the weights out of `module`, which is not needed afterwards. Raises KernelsUnavailable.

        near_tie: a router's choice is a near tie within this share of its largest logit. pieces: the values of those parameters
        that are on the meta device.
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
        self.cos, self.sin = head.table(cos), head.table(sin)
        self.head_dim = head.size
        self.heads = attention.q_proj.out_features // head.own
        self.kv_heads = attention.k_proj.out_features // head.own
        self.scale = float(attention.scaling)
        self.eps = float(config.rms_norm_eps)
        self.vocab = module.lm_head.out_features
        self.kernels = kernels(SUFFIX[self.dtype])
        self._packer = Packer(self.kernels)
        self._pieces = pieces
        self._embedding = copied(base.embed_tokens.weight.data)
        self.layers = [self._layer(i, layer, config, *family) for i, layer in enumerate(base.layers)]
        self.dense = tuple(isinstance(layer.feed_forward, Mlp) for layer in self.layers)
        self._norm = _floats(base.norm.weight)
        self._lm_head = self._packer.linear([module.lm_head])
        moe = [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, _Experts)]
        self.moe_layers = len(moe)
        self.top_k, self.num_experts = (moe[0].top_k, moe[0].count) if moe else (0, 0)
        self.router_ties = np.zeros(0, np.uint8)
        self._tie = near_tie
        # As kernels/kernels.cpp writes them.
        self._route_dtype = np.uint8 if self.num_experts <= 256 else np.uint16
        self._scratch = _Scratch(self, 0)
        self._last_adapters: tuple[Any, StepAdapters | None, Any] | None = None
        self._pieces = {}

    def forward(
        self, batch: Batch, cache: PackedCache, rows: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """See engine/embedded/loading.Decoder. Raises RuntimeError for a position beyond those of the decoder."""
        highest, table = int(batch.positions.max()), self.cos.shape[0]
        if highest >= table:
            # The kernels would read past the end of the table.
            raise RuntimeError(f"position {highest} in a model with {table} positions")
        spans, groups = _in_groups(batch)
        tokens = len(batch.positions)
        # Every layer reads these.
        where = address_of(batch.positions), address_of(batch.slots)
        tables = address_of(spans), len(spans), address_of(groups)
        if tokens > self._scratch.tokens:
            self._scratch = _Scratch(self, tokens)
        scratch = self._scratch
        adapters = self._adapters_of(batch) if batch.adapters else None
        if adapters is not None:
            scratch.widen(self)
        torch.index_select(self._embedding, 0, torch.from_numpy(batch.ids), out=scratch.residual[:tokens])
        routes = np.empty((tokens, self.moe_layers, self.top_k), self._route_dtype)
        self.router_ties = np.zeros(tokens, np.uint8)
        routes_at, ties_at = address_of(routes), address_of(self.router_ties)
        route_bytes = self.top_k * routes.itemsize
        moe_layer = 0
        for number, layer in enumerate(self.layers):
            of_layer = None if adapters is None else adapters.layers[number]
            kv = cache.keys[number].data_ptr(), cache.values[number].data_ptr()
            self._attend(layer, tokens, where, tables, *kv, of_layer)
            self._normalise(scratch.residual, None, layer.post_norm, tokens, scratch.normed)
            if isinstance(layer.feed_forward, Mlp):
                self._mlp(layer.feed_forward, tokens, of_layer)
            else:
                routes_to = routes_at + moe_layer * route_bytes
                self._moe(layer.feed_forward, tokens, routes_to, ties_at, of_layer)
                moe_layer += 1
        picked = torch.empty((len(rows), self.hidden), dtype=self.dtype)
        self._normalise(scratch.residual, rows, self._norm, len(rows), picked)
        logits = torch.empty((len(rows), self.vocab), dtype=self.dtype)
        self._linear(self._lm_head, picked.data_ptr(), len(rows), STORE, logits.data_ptr(), self.vocab)
        if adapters is not None and adapters.any_head:
            self._adapt_head(adapters, picked, rows, logits)
        return logits, routes if self.moe_layers else None

    def new_cache(self, slots: int) -> PackedCache:
        return PackedCache(self, slots)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (
            ("embedding", self._embedding),
            ("cos", self.cos),
            ("sin", self.sin),
            ("norm", self._norm),
        )
        yield from _tensors_of("head", self._lm_head)
        for number, layer in enumerate(self.layers):
            yield from _tensors_of(str(number), layer)

    def release(self) -> None:
        """Free the weights. Nothing may read them afterwards."""
        large = [self._embedding, *self._packer.made]
        self.layers, self._packer.made = [], []
        del self._embedding, self._lm_head
        for tensor in large:
            give_back(tensor.data_ptr(), tensor.nbytes)

    def prepare_scratch(self, serving: CpuDecoder) -> None:
        """Allocate the scratch memory for the largest step that `serving` has run, so that no step has to."""
        self._scratch = _Scratch(self, serving._scratch.tokens)

    def adapter(self, maps: Mapping[str, Factors]) -> PackedAdapter:
        """An adapter for this decoder, and for every one of the same shapes. Raises KernelsUnavailable."""
        return PackedAdapter(self, maps)

    def _attend(
        self,
        layer: _Layer,
        tokens: int,
        where: tuple[int, int],
        tables: tuple[int, int, int],
        keys: int,
        values: int,
        adapters: LayerAdapters | None,
    ) -> None:
        scratch, call = self._scratch, self.kernels
        shape = (self.heads, self.kv_heads, self.head_dim)
        self._normalise(scratch.residual, None, layer.input_norm, tokens, scratch.normed)
        self._linear(layer.qkv, scratch.normed_at, tokens, STORE, scratch.qkv_at, layer.qkv.n)
        if adapters is not None:
            self._adapt(adapters, QKV, scratch.normed_at, self.hidden, scratch.qkv_at, layer.qkv.n)
        call.prepare(
            *(scratch.qkv_at, tokens, *shape, *layer.head_norms_at, self.head_layout.own, self.eps),
            *(self.cos.data_ptr(), self.sin.data_ptr(), 2 * self.cos.shape[1]),
            *(*where, keys, values, self.threads),
        )
        call.attention(
            *(scratch.qkv_at, layer.qkv.n, scratch.attended_at, *shape, keys, values),
            *(*tables, layer.window, self.scale, self.threads),
        )
        self._linear_to_residual(layer.out, scratch.attended_at, tokens, OUT, adapters)

    def _mlp(self, mlp: Mlp, tokens: int, adapters: LayerAdapters | None) -> None:
        scratch = self._scratch
        if adapters is None or not adapters.have[GATE_UP.start]:
            self._linear(mlp.gate_up, scratch.normed_at, tokens, SILU_MUL, scratch.active_at, mlp.down.k)
        else:
            self._linear(mlp.gate_up, scratch.normed_at, tokens, STORE, scratch.wide_at, mlp.gate_up.n)
            self._adapt(adapters, GATE_UP, scratch.normed_at, self.hidden, scratch.wide_at, mlp.gate_up.n)
            self.kernels.silu_mul(scratch.wide_at, tokens, mlp.down.k, scratch.active_at, self.threads)
        self._linear_to_residual(mlp.down, scratch.active_at, tokens, DOWN, adapters)

    def _linear_to_residual(
        self, linear: Map, x: int, tokens: int, part: slice, adapters: LayerAdapters | None
    ) -> None:
        scratch = self._scratch
        if adapters is None or not adapters.have[part.start]:
            self._linear(linear, x, tokens, ADD, scratch.residual_at, self.hidden)
            return
        self._linear(linear, x, tokens, STORE, scratch.change_at, self.hidden)
        self._adapt(adapters, part, x, linear.k, scratch.change_at, self.hidden)
        self.kernels.add(scratch.change_at, tokens, self.hidden, scratch.residual_at, self.threads)

    def _adapt(self, adapters: LayerAdapters, part: slice, x: int, k: int, out: int, width: int) -> None:
        adapters.add(self.kernels.lora, part, x, k, out, width, self.threads)

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

    def _moe(
        self, moe: _Experts, tokens: int, routes: int, ties: int, adapters: LayerAdapters | None
    ) -> None:
        weights = (moe.router.data_ptr(), moe.gate_up.data_ptr(), moe.down.data_ptr())
        stride = self.moe_layers * self.top_k
        sizes = (tokens, self.hidden, moe.inner, moe.count, moe.top_k)
        self.kernels.moe(
            *(self._scratch.normed_at, *weights, *sizes, moe.flags, self._tie),
            *(self._scratch.residual_at, routes, stride, ties),
            *((None, None) if adapters is None else adapters.of_experts),
            self.threads,
        )

    def _linear(self, linear: Map, x: int, tokens: int, mode: int, out: int, width: int) -> None:
        self.kernels.linear(x, *linear.at, tokens, linear.n, linear.k, mode, out, width, self.threads)

    def _normalise(
        self, x: torch.Tensor, rows: np.ndarray | None, weight: torch.Tensor, count: int, out: torch.Tensor
    ) -> None:
        chosen = None if rows is None else address_of(rows)
        args = (x.data_ptr(), chosen, weight.data_ptr(), count, self.hidden, self.eps, out.data_ptr())
        self.kernels.rms_norm(*args, self.threads)

    def _layer(self, number: int, layer: Any, config: Any, window_at: str, round_weights: bool) -> _Layer:
        attention, mlp, packer = layer.self_attn, layer.mlp, self._packer
        head, heads = self.head_layout, self.heads + 2 * self.kv_heads
        windows = {"none": None, "config": getattr(config, "sliding_window", None)}
        window = windows.get(window_at, getattr(attention, "sliding_window", None))
        dense = hasattr(mlp, "gate_proj")
        q_norm = head.widened(_floats(attention.q_norm.weight)) if hasattr(attention, "q_norm") else None
        k_norm = head.widened(_floats(attention.k_norm.weight)) if hasattr(attention, "k_norm") else None
        return _Layer(
            input_norm=_floats(layer.input_layernorm.weight),
            qkv=packer.linear([attention.q_proj, attention.k_proj, attention.v_proj], head.rows(heads)),
            q_norm=q_norm,
            k_norm=k_norm,
            window=window or 0,
            out=packer.linear([attention.o_proj], widen=head.widened),
            post_norm=_floats(layer.post_attention_layernorm.weight),
            feed_forward=packer.mlp(mlp) if dense else self._experts(number, mlp, round_weights),
        )

    def _experts(self, number: int, mlp: Any, round_weights: bool) -> _Experts:
        gate, experts = mlp.gate, mlp.experts
        up, down = experts.gate_up_proj.data, experts.down_proj.data
        inner = up.shape[1] // 2
        order = gate_up_order(inner)
        name = f"model.layers.{number}.mlp.experts"
        up_parts = self._pieces.get(f"{name}.gate_up_proj", [up])
        down_parts = self._pieces.get(f"{name}.down_proj", [down])
        renormalise = RENORMALISE if getattr(gate, "norm_topk_prob", True) else 0
        return _Experts(
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
        inner = max((mlp.down.k for mlp in dense), default=0)
        self.residual, self.normed = rows(decoder.hidden), rows(decoder.hidden)
        self._qkv, self._attended = rows(decoder.layers[0].qkv.n), rows(decoder.heads * decoder.head_dim)
        self._active = rows(inner)
        self.residual_at, self.normed_at = self.residual.data_ptr(), self.normed.data_ptr()
        self.qkv_at, self.attended_at = self._qkv.data_ptr(), self._attended.data_ptr()
        self.active_at = self._active.data_ptr()
        self._inner = inner
        self.wide_at = self.change_at = 0

    def widen(self, decoder: CpuDecoder) -> None:
        """Room for what adapters add to, from the first batch with one on."""
        if self.change_at:
            return
        self._wide = torch.empty((self.tokens, 2 * self._inner), dtype=decoder.dtype)
        self._change = torch.empty((self.tokens, decoder.hidden), dtype=decoder.dtype)
        self.wide_at, self.change_at = self._wide.data_ptr(), self._change.data_ptr()


def _tensors_of(name: str, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield name, part
    elif isinstance(part, _Layer | Map | Mlp | _Experts):
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


def address_of(array: np.ndarray) -> int:
    """Where an array begins in memory. `array.ctypes.data` makes two objects to say so."""
    address: int = array.__array_interface__["data"][0]
    return address
