"""One engine: requests in, a step at a time, events out.

Owns: what is remembered per KV slot (the snapshot that computed it, its route, the token's prompt score) and the
translation of a step's numbers into token records.
Always holds:
- The snapshot written into a record is the one whose forward pass gave the logits, because both are read in the same
  step and weights change only between steps.
- What is kept beside a cached block is what a cold run would report: a block is reused for an echo only if its scores were
  computed under the snapshot that serves now.
- A failed step ends the requests that were in it, and no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from midstream.config import EngineSettings
from midstream.engine.embedded.blocks import BlockPool
from midstream.engine.embedded.runner import LoadedModel, Runner, load_model
from midstream.engine.embedded.sampler import Sampled, SampleRow, sample, score
from midstream.engine.embedded.scheduler import Scheduler, Sequence, Work
from midstream.types import (
    BASE_SNAPSHOT,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerationEvent,
    ModelInfo,
    SwapTiming,
    TokenRecord,
    TopLogprob,
)

logger = logging.getLogger(__name__)

NO_SNAPSHOT = -1


@dataclass(eq=False)
class Handle:
    """A request inside the engine."""

    request: GenerateRequest
    sequences: list[Sequence] = field(default_factory=list)


Output = tuple[str, GenerationEvent]  # request_id, event


@dataclass(frozen=True)
class _Rows:
    """Which packed tokens need logits: `scores` for prompt records, then `samples`."""

    scores: list[tuple[Work, int, int]]  # work, position whose pass scores position + 1, packed row
    samples: list[tuple[Work, int]]  # work, packed row


class EngineCore:
    def __init__(self, model_dir: Path, settings: EngineSettings) -> None:
        self._settings = settings
        dtype = None if settings.dtype is None else getattr(torch, settings.dtype)
        model = load_model(model_dir, dtype, settings.device)
        self._dtype: torch.dtype = model.module.dtype
        num_blocks = settings.kv_cache_tokens // settings.block_size + 1
        self.runner = Runner(
            model, block_size=settings.block_size, num_blocks=num_blocks, device=settings.device
        )
        self.pool = BlockPool(num_blocks, settings.block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=settings.max_batch_tokens,
            max_running=settings.max_running,
            scored=self._has_scores,
            on_allocate=self._forget_block,
        )
        slots = num_blocks * settings.block_size
        self.snapshots = [BASE_SNAPSHOT]  # by ordinal; the last one serves
        self.kv_snapshot = np.full(slots, NO_SNAPSHOT, dtype=np.int32)
        self._score = np.zeros(slots, dtype=np.float32)
        self._score_snapshot = np.full(slots, NO_SNAPSHOT, dtype=np.int32)
        self._route = np.zeros((slots, max(model.routers, 0), max(model.top_k, 1)), dtype=_route_dtype(model))
        self._handles: dict[str, Handle] = {}
        self._steps = self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

    @property
    def snapshot(self) -> str:
        return self.snapshots[-1]

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    def info(self) -> ModelInfo:
        config = self.runner.model.module.config
        capacity = self.pool.total * self.pool.block_size
        return self.runner.info(min(int(config.max_position_embeddings), capacity))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks_used=self.pool.used,
            kv_blocks_total=self.pool.total,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
        )

    def add(self, request: GenerateRequest) -> list[Output]:
        """Queue a request; returns its error event if it can never run."""
        problem = self._problem_with(request)
        if problem is not None:
            return [(request.request_id, GenerationEvent(error=problem))]
        leader = Sequence(request, 0)
        followers = [Sequence(request, i, leader) for i in range(1, request.n)]
        self._handles[request.request_id] = Handle(request, [leader, *followers])
        for sequence in (leader, *followers):
            self.scheduler.add(sequence)
        return []

    def abort(self, request_id: str) -> None:
        """Drop what is left of a request; unknown ids (already finished) are fine."""
        handle = self._handles.pop(request_id, None)
        for sequence in handle.sequences if handle else ():
            if not sequence.done:
                self.scheduler.remove(sequence)

    def step(self) -> list[Output]:
        """Compute one batch and report it; nothing to do gives no events."""
        works = self.scheduler.plan()
        if not works:
            return []
        try:
            return self._run(works)
        except RuntimeError as error:  # torch reports every kernel failure as one
            logger.exception("step failed; its %d sequences end with an error", len(works))
            ids = dict.fromkeys(w.seq.request.request_id for w in works)
            for request_id in ids:
                self.abort(request_id)
            return [(i, GenerationEvent(error=f"the engine failed on this request: {error}")) for i in ids]

    def stage(self, directory: Path) -> LoadedModel:
        """Load a snapshot's files; touches nothing that serves. May run on another thread."""
        return load_model(directory, self._dtype, self._settings.device)

    def set_staged(self, model: LoadedModel | None) -> None:
        self.runner.staged = model

    def commit(self, snapshot: str) -> SwapTiming:
        """Switch weights between two steps; running sequences keep their KV."""
        started = time.perf_counter()
        crossed = len(self.scheduler.running)
        self.runner.switch()
        self.snapshots.append(snapshot)
        pause_ms = (time.perf_counter() - started) * 1e3
        return SwapTiming(snapshot=snapshot, pause_ms=pause_ms, streams_crossed=crossed)

    def check(self) -> None:
        """Assert that the block books balance; when idle, that no sequence holds a block."""
        self.pool.check()
        if self.idle:
            assert self.pool.used == 0, f"idle, but blocks are in use: {self.pool!r}"

    def _problem_with(self, request: GenerateRequest) -> str | None:
        if not request.prompt:
            return "the prompt is empty"
        if request.request_id in self._handles:
            return f"request id {request.request_id} is already running"
        vocab = self.runner.model.module.config.vocab_size
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            return f"prompt token ids must be 0 to {vocab - 1}"
        return self.scheduler.check_fits(request)

    def _run(self, works: list[Work]) -> list[Output]:
        rows = _rows_needed(works)
        wanted = [row for _, _, row in rows.scores] + [row for _, row in rows.samples]
        logits, routes = self.runner.forward(works, wanted)
        self._steps += 1
        self._remember_pass(works, routes)
        split = len(rows.scores)
        if split:
            self._keep_scores(rows, logits[:split])
        prompt_tops = self._prompt_tops(rows, logits[:split]) if split else {}
        sampled = _sample(rows.samples, logits[split:]) if rows.samples else None
        for work in works:
            self._advance(work)
        return self._report(rows, sampled, routes, prompt_tops)

    def _remember_pass(self, works: list[Work], routes: np.ndarray | None) -> None:
        row = 0
        for work in works:
            skip = max(work.write_from - work.first, 0)
            slots = self._slots(work.seq, work.first + skip, work.last)
            self.kv_snapshot[slots] = len(self.snapshots) - 1
            if routes is not None:
                self._route[slots] = routes[row + skip : row + work.size]
            row += work.size
            last = work.seq.last_sampled
            if last is not None and work.last == len(work.seq.tokens):
                slot = self._slot(work.seq, work.last - 1)
                self._score[slot], self._score_snapshot[slot] = last

    def _keep_scores(self, rows: _Rows, logits: torch.Tensor) -> None:
        targets = [work.seq.tokens[position + 1] for work, position, _ in rows.scores]
        scored = score(logits, targets, [0] * len(targets))
        slots = [self._slot(work.seq, position + 1) for work, position, _ in rows.scores]
        self._score[slots] = scored.logprobs
        self._score_snapshot[slots] = len(self.snapshots) - 1

    def _prompt_tops(
        self, rows: _Rows, logits: torch.Tensor
    ) -> dict[tuple[int, int], tuple[TopLogprob, ...]]:
        counts = [work.seq.request.top_logprobs for work, _, _ in rows.scores]
        if not any(counts):
            return {}
        top = score(logits, [0] * len(counts), counts).top
        return {
            (id(work.seq), position + 1): _alternatives(pairs)
            for (work, position, _), pairs in zip(rows.scores, top, strict=True)
        }

    def _advance(self, work: Work) -> None:
        size = self.pool.block_size
        for own, holder in self.scheduler.advance(work):
            offsets = np.flatnonzero(
                self._score_snapshot[own * size : (own + 1) * size] == len(self.snapshots) - 1
            )
            self._score[holder * size + offsets] = self._score[own * size + offsets]
            self._score_snapshot[holder * size + offsets] = len(self.snapshots) - 1

    def _report(
        self,
        rows: _Rows,
        sampled: Sampled | None,
        routes: np.ndarray | None,
        prompt_tops: dict[tuple[int, int], tuple[TopLogprob, ...]],
    ) -> list[Output]:
        outputs: list[Output] = []
        for i, (work, row) in enumerate(rows.samples):
            seq = work.seq
            tokens: tuple[TokenRecord, ...] = ()
            finish: FinishReason | None = "length" if seq.request.sampling.max_tokens == 0 else None
            prompt, cached = self._announce(seq, prompt_tops)
            if finish is None:
                assert sampled is not None
                route = routes[row] if routes is not None and seq.request.want_routes else None
                tokens = (self._record(sampled, i, route),)
                finish = self._append(seq, tokens[0])
            event = GenerationEvent(
                index=seq.index, tokens=tokens, prompt=prompt, cached_tokens=cached, finish=finish
            )
            outputs.append((seq.request.request_id, event))
            if finish is not None:
                self._finish(seq)
        return outputs

    def _record(self, sampled: Sampled, i: int, route: np.ndarray | None) -> TokenRecord:
        return TokenRecord(
            token_id=sampled.tokens[i],
            logprob=sampled.logprobs[i],
            sampling_logprob=sampled.sampling_logprobs[i],
            snapshot=self.snapshot,
            route=None if route is None else route.tobytes(),
            top_logprobs=_alternatives(sampled.top[i]),
        )

    def _append(self, seq: Sequence, record: TokenRecord) -> FinishReason | None:
        seq.tokens.append(record.token_id)
        seq.last_sampled = (record.logprob, len(self.snapshots) - 1)
        self._generated_tokens += 1
        if record.token_id in seq.request.sampling.stop_token_ids:
            return "stop"
        return "length" if seq.generated >= seq.request.sampling.max_tokens else None

    def _announce(
        self, seq: Sequence, prompt_tops: dict[tuple[int, int], tuple[TopLogprob, ...]]
    ) -> tuple[tuple[TokenRecord, ...] | None, int | None]:
        """What the first event of a choice carries, once: prompt records and the number of cached prompt tokens."""
        if seq.announced:
            return None, None
        prompt = self._prompt_records(seq, prompt_tops) if seq.request.prompt_records else None
        seq.announced = True
        cached = seq.cached_tokens or 0
        if seq.index == 0:
            self._prompt_tokens += seq.prompt_len
            self._cached_tokens += cached
        return prompt, cached

    def _prompt_records(
        self, seq: Sequence, prompt_tops: dict[tuple[int, int], tuple[TopLogprob, ...]]
    ) -> tuple[TokenRecord, ...]:
        first = max(seq.prompt_len - seq.request.prompt_records, 0)
        slots = self._slots(seq, 0, seq.prompt_len)
        records = []
        for position in range(first, seq.prompt_len):
            slot = slots[position]
            if position == 0:
                records.append(TokenRecord(seq.tokens[0], 0.0, None, self.snapshot))
                continue
            ordinal = int(self._score_snapshot[slot])
            assert ordinal != NO_SNAPSHOT, f"prompt position {position} was not scored"
            routed = seq.request.want_routes and self._route.shape[1] > 0
            records.append(
                TokenRecord(
                    token_id=seq.tokens[position],
                    logprob=float(self._score[slot]),
                    sampling_logprob=None,
                    snapshot=self.snapshots[ordinal],
                    route=self._route[slots[position - 1]].tobytes() if routed else None,
                    top_logprobs=prompt_tops.get((id(seq), position), ()),
                )
            )
        return tuple(records)

    def _finish(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        handle = self._handles.get(seq.request.request_id)
        if handle is not None and all(s.done for s in handle.sequences):
            del self._handles[seq.request.request_id]

    def _has_scores(self, block: int, first_offset: int) -> bool:
        start = block * self.pool.block_size
        kept = self._score_snapshot[start + first_offset : start + self.pool.block_size]
        return bool((kept == len(self.snapshots) - 1).all())

    def _forget_block(self, block: int) -> None:
        start = block * self.pool.block_size
        self._score_snapshot[start : start + self.pool.block_size] = NO_SNAPSHOT

    def _slot(self, seq: Sequence, position: int) -> int:
        size = self.pool.block_size
        return seq.blocks[position // size] * size + position % size

    def _slots(self, seq: Sequence, first: int, last: int) -> np.ndarray:
        size = self.pool.block_size
        positions = np.arange(first, last)
        return np.asarray(seq.blocks, dtype=np.int64)[positions // size] * size + positions % size


def _rows_needed(works: list[Work]) -> _Rows:
    scores: list[tuple[Work, int, int]] = []
    samples: list[tuple[Work, int]] = []
    row = 0
    for work in works:
        seq = work.seq
        first = max(work.first, seq.first_scored - 1)
        scores.extend(
            (work, p, row + p - work.first) for p in range(first, min(work.last, seq.prompt_len - 1))
        )
        if work.last == len(seq.tokens):
            samples.append((work, row + work.size - 1))
        row += work.size
    return _Rows(scores, samples)


def _sample(samples: list[tuple[Work, int]], logits: torch.Tensor) -> Sampled:
    rows = [
        SampleRow(
            params=work.seq.request.sampling,
            index=work.seq.index,
            position=len(work.seq.tokens),
            history=work.seq.tokens,
            prompt_len=work.seq.prompt_len,
            top_logprobs=work.seq.request.top_logprobs,
        )
        for work, _ in samples
    ]
    with torch.inference_mode():
        return sample(logits, rows)


def _alternatives(pairs: SequenceOf[tuple[int, float]]) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(token, value) for token, value in pairs)


def _route_dtype(model: LoadedModel) -> np.dtype[np.unsignedinteger]:
    return np.dtype(np.uint8) if model.num_experts <= 256 else np.dtype("<u2")
