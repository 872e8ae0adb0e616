"""Every kind of decoder the engine claims, as tiny random models, against their own attention in a plain forward."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_helpers import GPU, needs_compiler, request, run
from families import FAMILIES, FUSED, SIZES, write_model
from transformers import AutoModelForCausalLM

from midstream.core.config import EngineSettings
from midstream.engine.embedded.attention import IMPLEMENTATION
from midstream.engine.embedded.core import EngineCore
from midstream.engine.embedded.loading import checked_decoder, disagreement
from midstream.engine.embedded.modules import ModuleDecoder, UnsupportedModel
from midstream_kernels.decoder import CpuDecoder

CHUNKED, WHOLE = 48, 1024
#: Family, kernels, device, tokens of a batch.
FORWARDS = [
    *(pytest.param(family, "torch", "cpu", CHUNKED, id=f"{family}-torch-cpu-chunked") for family in FAMILIES),
    # Prompts in one piece are the simpler case.
    *(
        pytest.param(
            family,
            "torch",
            "cpu",
            WHOLE,
            id=f"{family}-torch-cpu-whole",
            marks=() if family in ("qwen3-moe", "deepseek-v3") else pytest.mark.variant,
        )
        for family in FAMILIES
    ),
    *(
        pytest.param(family, kernels, device, size, id=f"{family}-{kernels}-{device}-{name}", marks=marks)
        for families, kernels, device, marks in (
            (FUSED, "native", "cpu", ()),
            (FAMILIES, "auto", "cuda", GPU),
        )
        for family in families
        for size, name in ((CHUNKED, "chunked"), (WHOLE, "whole"))
    ),
]


@pytest.mark.parametrize(("family", "kernels", "device", "batch_tokens"), FORWARDS)
def test_logprobs_and_routes_equal_a_plain_forward_cold_and_warm(
    family: str, kernels: Any, device: str, batch_tokens: int, tmp_path: Path
) -> None:
    needs_compiler(kernels)
    directory = write_model(family, tmp_path)
    settings = EngineSettings(
        max_batch_tokens=batch_tokens, max_running=32, kv_cache_tokens=8192, kernels=kernels, device=device
    )
    core = EngineCore(directory, settings)
    assert core.info().moe_layers == FAMILIES[family][2]
    plain = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    captured: list[torch.Tensor] = []
    for module in plain.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda m, i, output: captured.append(_chosen(output)))
    rng = random.Random(0)
    given = [[rng.randrange(128) for _ in range(rng.randrange(1, 100))] for _ in range(6)]
    for label in ("cold", "warm"):
        results = run(core, [request(f"{label}{i}", p, seed=i, max_tokens=12) for i, p in enumerate(given)])
        for i, prompt in enumerate(given):
            got = results[f"{label}{i}", 0]
            ids = prompt + [r.token_id for r in got.tokens]
            captured.clear()
            with torch.no_grad():
                logprobs = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
            for position, record in enumerate([*got.prompt, *got.tokens][1:], start=1):
                expected = logprobs[position - 1, ids[position]].item()
                assert record.logprob == pytest.approx(expected, abs=1e-4 if device == "cpu" else 1e-3)
                if captured:
                    route = torch.stack([c[position - 1] for c in captured]).numpy().astype(np.uint8)
                    assert sorted_rows(record.route, route.shape) == np.sort(route).tolist()
            assert label == "cold" or got.cached == len(prompt) // 16 * 16


def _chosen(output: Any) -> torch.Tensor:
    (chosen,) = [t for t in output if not t.is_floating_point()]
    return chosen.reshape(-1, chosen.shape[-1])


def sorted_rows(route: bytes | None, shape: tuple[int, ...]) -> list[list[int]]:
    """A route as sets: not every router orders the experts it chose."""
    assert route is not None
    rows: list[list[int]] = np.sort(np.frombuffer(route, dtype=np.uint8).reshape(shape)).tolist()
    return rows


def test_an_architecture_with_attention_we_do_not_know_is_refused(tmp_path: Path) -> None:
    """Here: a model whose attention ignores what it is given beyond a trick of its own."""
    module = AutoModelForCausalLM.from_pretrained(
        write_model("qwen2", tmp_path), attn_implementation=IMPLEMENTATION
    )
    for layer in module.model.layers:
        # As the plain forward reads it ...
        layer.self_attn.scaling = 3.0
        forward = layer.self_attn.forward

        def odd(*args: Any, attention: Any = layer.self_attn, original: Any = forward, **kwargs: Any) -> Any:
            # ... and as ours does.
            attention.scaling = 0.1 if "midstream_batch" in kwargs else 3.0
            return original(*args, **kwargs)

        layer.self_attn.forward = odd
    with pytest.raises(UnsupportedModel, match="Qwen2ForCausalLM: logits over the paged cache differ"):
        checked_decoder(module, EngineSettings(kv_cache_tokens=1024, kernels="torch"))


def test_a_fused_decoder_whose_numbers_are_not_the_models_own_does_not_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here: a module that scales its attention in a way the fused decoder does not see."""
    needs_compiler("native")
    module = AutoModelForCausalLM.from_pretrained(
        write_model("qwen3", tmp_path), attn_implementation=IMPLEMENTATION
    )
    for layer in module.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _module, _inputs, output: output * 3)
    with pytest.raises(
        UnsupportedModel, match="kernels = native, but its logits differ from the model's own"
    ):
        checked_decoder(module, EngineSettings(kernels="native"))
    assert isinstance(checked_decoder(module, EngineSettings()), ModuleDecoder)
    assert "the native kernels are not used" in caplog.text


