"""LoRA: what is adapted in which family, and models that share one frozen base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_helpers import (
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

from midstream_tinker.trainer.model import LORA_FAMILIES
from midstream_tinker.trainer.types import AdamParams, LoraConfig, WorkFailed

Models = Callable[..., Path]
DATA = [text("a line to learn"), text("and another")]
ADAM = AdamParams(learning_rate=1e-2)


def adapted(model: object) -> set[str]:
    """The last parts of the names of what is adapted."""
    names = {name.partition(".lora_")[0].split(".base_layer")[0] for name in model.trainable}
    return {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize("family", LORA_FAMILIES)
def test_every_family_starts_at_its_base_trains_and_merges(family: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", family)
    model = new_model(directory, LoraConfig(rank=4, seed=1))
    moe = family in ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe")
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= adapted(model)
    assert ({"experts"} if moe else {"gate_proj", "up_proj", "down_proj"}) <= adapted(model)
    data = [text("".join(map(chr, (5, 9, 17, 33, 60, 2, 8))))]
    reference = plain(directory)
    before = logprobs(model.forward_backward(request(data)))[0]
    assert np.allclose(before, plain_logprobs(reference, data[0]).detach().numpy(), atol=1e-4)
    assert all(p.grad is not None for p in model.trainable.values())
    for _ in range(3):
        model.optim_step(ADAM)
        after = logprobs(model.forward_backward(request(data)))[0]
    assert after.sum() > before.sum() + 0.1
    reference.load_state_dict(model.merged())
    assert np.allclose(after, plain_logprobs(reference, data[0]).detach().numpy(), atol=1e-3)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
        ({"train_attn": False, "train_unembed": False}, {"experts"}),
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({}, {"lm_head", "experts", "q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_the_flags_say_what_is_adapted(
    tiny_model: Models, flags: dict[str, bool], expected: set[str]
) -> None:
    assert adapted(new_model(tiny_model(), LoraConfig(rank=2, **flags))) == expected


def test_nothing_to_train_and_an_unknown_family_are_refused(tiny_model: Models, tmp_path: Path) -> None:
    nothing = LoraConfig(rank=2, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(WorkFailed, match="nothing would be trained"):
        new_model(tiny_model(), nothing)
    directory = write_family(tmp_path / "model", "gpt2")
    with pytest.raises(
        WorkFailed, match=r"LoRA is not known for models of type gpt2, only for llama.*rank 0"
    ):
        new_model(directory, LoraConfig(rank=2))


def test_an_output_layer_that_is_the_embedding_is_left_alone(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", "llama", tie_word_embeddings=True)
    assert "lm_head" not in adapted(new_model(directory, LoraConfig(rank=2)))
    only = LoraConfig(rank=2, train_attn=False, train_mlp=False)
    with pytest.raises(WorkFailed, match="nothing would be trained"):
        new_model(directory, only)


def test_equal_seeds_give_equal_adapters_and_torchs_generator_is_left_alone(tiny_model: Models) -> None:
    base = base_of(tiny_model())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = (new_model(base, LoraConfig(rank=4, seed=seed)) for seed in (7, 7, 8))
    assert torch.equal(torch.rand(3), expected)
    assert same(weights(one), weights(two))
    assert not same(weights(one), weights(other))


def test_models_on_one_base_do_not_notice_each_other(tiny_model: Models) -> None:
    base = base_of(tiny_model())
    one, two = (new_model(base, LoraConfig(rank=4, seed=seed)) for seed in (1, 2))
    full = new_model(base)
    frozen = {name: tensor.clone() for name, tensor in base.frozen.state_dict().items()}
    shared = {p.data_ptr() for p in base.frozen.parameters()}
    for model in (one, two):
        assert shared <= {p.data_ptr() for p in model.module.parameters()}
        assert not shared & {p.data_ptr() for p in model.trainable.values()}
    untouched = logprobs(two.forward_backward(request(DATA, forward_only=True)))
    for _ in range(2):
        for model in (one, full):
            model.forward_backward(request(DATA))
            model.optim_step(ADAM)
    again = logprobs(two.forward_backward(request(DATA, forward_only=True)))
    assert all(np.array_equal(a, b) for a, b in zip(untouched, again, strict=True))
    learnt = logprobs(one.forward_backward(request(DATA, forward_only=True)))
    assert sum(map(np.sum, learnt)) > sum(map(np.sum, untouched)) + 1
    assert same(base.frozen.state_dict(), frozen)


def test_ranks_and_steps_are_told(tiny_model: Models) -> None:
    base = base_of(tiny_model())
    small, large = (new_model(base, LoraConfig(rank=rank)) for rank in (2, 8))
    assert large.state().trainable == 4 * small.state().trainable
    small.forward_backward(request(DATA))
    small.optim_step(ADAM)
    assert (small.state().steps, large.state().steps) == (1, 0)


def test_adapters_are_float32_over_a_base_held_in_bfloat16(tiny_model: Models) -> None:
    model = new_model(tiny_model(), LoraConfig(rank=4), dtype="bfloat16")
    assert {p.dtype for p in model.base.frozen.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.trainable.values()} == {torch.float32}
    before = weights(model)
    losses = []
    # The first is less than bfloat16 could tell.
    for rate in (1e-6, 1e-2, 1e-2):
        losses.append(model.forward_backward(request(DATA)).metrics["loss:sum"])
        model.optim_step(AdamParams(learning_rate=rate))
        assert not same(weights(model), before)
    assert model.forward_backward(request(DATA)).metrics["loss:sum"] < losses[0] - 1
