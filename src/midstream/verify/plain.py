"""Recomputes jobs in plain transformers: `--reference`, forced routes, and the second look at a router's near ties.

Owns: the reference's models, a few at a time, adapters merged into copies of the base.
Always holds: it computes in float32, whatever the server computed in. Routes can be forced here alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from midstream.core.errors import SnapshotIncompatible
from midstream.core.types import BASE_SNAPSHOT
from midstream.engine.adapter import LowRank, load_adapter
from midstream.snapshots.adapter import is_adapter
from midstream.snapshots.layout import read_spec
from midstream.snapshots.messages import listed, shown
from midstream.verify.jobs import Computer, Files, Numbers, OnComputed, PassJob
from midstream.verify.reference import OWN_ROUTE, Passes, Recomputer

MODELS_KEPT = 4
#: Positions of one pass.
SPAN_MAX = 512
#: The least exact one that a checkpoint has is what its server rounds to.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class PlainComputer(Computer):
    def __init__(self, files: Files, first: str) -> None:
        self._files = files
        directory = files(first)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        self.vocab = int(config.vocab_size)
        self.longest = int(config.max_position_embeddings)
        spec = read_spec(directory)
        stored = {tensor.dtype for tensor in spec.tensors.values()}
        self._first = first, {name: tensor.shape for name, tensor in spec.tensors.items()}
        self.dtype = next((torch_name for name, torch_name in _DTYPES.items() if name in stored), "float32")
        self.about = {"code": "plain transformers", "dtype": "float32", "device": "cpu"}
        self._recomputer = Recomputer({}, attention=_attention(config), span_max=SPAN_MAX)
        self._kept: OrderedDict[str, None] = OrderedDict()
        self.routes = None
        self._need([first])
        made = self._recomputer.passes([0], [first])
        if made.routes.size:
            self.routes = (made.routes.shape[1], made.routes.shape[2])
        self.experts = self._recomputer.experts

    def compute(self, jobs: Sequence[PassJob], done: OnComputed | None = None) -> list[Numbers]:
        numbers = []
        for job in jobs:
            passes = self._recomputer.passes(job.ids[:-1], job.kv, **self._asked(job))
            numbers.append(self._numbers(job, passes))
            if done is not None:
                done(len(job.ids) - 1)
        return numbers

    def with_ties(
        self, job: PassJob, recorded: np.ndarray, fits: Callable[[Numbers], bool]
    ) -> Numbers | None:
        """The numbers that fit, with whichever expert of a near tie; None: none do.

        recorded: routes [rows, layers, top_k] that a record has, which are taken.
        """
        if recorded.max(initial=0) >= self.experts:
            return None
        forced = np.full((len(job.ids) - 1, *recorded.shape[1:]), OWN_ROUTE)
        forced[job.first :] = recorded
        return self.other_ties(replace(job, forced=forced), fits)

    def other_ties(self, job: PassJob, fits: Callable[[Numbers], bool]) -> Numbers | None:
        """As `with_ties`, with the routes that the job itself forces."""
        found = self._recomputer.first_that(
            lambda passes: fits(self._numbers(job, passes)), job.ids[:-1], job.kv, **self._asked(job)
        )
        return None if found is None else self._numbers(job, found)

    def _asked(self, job: PassJob) -> dict[str, Any]:
        """What the recomputer is asked for a job, whose snapshots it then has."""
        again = {} if job.again is None else {job.again[0]: job.again[1]}
        forced = None
        if job.forced is not None:
            forced = torch.from_numpy(job.forced.astype(np.int64))
            # There are two passes over such a position, each with a route of its own.
            forced[[*again]] = OWN_ROUTE
        self._need([*job.kv, *again.values()])
        return {"again": again, "forced": forced, "row": job.first}

    def _numbers(self, job: PassJob, passes: Passes) -> Numbers:
        if job.look is not None:
            job.look(0, passes.logits.numpy())
        targets = torch.tensor(job.ids[job.first + 1 :])[:, None]
        logprobs = passes.logprobs.gather(1, targets)[:, 0].numpy().astype(float)
        routes = passes.routes[job.first :] if passes.routes.size else None
        top = passes.logprobs[0].topk(min(job.top, self.vocab)).indices.tolist() if job.top else ()
        best = passes.logprobs.amax(-1).numpy().astype(float)
        weights = passes.weights[job.first :] if job.weights and passes.weights.size else None
        return Numbers(logprobs, best, routes, bool(passes.ties), tuple(top), weights)

    def _need(self, snapshots: Sequence[str]) -> None:
        """Have all of them in memory, which one job may need."""
        wanted = dict.fromkeys(snapshots)
        for name in wanted:
            if name not in self._kept:
                self._load(name)
            self._kept[name] = None
            self._kept.move_to_end(name)
        while len(self._kept) > max(MODELS_KEPT, len(wanted)):
            oldest, _ = self._kept.popitem(last=False)
            self._recomputer.forget(oldest)

    def _load(self, name: str) -> None:
        directory = self._files(name)
        if not is_adapter(directory):
            first, shapes = self._first
            own = {tensor: spec.shape for tensor, spec in read_spec(directory).tensors.items()}
            if differing := sorted(
                one for one in own.keys() | shapes.keys() if own.get(one) != shapes.get(one)
            ):
                message = (
                    f"{shown(name)}: {listed(differing)} has not the shape that it has in {shown(first)}"
                )
                raise SnapshotIncompatible(message)
            self._recomputer.add({name: directory})
            return
        base = self._files(BASE_SNAPSHOT)
        model = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
        )
        for path, low in load_adapter(directory, base, torch.float32).items():
            _merge(model, path, low)
        self._recomputer.add_model(name, model)


def _attention(config: Any) -> str:
    """The quick implementation where the model's attention is plain."""
    plain = not any(hasattr(config, name) for name in ("attn_logit_softcapping", "kv_lora_rank"))
    return "sdpa" if plain and config.model_type != "gpt_oss" else "eager"


@torch.no_grad()
def _merge(model: Any, path: str, low: LowRank) -> None:
    """Add the adapter's product to the weights at `path`. Raises SnapshotIncompatible."""
    part: Any = model
    *parents, last = path.split(".")
    for name in parents:
        part = getattr(part, name)
    found = getattr(part, last)
    weight = found if isinstance(found, torch.nn.Parameter) else found.weight
    product = low.b @ low.a
    if weight.shape != product.shape or getattr(part, "is_transposed", False):
        product = product.transpose(-1, -2)
    if weight.shape != product.shape:
        raise SnapshotIncompatible(f"{path}: the adapter's shape is not that of the base")
    weight.data += product