def test_the_kernels_never_have_the_address_of_a_tensor_that_a_layer_no_longer_has() -> None:
    """They would read memory that is free for something else."""
    needs_compiler("native")
    config = transformers.Qwen3Config(**{**SIZES, "head_dim": 32})
    module = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION)
    layer = CpuDecoder(module.eval(), 512, threads=1, near_tie=0.0).layers[0]
    norm, weight = torch.ones(32), torch.clone(layer.out.weight)
    # input_norm, the four numbers of a map, and the norms of heads.
    assert replace(layer, q_norm=None).row == (*layer.row[:5], 0, *layer.row[6:])
    assert replace(layer, q_norm=norm).row == (*layer.row[:5], norm.data_ptr(), *layer.row[6:])
    out = replace(layer.out, weight=weight)
    assert out.row == (weight.data_ptr(), *layer.out.row[1:])
    assert out.row == replace(layer, out=out).row[8:12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [{"window": 8}, {"q_norm": None}, {"post_norm": torch.full((128,), 1.5)}])
def test_the_check_at_start_sees_a_mistake_in_a_model_that_has_learned_nothing(
    wrong: dict[str, Any], dtype: torch.dtype
) -> None:
    """Its distribution is nearly uniform whatever is computed, so that the divergence alone would say little."""
    needs_compiler("native")
    config = transformers.Qwen3Config(**{**SIZES, "head_dim": 32})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    for name, tensor in module.named_parameters():
        if name.endswith("q_norm.weight"):
            tensor.data.fill_(4.0)
    decoder = CpuDecoder(module.eval(), 512, threads=1, near_tie=0.0)
    assert disagreement(module, decoder) is None
    decoder.layers = [replace(layer, **wrong) for layer in decoder.layers]
    assert "where those spread by" in str(disagreement(module, decoder))


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gemma2", {}, "Gemma2ForCausalLM is not a family the kernels know"),
        ("qwen3", {"block_size": 24}, "block_size 24 is not a multiple of 16"),
    ],
)
def test_what_the_native_kernels_cannot_run_is_said_at_start(
    family: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        EngineCore(write_model(family, tmp_path), EngineSettings(kernels="native", **settings))


def test_a_rotary_embedding_that_depends_on_the_batch_is_refused(tmp_path: Path) -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    }
    config = transformers.LlamaConfig(**SIZES, rope_parameters=longrope)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM: a rotary embedding of type longrope"):
        EngineCore(tmp_path / "model", EngineSettings())
