"""Models without experts, which vLLM for CPUs serves adapters of."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from midstream.models.tiny_moe import VOCAB_SIZE, build_tokenizer


def write_dense(directory: Path, seed: int, *, tied: bool) -> Path:
    """A model without experts, in float32. tied: its output layer is that of the embeddings."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.08,
        tie_word_embeddings=tied,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory
