"""Router replay in a Hugging Face model: forced routes, their scores, and positions that keep the model's own."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from midstream.client.decode import SamplingMasks
from midstream.client.replay import OWN_ROUTE, RouterTap, mask_logits, pad_routes, router_scores

pytestmark = pytest.mark.fast

PROMPT = list(b"a prompt of some length, ")


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()


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


def test_padding_of_routes_is_own_route():
    padded = pad_routes([np.ones((5, 4, 2), np.int64), np.ones((7, 4, 2), np.int64)], 7)
    assert padded.shape == (2, 7, 4, 2)
    assert (padded[0, 5:] == OWN_ROUTE).all()
    assert (padded[0, :5] == 1).all()
    assert (padded[1] == 1).all()


def test_masked_logits_are_a_distribution_over_what_was_left_and_have_its_gradient():
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.5, 0.0, 1.0], [3.0, 1.0, 0.0]], requires_grad=True)
    masks = SamplingMasks(np.array([0, 2, 1], np.int32), np.array([0, 2, 2, 3]))
    found = (mask_logits(logits, masks) / 0.5).log_softmax(-1)
    assert torch.allclose(found[0, [0, 2]], torch.tensor([0.0, 4.0]).log_softmax(-1))
    assert torch.allclose(found[1], (logits[1] / 0.5).log_softmax(-1))
    assert found[2, 1] == 0
    (gradient,) = torch.autograd.grad(found[[0, 1, 2], [2, 0, 1]].sum(), logits)
    assert torch.isfinite(gradient).all()
    # What was not left is not moved, and a token that was alone moves nothing.
    assert gradient[0, 1] == 0
    assert (gradient[2] == 0).all()
    with pytest.raises(ValueError, match="3 masks for the logits of 2 tokens"):
        mask_logits(logits[:2], masks)
