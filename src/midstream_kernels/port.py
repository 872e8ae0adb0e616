"""The forms in which the engine hands its own objects to the kernels.

Always holds: the kernels read these attributes and write to none of them. They make no object of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class Batch(Protocol):
    """The tokens of all sequences in a step, packed: engine/step.StepBatch says what each array holds.

    adapters: of each sequence, what CpuDecoder.adapter made, or None. Empty: no sequence has one.
    """

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def positions(self) -> np.ndarray: ...
    @property
    def slots(self) -> np.ndarray: ...
    @property
    def spans(self) -> np.ndarray: ...
    @property
    def blocks(self) -> np.ndarray: ...
    @property
    def block_size(self) -> int: ...
    @property
    def adapters(self) -> tuple[Any, ...]: ...


class Factors(Protocol):
    """What an adapter adds to a linear map: `b @ a`, as engine/adapter.LowRank holds it."""

    @property
    def a(self) -> torch.Tensor: ...
    @property
    def b(self) -> torch.Tensor: ...


class OwnFactors(NamedTuple):
    """Factors that the kernels made of the engine's."""

    a: torch.Tensor
    b: torch.Tensor


class StoredTensor(Protocol):
    """dtype: as safetensors names it."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class WeightsFile(Protocol):
    """A safetensors file that was checked. ranges: where in the file each tensor's bytes lie, (begin, end)."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    @property
    def ranges(self) -> Mapping[str, tuple[int, int]]: ...
