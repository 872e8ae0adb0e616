"""tiny-moe: a real Qwen3-MoE with random weights, small enough to train and serve on two CPU cores.

Owns: writing its Hugging Face directory (config, safetensors, byte-level tokenizer, chat template). Nothing
is downloaded.

Always holds:
- Equal arguments give equal bytes in every file, in any process, for any state of PyTorch's random generator.
- The directory appears whole or not at all.
- Token i < 256 is byte i; special tokens follow. Any text can be tokenised, and decodes to the same text.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as transformers_logging

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|pad|>",
)
TOKEN_ID = {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)}
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
HEAD_DIM = 32

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] + '\\n\\n' -}}{%- endif -%}
{{- 'Functions that may be called:\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '</tools>\\nA call is written as\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message['role'] == 'system') -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '\\n' if message['content'] or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- arguments if arguments is string else arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def write_tiny_moe(
    directory: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 128,
    experts: int = 8,
    top_k: int = 2,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_positions: int = 4096,
    initializer_range: float = 0.08,
) -> None:
    """Write the model to `directory`, which must not exist or be empty (FileExistsError otherwise).

    The default `initializer_range` gives logits with a standard deviation of about 0.9 (5.2 of at most 5.6
    nats of entropy) and routers that spread tokens over all experts. Margins are so small that bfloat16 and
    float32 choose other experts on about 8 % of tokens. At 0.02, logits are nearly uniform.
    """
    config = _config(layers, hidden, experts, top_k, max_positions, initializer_range)
    if directory.is_dir() and any(directory.iterdir()):
        raise FileExistsError(errno.EEXIST, "directory is not empty", str(directory))
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        staging.chmod(0o755)
        with no_progress_bars():
            _model(config, seed, getattr(torch, dtype)).save_pretrained(staging)
        build_tokenizer(max_positions).save_pretrained(staging)
        for file in staging.iterdir():
            file.chmod(0o644)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def build_tokenizer(max_positions: int = 4096) -> Any:
    """The byte-level tokenizer: no merges, so one token per UTF-8 byte."""
    alphabet = _byte_alphabet()
    core = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def _config(
    layers: int, hidden: int, experts: int, top_k: int, max_positions: int, initializer_range: float
) -> Any:
    unit = 2 * HEAD_DIM
    checks = [
        (layers >= 1, f"layers must be at least 1, got {layers}"),
        (hidden > 0 and hidden % unit == 0, f"hidden must be a multiple of {unit}, got {hidden}"),
        (1 <= top_k <= experts, f"top_k must be 1 to experts ({experts}), got {top_k}"),
        (max_positions >= 1, f"max_positions must be at least 1, got {max_positions}"),
    ]
    for holds, message in checks:
        if not holds:
            raise ValueError(message)
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        eos_token_id=TOKEN_ID["<|im_end|>"],
        pad_token_id=TOKEN_ID["<|pad|>"],
    )


def _model(config: Any, seed: int, dtype: torch.dtype) -> Any:
    """The model with every parameter drawn from one generator of our own, in order of name."""
    # The class draws its own initial values first.
    with torch.random.fork_rng(devices=[]):
        model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.to(dtype)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Within: transformers draws nothing over the caller's output."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte, as the ByteLevel pre-tokenizer defines it.

    Printable Latin-1 bytes stand for themselves; the others take code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
