"""LoRA adapters in the layout of the kernels (kernels/lora.h), and the adapters of one step.

Owns: the memory of each packed adapter, which holds its numbers once.
Always holds: a token's bits depend on its own adapter alone, not on those beside it. Rows of a batch without an adapter get
the bits that they get in a batch where nobody has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol

import numpy as np
import torch

from midstream_kernels.build import KernelsUnavailable
from midstream_kernels.memory import big, give_back
from midstream_kernels.packing import LANES, PANEL, HeadLayout, gate_up_order
from midstream_kernels.port import Batch, Factors, OwnFactors
from midstream_kernels.tables import AddressTable, address_of, addresses

#: The pieces of a layer, in the order of the table, by the map of the decoder that they add to.
QKV, OUT, GATE_UP, DOWN = slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)
PIECES = 7
#: Numbers of a piece: a, b, rank, n, column, step.
FIELDS = 6
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:(\d+)\.)?(gate_proj|up_proj|down_proj|gate_up_proj)")
_ALIGNED = 64


class Shapes(Protocol):
    """What an adapter has to know of its decoder. dense: of each layer, whether its feed-forward map has no experts."""

    kernels: SimpleNamespace
    head_layout: HeadLayout
    heads: int
    kv_heads: int
    head_dim: int
    num_experts: int
    dense: tuple[bool, ...]


@dataclass(frozen=True)
class _Place:
    """Where a map's piece stands. order: of its outputs; None for their own. column, step: see lora.h."""

    order: torch.Tensor | None = None
    column: int = 0
    step: int = LANES


