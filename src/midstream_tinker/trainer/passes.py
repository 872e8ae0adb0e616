"""Forward and backward passes over many sequences of different lengths, a few at a time.

Always holds: the numbers do not depend on which sequences share a pass, but for rounding. A pass holds at most `batch_tokens`
positions, padding included, unless one sequence is longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstream.client.replay import OWN_ROUTE, RouterTap, pad_routes, pad_sequences
from midstream_tinker.trainer import types
from midstream_tinker.trainer.losses import Example, LossFunction, LossTerms
from midstream_tinker.trainer.types import WorkFailed

# Logits of one pass, in float32.
LOGITS_BYTES_MAX = 2**30


@dataclass
class _Sums:
    """What passes add up to, over all tokens."""

    loss: float = 0.0
    # Tokens with a weight or advantage other than 0.
    tokens: int = 0
    ratio: float = 0.0
    ratios: int = 0
    clipped: int = 0

    def add(self, terms: LossTerms, matter: Tensor) -> None:
        self.loss += terms.values.detach().double().sum().item()
        self.tokens += int((matter != 0).sum())
        if terms.ratio is not None:
            self.ratio += terms.ratio.double().sum().item()
            self.ratios += terms.ratio.numel()
        if terms.clipped is not None:
            self.clipped += int(terms.clipped.sum())

    def metrics(self, loss: LossFunction) -> dict[str, float]:
        metrics = {"loss:sum": self.loss, "tokens:sum": float(self.tokens)}
        if loss.has_ratio:
            metrics["ratio:mean"] = self.ratio / self.ratios if self.ratios else 1.0
        if loss.clips:
            metrics["clip_fraction:mean"] = self.clipped / self.ratios if self.ratios else 0.0
        return metrics


def run_passes(
    module: Any,
    tap: RouterTap,
    loss: LossFunction,
    examples: Sequence[Example],
    *,
    backward: bool,
    positions_max: int,
) -> types.LossOutputs:
    """Gradients are added to what the parameters hold.

    Raises WorkFailed for a loss that is not finite, after some were added.
    """
    outputs: dict[int, dict[str, types.Tensor]] = {}
    sums = _Sums()
    for indices in micro_batches([len(example) for example in examples], positions_max):
        batch = [examples[i] for i in indices]
        with torch.set_grad_enabled(backward):
            logprobs = batch_logprobs(module, tap, batch)
            inputs = {
                name: torch.cat([e.inputs[name].flatten() for e in batch]).to(logprobs.device)
                for name in loss.per_token
            }
            terms = loss.terms(logprobs, inputs)
            _check_finite(terms.values, indices, batch)
            if backward:
                terms.values.sum().backward()  # type: ignore[no-untyped-call]
        sums.add(terms, inputs[loss.matter])
        pieces = _pieces(logprobs.detach().cpu(), batch)
        for index, example, piece in zip(indices, batch, pieces, strict=True):
            data = piece.numpy().astype("<f4").tobytes()
            outputs[index] = {"logprobs": types.Tensor(dtype="float32", shape=example.shape, data=data)}
    return types.LossOutputs(
        outputs=tuple(outputs[i] for i in range(len(examples))), metrics=sums.metrics(loss)
    )


def positions_of_pass(batch_tokens: int, vocab_size: int) -> int:
    """How many positions a pass may have: `batch_tokens`, or fewer where their logits would be too large."""
    return max(1, min(batch_tokens, LOGITS_BYTES_MAX // (4 * vocab_size)))


def micro_batches(lengths: Sequence[int], positions_max: int) -> Iterator[list[int]]:
    """Indices, longest first, so that little of a batch is padding."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        size = max(1, positions_max // lengths[order[start]])
        yield order[start : start + size]
        start += size


def batch_logprobs(module: Any, tap: RouterTap, batch: Sequence[Example]) -> Tensor:
    """Float32, flat: of each example's targets in their order, example after example."""
    device = next(module.parameters()).device
    ids = pad_sequences([example.tokens.tolist() for example in batch])
    targets = torch.zeros(*ids.shape, max(example.targets.shape[1] for example in batch), dtype=torch.int64)
    given = torch.zeros_like(targets, dtype=torch.bool)
    for row, example in enumerate(batch):
        length, count = example.targets.shape
        targets[row, :length, :count] = example.targets
        given[row, :length, :count] = True
    with tap.forcing(_routes(tap, batch, ids.shape[1], device)):
        logits = module(input_ids=ids.to(device), use_cache=False).logits.float()
    logprobs: Tensor = logits.gather(-1, targets.to(device)) - logits.logsumexp(-1, keepdim=True)
    return logprobs[given.to(device)]


def _routes(tap: RouterTap, batch: Sequence[Example], length: int, device: torch.device) -> Tensor | None:
    if all(example.routes is None for example in batch):
        return None
    shape = (len(tap.routers), int(tap.routers[0].top_k))
    rows = [
        np.full((len(e), *shape), OWN_ROUTE) if e.routes is None else e.routes.numpy().astype(np.int64)
        for e in batch
    ]
    return pad_routes(rows, length).flatten(0, 1).to(device)


def _pieces(flat: Tensor, batch: Sequence[Example]) -> Sequence[Tensor]:
    """What belongs to each example."""
    return torch.split(flat, [example.targets.numel() for example in batch])


def _check_finite(values: Tensor, indices: Sequence[int], batch: Sequence[Example]) -> None:
    """Raises WorkFailed, which names the first datum with a loss that is not finite."""
    if torch.isfinite(values.detach()).all():
        return
    pieces = _pieces(values.detach(), batch)
    wrong = min(i for i, piece in zip(indices, pieces, strict=True) if not torch.isfinite(piece).all())
    raise WorkFailed(
        f"the loss of data[{wrong}] is not finite: its logprobs are too far from the model's, or the model diverged"
    )
