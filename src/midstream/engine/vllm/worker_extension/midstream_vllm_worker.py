"""A worker extension of vLLM for CPUs (--worker-extension-cls): it packs reloaded experts for their kernel.

vLLM 0.32 packs the weights of unquantized experts for its CPU kernel when it loads a model, but not when `reload_weights`
replaces them. The kernel would then read the right numbers in the wrong order. Weights that a version packs by itself are
left alone.
"""

from __future__ import annotations

import importlib
from typing import Any

METHODS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"


class Worker:
    """The extension: importing its module is all it does."""


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


try:
    _pack_after_reload(importlib.import_module(METHODS).UnquantizedFusedMoEMethod)
except (ImportError, AttributeError) as error:
    # This is another version of vLLM. midstream finds out whether it reloads correctly.
    print(f"midstream: experts are not packed after a reload: {error}", flush=True)
