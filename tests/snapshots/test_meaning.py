"""Configurations of one model, saved by versions 4 and 5 of transformers, are one; those of two models are two."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from midstream.core.errors import SnapshotIncompatible
from midstream.snapshots.layout import CheckpointSpec, TensorSpec
from midstream.snapshots.meaning import NOT_OF_THE_MODEL, NULL_IS_A_SETTING, TOKENS
from midstream.snapshots.store.verify import check_compatible

#: By name: what transformers 4.57 saves for each family of tests/families.py, and configurations as hubs have them.
BEFORE_5: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "configs_before_5.json").read_text()
)
#: Of another model, each with another value of one field. Version 5 may have the field elsewhere.
CHANGES = {
    "rope_theta": 123.0,
    "hidden_size": 99,
    "num_experts": 3,
    "num_local_experts": 3,
    "sliding_window": 17,
    "rms_norm_eps": 0.5,
    "tie_word_embeddings": None,
    "use_sliding_window": None,
    "head_dim": 7,
    "norm_topk_prob": None,
    "final_logit_softcapping": 1.0,
    "rope_local_base_freq": 77,
}


def check(base: dict[str, Any], new: dict[str, Any]) -> None:
    tensors = {"model.embed_tokens.weight": TensorSpec("F32", (2, 2), "model.safetensors")}
    check_compatible(CheckpointSpec(tensors, base), CheckpointSpec(tensors, new))


@pytest.fixture(scope="module")
def saved_by_5(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    place = tmp_path_factory.mktemp("configs")
    before = logging.root.manager.disable
    # Of settings that version 5 does not know.
    logging.disable(logging.WARNING)
    try:
        for number, config in enumerate(BEFORE_5.values()):
            (place / f"{number}").mkdir()
            (place / f"{number}" / "config.json").write_text(json.dumps(config))
            AutoConfig.from_pretrained(place / f"{number}").save_pretrained(place / f"new-{number}")
    finally:
        logging.disable(before)
    return {
        name: json.loads((place / f"new-{number}" / "config.json").read_text())
        for number, name in enumerate(BEFORE_5)
    }


@pytest.mark.parametrize("name", BEFORE_5)
def test_a_model_that_version_5_saves_again_is_the_one_that_version_4_saved(
    name: str, saved_by_5: dict[str, dict[str, Any]]
) -> None:
    check(BEFORE_5[name], saved_by_5[name])
    check(saved_by_5[name], BEFORE_5[name])


@pytest.mark.parametrize("name", BEFORE_5)
def test_another_value_is_refused_across_versions_by_its_name(
    name: str, saved_by_5: dict[str, dict[str, Any]]
) -> None:
    old, new = BEFORE_5[name], saved_by_5[name]
    tried = 0
    for field, value in CHANGES.items():
        # A window that is not used is no setting.
        if old.get(field) is None or (field == "sliding_window" and old.get("use_sliding_window") is False):
            continue
        changed = copy.deepcopy(old) | {field: (not old[field]) if value is None else value}
        for base, other in ((new, changed), (changed, new)):
            with pytest.raises(SnapshotIncompatible) as refused:
                check(base, other)
            named = {
                "num_experts": ["num_local_experts"],
                "rope_local_base_freq": ["rope_theta"],
                # Without it, there is no window.
                "use_sliding_window": ["use_sliding_window", "sliding_window"],
            }.get(field, [field])
            said = str(refused.value)
            assert any(name in said for name in named), said
            assert "base model" in said
            assert "publish with the served model's config_dir" in said
            tried += 1
    assert tried >= 6


def test_how_a_model_is_run_or_trained_is_no_difference() -> None:
    base = BEFORE_5["hub Qwen3-30B-A3B"]
    run: dict[str, Any] = dict.fromkeys(NOT_OF_THE_MODEL | TOKENS, "otherwise")
    check(base, base | run)
    check(base | run, base)
    check(base, base | {"a_feature_of_later": None})


def test_null_is_a_setting_where_a_class_has_another_value_without_the_field() -> None:
    """Found by looking at the classes of the families that are served."""
    classes = ("Qwen2", "Qwen3", "Qwen3Moe", "Llama", "Mistral", "Mixtral", "Gemma2", "DeepseekV3", "GptOss")
    found = set()
    for name in classes:
        kind = getattr(transformers, f"{name}Config")
        for base in kind.__mro__:
            for field, of in getattr(base, "__annotations__", {}).items():
                default = getattr(kind, field, None)
                if "None" in str(of) and default is not None and not callable(default):
                    found.add(field)
    plans = {field for field in found if field.startswith("base_model_")}
    assert found - plans - NOT_OF_THE_MODEL - TOKENS - {"pretraining_tp"} <= NULL_IS_A_SETTING
    for field in ("sliding_window", "q_lora_rank", "final_logit_softcapping"):
        without = {"model_type": "x"}
        with pytest.raises(SnapshotIncompatible, match=f"options: {field}"):
            check(without, without | {field: None})
