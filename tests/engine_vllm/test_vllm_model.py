"""What is read from config.json without transformers, against the models that transformers builds from it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from midstream.core.errors import ConfigError
from midstream.engine.embedded.modules import ModuleDecoder, UnsupportedModel
from midstream.engine.servers.model import read_shape

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
QWEN = {"num_experts": 20, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
MLA = ROUTED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
#: config class, what differs from SIZES, the layers with experts
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "llama": ("LlamaConfig", {}, ()),
    "qwen3": ("Qwen3Config", {}, ()),
    "mixtral": ("MixtralConfig", LOCAL, (0, 1, 2, 3, 4, 5)),
    "gpt-oss": (
        "GptOssConfig",
        {**LOCAL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        (0, 1, 2, 3, 4, 5),
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}, (0, 1, 2, 3, 4, 5)),
    "qwen2-moe": ("Qwen2MoeConfig", QWEN, (0, 1, 2, 3, 4, 5)),
    "qwen2-moe, every other": ("Qwen2MoeConfig", {**QWEN, "decoder_sparse_step": 2}, (1, 3, 5)),
    "qwen3-moe": ("Qwen3MoeConfig", QWEN, (0, 1, 2, 3, 4, 5)),
    "qwen3-moe, some dense": ("Qwen3MoeConfig", {**QWEN, "mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
    "deepseek-v2": ("DeepseekV2Config", {**MLA, "first_k_dense_replace": 2}, (2, 3, 4, 5)),
    "deepseek-v3": ("DeepseekV3Config", {**MLA, "first_k_dense_replace": 1}, (1, 2, 3, 4, 5)),
    "deepseek-v3, by default": ("DeepseekV3Config", MLA, (3, 4, 5)),
    "glm4-moe": ("Glm4MoeConfig", {**ROUTED, "first_k_dense_replace": 1}, (1, 2, 3, 4, 5)),
    "dots1": ("Dots1Config", {**ROUTED, "first_k_dense_replace": 3}, (3, 4, 5)),
    "llama4, every other": ("Llama4TextConfig", {**LOCAL, "interleave_moe_layer_step": 2}, (1, 3, 5)),
    "llama4, listed": ("Llama4TextConfig", {**LOCAL, "moe_layers": [0, 5]}, (0, 5)),
    "ernie": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_interval": 2},
        (1, 3, 5),
    ),
    "jamba": (
        "JambaConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False},
        (1, 3, 5),
    ),
    "granite": ("GraniteMoeConfig", LOCAL, (0, 1, 2, 3, 4, 5)),
}


def write_config(family: str, directory: Path) -> Any:
    kind, changes, _ = FAMILIES[family]
    config = getattr(transformers, kind)(**{**SIZES, **changes})
    config.save_pretrained(directory)
    return config


def layers_with_experts(module: Any) -> tuple[int, ...]:
    """As transformers built them."""
    names = (
        re.search(r"layers\.(\d+)\.(?:mlp|feed_forward|block_sparse_moe)\.experts$", name)
        for name, _ in module.named_modules()
    )
    return tuple(int(found[1]) for found in names if found)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_is_that_of_the_model_transformers_builds(family: str, tmp_path: Path) -> None:
    config = write_config(family, tmp_path)
    shape = read_shape(tmp_path)
    assert shape.moe_layers == FAMILIES[family][2]
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert layers_with_experts(module) == shape.moe_layers
    assert shape.vocab_size == module.get_output_embeddings().weight.shape[0]
    assert (shape.hidden_layers, shape.eos_token_ids) == (6, (1,))


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_have_the_shape_that_the_embedded_engine_gives_them(family: str, tmp_path: Path) -> None:
    config = write_config(family, tmp_path)
    shape = read_shape(tmp_path)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    try:
        decoder = ModuleDecoder(module)
    except UnsupportedModel as error:
        pytest.skip(f"the embedded engine does not serve it: {error}")
    if not decoder.num_experts and shape.num_experts:
        pytest.skip("the embedded engine does not know its experts")
    assert len(shape.moe_layers) == decoder.moe_layers
    assert (shape.top_k, shape.num_experts) == (decoder.top_k, decoder.num_experts)


def test_the_built_in_model(tiny_model: Callable[..., Path]) -> None:
    shape = read_shape(tiny_model())
    assert (shape.vocab_size, shape.eos_token_ids, shape.top_k, shape.num_experts) == (264, (258,), 2, 8)
    assert shape.moe_layers == tuple(range(shape.hidden_layers))


def write(directory: Path, **config: Any) -> Path:
    base = {"model_type": "llama", "vocab_size": 100, "num_hidden_layers": 3, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(base | config))
    return directory


def test_generation_config_says_what_ends_generation(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=1)
    assert read_shape(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9, 7]}')
    assert read_shape(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read_shape(tmp_path).eos_token_ids == (1,)


@pytest.mark.parametrize("deep", [False, True])
def test_a_language_model_inside_another_config_is_found(deep: bool, tmp_path: Path) -> None:
    text = {
        "model_type": "qwen3_moe_text",
        "vocab_size": 50,
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "max_position_embeddings": 32,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "some_vl", "text_config": text, "eos_token_id": 3})
    )
    shape = read_shape(tmp_path)
    assert (shape.vocab_size, shape.hidden_layers, shape.moe_layers) == (50, 4, (1, 3))
    assert (shape.top_k, shape.num_experts, shape.eos_token_ids) == (2, 8, (3,))


def test_an_unknown_family_with_experts_has_them_everywhere(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, model_type="new_moe", num_experts=16, num_experts_per_tok=4))
    assert (shape.moe_layers, shape.top_k, shape.num_experts) == ((0, 1, 2), 4, 16)


DBRX = transformers.DbrxConfig(
    n_layers=3, vocab_size=100, ffn_config={"moe_num_experts": 16, "moe_top_k": 4}
).to_dict()
BLOCKS = [{"block_type": "moe", "n_routed_experts": 8, "num_experts_per_tok": 2}, {"block_type": "mamba"}]


@pytest.mark.parametrize(
    ("config", "experts", "top_k"),
    [
        (DBRX, 16, 4),
        ({"moe": {"num_experts": 64, "moe_experts_per_token": 8}}, 64, 8),
        ({"block_configs": [*BLOCKS, BLOCKS[0] | {"n_routed_experts": 32}]}, 32, 2),
        ({"num_experts": [4, 16, 8], "moe_topk": [2, 1, 2]}, 16, 2),
        # How many a token takes is written in the model's own code.
        ({"num_experts": 16}, 16, 0),
    ],
)
def test_experts_are_found_wherever_vllm_finds_them(
    config: dict[str, Any], experts: int, top_k: int, tmp_path: Path
) -> None:
    """A model that counted as dense would be checked by fewer tokens than choose all experts."""
    shape = read_shape(write(tmp_path, **config))
    assert (shape.num_experts, shape.top_k, shape.moe_layers) == (experts, top_k, (0, 1, 2))


def test_layers_are_counted_under_the_name_that_the_family_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DBRX))
    shape = read_shape(tmp_path)
    assert (shape.hidden_layers, shape.num_experts) == (3, 16)


@pytest.mark.parametrize("experts", [0, 1, None])
def test_one_expert_or_none_is_a_dense_model(experts: int | None, tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, model_type="jamba", num_experts=experts, num_experts_per_tok=1))
    assert (shape.moe_layers, shape.top_k, shape.num_experts) == ((), 0, 0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": None}, "vocab_size is None; expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_experts": [4, "8"]}, "num_experts is [4, '8']; expected integers"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "takes 8 experts, but a layer has 4"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        (
            {
                "model_type": "deepseek_v3",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": "one",
            },
            "which layers of a deepseek_v3 model",
        ),
        (
            {"model_type": "mimo", "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": "6"},
            "num_hidden_layers is '6'",
        ),
    ],
)
def test_a_config_that_cannot_be_right_is_refused_with_the_field(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_shape(write(tmp_path, **config))


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json: is not a JSON object"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: is not a JSON object"):
        read_shape(tmp_path)


@pytest.mark.parametrize("config", [b'{"x":' + b"[" * 5000, b'{"model_type":"\xff"}'])
def test_a_config_that_is_nested_too_deeply_or_no_text_is_refused(config: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(ConfigError, match="is not a JSON object"):
        read_shape(tmp_path)


def test_a_config_of_more_layers_than_a_model_has_is_refused_at_once(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 10**15, "vocab_size": 8, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000000000"):
        read_shape(tmp_path)
