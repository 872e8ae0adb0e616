"""The trainer: advantages within groups, the clipped loss, and updates that prefer what was rewarded."""

import dataclasses

import pytest
import torch
from demo_helpers import load, make_rollout, make_turn

from midstream.demo.trainer import Trainer, TrainerOptions, clipped_loss, turn_advantages

PROMPT = list(b"a prompt, ")
FOLLOW_UP = list(b" more, ")


@pytest.fixture(scope="module")
def rollouts(tiny_model):
    """Two groups of two; in each, sample 0 did well on turn 1 and badly on turn 2."""
    model = load(tiny_model())
    made = []
    for group in (0, 1):
        for sample, (answer, rewards) in enumerate([(b"good", (1.0, 0.0)), (b"poor", (0.0, 0.5))]):
            first = make_turn(model, PROMPT, list(answer), reward=rewards[0])
            second = make_turn(model, [*first.sequence, *FOLLOW_UP], list(answer[::-1]), reward=rewards[1])
            made.append(make_rollout((first, second), group, sample))
    return made


def with_rewards(rollout, *rewards):
    turns = [dataclasses.replace(t, reward=r) for t, r in zip(rollout.turns, rewards, strict=True)]
    return dataclasses.replace(rollout, turns=tuple(turns))


def test_advantages_compare_a_turn_with_the_same_turn_of_its_group_only(rollouts):
    advantages = turn_advantages(rollouts)
    assert torch.allclose(advantages, torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 2))
    shifted = [r if r.group == 0 else with_rewards(r, 9.0 + r.sample, 3.0) for r in rollouts]
    expected = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [-1.0, 0.0], [1.0, 0.0]])
    assert torch.allclose(turn_advantages(shifted), expected)


def test_a_group_that_scored_the_same_has_no_advantage(rollouts):
    assert torch.equal(turn_advantages([with_rewards(r, 0.7, 0.7) for r in rollouts]), torch.zeros(4, 2))


def test_the_loss_is_pessimistic_about_ratios_outside_the_clip():
    ratio = torch.tensor([2.0, 0.5, 2.0, 0.5, 1.1])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    loss = clipped_loss(ratio.log(), torch.zeros(5), advantage, clip=0.2)
    assert loss.tolist() == pytest.approx([-1.4, -0.5, 2.0, 0.8, -1.1])


def test_an_update_raises_what_was_rewarded_and_lowers_the_rest(tiny_model, rollouts):
    trainer = Trainer(tiny_model(), TrainerOptions(learning_rate=1e-3, minibatch=3))
    trainer.update(rollouts)
    trainer.remember("step-1")
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    relabelled = [dataclasses.replace(t, snapshots=("step-1",) * len(t.tokens)) for t in turns]
    after = trainer.rescorer.score(relabelled, trainer.weights, replay=True)
    signs = turn_advantages(rollouts).flatten().tolist()
    for turn, scored, sign in zip(turns, after, signs, strict=True):
        change = scored.logprobs.sum().item() - sum(turn.logprobs)
        assert change * sign > 0


def test_on_policy_the_loss_is_the_mean_advantage_and_minibatches_do_not_change_the_gradient(
    tiny_model, rollouts
):
    trainers = [Trainer(tiny_model(), TrainerOptions(minibatch=size)) for size in (1, 4)]
    losses = [trainer.update(rollouts) for trainer in trainers]
    # Equal lengths, so advantages cancel.
    assert losses == pytest.approx([0.0, 0.0], abs=1e-5)
    for one, four in zip(*(t.model.parameters() for t in trainers), strict=True):
        assert torch.allclose(one.grad, four.grad, atol=1e-6)
    before = load(tiny_model()).parameters()
    changed = [not torch.equal(a, b) for a, b in zip(trainers[0].model.parameters(), before, strict=True)]
    assert all(changed)


def test_a_remembered_snapshot_keeps_its_weights_while_training_goes_on(tiny_model, rollouts):
    trainer = Trainer(tiny_model(), TrainerOptions(keep_snapshots=2))
    before = {name: t.clone() for name, t in trainer.weights["base"].items()}
    trainer.update(rollouts)
    trainer.remember("step-1")
    assert all(torch.equal(trainer.weights["base"][name], before[name]) for name in before)
    assert any(not torch.equal(trainer.weights["step-1"][name], before[name]) for name in before)
    trainer.remember("step-2")
    assert list(trainer.weights) == ["step-1", "step-2"]
    assert trainer.snapshot == "step-2"
