"""What a trainer is given and gives back. Pure, and without torch.

Always holds: a tensor has as many bytes as its shape and its type say.

How a training call fails after it was accepted.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

Category = Literal["user", "server", "unknown"]


class WorkFailed(Exception):
    """What was accepted cannot be done: the future ends with this error. The SDK shows it once and does not try again."""

    def __init__(self, message: str, category: Category = "user") -> None:
        super().__init__(message)
        self.message = message
        self.category: Category = category


Dtype = Literal["int64", "int32", "float32"]
ITEM_BYTES: Final[dict[Dtype, int]] = {"int64": 8, "int32": 4, "float32": 4}
MAX_INT64 = 2**63 - 1


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """Dense, little-endian, in C order; prod(shape) items."""

    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != prod(self.shape) * ITEM_BYTES[self.dtype]:
            raise ValueError(f"{len(self.data)} bytes do not hold {self.dtype} of shape {list(self.shape)}")


class Datum(msgspec.Struct, frozen=True, kw_only=True):
    """N input tokens and, by name, the loss's inputs. Their first dimension is usually N."""

    tokens: tuple[int, ...]
    inputs: dict[str, Tensor]

    @property
    def size(self) -> int:
        """Bytes, about."""
        return 4 * len(self.tokens) + sum(len(tensor.data) for tensor in self.inputs.values())


class ForwardBackward(msgspec.Struct, frozen=True, kw_only=True):
    """seq_id 0: not given."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool

    @property
    def size(self) -> int:
        """Bytes, about."""
        return sum(datum.size for datum in self.data)


class LossOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Per datum, in order, its tensors by name; metrics are named `name:reduction`."""

    outputs: tuple[dict[str, Tensor], ...]
    metrics: dict[str, float]

    @property
    def size(self) -> int:
        """Bytes, about."""
        return sum(len(tensor.data) for datum in self.outputs for tensor in datum.values())


class AdamParams(msgspec.Struct, frozen=True, kw_only=True):
    learning_rate: float = 1e-4
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(ge=0)] = 1e-12
    weight_decay: float = 0.0
    #: 0 or less: no clipping.
    grad_clip_norm: float = 0.0


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """rank: 0 to train all weights instead of an adapter."""

    rank: Annotated[int, Meta(ge=0, le=4096)] = 32
    seed: Annotated[int, Meta(ge=-(2**63), le=MAX_INT64)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def shape(self) -> str:
        """What is trained, in words; equal for models with states that fit each other."""
        if self.rank == 0:
            return "all weights (rank 0)"
        parts = {"attention": self.train_attn, "mlp": self.train_mlp, "unembedding": self.train_unembed}
        return f"LoRA of rank {self.rank} on {', '.join(part for part, on in parts.items() if on)}"
