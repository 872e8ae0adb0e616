"""Router replay: exact on a model's own routes, different on others, and true to the snapshot of every position."""

import pytest
import torch
from demo_helpers import load, make_turn

from midstream.client.replay import OWN_ROUTE, RouterTap, pad_routes, router_scores
from midstream.demo.records import Turn
from midstream.demo.replay import Rescorer, differing_routes, k3, measure_mismatch, token_logprobs

pytestmark = pytest.mark.fast

PROMPT = list(b"a prompt of some length, ")
TOKENS = list(b"and an answer")


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model())


@pytest.fixture(scope="module")
def other(tiny_model):
    return load(tiny_model(seed=1))


@pytest.fixture(scope="module")
def weights(model, other):
    return {"base": model.state_dict(), "next": other.state_dict()}


@pytest.fixture
def rescorer(tiny_model):
    return Rescorer(load(tiny_model()))


def rerouted(turn: Turn) -> Turn:
    """The same turn with every expert index moved on by one."""
    return Turn(
        **{**vars(turn), "routes": (turn.routes + 1) % 8, "prompt_routes": (turn.prompt_routes + 1) % 8}
    )


def test_replaying_a_models_own_routes_reproduces_its_logprobs_exactly(model, weights, rescorer):
    turn = make_turn(model, PROMPT, TOKENS)
    own, replayed = (rescorer.score([turn], weights, replay=replay)[0] for replay in (False, True))
    assert torch.equal(own.logprobs, replayed.logprobs)
    assert torch.equal(own.routes, replayed.routes)
    assert torch.allclose(own.logprobs, torch.tensor(turn.logprobs), atol=1e-5)


def test_replaying_other_routes_changes_the_logprobs_and_takes_those_routes(model, weights, rescorer):
    turn = rerouted(make_turn(model, PROMPT, TOKENS))
    own, replayed = (rescorer.score([turn], weights, replay=replay)[0] for replay in (False, True))
    assert torch.equal(replayed.routes, torch.from_numpy(turn.routes))
    assert (own.logprobs - replayed.logprobs).abs().min() > 0
    assert (own.logprobs - replayed.logprobs).abs().mean() > 0.05


def test_turns_of_different_lengths_score_the_same_in_a_batch_as_alone(model, weights, rescorer):
    turns = [make_turn(model, PROMPT, TOKENS), make_turn(model, PROMPT[:9], TOKENS[:4])]
    together = rescorer.score(turns, weights, replay=True)
    for turn, scored in zip(turns, together, strict=True):
        assert scored.logprobs.shape == (len(turn.tokens),)
        assert torch.allclose(scored.logprobs, torch.tensor(turn.logprobs), atol=1e-5)
        assert torch.equal(scored.routes, torch.from_numpy(turn.routes))


def test_a_turn_that_crossed_a_swap_is_scored_by_each_snapshot_over_the_kv_of_the_earlier_one(
    model, other, weights, rescorer
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
    scored = rescorer.score([turn], weights, replay=False)[0]
    assert torch.allclose(scored.logprobs, expected, atol=1e-5)
    assert torch.allclose(scored.logprobs[:5], torch.tensor(turn.logprobs[:5]), atol=1e-5)
    assert (scored.logprobs[5:] - torch.tensor(turn.logprobs[5:])).abs().max() > 0.05


def test_scores_come_back_in_the_order_of_the_turns(model, weights, rescorer):
    labels = [None, ["base"] * 5 + ["next"] * 8, ["next"] * 13, None]
    turns = [make_turn(model, PROMPT[: 10 + i], TOKENS, label) for i, label in enumerate(labels)]
    together = rescorer.score(turns, weights, replay=False)
    for turn, scored in zip(turns, together, strict=True):
        alone = rescorer.score([turn], weights, replay=False)[0]
        assert torch.allclose(scored.logprobs, alone.logprobs, atol=1e-5)


def test_segments_name_the_snapshot_of_every_input_position_in_order(model):
    turn = make_turn(model, PROMPT, TOKENS, ["a"] * 3 + ["b"] * 1 + ["c"] * 9)
    first = len(PROMPT) - 1
    assert turn.segments() == [
        ("a", 0, first + 3),
        ("b", first + 3, first + 4),
        ("c", first + 4, first + 13),
    ]
    assert turn.crossed_swap


def test_forced_scores_are_the_routers_own_probabilities_of_the_forced_experts():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    scores = router_scores(logits, torch.tensor([[0, 2]]), normalise=True)
    expected = torch.tensor([[1.0, torch.e**2]]) / (1 + torch.e**2)
    assert torch.allclose(scores, expected)
    plain = router_scores(logits, torch.tensor([[0, 2]]), normalise=False)
    assert torch.allclose(plain, logits.softmax(-1)[:, [0, 2]])


def test_positions_without_a_route_take_the_models_own(model):
    tap = RouterTap(model)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        with tap.forcing(None):
            model(ids)
        own = tap.taken
        forced = (own + 1) % 8
        forced[5:] = OWN_ROUTE
        with tap.forcing(forced):
            model(ids)
    assert torch.equal(tap.taken[:5], (own[:5] + 1) % 8)
    assert (tap.taken >= 0).all()
    # The first layer's inputs do not depend on routes.
    assert torch.equal(tap.taken[5:, 0], own[5:, 0])


def test_padding_of_routes_is_own_route(model):
    turn = make_turn(model, PROMPT, TOKENS)
    padded = pad_routes([turn.input_routes], len(turn.sequence) + 2)
    assert padded.shape == (1, len(turn.sequence) + 2, 4, 2)
    assert (padded[0, len(turn.sequence) - 1 :] == OWN_ROUTE).all()
    assert (padded[0, : len(turn.sequence) - 1] >= 0).all()


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


def test_routes_differ_by_set_not_by_order():
    left = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    right = torch.tensor([[[1, 0], [2, 4]], [[4, 5], [7, 6]]])
    assert differing_routes(left, right).tolist() == [[False, True], [False, False]]


def test_replay_removes_the_mismatch_that_routes_cause(model, weights, rescorer):
    """Rollouts sampled on forced foreign routes: the trainer's own routes disagree, the replayed ones agree."""
    foreign = rerouted(make_turn(model, PROMPT, TOKENS))
    logprobs = rescorer.score([foreign], weights, replay=True)[0].logprobs
    turn = Turn(**{**vars(foreign), "logprobs": tuple(logprobs.tolist())})
    mismatch = measure_mismatch(rescorer, [turn], weights)
    assert mismatch.kl_replayed_routes < 1e-9
    assert mismatch.kl_own_routes > 1e-3
    assert mismatch.route_diff_share == 1.0
    assert 0.9 < mismatch.route_layer_diff_share <= 1.0
