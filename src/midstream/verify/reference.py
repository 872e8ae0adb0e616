"""Plain Hugging Face forward passes over given KV: each position by the weights of the snapshot that is named for it.

Owns: what it means that numbers are borne out by `kv_snapshots` and by labels. `midstream verify --reference` computes with it,
and so do all tests that recompute.
Always holds: it imports nothing of midstream, so it shares no fault with an engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

# Of what a router compares: a rounding may choose the other expert.
TIE = 3e-5
# Tried for one sequence, at most.
TIES = 8
OWN_ROUTE = -1


@dataclass(frozen=True)
class Tie:
    """A route that nobody reported and that a rounding may have made another one. route: the other one."""

    position: int
    layer: int
    route: tuple[int, ...]


@dataclass
class Passes:
    """Of each input position: logits and log-probabilities [inputs, vocab] of the next token, from the first row asked for on;
    routes [inputs, moe_layers, top_k]; weights: of the same shape, what the experts multiply by."""

    logits: torch.Tensor
    logprobs: torch.Tensor
    routes: np.ndarray
    weights: np.ndarray
    ties: list[Tie]


class Kept(DynamicCache):  # type: ignore[misc]
    """A copy of the first positions of a cache, whose next position reads what the cache has for it."""

    def __init__(self, cache: DynamicCache, position: int) -> None:
        super().__init__()
        self._next: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, layer in enumerate(cache.layers):
            super().update(layer.keys[:, :, :position], layer.values[:, :, :position], number)
            at = slice(position, position + 1)
            self._next.append((layer.keys[:, :, at], layer.values[:, :, at]))

    def update(self, _keys: Any, _values: Any, layer_idx: int, *more: Any, **named: Any) -> Any:
        return super().update(*self._next[layer_idx], layer_idx, *more, **named)


class Expanded:
    """Keys and values of a model with latent attention (MLA), expanded by the weights that computed each position.

    transformers caches the latents, and expands all of them by the weights of the pass that reads them.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Only read, up to here.
        self.until: int | None = None

    def begin(self) -> None:
        self._kept = {}

    def attach(self, attention: Any) -> None:
        expand = attention.expand_kv

        def kept(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            layer = attention.layer_idx
            if self.until is not None:
                keys, values = self._kept[layer]
                return keys[:, :, : self.until], values[:, :, : self.until]
            made: tuple[torch.Tensor, torch.Tensor]
            before = self._kept.get(layer)
            first = 0 if before is None else before[0].shape[2]
            made = expand(latent[:, :, first:], rotary[:, :, first:])
            if before is not None:
                made = torch.cat((before[0], made[0]), dim=2), torch.cat((before[1], made[1]), dim=2)
            self._kept[layer] = made
            return made

        attention.expand_kv = kept


class Recomputer:
    def __init__(
        self, checkpoints: Mapping[str, Path], attention: str = "eager", span_max: int | None = None
    ) -> None:
        """checkpoints: of each snapshot. attention: transformers' implementation; not every model has the quicker ones.

        span_max: positions of one pass, which bound its memory; None: any.
        """
        self._attention = attention
        self._span_max = span_max
        self._loaded: dict[Path, Any] = {}
        self._expanded = Expanded()
        self._routers: dict[Path, list[Any]] = {}
        # Router, its logits, its choice.
        self._noted: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        # What the experts of each layer are given with the choice.
        self._multiplied: list[torch.Tensor] = []
        # [tokens of this pass, moe_layers, top_k].
        self._forced: torch.Tensor | None = None
        self._checkpoints: dict[str, Path] = {}
        self.add(checkpoints)

    @property
    def snapshots(self) -> list[str]:
        return [*self._checkpoints]

    @property
    def experts(self) -> int:
        """How many the routers of the last passes choose from; 0: dense."""
        return min((logits.shape[-1] for _, logits, _ in self._noted), default=0)

    def add(self, checkpoints: Mapping[str, Path]) -> None:
        self._checkpoints |= checkpoints
        for directory in checkpoints.values():
            if directory not in self._loaded:
                self._loaded[directory] = self._load(directory)

    def add_model(self, snapshot: str, model: Any) -> None:
        """Of a snapshot that is no checkpoint, as an adapter over one. No other snapshot has modules of this model."""
        self._checkpoints[snapshot] = Path(snapshot)
        self._loaded[Path(snapshot)] = self._observed(model)

    def forget(self, snapshot: str) -> None:
        """Free its model, unless another snapshot has the same."""
        directory = self._checkpoints.pop(snapshot)
        if directory not in self._checkpoints.values():
            del self._loaded[directory]

    def _load(self, directory: Path) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=self._attention,
            use_safetensors=True,
            trust_remote_code=False,
        )
        return self._observed(model)

    def _observed(self, model: Any) -> Any:
        layer = 0
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._hook(layer))
                layer += 1
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(lambda _, inputs: self._multiplied.extend(inputs[2:3]))
            if hasattr(module, "expand_kv"):
                self._expanded.attach(module)
        return model.eval()

    def _hook(self, layer: int) -> Callable[..., Any]:
        def note(router: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> Any:
            logits, scores, own = output
            chosen = own
            if self._forced is not None:
                forced = self._forced[:, layer]
                chosen = torch.where(forced == OWN_ROUTE, own, forced)
                scores = expert_weights(router, logits, chosen).to(scores.dtype)
            self._noted.append((router, logits, chosen))
            return logits, scores, chosen

        return note

    @torch.no_grad()
    def passes(
        self,
        ids: Sequence[int],
        kv: Sequence[str],
        again: Mapping[int, str] | None = None,
        forced: torch.Tensor | None = None,
        row: int = 0,
    ) -> Passes:
        """One pass for each of `ids`, over the KV of the positions before it and its own.

        row: the first whose logits are kept.

        kv: the snapshot that computed each position. again: positions whose KV was there already when another snapshot's pass
        over it gave the logits. forced: routes [inputs, moe_layers, top_k], OWN_ROUTE: the model's own choice.
        """
        cache = DynamicCache()
        self._expanded.begin()
        logits, routes, weights, ties = [], [], [], []
        for first, last in spans(kv[: len(ids)], self._span_max):
            rows, taken, shares, near = self._run(kv[first], ids, first, last, cache, forced)
            logits.append(rows[max(0, row - first) :].clone() if row > first else rows)
            routes.append(taken)
            weights.append(shares)
            ties += near
        every, chosen, multiplied = torch.cat(logits), torch.cat(routes), torch.cat(weights)
        for position, snapshot in (again or {}).items():
            self._expanded.until = position + 1
            rows, taken, shares, near = self._run(
                snapshot, ids, position, position + 1, Kept(cache, position), forced
            )
            self._expanded.until = None
            every[position - row], chosen[position], multiplied[position] = rows[0], taken[0], shares[0]
            ties += near
        return Passes(every, every.log_softmax(-1), chosen.numpy(), multiplied.numpy(), ties)

    def _run(
        self,
        snapshot: str,
        ids: Sequence[int],
        first: int,
        last: int,
        cache: DynamicCache,
        forced: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Tie]]:
        """Logits, routes, what the experts multiplied by, and ties."""
        self._noted, self._multiplied = [], []
        self._forced = None if forced is None else forced[first:last]
        model = self._loaded[self._checkpoints[snapshot]]
        output = model(torch.tensor([ids[first:last]]), past_key_values=cache, use_cache=True)
        chosen = [chosen.reshape(last - first, -1) for _, _, chosen in self._noted]
        routes = torch.stack(chosen, dim=1) if chosen else torch.zeros(last - first, 0, 0, dtype=torch.int64)
        given = [weights.reshape(last - first, -1).float() for weights in self._multiplied]
        shares = torch.stack(given, dim=1) if given else torch.zeros(last - first, 0, 0)
        near = [*self._ties(first)]
        # Who computes with the model beside this has its own routes.
        self._forced = None
        return output.logits[0], routes, shares, near

    def _ties(self, first: int) -> Iterator[Tie]:
        for layer, (router, logits, _) in enumerate(self._noted):
            for gap, other in alternatives(router, logits):
                near = gap < TIE
                if self._forced is not None:
                    near &= self._forced[:, layer, 0] == OWN_ROUTE
                for at in torch.nonzero(near).flatten().tolist():
                    yield Tie(first + at, layer, tuple(other[at].tolist()))

    def first_that(
        self, fits: Callable[[Passes], bool], ids: Sequence[int], kv: Sequence[str], **more: Any
    ) -> Passes | None:
        """The passes that fit, with whichever expert of a tie; None: no such passes do, or there are too many ties to try."""
        forced = more.pop("forced", None)
        made = self.passes(ids, kv, forced=forced, **more)
        if fits(made):
            return made
        if len(made.ties) > TIES:
            return None
        for count in range(len(made.ties)):
            for some in itertools.combinations(made.ties, count + 1):
                other = torch.full(made.routes.shape, OWN_ROUTE) if forced is None else forced.clone()
                for tie in some:
                    other[tie.position, tie.layer] = torch.tensor(tie.route)
                tried = self.passes(ids, kv, forced=other, **more)
                if fits(tried):
                    return tried
        return None


