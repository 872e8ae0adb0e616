"""Inside the workers of vLLM for CPUs (--worker-extension-cls): reloaded experts get the layout that their kernel reads.

vLLM 0.32 packs the weights of unquantized experts for its CPU kernel when a model is loaded, but not when `reload_weights` puts
others in their place: the kernel would read right numbers in the wrong order. What a version packs itself is left alone.
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
        if self.moe_kernel is None:  # the first time vLLM packs
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
except (
    ImportError,
    AttributeError,
) as error:  # another version: midstream finds out whether it reloads rightly
    print(f"midstream: experts are not packed after a reload: {error}", flush=True)
