"""The part of the worker extension, on any device, that returns the sampling log-probability of a token beside the raw one.

It stands around three methods of vLLM's model runner and sampler, and acts in steps with requests that want both numbers
(midstream_vllm_numbers.py). Some of them want the near ties of their tokens, too (midstream_vllm_ties.py), and some the tokens
that were left for each draw (midstream_vllm_masks.py).

The sampler's own log-probabilities are raw, but those of a grammar's rows are of the tokens that it allowed. So the raw logits
of these rows are kept before vLLM forbids tokens. The sampling log-probability is taken from the logits from which vLLM drew.

Always holds: no draw is another one than without this, but for the kernel that draws. Other requests get what vLLM gives them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

RUNNER, SAMPLER = "vllm.v1.worker.gpu_model_runner", "vllm.v1.sample.sampler"
ROUTES = "midstream_vllm_routes"
#: vLLM's values of `logprobs_mode`.
RAW, AS_DRAWN = "raw_logprobs", "processed_logits"
numbers = importlib.import_module("midstream_vllm_numbers")
ties = importlib.import_module("midstream_vllm_ties")
masks = importlib.import_module("midstream_vllm_masks")


@dataclass(frozen=True)
class TieRows:
    """Rows of the batch that want near ties. limits: of each."""

    places: torch.Tensor
    limits: Any

    @classmethod
    def among(cls, params: dict[int, Any], device: Any) -> TieRows | None:
        """params: by place, vLLM's sampling parameters. None: there are no such rows."""
        if not params:
            return None
        return cls(torch.tensor([*params], device=device), ties.TieLimits.of([*params.values()], device))


@dataclass(frozen=True)
class Marked:
    """The rows of a batch that want both numbers. places: all of them. greedy, filtered: those that want near ties.

    masked: the place and the request of those that want masks.
    """

    places: torch.Tensor | slice
    all_greedy: bool
    greedy: TieRows | None
    filtered: TieRows | None
    masked: Mapping[int, str]


