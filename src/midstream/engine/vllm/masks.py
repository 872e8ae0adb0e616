"""The sampling masks of vLLM's tokens (core/masks.py): those that follow from a request, and those that its workers say. Pure.

Always holds: what cannot be a mask raises ValueError, and no mask is made up of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from midstream.core.masks import ALONE, EVERY
from midstream.core.types import GenerateRequest
from midstream.engine.step import GREEDY_BELOW, mask_of
from midstream.engine.vllm.worker_extension.midstream_vllm_numbers import IDS, WORDS


def fixed_mask(request: GenerateRequest, vocab_size: int) -> bytes | None:
    """Of all of its tokens. None: each has its own."""
    s = request.sampling
    if s.temperature < GREEDY_BELOW:
        return ALONE
    filtered = 0 < s.top_k < vocab_size or s.top_p < 1 or s.min_p > 0
    return None if filtered or s.limited or request.grammar is not None else EVERY


def is_mask(numbers: Sequence[int]) -> bool:
    """Of what comes with a token: whether it is a mask, and nothing about KV or routes."""
    return bool(numbers) and numbers[0] in (IDS, WORDS)


def read_mask(numbers: Sequence[int]) -> bytes:
    """From what the worker extension wrote: IDS and ids, or WORDS and bits."""
    kind, *rest = numbers
    if kind == WORDS:
        bits = np.array(rest, dtype="<u4").view(np.uint8)
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    else:
        ids = np.array(rest, dtype=np.int64)
    if kind not in (IDS, WORDS) or not len(ids) or ids[0] < 0 or (np.diff(ids) < 1).any():
        raise ValueError(f"{len(numbers)} numbers that begin with {list(numbers[:4])} are no sampling mask")
    return mask_of(ids)
