"""Training one model: numbers against a plain Hugging Face forward, one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trainer_helpers import (
    FULL,
    array,
    base_of,
    datum,
    gradients,
    logprobs,
    new_model,
    plain,
    plain_logprobs,
    request,
    same,
    text,
    weights,
)

from midstream_tinker.trainer import passes
from midstream_tinker.trainer.passes import micro_batches, positions_of_pass
from midstream_tinker.trainer.types import AdamParams, LoraConfig, WorkFailed

Models = Callable[..., Path]
LINES = ("a line of text", "short", "one that is longer than the two before it", "x" * 33, "ab")
ADAM = AdamParams(learning_rate=1e-3)


def policy(lines: tuple[str, ...] = LINES) -> list:
    """Each line with another rollout's logprobs and advantages, 0 on its first characters."""
    made = []
    for i, line in enumerate(lines):
        n = len(line) - 1
        advantages = [0.0] * (n // 3) + [(-1.0) ** (i + j) * (1 + j / 10) for j in range(n - n // 3)]
        rollout = [0.0] * (n // 3) + [-5.0 - (j % 5) / 4 for j in range(n - n // 3)]
        made.append(text(line, advantages=advantages, logprobs=rollout))
    return made


def expected_ppo(module: torch.nn.Module, data: list) -> torch.Tensor:
    total = torch.zeros(())
    for one in data:
        advantages, rollout = (
            torch.from_numpy(array(one.inputs[k]).copy()) for k in ("advantages", "logprobs")
        )
        for p, q, a in zip(plain_logprobs(module, one), rollout, advantages, strict=True):
            ratio = torch.exp(p - q)
            total = total - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    return total


@pytest.mark.parametrize("batch_tokens", [1, 70, 8192])
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(
    tiny_model: Models, batch_tokens: int
) -> None:
    model = new_model(tiny_model(), batch_tokens=batch_tokens)
    reference = plain(tiny_model())
    data = policy()
    result = model.forward_backward(request(data, "ppo"))
    loss = expected_ppo(reference, data)
    loss.backward()
    for got, one in zip(logprobs(result), data, strict=True):
        assert got.dtype == np.float32
        assert np.allclose(got, plain_logprobs(reference, one).detach().numpy(), atol=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["tokens:sum"] == sum((array(d.inputs["advantages"]) != 0).sum() for d in data)
    wanted = dict(reference.named_parameters())
    assert model.trainable.keys() == wanted.keys()
    for name, parameter in model.trainable.items():
        assert torch.allclose(parameter.grad, wanted[name].grad, atol=1e-4, rtol=1e-4), name


def test_ratio_metrics_are_means_over_the_tokens_that_count(tiny_model: Models) -> None:
    model = new_model(tiny_model())
    data = policy()
    ratios = [
        math.exp(p - q)
        for one in data
        for p, q, a in zip(
            plain_logprobs(plain(tiny_model()), one).tolist(),
            array(one.inputs["logprobs"]),
            array(one.inputs["advantages"]),
            strict=True,
        )
        if a != 0
    ]
    metrics = model.forward_backward(request(data, "ppo", forward_only=True)).metrics
    assert metrics["ratio:mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    outside = [not 0.8 <= ratio <= 1.2 for ratio in ratios]
    assert 0 < sum(outside) < len(outside)
    assert metrics["clip_fraction:mean"] == pytest.approx(sum(outside) / len(outside))
    assert all(name.count(":") == 1 for name in metrics)


def test_several_targets_have_logprobs_of_their_shape(tiny_model: Models) -> None:
    model = new_model(tiny_model())
    one = datum([1, 2, 3], [[2, 7], [3, 8], [4, 9]], weights=[[1, 0.5], [0, 0], [-1, 2]])
    other = text("with one target", weights=1.0)
    result = model.forward_backward(request([other, one]))
    reference = plain(tiny_model())
    found = plain_logprobs(reference, one)
    assert array(result.outputs[1]["logprobs"]).shape == (3, 2)
    assert np.allclose(logprobs(result)[1], found.detach().numpy(), atol=1e-5)
    loss = -(found * torch.tensor([[1, 0.5], [0, 0], [-1, 2]])).sum() - plain_logprobs(reference, other).sum()
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["tokens:sum"] == 4 + len("with one target") - 1


def test_gradients_add_up_until_the_step_and_forward_only_adds_none(tiny_model: Models) -> None:
    together, apart = new_model(tiny_model()), new_model(tiny_model())
    data = policy()
    together.forward_backward(request(data, "importance_sampling"))
    apart.forward_backward(request(data[:2], "importance_sampling"))
    apart.forward_backward(request(data, "importance_sampling", forward_only=True))
    apart.forward_backward(request(data[2:], "importance_sampling"))
    for name, gradient in gradients(together).items():
        assert (gradient - gradients(apart)[name]).norm() < 1e-5 * gradient.norm(), name
    apart.optim_step(ADAM)
    assert all(gradient is None for gradient in gradients(apart).values())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (text("much too far", advantages=1.0, logprobs=-1e4), r"the loss of data\[2\] is not finite"),
        (text("too long " * 500, advantages=1.0, logprobs=-1.0), "has 4499 tokens, the model takes 4096"),
    ],
    ids=["infinite", "long"],
)  # fmt: skip
def test_a_request_that_fails_leaves_the_gradients_of_those_before_it(
    tiny_model: Models, wrong: object, says: str
) -> None:
    model = new_model(tiny_model(), batch_tokens=16)
    model.forward_backward(request(policy()[:1], "importance_sampling"))
    before = gradients(model)
    with pytest.raises(WorkFailed, match=says):
        model.forward_backward(request([*policy()[:2], wrong, *policy()[2:]], "importance_sampling"))
    assert same(gradients(model), before)
    model.optim_step(ADAM)
    with pytest.raises(WorkFailed, match=says):
        model.forward_backward(request([*policy()[:2], wrong], "importance_sampling"))
    assert all(gradient is None for gradient in gradients(model).values())


def test_no_data_is_refused(tiny_model: Models) -> None:
    with pytest.raises(WorkFailed, match="data is empty"):
        new_model(tiny_model()).forward_backward(request([]))


def test_steps_are_those_of_adamw_with_decoupled_decay_and_a_global_clip(tiny_model: Models) -> None:
    model = new_model(tiny_model())
    adam = AdamParams(
        learning_rate=2e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5
    )
    expected = {n: w.double() for n, w in weights(model).items()}
    first = {n: torch.zeros_like(w) for n, w in expected.items()}
    second = {n: torch.zeros_like(w) for n, w in expected.items()}
    for step in (1, 2, 3):
        model.forward_backward(request(policy(), "importance_sampling"))
        grads = {n: g.double() for n, g in gradients(model).items() if g is not None}
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        assert norm > 0.5
        metrics = model.optim_step(adam)
        assert metrics == {
            "grad_norm:mean": pytest.approx(norm, rel=1e-4),
            "learning_rate:mean": 2e-3,
        }
        for name, gradient in grads.items():
            g = gradient * 0.5 / norm
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.9 * second[name] + 0.1 * g.square()
            corrected = (second[name] / (1 - 0.9**step)).sqrt() + 1e-6
            moved = first[name] / (1 - 0.8**step) / corrected
            expected[name] = expected[name] * (1 - 2e-3 * 0.1) - 2e-3 * moved
    for name, weight in weights(model).items():
        assert torch.allclose(weight.double(), expected[name], atol=2e-5), name
    assert model.state().steps == 3


def test_a_step_without_gradients_changes_nothing(tiny_model: Models) -> None:
    model = new_model(tiny_model())
    before = weights(model)
    assert model.optim_step(ADAM)["grad_norm:mean"] == 0.0
    assert same(weights(model), before)
    assert model.state().steps == 0


def test_gradients_that_are_not_finite_never_reach_the_weights(tiny_model: Models) -> None:
    model = new_model(tiny_model())
    before = weights(model)
    model.forward_backward(request(policy(), "ppo"))
    next(iter(model.trainable.values())).grad.fill_(math.inf)
    with pytest.raises(WorkFailed, match="gradients are not finite"):
        model.optim_step(ADAM)
    assert same(weights(model), before)
    assert all(gradient is None for gradient in gradients(model).values())


@pytest.mark.parametrize("eps", [0.0, 1e-60])
def test_an_eps_that_would_divide_by_zero_never_reaches_the_weights(tiny_model: Models, eps: float) -> None:
    model = new_model(tiny_model())
    before = weights(model)
    model.forward_backward(request([text("say this")]))
    with pytest.raises(WorkFailed, match="eps is"):
        model.optim_step(AdamParams(learning_rate=1e-3, eps=eps))
    assert same(weights(model), before)
    model.forward_backward(request([text("say this")]))
    model.optim_step(AdamParams(learning_rate=1e-3, eps=1e-37))
    assert all(torch.isfinite(weight).all() for weight in weights(model).values())


def test_a_gain_whose_ratio_is_infinite_is_clipped_and_leaves_the_other_gradients(tiny_model: Models) -> None:
    model = new_model(tiny_model())
    line = "say this"
    usual = [-5.0] * (len(line) - 1)
    far = [-500.0, *usual[1:]]
    metrics = model.forward_backward(request([text(line, logprobs=far, advantages=1.0)], "ppo")).metrics
    assert math.isfinite(metrics["loss:sum"])
    found = gradients(model)
    assert model.optim_step(ADAM)["grad_norm:mean"] > 0
    model = new_model(tiny_model())
    without = [0.0, *[1.0] * (len(line) - 2)]
    model.forward_backward(request([text(line, logprobs=usual, advantages=without)], "ppo"))
    for name, gradient in gradients(model).items():
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient)


def test_training_on_a_line_makes_it_likelier(tiny_model: Models) -> None:
    model = new_model(tiny_model())
    losses = []
    for _ in range(5):
        losses.append(model.forward_backward(request([text("say this")])).metrics["loss:sum"])
        model.optim_step(ADAM)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1


def test_a_pass_never_holds_more_positions_than_allowed_nor_loses_a_sequence() -> None:
    lengths = [5, 100, 7, 30, 30, 1, 64]
    batches = list(micro_batches(lengths, 64))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    # Longer than a pass may be, so alone.
    assert batches[0] == [1]
    for batch in batches[1:]:
        assert max(lengths[i] for i in batch) * len(batch) <= 64


def test_a_large_vocabulary_makes_passes_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "LOGITS_BYTES_MAX", 4 * 1000 * 10)
    assert positions_of_pass(8192, 1000) == 10
    assert positions_of_pass(4, 1000) == 4
    assert positions_of_pass(8192, 10**6) == 1


