"""A Llama-like decoder in a few kernel calls per layer, instead of a tree of PyTorch modules.

Owns: the packed weights of one model, its scratch memory, and the paged KV cache in the layout that the kernels read.
Always holds:
- Every output is a sum in one fixed order (kernels/*.h). So a token's numbers depend on its own sequence alone: not on the
  batch, the chunking, the cache or the number of threads.
- Values are rounded to the model's dtype where transformers rounds them: after each linear map, norm, product and residual.
- `_Head` fills a head up with zeros to whole vectors. That changes no sum.
- KernelsUnavailable refuses a model that differs in anything this module does not know. It then runs as a PyTorch module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from midstream.engine.cpu.build import KernelsUnavailable, kernels
from midstream.engine.cpu.memory import big, copied, give_back
from midstream.engine.step import StepBatch, near_tie, route_dtype

#: Tokens that share a group of the KV cache. A block of the cache consists of whole groups.
GROUP = 16
#: Outputs of a linear map that are packed side by side.
PANEL = 32
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
class _Map:
    """The packed weight of a linear map with n outputs and k inputs."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    n: int
    k: int


@dataclass(frozen=True)
class _Mlp:
    gate_up: _Map
    down: _Map


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
    input_norm: torch.Tensor
    qkv: _Map
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    window: int
    out: _Map
    post_norm: torch.Tensor
    feed_forward: _Mlp | _Experts


