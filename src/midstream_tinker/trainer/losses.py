"""The losses: what each takes, and its value per target token. Pure functions of log-probabilities.

Always holds:
- A loss is the plain sum of its tokens' values: no mean, no normalising, whatever the batch.
- Log-probabilities are of the model as it is, at temperature 1, in float32.
- Where an advantage is 0 (prompts carry zeros), the rollout's log-probability does not reach the value or its gradient. The
  exception is dro, which bounds how far the two may be apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from midstream_tinker.trainer import types
from midstream_tinker.trainer.types import WorkFailed

# An input of every loss: the experts to take (replay.py).
ROUTES = "routing_matrix"
TARGETS = "target_tokens"
CLIP_LOW, CLIP_HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
_DTYPES = {"int64": "<i8", "int32": "<i4", "float32": "<f4"}

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class LossTerms:
    """values: per token, to be summed. ratio, clipped: per token that counts, of losses that have a ratio."""

    values: Tensor
    ratio: Tensor | None = None
    clipped: Tensor | None = None


@dataclass(frozen=True)
class LossFunction:
    """inputs: float tensors of the targets' shape. optional: those with a value for where they are not given. config: settings
    and their defaults, which an input of the same name overrides token by token."""

    terms: Callable[[Tensor, Inputs], LossTerms]
    inputs: tuple[str, ...] = ()
    optional: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, float] = field(default_factory=dict)
    several_targets: bool = False

    @property
    def per_token(self) -> tuple[str, ...]:
        """What `terms` is given, one number per target."""
        return (*self.inputs, *self.optional, *self.config)

    @property
    def matter(self) -> str:
        """The input that is not 0 where a token counts."""
        return "advantages" if self.has_ratio else "weights"

    @property
    def has_ratio(self) -> bool:
        return "advantages" in self.inputs

    @property
    def clips(self) -> bool:
        return CLIP_LOW in self.config


def _cross_entropy(logprobs: Tensor, inputs: Inputs) -> LossTerms:
    return LossTerms(-logprobs * inputs["weights"])


def _importance_sampling(logprobs: Tensor, inputs: Inputs) -> LossTerms:
    ratio, counts = _ratio(logprobs, inputs)
    return LossTerms(-ratio * inputs["advantages"], ratio.detach()[counts])


def _ppo(logprobs: Tensor, inputs: Inputs) -> LossTerms:
    # Beyond the upper bound a gain has no gradient; said here, as 0 times that of an infinite ratio would be NaN.
    beyond = torch.exp(logprobs.detach() - inputs["logprobs"]) > inputs[CLIP_HIGH]
    moving = torch.where(beyond & (inputs["advantages"] > 0), logprobs.detach(), logprobs)
    ratio, counts = _ratio(moving, inputs)
    clipped = torch.clamp(ratio, inputs[CLIP_LOW], inputs[CLIP_HIGH])
    values = -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])
    return LossTerms(values, ratio.detach()[counts], (clipped != ratio)[counts])


def _cispo(logprobs: Tensor, inputs: Inputs) -> LossTerms:
    ratio, counts = _ratio(logprobs.detach(), inputs)
    clipped = torch.clamp(ratio, inputs[CLIP_LOW], inputs[CLIP_HIGH])
    return LossTerms(-clipped * logprobs * inputs["advantages"], ratio[counts], (clipped != ratio)[counts])


def _dro(logprobs: Tensor, inputs: Inputs) -> LossTerms:
    apart = logprobs - inputs["logprobs"]
    values = -(logprobs * inputs["advantages"] - 0.5 * inputs[BETA] * apart.square())
    ratio, counts = _ratio(logprobs.detach(), inputs)
    return LossTerms(values, ratio[counts])


def _ratio(logprobs: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The importance ratio, 1 where the advantage is 0; and where it is not."""
    counts = inputs["advantages"] != 0
    return torch.exp(torch.where(counts, logprobs - inputs["logprobs"], 0.0)), counts


_CLIP = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}
_POLICY = ("logprobs", "advantages")
LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": LossFunction(_cross_entropy, optional={"weights": 1.0}, several_targets=True),
    "importance_sampling": LossFunction(_importance_sampling, _POLICY),
    "ppo": LossFunction(_ppo, _POLICY, config=_CLIP),
    "cispo": LossFunction(_cispo, _POLICY, config=_CLIP),
    "dro": LossFunction(_dro, _POLICY, config={BETA: 0.05}),
}


