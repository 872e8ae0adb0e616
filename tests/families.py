"""Every kind of model that the embedded engine claims, as a tiny random one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
WINDOW = {"sliding_window": 24}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GPT_OSS_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

FUSED = ("qwen2", "qwen2-window", "qwen3", "qwen3-moe", "llama", "mistral", "mixtral")
#: config class, what differs from SIZES, MoE layers
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen2": ("Qwen2Config", {}, 0),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}, 0),
    "qwen3": ("Qwen3Config", {"head_dim": 64}, 0),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 32, "num_experts": 20, "num_experts_per_tok": 3, "head_dim": 32},
        3,
    ),
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}, 0),
    "mistral": ("MistralConfig", {**WINDOW}, 0),
    "gemma2": ("Gemma2Config", {"head_dim": 16, **WINDOW}, 0),
    "mixtral": ("MixtralConfig", MOE, 3),
    "deepseek-v3": ("DeepseekV3Config", MLA, 2),
    "gpt-oss": ("GptOssConfig", {"head_dim": 16, "rope_parameters": GPT_OSS_ROPE, **MOE, **WINDOW}, 3),
}


def write_model(family: str, directory: Path, seed: int = 0) -> Path:
    kind, changes, _ = FAMILIES[family]
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.ndim > 1:
            torch.nn.init.normal_(tensor, std=0.15)
        elif "bias" in name or "sink" in name:
            torch.nn.init.normal_(tensor, std=0.3)
    model.save_pretrained(directory / family)
    return directory / family
