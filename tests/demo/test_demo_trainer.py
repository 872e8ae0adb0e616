"""The trainer: advantages within groups, the clipped loss, and updates that prefer what was rewarded."""

import dataclasses

import pytest
import torch
from demo_helpers import load, make_rollout, make_turn
from grpo import KEPT_SNAPSHOTS, Trainer, advantages_of, clipped_loss

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


def test_advantages_compare_a_turn_with_the_same_turn_of_its_group(rollouts):
    good, poor = rollouts[:2]
    assert torch.allclose(advantages_of([good, poor]), torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
    shifted = [with_rewards(good, 9.0, 3.0), with_rewards(poor, 10.0, 3.0)]
    assert torch.allclose(advantages_of(shifted), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))


def test_a_group_that_scored_the_same_has_no_advantage(rollouts):
    same = [with_rewards(r, 0.7, 0.7) for r in rollouts[:2]]
    assert torch.equal(advantages_of(same), torch.zeros(2, 2))


def test_the_loss_is_pessimistic_about_ratios_outside_the_clip():
    ratio = torch.tensor([2.0, 0.5, 2.0, 0.5, 1.1])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    loss = clipped_loss(ratio.log(), torch.zeros(5), advantage)
    assert loss.tolist() == pytest.approx([-1.4, -0.5, 2.0, 0.8, -1.1])


def test_an_update_raises_what_was_rewarded_and_lowers_the_rest(tiny_model, rollouts):
    trainer = Trainer(tiny_model(), 1e-3)
    trainer.update(rollouts)
    trainer.remember("step-1")
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    relabelled = [dataclasses.replace(t, snapshots=["step-1"] * len(t.tokens)) for t in turns]
    after = trainer.score(relabelled, replay=True)
    signs = [
        sign for group in (rollouts[:2], rollouts[2:]) for sign in advantages_of(group).flatten().tolist()
    ]
    for turn, (logprobs, *_), sign in zip(turns, after, signs, strict=True):
        assert (logprobs.sum().item() - sum(turn.logprobs)) * sign > 0


def test_each_group_adds_its_own_part_to_the_gradient(tiny_model, rollouts):
    """Both have as many tokens, so the whole gradient is the mean of theirs. None is long enough to be clipped."""
    trainers = [Trainer(tiny_model(), 1e-3) for _ in range(3)]
    for trainer, batch in zip(trainers, (rollouts, rollouts[:2], rollouts[2:]), strict=True):
        trainer.update(batch)
    whole, one, two = ([p.grad for p in trainer.model.parameters()] for trainer in trainers)
    assert all(torch.allclose(a, (b + c) / 2, atol=1e-6) for a, b, c in zip(whole, one, two, strict=True))


def test_a_remembered_snapshot_keeps_its_weights_while_training_goes_on(tiny_model, rollouts):
    turn = rollouts[0].turns[0]
    trainer = Trainer(tiny_model(), 1e-3)
    before = trainer.score([turn], replay=True)[0][0]
    trainer.update(rollouts)
    trainer.remember("step-1")
    assert torch.equal(trainer.score([turn], replay=True)[0][0], before)
    newer = dataclasses.replace(turn, snapshots=["step-1"] * len(turn.tokens))
    assert not torch.equal(trainer.score([newer], replay=True)[0][0], before)
    for number in range(KEPT_SNAPSHOTS):
        trainer.remember(f"later-{number}")
    with pytest.raises(KeyError):
        trainer.score([turn], replay=True)
