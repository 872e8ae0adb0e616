"""A random dense model of about 0.5 B parameters: the shape of Qwen2-0.5B, with a tokenizer made up here. No downloads.

Always holds: equal seeds give equal weights; every id below the vocabulary size decodes to text of its own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 151_936
END = "<|endoftext|>"


def write_dense(directory: Path, *, seed: int = 0, layers: int = 24) -> None:
    """Write the model to `directory`, which is made."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        eos_token_id=VOCABULARY - 1,
        pad_token_id=VOCABULARY - 1,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    )
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    GenerationConfig(do_sample=True, eos_token_id=config.eos_token_id).save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen2ForCausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if "norm" in name
        else torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        for name, shape in sorted(shapes.items())
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and above them words that text never encodes to but ids decode to."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *("Ġ" + _letters(i) for i in range(VOCABULARY - len(letters) - 1))]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def _letters(number: int) -> str:
    """0 -> "a", 25 -> "z", 26 -> "aa", ..."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("a") + digit) + text
    return text
