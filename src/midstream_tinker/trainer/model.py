"""The models being trained: each the base model with weights or LoRA adapters of its own.

Owns: reading the base model, which modules LoRA adapts in which family, and the weights a model would serve with.

Always holds:
- The base's frozen tensors are held once, shared by all LoRA models, and never written.
- After a command that failed, a model is as it was: weights, gradients and optimizer.
- Modules are in evaluation mode (no dropout, no router noise), so that log-probabilities are those of sampling.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoConfig, AutoModelForCausalLM

from midstream.client.checkpoint import no_progress_bars
from midstream.client.replay import RouterTap, check_routes, routers_of
from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.losses import Example, LossFunction, named_loss, read_config, read_example
from midstream_tinker.trainer.optimizer import Optimizer
from midstream_tinker.trainer.passes import positions_of_pass, run_passes
from midstream_tinker.trainer.types import AdamParams, ForwardBackward, LoraConfig, LossOutputs, WorkFailed

logger = logging.getLogger(__name__)

# peft's name for a model's only adapter.
ADAPTER = "default"
# Prefix of the names in peft's files.
PEFT_PREFIX = "base_model.model."
# Tinker's value. With alpha fixed, a good learning rate hardly depends on the rank.
LORA_ALPHA = 32

MAX_POSITIONS = 2**31 - 1

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_UNEMBED = ("lm_head",)
_DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2", "smollm3", "granite")
# Their experts are tensors, not modules. MLPs beside experts (shared ones, dense layers) are left alone: peft takes their names
# for those of the experts.
_MOE_FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe")
LORA_FAMILIES = (*_DENSE_FAMILIES, *_MOE_FAMILIES)


class BaseModel:
    """The served model's directory, read as often as needed. Nothing is unpickled, and no code of the directory runs."""

    def __init__(self, start: m.StartTrainer) -> None:
        self.directory = Path(start.directory)
        self.dtype: torch.dtype = getattr(torch, start.dtype)
        self.device = torch.device(start.device)
        self.batch_tokens = start.batch_tokens
        self.config: Any = AutoConfig.from_pretrained(self.directory)
        self.text_config: Any = self.config.get_text_config()
        with torch.device("meta"):
            self.routers = [
                (int(router.top_k), int(router.num_experts))
                for router in routers_of(AutoModelForCausalLM.from_config(self.config))
            ]
        self._frozen: Any = None

    def info(self) -> m.TrainerInfo:
        top_k, experts = self.routers[0] if self.routers else (0, 0)
        return m.TrainerInfo(
            model_type=str(self.config.model_type),
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            moe_layers=len(self.routers),
            top_k=top_k,
            experts=experts,
        )

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    @property
    def max_positions(self) -> int:
        """Where the configuration sets no bound, none is set here."""
        return int(getattr(self.text_config, "max_position_embeddings", None) or MAX_POSITIONS)

    def own_module(self) -> Any:
        """The model with weights of its own."""
        with no_progress_bars():
            module = AutoModelForCausalLM.from_pretrained(
                self.directory, dtype=self.dtype, use_safetensors=True
            )
        for parameter in module.parameters():
            # A copy, as the file may be replaced.
            parameter.data = parameter.data.to(self.device, copy=True)
        return module.to(self.device).eval()

    @property
    def frozen(self) -> Any:
        """The model that LoRA models share; read when it is first needed."""
        if self._frozen is None:
            self._frozen = self.own_module().requires_grad_(False)
        return self._frozen

    def shared_module(self) -> Any:
        """A new tree of the module over the tensors of `frozen`."""
        tensors = itertools.chain(self.frozen.parameters(), self.frozen.buffers())
        return copy.deepcopy(self.frozen, {id(tensor): tensor for tensor in tensors})