@dataclass
class Rows:
    """What a step draws for the marked rows.

    largest: [rows of the batch, 1], the largest raw logit of those that want near ties, in size.
    sampling, ties: when drawn, the sampling log-probabilities of the marked rows, and the near ties of all rows.
    masks: by request, what was left.
    """

    marked: Marked
    largest: torch.Tensor
    ties: torch.Tensor
    sampling: torch.Tensor | None = None
    masks: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, marked: Marked, logits: torch.Tensor, raw: RawRows | None) -> Rows:
        """logits: of the model, but for the rows of a grammar, whose raw ones are in `raw`."""
        largest = torch.zeros(len(logits), 1, device=logits.device)
        for rows in filter(None, (marked.greedy, marked.filtered)):
            largest[rows.places] = logits[rows.places].float().abs().amax(-1, keepdim=True)
        if raw is not None:
            largest[raw.places] = raw.logits.float().abs().amax(-1, keepdim=True)
        return cls(marked, largest, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))

    def before(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Look at what vLLM is about to draw from and to change. Returns what is needed of it afterwards."""
        if (greedy := self.marked.greedy) is not None:
            at = greedy.places
            self.ties[at] = ties.greedy_ties(scores[at], self.largest[at], greedy.limits)
        filtered = self.marked.filtered
        return None if filtered is None else scores[filtered.places]

    def take(
        self,
        sampled: torch.Tensor,
        drawn_from: torch.Tensor | None,
        temperature: Any,
        scores: torch.Tensor | None,
    ) -> None:
        """drawn_from: the logits from which vLLM drew. None: every row was greedy. scores: from `before`."""
        places, filtered = self.marked.places, self.marked.filtered
        if drawn_from is None:
            self.sampling = torch.zeros_like(sampled[places], dtype=torch.float32)
            return
        logprobs = drawn_from[places].log_softmax(-1, dtype=torch.float32)
        own = logprobs.gather(-1, sampled[places].long().unsqueeze(-1)).squeeze(-1)
        self.sampling = own.masked_fill(temperature[places] < ties.GREEDY_BELOW, 0.0)
        if filtered is not None:
            at = filtered.places
            kept = drawn_from[at] > -torch.inf
            self.ties[at] = ties.filter_ties(scores, kept, sampled[at], self.largest[at], filtered.limits)
        if masked := self.marked.masked:
            self.masks = masks.packed(drawn_from[[*masked]] > -torch.inf, [*masked.values()])


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
        self.midstream_masks = None
        answer = sample_tokens(self, grammar_output)
        if self.midstream_masks:
            masks.put(answer, self.midstream_masks)
        return answer

    def draw_both(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        raw, self.midstream_raw = self.midstream_raw, None
        marked = None if why_not(self) else marked_rows(self)
        if marked is None:
            return draw(self, logits, spec_decode_metadata)
        rows = self.sampler.midstream_rows = Rows.of(marked, logits, raw)
        try:
            output = draw(self, logits, spec_decode_metadata)
        finally:
            self.sampler.midstream_rows = None
        write(output, rows, raw)
        self.midstream_masks = rows.masks
        return output

    def sample_and_take(self: Any, logits: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        rows: Rows | None = self.midstream_rows
        if rows is None:
            return sample(self, logits, metadata, *args, **kwargs)
        scores = rows.before(logits)
        if rows.marked.all_greedy:
            result = sample(self, logits, metadata, *args, **kwargs)
            rows.take(result[0], None, None, None)
            return result
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
        rows.take(sampled, drawn_from, metadata.temperature, scores)
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


def marked_rows(runner: Any) -> Marked | None:
    """The rows of the batch that want both numbers; None if none does."""
    batch = runner.input_batch
    # vLLM makes new metadata whenever a row of the batch changes.
    if runner.midstream_marked is None or runner.midstream_marked[0] is not batch.sampling_metadata:
        runner.midstream_marked = batch.sampling_metadata, _find_marked(runner)
    found: Marked | None = runner.midstream_marked[1]
    return found


def _find_marked(runner: Any) -> Marked | None:
    batch = runner.input_batch
    names = enumerate(batch.req_ids[: batch.num_reqs])
    params = {i: runner.requests[name].sampling_params for i, name in names if _wants_both(runner, name)}
    if not params:
        return None
    near = {i: p for i, p in params.items() if numbers.NEAR in p.extra_args}
    masked = [i for i, p in params.items() if numbers.MASK in p.extra_args and not ties.is_greedy(p)]
    # A slice copies nothing.
    every = len(params) == batch.num_reqs
    return Marked(
        slice(None) if every else torch.tensor([*params], device=runner.device),
        all(ties.is_greedy(p) for p in params.values()),
        TieRows.among({i: p for i, p in near.items() if ties.is_greedy(p)}, runner.device),
        TieRows.among({i: p for i, p in near.items() if ties.is_filtered(p)}, runner.device),
        {i: batch.req_ids[i] for i in masked},
    )


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
    tensors, places = output.logprobs_tensors, rows.marked.places
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
    near = rows.ties[places] * numbers.TIE_PLACE
    ranks[places] = numbers.RANK_BASE + near + rows.sampling.abs().view(torch.int32).long()
    output.logprobs_tensors = tensors._replace(
        logprob_token_ids=ids, logprobs=logprobs, selected_token_ranks=ranks
    )


def install() -> None:
    try:
        runner = importlib.import_module(RUNNER).GPUModelRunner
        hook(runner, importlib.import_module(SAMPLER).Sampler)
        importlib.import_module(ROUTES).hook(runner)
    except (ImportError, AttributeError) as error:
        # This is another version of vLLM. midstream finds out what it does not report.
        print(f"midstream: the sampler is as it was, or there are no routes: {error}", flush=True)
