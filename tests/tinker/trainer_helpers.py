"""Data for the trainer, and what a plain Hugging Face forward says about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from midstream_tinker.trainer import protocol as m
from midstream_tinker.trainer.model import BaseModel, TrainedModel
from midstream_tinker.trainer.types import Datum, ForwardBackward, LoraConfig, LossOutputs, Tensor

FULL = LoraConfig(rank=0)
NUMPY = {"int64": "<i8", "int32": "<i4", "float32": "<f4"}


def tensor(values: Any, dtype: str = "float32") -> Tensor:
    array = np.asarray(values, dtype=NUMPY[dtype])
    return Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())


def array(value: Tensor) -> np.ndarray:
    return np.frombuffer(value.data, NUMPY[value.dtype]).reshape(value.shape)


def datum(tokens: Sequence[int], targets: Any, **inputs: Any) -> Datum:
    """`inputs`: float tensors; a Tensor is taken as it is."""
    made = {k: v if isinstance(v, Tensor) else tensor(v) for k, v in inputs.items()}
    return Datum(tokens=tuple(tokens), inputs={"target_tokens": tensor(targets, "int64"), **made})


def text(line: str, **inputs: Any) -> Datum:
    """Every byte of `line` predicts the next one; lists of `inputs` may be one number for all."""
    tokens = list(line.encode())
    n = len(tokens) - 1
    filled = {k: [v] * n if isinstance(v, int | float) else v for k, v in inputs.items()}
    return datum(tokens[:-1], tokens[1:], **filled)


def request(
    data: Sequence[Datum], loss_fn: str = "cross_entropy", forward_only: bool = False, **config: Any
) -> ForwardBackward:
    return ForwardBackward(
        model_id="m", seq_id=1, data=tuple(data), loss_fn=loss_fn, config=config, forward_only=forward_only
    )


def base_of(directory: Path, **start: Any) -> BaseModel:
    return BaseModel(m.StartTrainer(str(directory), **start))


def new_model(base: BaseModel | Path, lora: LoraConfig = FULL, **start: Any) -> TrainedModel:
    return TrainedModel(base if isinstance(base, BaseModel) else base_of(base, **start), "m", lora)


def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def plain_logprobs(module: Any, data: Datum) -> torch.Tensor:
    """[n], or [n, k] as the targets are: of a forward of this sequence alone, with gradients."""
    targets = torch.from_numpy(array(data.inputs["target_tokens"]).copy())
    logits = module(torch.tensor([data.tokens]), use_cache=False).logits[0]
    found = logits.log_softmax(-1).gather(-1, targets.reshape(len(data.tokens), -1))
    return found.reshape(targets.shape)


def logprobs(result: LossOutputs) -> list[np.ndarray]:
    return [array(output["logprobs"]) for output in result.outputs]


def gradients(model: TrainedModel) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.trainable.items()}


def weights(model: TrainedModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.trainable.items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_family(directory: Path, family: str, **changes: object) -> Path:
    """A random model of a family of transformers, in its checkpoint's own names."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(directory)
    return directory
