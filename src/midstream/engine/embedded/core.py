"""One engine: it takes requests, computes one step at a time and returns events.

Owns: the token records that are made from a step's numbers, and the scores kept beside the KV for later requests.
Always holds:
- The snapshot in a record is that of the forward pass that gave the logits: both are read in the same step, and weights change
  only between steps.
- The logprob, the snapshot and the route of a record come from one pass, also when they were kept (token_scores.py). An echo
  reuses a cached block only if the serving snapshot scored it.
- A failed step ends the requests that were in it, and no other. After three failed steps in a row the engine gives up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import msgspec
import numpy as np
import torch

from midstream.core.config import EngineSettings
from midstream.core.types import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerationEvent,
    ModelInfo,
    SwapTiming,
    TokenRecord,
    TopLogprob,
)
from midstream.engine.embedded.batch import LogitRows, not_finite, rows_needed, sample_rows
from midstream.engine.embedded.constraint import Constraints, follower_of
from midstream.engine.embedded.growing_files import GrowingFiles
from midstream.engine.embedded.host_blocks import kv_books
from midstream.engine.embedded.kv_copies import CoreCopies
from midstream.engine.embedded.limits import TokenFollower
from midstream.engine.embedded.loading import (
    batch_invariant,
    cache_tokens,
    load_ahead,
    load_beside,
    load_model,
)
from midstream.engine.embedded.model_runner import ModelRunner, dispose
from midstream.engine.embedded.protocol import embedded_card
from midstream.engine.embedded.sampler import new_sampler, ranks_of
from midstream.engine.embedded.scheduler import Scheduler, Sequence, StepWork
from midstream.engine.embedded.token_scores import NO_SNAPSHOT, shown, weights_of
from midstream.engine.embedded.weights import Retired, Weights, WeightStore, load_adapter_beside
from midstream.engine.step import Sampled
from midstream.snapshots.adapter import is_adapter

logger = logging.getLogger(__name__)

FAILED_STEPS_MAX = 3
#: How many prompt tokens are scored at a time, with logits in float32.
SCORED_ROWS_MAX = 256

#: The id of a request, and an event of it.
Output = tuple[str, GenerationEvent]


class EngineCore:
    def __init__(self, model_dir: Path, settings: EngineSettings, folder: Path | None = None) -> None:
        self._settings = settings
        model = load_model(model_dir, settings)
        num_blocks = cache_tokens(model, settings) // settings.block_size + 1
        self._model_dir = model_dir
        self.store = WeightStore(model, self._in_use)
        self.runner = ModelRunner(self.store, settings, num_blocks)
        self.pool, self._scores, self._provenance, host = kv_books(self.runner, num_blocks, settings, folder)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=settings.max_batch_tokens,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_running=settings.max_running,
            scored=lambda block, offset, epoch: self._scores.complete(block, offset, epoch),
            on_allocate=lambda block: self._scores.forget(block),
        )
        self.scheduler.track = self.store.policies[""]
        self.copies = CoreCopies(self.scheduler, self.store, host, self._scores, self._provenance)
        # By commit.
        self.snapshots = self.store.labels
        self._constraints = Constraints.load(
            model_dir, model.config.vocab_size, self.runner.info(0).eos_token_ids
        )
        self._sampler = new_sampler(settings)
        # Of each request that is not done, its choices.
        self._sequences: dict[str, list[Sequence]] = {}
        self._failed_steps = 0
        self._step_ended = 0.0
        self._steps = self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

    @property
    def snapshot(self) -> str:
        """What the default policy serves."""
        return self.store.label("")

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def busy(self) -> bool:
        """Whether there is a step to do."""
        return self.scheduler.busy

    def info(self) -> ModelInfo:
        config = self.runner.model.config
        capacity = self.pool.total * self.pool.block_size
        info = self.runner.info(min(int(config.max_position_embeddings), capacity))
        grammars, model = self._constraints is not None, self.runner.model
        invariant = batch_invariant(model, self._settings)
        card = embedded_card(self._settings, grammars=grammars, reproducible=invariant)
        return msgspec.structs.replace(info, grammars=grammars, card=card)

    def stats(self) -> EngineStats:
        claims = self.scheduler.claims
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv=self.pool.kv(claims.missing, claims.needed_again),
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
        )

    def add(self, request: GenerateRequest) -> list[Output]:
        """Queue a request. Returns its error event if it can never run, and the last events of choices that are complete."""
        problem = self._problem_with(request)
        if problem is not None:
            return [(request.request_id, GenerationEvent(error=problem))]
        first, *others = request.choices
        track = self.store.track(request.policy, request.snapshot)
        # Earlier renames are of KV that this request has not reported.
        known = len(self.store.renamed)
        leader = Sequence(request, first, track=track, renames=known)
        followers = [Sequence(request, i, leader, track=track, renames=known) for i in others]
        sequences = self._sequences[request.request_id] = [leader, *followers]
        ends: list[Output] = []
        for sequence in sequences:
            sequence.matcher = self._follower(request)
            finish = None
            for token in request.emitted_of(sequence.index):
                finish = self._end_after(sequence, token)
            self.scheduler.add(sequence)
            if finish is not None:
                ends.append((request.request_id, GenerationEvent(index=sequence.index, finish=finish)))
        for _, event in ends:
            self.abort(request.request_id, event.index)
        return ends

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop what is left of a request, or one choice of it. Ids of finished requests are ignored."""
        for sequence in self._sequences.get(request_id, ()):
            if not sequence.done and index in (None, sequence.index):
                self._finish(sequence)

    def step(self) -> list[Output]:
        """Compute one batch and return its events. Raises the error of a step when it is not the fault of its requests."""
        works = self.scheduler.plan()
        if not works:
            return []
        try:
            outputs = self._run(works)
        except RuntimeError as error:
            # PyTorch reports every failure of a kernel as one.
            logger.exception("step failed; its %d sequences end with an error", len(works))
            self._failed_steps += 1
            if self._failed_steps >= FAILED_STEPS_MAX or isinstance(error, torch.AcceleratorError):
                # The device or the weights are in doubt, so a new process has to begin.
                raise
            return self._end_with_error(works, f"the engine failed on this request: {error}")
        self._failed_steps = 0
        self._step_ended = time.perf_counter()
        return outputs

    def _end_with_error(self, works: list[StepWork], message: str) -> list[Output]:
        ids = dict.fromkeys(w.seq.request.request_id for w in works)
        for request_id in ids:
            self.abort(request_id)
        return [(request_id, GenerationEvent(error=message)) for request_id in ids]

    def stage(self, directory: Path) -> Weights:
        """Load the files of a snapshot, without touching what serves. May run on another thread. Frees what was retired and not
        taken first, so that there are never three models."""
        dispose(self.take_retired())
        serving = self.runner.model
        if not is_adapter(directory):
            return Weights(load_beside(serving, directory, self._settings))
        base = self.store.base or load_beside(serving, self._model_dir, self._settings)
        return load_adapter_beside(base, directory, self._model_dir, self._settings)

    def stage_ahead(self, growing: GrowingFiles) -> Weights:
        """As `stage`, of a whole model's files that are still being made. Frees nothing, so that it may run beside digests."""
        return Weights(load_ahead(self.runner.model, growing, self._settings))

    def set_staged(self, weights: Weights | None, policy: str = "") -> None:
        self.store.set_staged(weights, policy)

    def take_retired(self) -> list[Retired]:
        """What neither serves nor will. Free it with `dispose`, on another thread, once nothing reads it."""
        return self.store.take_retired()

    def commit(
        self,
        snapshot: str,
        policy: str = "",
        files: str = "",
        overwritten: SequenceOf[tuple[str, str]] = (),
    ) -> SwapTiming:
        """Switch a policy's weights between two steps; its running sequences keep their KV.

        files, overwritten: see engine.base.Slot.announce.
        """
        track = self.store.policies.get(policy)
        crossed = sum(seq.track is track for seq in self.scheduler.running)
        # Frozen sequences stood still anyway.
        waited = crossed and not self.scheduler.frozen
        started = self._step_ended if waited else time.perf_counter()
        self.store.commit(snapshot, policy, files, overwritten)
        pause_ms = (time.perf_counter() - started) * 1e3
        return SwapTiming(snapshot=snapshot, pause_ms=pause_ms, streams_crossed=crossed)

    def retain(self, policy: str, snapshots: Collection[str]) -> None:
        """See engine.base.Slot."""
        self.store.retain(policy, snapshots)

    def end_policy(self, policy: str) -> None:
        self.abandon_kv(policy)
        self.store.end(policy)

    def abandon_kv(self, policy: str) -> None:
        """See engine.base.Slot. The pool's blocks go in their order, and those of the second tier at once."""
        self.pool.drop_offloaded(lambda epoch: self.store.owner(epoch) == policy)

    def _in_use(self) -> set[int]:
        """The commits that sequences stay with, also when their policy switches or ends."""
        tracks = {seq.track for choices in self._sequences.values() for seq in choices if not seq.done}
        policies = set(self.store.policies.values())
        return {track.epoch for track in tracks if track is not None and track not in policies}

    def weights(self, policy: str = "") -> list[tuple[str, torch.Tensor]]:
        """The weights that a policy serves, for digests. They stay readable after a switch, until they are disposed of."""
        track = self.store.policies.get(policy)
        return [] if track is None else list(self.store.of(track.epoch).tensors())

    def check(self) -> None:
        """Assert that the block books balance and that cached blocks were computed by the weights that they are kept under.

        Of an idle engine, assert that no sequence holds a block.
        """
        self.pool.check()
        self._provenance.check(self.pool.indexed())
        if self.idle:
            assert self.pool.used == 0, f"idle, but blocks are in use: {self.pool!r}"

    def _problem_with(self, request: GenerateRequest) -> str | None:
        if not request.prompt:
            return "the prompt is empty"
        if request.request_id in self._sequences:
            return f"request id {request.request_id} is already running"
        if self.store.track(request.policy, request.snapshot) is None:
            return f"{request.policy or 'the default policy'}@{request.snapshot or 'newest'} is not loaded"
        vocab = self.runner.model.config.vocab_size
        for ids in (request.prompt, *filter(None, request.emitted)):
            if not 0 <= min(ids) <= max(ids) < vocab:
                return f"prompt token ids must be 0 to {vocab - 1}"
        try:
            self._follower(request)
        except ValueError as error:
            return f"the grammar cannot be used: {error}"
        longest = len(request.prompt) + request.sampling.max_tokens
        context = int(self.runner.model.config.max_position_embeddings)
        if longest > context:
            return f"prompt plus max_tokens is {longest} tokens, but the model's context is {context}"
        return self.scheduler.check_fits(request)

    def _follower(self, request: GenerateRequest) -> TokenFollower | None:
        """What follows a choice of the request from its start. Raises ValueError. Most requests have nothing to follow."""
        if request.grammar is None and not request.sampling.limited:
            return None
        return follower_of(request, self._constraints, self.runner.model.config.vocab_size)

    def knows_grammar(self, grammar: str) -> bool:
        """Whether `add` compiles nothing for a request with this grammar."""
        return self._constraints is None or self._constraints.knows(grammar)

    def prepare_grammar(self, grammar: str) -> None:
        """Compile a grammar for a later `add`. May run on another thread."""
        if self._constraints is not None:
            self._constraints.prepare(grammar)

    def _run(self, works: list[StepWork]) -> list[Output]:
        rows = rows_needed(works)
        began = time.perf_counter()
        logits, routes = self.runner.forward(works, rows.packed)
        if self.pool.offload is not None:
            self.pool.offload.price.stepped([work.size for work in works], time.perf_counter() - began)
        self._provenance.write(self.runner.written, self.runner.epochs)
        self._steps += 1
        split = len(rows.scores)
        for first in range(0, split, SCORED_ROWS_MAX):
            last = min(first + SCORED_ROWS_MAX, split)
            self._keep_scores(rows.scores[first:last], logits[first:last], routes)
        ends = split + len(rows.samples)
        sampled = self._sampler.sample(logits[split:ends], sample_rows(rows)) if rows.samples else None
        # The KV of broken sequences must not enter the prefix cache.
        broken = not_finite(rows, sampled, logits[ends:])
        self._keep_last_sampled([work.seq for work, _ in rows.samples if work.seq not in broken])
        for work in works:
            if work.seq not in broken:
                for own, holder in self.scheduler.advance(work):
                    self._scores.copy(own, holder, work.epoch)
        return self._report(rows, sampled, broken, routes)

    def _keep_scores(
        self, scores: list[tuple[StepWork, int, int]], logits: torch.Tensor, routes: np.ndarray | None
    ) -> None:
        """scores: (work, position, row in the batch). The pass at `position` scores the token after it."""
        targets = [work.seq.tokens[position + 1] for work, position, _ in scores]
        tops = [work.seq.request.top_logprobs for work, _, _ in scores]
        scored = self._sampler.score(logits, targets, tops)
        slots = np.array(self._slots([(work.seq, position + 1) for work, position, _ in scores]))
        at = [row for _, _, row in scores]
        taken = None if routes is None else routes[at]
        ties, epochs = self.runner.router_ties[at], self.runner.epochs[at]
        self._scores.write(slots, np.array(scored.logprobs), taken, epochs, ties)
        ranks = ranks_of(logits, targets) if any(tops) else [0] * len(targets)
        for (work, position, _), top, rank in zip(scores, scored.top, ranks, strict=True):
            if top:
                work.seq.prompt_tops[position + 1] = _alternatives(top), rank

    def _keep_last_sampled(self, sequences: SequenceOf[Sequence]) -> None:
        """Store the score of each sequence's newest generated token.

        The score is known since the token was drawn, but the token has a slot only in the step that computes its KV.
        """
        kept = [(seq, seq.last_sampled) for seq in sequences if seq.last_sampled is not None]
        if not kept:
            return
        slots = self._slots([(seq, len(seq.tokens) - 1) for seq, _ in kept])
        self._scores.write_read(slots, [last for _, last in kept])

    def _report(
        self, rows: LogitRows, sampled: Sampled | None, broken: set[Sequence], routes: np.ndarray | None
    ) -> list[Output]:
        outputs: list[Output] = []
        router_ties = self.runner.router_ties
        packed, width = (None, 0) if routes is None else (routes.tobytes(), self.runner.route_bytes)
        for work, _ in rows.ends:
            if work.seq in broken and not work.seq.done:
                outputs += self._end_broken(work)
        for i, (work, row) in enumerate(rows.samples):
            seq = work.seq
            if seq.done:
                # Another choice of its request failed in this step.
                continue
            if seq in broken:
                outputs += self._end_broken(work)
                continue
            if seq.matcher is not None and seq.matcher.error is not None:
                outputs.append((seq.request.request_id, self._dead_end(seq)))
                continue
            assert sampled is not None
            route = None if packed is None else packed[row * width : (row + 1) * width]
            event = self._event(work, sampled, i, route, int(router_ties[row]))
            outputs.append((seq.request.request_id, event))
        return outputs

    def _end_broken(self, work: StepWork) -> list[Output]:
        return self._end_with_error(
            [work], f"snapshot {self.snapshots[work.seq.now]} gave a logit that is not finite"
        )

    def _dead_end(self, seq: Sequence) -> GenerationEvent:
        """The last event of a choice that no token may continue."""
        assert seq.matcher is not None
        logger.info("%s/%d has come to a dead end: %s", seq.request.request_id, seq.index, seq.matcher.error)
        return self._full_event(seq, (), "dead_end")

    def _event(
        self, work: StepWork, sampled: Sampled, i: int, route: bytes | None, router_tie: int
    ) -> GenerationEvent:
        """The next event of the work's sequence, from sample i of this step. Its pass took `route`."""
        seq, epoch, at = work.seq, work.epoch, self.runner.expert_bytes
        request = seq.request
        finish: FinishReason | None = "length"
        tokens: tuple[TokenRecord, ...] = ()
        if request.sampling.max_tokens > 0:
            record = TokenRecord(
                sampled.tokens[i],
                sampled.logprobs[i],
                sampled.sampling_logprobs[i],
                self.snapshots[epoch],
                route[:at] if route and request.want_routes else None,
                _alternatives(top) if (top := sampled.top[i]) else (),
                sampled.near_ties[i] | router_tie,
                mask=sampled.masks[i],
                router_weights=weights_of(route, at) if request.want_router_weights else None,
            )
            seq.tokens.append(record.token_id)
            seq.last_sampled = (record.logprob, epoch, route, router_tie)
            self._generated_tokens += 1
            tokens, finish = (record,), self._end_after(seq, record.token_id)
        kv_reported = not request.want_kv_snapshots or seq.reported_epoch == epoch
        if seq.announced and finish is None and kv_reported:
            # Nearly all events end here.
            return GenerationEvent(index=seq.index, tokens=tokens)
        return self._full_event(seq, tokens, finish)

    def _full_event(
        self, seq: Sequence, tokens: tuple[TokenRecord, ...], finish: FinishReason | None
    ) -> GenerationEvent:
        """An event with all that the sequence has to report: the first and the last one, and after a change of its KV."""
        announced = seq.announced
        prompt, cached = (None, None) if announced else self._announce(seq)
        kv_snapshots, kv_files = self._provenance.spans(seq, finish)
        renamed = self._provenance.renamed(seq) if seq.request.want_kv_snapshots else ()
        if finish is not None:
            self._finish(seq)
        return GenerationEvent(
            index=seq.index,
            tokens=tokens,
            prompt=prompt,
            cached_tokens=cached,
            queued_s=None if announced else seq.queued_s,
            finish=finish,
            kv_snapshots=kv_snapshots,
            kv_files=kv_files,
            renamed=renamed,
        )

    def _end_after(self, seq: Sequence, token: int) -> FinishReason | None:
        """How the sequence ends after its newest token, if it does. The matcher has not seen the token yet."""
        sampling = seq.request.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        if seq.matcher is not None and seq.matcher.accept(token):
            return "stop"
        return "length" if len(seq.tokens) - seq.prompt_len >= sampling.max_tokens else None

    def _announce(self, seq: Sequence) -> tuple[tuple[TokenRecord, ...] | None, int | None]:
        """Prompt records and the number of cached prompt tokens, for the first event of a choice."""
        prompt = self._prompt_records(seq) if seq.request.prompt_records else None
        seq.announced = True
        seq.prompt_tops.clear()
        cached = seq.cached_tokens or 0
        # An urgent request is the replica's own and counts for no user.
        if seq.leader is None and not seq.request.urgent:
            self._prompt_tokens += seq.prompt_len
            self._cached_tokens += cached
        return prompt, cached

    def _prompt_records(self, seq: Sequence) -> tuple[TokenRecord, ...]:
        first = max(seq.prompt_len - seq.request.prompt_records, 0)
        positions = range(first, seq.prompt_len)
        slots = self._slots([(seq, position) for position in positions])
        records = []
        for position, slot in zip(positions, slots, strict=True):
            if position == 0:
                records.append(TokenRecord(seq.tokens[0], 0.0, None, self.snapshots[seq.now]))
                continue
            logprob, ordinal, route, router_tie = self._scores.read(slot)
            assert ordinal != NO_SNAPSHOT, f"prompt position {position} was not scored"
            top, rank = seq.prompt_tops.get(position, ((), 0))
            records.append(
                TokenRecord(
                    token_id=seq.tokens[position],
                    logprob=logprob,
                    sampling_logprob=None,
                    snapshot=self.snapshots[ordinal],
                    top_logprobs=top,
                    near_tie=router_tie,
                    rank=rank,
                    **shown(route, self.runner.expert_bytes, seq.request),
                )
            )
        return tuple(records)

    def _finish(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        if all(s.done for s in self._sequences.get(seq.request.request_id, ())):
            self._sequences.pop(seq.request.request_id, None)
            if self.store.spare:
                self.store.sweep()

    def _slots(self, places: SequenceOf[tuple[Sequence, int]]) -> list[int]:
        """Where the KV of these positions lies. places: (sequence, position)."""
        size = self.pool.block_size
        return [seq.blocks[position // size] * size + position % size for seq, position in places]


def _alternatives(pairs: SequenceOf[tuple[int, float]]) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(token, value) for token, value in pairs)
