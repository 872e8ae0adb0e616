"""Losses as functions of log-probabilities, and what is refused before any of them is computed."""

from __future__ import annotations

import math

import pytest
import torch
from trainer_helpers import datum, tensor

from midstream_tinker.trainer.losses import LOSSES, named_loss, read_config, read_example
from midstream_tinker.trainer.types import WorkFailed

LOGPROB = [-0.5, -2.0, -1.0, -3.0, -0.1]
ROLLOUT = [-1.0, -1.0, -1.0, -1.1, -2.0]
ADVANTAGE = [1.0, -2.0, 0.5, 1.5, -1.0]


def clip(ratio: float, low: float, high: float) -> float:
    return max(low, min(high, ratio))


# Per token, in plain arithmetic: p the log-probability, q the rollout's, a the advantage.
EXPECTED = {
    "importance_sampling": lambda p, q, a, c: -math.exp(p - q) * a,
    "ppo": lambda p, q, a, c: -min(math.exp(p - q) * a, clip(math.exp(p - q), c["low"], c["high"]) * a),
    "cispo": lambda p, q, a, c: -clip(math.exp(p - q), c["low"], c["high"]) * p * a,
    "dro": lambda p, q, a, c: -(p * a - 0.5 * c["beta"] * (p - q) ** 2),
}
# And by what p is multiplied where it counts: dloss/dp.
SLOPES = {
    "importance_sampling": lambda p, q, a, c: -math.exp(p - q) * a,
    "ppo": lambda p, q, a, c: 0.0 if clipped_away(p, q, a, c) else -math.exp(p - q) * a,
    "cispo": lambda p, q, a, c: -clip(math.exp(p - q), c["low"], c["high"]) * a,
    "dro": lambda p, q, a, c: -(a - c["beta"] * (p - q)),
}


def clipped_away(p: float, q: float, a: float, c: dict[str, float]) -> bool:
    ratio = math.exp(p - q)
    return (a > 0 and ratio > c["high"]) or (a < 0 and ratio < c["low"])


def inputs_of(name: str, settings: dict[str, float], **given: list[float]) -> dict[str, torch.Tensor]:
    loss = LOSSES[name]
    found = {"logprobs": ROLLOUT, "advantages": ADVANTAGE, **given}
    return {
        key: torch.tensor(found[key], dtype=torch.float64)
        if key in found
        else torch.full((len(LOGPROB),), settings[key], dtype=torch.float64)
        for key in loss.per_token
    }


@pytest.mark.parametrize("config", [{}, {"low": 0.5, "high": 3.0, "beta": 0.7}], ids=["default", "given"])
@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_loss_and_its_slope_are_those_of_its_formula(name: str, config: dict[str, float]) -> None:
    c = {"low": 0.8, "high": 1.2, "beta": 0.05, **config}
    wire = {"clip_low_threshold": c["low"], "clip_high_threshold": c["high"], "beta": c["beta"]}
    given = {k: v for k, v in wire.items() if k in LOSSES[name].config} if config else {}
    settings = read_config(name, LOSSES[name], given)
    p = torch.tensor(LOGPROB, dtype=torch.float64, requires_grad=True)
    terms = LOSSES[name].terms(p, inputs_of(name, settings))
    rows = list(zip(LOGPROB, ROLLOUT, ADVANTAGE, strict=True))
    assert terms.values.tolist() == pytest.approx([EXPECTED[name](*row, c) for row in rows])
    terms.values.sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == pytest.approx([SLOPES[name](*row, c) for row in rows])
    assert terms.ratio is not None
    assert terms.ratio.tolist() == pytest.approx([math.exp(p - q) for p, q, _ in rows])
    if LOSSES[name].clips:
        outside = [not c["low"] <= math.exp(p - q) <= c["high"] for p, q, _ in rows]
        assert terms.clipped is not None
        assert terms.clipped.tolist() == outside


def test_cross_entropy_weighs_every_target_and_takes_negative_weights() -> None:
    p = torch.tensor(LOGPROB, requires_grad=True)
    weights = torch.tensor([1.0, 0.0, -2.0, 0.5, 1.0])
    values = LOSSES["cross_entropy"].terms(p, {"weights": weights}).values
    assert values.tolist() == pytest.approx([0.5, 0.0, -2.0, 1.5, 0.1])
    values.sum().backward()
    assert p.grad is not None
    assert p.grad.tolist() == (-weights).tolist()


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_a_token_without_advantage_costs_nothing_however_far_its_logprob_is(name: str) -> None:
    settings = read_config(name, LOSSES[name], {})
    inputs = inputs_of(name, settings, logprobs=[-1e4] * 5, advantages=[0.0] * 5)
    p = torch.tensor(LOGPROB, requires_grad=True)
    terms = LOSSES[name].terms(p, inputs)
    terms.values.sum().backward()
    assert p.grad is not None
    assert terms.values.tolist() == [0.0] * 5
    assert p.grad.tolist() == [0.0] * 5
    assert terms.ratio is not None
    assert terms.ratio.numel() == 0


