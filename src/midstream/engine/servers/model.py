"""The shape of a model, read from its directory without torch or transformers.

Owns: reading config.json and generation_config.json; which hidden layers are mixtures of experts, family by family.
Always holds: the rules of the families are those of the classes of vLLM and transformers. A family that is not listed counts
as having experts in every layer. routes.py refuses routes of another shape, so a wrong guess shows no wrong route.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from midstream.core.decoding import NOT_JSON
from midstream.core.errors import ConfigError

Config = Mapping[str, Any]

#: Names of the number of experts in a layer, and of those that a token takes, in vLLM's order.
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "moe_experts_per_token",
)
#: Parts of a config that have these numbers in some families (DBRX, Moondream).
FEED_FORWARD = ("ffn_config", "moe_config", "moe")
#: Where each layer has a config of its own.
BLOCKS = "block_configs"
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
#: A rule looks at each layer.
LAYERS_MAX = 100_000


class Shape(msgspec.Struct, frozen=True):
    """moe_layers: ascending indices of the hidden layers with experts. Without any, top_k and num_experts are 0.
    top_k is 0, too, where the config has none."""

    vocab_size: int
    hidden_layers: int
    moe_layers: tuple[int, ...]
    top_k: int
    num_experts: int
    eos_token_ids: tuple[int, ...]


def read_shape(directory: Path) -> Shape:
    """Raises ConfigError."""
    config = _read(directory / "config.json")
    if config is None:
        raise ConfigError(f"{directory}: has no config.json")
    levels = _levels(config)
    text = levels[0]
    where = f"{directory / 'config.json'}"
    named = next((name for name in LAYERS if name in text), LAYERS[0])
    layers = _positive(text, named, where, LAYERS_MAX)
    experts, top_k = (_in_parts(text, names, where) for names in (EXPERTS, EXPERTS_PER_TOKEN))
    moe = _moe_layers(text, layers, where) if experts > 1 else ()
    if moe and top_k > experts:
        raise ConfigError(f"{where}: a token takes {top_k} experts, but a layer has {experts}")
    return Shape(
        vocab_size=_positive(text, "vocab_size", where),
        hidden_layers=layers,
        moe_layers=moe,
        top_k=top_k if moe else 0,
        num_experts=experts if moe else 0,
        eos_token_ids=_eos(directory, levels),
    )


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except NOT_JSON as error:
        raise ConfigError(f"{path}: is not a JSON object: {error}") from error


def _levels(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config of the language model, then the configs around it, from inside to outside."""
    for name in ("thinker_config", "text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, dict):
            return [*_levels(inner), config]
    return [config]


def _positive(config: Config, name: str, where: str, most: int = 2**63 - 1) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ConfigError(f"{where}: {name} is {value!r}; expected a positive integer, at most {most}")
    return value


def _in_parts(config: Config, names: tuple[str, ...], where: str) -> int:
    """The number of the config, else the largest one of its parts."""
    blocks = config.get(BLOCKS)
    inner = [*map(config.get, FEED_FORWARD), *(blocks if isinstance(blocks, list) else ())]
    of_parts = (_first(part, names, where) for part in inner if isinstance(part, dict))
    return _first(config, names, where) or max(of_parts, default=0)


def _first(config: Config, names: tuple[str, ...], where: str) -> int:
    """The value of the first name that the config has; 0 if it has none. Of a list, with one of each layer, the largest."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            raise ConfigError(f"{where}: {name} is {value!r}; expected integers from 0 up")
        return max(numbers, default=0)
    return 0


def _eos(directory: Path, levels: list[dict[str, Any]]) -> tuple[int, ...]:
    """The token ids that end generation. generation_config.json is meant for this and wins over config.json."""
    generation, config = directory / "generation_config.json", directory / "config.json"
    for path, source in ((generation, _read(generation) or {}), *((config, level) for level in levels)):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ConfigError(f"{path}: eos_token_id is {value!r}; expected token ids")
        return tuple(dict.fromkeys(ids))
    return ()


#: From the text config and the index of a layer: whether the layer has experts.
Rule = Callable[[Config, int], bool]


def _sparse_step(config: Config, layer: int) -> bool:
    step = config.get("decoder_sparse_step", 1)
    return bool(layer not in (config.get("mlp_only_layers") or ()) and step > 0 and (layer + 1) % step == 0)


def _after_first_dense(default: int) -> Rule:
    def rule(config: Config, layer: int) -> bool:
        first = config.get("first_k_dense_replace")
        every = config.get("moe_layer_freq", 1)
        if isinstance(every, list):
            return bool(every[layer])
        return bool(layer >= (default if first is None else first) and layer % (every or 1) == 0)

    return rule


def _interleaved(config: Config, layer: int) -> bool:
    listed = config.get("moe_layers")
    step = config.get("interleave_moe_layer_step", 1)
    if listed is not None:
        return bool(layer in listed)
    return bool(step > 0 and (layer + 1) % step == 0)


def _ernie(config: Config, layer: int) -> bool:
    start, end = config.get("moe_layer_start_index", 0), config.get("moe_layer_end_index", -1)
    last = config["num_hidden_layers"] - 1 if end == -1 else end
    return bool(start <= layer <= last and (layer + 1) % config.get("moe_layer_interval", 1) == 0)


def _jamba(config: Config, layer: int) -> bool:
    return bool(layer % config.get("expert_layer_period", 2) == config.get("expert_layer_offset", 1))


def _after_dense(config: Config, layer: int) -> bool:
    return bool(layer >= (config.get("num_dense_layers") or 0))


def _every(_config: Config, _layer: int) -> bool:
    return True


#: By model_type of the text part, without a trailing _text: the rule of its family.
RULES: dict[str, Rule] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_omni_moe"), _sparse_step),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v32", "dots1", "glm4_moe_lite", "kimi_k2"), _after_first_dense(0)
    ),
    "deepseek_v3": _after_first_dense(3),
    **dict.fromkeys(("glm4_moe", "glm4v_moe"), _after_first_dense(1)),
    "llama4": _interleaved,
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe"), _ernie),
    "jamba": _jamba,
    **dict.fromkeys(("afmoe", "lfm2_moe"), _after_dense),
    **dict.fromkeys(
        ("mixtral", "gpt_oss", "olmoe", "qwen3_5_moe", "granitemoe", "phimoe", "minimax_m2"), _every
    ),
}


def _moe_layers(config: Config, layers: int, where: str) -> tuple[int, ...]:
    family = str(config.get("model_type", "")).removesuffix("_text")
    rule = RULES.get(family, _every)
    try:
        return tuple(layer for layer in range(layers) if rule(config, layer))
    except (TypeError, IndexError, ZeroDivisionError, AttributeError) as error:
        raise ConfigError(
            f"{where}: cannot find out which layers of a {family} model have experts: {error}"
        ) from error