class _Arena:
    """One block of memory for all numbers of an adapter: thousands of small ones would be too many mappings."""

    def __init__(self, size: int) -> None:
        self.memory = big(-(-size // 4)).view(torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        first, self._used = self._used, self._used + padded(size)
        return self.memory[first : first + size]


def padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class PackedAdapter:
    """pieces: [layers, PIECES, FIELDS]; head: [1, FIELDS]. experts: by layer [experts, 3, FIELDS], where any is adapted."""

    def __init__(self, decoder: Shapes, maps: Mapping[str, Factors]) -> None:
        """Raises KernelsUnavailable, naming a map that these kernels do not adapt."""
        self._decoder = decoder
        size = sum(self._bytes(low) for low in maps.values())
        self._arena = _Arena(size)
        self.pieces = np.zeros((len(decoder.dense), PIECES, FIELDS), np.int64)
        self.head = np.zeros((1, FIELDS), np.int64)
        self.experts: dict[int, np.ndarray] = {}
        for path, low in maps.items():
            self._add(path, low)

    @property
    def nbytes(self) -> int:
        return self._arena.memory.nbytes

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "adapter", self._arena.memory

    def release(self) -> None:
        """Free the numbers. Nothing may read them afterwards."""
        give_back(self._arena.memory.data_ptr(), self._arena.memory.nbytes)

    def _add(self, path: str, low: Factors) -> None:
        if path == "lm_head":
            self.head[0] = self._piece(low, _Place())
            return
        layer = _LAYER.fullmatch(path)
        number, rest = (int(layer[1]), layer[2]) if layer else (-1, "")
        if not 0 <= number < len(self._decoder.dense):
            raise KernelsUnavailable(f"an adapter of {path}")
        expert = _EXPERT.fullmatch(rest)
        dense = self._decoder.dense[number]
        if expert is not None and not dense:
            self._add_experts(number, expert[1], expert[2], low)
            return
        places = self._places(dense)
        if rest not in places:
            raise KernelsUnavailable(f"an adapter of {path}")
        at, place = places[rest]
        if rest == "self_attn.o_proj":
            low = OwnFactors(self._decoder.head_layout.widened(low.a), low.b)
        self.pieces[number, at] = self._piece(low, place)

    def _places(self, dense: bool) -> dict[str, tuple[int, _Place]]:
        decoder = self._decoder
        layout, size = decoder.head_layout, decoder.head_dim
        queries, keys = layout.rows(decoder.heads), layout.rows(decoder.kv_heads)
        first_key, first_value = decoder.heads * size, (decoder.heads + decoder.kv_heads) * size
        places = {
            "self_attn.q_proj": (0, _Place(queries)),
            "self_attn.k_proj": (1, _Place(keys, first_key)),
            "self_attn.v_proj": (2, _Place(keys, first_value)),
            "self_attn.o_proj": (3, _Place()),
        }
        if dense:
            places["mlp.gate_proj"] = (4, _Place(None, 0, 2 * LANES))
            places["mlp.up_proj"] = (5, _Place(None, LANES, 2 * LANES))
            places["mlp.down_proj"] = (6, _Place())
        return places

    def _add_experts(self, layer: int, one: str | None, part: str, low: Factors) -> None:
        count = self._decoder.num_experts
        table = self.experts.setdefault(layer, np.zeros((count, 3, FIELDS), np.int64))
        inner = low.b.shape[-2] // 2
        at, place = {
            "gate_up_proj": (0, _Place(gate_up_order(inner) if part == "gate_up_proj" else None)),
            "gate_proj": (0, _Place(None, 0, 2 * LANES)),
            "up_proj": (1, _Place(None, LANES, 2 * LANES)),
            "down_proj": (2, _Place()),
        }[part]
        if one is not None:
            table[int(one), at] = self._piece(low, place)
            return
        for expert in range(count):
            table[expert, at] = self._piece(OwnFactors(low.a[expert], low.b[expert]), place)

    def _piece(self, low: Factors, place: _Place) -> tuple[int, ...]:
        rank = len(low.a)
        a = self._arena.take(low.a.nbytes)
        a.copy_(low.a.contiguous().reshape(-1).view(torch.uint8))
        order = torch.arange(len(low.b)) if place.order is None else place.order
        b = self._panels(low.b, order)
        return (a.data_ptr(), b.data_ptr(), rank, len(order), place.column, place.step)

    def _panels(self, b: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """b [outputs, rank] in panels, with the rank filled up to whole units."""
        per_unit = 4 // b.element_size()
        width = -(-b.shape[1] // per_unit) * per_unit
        if width > b.shape[1]:
            b = torch.nn.functional.pad(b, (0, width - b.shape[1]))
        b = b.contiguous()
        step = width * b.element_size()
        places = torch.full((-(-len(order) // PANEL) * PANEL,), -1)
        places[: len(order)] = (order * step).masked_fill(order < 0, -1)
        packed = self._arena.take(len(places) * step)
        self._decoder.kernels.pack(
            b.data_ptr(), places.data_ptr(), len(places) // PANEL, width, packed.data_ptr()
        )
        return packed

    def _bytes(self, low: Factors) -> int:
        """At most what the map takes. Heads that are filled up make it larger."""
        heads = -(-self._decoder.head_dim // self._decoder.head_layout.own) + 1
        experts = low.a.shape[0] if low.a.ndim == 3 else 1
        rank, k = low.a.shape[-2:]
        outputs = -(-low.b.shape[-2] // PANEL) * PANEL
        item = low.a.element_size()
        wide = 1 if self._decoder.head_dim == self._decoder.head_layout.own else heads
        return experts * (padded(wide * rank * k * item) + padded(wide * outputs * (rank + 1) * item))


class StepAdapters:
    """The adapters of a batch, and the rows of each.

    of: [tokens] int32, the number of each token's adapter, or -1. rows: int32, the tokens with one, adapter after adapter.
    starts: [adapters + 1] int32. pieces: [layers, adapters, PIECES, FIELDS]. table: StepAdapters of kernels/pass.h.
    """

    def __init__(self, batch: Batch, layers: int) -> None:
        adapters: list[PackedAdapter] = []
        numbers: dict[int, int] = {}
        of_span = []
        for adapter in batch.adapters:
            if adapter is not None and id(adapter) not in numbers:
                numbers[id(adapter)] = len(adapters)
                adapters.append(adapter)
            of_span.append(-1 if adapter is None else numbers[id(adapter)])
        self.adapters = adapters
        self.of = np.repeat(np.array(of_span, np.int32), batch.spans[:, 1])
        self.rows, self.starts = self.grouped(self.of)
        self.pieces = np.ascontiguousarray(np.stack([a.pieces for a in adapters], axis=1))
        self.head = np.stack([a.head for a in adapters])
        self.any_head = bool((self.head[..., 0] != 0).any())
        self._experts: list[np.ndarray | None] = [self._experts_of(layer) for layer in range(layers)]
        self._layers = AddressTable([self._layer(layer) for layer in range(layers)])
        row = (self._layers.at, *addresses((self.rows, self.starts)), len(adapters))
        self.table = AddressTable(row)

    @staticmethod
    def key(batch: Batch) -> tuple[tuple[int, ...], bytes]:
        """Equal for batches that have the same of everything here. The adapters have to live."""
        return tuple(map(id, batch.adapters)), batch.spans[:, 1].tobytes()

    def grouped(self, of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows, starts) of tokens whose adapters have these numbers."""
        order = np.argsort(of, kind="stable").astype(np.int32)
        counts = np.bincount(of + 1, minlength=len(self.adapters) + 1)
        rows = order[counts[0] :].copy()
        return rows, np.concatenate(([0], np.cumsum(counts[1:]))).astype(np.int32)

    def _layer(self, number: int) -> tuple[int, ...]:
        """LayerAdapters of kernels/pass.h."""
        have = [bool((self.pieces[number, :, part, 0] != 0).any()) for part in (QKV, OUT, GATE_UP, DOWN)]
        experts = self._experts[number]
        of = (0, 0) if experts is None else addresses((self.of, experts))
        return (*have, address_of(self.pieces[number]), *of)

    def _experts_of(self, layer: int) -> np.ndarray | None:
        """[adapters] int64: where the pieces of the layer's experts lie, or 0; None when nobody adapts them."""
        tables = [a.experts.get(layer) for a in self.adapters]
        if all(table is None for table in tables):
            return None
        return np.array([0 if table is None else table.ctypes.data for table in tables], np.int64)