def spans(kv: Sequence[str], most: int | None = None) -> Iterator[tuple[int, int]]:
    """Runs of one snapshot, of at most so many positions."""
    first = 0
    for _, run in itertools.groupby(kv):
        end = first + sum(1 for _ in run)
        while first < end:
            last = end if most is None else min(end, first + most)
            yield first, last
            first = last


def expert_weights(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """How much each of `experts` counts, as the router itself would have it."""
    kind = type(router).__name__
    if kind.startswith("GptOss"):
        return logits.gather(-1, experts).softmax(-1)
    scores = logits.sigmoid() if kind.startswith("Deepseek") else logits.float().softmax(-1)
    weights = scores.gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * float(getattr(router, "routed_scaling_factor", 1.0))


def alternatives(router: Any, logits: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(by how much the choice was made [tokens], the choice that was next [tokens, top_k]); nothing where all are chosen"""
    if logits.shape[-1] == router.top_k:
        return
    if not type(router).__name__.startswith("Deepseek"):
        yield _next_best(logits, router.top_k)
        return
    scores = logits.sigmoid() + router.e_score_correction_bias
    groups = scores.unflatten(-1, (router.num_group, -1))
    ranked = groups.topk(2, dim=-1)[0].sum(-1).topk(router.topk_group + 1, dim=-1)
    size = groups.shape[-1]

    def within(chosen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(groups[..., 0]).scatter(1, chosen, 1.0).repeat_interleave(size, -1)
        return torch.where(mask == 0, float("-inf"), scores)

    best, other = ranked.indices[:, :-1], torch.cat([ranked.indices[:, :-2], ranked.indices[:, -1:]], -1)
    yield _next_best(within(best), router.top_k)
    yield ranked.values[:, -2] - ranked.values[:, -1], within(other).topk(router.top_k).indices


def _next_best(scores: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, experts = scores.topk(top_k + 1, dim=-1)
    return values[:, -2] - values[:, -1], torch.cat([experts[:, :-2], experts[:, -1:]], dim=-1)