def test_a_bfloat16_base_is_trained_in_float32(tiny_model: Models) -> None:
    model = new_model(tiny_model(dtype="bfloat16"))
    assert {p.dtype for p in model.trainable.values()} == {torch.float32}
    before = weights(model)
    model.forward_backward(request(policy(), "ppo"))
    # Less than bfloat16 could tell.
    model.optim_step(AdamParams(learning_rate=1e-7))
    assert not same(weights(model), before)


def test_the_base_says_what_it_is(tiny_model: Models) -> None:
    info = base_of(tiny_model()).info()
    assert (info.model_type, info.vocab_size, info.max_positions) == ("qwen3_moe", 264, 4096)
    assert (info.moe_layers, info.top_k, info.experts) == (4, 2, 8)


def test_a_base_that_bounds_no_positions_is_trained_at_any_length(tiny_model: Models) -> None:
    base = base_of(tiny_model())
    base.text_config = SimpleNamespace(vocab_size=base.vocab_size)
    assert base.max_positions > 10**9
    assert new_model(base).forward_backward(request([text("a line")])).metrics["loss:sum"] > 0


def test_full_training_needs_no_known_family(tiny_model: Models) -> None:
    state = new_model(tiny_model(), FULL).state()
    assert state.trainable == sum(p.numel() for p in plain(tiny_model()).parameters())
    assert state.lora == LoraConfig(rank=0)
