"""A tied output layer, with and without its copy of the embedding, from verification to the engine; names that do not fit."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from families import SIZES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from midstream.client import PublishError, SnapshotPublisher
from midstream.core.config import EngineSettings
from midstream.core.errors import SnapshotIncompatible
from midstream.core.types import Desired
from midstream.engine.embedded.loading import load_beside, load_model
from midstream.engine.embedded.weights_digest import digest
from midstream.replica.swap import companions as companions_module
from midstream.replica.swap.companions import Companions
from midstream.replica.swap.source import CachedSource
from midstream.snapshots.layout import read_spec
from midstream.snapshots.store.cache import SnapshotCache
from midstream.snapshots.store.chain import ChainFetcher

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SETTINGS = EngineSettings(kv_cache_tokens=256, threads=1)
TIED = {
    "LlamaConfig": {},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 32},
    "MistralConfig": {},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
    },
    "Gemma2Config": {"head_dim": 16},
}


def write(directory: Path, kind: str, head: Callable[[torch.Tensor], torch.Tensor] | None, seed: int) -> Path:
    """A tied checkpoint. head: makes the tensor of its output layer from the embedding; None for none."""
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**{**SIZES, "tie_word_embeddings": True, **TIED[kind]})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    if head is not None:
        tensors = load_file(directory / "model.safetensors")
        tensors[HEAD] = head(tensors[EMBEDDING])
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def copied(embedding: torch.Tensor) -> torch.Tensor:
    return embedding.clone()


def other(embedding: torch.Tensor) -> torch.Tensor:
    changed = embedding.clone()
    changed[77, 3] += 1
    return changed


def verify(base: Path, snapshot: Path, cache: Path, companions: Companions | None = None) -> None:
    source = CachedSource(ChainFetcher(SnapshotCache(cache)), read_spec(base), companions)
    asyncio.run(source.verify(snapshot, Desired(snapshot="s", generation=1, url=snapshot.as_uri())))


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_output_layer_may_be_there_or_not_on_either_side(tmp_path: Path, kind: str) -> None:
    bases = [write(tmp_path / f"base-{head}", kind, head, 0) for head in (None, copied)]
    snapshots = [write(tmp_path / f"new-{head}", kind, head, 1) for head in (None, copied)]
    for base in bases:
        serving = load_model(base, SETTINGS)
        digests = [digest(list(serving.decoder.weights()))]
        for snapshot in snapshots:
            verify(base, snapshot, tmp_path / "cache")
            digests.append(digest(list(load_beside(serving, snapshot, SETTINGS).decoder.weights())))
        assert digests[0] != digests[1] == digests[2]
    unequal = write(tmp_path / "unequal", kind, other, 1)
    for base in (*bases, write(tmp_path / "unequal-base", kind, other, 0)):
        with pytest.raises(
            SnapshotIncompatible, match=r"lm_head\.weight differs from model\.embed_tokens\.weight .*row 77"
        ):
            verify(base, unequal, tmp_path / "cache")


def test_an_older_configuration_leaves_the_field_out(tmp_path: Path) -> None:
    """Versions 4 write tie_word_embeddings only where it is false."""
    base, snapshot = (write(tmp_path / name, "Gemma2Config", None, seed) for seed, name in enumerate("ab"))
    redundant = write(tmp_path / "c", "Gemma2Config", copied, 1)
    for directory in (base, snapshot, redundant):
        config = json.loads((directory / "config.json").read_text())
        del config["tie_word_embeddings"]
        (directory / "config.json").write_text(json.dumps(config))
        verify(base, directory, tmp_path / "cache")
        verify(
            write(tmp_path / f"5-{directory.name}", "Gemma2Config", copied, 0), directory, tmp_path / "cache"
        )


def test_an_output_layer_of_other_dtype_or_shape_is_refused_by_name(tmp_path: Path) -> None:
    base = write(tmp_path / "base", "LlamaConfig", None, 0)
    for number, made in enumerate((lambda e: e.bfloat16(), lambda e: e[:100].clone())):
        snapshot = write(tmp_path / f"{number}", "LlamaConfig", made, 1)
        with pytest.raises(
            SnapshotIncompatible, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
        ):
            verify(base, snapshot, tmp_path / "cache")


def test_an_untied_output_layer_is_needed(tmp_path: Path) -> None:
    base = write(tmp_path / "base", "LlamaConfig", other, 0)
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": False}
    (base / "config.json").write_text(json.dumps(config))
    without = tmp_path / "without"
    shutil.copytree(base, without)
    tensors = load_file(without / "model.safetensors")
    del tensors[HEAD]
    save_file(tensors, without / "model.safetensors", metadata={"format": "pt"})
    verify(base, base, tmp_path / "cache")
    with pytest.raises(SnapshotIncompatible, match=r"lm_head\.weight is missing from the snapshot"):
        verify(base, without, tmp_path / "cache")


def test_a_directory_with_an_unequal_output_layer_is_refused_before_the_upload(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    unequal = write(tmp_path / "unequal", "Qwen3Config", other, 0)
    model = AutoModelForCausalLM.from_pretrained(write(tmp_path / "base", "Qwen3Config", None, 0))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    with SnapshotPublisher("http://127.0.0.1:9", bucket.as_uri()) as publisher:
        with pytest.raises(
            PublishError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight .*row 77"
        ):
            publisher.publish("a", unequal)
        with pytest.raises(PublishError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            publisher.publish("b", model=model)
    assert list(bucket.iterdir()) == []


@pytest.mark.parametrize(
    ("renamed", "part"),
    [
        (lambda name: f"module.{name}", "module."),
        (lambda name: f"_orig_mod.{name}", "_orig_mod."),
        (lambda name: f"base_model.model.{name}", "base_model.model."),
        (lambda name: name.replace("model.", "model.language_model.", 1), "language_model."),
        (lambda name: name.replace("q_proj.", "q_proj.base_layer."), ".base_layer"),
    ],
)
def test_a_server_names_the_prefix_and_what_to_do(
    tmp_path: Path, renamed: Callable[[str], str], part: str
) -> None:
    base = write(tmp_path / "base", "LlamaConfig", None, 0)
    snapshot = write(tmp_path / "new", "LlamaConfig", None, 1)
    tensors = load_file(snapshot / "model.safetensors")
    save_file(
        {renamed(n): t for n, t in tensors.items()}, snapshot / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(
        SnapshotIncompatible,
        match=f"missing from the snapshot.*: names with '{part}' come from .*; .*publish",
    ):
        verify(base, snapshot, tmp_path / "cache")


def test_a_server_says_that_experts_are_fused(tmp_path: Path) -> None:
    base = write(tmp_path / "base", "Qwen3MoeConfig", None, 0)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    with pytest.raises(
        SnapshotIncompatible, match=r"experts\.gate_up_proj' come from transformers 5, .*model="
    ):
        verify(base, tmp_path / "new", tmp_path / "cache")


def test_what_lies_beside_the_weights_and_is_not_served_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = write(tmp_path / "base", "LlamaConfig", None, 0)
    (base / "tokenizer_config.json").write_text('{"a": 1, "b": 2}')
    (base / "chat_template.jinja").write_text("old")
    companions = Companions(base)

    def said(snapshot: str) -> list[str]:
        caplog.clear()
        verify(base, tmp_path / snapshot, tmp_path / "cache", companions)
        return [record.message for record in caplog.records if record.levelno >= logging.WARNING]

    for name in ("same", "new", "again", "newer"):
        shutil.copytree(base, tmp_path / name)
        (tmp_path / name / "tokenizer_config.json").write_text('{"b":2,  "a":1, "transformers_version": "4"}')
        if name != "same":
            (tmp_path / name / "chat_template.jinja").write_text("new")
            (tmp_path / name / "generation_config.json").write_text('{"temperature": 0.5}')
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "newer" / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    assert said("same") == []
    (told,) = said("new")
    assert (
        "s: its chat_template.jinja, generation_config.json differ from the served model's and are not served"
        in told
    )
    assert said("again") == []
    (told,) = said("newer")
    assert "s: its config.json (eos_token_id, pad_token_id) differ" in told
    assert said("newer") == []


def test_a_companion_that_says_the_same_is_parsed_once_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing a large tokenizer holds the interpreter lock, and streams wait."""
    base, snapshot = tmp_path / "base", tmp_path / "snapshot"
    for directory, text in ((base, '{"a": 1}'), (snapshot, '{"a": 1}')):
        directory.mkdir()
        (directory / "tokenizer.json").write_text(text)
    parsed: list[bytes | None] = []
    content = companions_module._content
    monkeypatch.setattr(
        companions_module,
        "_content",
        lambda data: (data is not None and parsed.append(data), content(data))[1],
    )
    companions = Companions(base)
    companions.look("s1", snapshot)
    assert parsed == []
    (snapshot / "tokenizer.json").write_text('{"a":1}')
    companions.look("s2", snapshot)
    companions.look("s3", snapshot)
    assert parsed == [b'{"a":1}', b'{"a": 1}']
