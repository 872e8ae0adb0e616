"""Adapters that PEFT itself writes, with random numbers in every part."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model


def adapted(module: Any, seed: int, **config: Any) -> Any:
    """PEFT's own model over a copy of `module`, in evaluation mode."""
    torch.manual_seed(seed)
    asked = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **config)
    with warnings.catch_warnings():
        # PEFT reads a property that transformers will remove.
        warnings.simplefilter("ignore", FutureWarning)
        # It looks for the pattern of fused experts among modules alone, says that it ignores it, and follows it.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not", RuntimeWarning)
        model = get_peft_model(copy.deepcopy(module), asked)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.08)
    return model.eval()


def write_base(module: Any, directory: Path) -> None:
    module.save_pretrained(directory)


def write_adapter(model: Any, directory: Path) -> None:
    with warnings.catch_warnings():
        # PEFT cannot reach the hub to look at the base.
        warnings.simplefilter("ignore", UserWarning)
        model.save_pretrained(directory)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
