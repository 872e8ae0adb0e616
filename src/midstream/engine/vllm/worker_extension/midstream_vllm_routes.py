"""The experts that computed each token, and their weights: from vLLM's routers to its scheduler, and on to the token's answer.

vLLM's own routes (--enable-return-routed-experts) need its newer model runner. Its tokens have one log-probability, and their
routes come at the end of a choice. Here vLLM's own class notes in the older runner what the routers of a step chose, and in
another one what they gave the experts as weights. The rows that a request asks for (midstream_vllm_numbers.py) travel with its
tokens, as masks do (midstream_vllm_masks.py).

Always holds: a token has the row of the pass that gave its logits. Rows of a layer with experts that never wrote any are not
sent. No pass of the model fails because its notes do.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

CAPTURER = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
#: What no router chooses, and no weight of one.
UNWRITTEN, UNWEIGHED = -1, float("nan")
numbers, masks = map(importlib.import_module, ("midstream_vllm_numbers", "midstream_vllm_masks"))
logger = logging.getLogger(__name__)
NOT_NOTED = "vLLM does not note what its routers choose"
#: The class of a layer of experts.
RUNNERS = "MoERunner"
#: With these, no worker has the rows of all layers and tokens in the order of the batch.
SPLIT = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


@dataclass
class Notes:
    """chosen, weights: vLLM's notes of a step. They last as long as the model, whose graphs may write to them.

    no_weights: why the weights are of no use. no_routes: why nothing is.
    """

    chosen: Any = None
    weights: Any = None
    no_routes: str = ""
    no_weights: str = ""

    def take_chosen(self, layer: int, ids: Any) -> None:
        """Called in a pass of the model, which must not fail for this."""
        if self.no_routes:
            return
        try:
            self.chosen.capture(layer, ids)
        except Exception as error:  # noqa: BLE001 - vLLM's class does not know such a model
            self.no_routes = f"{NOT_NOTED}: layer {layer}: {error}"
            logger.warning("tokens have no routes: %s", self.no_routes)

    def take_weights(self, layer: int, weights: Any) -> None:
        """As `take_chosen`."""
        if self.no_weights:
            return
        try:
            self.weights.capture(layer, weights)
        except Exception as error:  # noqa: BLE001 - as above
            self.no_weights = f"{NOT_NOTED}: layer {layer}: {error}"
            logger.warning("tokens have no weights of routers: %s", self.no_weights)


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


def watched(runner: Any) -> Notes:
    """What the routers of a step choose is noted from now on."""
    parallel, config = runner.vllm_config.parallel_config, runner.vllm_config
    for name in SPLIT:
        if getattr(parallel, name, 1) > 1:
            return Notes(no_routes=f"it runs with {name} above 1")
    if getattr(parallel, "enable_dbo", False):
        return Notes(no_routes="it computes a step in two halves (--enable-dbo)")
    if runner.speculative_config is not None:
        return Notes(no_routes="it decodes speculatively")
    try:
        module = importlib.import_module(CAPTURER)
        size, model = config.scheduler_config.max_num_batched_tokens, runner.get_model()
        chosen, weights = (module.RoutedExpertsCapturer(size, config) for _ in range(2))
        # Layers without experts stay 0, as in vLLM's own rows.
        chosen.device_buffer[:, _layers(model)] = UNWRITTEN
        weights.device_buffer = torch.full_like(weights.device_buffer, UNWEIGHED, dtype=torch.float32)
        notes = Notes(chosen, weights)
        module.bind_routed_experts_capturer(model, SimpleNamespace(capture=notes.take_chosen))
    except Exception as error:  # noqa: BLE001 - vLLM serves the model without routes, too
        return Notes(no_routes=f"{NOT_NOTED}: {error}")
    notes.no_weights = _watch_weights(model, notes.take_weights)
    return notes


def _layers(model: Any) -> list[int]:
    """The numbers of the layers with experts."""
    routed = (m for m in model.modules() if hasattr(m, "router") or hasattr(m, "capture_fn"))
    return sorted({module.layer_id for module in routed if hasattr(module, "layer_id")})


def _watch_weights(model: Any, note: Callable[..., None]) -> str:
    """Note what the experts of each layer are given as weights. Returns why that is not what their outputs count; or ""."""
    layers = [module for module in model.modules() if type(module).__name__ == RUNNERS]
    for layer in layers:
        experts, router = getattr(layer, "routed_experts", None), getattr(layer, "router", None)
        if getattr(experts, "apply_router_weight_on_input", True):
            return "its experts multiply their inputs by the weights, or do not say"
        if getattr(layer, "routed_scaling_factor", 0.0) != 1.0:
            return "it multiplies the sum of its experts once more"
        if layer.is_monolithic or not hasattr(router, "select_experts"):
            return "its kernel of experts has the router inside"
    for layer in layers:
        layer.router.select_experts = _noting(layer.router.select_experts, note, layer.layer_id)
    return "" if layers else "it has another kind of experts"


def _noting(select: Callable[..., Any], note: Callable[..., None], layer: int) -> Callable[..., Any]:
    def select_and_note(*args: Any, **kwargs: Any) -> Any:
        weights, ids = select(*args, **kwargs)
        note(layer, weights)
        return weights, ids

    return select_and_note


def why_not(runner: Any, *, weights: bool = False) -> str:
    """Why its tokens have no routes, or no weights of routers; empty if they have."""
    found: Notes | None = getattr(runner, "midstream_watched", None)
    if found is None:
        return (
            "its model runner is not the one that midstream's worker extension knows; with VLLM_USE_V2_MODEL_RUNNER=0 in "
            "vllm.env it is"
        )
    return found.no_routes or (found.no_weights if weights else "")


@torch.inference_mode()
def taken(runner: Any) -> dict[str, np.ndarray]:
    """By request, the rows of this step that go with its token."""
    state, notes = runner.execute_model_state, runner.midstream_watched
    if state is None or notes is None or notes.no_routes:
        return {}
    asked = _asking(runner)
    scheduled = state.scheduler_output.num_scheduled_tokens if asked else {}
    spans = []
    for place, name, first, _ in asked:
        request, count = runner.requests[name], scheduled[name]
        begin, end = request.num_computed_tokens, request.num_computed_tokens + count
        later = end > request.num_prompt_tokens
        wanted = end - 1 if later else max(first, begin)
        if wanted < end:
            spans.append((name, wanted, int(runner.query_start_loc.np[place]) + wanted - begin, end - wanted))
    if not spans:
        return {}
    at = torch.from_numpy(np.concatenate([np.arange(offset, offset + n) for _, _, offset, n in spans]))
    want_weights = not notes.no_weights and {name for _, name, _, wanted in asked if wanted}
    rows = _rows(notes.chosen, at)
    weights = _rows(notes.weights, at) if want_weights else rows
    kind = np.dtype(notes.chosen.output_dtype_name)
    ends = np.cumsum([count for *_, count in spans])[:-1]
    found = {}
    for (name, wanted, *_), piece, shares in zip(
        spans, np.split(rows, ends), np.split(weights, ends), strict=True
    ):
        if (whole := _joined(runner.requests[name], wanted, (piece, shares))) is not None:
            first, chosen, given = whole
            found[name] = pack(first, chosen, kind, given if want_weights and name in want_weights else None)
    return found


def _rows(notes: Any, at: torch.Tensor) -> np.ndarray:
    found: np.ndarray = notes.device_buffer[at.to(notes.device_buffer.device)].cpu().numpy()
    return found


def _asking(runner: Any) -> Sequence[tuple[int, str, int, int]]:
    """The place and the name of each request of the batch that wants rows, the first of its prompt's passes, and whether it
    wants weights."""
    batch = runner.input_batch
    # vLLM makes new metadata whenever a row of the batch changes.
    if runner.midstream_routed is None or runner.midstream_routed[0] is not batch.sampling_metadata:
        names = enumerate(batch.req_ids[: batch.num_reqs])
        said = [(i, name, *numbers.said(_params(runner, name), numbers.ROUTES, (-1, 0))) for i, name in names]
        runner.midstream_routed = batch.sampling_metadata, [one for one in said if one[2] >= 0]
    found: list[tuple[int, str, int, int]] = runner.midstream_routed[1]
    return found


def _params(runner: Any, name: str) -> Any:
    return runner.requests[name].sampling_params


#: Rows of what was chosen, and of weights.
Piece = tuple[np.ndarray, np.ndarray]


def _joined(request: Any, first: int, piece: Piece) -> tuple[int, np.ndarray, np.ndarray] | None:
    """The first pass and the rows that go with a token. None: the prompt is computed in pieces, and others follow."""
    end = first + len(piece[0])
    if end > request.num_prompt_tokens:
        return first, *piece
    kept: list[tuple[int, Piece]] = getattr(request, "midstream_rows", [])
    if kept and kept[-1][0] + len(kept[-1][1][0]) != first:
        # It was preempted, and begins again.
        kept = []
    kept = [*kept, (first, piece)]
    if end < request.num_prompt_tokens:
        request.midstream_rows = kept
        return None
    request.midstream_rows = []
    chosen, weights = (np.concatenate(each) for each in zip(*(one for _, one in kept), strict=True))
    return kept[0][0], chosen, weights


def pack(first: int, rows: np.ndarray, kind: np.dtype[Any], weights: np.ndarray | None = None) -> np.ndarray:
    """rows, weights: [passes from position `first` on, layers, experts per token]; rows in bytes of `kind`."""
    if rows.min() < 0:
        # They are of a graph that was compiled without the notes.
        return np.array([numbers.ROWS, first, 0], dtype=np.int64)
    lists = [np.array([numbers.ROWS, first, len(rows)]), _words(rows.astype(kind.newbyteorder("<")))]
    if weights is not None:
        lists.append(_words(weights.astype("<f4")))
    return np.concatenate(lists)


def _words(array: np.ndarray) -> np.ndarray:
    data = array.tobytes()
    return np.frombuffer(data + bytes(-len(data) % 4), dtype="<u4").astype(np.int64)
