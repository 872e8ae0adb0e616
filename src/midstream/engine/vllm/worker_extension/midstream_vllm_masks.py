"""Which tokens limits and filters left for a draw: from vLLM's sampler to its scheduler, and from there to the token's answer.

A worker puts the masks of a step, by request, beside what it answers to the scheduler, and other lists of numbers with them.
The scheduler puts each into the place that vLLM has for its own masks (--return-sampling-mask), which go with the token.

Always holds: a mask is of the tensor that the token was drawn from. vLLM's own part in this reads no mask.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

numbers = importlib.import_module("midstream_vllm_numbers")
#: Of what a model runner answers.
FIELD = "midstream_said"


def packed(kept: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """kept: [rows, vocab] of torch, what was left. names: of the requests."""
    rows, ids = (found.cpu().numpy() for found in kept.nonzero(as_tuple=True))
    ends = np.searchsorted(rows, np.arange(1, len(names)))
    return {name: pack(of_row) for name, of_row in zip(names, np.split(ids, ends), strict=True)}


def pack(ids: np.ndarray) -> np.ndarray:
    """The shorter form of ids, which ascend."""
    words = int(ids[-1]) // 32 + 1 if len(ids) else 0
    if len(ids) <= words or not words:
        return np.concatenate(([numbers.IDS], ids))
    bits = np.zeros(words * 32, dtype=np.uint8)
    bits[ids] = 1
    return np.concatenate(
        ([numbers.WORDS], np.packbits(bits, bitorder="little").view("<u4").astype(np.int64))
    )


def put(answer: Any, said: Mapping[str, np.ndarray]) -> None:
    """answer: a model runner's. One that is not complete yet has the output inside. said: by request, beside what is there."""
    output = getattr(answer, "_model_runner_output", answer)
    there = {name: [*lists] for name, lists in of(output).items()}
    for name, one in said.items():
        there.setdefault(name, []).append(one)
    setattr(output, FIELD, there)


def of(answer: Any) -> Mapping[str, Sequence[np.ndarray]]:
    """By request, the lists of its token."""
    found: Mapping[str, Sequence[np.ndarray]] = getattr(answer, FIELD, {})
    return found


def without_passes(lists: Sequence[np.ndarray], output: Any) -> Sequence[np.ndarray]:
    """The lists, but for the passes of a prompt that `output` ends with: these take vLLM's own place for routes, in which they
    travel as bytes. It has one at the end of a choice only."""
    many = [one for one in lists if one[0] == numbers.ROWS and one[2] > 1]
    if len(many) != 1 or output.finish_reason is None or getattr(output, "routed_experts", many) is not None:
        return lists
    output.routed_experts = many[0][1:].astype("<u4")
    return [one for one in lists if one is not many[0]]


def joined(lists: Sequence[np.ndarray], kind: Any) -> Any:
    """As vLLM has the masks of several tokens. kind: its SamplingMaskLists."""
    if len(lists) == 1:
        return kind(lists[0])
    return kind(np.concatenate(lists), np.cumsum([0, *map(len, lists)]))