class TrainedModel:
    """trainable: what the optimizer moves, under the names that checkpoints have."""

    def __init__(self, base: BaseModel, model_id: str, lora: LoraConfig) -> None:
        """Raises WorkFailed for a LoRA that the base's family has no mapping for."""
        self.base, self.model_id, self.lora = base, model_id, lora
        self.adapter = None if lora.rank == 0 else adapter_config(base, lora)
        self.module: Any = base.own_module() if self.adapter is None else adapted(base, self.adapter, lora)
        self.tap = RouterTap(self.module)
        self.optimizer = Optimizer(self._trainable())

    @property
    def trainable(self) -> dict[str, Parameter]:
        return self.optimizer.parameters

    def _trainable(self) -> dict[str, Parameter]:
        if self.adapter is None:
            return dict(self.module.named_parameters())
        return {
            f"{PEFT_PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }

    def state(self) -> m.ModelState:
        count = sum(parameter.numel() for parameter in self.trainable.values())
        return m.ModelState(self.model_id, self.lora, count, self.optimizer.steps)

    def forward_backward(self, request: ForwardBackward) -> LossOutputs:
        """Raises WorkFailed, with gradients as they were."""
        loss = named_loss(request.loss_fn)
        examples = self._read(request, loss)
        with self._adding_gradients():
            return run_passes(
                self.module,
                self.tap,
                loss,
                examples,
                backward=not request.forward_only,
                positions_max=positions_of_pass(self.base.batch_tokens, self.base.vocab_size),
            )

    def _read(self, request: ForwardBackward, loss: LossFunction) -> list[Example]:
        """Raises WorkFailed."""
        if not request.data:
            raise WorkFailed("data is empty")
        config = read_config(request.loss_fn, loss, request.config)
        examples = [
            read_example(datum, index, request.loss_fn, loss, config, self.base.vocab_size)
            for index, datum in enumerate(request.data)
        ]
        for index, example in enumerate(examples):
            self._check_size(index, len(example))
            if example.routes is not None:
                self._check_routes(index, example.routes, len(example))
        return examples

    @contextlib.contextmanager
    def _adding_gradients(self) -> Iterator[None]:
        """Within: no gradients but new ones. They are added to those before, or dropped when something is raised."""
        before = {name: parameter.grad for name, parameter in self.trainable.items()}
        for parameter in self.trainable.values():
            parameter.grad = None
        try:
            yield
        except BaseException:
            for name, parameter in self.trainable.items():
                parameter.grad = before[name]
            raise
        for name, parameter in self.trainable.items():
            earlier = before[name]
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)

    def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Raises WorkFailed."""
        return self.optimizer.step(adam)

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """The state dict of the model that would be served, without adapters; tensors that are not adapted are shared."""
        if self.adapter is None:
            return dict(self.module.state_dict())
        merged: dict[str, Tensor] = dict(self.base.frozen.state_dict())
        for name, layer in self.module.named_modules():
            if isinstance(layer, LoraLinear | ParamWrapper):
                parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
                key = f"{name.replace('.base_layer', '')}.{parameter}"
                merged[key] = merged[key].float() + layer.get_delta_weight(ADAPTER).float()
        return merged

    def _check_size(self, index: int, length: int) -> None:
        if length > self.base.max_positions:
            raise WorkFailed(
                f"data[{index}].model_input has {length} tokens, the model takes {self.base.max_positions}"
            )

    def _check_routes(self, index: int, routes: Tensor, length: int) -> None:
        top_k, experts = self.base.routers[0] if self.base.routers else (0, 0)
        wrong = check_routes(routes.numpy(), length, len(self.base.routers), top_k, experts)
        if wrong is not None:
            raise WorkFailed(f"data[{index}].loss_fn_inputs.routing_matrix: {wrong}")


def adapter_config(base: BaseModel, lora: LoraConfig) -> PeftConfig:
    """Raises WorkFailed."""
    modules, parameters = lora_targets(base.config, lora)
    return PeftConfig(
        r=lora.rank,
        lora_alpha=LORA_ALPHA,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(modules),
        target_parameters=list(parameters) or None,
        task_type="CAUSAL_LM",
    )


def adapted(base: BaseModel, config: PeftConfig, lora: LoraConfig) -> Any:
    """The model over the shared weights, with float32 adapters that the seed decides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed or 0)
        module = inject_adapter_in_model(config, base.shared_module(), ADAPTER).eval()
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return module


def lora_targets(config: Any, lora: LoraConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules, by the last part of their names, and parameters of experts. Raises WorkFailed."""
    family = config.model_type
    if family not in LORA_FAMILIES:
        known = ", ".join(LORA_FAMILIES)
        raise WorkFailed(
            f"LoRA is not known for models of type {family}, only for {known}; rank 0 trains all weights"
        )
    unembed = lora.train_unembed
    if unembed and config.tie_word_embeddings:
        logger.warning("train_unembed has no effect: the output layer of this model is its embedding")
        unembed = False
    moe = family in _MOE_FAMILIES
    modules = (
        *(_ATTENTION if lora.train_attn else ()),
        *(_MLP if lora.train_mlp and not moe else ()),
        *(_UNEMBED if unembed else ()),
    )
    parameters = _EXPERTS if lora.train_mlp and moe else ()
    if not modules and not parameters:
        raise WorkFailed(
            "nothing would be trained: train_attn, train_mlp and train_unembed are all off for this model"
        )
    return modules, parameters