class _Head:
    """Where the kernels find the elements of a head.

    The two rotated halves come first, each filled up to whole vectors with zeros. The rest follows, filled up so that the
    size of the head is a multiple of 32.
    """

    def __init__(self, own: int, half: int) -> None:
        """own: elements of a head in the model. half: elements in each rotated half. Raises KernelsUnavailable."""
        self.own, self._half = own, half
        self._wide = -(-half // 16) * 16
        self.size = -(-(2 * self._wide + own - 2 * half) // 32) * 32
        if self.size > 256:
            raise KernelsUnavailable(
                f"head_dim {own}, which takes more than 256 when it is filled up to whole vectors"
            )
        at = torch.arange(own)
        self._places = at + (at >= half) * (self._wide - half) + (at >= 2 * half) * (self._wide - half)

    def rows(self, heads: int) -> torch.Tensor | None:
        """For each output of the filled-up map to `heads` heads: the output of the model's map, or -1 for a zero.

        None when the two are the same.
        """
        if self.own == self.size:
            return None
        rows = torch.full((heads, self.size), -1)
        rows[:, self._places] = torch.arange(heads * self.own).view(heads, self.own)
        return rows.reshape(-1)

    def widened(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, with the heads in their last dimension filled up with zeros."""
        if self.own == self.size:
            return values
        heads = values.view(*values.shape[:-1], -1, self.own)
        wide = heads.new_zeros((*heads.shape[:-1], self.size))
        wide[..., self._places] = heads
        return wide.flatten(-2)

    def table(self, values: torch.Tensor) -> torch.Tensor:
        """A table [positions, half], filled up with zeros."""
        return torch.nn.functional.pad(values, (0, self._wide - self._half)).contiguous()


class CpuDecoder:
    def __init__(
        self, module: Any, max_positions: int, threads: int, pieces: Mapping[str, Sequence[torch.Tensor]] = {}
    ) -> None:
        """Copies the weights out of `module`, which is not needed afterwards. Raises KernelsUnavailable.

        pieces: the values of those parameters that are on the meta device.
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
        self._head_layout = head = _Head(int(attention.head_dim), cos.shape[1])
        self.cos, self.sin = head.table(cos), head.table(sin)
        self.head_dim = head.size
        self.heads = attention.q_proj.out_features // head.own
        self.kv_heads = attention.k_proj.out_features // head.own
        self.scale = float(attention.scaling)
        self.eps = float(config.rms_norm_eps)
        self.vocab = module.lm_head.out_features
        self._kernels = kernels(SUFFIX[self.dtype])
        self._packer = _Packer(self._kernels)
        self._pieces = pieces
        self._embedding = copied(base.embed_tokens.weight.data)
        self.layers = [self._layer(i, layer, config, *family) for i, layer in enumerate(base.layers)]
        self._norm = _floats(base.norm.weight)
        self._lm_head = self._packer.linear([module.lm_head])
        moe = [layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, _Experts)]
        self.moe_layers = len(moe)
        self.top_k, self.num_experts = (moe[0].top_k, moe[0].count) if moe else (0, 0)
        self.router_ties = np.zeros(0, np.uint8)
        self._tie = near_tie(self.dtype)
        self._route_dtype = route_dtype(self.num_experts)
        self._scratch = _Scratch(self, 0)
        self._pieces = {}

    def forward(
        self, batch: StepBatch, cache: PackedCache, rows: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """See embedded/loading.Decoder. Raises RuntimeError for a position beyond those that the decoder was made for."""
        highest, table = int(batch.positions.max()), len(self.cos)
        if highest >= table:
            # The kernels would read past the end of the table.
            raise RuntimeError(f"position {highest} in a model with {table} positions")
        batch = _in_groups(batch)
        tokens = len(batch.positions)
        if tokens > self._scratch.tokens:
            self._scratch = _Scratch(self, tokens)
        scratch = self._scratch
        torch.index_select(self._embedding, 0, torch.from_numpy(batch.ids), out=scratch.residual[:tokens])
        routes = np.empty((tokens, self.moe_layers, self.top_k), self._route_dtype)
        self.router_ties = np.zeros(tokens, np.uint8)
        routes_at, ties_at = routes.ctypes.data, self.router_ties.ctypes.data
        route_bytes = self.top_k * routes.itemsize
        moe_layer = 0
        for number, layer in enumerate(self.layers):
            self._attend(layer, batch, tokens, cache.keys[number].data_ptr(), cache.values[number].data_ptr())
            self._normalise(scratch.residual, None, layer.post_norm, tokens, scratch.normed)
            if isinstance(layer.feed_forward, _Mlp):
                self._mlp(layer.feed_forward, tokens)
            else:
                self._moe(layer.feed_forward, tokens, routes_at + moe_layer * route_bytes, ties_at)
                moe_layer += 1
        picked = torch.empty((len(rows), self.hidden), dtype=self.dtype)
        self._normalise(scratch.residual, rows, self._norm, len(rows), picked)
        logits = torch.empty((len(rows), self.vocab), dtype=self.dtype)
        self._linear(self._lm_head, picked.data_ptr(), len(rows), STORE, logits.data_ptr(), self.vocab)
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

    def _attend(self, layer: _Layer, batch: StepBatch, tokens: int, keys: int, values: int) -> None:
        scratch, call = self._scratch, self._kernels
        shape = (self.heads, self.kv_heads, self.head_dim)
        self._normalise(scratch.residual, None, layer.input_norm, tokens, scratch.normed)
        self._linear(layer.qkv, scratch.normed_at, tokens, STORE, scratch.qkv_at, layer.qkv.n)
        call.prepare(
            *(scratch.qkv_at, tokens, *shape, _pointer(layer.q_norm), _pointer(layer.k_norm)),
            *(self._head_layout.own, self.eps),
            *(self.cos.data_ptr(), self.sin.data_ptr(), 2 * self.cos.shape[1]),
            *(batch.positions.ctypes.data, batch.slots.ctypes.data, keys, values, self.threads),
        )
        call.attention(
            *(scratch.qkv_at, layer.qkv.n, scratch.attended_at, *shape, keys, values),
            *(batch.spans.ctypes.data, len(batch.spans), batch.blocks.ctypes.data),
            *(layer.window, self.scale, self.threads),
        )
        self._linear(layer.out, scratch.attended_at, tokens, ADD, scratch.residual_at, self.hidden)

    def _mlp(self, mlp: _Mlp, tokens: int) -> None:
        scratch = self._scratch
        self._linear(mlp.gate_up, scratch.normed_at, tokens, SILU_MUL, scratch.active_at, mlp.down.k)
        self._linear(mlp.down, scratch.active_at, tokens, ADD, scratch.residual_at, self.hidden)

    def _moe(self, moe: _Experts, tokens: int, routes: int, ties: int) -> None:
        weights = (moe.router.data_ptr(), moe.gate_up.data_ptr(), moe.down.data_ptr())
        stride = self.moe_layers * self.top_k
        sizes = (tokens, self.hidden, moe.inner, moe.count, moe.top_k)
        self._kernels.moe(
            *(self._scratch.normed_at, *weights, *sizes, moe.flags, self._tie),
            *(self._scratch.residual_at, routes, stride, ties, self.threads),
        )

    def _linear(self, linear: _Map, x: int, tokens: int, mode: int, out: int, width: int) -> None:
        weight, bias = linear.weight.data_ptr(), _pointer(linear.bias)
        self._kernels.linear(x, weight, bias, tokens, linear.n, linear.k, mode, out, width, self.threads)

    def _normalise(
        self, x: torch.Tensor, rows: np.ndarray | None, weight: torch.Tensor, count: int, out: torch.Tensor
    ) -> None:
        chosen = None if rows is None else rows.ctypes.data
        args = (x.data_ptr(), chosen, weight.data_ptr(), count, self.hidden, self.eps, out.data_ptr())
        self._kernels.rms_norm(*args, self.threads)

    def _layer(self, number: int, layer: Any, config: Any, window_at: str, round_weights: bool) -> _Layer:
        attention, mlp, packer = layer.self_attn, layer.mlp, self._packer
        head, heads = self._head_layout, self.heads + 2 * self.kv_heads
        windows = {"none": None, "config": getattr(config, "sliding_window", None)}
        window = windows.get(window_at, getattr(attention, "sliding_window", None))
        dense = hasattr(mlp, "gate_proj")
        return _Layer(
            input_norm=_floats(layer.input_layernorm.weight),
            qkv=packer.linear([attention.q_proj, attention.k_proj, attention.v_proj], head.rows(heads)),
            q_norm=head.widened(_floats(attention.q_norm.weight)) if hasattr(attention, "q_norm") else None,
            k_norm=head.widened(_floats(attention.k_norm.weight)) if hasattr(attention, "k_norm") else None,
            window=window or 0,
            out=packer.linear([attention.o_proj], widen=head.widened),
            post_norm=_floats(layer.post_attention_layernorm.weight),
            feed_forward=packer.mlp(mlp) if dense else self._experts(number, mlp, round_weights),
        )

    def _experts(self, number: int, mlp: Any, round_weights: bool) -> _Experts:
        gate, experts = mlp.gate, mlp.experts
        up, down = experts.gate_up_proj.data, experts.down_proj.data
        inner = up.shape[1] // 2
        order = _gate_up_order(inner)
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
        dense = [x.feed_forward for x in decoder.layers if isinstance(x.feed_forward, _Mlp)]
        inner = max((mlp.down.k for mlp in dense), default=0)
        self.residual, self.normed = rows(decoder.hidden), rows(decoder.hidden)
        self._qkv, self._attended = rows(decoder.layers[0].qkv.n), rows(decoder.heads * decoder.head_dim)
        self._active = rows(inner)
        self.residual_at, self.normed_at = self.residual.data_ptr(), self.normed.data_ptr()
        self.qkv_at, self.attended_at = self._qkv.data_ptr(), self._attended.data_ptr()
        self.active_at = self._active.data_ptr()


class _Packer:
    def __init__(self, call: SimpleNamespace) -> None:
        self._call = call
        self.made: list[torch.Tensor] = []

    def pack(
        self, parts: Sequence[torch.Tensor], order: torch.Tensor | None = None, experts: int = 1
    ) -> torch.Tensor:
        """Pack the rows of `parts` for the kernels.

        parts: [.., k] each. Their rows, one below the other, are those of `experts` experts, which are packed one after the
        other. order: for each packed output, the row of an expert, or -1 for zeros. The default is all rows in order.
        """
        k = parts[0].shape[-1]
        parts = [part.reshape(-1, k).contiguous() for part in parts]
        lowest = min(part.data_ptr() for part in parts)
        step = k * parts[0].element_size()
        rows = torch.cat([torch.arange(len(p)) * step + (p.data_ptr() - lowest) for p in parts])
        rows = rows.view(experts, -1)
        order = torch.arange(rows.shape[1]) if order is None else order
        width = -(-len(order) // PANEL) * PANEL
        places = torch.full((experts, width), -1)
        places[:, : len(order)] = rows[:, order].masked_fill_(order < 0, -1)
        packed = big(experts * width * step // 4)
        self._call.pack(lowest, places.data_ptr(), experts * width // PANEL, k, packed.data_ptr())
        self.made.append(packed)
        return packed

    def linear(
        self,
        modules: list[Any],
        order: torch.Tensor | None = None,
        widen: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> _Map:
        """One map for linear modules of the same input, with their outputs side by side. Raises KernelsUnavailable.

        widen: fills the weights up where the input is filled up.
        """
        for module in modules:
            if type(module) is not torch.nn.Linear:
                raise KernelsUnavailable(f"{type(module).__name__} is not a plain linear map")
        weights = [m.weight.data if widen is None else widen(m.weight.data) for m in modules]
        n, k = sum(map(len, weights)) if order is None else len(order), weights[0].shape[1]
        bias = None
        if any(m.bias is not None for m in modules):
            parts = [torch.zeros(m.out_features) if m.bias is None else m.bias.data.float() for m in modules]
            bias = torch.zeros(-(-n // PANEL) * PANEL)
            own = torch.cat(parts)
            bias[:n] = own if order is None else own[order].masked_fill_(order < 0, 0.0)
        return _Map(self.pack(weights, order), bias, n, k)

    def mlp(self, mlp: Any) -> _Mlp:
        order = _gate_up_order(mlp.gate_proj.out_features)
        return _Mlp(self.linear([mlp.gate_proj, mlp.up_proj], order), self.linear([mlp.down_proj]))


def _tensors_of(name: str, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield name, part
    elif isinstance(part, _Layer | _Map | _Mlp | _Experts):
        for entry in fields(part):
            yield from _tensors_of(f"{name}.{entry.name}", getattr(part, entry.name))


def _in_groups(batch: StepBatch) -> StepBatch:
    """The same batch with blocks of 16 slots, the groups of the kernels."""
    per_block = batch.block_size // GROUP
    if per_block == 1:
        return batch
    spans = batch.spans * np.array([1, 1, 1, per_block], dtype=np.int32)
    groups = (batch.blocks[:, None] * per_block + np.arange(per_block, dtype=np.int32)).reshape(-1)
    return replace(batch, spans=spans, blocks=groups, block_size=GROUP)


def _gate_up_order(inner: int) -> torch.Tensor:
    """The order of the rows of [gate; up] in which a panel holds 16 rows of gate and the matching 16 of up."""
    pairs = torch.arange(2 * inner).view(2, inner // 16, 16)
    return pairs.transpose(0, 1).reshape(-1).contiguous()


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


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
