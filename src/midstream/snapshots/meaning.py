"""What a config.json says of the model, in one spelling for all versions of transformers. Pure.

Owns: the fields that versions 4 and 5 spell in two ways, those that say how a model was saved, run or trained, and the values
that a later version writes down where an earlier one took them for granted.
Always holds: two configurations with one meaning make models that compute the same. A field that is not known here means
what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: How a model was saved, run or trained. The dtype is one of them, because the tensors' own dtypes are compared.
NOT_OF_THE_MODEL = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_name_or_path",
        "attn_implementation",
        "attention_dropout",
        "auto_map",
        "cache_implementation",
        "dtype",
        "embd_pdrop",
        "experts_implementation",
        "hidden_dropout",
        "initializer_range",
        "num_nextn_predict_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
#: They say where a text begins and ends. The served model's are used.
TOKENS = frozenset(
    {"bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"}
)
#: In these fields null is a setting: without the field, transformers has another value. Everywhere else null is no field.
NULL_IS_A_SETTING = frozenset(
    {
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "first_k_dense_replace",
        "n_group",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_key_value_heads",
        "q_lora_rank",
        "rope_interleave",
        "sliding_window",
        "topk_group",
        "v_head_dim",
    }
)
#: What versions wrote down later, with the value that it had before.
_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window_pattern": 6,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
}
#: Whether the output layer is the embedding. Versions 4 leave it out where it is true, and a class may have its own default.
TIED = "tie_word_embeddings"
#: Two names of one field.
_SAME = {"num_experts": "num_local_experts", "_sliding_window_pattern": "sliding_window_pattern"}
#: The configuration of the text model inside one of text and images.
_PARTS = ("text_config", "llm_config")

Config = Mapping[str, Any]


def meanings(base: Config, new: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both in one spelling, without what says nothing of the model.

    A field that one of the two leaves out has there the value that it has unsaid, where that is known.
    """
    one, other = _spelled(base), _spelled(new)
    _complete(one, other)
    return one, other


def _spelled(config: Config) -> dict[str, Any]:
    skipped = NOT_OF_THE_MODEL | TOKENS
    result = {
        name: _spelled(value) if name in _PARTS and isinstance(value, dict) else value
        for name, value in config.items()
        if name not in skipped and (value is not None or name in NULL_IS_A_SETTING)
    }
    for name, other in _SAME.items():
        if name in result and result.get(other, result[name]) == result[name]:
            result[other] = result.pop(name)
    _put_rope(result)
    return result


def _complete(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Put into each what it takes for granted and the other one says."""
    _fill(one, other)
    _fill(other, one)
    if one.get("use_sliding_window") is False and other.get("use_sliding_window") is False:
        # The window is not read then.
        for name in ("sliding_window", "max_window_layers"):
            one.pop(name, None)
            other.pop(name, None)
    for name in _PARTS:
        if isinstance(one.get(name), dict) and isinstance(other.get(name), dict):
            _complete(one[name], other[name])


def _fill(config: dict[str, Any], other: Config) -> None:
    for name in other.keys() - config.keys():
        if name in _DEFAULTS:
            config[name] = _DEFAULTS[name]
        elif name == TIED:
            # Only the tensors show it.
            config[name] = other[name]
        elif name in DERIVED:
            try:
                config[name] = DERIVED[name](config, other)
            except (KeyError, TypeError, ZeroDivisionError):
                # It is not derived from what is there, and stays a field that is missing.
                continue


def _put_rope(config: dict[str, Any]) -> None:
    """Put the settings of the rotary embedding where transformers 5 has them: rope_parameters, with rope_theta in it."""
    given = config.pop("rope_parameters", None)
    scaling = config.pop("rope_scaling", None)
    own: dict[str, Any] = {
        name: config.pop(name)
        for name in ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")
        if name in config
    }
    local = own.pop("rope_local_base_freq", None)
    source = given if isinstance(given, dict) else scaling if isinstance(scaling, dict) else {}
    if source and all(isinstance(value, dict) for value in source.values()):
        # By kind of layer.
        config["rope_parameters"] = {kind: _rope(value, own) for kind, value in source.items()}
    elif local is not None:
        config["rope_parameters"] = {
            "full_attention": _rope(source, own),
            "sliding_attention": _rope({}, own | {"rope_theta": local}),
        }
    elif source or own:
        config["rope_parameters"] = _rope(source, own)


def _rope(settings: Config, own: Config) -> dict[str, Any]:
    """One rotary embedding's settings. own: those that version 4 has beside them."""
    kind = settings.get("rope_type", settings.get("type", "default"))
    rest = {name: value for name, value in settings.items() if name not in ("type", "rope_type")}
    merged = {**own, **rest, "rope_type": kind}
    if merged.get("partial_rotary_factor") == 1:
        del merged["partial_rotary_factor"]
    return {name: value for name, value in merged.items() if value is not None}


def _head_dim(config: Config, other: Config) -> Any:
    if "qk_rope_head_dim" in config:
        return config["qk_rope_head_dim"]
    return config["hidden_size"] // config["num_attention_heads"]


def _layer_types(config: Config, other: Config) -> Any:
    """The kind of each layer, as versions that do not write it down have it. As many as the other side names."""
    layers = range(len(other["layer_types"]))
    match config["model_type"]:
        case "qwen2" | "qwen3":
            window = config.get("use_sliding_window") is True and config.get("sliding_window") is not None
            slides = [window and layer >= config["max_window_layers"] for layer in layers]
        case "gemma2" | "gpt_oss":
            slides = [layer % 2 == 0 for layer in layers]
        case "gemma3_text":
            pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
            slides = [(layer + 1) % pattern != 0 for layer in layers]
        case kind:
            raise KeyError(kind)
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


#: What versions 5 write down, and earlier ones derive from other fields. A difference in those is the one to report.
DERIVED: Mapping[str, Callable[[Config, Config], Any]] = {
    "head_dim": _head_dim,
    "qk_head_dim": lambda config, other: config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
    "layer_types": _layer_types,
    "rope_interleave": lambda config, other: True,
}