def test_a_threshold_may_be_given_token_by_token() -> None:
    loss = LOSSES["ppo"]
    data = datum([1, 2], [2, 3], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0], clip_high_threshold=[5.0, 1.1])
    example = read_example(data, 0, "ppo", loss, read_config("ppo", loss, {}), 10)
    flat = {name: values.flatten() for name, values in example.inputs.items()}
    values = loss.terms(torch.tensor([0.0, 0.0]), flat).values
    assert values.tolist() == pytest.approx([-math.e, -1.1])
    assert flat["clip_low_threshold"].tolist() == pytest.approx([0.8, 0.8])


def test_several_targets_per_position_are_read_row_by_row() -> None:
    loss = LOSSES["cross_entropy"]
    data = datum([1, 2], [[3, 4, 5], [6, 7, 8]], weights=[[1, 2, 3], [4, 5, 6]])
    example = read_example(data, 0, "cross_entropy", loss, {}, 10)
    assert example.targets.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert example.inputs["weights"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert example.shape == (2, 3)


GOOD = {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("loss_fn", "data", "says"),
    [
        ("ppo", datum([1, 2], [2, 3], advantages=[1, 1]), r"data\[7\].loss_fn_inputs: ppo needs logprobs"),
        ("ppo", datum([1, 2], [2, 3], **GOOD, mask=[1, 1]), "'mask' is not an input of ppo; supported: target_tokens"),
        ("ppo", datum([1, 2], [2, 3, 4], **GOOD), r"target_tokens has shape \[3\], expected \[2\]$"),
        ("ppo", datum([1, 2], [[2], [3]], **GOOD), r"target_tokens has shape \[2, 1\], expected \[2\]$"),
        ("ppo", datum([1, 2], [2, 3], **{**GOOD, "advantages": [1.0]}), r"advantages has shape \[1\], target_tokens has \[2\]"),
        ("ppo", datum([1, 2], [2, 10], **GOOD), "target_tokens holds token 10, the model has 0 to 9"),
        ("ppo", datum([1, 99], [2, 3], **GOOD), "model_input holds token 99, the model has 0 to 9"),
        ("ppo", datum([], [], **GOOD), "model_input has no tokens"),
        ("ppo", datum([1, 2], [2, 3], **{**GOOD, "logprobs": [math.nan, 0]}), "logprobs holds a number that is not finite"),
        ("cross_entropy", datum([1, 2], [2, -1]), "target_tokens holds token -1"),
        ("cross_entropy", datum([1, 2], [[2, 3], [3, 4]], weights=[1, 1]), r"weights has shape \[2\], target"),
    ],
)  # fmt: skip
def test_a_wrong_datum_is_refused_by_name(loss_fn: str, data: object, says: str) -> None:
    loss = LOSSES[loss_fn]
    with pytest.raises(WorkFailed, match=says) as refused:
        read_example(data, 7, loss_fn, loss, read_config(loss_fn, loss, {}), 10)
    assert refused.value.category == "user"


def test_targets_that_are_no_ids_are_refused() -> None:
    data = datum([1, 2], [2, 3])
    wrong = type(data)(tokens=data.tokens, inputs={"target_tokens": tensor([2.0, 3.0])})
    with pytest.raises(WorkFailed, match="must hold token ids"):
        read_example(wrong, 0, "cross_entropy", LOSSES["cross_entropy"], {}, 10)


def test_an_unknown_loss_and_an_unknown_setting_say_what_is_supported() -> None:
    with pytest.raises(
        WorkFailed,
        match=r"'gspo' is not supported here; supported: cross_entropy, importance_sampling, ppo",
    ):
        named_loss("gspo")
    with pytest.raises(
        WorkFailed, match=r"loss_fn_config.kl_coeff is not supported by ppo; supported: clip_low_threshold"
    ):
        read_config("ppo", LOSSES["ppo"], {"kl_coeff": 0.1})
    with pytest.raises(WorkFailed, match=r"loss_fn_config.beta must be a finite number, got 'x'"):
        read_config("dro", LOSSES["dro"], {"beta": "x"})
