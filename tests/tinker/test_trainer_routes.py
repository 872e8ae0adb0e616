"""Routing matrices on training inputs: the given experts are taken, and gradients flow through them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_helpers import datum, gradients, logprobs, new_model, request, tensor, text, write_family

from midstream.core.config import EngineSettings
from midstream.core.types import GenerateRequest, SamplingParams
from midstream.engine.embedded.core import EngineCore
from midstream_tinker.trainer.model import TrainedModel
from midstream_tinker.trainer.types import Datum, LoraConfig, WorkFailed

Models = Callable[..., Path]
LINE = text("a line of text to be routed")
OTHER = text("short")


def own_routes(model: TrainedModel, data: Datum) -> np.ndarray:
    """[n, moe_layers, top_k], as a plain forward chooses them."""
    with torch.no_grad(), model.tap.forcing(None):
        model.module(input_ids=torch.tensor([data.tokens]), use_cache=False)
    return model.tap.taken.numpy()


def routed(data: Datum, routes: np.ndarray, dtype: str = "int64") -> Datum:
    return Datum(tokens=data.tokens, inputs={**data.inputs, "routing_matrix": tensor(routes, dtype)})


@pytest.fixture(params=["qwen3_moe", "mixtral", "olmoe", "qwen2_moe"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> TrainedModel:
    return new_model(write_family(tmp_path / "model", request.param, vocab_size=128))


@pytest.mark.parametrize("dtype", ["int64", "float32", "int32"])
def test_a_models_own_routes_give_its_own_logprobs(model: TrainedModel, dtype: str) -> None:
    plainly = model.forward_backward(request([LINE, OTHER], forward_only=True))
    replayed = [routed(one, own_routes(model, one), dtype) for one in (LINE, OTHER)]
    for got, expected in zip(
        logprobs(model.forward_backward(request(replayed, forward_only=True))), logprobs(plainly), strict=True
    ):
        assert np.allclose(got, expected, atol=1e-5)


def test_other_routes_are_taken_and_change_logprobs_and_gradients(model: TrainedModel) -> None:
    own = own_routes(model, LINE)
    experts = int(
        model.module.config.num_local_experts if hasattr(model.module.config, "num_local_experts") else 4
    )
    moved = (own + 1) % experts
    plainly = logprobs(model.forward_backward(request([LINE])))[0]
    before = gradients(model)
    model.optimizer.drop_gradients()
    replayed = logprobs(model.forward_backward(request([routed(LINE, moved)])))[0]
    assert np.array_equal(model.tap.taken.numpy(), moved)
    assert np.abs(plainly - replayed).mean() > 1e-3
    for name, gradient in gradients(model).items():
        if name.endswith("gate.weight"):
            assert gradient.abs().sum() > 0, name
            assert not torch.allclose(gradient, before[name]), name


def test_a_position_without_a_route_takes_its_own_and_batches_may_mix(model: TrainedModel) -> None:
    moved = (own_routes(model, LINE) + 1) % 4
    half = moved.copy()
    half[10:] = -1
    alone = logprobs(model.forward_backward(request([routed(LINE, half)], forward_only=True)))[0]
    whole = logprobs(model.forward_backward(request([routed(LINE, moved)], forward_only=True)))[0]
    mixed = logprobs(model.forward_backward(request([OTHER, routed(LINE, half)], forward_only=True)))
    free = logprobs(model.forward_backward(request([OTHER], forward_only=True)))[0]
    assert np.allclose(alone[:10], whole[:10], atol=1e-5)
    assert not np.allclose(alone[10:], whole[10:], atol=1e-5)
    assert np.allclose(mixed[1], alone, atol=1e-5)
    assert np.allclose(mixed[0], free, atol=1e-5)


def test_lora_models_replay_too(tiny_model: Models) -> None:
    model = new_model(tiny_model(), LoraConfig(rank=2))
    own = own_routes(model, LINE)
    plainly = logprobs(model.forward_backward(request([LINE], forward_only=True)))[0]
    replayed, moved = (
        logprobs(model.forward_backward(request([routed(LINE, routes)], forward_only=True)))[0]
        for routes in (own, (own + 1) % 8)
    )
    assert np.allclose(plainly, replayed, atol=1e-5)
    assert not np.allclose(plainly, moved, atol=1e-3)


def test_the_engines_routes_are_replayed_as_the_engine_took_them(tiny_model: Models) -> None:
    core = EngineCore(tiny_model(), EngineSettings(kv_cache_tokens=2048))
    prompt = tuple(b"what the engine is given")
    sampling = SamplingParams(max_tokens=12, seed=1)
    wanted = GenerateRequest(
        request_id="r", prompt=prompt, sampling=sampling, want_routes=True, prompt_records=len(prompt)
    )
    core.add(wanted)
    records = {"prompt": [], "tokens": []}
    while not core.idle:
        for _, event in core.step():
            records["prompt"].extend(event.prompt or ())
            records["tokens"].extend(event.tokens)
    answer = [record.token_id for record in records["tokens"]]
    # Each at the position before its token.
    passes = [*records["prompt"][1:], *records["tokens"]]
    routes = np.array([np.frombuffer(r.route, np.uint8).reshape(4, 2) for r in passes]).astype(np.int64)
    sequence = [*prompt, *answer]
    model = new_model(tiny_model())
    data = datum(sequence[:-1], sequence[1:])
    found = logprobs(model.forward_backward(request([routed(data, routes)], forward_only=True)))[0]
    assert np.array_equal(model.tap.taken.numpy(), routes)
    assert np.allclose(found[len(prompt) - 1 :], [r.logprob for r in records["tokens"]], atol=1e-4)


def changed(own: np.ndarray, value: float, at: tuple[int, ...]) -> np.ndarray:
    result = own.astype(np.float32)
    result[at] = value
    return result


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda own: own[:-1], r"has shape \[25, 4, 2\], expected \[26, 4, 2\]"),
        (lambda own: own[:, :3], r"has shape \[26, 3, 2\], expected \[26, 4, 2\]"),
        (lambda own: own[..., 0], r"has shape \[26, 4\]"),
        (lambda own: changed(own, 8, (3, 1, 0)), "names an expert that is not 0 to 7"),
        (lambda own: changed(own, -2, (3, 1, 0)), "names an expert that is not 0 to 7"),
        (lambda own: changed(own, 0.5, (3, 1, 0)), "not a whole one"),
        (lambda own: changed(own, -1, (3, 1, 0)), "mixes -1 with experts"),
        (lambda own: changed(own, own[3, 1, 1], (3, 1, 0)), "names an expert twice"),
    ],
)
def test_a_matrix_that_cannot_be_replayed_is_refused(
    tiny_model: Models, change: Callable[[np.ndarray], np.ndarray], says: str
) -> None:
    model = new_model(tiny_model())
    routes = change(own_routes(model, LINE))
    with pytest.raises(WorkFailed, match=r"data\[1\].loss_fn_inputs.routing_matrix: .*" + says):
        model.forward_backward(request([OTHER, routed(LINE, routes, "float32")]))


def test_a_dense_model_refuses_routes(tmp_path: Path) -> None:
    model = new_model(write_family(tmp_path / "model", "llama", vocab_size=128))
    assert model.base.info().moe_layers == 0
    with pytest.raises(WorkFailed, match="no MoE routers with a choice that can be replayed"):
        model.forward_backward(request([routed(LINE, np.zeros((26, 1, 1)))]))
