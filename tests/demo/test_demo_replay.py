"""Router replay: exact on a model's own routes, different on others, and true to the snapshot of every position."""

import dataclasses

import numpy as np
import pytest
import torch
from demo_helpers import load, make_rollout, make_turn
from grpo import Trainer, k3, token_logprobs

from midstream.client.decode import SamplingMasks

pytestmark = pytest.mark.fast

PROMPT = list(b"a prompt of some length, ")
TOKENS = list(b"and an answer")


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model())


@pytest.fixture(scope="module")
def other(tiny_model):
    return load(tiny_model(seed=1))


@pytest.fixture
def trainer(tiny_model, other):
    """Its snapshots are "base", and "next" with the weights of `other`."""
    made = Trainer(tiny_model(), 1e-3)
    made.model.load_state_dict(other.state_dict())
    made.remember("next")
    return made


def rerouted(turn):
    """The same turn with every expert index moved on by one."""
    return dataclasses.replace(turn, routes=(turn.routes + 1) % 8)


def test_replaying_a_models_own_routes_reproduces_its_logprobs_exactly(model, trainer):
    turn = make_turn(model, PROMPT, TOKENS)
    own, replayed = (trainer.score([turn], replay=replay)[0] for replay in (False, True))
    assert torch.equal(own[0], replayed[0])
    assert torch.equal(own.routes, replayed.routes)
    assert torch.allclose(own[0], torch.tensor(turn.logprobs), atol=1e-5)


def test_replaying_other_routes_changes_the_logprobs_and_takes_those_routes(model, trainer):
    turn = rerouted(make_turn(model, PROMPT, TOKENS))
    own, replayed = (trainer.score([turn], replay=replay)[0] for replay in (False, True))
    assert torch.equal(replayed.routes, torch.from_numpy(turn.routes[turn.span]))
    assert (own[0] - replayed[0]).abs().min() > 0
    assert (own[0] - replayed[0]).abs().mean() > 0.05


def test_turns_of_different_lengths_score_the_same_in_a_batch_as_alone(model, trainer):
    turns = [make_turn(model, PROMPT, TOKENS), make_turn(model, PROMPT[:9], TOKENS[:4])]
    together = trainer.score(turns, replay=True)
    for turn, (scored, _, routes) in zip(turns, together, strict=True):
        assert scored.shape == (len(turn.tokens),)
        assert torch.allclose(scored, torch.tensor(turn.logprobs), atol=1e-5)
        assert torch.equal(routes, torch.from_numpy(turn.routes[turn.span]))


def test_a_turn_that_crossed_a_swap_is_scored_by_each_snapshot_over_the_kv_of_the_earlier_one(
    model, other, trainer
):
    labels = ["base"] * 5 + ["next"] * 8
    turn = make_turn(model, PROMPT, TOKENS, labels)
    ids = torch.tensor([turn.sequence])
    # The first input position whose pass the new snapshot made.
    boundary = len(PROMPT) - 1 + 5
    with torch.no_grad():
        before = model(ids[:, :boundary], use_cache=True)
        after = other(ids[:, boundary:-1], past_key_values=before.past_key_values)
    expected = torch.cat(
        [
            token_logprobs(before.logits, ids[:, 1 : boundary + 1])[0],
            token_logprobs(after.logits, ids[:, boundary + 1 :])[0],
        ]
    )[len(PROMPT) - 1 :]
    scored = trainer.score([turn], replay=False)[0].plain
    assert torch.allclose(scored, expected, atol=1e-5)
    assert torch.allclose(scored[:5], torch.tensor(turn.logprobs[:5]), atol=1e-5)
    assert (scored[5:] - torch.tensor(turn.logprobs[5:])).abs().max() > 0.05


def test_scores_come_back_in_the_order_of_the_turns(model, trainer):
    labels = [None, ["base"] * 5 + ["next"] * 8, ["next"] * 13, None]
    turns = [make_turn(model, PROMPT[: 10 + i], TOKENS, label) for i, label in enumerate(labels)]
    together = trainer.score(turns, replay=False)
    for turn, scored in zip(turns, together, strict=True):
        alone = trainer.score([turn], replay=False)[0]
        assert torch.allclose(scored[0], alone[0], atol=1e-5)


def test_pieces_name_the_snapshot_of_every_input_position_in_order(model):
    turn = make_turn(model, PROMPT, TOKENS, ["a"] * 3 + ["b"] * 1 + ["c"] * 9)
    first = len(PROMPT) - 1
    assert turn.pieces == [("a", 0), ("b", first + 3), ("c", first + 4)]


def test_k3_is_zero_on_agreement_and_matches_the_formula():
    trainer, rollout = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.0, -1.5, -1.0])
    expected = [0.0, torch.e**-0.5 - 1 + 0.5, torch.e**0.5 - 1 - 0.5]
    assert k3(trainer, rollout).tolist() == pytest.approx(expected, abs=1e-12)


def test_k3_estimates_the_divergence_of_the_rollout_distribution_from_the_trainers():
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(-1)
    q = (p + 0.3 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum().item()
    tokens = torch.multinomial(p.exp(), 200_000, replacement=True, generator=generator)
    assert k3(q[tokens], p[tokens]).mean().item() == pytest.approx(exact, rel=0.05)


def test_routes_differ_by_set_not_by_order(model, trainer):
    turn = make_turn(model, PROMPT, TOKENS)
    swapped = turn.routes[..., ::-1].copy()
    swapped[turn.span.start + 3, 1] = (swapped[turn.span.start + 3, 1] + 1) % 8
    differ = trainer.mismatch([make_rollout((dataclasses.replace(turn, routes=swapped),))]).differ
    assert differ.tolist() == [number == 3 for number in range(len(TOKENS))]


def test_replay_removes_the_mismatch_that_routes_cause(model, trainer):
    """Rollouts sampled on forced foreign routes: the trainer's own routes disagree, the replayed ones agree."""
    foreign = rerouted(make_turn(model, PROMPT, TOKENS))
    logprobs = trainer.score([foreign], replay=True)[0].plain
    turn = dataclasses.replace(foreign, logprobs=logprobs.tolist())
    found = trainer.mismatch([make_rollout((turn,))])
    assert found.both.mean() < 1e-9
    assert found.masks.mean() > 1e-3
    assert found.differ.all()


def test_replay_removes_the_mismatch_that_masks_cause_and_a_token_alone_has_none(model, trainer):
    """Each token was drawn from itself and others, but for two that were alone and one that was drawn from all."""
    turn = make_turn(model, PROMPT, TOKENS)
    rows = [sorted({token, 3, 200}) for token in TOKENS]
    rows[1], rows[4], rows[7] = [TOKENS[1]], [], [TOKENS[7]]
    ids = torch.tensor([turn.sequence[:-1]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, turn.span]
    sampled = [
        (row[kept or slice(None)].log_softmax(-1)[kept.index(token) if kept else token]).item()
        for row, kept, token in zip(logits, rows, TOKENS, strict=True)
    ]
    flat = np.array([token for row in rows for token in row], np.int32)
    masks = SamplingMasks(flat, np.cumsum([0, *map(len, rows)]))
    drawn = dataclasses.replace(turn, logprobs=sampled, masks=masks)
    found = trainer.mismatch([make_rollout((drawn,))])
    assert found.both.max() < 1e-9
    assert found.both[[1, 7]].tolist() == [0.0, 0.0]
    assert found.routes.mean() > 1e-3
    assert torch.allclose(found.masks, found.both, atol=1e-9)
    assert found.routes[4] < 1e-9
