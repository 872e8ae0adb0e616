"""Publishing from a loop of one's own: state dicts under the names in memory, of every family that the engine serves."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_model
from peft import LoraConfig, get_peft_model
from publish_world import World
from safetensors.torch import load_file, save_file
from tiers import few_fast
from transformers import AutoModelForCausalLM

from midstream.client import PublishError
from midstream.snapshots.layout import read_spec
from midstream.snapshots.store.verify import check_compatible

#: Those whose experts transformers keeps in one tensor, though their checkpoints do not.
FUSED_EXPERTS = ("qwen3-moe", "mixtral", "deepseek-v3")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(functools.partial(write_model, directory=tmp_path_factory.mktemp("models")))


@functools.cache
def loaded(served: Path) -> Any:
    """Tests read it, and do not change it."""
    return AutoModelForCausalLM.from_pretrained(served)


def configuration(served: Path, place: Path) -> Path:
    """A directory with the configuration of `served` alone."""
    place.mkdir()
    (place / "config.json").write_bytes((served / "config.json").read_bytes())
    return place


def published(world: World, served: Path, weights: Any, **how: Any) -> None:
    """Publishes, and compares what the server got with what `served` has."""
    with world.publisher() as publisher:
        publisher.publish("step", weights, **how)
    assert world.serving is not None
    check_compatible(read_spec(served), read_spec(world.serving))
    expected, found = (load_file(directory / "model.safetensors") for directory in (served, world.serving))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("beside", ["the served checkpoint", "config.json alone"])
@pytest.mark.parametrize("family", few_fast(FAMILIES, "qwen3-moe", "deepseek-v3"))
def test_a_state_dict_is_published_under_the_checkpoints_names(
    world: World, models: Callable[[str], Path], tmp_path: Path, family: str, beside: str
) -> None:
    served = models(family)
    config_dir = served if beside == "the served checkpoint" else configuration(served, tmp_path / "only")
    model = loaded(served)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    published(world, served, state, config_dir=config_dir)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.parametrize("family", few_fast(FAMILIES, "qwen3-moe", "deepseek-v3"))
def test_named_parameters_are_published_or_say_which_buffer_they_lack(
    world: World, models: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    served = models(family)
    model = loaded(served)
    parameters = dict(model.named_parameters())
    config_dir = configuration(served, tmp_path / "only")
    if family != "deepseek-v3":
        published(world, served, parameters, config_dir=served)
        return
    told = r"e_score_correction_bias is missing \(and 1 more\); .* state_dict\(\) has"
    with world.publisher() as publisher:
        for how in ({"config_dir": config_dir}, {"model": model}):
            with pytest.raises(ValueError, match=told):
                publisher.publish("step", parameters, **how)  # type: ignore[arg-type]
        with pytest.raises(PublishError, match=told):
            publisher.publish("step", parameters, config_dir=served)
    refused_before_the_upload(world)


def refused_before_the_upload(world: World) -> None:
    assert world.signals == []
    assert list(world.bucket.iterdir()) == []


def ddp(name: str) -> str:
    return f"module.{name}"


def compiled(name: str) -> str:
    return f"_orig_mod.{name}"


def fsdp(name: str) -> str:
    return name.replace("layers.", "layers._fsdp_wrapped_module.", 1)


def checkpointed(name: str) -> str:
    return name.replace(".mlp.", "._checkpoint_wrapped_module.mlp.")


def peft(name: str) -> str:
    return f"base_model.model.{name}"


def base_layer(name: str) -> str:
    return name.replace("q_proj.", "q_proj.base_layer.")


def images(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize("beside", ["the served checkpoint", "config.json alone"])
@pytest.mark.parametrize(
    ("renamed", "part", "remedy"),
    [
        (ddp, "module.", "model.module"),
        (compiled, "_orig_mod.", "model._orig_mod"),
        (fsdp, "_fsdp_wrapped_module.", "accelerator.get_state_dict"),
        (checkpointed, "_checkpoint_wrapped_module.", "accelerator.get_state_dict"),
        (peft, "base_model.model.", "merge_and_unload"),
        (base_layer, ".base_layer", "merge_and_unload"),
        (images, "language_model.", "text model's state dict"),
    ],
)
def test_names_of_a_wrapper_are_refused_before_the_upload_with_the_prefix_and_the_remedy(
    world: World,
    models: Callable[[str], Path],
    tmp_path: Path,
    renamed: Callable[[str], str],
    part: str,
    remedy: str,
    beside: str,
) -> None:
    served = models("qwen3-moe")
    config_dir = served if beside == "the served checkpoint" else configuration(served, tmp_path / "only")
    for state in (
        load_file(served / "model.safetensors"),
        loaded(served).state_dict(),
    ):
        strange = {renamed(name): tensor for name, tensor in state.items()}
        with world.publisher() as publisher, pytest.raises((PublishError, ValueError)) as refused:
            publisher.publish("step", strange, config_dir=config_dir)
        assert f"names with '{part}' come from" in str(refused.value)
        assert remedy in str(refused.value)
    refused_before_the_upload(world)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_a_directory_with_names_of_a_wrapper_is_refused_before_the_upload(
    world: World, models: Callable[[str], Path], tmp_path: Path, prefix: str
) -> None:
    served = models("qwen3")
    wrapped = configuration(served, tmp_path / "wrapped")
    tensors = load_file(served / "model.safetensors")
    save_file({f"{prefix}{n}": t for n, t in tensors.items()}, wrapped / "model.safetensors")
    with (
        world.publisher() as publisher,
        pytest.raises(PublishError, match=f"names with '{prefix}' come from"),
    ):
        publisher.publish("step", wrapped)
    refused_before_the_upload(world)


@pytest.mark.parametrize("family", FUSED_EXPERTS)
def test_fused_experts_that_cannot_be_split_are_refused_before_the_upload(
    world: World, models: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """Here: a state dict of another model than the one beside the configuration."""
    served = models(family)
    state = loaded(served).state_dict()
    strange = {name.replace("self_attn", "attention"): tensor for name, tensor in state.items()}
    with world.publisher() as publisher, pytest.raises(PublishError, match=r"experts\.gate_up_proj.*model="):
        publisher.publish("step", strange, config_dir=served)
    only = configuration(served, tmp_path / "only")
    with world.publisher() as publisher, pytest.raises(ValueError, match=r"experts\.gate_up_proj.*model="):
        publisher.publish("step", strange, config_dir=only)
    refused_before_the_upload(world)


def test_a_base_that_ships_its_experts_in_one_tensor_takes_a_state_dict_as_it_is(
    world: World, models: Callable[[str], Path], tmp_path: Path
) -> None:
    model = loaded(models("qwen3-moe"))
    served = tmp_path / "served"
    model.save_pretrained(served, save_original_format=False)
    assert any(name.endswith(".experts.gate_up_proj") for name in read_spec(served).tensors)
    published(world, served, model.state_dict(), config_dir=served)


def test_a_model_inside_a_wrapper_is_published_or_named(world: World, models: Callable[[str], Path]) -> None:
    served = models("qwen3-moe")
    # PEFT changes it.
    model = AutoModelForCausalLM.from_pretrained(served)
    published(world, served, None, model=torch.compile(model, backend="eager"), dtype="float32")
    holder = torch.nn.DataParallel(model)
    with (
        world.publisher() as publisher,
        pytest.raises(ValueError, match=r"DataParallel has no save_pretrained; .*model\.module"),
    ):
        publisher.publish("wrapped", model=holder)
    with warnings.catch_warnings():
        # PEFT reads a property that transformers will remove.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with world.publisher() as publisher:
        for how in ({"config_dir": served}, {"model": adapted}, {"model": model}):
            with pytest.raises((PublishError, ValueError), match="merge_and_unload"):
                publisher.publish("adapted", adapted.state_dict(), **how)  # type: ignore[arg-type]
    assert [signal["identity"] for signal in world.signals] == ["step"]
