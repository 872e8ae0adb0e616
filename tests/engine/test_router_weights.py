"""Router weights in token records against what the experts of a plain Hugging Face forward are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import Collected, needs_compiler, request, run
from families import FUSED, write_model
from msgspec.structs import replace
from tiers import slow
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.core.types import TokenRecord
from midstream.engine.embedded.core import EngineCore

PROMPT = [*range(7, 55)]


@pytest.fixture(params=["native", slow("torch")])
def kernels(request: pytest.FixtureRequest) -> str:
    needs_compiler(request.param)
    return str(request.param)


def settings(kernels: Any, **more: Any) -> EngineSettings:
    return EngineSettings(kernels=kernels, kv_cache_tokens=2048, **{"router_weights": True, **more})


def asked(name: str, prompt: Sequence[int], **more: Any) -> Any:
    return replace(request(name, prompt, **more), want_router_weights=True)


@contextmanager
def given_to_experts(module: Any, given: list[torch.Tensor]) -> Iterator[None]:
    """Adds what the experts of each layer multiply by, [tokens, top_k]."""
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs: given.append(inputs[2]))
        for part in module.modules()
        if type(part).__name__.endswith("Experts")
    ]
    yield
    for hook in hooks:
        hook.remove()


def expected_of(directory: Path, tokens: Sequence[int]) -> np.ndarray:
    """[tokens, moe_layers, top_k] float32."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    given: list[torch.Tensor] = []
    with torch.no_grad(), given_to_experts(module, given):
        module(torch.tensor([list(tokens)]))
    weights: np.ndarray = torch.stack(given, dim=1).numpy()
    return weights


def weights_of(record: TokenRecord) -> np.ndarray:
    assert record.router_weights is not None
    return np.frombuffer(record.router_weights, "<f4")


def assert_expected(directory: Path, prompt: Sequence[int], got: Collected) -> None:
    tokens = [*prompt, *(record.token_id for record in got.tokens)]
    expected = expected_of(directory, tokens)
    records = [*got.prompt, *got.tokens]
    assert records[0].router_weights is None
    for at, record in enumerate(records[1:]):
        assert weights_of(record) == pytest.approx(expected[at].reshape(-1), abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", slow("deepseek-v3"), slow("gpt-oss")])
def test_each_token_has_the_weights_that_its_experts_were_given(
    family: str, kernels: str, tmp_path: Path
) -> None:
    if kernels == "native" and family not in FUSED:
        kernels = "auto"
    model = write_model(family, tmp_path)
    core = EngineCore(model, settings(kernels, dtype="float32"))
    cold = run(core, [asked("cold", PROMPT)])["cold", 0]
    assert_expected(model, PROMPT, cold)
    # From the cache, and with the tokens that the first one generated.
    longer = [*PROMPT, *(record.token_id for record in cold.tokens), 9, 10, 11, 12, 13, 14, 15, 16, 17]
    warm = run(core, [asked("warm", longer)])["warm", 0]
    assert warm.cached == 48
    assert_expected(model, longer, warm)
    assert [r.router_weights for r in warm.prompt[:48]] == [r.router_weights for r in cold.prompt]


def test_models_that_share_a_step_keep_their_own_weights(
    kernels: str, tiny_model: Callable[..., Path]
) -> None:
    base, other = tiny_model(), tiny_model(seed=1)
    core = EngineCore(base, settings(kernels, dtype="float32"))
    core.retain("", ["base", "one"])
    core.set_staged(core.stage(other), "")
    core.commit("one", "")
    both = [
        replace(asked(name, PROMPT, salt=name.encode()), snapshot=name, policy="") for name in ("base", "one")
    ]
    found = run(core, both)
    assert_expected(base, PROMPT, found["base", 0])
    assert_expected(other, PROMPT, found["one", 0])


def test_who_does_not_ask_gets_none_and_an_engine_without_the_setting_says_so(
    kernels: str, tiny_model: Callable[..., Path]
) -> None:
    core = EngineCore(tiny_model(), settings(kernels))
    assert core.info().card.has("router_weights")
    got = run(core, [request("r", PROMPT)])["r", 0]
    assert {record.router_weights for record in (*got.prompt, *got.tokens)} == {None}
    plain = EngineCore(tiny_model(), settings(kernels, router_weights=False))
    card = plain.info().card
    assert not card.has("router_weights")
    assert card.why["router_weights"] == "the setting embedded.router_weights is off"
    got = run(plain, [asked("r", PROMPT)])["r", 0]
    assert {record.router_weights for record in (*got.prompt, *got.tokens)} == {None}


def test_a_dense_model_has_none(kernels: str, tmp_path: Path) -> None:
    core = EngineCore(write_model("llama", tmp_path), settings(kernels))
    got = run(core, [replace(asked("r", PROMPT), want_routes=False)])["r", 0]
    assert {record.router_weights for record in (*got.prompt, *got.tokens)} == {None}
