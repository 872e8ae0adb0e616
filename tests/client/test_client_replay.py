"""Router replay in a Hugging Face model: forced routes, their scores, and positions that keep the model's own."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from midstream.client.replay import OWN_ROUTE, RouterTap, pad_routes, router_scores

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
