"""How a model's tensors lie in memory for the kernels: panels of outputs, and heads filled up to whole vectors.

Always holds: packing moves numbers and adds zeros. It changes no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from midstream_kernels.build import KernelsUnavailable
from midstream_kernels.gang import Gang
from midstream_kernels.memory import Spare

#: Copied at a time, by each thread.
PIECE_BYTES = 8 * 2**20
#: Outputs of a linear map that are packed side by side, in two vectors.
PANEL = 32
LANES = 16


@dataclass(frozen=True)
class Map:
    """The packed weight of a linear map with n outputs and k inputs. row: Map of kernels/pass.h."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    n: int
    k: int
    row: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row", (self.weight.data_ptr(), pointer(self.bias), self.n, self.k))


@dataclass(frozen=True)
class Mlp:
    gate_up: Map
    down: Map


class HeadLayout:
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


class Packer:
    """gang: does the copying, which may still run when `pack` returns. Nothing may read what was packed until it is done.

    spare: where the memory comes from. made: gets what was taken of it.
    """

    def __init__(self, call: SimpleNamespace, gang: Gang, spare: Spare, made: list[torch.Tensor]) -> None:
        self._call = call
        self._gang = gang
        self._spare = spare
        self.made = made

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
        # PyTorch would start threads of its own for these numbers, and have them spin beside the steps.
        rows = np.concatenate([np.arange(len(p)) * step + (p.data_ptr() - lowest) for p in parts])
        rows = rows.reshape(experts, -1)
        if order is not None:
            rows = np.where(order.numpy() < 0, -1, rows[:, order.numpy()])
        width = -(-rows.shape[1] // PANEL) * PANEL
        places = np.full((experts, width), -1)
        places[:, : rows.shape[1]] = rows
        packed = self._taken(experts * width * step)

        def copy(first: int, last: int) -> None:
            # The parts stay alive until they are copied.
            assert parts
            rows_at, to = places.ctypes.data + first * PANEL * 8, packed.data_ptr() + first * PANEL * step
            self._call.pack(lowest, rows_at, last - first, k, to)

        self._gang.split(copy, experts * width // PANEL, max(1, PIECE_BYTES // (PANEL * step)))
        return packed

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor."""
        tensor = tensor.contiguous()
        source = tensor.reshape(-1).view(torch.uint8).numpy()
        target = self._taken(tensor.nbytes).view(torch.uint8)[: tensor.nbytes]

        def copy(first: int, last: int) -> None:
            np.copyto(target.numpy()[first:last], source[first:last])

        self._gang.split(copy, tensor.nbytes, PIECE_BYTES)
        return target.view(tensor.dtype).view(tensor.shape)

    def _taken(self, size: int) -> torch.Tensor:
        self.made.append(self._spare.take(-(-size // 4)))
        return self.made[-1]

    def linear(
        self,
        modules: list[Any],
        order: torch.Tensor | None = None,
        widen: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Map:
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
        packed = self.pack(weights, order)
        return Map(packed, bias, n, k)

    def mlp(self, mlp: Any) -> Mlp:
        order = gate_up_order(mlp.gate_proj.out_features)
        return Mlp(self.linear([mlp.gate_proj, mlp.up_proj], order), self.linear([mlp.down_proj]))


def pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def gate_up_order(inner: int) -> torch.Tensor:
    """The order of the rows of [gate; up] in which a panel holds 16 rows of gate and the matching 16 of up."""
    pairs = torch.arange(2 * inner).view(2, inner // 16, 16)
    return pairs.transpose(0, 1).reshape(-1).contiguous()
