"""tiny-moe: a real Qwen3-MoE with random weights, small enough to train and serve on two CPU cores.

Owns: writing its Hugging Face directory (config, safetensors, byte-level tokenizer, chat template). Nothing
is downloaded.

Always holds:
- Equal arguments give equal bytes in every file, in any process, for any state of PyTorch's random generator.
- The directory appears whole or not at all.
- Token i < 256 is byte i; special tokens follow. Any text can be tokenised, and decodes to the same text.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

Json = dict[str, Any]

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
        for name, text in _files(config | {"dtype": dtype}).items():
            (staging / name).write_text(text, encoding="utf-8")
        tensors = _weights(config, seed, getattr(torch, dtype))
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        for file in staging.iterdir():
            file.chmod(0o644)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def build_tokenizer(max_positions: int = 4096) -> Any:
    """The byte-level tokenizer, as transformers has it: no merges, so one token per UTF-8 byte."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(), chat_template=CHAT_TEMPLATE, **_tokenizer_settings(max_positions)
    )


def _byte_level() -> Tokenizer:
    alphabet = _byte_alphabet()
    core = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    return core


def _tokenizer_settings(max_positions: int) -> Json:
    return {
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": max_positions,
        "pad_token": "<|pad|>",
    }


def _config(
    layers: int, hidden: int, experts: int, top_k: int, max_positions: int, initializer_range: float
) -> Json:
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
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "eos_token_id": TOKEN_ID["<|im_end|>"],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": initializer_range,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": max_positions,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": layers,
        "num_key_value_heads": hidden // HEAD_DIM // 2,
        "num_local_experts": experts,
        "output_router_logits": False,
        "pad_token_id": TOKEN_ID["<|pad|>"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }


def _shapes(config: Json) -> dict[str, tuple[int, ...]]:
    """The parameters of transformers' module. Those of all experts of a layer are one."""
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["num_local_experts"]
    queries, keys = (config[f"num_{of}_heads"] * HEAD_DIM for of in ("attention", "key_value"))
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "mlp.gate": (experts, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_norm": (HEAD_DIM,),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.v_proj": (keys, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (VOCAB_SIZE, hidden),
        "model.embed_tokens.weight": (VOCAB_SIZE, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}"
        shapes |= {f"{at}.{name}.weight": shape for name, shape in layer.items()}
        shapes[f"{at}.mlp.experts.down_proj"] = (experts, hidden, width)
        shapes[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
    return shapes


def _weights(config: Json, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The checkpoint, one tensor per expert and linear map. One generator draws all, in order of the module's names."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in sorted(_shapes(config).items()):
        if "norm" in name:
            tensors[name] = torch.ones(shape, dtype=dtype)
            continue
        drawn = torch.empty(shape).normal_(0.0, config["initializer_range"], generator=generator).to(dtype)
        before, experts, of = name.partition(".experts.")
        if not experts:
            tensors[name] = drawn
            continue
        for number, expert in enumerate(drawn):
            maps = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for kind, part in (maps if of == "gate_up_proj" else {of: expert}).items():
                tensors[f"{before}.experts.{number}.{kind}.weight"] = part.contiguous()
    return tensors


def _files(config: Json) -> dict[str, str]:
    """The text of each file but the weights."""
    version = {"transformers_version": metadata.version("transformers")}
    generation = {"do_sample": True} | {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    settings = _tokenizer_settings(config["max_position_embeddings"])
    contents = {
        "config.json": config | version,
        "generation_config.json": generation | version,
        "tokenizer_config.json": settings | {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend"},
    }
    files = {name: json.dumps(value, indent=2, sort_keys=True) + "\n" for name, value in contents.items()}
    return files | {"chat_template.jinja": CHAT_TEMPLATE, "tokenizer.json": _byte_level().to_str(pretty=True)}


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte, as the ByteLevel pre-tokenizer defines it.

    Printable Latin-1 bytes stand for themselves; the others take code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
