"""Recomputes jobs with the embedded engine's own model code, many sequences in a step, over one paged KV cache.

Owns: the KV cache, and the order of passes.
Always holds: a position's KV is computed once for all sequences that begin with the same tokens under the same snapshots. A
pass runs only when all KV before it is there. A step has one model. A pass over KV that is already there writes none.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from midstream.core.config import EngineSettings
from midstream.engine.embedded.blocks import SCRATCH_SLOT
from midstream.engine.embedded.loading import batch_invariant
from midstream.engine.step import StepBatch
from midstream.verify.jobs import Computer, Files, Numbers, OnComputed, PassJob
from midstream.verify.weights import LoadedSnapshots

BLOCK = 16
#: Positions of a step, and numbers in the logits of one.
STEP_TOKENS, STEP_LOGITS = 1024, 2**26
#: Snapshots are numbered in the upper bits of a position's key, its token stands in the lower ones.
_TOKEN_BITS = 32


@dataclass(eq=False)
class _Sequence:
    """A job on its way. table: its blocks. source: the sequence that computes the blocks before `start`.

    done: positions whose KV is there. names: the snapshot of each position.
    """

    job: PassJob
    table: np.ndarray
    start: int
    source: _Sequence | None
    done: int = 0
    tied: bool = False
    again_due: bool = False
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0))
    best: np.ndarray = field(default_factory=lambda: np.zeros(0))
    routes: np.ndarray | None = None
    weights: np.ndarray | None = None
    top: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return len(self.job.ids) - 1

    @property
    def over(self) -> bool:
        return self.done >= self.end and not self.again_due

    def begin(self) -> bool:
        """Whether its passes may run."""
        if self.source is not None:
            if self.source.done < self.start:
                return False
            self.tied |= self.source.tied
            self.source = None
        self.done = max(self.done, self.start)
        return True


@dataclass(frozen=True)
class _Work:
    """Passes over positions first to last of a sequence. writes: their KV."""

    sequence: _Sequence
    first: int
    last: int
    writes: bool = True


class PagedComputer(Computer):
    """settings: dtype, device and kernels are those of the server. kv_cache_tokens: positions in memory at a time."""

    def __init__(self, files: Files, first: str, settings: EngineSettings) -> None:
        if settings.threads == 0:
            cores = os.cpu_count() or 1
            settings = EngineSettings(
                dtype=settings.dtype,
                device=settings.device,
                kernels=settings.kernels,
                kv_cache_tokens=settings.kv_cache_tokens,
                threads=cores,
            )
        torch.set_num_threads(settings.threads)
        self._loaded = LoadedSnapshots(files, first, settings)
        model = self._loaded.first
        self._decoder = model.decoder
        self.vocab = int(model.config.vocab_size)
        self._blocks = settings.kv_cache_tokens // BLOCK
        self.longest = min(int(model.config.max_position_embeddings), self._blocks * BLOCK)
        layers = model.decoder.moe_layers
        self.routes = (layers, model.decoder.top_k) if layers else None
        dtypes = (dtype for _, dtype in model.shapes.values() if dtype.is_floating_point)
        self.dtype = str(next(dtypes)).removeprefix("torch.")
        invariant = batch_invariant(model, settings)
        self.about = {
            "code": "embedded engine, native kernels" if invariant else "embedded engine, PyTorch",
            "dtype": self.dtype,
            "device": settings.device,
        }
        self._cache: Any = model.decoder.new_cache((self._blocks + 1) * BLOCK)
        self._step_tokens = max(BLOCK, min(STEP_TOKENS, STEP_LOGITS // self.vocab))

    def compute(self, jobs: Sequence[PassJob], done: OnComputed | None = None) -> list[Numbers]:
        numbers: list[Numbers | None] = [None] * len(jobs)
        names: dict[str, int] = {}
        keys = [_key(job, names) for job in jobs]
        order = sorted(range(len(jobs)), key=lambda i: keys[i].tobytes())
        for load in self._loads(order, jobs, keys):
            self._run([sequence for _, sequence in load], done)
            for i, sequence in load:
                routes = None if self.routes is None else sequence.routes
                numbers[i] = Numbers(
                    sequence.logprobs, sequence.best, routes, sequence.tied, sequence.top, sequence.weights
                )
        return [one for one in numbers if one is not None]

    def _loads(
        self, order: Sequence[int], jobs: Sequence[PassJob], keys: Sequence[np.ndarray]
    ) -> Iterator[list[tuple[int, _Sequence]]]:
        """The jobs in loads that fit the cache. Neighbours in the order of their keys share the longest beginnings."""
        load: list[tuple[int, _Sequence]] = []
        free, before = self._blocks, -1
        for i in order:
            job, key = jobs[i], keys[i]
            shared = 0
            if load:
                shared = min(_common(keys[before], key), job.first) // BLOCK
                if -(-len(key) // BLOCK) - shared > free:
                    yield load
                    load, free, shared = [], self._blocks, 0
            source = load[-1][1] if shared else None
            own = -(-len(key) // BLOCK) - shared
            table = np.arange(self._blocks - free + 1, self._blocks - free + 1 + own, dtype=np.int32)
            if source is not None:
                table = np.concatenate([source.table[:shared], table])
            free -= own
            load.append((i, self._sequence(job, table, shared * BLOCK, source)))
            before = i
        if load:
            yield load

    def _sequence(self, job: PassJob, table: np.ndarray, start: int, source: _Sequence | None) -> _Sequence:
        rows = len(job.ids) - 1 - job.first
        made = _Sequence(job, table, start, source, again_due=job.again is not None)
        made.logprobs, made.best = np.zeros(rows), np.zeros(rows)
        if self.routes is not None:
            made.routes = np.zeros((rows, *self.routes), dtype=np.int64)
            if job.weights and self._loaded.first.decoder.gives_router_weights:
                made.weights = np.zeros((rows, *self.routes), dtype=np.float32)
        return made

    def _run(self, sequences: Sequence[_Sequence], done: OnComputed | None) -> None:
        waiting = list(sequences)
        while waiting:
            works = self._next_step(waiting)
            self._step(works)
            waiting = [sequence for sequence in waiting if not sequence.over]
            if done is not None:
                done(sum(work.last - work.first for work in works))

    def _next_step(self, waiting: Sequence[_Sequence]) -> list[_Work]:
        """The passes of one model with the most to do; one that is loaded goes first."""
        ready: dict[str, list[_Work]] = {}
        for sequence in waiting:
            if sequence.begin():
                name, work = _next_of(sequence)
                ready.setdefault(name, []).append(work)
        sizes = {name: sum(work.last - work.first for work in works) for name, works in ready.items()}
        name = max(ready, key=lambda one: (self._loaded.here(one), sizes[one]))
        model = self._loaded.of(name).model
        # Adapters of one base share its steps, where they are loaded.
        others = [one for one in ready if one != name and self._loaded.here(one)]
        beside = [one for one in others if self._loaded.of(one).model is model]
        taken: list[_Work] = []
        left = self._step_tokens
        for work in itertools.chain.from_iterable(ready[one] for one in (name, *beside)):
            if left <= 0:
                break
            last = min(work.last, work.first + left)
            taken.append(_Work(work.sequence, work.first, last, work.writes))
            left -= last - work.first
        return sorted(taken, key=lambda work: work.last - work.first > 1)

    @torch.inference_mode()
    def _step(self, works: Sequence[_Work]) -> None:
        weights = [self._loaded.of(_name(work)) for work in works]
        batch = _packed(works)
        if any(one.adapter is not None for one in weights):
            batch = StepBatch(**{**vars(batch), "adapters": tuple(one.adapter for one in weights)})
        wanted, places = _rows(works)
        # A decoder gives at least one row.
        rows = np.array(wanted or [0], dtype=np.int64)
        decoder = weights[0].model.decoder
        shares = None
        if self.routes is not None and any(work.sequence.weights is not None for work in works):
            shares = np.empty((len(batch.ids), *self.routes), np.float32)
        logits, routes = decoder.forward(batch, self._cache, rows, shares)
        raw = logits.float()
        scores = raw - raw.logsumexp(-1, keepdim=True)
        at = 0
        ties = decoder.router_ties
        for work, first in zip(works, batch.spans[:, 0].tolist(), strict=True):
            sequence, job = work.sequence, work.sequence.job
            sequence.tied |= bool(ties[first : first + work.last - work.first].any())
            begin = max(work.first, job.first)
            count = work.last - begin
            if count > 0:
                own = scores[at : at + count]
                targets = torch.as_tensor(list(job.ids[begin + 1 : work.last + 1]), device=own.device)
                row = slice(begin - job.first, work.last - job.first)
                sequence.logprobs[row] = own.gather(1, targets[:, None])[:, 0].cpu().numpy()
                sequence.best[row] = own.amax(-1).cpu().numpy()
                of_batch = slice(first + begin - work.first, first + work.last - work.first)
                if sequence.routes is not None and routes is not None:
                    sequence.routes[row] = routes[of_batch]
                if sequence.weights is not None and shares is not None:
                    sequence.weights[row] = shares[of_batch]
                if job.look is not None:
                    job.look(begin - job.first, raw[at : at + count].cpu().numpy())
                if job.top and begin == job.first:
                    sequence.top = tuple(own[0].topk(min(job.top, self.vocab)).indices.tolist())
                at += count
            if work.writes:
                sequence.done = work.last
            else:
                sequence.again_due = False
        assert at == places


def _name(work: _Work) -> str:
    job = work.sequence.job
    if not work.writes:
        assert job.again is not None
        return job.again[1]
    return job.kv[work.first]


def _next_of(sequence: _Sequence) -> tuple[str, _Work]:
    """Its next passes of one snapshot."""
    job = sequence.job
    if job.again is not None and sequence.again_due and sequence.done > job.again[0]:
        position, name = job.again
        return name, _Work(sequence, position, position + 1, writes=False)
    first = sequence.done
    name, last = job.kv[first], first + 1
    end = sequence.end
    if job.again is not None and sequence.again_due:
        # The pass over KV that is there comes right behind it, so that the row it replaces is not written later.
        end = min(end, job.again[0] + 1)
    while last < end and job.kv[last] == name:
        last += 1
    return name, _Work(sequence, first, last)


def _rows(works: Sequence[_Work]) -> tuple[list[int], int]:
    """The rows of the batch with logits that are asked for, and how many."""
    rows: list[int] = []
    at = 0
    for work in works:
        begin = max(work.first, work.sequence.job.first)
        rows += range(at + begin - work.first, at + work.last - work.first) if begin < work.last else ()
        at += work.last - work.first
    return rows, len(rows)


def _packed(works: Sequence[_Work]) -> StepBatch:
    ids: list[int] = []
    positions, slots, spans, tables = [], [], [], []
    row = offset = 0
    for work in works:
        own = np.arange(work.first, work.last, dtype=np.int64)
        table = work.sequence.table[: -(-work.last // BLOCK)]
        ids += work.sequence.job.ids[work.first : work.last]
        positions.append(own)
        place = table[own // BLOCK].astype(np.int64) * BLOCK + own % BLOCK
        slots.append(place if work.writes else np.full_like(place, SCRATCH_SLOT))
        spans.append((row, len(own), work.first, offset))
        tables.append(table)
        row, offset = row + len(own), offset + len(table)
    return StepBatch(
        ids=np.array(ids, dtype=np.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        spans=np.array(spans, dtype=np.int32),
        blocks=np.concatenate(tables).astype(np.int32),
        block_size=BLOCK,
    )


def _key(job: PassJob, names: dict[str, int]) -> np.ndarray:
    """A number for each position: equal beginnings have equal KV. Big-endian, so that their bytes are in their order."""
    numbers = np.array([names.setdefault(name, len(names)) for name in job.kv], dtype=np.int64)
    return (numbers << _TOKEN_BITS | np.array(job.ids[:-1], dtype=np.int64)).astype(">i8")


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many positions the two begin with alike."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
