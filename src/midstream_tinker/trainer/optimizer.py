"""AdamW on the parameters of one model, with everything but its moments given at each step.

Always holds: weight decay is decoupled, and scaled by the learning rate; a step leaves no gradients, also when it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from midstream_tinker.trainer.types import AdamParams, WorkFailed

MOMENTS = ("exp_avg", "exp_avg_sq")
EPS_MIN = 1e-37


class Optimizer:
    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.parameters = dict(parameters)
        self.steps = 0
        self._adam = self._new()

    def _new(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.parameters.values(), fused=True)

    def step(self, adam: AdamParams) -> dict[str, float]:
        """Raises WorkFailed, with the weights as they were, when the gradients are not finite, or eps is 0 in float32."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        metrics = {"grad_norm:mean": 0.0, "learning_rate:mean": adam.learning_rate}
        if not gradients:
            return metrics
        norm = get_total_norm(gradients)
        metrics["grad_norm:mean"] = norm.item()
        try:
            if not math.isfinite(metrics["grad_norm:mean"]):
                raise WorkFailed(
                    "the gradients are not finite: they are dropped, and the weights are as they were"
                )
            if adam.eps < EPS_MIN:
                raise WorkFailed(
                    f"eps is {adam.eps:g}, at least {EPS_MIN:g} is needed: weights with gradients of 0 alone would "
                    "not be finite. The gradients are dropped"
                )
            if adam.grad_clip_norm > 0:
                clip_grads_with_norm_(self.parameters.values(), adam.grad_clip_norm, norm)
            self._adam.param_groups[0].update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
            self._adam.step()
        finally:
            self.drop_gradients()
        self.steps += 1
        return metrics

    def drop_gradients(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Moments and steps by parameter, `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`; none of parameters never stepped."""
        return {
            f"{key}/{name}": state[key]
            for name, parameter in self.parameters.items()
            if (state := self._adam.state.get(parameter))
            for key in (*MOMENTS, "step")
        }

    def load(self, state: Mapping[str, Tensor], steps: int) -> None:
        """What `state` gave. Raises WorkFailed, with nothing changed, when it is of other parameters."""
        loaded: dict[Tensor, dict[str, Tensor]] = {}
        for key, value in state.items():
            kind, _, name = key.partition("/")
            parameter = self.parameters.get(name)
            if parameter is None or kind not in (*MOMENTS, "step"):
                raise WorkFailed(
                    f"the optimizer's state holds {key}, which is of no parameter that is trained"
                )
            if kind != "step" and value.shape != parameter.shape:
                shape = list(parameter.shape)
                raise WorkFailed(f"the optimizer's {key} has shape {list(value.shape)}, expected {shape}")
            moved = value.to(parameter.device, torch.float32 if kind == "step" else parameter.dtype)
            loaded.setdefault(parameter, {})[kind] = moved.clone()
        if any(len(entry) != len(MOMENTS) + 1 for entry in loaded.values()):
            raise WorkFailed("the optimizer's state is not whole")
        self.reset()
        self._adam.state.update(loaded)
        self.steps = steps

    def reset(self) -> None:
        """As new: no moments, no steps, no gradients."""
        self.drop_gradients()
        self._adam = self._new()
        self.steps = 0
