"""The experts that computed each token: from vLLM's routers to its scheduler, and from there to the token's answer.

vLLM's own routes (--enable-return-routed-experts) need its newer model runner. Its tokens have one log-probability, and their
routes come at the end of a choice. Here vLLM's own class notes in the older runner what the routers of a step chose. The rows
that a request asks for (midstream_vllm_numbers.py) travel with its tokens, as masks do (midstream_vllm_masks.py).

Always holds: a token has the row of the pass that gave its logits. A row that nobody wrote is not sent.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

CAPTURER = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
#: What no router chooses.
UNWRITTEN = -1
numbers, masks = map(importlib.import_module, ("midstream_vllm_numbers", "midstream_vllm_masks"))
#: With these, no worker has the rows of all layers and tokens in the order of the batch.
SPLIT = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


def hook(runner: type[Any]) -> None:
    """Raises AttributeError for a class that it does not know."""
    initialize, sample_tokens = runner.initialize_kv_cache, runner.sample_tokens

    def initialize_and_watch(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The model is loaded, and no graph has captured it.
        if self.midstream_watched is None:
            self.midstream_watched = watched(self)
        return initialize(self, *args, **kwargs)

    def sample_tokens_with_routes(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = taken(self)
        answer = sample_tokens(self, *args, **kwargs)
        if found:
            masks.put(answer, found)
        return answer

    runner.midstream_watched = runner.midstream_routed = None
    runner.initialize_kv_cache, runner.sample_tokens = initialize_and_watch, sample_tokens_with_routes


def watched(runner: Any) -> Any:
    """vLLM's notes of what the routers of a step choose; a text that says why there are none."""
    parallel = runner.vllm_config.parallel_config
    for name in SPLIT:
        if getattr(parallel, name, 1) > 1:
            return f"it runs with {name} above 1"
    if getattr(parallel, "enable_dbo", False):
        return "it computes a step in two halves (--enable-dbo)"
    if runner.speculative_config is not None:
        return "it decodes speculatively"
    try:
        module = importlib.import_module(CAPTURER)
        config = runner.vllm_config
        capturer = module.RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        capturer.device_buffer.fill_(UNWRITTEN)
        module.bind_routed_experts_capturer(runner.get_model(), capturer)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"vLLM does not note what its routers choose: {error}"
    return capturer


def why_not(runner: Any) -> str:
    """Why its tokens have no routes; empty if they have."""
    found = getattr(runner, "midstream_watched", None)
    if found is None:
        return (
            "its model runner is not the one that midstream's worker extension knows; with VLLM_USE_V2_MODEL_RUNNER=0 in "
            "vllm.env it is"
        )
    return found if isinstance(found, str) else ""


@torch.inference_mode()
def taken(runner: Any) -> dict[str, np.ndarray]:
    """By request, the rows of this step that go with its token."""
    state = runner.execute_model_state
    if state is None or runner.midstream_watched is None or isinstance(runner.midstream_watched, str):
        return {}
    asked = _asking(runner)
    scheduled = state.scheduler_output.num_scheduled_tokens if asked else {}
    spans = []
    for place, name, first in asked:
        request, count = runner.requests[name], scheduled[name]
        begin, end = request.num_computed_tokens, request.num_computed_tokens + count
        later = end > request.num_prompt_tokens
        wanted = end - 1 if later else max(first, begin)
        if wanted < end:
            spans.append((name, wanted, int(runner.query_start_loc.np[place]) + wanted - begin, end - wanted))
    if not spans:
        return {}
    at = np.concatenate([np.arange(offset, offset + count) for _, _, offset, count in spans])
    buffer = runner.midstream_watched.device_buffer
    rows = buffer[torch.from_numpy(at).to(buffer.device)].cpu().numpy()
    kind = np.dtype(runner.midstream_watched.output_dtype_name)
    pieces = np.split(rows, np.cumsum([count for *_, count in spans])[:-1])
    found = {}
    for (name, wanted, *_), piece in zip(spans, pieces, strict=True):
        if (whole := _joined(runner.requests[name], wanted, piece)) is not None:
            found[name] = pack(*whole, kind)
    return found


def _asking(runner: Any) -> Sequence[tuple[int, str, int]]:
    """The place and the name of each request of the batch that wants rows, and the first of its prompt's passes."""
    batch = runner.input_batch
    # vLLM makes new metadata whenever a row of the batch changes.
    if runner.midstream_routed is None or runner.midstream_routed[0] is not batch.sampling_metadata:
        names = enumerate(batch.req_ids[: batch.num_reqs])
        said = [(i, name, *numbers.said(_params(runner, name), numbers.ROUTES, (-1,))) for i, name in names]
        runner.midstream_routed = batch.sampling_metadata, [one for one in said if one[2] >= 0]
    found: list[tuple[int, str, int]] = runner.midstream_routed[1]
    return found


def _params(runner: Any, name: str) -> Any:
    return runner.requests[name].sampling_params


def _joined(request: Any, first: int, rows: np.ndarray) -> tuple[int, np.ndarray] | None:
    """The first pass and the rows that go with a token. None: the prompt is computed in pieces, and others follow."""
    end = first + len(rows)
    if end > request.num_prompt_tokens:
        return first, rows
    kept: list[tuple[int, np.ndarray]] = getattr(request, "midstream_rows", [])
    if kept and kept[-1][0] + len(kept[-1][1]) != first:
        # It was preempted, and begins again.
        kept = []
    kept = [*kept, (first, rows)]
    if end < request.num_prompt_tokens:
        request.midstream_rows = kept
        return None
    request.midstream_rows = []
    return kept[0][0], np.concatenate([piece for _, piece in kept])


def pack(first: int, rows: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """rows: [passes from position `first` on, layers, experts per token], in bytes of `kind`."""
    if rows.min() < 0:
        # They are of a graph that was compiled without the notes.
        return np.array([numbers.ROWS, first, 0], dtype=np.int64)
    data = rows.astype(kind.newbyteorder("<")).tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4").astype(np.int64)
    return np.concatenate(([numbers.ROWS, first, len(rows)], words))
