"""The tables of addresses that kernels/pass.h reads: of a model's weights, a cache, the scratch memory and a step's adapters.

Always holds: a table belongs to the object that owns the tensors, and is made with it. Who replaces a tensor makes another such
object, so no table has the address of memory that was freed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from midstream_kernels.packing import Map, Mlp, pointer

#: Of a layer that has no such map.
NO_MAP = (0, 0, 0, 0)
NO_EXPERTS = (0,) * 7


class AddressTable:
    """Whole numbers of 64 bits, and where they begin in memory."""

    __slots__ = ("_numbers", "at")

    def __init__(self, numbers: Sequence[object]) -> None:
        self._numbers = np.array(numbers, dtype=np.int64)
        self.at = address_of(self._numbers)


@dataclass(frozen=True)
class Experts:
    """row: as the last fields of Layer in kernels/pass.h."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    count: int
    top_k: int
    inner: int
    flags: int
    row: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        weights = (self.router.data_ptr(), self.gate_up.data_ptr(), self.down.data_ptr())
        object.__setattr__(self, "row", (*weights, self.inner, self.count, self.top_k, self.flags))


@dataclass(frozen=True)
class Layer:
    """row: Layer of kernels/pass.h."""

    input_norm: torch.Tensor
    qkv: Map
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    window: int
    out: Map
    post_norm: torch.Tensor
    feed_forward: Mlp | Experts
    row: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        attention = (self.input_norm.data_ptr(), *self.qkv.row, pointer(self.q_norm), pointer(self.k_norm))
        ahead = (*attention, self.window, *self.out.row, self.post_norm.data_ptr())
        fed = self.feed_forward
        maps = (*fed.gate_up.row, *fed.down.row) if isinstance(fed, Mlp) else (*NO_MAP, *NO_MAP)
        experts = fed.row if isinstance(fed, Experts) else NO_EXPERTS
        object.__setattr__(self, "row", (*ahead, *maps, *experts))


@dataclass(frozen=True)
class PackedWeights:
    """All that a forward pass reads of a model. sizes: the last fields of Model in kernels/pass.h. table: Model.

    embedding: None where the output layer is tied to it, so that `head` has its rows.
    """

    embedding: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    norm: torch.Tensor
    head: Map
    layers: Sequence[Layer]
    sizes: tuple[int, ...]
    table: AddressTable = field(init=False)
    _of_layers: AddressTable = field(init=False)

    def __post_init__(self) -> None:
        layers = AddressTable([layer.row for layer in self.layers])
        positions, half = self.cos.shape
        rotary = (self.cos.data_ptr(), self.sin.data_ptr(), positions, 2 * half, self.norm.data_ptr())
        embedding = (pointer(self.embedding), self.head.n if self.embedding is None else len(self.embedding))
        row = (layers.at, len(self.layers), *embedding, *rotary, *self.head.row, *self.sizes)
        object.__setattr__(self, "_of_layers", layers)
        object.__setattr__(self, "table", AddressTable(row))


def addresses(arrays: Iterable[np.ndarray]) -> list[int]:
    """Where arrays that may be written to begin in memory; 0 for an empty one."""
    # An array offers a buffer, which its type does not say.
    first: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer
    return [ctypes.addressof(first(array)) if array.size else 0 for array in arrays]


def address_of(array: np.ndarray) -> int:
    return addresses((array,))[0]
