"""States go on where they were, refuse what they are not for, and exported weights are what the engine serves."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from trainer_helpers import (
    FULL,
    base_of,
    logprobs,
    new_model,
    plain,
    plain_logprobs,
    request,
    same,
    text,
    weights,
    write_family,
)

from midstream.core.config import EngineSettings
from midstream.engine.adapter import load_adapter
from midstream.engine.embedded.loading import load_beside, load_model, logits_alone
from midstream.snapshots.layout import read_spec
from midstream.snapshots.store.verify import check_compatible
from midstream_tinker.trainer import checkpoints
from midstream_tinker.trainer.checkpoints import (
    export_adapter,
    export_weights,
    load_state,
    read_meta,
    save_state,
    write_directory,
)
from midstream_tinker.trainer.model import ADAPTER, LORA_FAMILIES, TrainedModel
from midstream_tinker.trainer.types import AdamParams, LoraConfig, WorkFailed

Models = Callable[..., Path]
DATA = [text("a line to learn"), text("and another")]
ADAM = AdamParams(learning_rate=3e-3)
LORA = LoraConfig(rank=4, seed=3)
BOTH = pytest.mark.parametrize("lora", [FULL, LORA], ids=["full", "lora"])


def train(model: TrainedModel, steps: int) -> None:
    for _ in range(steps):
        model.forward_backward(request(DATA))
        model.optim_step(ADAM)


def test_a_disk_that_takes_no_more_is_an_error_of_the_disk_and_leaves_nothing(
    tiny_model: Models, tmp_path: Path
) -> None:
    model = new_model(base_of(tiny_model()), FULL)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_state(model, tmp_path / "state", optimizer=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@BOTH
def test_training_goes_on_from_a_state_as_if_it_had_not_stopped(
    tiny_model: Models, tmp_path: Path, lora: LoraConfig
) -> None:
    base = base_of(tiny_model())
    model = new_model(base, lora)
    train(model, 2)
    size = save_state(model, tmp_path / "state", optimizer=True)
    assert size == sum(file.stat().st_size for file in (tmp_path / "state").iterdir())
    saved = weights(model)
    train(model, 2)
    meta = read_meta(tmp_path / "state")
    assert (meta.steps, meta.lora) == (2, lora)
    # Its own adapters do not matter.
    other = new_model(base, LoraConfig(rank=lora.rank, seed=99))
    train(other, 1)
    other.forward_backward(request(DATA))
    load_state(other, tmp_path / "state", optimizer=True)
    assert same(weights(other), saved)
    assert other.state().steps == 2
    assert all(p.grad is None for p in other.trainable.values())
    train(other, 2)
    assert same(weights(other), weights(model))


@BOTH
def test_without_the_optimizer_weights_are_the_same_and_moments_are_not(
    tiny_model: Models, tmp_path: Path, lora: LoraConfig
) -> None:
    model = new_model(tiny_model(), lora)
    train(model, 2)
    save_state(model, tmp_path / "state", optimizer=False)
    saved = weights(model)
    assert not (tmp_path / "state" / "optimizer.safetensors").exists()
    load_state(model, tmp_path / "state", optimizer=False)
    assert same(weights(model), saved)
    assert model.state().steps == 0
    with pytest.raises(WorkFailed, match="no optimizer state"):
        load_state(model, tmp_path / "state", optimizer=True)


def test_a_state_of_another_base_another_rank_or_no_state_is_refused(
    tiny_model: Models, tmp_path: Path
) -> None:
    model = new_model(tiny_model(), LORA)
    train(model, 1)
    save_state(model, tmp_path / "state", optimizer=True)
    before = weights(model)
    elsewhere = new_model(tiny_model(seed=1), LORA)
    for other, says in [
        (elsewhere, "made from another base model"),
        (new_model(model.base, LoraConfig(rank=8)), "is of LoRA of rank 4, the model of LoRA of rank 8"),
        (new_model(model.base, FULL), r"is of LoRA of rank 4, the model of all weights \(rank 0\)"),
        (
            new_model(model.base, LoraConfig(rank=4, train_attn=False)),
            "the model of LoRA of rank 4 without train_attn",
        ),
    ]:
        own = weights(other)
        with pytest.raises(WorkFailed, match=says):
            load_state(other, tmp_path / "state", optimizer=True)
        assert same(weights(other), own)
    with pytest.raises(WorkFailed, match="is not there"):
        load_state(model, tmp_path / "nothing", optimizer=True)
    assert same(weights(model), before)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "meta.json"])
def test_a_damaged_state_is_refused_and_changes_nothing(
    tiny_model: Models, tmp_path: Path, file: str
) -> None:
    model = new_model(tiny_model(), LORA)
    train(model, 1)
    save_state(model, tmp_path / "state", optimizer=True)
    train(model, 1)
    before, steps = weights(model), model.state().steps
    path = tmp_path / "state" / file
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(WorkFailed, match=rf"{file} cannot be read"):
        load_state(model, tmp_path / "state", optimizer=True)
    assert same(weights(model), before)
    assert model.state().steps == steps


def test_a_state_that_cannot_be_written_leaves_the_one_before(tiny_model: Models, tmp_path: Path) -> None:
    model = new_model(tiny_model(), LORA)
    save_state(model, tmp_path / "state", optimizer=True)
    saved = weights(model)

    def break_off(into: Path) -> None:
        (into / "half").write_bytes(b"x")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_directory(tmp_path / "state", break_off)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    train(model, 1)
    load_state(model, tmp_path / "state", optimizer=True)
    assert same(weights(model), saved)


def test_every_new_directory_is_on_disk_before_the_state_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(checkpoints, "sync_directory", synced.append)
    monkeypatch.setattr(checkpoints, "sync_tree", synced.append)
    target = tmp_path / "model" / "weights" / "name"
    write_directory(target, lambda into: None)
    assert target.is_dir()
    assert {tmp_path, tmp_path / "model", tmp_path / "model" / "weights"} <= set(synced)
    assert [path.name.startswith(".name.writing-") for path in synced].index(True) < len(synced) - 1
    assert synced[-1] == target.parent


def test_a_state_is_replaced_whole_and_a_crash_between_the_renames_is_repaired(
    tiny_model: Models, tmp_path: Path
) -> None:
    model = new_model(tiny_model(), LORA)
    save_state(model, tmp_path / "state", optimizer=True)
    train(model, 1)
    save_state(model, tmp_path / "state", optimizer=False)
    assert read_meta(tmp_path / "state").steps == 1
    assert not (tmp_path / "state" / "optimizer.safetensors").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    # What such a crash leaves.
    (tmp_path / "state").rename(tmp_path / ".state.replaced")
    (tmp_path / ".state.writing-x").mkdir()
    load_state(model, tmp_path / "state", optimizer=False)
    save_state(model, tmp_path / "state", optimizer=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


# Peft's own, of transformers.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_lora_state_is_an_adapter_that_peft_reads(tiny_model: Models, tmp_path: Path) -> None:
    model = new_model(tiny_model(), LORA)
    train(model, 2)
    save_state(model, tmp_path / "state", optimizer=False)
    found = logprobs(model.forward_backward(request(DATA, forward_only=True)))
    loaded = PeftModel.from_pretrained(plain(tiny_model()), tmp_path / "state")
    for got, one in zip(found, DATA, strict=True):
        assert np.allclose(got, plain_logprobs(loaded, one).detach().numpy(), atol=1e-5)


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_take_the_bases_place_in_the_engine(
    tiny_model: Models, tmp_path: Path, lora: LoraConfig, dtype: str
) -> None:
    directory = tiny_model(dtype=dtype)
    model = new_model(directory, lora)
    train(model, 3)
    size = export_weights(model, tmp_path / "export")
    assert size == sum(file.stat().st_size for file in (tmp_path / "export").iterdir())
    check_compatible(read_spec(directory), read_spec(tmp_path / "export"))
    assert {f.name for f in directory.iterdir()} == {f.name for f in (tmp_path / "export").iterdir()}
    settings = EngineSettings(kv_cache_tokens=2048)
    serving = load_model(directory, settings)
    served = load_beside(serving, tmp_path / "export", settings)
    learnt = logprobs(model.forward_backward(request(DATA, forward_only=True)))
    # Rounding may choose other experts for a token.
    close = 2e-4 if dtype == "float32" else 0.1
    for one, expected in zip(DATA, learnt, strict=True):
        ids = np.array(one.tokens)
        targets = torch.from_numpy(np.array([*one.tokens[1:], list(b"nr")[one is DATA[1]]]))
        logits = {name: logits_alone(m.decoder, ids) for name, m in (("new", served), ("old", serving))}
        found = {
            n: x.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0].numpy() for n, x in logits.items()
        }
        assert np.abs(found["new"] - expected).mean() < close
        assert np.abs(found["old"] - expected).mean() > 0.3


def test_an_export_has_the_bases_shards_and_its_tied_and_unread_tensors(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "tied", "llama", tie_word_embeddings=True)
    weights_of = plain(directory)
    weights_of.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    model = new_model(tmp_path / "base", LoraConfig(rank=2))
    data = [text("".join(map(chr, (5, 9, 17, 33, 60, 2, 8))))]
    for _ in range(2):
        model.forward_backward(request(data))
        model.optim_step(ADAM)
    export_weights(model, tmp_path / "export")
    assert read_spec(tmp_path / "export") == read_spec(tmp_path / "base")
    index = "model.safetensors.index.json"
    assert json.loads((tmp_path / "export" / index).read_text()) == json.loads(
        (tmp_path / "base" / index).read_text()
    )
    found = logprobs(model.forward_backward(request(data, forward_only=True)))[0]
    exported = plain(tmp_path / "export")
    assert np.allclose(found, plain_logprobs(exported, data[0]).detach().numpy(), atol=1e-4)
    assert not np.allclose(found, plain_logprobs(weights_of, data[0]).detach().numpy(), atol=1e-4)


def test_an_export_of_an_untrained_model_is_the_base_bit_for_bit(tiny_model: Models, tmp_path: Path) -> None:
    directory = tiny_model(dtype="bfloat16")
    for name, lora in (("full", FULL), ("lora", LORA)):
        export_weights(new_model(directory, lora), tmp_path / name)
        for file in directory.glob("*.safetensors"):
            assert (tmp_path / name / file.name).read_bytes() == file.read_bytes()


def test_weights_that_are_not_finite_are_not_exported(tiny_model: Models, tmp_path: Path) -> None:
    model = new_model(tiny_model())
    with torch.no_grad():
        model.trainable["model.norm.weight"][3] = torch.inf
    with pytest.raises(WorkFailed, match=r"model.norm.weight is not finite"):
        export_weights(model, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_an_export_goes_nowhere_where_something_is(tiny_model: Models, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    with pytest.raises(FileExistsError, match="export is there already"):
        export_weights(new_model(tiny_model()), tmp_path / "export")


@pytest.mark.parametrize("meta", [b'{"x":' + b"[" * 5000, b'{"base":"\xff"}'])
def test_a_state_whose_notes_cannot_be_read_is_refused(meta: bytes, tmp_path: Path) -> None:
    (tmp_path / checkpoints.META_FILE).write_bytes(meta)
    with pytest.raises(WorkFailed, match="cannot be read"):
        checkpoints.read_meta(tmp_path)


@pytest.mark.parametrize("family", LORA_FAMILIES)
def test_an_exported_adapter_adds_to_the_base_what_the_run_has_learnt(family: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", family)
    model = new_model(directory, LORA)
    data = [text("".join(map(chr, (5, 9, 17, 33, 60, 2, 8))))]
    for _ in range(3):
        model.forward_backward(request(data))
        model.optim_step(AdamParams(learning_rate=1e-2))
    size = export_adapter(model, tmp_path / "adapter")
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert size < sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    deltas = {
        f"{name.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', 'weight')}": (
            layer.get_delta_weight(ADAPTER)
        )
        for name, layer in model.module.named_modules()
        if isinstance(layer, LoraLinear | ParamWrapper)
    }
    read = load_adapter(tmp_path / "adapter", directory, torch.float32)
    assert {path if low.a.ndim == 3 else f"{path}.weight" for path, low in read.items()} == deltas.keys()
    for path, low in read.items():
        served = low.b @ low.a
        delta = deltas[path if low.a.ndim == 3 else f"{path}.weight"]
        assert delta.abs().max() > 1e-3
        assert torch.allclose(served, delta, atol=1e-5), path


def test_an_adapter_that_is_not_finite_is_not_exported(tiny_model: Models, tmp_path: Path) -> None:
    model = new_model(tiny_model(), LORA)
    name, parameter = next(iter(model.trainable.items()))
    with torch.no_grad():
        parameter.view(-1)[0] = float("inf")
    with pytest.raises(WorkFailed, match=f"{name} is not finite"):
        export_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