@dataclass(frozen=True)
class Example:
    """One datum, read. tokens: [n]; targets: [n, k]; inputs: [n, k] each; routes: [n, moe_layers, top_k] or None.

    shape: of the targets as they came, [n] or [n, k].
    """

    tokens: Tensor
    targets: Tensor
    inputs: dict[str, Tensor]
    routes: Tensor | None
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def named_loss(name: str) -> LossFunction:
    """Raises WorkFailed."""
    if name not in LOSSES:
        raise WorkFailed(f"loss_fn {name!r} is not supported here; supported: {', '.join(LOSSES)}")
    return LOSSES[name]


def read_config(name: str, loss: LossFunction, config: Mapping[str, float | str]) -> dict[str, float]:
    """The settings with their defaults. Raises WorkFailed for one the loss does not have, or that is no finite number."""
    for key, value in config.items():
        if key not in loss.config:
            known = ", ".join(loss.config) or "none"
            raise WorkFailed(f"loss_fn_config.{key} is not supported by {name}; supported: {known}")
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise WorkFailed(f"loss_fn_config.{key} must be a finite number, got {value!r}")
    return {**loss.config, **{key: float(value) for key, value in config.items()}}


def read_example(
    datum: types.Datum,
    index: int,
    name: str,
    loss: LossFunction,
    config: Mapping[str, float],
    vocab_size: int,
) -> Example:
    """Everything about a datum that can be wrong is found here. Raises WorkFailed, which names it."""
    at = f"data[{index}]"
    tokens = np.asarray(datum.tokens, dtype=np.int64)
    if not len(tokens):
        raise WorkFailed(f"{at}.model_input has no tokens")
    _check_tokens(f"{at}.model_input", tokens, vocab_size)
    if unknown := sorted(datum.inputs.keys() - {TARGETS, ROUTES, *loss.per_token}):
        known = ", ".join((TARGETS, *loss.per_token, ROUTES))
        raise WorkFailed(f"{at}.loss_fn_inputs: {unknown[0]!r} is not an input of {name}; supported: {known}")
    for needed in (TARGETS, *loss.inputs):
        if needed not in datum.inputs:
            raise WorkFailed(f"{at}.loss_fn_inputs: {name} needs {needed}")
    targets = _array(datum.inputs[TARGETS])
    dimensions = (1, 2) if loss.several_targets else (1,)
    if targets.ndim not in dimensions or len(targets) != len(tokens):
        expected = f"[{len(tokens)}]" + (f" or [{len(tokens)}, k]" if loss.several_targets else "")
        raise WorkFailed(
            f"{at}.loss_fn_inputs.{TARGETS} has shape {list(targets.shape)}, expected {expected}"
        )
    if targets.dtype.kind != "i":
        raise WorkFailed(f"{at}.loss_fn_inputs.{TARGETS} must hold token ids, not {targets.dtype}")
    _check_tokens(f"{at}.loss_fn_inputs.{TARGETS}", targets, vocab_size)
    inputs = {
        key: _numbers(datum, key, f"{at}.loss_fn_inputs.{key}", targets.shape, {**loss.optional, **config})
        for key in loss.per_token
    }
    routes = datum.inputs.get(ROUTES)
    return Example(
        torch.from_numpy(tokens),
        torch.from_numpy(targets.astype(np.int64).reshape(len(tokens), -1)),
        inputs,
        None if routes is None else torch.from_numpy(_array(routes).copy()),
        targets.shape,
    )


def _numbers(
    datum: types.Datum, key: str, at: str, shape: tuple[int, ...], defaults: Mapping[str, float]
) -> Tensor:
    """[n, k] float32."""
    if key not in datum.inputs:
        return torch.full((shape[0], int(np.prod(shape[1:]))), defaults[key])
    values = _array(datum.inputs[key])
    if values.shape != shape:
        raise WorkFailed(f"{at} has shape {list(values.shape)}, {TARGETS} has {list(shape)}")
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise WorkFailed(f"{at} holds a number that is not finite")
    return torch.from_numpy(values.reshape(shape[0], -1))


def _array(tensor: types.Tensor) -> np.ndarray:
    return np.frombuffer(tensor.data, dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape)


def _check_tokens(at: str, tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)].flat[0]
        raise WorkFailed(f"{at} holds token {wrong}, the model has 0 to {vocab_size - 1}")
