"""Writes routes.json: `routed_experts` as vLLM itself makes and encodes them, beside what they mean.

    VENV_WITH_VLLM/bin/python tests/engine_vllm/data/make_routes.py

vLLM's own code does it but for the kernels (which need a GPU) and the step's boundaries: RoutedExpertsCapturer takes each
layer's choice and gives a step's rows, AuxOutputSchedulerConnector says where a request's rows begin and end, its output
processor's concatenation and numpy2base64 do the rest. Made with vLLM 0.32.0.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput
from vllm.model_executor.layers.fused_moe import routed_experts_capturer
from vllm.utils.serial_utils import numpy2base64

routed_experts_capturer.get_forward_context = lambda: SimpleNamespace(dp_metadata=None)


def capturer(layers: int, experts: int, top_k: int) -> Any:
    model = SimpleNamespace(
        get_total_num_hidden_layers=lambda: layers,
        get_num_experts=lambda: experts,
        get_num_experts_per_tok=lambda: top_k,
        hf_text_config=SimpleNamespace(model_type="made_up"),
    )
    parallel = SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1)
    config = SimpleNamespace(model_config=model, parallel_config=parallel)
    return routed_experts_capturer.RoutedExpertsCapturer(max_num_batched_tokens=64, vllm_config=config)


def sample(
    name: str,
    *,
    layers: int,
    moe: tuple[int, ...],
    experts: int,
    top_k: int,
    prompt: int,
    generated: int,
    start: int,
    **form: Any,
) -> dict[str, Any]:
    """form: `dtype`, `only_moe` or `fortran`, as other versions or kernels might send it."""
    draw = random.Random(name)
    # What each pass chose, by position, MoE layer by MoE layer: the truth that the file is about.
    chosen = [[draw.sample(range(experts), top_k) for _ in moe] for _ in range(prompt + generated)]
    capture, connector = capturer(layers, experts, top_k), AuxOutputSchedulerConnector()
    params = SimpleNamespace(routed_experts_prompt_start=start)
    request = SimpleNamespace(
        request_id="r",
        sampling_params=params,
        num_prompt_tokens=prompt,
        num_output_tokens=0,
        num_tokens=prompt,
        block_hashes=[],
        is_finished=lambda: False,
    )
    done, chunks, emit = 0, [], None
    while request.num_output_tokens < generated:
        step = SimpleNamespace(num_scheduled_tokens={"r": request.num_tokens - done})
        began = connector.build_connector_meta(step, {"r": request}).requests["r"]
        emit = began if emit is None else emit
        passed = chosen[done : request.num_tokens]
        for at, layer in enumerate(moe):
            ids = torch.tensor([row[at] for row in passed], dtype=torch.int32)
            capture.capture(layer, ids)
        rows = capture.snapshot_routing_data(len(passed)).numpy()
        first, done = done, request.num_tokens
        request.num_tokens += 1
        request.num_output_tokens += 1
        if emit <= done:
            told = AuxRequestOutput(emit, rows[emit - first :])
            emit = done
            taken = connector.take_output(request, {"r": told})
            if taken is not None:
                chunks.append(taken)
    array = np.concatenate(chunks, axis=0)
    array = array[:, list(moe)] if form.get("only_moe") else array
    array = array.astype(form.get("dtype", array.dtype))
    array = np.asfortranarray(array) if form.get("fortran") else np.ascontiguousarray(array)
    return {
        "name": name,
        "layers": layers,
        "moe_layers": moe,
        "experts": experts,
        "top_k": top_k,
        "prompt": prompt,
        "generated": generated,
        "start": start,
        "dtype": str(array.dtype),
        "shape": array.shape,
        "data": numpy2base64(array),
        # By position of the token that the pass scored: the pass was over the token before it.
        "routes": {position + 1: chosen[position] for position in range(start, prompt + generated - 1)},
    }


def main() -> None:
    small: dict[str, Any] = {
        "layers": 4,
        "moe": (0, 1, 2, 3),
        "experts": 8,
        "top_k": 2,
        "prompt": 6,
        "generated": 5,
    }
    dense: dict[str, Any] = {
        "layers": 6,
        "moe": (1, 2, 4),
        "experts": 256,
        "top_k": 4,
        "prompt": 7,
        "generated": 3,
    }
    many: dict[str, Any] = {
        "layers": 3,
        "moe": (1, 2),
        "experts": 300,
        "top_k": 3,
        "prompt": 5,
        "generated": 4,
    }
    samples = [
        sample("every layer, generated tokens only", **small, start=5),
        sample("every layer, all of the prompt", **small, start=0),
        sample("every layer, behind the prompt", **small, start=6),
        sample("one generated token", **(small | {"generated": 1}), start=5),
        sample("dense layers, all of the prompt", **dense, start=0),
        sample("dense layers, the last three of the prompt", **dense, start=3),
        sample("300 experts", **many, start=4),
        sample("300 experts, all of the prompt", **many, start=0),
        sample("int32", **dense, start=6, dtype=np.int32),
        sample("int32, 300 experts", **many, start=4, dtype=np.int32),
        sample("only the layers with experts", **dense, start=6, only_moe=True),
        sample("Fortran order", **dense, start=0, fortran=True),
    ]
    target = Path(__file__).with_name("routes.json")
    target.write_text("[\n" + ",\n".join(json.dumps(s) for s in samples) + "\n]\n")


if __name__ == "__main__":
    main()
