"""A worker extension of vLLM (--worker-extension-cls). It hooks the sampler, stages weights, and mends four defects on CPUs.

midstream_vllm_sampler.py and midstream_vllm_routes.py have hooks, and midstream_vllm_staged.py the staging, for any device. The
defects are of vLLM 0.32.

vLLM packs the weights of unquantized experts for its CPU kernel when it loads a model, but not when `reload_weights`
replaces them. The kernel would then read the right numbers in the wrong order. Weights that a version packs by itself are
left alone.

An output layer that is tied to the embeddings has packed weights of its own. A reload brings it no tensor, so vLLM leaves these
as they were, and would compute new weights with an old output layer. Here such a layer is packed again after every reload.

In a batch, a row without an adapter has the adapter index -1. vLLM's CPU kernels for LoRA index with it, and so give such a
row the adapter of the last slot. Here those rows get zeros from the first of the two products, so the second adds nothing.

For log-probabilities of a prompt the output layer has a row for each of its tokens, and vLLM has an adapter index for each
request of the batch. Its CPU kernels fail there, and the engine ends. Here the output layer's adapter is left out of such a
pass. midstream serves no adapter of the output layer, so nothing is lost.
"""

from __future__ import annotations

import importlib
from typing import Any

SAMPLER_HOOK, DIGEST, STAGED = "midstream_vllm_sampler", "midstream_vllm_digest", "midstream_vllm_staged"
ROUTES = "midstream_vllm_routes"
METHODS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
LORA_OPS = "vllm.lora.ops.torch_ops.lora_ops"
LORA_KERNELS = "vllm.lora.punica_wrapper.punica_cpu"


class Worker:
    """The extension. Importing its module does most of what it does."""

    def midstream_one_number(self: Any) -> str:
        """Why this worker returns one log-probability per token; empty if it returns both."""
        return str(importlib.import_module(SAMPLER_HOOK).why_not(self.model_runner))

    def midstream_no_routes(self: Any, weights: bool) -> str:
        """Why this worker does not say which experts computed a token, or with which weights; empty if it does."""
        return str(importlib.import_module(ROUTES).why_not(self.model_runner, weights=weights))

    def midstream_dtype(self: Any) -> str:
        """Of the weights, as midstream's thresholds of near ties are."""
        return str(self.model_config.dtype)

    def midstream_seed(self: Any) -> str:
        """Of the generator from which this worker draws tokens."""
        return str(self.model_config.seed)

    def midstream_digest(self: Any, begin: bool, seconds: float) -> dict[str, Any] | None:
        """Read weights for about so long, from the first one if it is to begin. None: not all have been read."""
        if begin:
            self.midstream_reading = importlib.import_module(DIGEST).WeightsDigest(self.get_model())
        reading = self.midstream_reading
        found: dict[str, Any] | None = None if reading is None else reading.go_on(seconds)
        return found

    def midstream_weights(self: Any, do: str, **arguments: Any) -> Any:
        """Stage weights beside those that serve, look how far that is, switch to them, or drop them."""
        if not hasattr(self, "midstream_staged"):
            self.midstream_staged = importlib.import_module(STAGED).WeightStage(self)
        if do == "switch":
            # A reading would keep the memory of what serves now. Nobody asks it for more.
            self.midstream_reading = None
        return getattr(self.midstream_staged, do)(**arguments)


def _pack_after_reload(methods: type[Any]) -> None:
    set_up = methods._setup_kernel

    def set_up_and_pack(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        if self.moe_kernel is None:
            # The first time, vLLM packs them itself.
            set_up(self, layer, *args, **kwargs)
            return
        experts, packed = self.moe_kernel.fused_experts, []
        pack = experts.process_weights_after_loading

        def noticed(layer: Any) -> None:
            packed.append(layer)
            pack(layer)

        experts.process_weights_after_loading = noticed
        try:
            set_up(self, layer, *args, **kwargs)
        finally:
            del experts.process_weights_after_loading
        if not packed:
            pack(layer)

    methods._setup_kernel = set_up_and_pack


def _pack_tied_after_reload(layerwise: Any) -> None:
    finalize = layerwise.finalize_layerwise_processing

    def finalize_and_pack(model: Any, *args: Any, **kwargs: Any) -> Any:
        result = finalize(model, *args, **kwargs)
        seen: set[int] = set()
        for layer in model.modules():
            weight = layer._parameters.get("weight")
            if weight is None:
                continue
            if id(weight) in seen and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
            seen.add(id(weight))
        return result

    layerwise.finalize_layerwise_processing = finalize_and_pack


def _spare_rows_without_adapter(*modules: Any) -> None:
    """modules: all that call bgmv_shrink by their own name for it."""
    shrink = modules[0].bgmv_shrink

    def spare(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0

    for module in modules:
        module.bgmv_shrink = spare


def _leave_out_rows_of_prompts(wrapper: type[Any]) -> None:
    add = wrapper.add_lora_logits

    def add_where_rows_are_requests(self: Any, y: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        if x.view(-1, x.shape[-1]).shape[0] == self.sampler_indices.shape[0]:
            add(self, y, x, *args, **kwargs)

    wrapper.add_lora_logits = add_where_rows_are_requests


def _mend_cpu() -> None:
    try:
        _pack_after_reload(importlib.import_module(METHODS).UnquantizedFusedMoEMethod)
    except (ImportError, AttributeError) as error:
        # This is another version of vLLM. midstream finds out whether it reloads correctly.
        print(f"midstream: experts are not packed after a reload: {error}", flush=True)
    try:
        _pack_tied_after_reload(importlib.import_module(LAYERWISE))
    except (ImportError, AttributeError) as error:
        print(f"midstream: tied output layers are not packed after a reload: {error}", flush=True)
    try:
        kernels = importlib.import_module(LORA_KERNELS)
        _spare_rows_without_adapter(importlib.import_module(LORA_OPS), kernels)
        _leave_out_rows_of_prompts(kernels.PunicaWrapperCPU)
    except (ImportError, AttributeError) as error:
        # midstream finds out here, too, whether the numbers are right.
        print(f"midstream: vLLM's kernels for LoRA are as they were: {error}", flush=True)


def install() -> None:
    try:
        platform = importlib.import_module("vllm.platforms").current_platform
    except ImportError as error:
        print(f"midstream: there is no vLLM here: {error}", flush=True)
        return
    if platform.is_cpu():
        _mend_cpu()
    importlib.import_module(SAMPLER_HOOK).install()


install()
