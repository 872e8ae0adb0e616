"""The part of the worker extension, on any device, that returns the sampling log-probability of a token beside the raw one.

It stands around three methods of vLLM's model runner and sampler, and acts in steps with requests that want both numbers
(midstream_vllm_numbers.py). The sampler's own log-probabilities are raw, but those of a grammar's rows are of the tokens that
it allowed. So the raw logits of these rows are kept before vLLM forbids tokens. The sampling log-probability is taken from the
logits from which vLLM drew.

Always holds: no draw is another one than without this, but for the kernel that draws. Other requests get what vLLM gives them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

RUNNER, SAMPLER = "vllm.v1.worker.gpu_model_runner", "vllm.v1.sample.sampler"
#: vLLM's values of `logprobs_mode`.
RAW, AS_DRAWN = "raw_logprobs", "processed_logits"
#: vLLM draws greedily below this temperature.
GREEDY_BELOW = 1e-5

numbers = importlib.import_module("midstream_vllm_numbers")


@dataclass
class Rows:
    """places: of the requests that want both numbers, in the batch. sampling: their sampling log-probabilities, when drawn."""

    places: torch.Tensor | slice
    sampling: torch.Tensor | None = None

    def take(self, sampled: torch.Tensor, drawn_from: torch.Tensor | None, temperature: Any) -> None:
        """drawn_from: the logits from which vLLM drew. None: every row was greedy."""
        if drawn_from is None:
            self.sampling = torch.zeros_like(sampled[self.places], dtype=torch.float32)
            return
        logprobs = drawn_from[self.places].log_softmax(-1, dtype=torch.float32)
        own = logprobs.gather(-1, sampled[self.places].long().unsqueeze(-1)).squeeze(-1)
        self.sampling = own.masked_fill(temperature[self.places] < GREEDY_BELOW, 0.0)


@dataclass(frozen=True)
class RawRows:
    """The raw logits of rows whose tokens a grammar forbids. places: in the batch."""

    places: torch.Tensor
    logits: torch.Tensor


def hook(runner: type[Any], sampler: type[Any]) -> None:
    """Put the second number into what these classes return. Raises AttributeError if they are none that it knows."""
    sample_tokens, draw, sample = runner.sample_tokens, runner._sample, sampler.sample

    def sample_tokens_with_raw(self: Any, grammar_output: Any) -> Any:
        self.midstream_raw = None if grammar_output is None else raw_rows(self, grammar_output)
        return sample_tokens(self, grammar_output)

    def draw_both(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        raw, self.midstream_raw = self.midstream_raw, None
        rows = None if why_not(self) else marked_rows(self)
        if rows is None:
            return draw(self, logits, spec_decode_metadata)
        self.sampler.midstream_rows = rows
        try:
            output = draw(self, logits, spec_decode_metadata)
        finally:
            self.sampler.midstream_rows = None
        write(output, rows, raw)
        return output

    def sample_and_take(self: Any, logits: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        rows: Rows | None = self.midstream_rows
        if rows is None:
            return sample(self, logits, metadata, *args, **kwargs)
        filters = self.topk_topp_sampler
        mode, forward = filters.logprobs_mode, filters.forward
        filters.logprobs_mode = AS_DRAWN
        if forward != filters.forward_cpu:
            # Fused kernels do not say which tokens they left.
            filters.forward = filters.forward_native
        try:
            sampled, drawn_from = sample(self, logits, metadata, *args, **kwargs)
        finally:
            filters.logprobs_mode, filters.forward = mode, forward
        rows.take(sampled, drawn_from, metadata.temperature)
        return sampled, None

    runner.midstream_raw = runner.midstream_marked = sampler.midstream_rows = None
    runner.sample_tokens, runner._sample, sampler.sample = sample_tokens_with_raw, draw_both, sample_and_take


def why_not(runner: Any) -> str:
    """Why a model runner gives one number; empty if it gives both."""
    if not hasattr(runner, "midstream_marked"):
        return (
            "its model runner is not the one that midstream's worker extension knows; with VLLM_USE_V2_MODEL_RUNNER=0 in "
            "vllm.env it is"
        )
    if runner.speculative_config is not None:
        return "it decodes speculatively"
    return "" if runner.sampler.logprobs_mode == RAW else f"it runs with --logprobs-mode other than {RAW}"


def marked_rows(runner: Any) -> Rows | None:
    """The rows of the batch that want both numbers; None if none does."""
    batch = runner.input_batch
    # vLLM makes new metadata whenever a row of the batch changes.
    if runner.midstream_marked is None or runner.midstream_marked[0] is not batch.sampling_metadata:
        places = [i for i, name in enumerate(batch.req_ids[: batch.num_reqs]) if _wants_both(runner, name)]
        some = torch.tensor(places, device=runner.device) if places else None
        # A slice copies nothing.
        found = slice(None) if len(places) == batch.num_reqs else some
        runner.midstream_marked = batch.sampling_metadata, found
    places_of = runner.midstream_marked[1]
    return None if places_of is None else Rows(places_of)


def _wants_both(runner: Any, name: str) -> bool:
    params = runner.requests[name].sampling_params
    if params is None or params.logprobs is None:
        return False
    return bool((params.extra_args or {}).get(numbers.MARK))


@torch.inference_mode()
def raw_rows(runner: Any, grammar_output: Any) -> RawRows | None:
    """A copy of what vLLM is about to change; None if no such row wants both numbers."""
    state = runner.execute_model_state
    if state is None or state.logits is None or why_not(runner):
        return None
    batch, constrained = runner.input_batch, set(grammar_output.structured_output_request_ids)
    names = enumerate(batch.req_ids[: batch.num_reqs])
    places = [i for i, name in names if name in constrained and _wants_both(runner, name)]
    if not places:
        return None
    found = torch.tensor(places, device=state.logits.device)
    return RawRows(found, state.logits[found])


def write(output: Any, rows: Rows, raw: RawRows | None) -> None:
    """Put both numbers of `rows` into the output of a sampler."""
    tensors, places = output.logprobs_tensors, rows.places
    ids, logprobs, ranks = (tensor.clone() for tensor in tensors[:3])
    if raw is not None:
        scores = raw.logits.log_softmax(-1, dtype=torch.float32)
        own = output.sampled_token_ids[raw.places, :1].long()
        best, of_best = scores.topk(ids.shape[1] - 1, dim=-1)
        ids[raw.places] = torch.cat((own, of_best), dim=1).to(ids.dtype)
        logprobs[raw.places] = torch.cat((scores.gather(-1, own), best), dim=1)
    # vLLM has one entry for each id, and the last one wins.
    mine = ids[places]
    mine[:, 1:].masked_fill_(mine[:, 1:] == mine[:, :1], numbers.ITSELF)
    ids[places] = mine
    assert rows.sampling is not None, "vLLM did not draw by its sampler"
    ranks = ranks.long()
    ranks[places] = numbers.RANK_BASE + rows.sampling.abs().view(torch.int32).long()
    output.logprobs_tensors = tensors._replace(
        logprob_token_ids=ids, logprobs=logprobs, selected_token_ranks=ranks
    )


def install() -> None:
    try:
        hook(importlib.import_module(RUNNER).GPUModelRunner, importlib.import_module(SAMPLER).Sampler)
    except (ImportError, AttributeError) as error:
        # This is another version of vLLM. midstream finds out that it reports one number.
        print(f"midstream: the sampler is as it was: {error}", flush=True)
