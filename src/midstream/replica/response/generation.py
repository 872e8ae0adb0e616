"""One admitted request on its way through the engine: events in, a stream or a plain response out.

Always holds: every choice ends with a finish reason or the request ends with an error; the engine's iterator is closed
however it ends, so nothing is generated for a client that is gone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any, Protocol, cast

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from midstream.core.errors import EngineFailed, EngineLost, StreamGivenUp
from midstream.core.resumption import Opening, ResumeLogWriter
from midstream.core.types import GenerateRequest, GenerationEvent, TokenRecord
from midstream.core.versions import ServedNames
from midstream.engine.base import EngineDied, StreamLost
from midstream.replica.request.checked import Prompt
from midstream.replica.response.choice import Choice, Piece
from midstream.replica.response.kept import Kept
from midstream.replica.response.resume import Continued, branch_seam, digest
from midstream.replica.response.shapes import CachedDetails, Extras, RawOutput, Usage
from midstream.replica.response.stages import choices_and_stages
from midstream.replica.response.work import Surroundings, Timings, Work, echoed_tokens
from midstream.replica.sessions import Turn
from midstream.replica.turns.history import History, told_branches
from midstream.replica.wire.base import ResponseHead

#: Events of a resumed stream; each takes a few microseconds.
REPLAYED_AT_ONCE = 256


class Sink(Protocol):
    """Where a stream goes."""

    @property
    def writable(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    async def drained(self) -> None:
        """Returns when it is writable."""


class Generation:
    """One admitted request. Use `stream` or `plain`, once, inside `Service.admitted`."""

    _final_metrics: dict[str, Any] | None = None
    _replaying = False

    def __init__(
        self,
        service: Surroundings,
        work: Work,
        timings: Timings,
        *,
        resumable: bool = False,
        continued: Continued | None = None,
        histories: Sequence[History] = (),
    ) -> None:
        """resumable: the stream carries what another replica needs to go on with it; continued: it goes on with one.
        histories: get what is sampled, one for each prompt; or none."""
        checked, prompts, requests = work.checked, work.prompts, work.requests
        self._service = service
        self._histories = histories
        self._traces = bool(histories) and histories[0].records != "none"
        self._id_prefix = prefix = work.wire.id_prefix
        self.ignored = work.ignored
        self.checked = checked
        self._prompts = prompts
        self._requests = requests
        self.timings = timings
        #: Maps a prompt index to the number of reused tokens.
        self._cached: dict[int, int] = {}
        opening = self._opening(work, resumable) if continued is None else continued.opening
        #: Of the response, as clients may call it.
        self.ids = {opening.id, opening.id.removeprefix(prefix)}
        ends = frozenset(requests[0].sampling.stop_token_ids)
        self._choices, self._stages = choices_and_stages(
            checked, prompts, ends, service.text, work.tool_format, opening.nonce or opening.id
        )
        #: By prompt, where they were asked for.
        self._prompt_records: dict[int, tuple[TokenRecord, ...]] = {}
        self._echoed = [echoed_tokens(checked, prompt) for prompt in prompts]
        #: By prompt: the number of choices without a finish reason.
        self._open = [checked.n] * len(prompts)
        self._open_in_all = len(self._choices)
        #: The newest snapshot that any token was labelled with.
        self._snapshot = self._serving()
        #: The snapshots that tokens were labelled with, in their order, and when each first was.
        self.labels: dict[str, float] = {}
        #: What it was like, from its end on.
        self.turn = Turn()
        self._continued = continued
        #: Choices that a trainer ended.
        self._aborted: set[int] = set()
        #: The tokens of each choice that were generated elsewhere.
        self._had = [0] * len(self._choices)
        self.resumable = resumable and continued is None
        self._resume_log = ResumeLogWriter(opening, len(self._choices)) if self.resumable else None
        if resumable or continued is not None:
            self._requests = [replace(request, want_kv_snapshots=True) for request in requests]
        self._encoder = work.wire.encoder(
            checked, _head(service, opening), service.text.vocabulary, work.details
        )
        self._encoder.cached = self._cached
        branches = told_branches(histories)
        if branches is not None and continued is None:
            self._encoder.seam = branch_seam(branches)

    def _opening(self, work: Work, resumable: bool) -> Opening:
        prompts = digest(self._prompts) if resumable else ""
        continues = not work.whole or any(history.continues for history in self._histories)
        ids = self._prompts[0].token_ids if resumable and continues else None
        drawn, own = uuid.uuid4().hex, self.checked.response_id
        # Clients may give every turn of a trajectory one id.
        nonce = "" if own is None else drawn
        created = int(self._service.clock())
        return Opening(
            f"{self._id_prefix}{own or drawn}",
            created,
            work.seed,
            prompts,
            ids,
            nonce,
            within=self._prompts[0].within,
            branch=told_branches(self._histories),
        )

    async def stream(self, sink: Sink) -> None:
        """Server-sent events, as many at a time as one engine event gives."""
        checked, encoder = self.checked, self._encoder
        greeted = [False] * len(self._choices)
        kept = [Kept([], [], []) for _ in self._choices] if checked.raw_output else None

        def take(choice: Choice, event: GenerationEvent, pieces: list[Piece]) -> None:
            index = choice.index
            data = (
                b""
                if self._resume_log is None
                else self._resume_log.write(index, event, choice.finish is not None)
            )
            prompt = self._prompts[index // checked.n]
            for piece in pieces:
                data += encoder.chunk(index, piece, None if greeted[index] else prompt)
                greeted[index] = True
                if kept is not None:
                    kept[index].keep(piece)
            if choice.finish is not None:
                raw = encoder.raw_output(kept[index], prompt) if kept is not None else UNSET
                data += self._finish(choice, None if greeted[index] else prompt, raw)
            if data:
                sink.write(data)

        if self._continued is not None:
            async with self._service.replays:
                released = await self._replay(self._continued)
            # The engine may have started anew meanwhile, on the base weights.
            self._service.check_boot()
            for choice, pieces in released:
                prompt = self._prompts[choice.index // checked.n]
                encoder.replayed(choice, pieces, None if greeted[choice.index] else prompt)
                greeted[choice.index] |= bool(pieces) or choice.finish is not None
                if kept is not None:
                    for piece in pieces:
                        kept[choice.index].keep(piece)
        await self._run(take, sink)
        tail = encoder.usage_chunk(self._snapshot, self._extras()) if checked.include_usage else b""
        last = b"" if self._resume_log is None else self._resume_log.end()
        sink.write(last + tail + encoder.end())

    def _finish(self, choice: Choice, first: Prompt | None, raw: RawOutput | UnsetType) -> bytes:
        extras = Extras(prompts=self._prompt_records)
        if self._open_in_all == 0:
            extras = self._extras()
            if self.checked.include_usage:
                # The usage has a chunk of its own.
                extras.usage = UNSET
        return self._encoder.finish_chunk(choice, choice.snapshot or self._snapshot, first, raw, extras)

    async def _replay(self, continued: Continued) -> list[tuple[Choice, list[Piece]]]:
        """Replays what the client already has, up to where the stream broke off. Returns what each event released.

        Other streams go on meanwhile. Raises CannotResume, InvalidRequest.
        """
        n, released = self.checked.n, list[tuple[Choice, list[Piece]]]()
        ids: list[list[int]] = [[] for _ in self._choices]
        self._replaying = True
        for index, event in continued.events():
            choice = self._choices[index]
            if choice.finish is None:
                released.append((choice, self._apply(index // n, choice, event)))
                if len(released) % REPLAYED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                ids[index] += [record.token_id for record in event.tokens]
        self._replaying = False
        finished = [choice.index for choice in self._choices if choice.finish is not None]
        serving = self._serving()
        continued.check_snapshot(serving, self._service.files_of(serving), finished)
        for prompt, request in enumerate(self._requests):
            own = self._choices[prompt * n : (prompt + 1) * n]
            unfinished = [choice for choice in own if choice.finish is None]
            shown = all(choice.echoed for choice in unfinished)
            self._requests[prompt] = replace(
                request,
                emitted=tuple(None if c.finish is not None else tuple(ids[c.index]) for c in own),
                prompt_records=0 if shown else request.prompt_records,
                kv_age_max=0 if continued.exact else request.kv_age_max,
            )
        self._had = [choice.generated for choice in self._choices]
        self._encoder.seam = continued.seam(self._had)
        return released

    def _serving(self) -> str:
        """What serves this request."""
        return self._requests[0].snapshot or self._service.serving()

    @property
    def names(self) -> ServedNames:
        return self._service.names

    def abort(self, choices: Collection[int]) -> None:
        """Those that are open end with what they have, and the finish reason `abort`."""
        self._aborted.update(choices)
        for prompt, request in enumerate(self._requests):
            ended = [index for index in range(self.checked.n) if self._is_aborted(prompt, index)]
            if self._open[prompt] and len(ended) == self.checked.n:
                self._service.engine.abort(request.request_id)
            elif self._open[prompt]:
                for index in ended:
                    self._service.engine.abort(request.request_id, index)

    def _is_aborted(self, prompt: int, index: int) -> bool:
        return prompt * self.checked.n + index in self._aborted

    async def plain(self) -> bytes:
        kept = [self._encoder.kept() for _ in self._choices]

        def take(choice: Choice, _: GenerationEvent, pieces: list[Piece]) -> None:
            for piece in pieces:
                kept[choice.index].keep(piece)

        await self._run(take)
        return self._encoder.plain(self._choices, kept, self._prompts, self._snapshot, self._extras())

    def _extras(self) -> Extras:
        metrics = self._metrics(done=True) if self.checked.perf_metrics else UNSET
        took_s = self._service.monotonic() - self.timings.started
        return Extras(self._usage(), metrics, self._prompt_records, took_s)

    def headers(self, *, done: bool) -> dict[str, str]:
        """The metrics known by now as response headers."""
        return {f"fireworks-{name}": str(value) for name, value in self._metrics(done=done).items()}

    async def _run(
        self, take: Callable[[Choice, GenerationEvent, list[Piece]], None], sink: Sink | None = None
    ) -> None:
        """Give `take` what each event of the engine released until every choice is complete. No event is taken while `sink`
        is full."""
        n = self.checked.n
        if self._open_in_all == 0:
            # The stream was whole before it was resumed.
            return
        try:
            async with aclosing(self._events()) as events:
                async for prompt, event in events:
                    if event.error is not None:
                        raise EngineFailed(event.error)
                    choice = self._choices[prompt * n + event.index]
                    if choice.finish is None:
                        take(choice, event, self._apply(prompt, choice, event))
                    if self._open_in_all == 0:
                        return
                    if sink is not None and not sink.writable:
                        await sink.drained()
        except EngineDied as error:
            self._service.on_engine_death(str(error))
            raise EngineLost("the engine stopped while it served this request") from error
        except StreamLost as error:
            raise StreamGivenUp(f"the engine gave this request up: {error}") from error
        raise EngineFailed("the engine ended the request before every choice was complete")

    def _ended(self, prompt: int, event: GenerationEvent) -> None:
        self._open[prompt] -= 1
        self._open_in_all -= 1
        if event.finish is None and not self._replaying:
            # A stop string, of which the engine knows nothing.
            self._service.engine.end_choice(self._requests[prompt].request_id, event.index)

    def _apply(self, prompt: int, choice: Choice, event: GenerationEvent) -> list[Piece]:
        pieces = self._released(prompt, choice, event)
        if self._histories:
            history = self._histories[prompt]
            history.take(choice.index, pieces, replayed=self._replaying)
            if choice.finish is not None:
                history.end(choice, self._service.clock())
        return pieces

    def _released(self, prompt: int, choice: Choice, event: GenerationEvent) -> list[Piece]:
        self._take_measures(prompt, choice, event)
        if event.prompt is not None and self.checked.prompt_from is not None:
            self._prompt_records[prompt] = self._check_echo(self._requests[prompt], event.prompt)
        pieces = self._echo(prompt, choice, event) if self._echoed[prompt] and not choice.echoed else []
        stage = None if self._stages is None else self._stages[choice.index]
        if event.tokens and self.timings.first_token is None and not self._replaying:
            self.timings.first_token = self._service.monotonic()
        for record in event.tokens:
            if self.checked.routes and record.route is None and not self._replaying:
                raise EngineFailed("the engine returned a token without its route")
            if choice.snapshot != record.snapshot or record.snapshot not in self.labels:
                self._note(choice.snapshot, record.snapshot)
            new = choice.feed(record)
            pieces += new if stage is None else stage.feed(new)
            if stage is not None and stage.complete and choice.finish is None:
                choice.finish = "stop"
            if choice.finish is not None:
                break
        if event.finish is not None and choice.finish is None:
            if event.finish == "abort" and not (choice.index in self._aborted or self._replaying):
                raise EngineFailed("the engine aborted the request")
            new = choice.end(event.finish)
            pieces += new if stage is None else stage.feed(new)
        if choice.finish is None:
            return pieces
        if stage is not None:
            pieces += stage.end()
            choice.call_in_thinking = stage.call_in_thinking
            if stage.called and choice.finish == "stop":
                choice.finish = "tool_calls"
        choice.close_kv(len(self._prompts[prompt].token_ids))
        self._ended(prompt, event)
        return [piece if piece.snapshot else replace(piece, snapshot=self._snapshot) for piece in pieces]

    def _take_measures(self, prompt: int, choice: Choice, event: GenerationEvent) -> None:
        """Notes the prompt's KV and the waiting time that the event tells."""
        if event.cached_tokens is not None:
            self._cached.setdefault(prompt, event.cached_tokens)
        if event.queued_s is not None:
            self.timings.queued_s = max(event.queued_s, self.timings.queued_s or 0.0)
        if event.kv_snapshots is not None and (self.checked.perf_metrics or self._traces):
            choice.rename_kv(event.renamed)
            choice.take_kv(event.kv_snapshots, len(self._prompts[prompt].token_ids))
        if self._continued is not None and not self._replaying:
            again = len(self._prompts[prompt].token_ids) + choice.generated - 1
            self._continued.check_kv(choice.index, event, again)

    def _note(self, before: str | None, snapshot: str) -> None:
        """A token of `snapshot` followed one of `before` in its choice. Events of several prompts overtake each other, so
        the token that came last is not always of the newest snapshot: one is newer when no token had it so far, or when
        a choice went on to it from the newest."""
        if snapshot not in self.labels or before == self._snapshot:
            self.labels.setdefault(snapshot, self._service.monotonic())
            self._snapshot = snapshot

    def _echo(self, prompt: int, choice: Choice, event: GenerationEvent) -> list[Piece]:
        request, size = self._requests[prompt], self._echoed[prompt]
        if request.prompt_records == 0 or self._replaying:
            snapshot = event.tokens[0].snapshot if event.tokens else self._serving()
            return choice.echo(tuple(TokenRecord(t, 0.0, None, snapshot) for t in request.prompt[-size:]))
        if event.prompt is None:
            if event.tokens or event.finish not in (None, "abort"):
                raise EngineFailed("the engine returned no records of the prompt")
            return []
        before = choice.snapshot
        pieces = choice.echo(self._check_echo(request, event.prompt)[-size:])
        for piece in pieces:
            self._note(before, piece.snapshot)
            before = piece.snapshot
        return pieces

    def _check_echo(
        self, request: GenerateRequest, records: tuple[TokenRecord, ...]
    ) -> tuple[TokenRecord, ...]:
        if tuple(r.token_id for r in records) != request.prompt[-request.prompt_records :]:
            raise EngineFailed("the engine returned records of other tokens than the prompt's")
        # Nothing scores the first prompt token.
        first = 1 if len(records) == len(request.prompt) else 0
        if self.checked.routes and any(r.route is None for r in records[first:]):
            raise EngineFailed("the engine returned a prompt token without its route")
        if first and len(records) > 1:
            # No pass scored it, so it has no snapshot of its own: the next token's.
            return (replace(records[0], snapshot=records[1].snapshot), *records[1:])
        return records

    async def _events(self) -> AsyncGenerator[tuple[int, GenerationEvent], None]:
        live = [prompt for prompt, choices in enumerate(self._open) if choices]
        if len(live) == 1:
            async with aclosing(self._generate(live[0])) as events:
                async for event in events:
                    yield live[0], event
            return
        queue: asyncio.Queue[tuple[int, GenerationEvent] | asyncio.Task[None]] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(index, queue)) for index in live]
        for pump in pumps:
            pump.add_done_callback(queue.put_nowait)
        running = len(pumps)
        try:
            while running:
                item = await queue.get()
                if isinstance(item, asyncio.Task):
                    running -= 1
                    item.result()
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            for pump in pumps:
                # One failure is shown; the others are the same one.
                if not pump.cancelled():
                    pump.exception()

    async def _generate(self, prompt: int) -> AsyncGenerator[GenerationEvent, None]:
        request = self._requests[prompt]
        # Before the engine knew of them. Others may be aborted while these are told.
        gone: list[int] = []
        while new := [i for i in request.choices if self._is_aborted(prompt, i) and i not in gone]:
            gone.append(new[0])
            yield GenerationEvent(index=new[0], finish="abort")
        if len(gone) == len(request.choices):
            return
        if gone:
            left = (None if index in gone else request.emitted_of(index) for index in range(request.n))
            request = replace(request, emitted=tuple(left))
        async with aclosing(_closable(self._service.engine.generate(request))) as events:
            async for event in events:
                yield event

    async def _pump(
        self, prompt: int, queue: asyncio.Queue[tuple[int, GenerationEvent] | asyncio.Task[None]]
    ) -> None:
        async with aclosing(self._generate(prompt)) as events:
            async for event in events:
                if self._open[prompt] == 0:
                    break
                queue.put_nowait((prompt, event))

    def measure(self, turn: Turn) -> None:
        """Fills in the turn, at the request's end."""
        self.turn = turn
        made = [choice.generated - had for choice, had in zip(self._choices, self._had, strict=True)]
        turn.prompt_tokens, turn.generated_tokens = self._usage().prompt_tokens, sum(made)
        turn.cached_tokens = sum(self._cached.values())
        turn.longest = max(made)
        turn.finishes = tuple([choice.finish or "abort" for choice in self._choices])
        first, now = self.timings.first_token, self._service.monotonic()
        turn.request_s, turn.queued_s = now - self.timings.started, self.timings.queued_s
        if first is not None:
            turn.first_token_s = first - self.timings.started
            turn.generation_s = now - first

    def _usage(self) -> Usage:
        prompt = sum(len(p.token_ids) for p in self._prompts)
        completion = sum(choice.generated for choice in self._choices)
        return Usage(prompt, completion, prompt + completion, self._cached_details())

    def _cached_details(self) -> CachedDetails | UnsetType:
        """Absent when a stop string ended the request before the engine told how much was cached."""
        if len(self._cached) < len(self._prompts) and (self.checked.stops or self._aborted):
            return UNSET
        return CachedDetails(sum(self._cached.values()))

    def _metrics(self, *, done: bool) -> dict[str, Any]:
        if self._final_metrics is not None:
            return self._final_metrics
        started, first_token = self.timings.started, self.timings.first_token
        metrics: dict[str, Any] = {"prompt-tokens": sum(len(p.token_ids) for p in self._prompts)}
        details = self._cached_details()
        if (done or len(self._cached) == len(self._prompts)) and details is not UNSET:
            metrics["cached-prompt-tokens"] = sum(self._cached.values())
        metrics["num-concurrent-requests"] = self._service.gate.inside
        if self.timings.queued_s is not None:
            metrics["prefill-queue-duration"] = round(self.timings.queued_s, 6)
        if first_token is not None:
            metrics["server-time-to-first-token"] = round(first_token - started, 6)
        if done:
            metrics["server-processing-time"] = round(self._service.monotonic() - started, 6)
            self._final_metrics = metrics
        return metrics


def _closable(events: AsyncIterator[GenerationEvent]) -> AsyncGenerator[GenerationEvent, None]:
    """The port's iterators have aclose (see Engine.generate); its type does not say so."""
    return cast("AsyncGenerator[GenerationEvent, None]", events)


def _head(service: Surroundings, opening: Opening) -> ResponseHead:
    return ResponseHead(
        id=opening.id,
        created=opening.created,
        model=service.names.model,
        wide_routes=service.info.num_experts > 256,
        route_shape=(service.info.moe_layers, service.info.top_k),
    )
