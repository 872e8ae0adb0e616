"""One step, as decoders and samplers see it.

Owns: the input of a forward pass, the input and the output of sampling, and the thresholds of near ties. The embedded engine
fills these. Its PyTorch code and the CPU kernels (midstream_kernels) compute with them. Imports no torch.
Always holds: in a batch, the tokens of a sequence are contiguous, in order of position, and the last ones of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np

from midstream.core.masks import ALONE, BITS, LONG, SHORT
from midstream.core.types import SamplingParams

#: Temperatures below this are greedy: dividing logits by less overflows float32.
GREEDY_BELOW = 1e-5
SEED_MASK = (1 << 64) - 1

#: By dtype: how much rounding may change the difference of two logits, as a share of the largest logit of their row.
#: It holds for router logits and for the logits that tokens are drawn from.
NEAR_TIE = {"float32": 2e-5, "float16": 6e-3, "bfloat16": 5e-2}
#: How much rounding may change a sum of probabilities that is added in float32. kernels/sample.h of midstream_kernels has the
#: same constant.
SUM_ROUNDING = 2e-7


@cache
def near_tie(dtype: object) -> float:
    """The threshold of a torch dtype. A dtype that is not listed gets the widest threshold."""
    return NEAR_TIE.get(str(dtype).removeprefix("torch."), max(NEAR_TIE.values()))


def route_dtype(num_experts: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype("<u2")


@dataclass(frozen=True)
class StepBatch:
    """The tokens of all sequences in a step, packed.

    ids, positions: [tokens] int64. slots: [tokens] int64, where the KV of each token goes.
    spans: [sequences, 4] int32: first token in the batch, number of tokens, position of the first token, index of the
    sequence's first block in `blocks`. blocks: int32, the block tables one after the other.
    adapters: of each sequence, the decoder's own form of its LoRA adapter, or None. Empty: no sequence has one.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    spans: np.ndarray
    blocks: np.ndarray
    block_size: int
    adapters: tuple[Any, ...] = ()

    def table(self, sequence: int) -> np.ndarray:
        """The slots of all positions of a sequence, int64."""
        _, tokens, first, at = self.spans[sequence].tolist()
        end = first + tokens
        blocks = self.blocks[at : at + -(-end // self.block_size)].astype(np.int64)
        return (blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)[:end]


class SampleRow(msgspec.Struct):
    """What the sampler needs to know of one sequence.

    position: of the token to be sampled; the first prompt token has position 0. history: prompt and generated tokens.
    mask: the tokens that the sequence's grammar and limits allow, bit i (little-endian) for token i. None allows all.
    wants_mask: of the tokens that these and the filters leave (Sampled.masks).
    """

    params: SamplingParams
    index: int
    position: int
    history: Sequence[int]
    prompt_len: int
    top_logprobs: int
    mask: bytes | None = None
    wants_mask: bool = False


@dataclass(frozen=True)
class Sampled:
    """One entry per row. top: the best alternatives, best first; empty when the request asked for none.

    near_ties: the bits of types.NEAR_* for filters and greedy choices. masks: as in a TokenRecord, of rows that want one.
    """

    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    top: list[list[tuple[int, float]]]
    near_ties: list[int]
    masks: list[bytes | None]

    @property
    def columns(self) -> tuple[list[Any], ...]:
        return self.tokens, self.logprobs, self.sampling_logprobs, self.top, self.near_ties, self.masks


def mask_of(ids: np.ndarray) -> bytes:
    """The mask of the ids that were left: ascending, at least one (core/masks.py)."""
    if len(ids) == 1:
        return ALONE
    last = int(ids[-1])
    size = SHORT if last < 1 << 16 else LONG
    if last // 8 + 1 < size * len(ids):
        bits = np.zeros(last + 1, dtype=np.uint8)
        bits[ids] = 1
        return bytes([BITS]) + np.packbits(bits, bitorder="little").tobytes()
    return bytes([size]) + ids.astype(f"<u{size}").tobytes()
