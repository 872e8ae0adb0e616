"""One admitted request on its way through the engine: events in, a stream or a plain response out.

Owns: what a generation is given, which is the replica that it runs on and its own work.
Always holds: every choice ends with a finish reason or the request ends with an error; the engine's iterator is closed
however it ends, so nothing is generated for a client that is gone. Nothing of `Surroundings` belongs to one request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from midstream.core.errors import AnotherBoot, EngineFailed, EngineLost, StreamGivenUp
from midstream.core.references import TurnReference
from midstream.core.resumption import Opening, ResumeLogWriter
from midstream.core.served_names import ServedNames
from midstream.core.traces import sampling_of
from midstream.core.types import GenerationEvent, ModelInfo
from midstream.engine.base import Engine, EngineDied, StreamLost
from midstream.replica.gate import Gate
from midstream.replica.record_files import RecordFiles
from midstream.replica.request.checked import Prompt
from midstream.replica.response.again import GeneratedAgain, Take, generated_again
from midstream.replica.response.answer import NOTHING, Extras, Parts, ResponseHead
from midstream.replica.response.choice import Choice, Piece
from midstream.replica.response.engine_events import EngineEvents
from midstream.replica.response.measured import Measured, Timings
from midstream.replica.response.prompt_echo import PromptEcho
from midstream.replica.response.referenced import ReferencedRecords, split
from midstream.replica.response.resume import Continued, branch_seam, digest
from midstream.replica.response.stages import choices_and_stages
from midstream.replica.response.token_lane import TokenLane
from midstream.replica.response.work import Work
from midstream.replica.sessions import TurnStats
from midstream.replica.text.chat import TextModel
from midstream.replica.turns.history import History, branches_of

#: Events of a resumed stream; each takes a few microseconds.
REPLAYED_AT_ONCE = 256


@dataclass(kw_only=True, eq=False, repr=False)
class Surroundings:
    """What a generation needs of the replica that it runs on. Nothing here belongs to one request."""

    engine: Engine
    info: ModelInfo
    text: TextModel
    names: ServedNames
    gate: Gate
    serving: Callable[[], str]
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    on_engine_death: Callable[[str], None]
    boot: str
    #: The boot that serves now.
    boot_now: Callable[[], str]
    #: What the engine calls the policy whose weights the requests take; "" is the deployment's own.
    policy: str = ""
    #: What the files of a snapshot are, comparable between replicas; "": not known.
    files_of: Callable[[str], str] = lambda snapshot: ""
    #: Held while a resumed stream replays its log: one stream at a time.
    replays: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check_boot(self, meant: str | None = None) -> None:
        """Raises AnotherBoot when the engine of this boot is gone, or the request was meant for another boot."""
        now = self.boot_now()
        if not self.boot == now == (meant or now):
            raise AnotherBoot("the replica restarted after this request was sent to it; retry this request")


class Sink(Protocol):
    """Where a stream goes."""

    @property
    def writable(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    async def drained(self) -> None:
        """Returns when it is writable."""


class Generation:
    """One admitted request. Use `stream` or `plain`, once, inside `Service.admitted`."""

    def __init__(
        self,
        service: Surroundings,
        work: Work,
        timings: Timings,
        *,
        resumable: bool = False,
        continued: Continued | None = None,
        histories: Sequence[History] = (),
        files: RecordFiles | None = None,
    ) -> None:
        """resumable: the stream carries what another replica needs to continue it. continued: the stream to continue.
        histories: get what is sampled, one for each prompt; or none. files: where the records go that the request wants by
        reference."""
        checked = self.checked = work.checked
        self._service, self._work = service, work
        self._histories = histories
        #: Whether each token needs a route, a sampling mask, and the weights of its route.
        self._routes, self._masks = checked.routes, checked.masks
        self._router_weights = checked.router_weights
        is_traced = bool(histories) and histories[0].records != "none"
        #: Whether the choices keep which snapshots computed their KV.
        self._keeps_kv = checked.perf_metrics or is_traced or checked.by_file
        self._applied = self._apply if histories else self._released
        self._continued = continued
        opening = self._opening(resumable) if continued is None else continued.opening
        #: Of the response, as clients may call it.
        self.ids = {opening.id, opening.id.removeprefix(work.wire.id_prefix)}
        requests = work.requests
        if resumable or continued is not None:
            requests = [replace(request, want_kv_snapshots=True) for request in requests]
        for history, request in zip(histories, requests, strict=bool(histories)):
            history.sampling = sampling_of(request)
        self._engine = EngineEvents(service.engine, [*requests], checked.n)
        ends = frozenset(requests[0].sampling.stop_token_ids)
        self._choices, self._stages = choices_and_stages(
            checked, work.prompts, ends, service.text, work.tool_format, opening.nonce or opening.id
        )
        shows_prompt = checked.echo != 0 or checked.prompt_from is not None
        self._echo = PromptEcho(checked, work.prompts) if shows_prompt else None
        self._prompt_records = {} if self._echo is None else self._echo.records
        self.timings = timings
        self._measured = Measured(
            service.monotonic, service.gate, checked, work.prompts, timings, self._serving()
        )
        self.resumable = resumable and continued is None
        self._resume_log = ResumeLogWriter(opening, len(self._choices)) if self.resumable else None
        head, inline = _head(service, opening), checked
        self._referenced: ReferencedRecords | None = None
        if checked.by_file and files is not None:
            shared, inline = split(checked, requests, work.stay_s)
            self._referenced = ReferencedRecords(files, checked, head, work.prompts, shared)
        self._again = generated_again(continued, checked, self._engine, len(self._choices), self._had)
        self._encoder = work.wire.encoder(inline, head, service.text.vocabulary, work.details)
        self._encoder.cached = self._measured.cached
        keeps = self._encoder.keeps and checked.stream
        self._parts = Parts(checked, work.prompts, service.text.vocabulary, keeps=keeps)
        if opening.branch is not None and continued is None:
            self._encoder.seam = branch_seam(opening.branch)

    def _opening(self, resumable: bool) -> Opening:
        work, prompts = self._work, self._work.prompts
        continues = not work.whole
        if self._histories:
            continues = continues or any(history.continues for history in self._histories)
        drawn, own = uuid.uuid4().hex, work.checked.response_id
        return Opening(
            f"{work.wire.id_prefix}{own or drawn}",
            int(self._service.clock()),
            work.seed,
            digest(prompts) if resumable else "",
            prompts[0].token_ids if resumable and continues else None,
            # Clients may give every turn of a trajectory one id.
            "" if own is None else drawn,
            within=prompts[0].within,
            branch=branches_of(self._histories) if self._histories else None,
        )

    # -- what others ask

    @property
    def names(self) -> ServedNames:
        return self._service.names

    @property
    def ignored(self) -> Sequence[str]:
        return self._work.ignored

    @property
    def labels(self) -> Mapping[str, float]:
        """The snapshots that tokens were labelled with, in their order, and when each first was."""
        return self._measured.labels

    def headers(self, *, done: bool) -> dict[str, str]:
        """The metrics known by now as response headers."""
        metrics = self._measured.metrics(done=done, aborted=bool(self._engine.aborted))
        return {f"fireworks-{name}": str(value) for name, value in metrics.items()}

    @property
    def turn(self) -> TurnStats:
        """What it was like, from its end on."""
        return self._measured.turn

    def measure(self, turn: TurnStats) -> None:
        """Fills in the turn, at the request's end."""
        self._measured.fill_in(turn, self._choices)

    def abort(self, choices: Collection[int]) -> None:
        """End the open ones of these choices with what they have, and the finish reason `abort`."""
        self._engine.abort(choices if self._again is None else self._again.abort(choices))

    # -- the two forms of an answer

    async def stream(self, sink: Sink) -> None:
        """Server-sent events, as many at a time as one engine event gives."""
        encoder, log, parts = self._encoder, self._resume_log, self._parts

        def take(choice: Choice, event: GenerationEvent) -> None:
            pieces = self._applied(choice, event, replayed=False)
            data = b"" if log is None else log.write(choice.index, event, choice.finish is not None)
            for piece in pieces:
                data += encoder.event(parts.part(choice.index, piece), NOTHING)
            if choice.finish is not None:
                data += encoder.event(parts.end(choice, self._measured.snapshot), self._at_end())
            if data:
                sink.write(data)

        if self._again is not None:
            await self._begin_again(self._again)
        elif self._continued is not None:
            async with self._service.replays:
                released = await self._replay(self._continued)
            # The engine may have restarted meanwhile, on the base weights.
            self._service.check_boot()
            for choice, pieces in released:
                self._not_sent(choice, pieces)
        await self._run(take if self._again is None else partial(self._again.take, take), sink, self._lane())
        tail = b""
        if self._referenced is not None:
            extras = await self._stored(self._referenced, Extras())
            tail = encoder.reference_event(self._measured.snapshot, extras)
        if self.checked.include_usage:
            tail += encoder.usage_event(self._measured.snapshot, self._extras())
        last = b"" if log is None else log.end()
        # Clients that read lines themselves may take a comment behind the finish reason for the end of the stream.
        sink.write(tail + last + encoder.end())

    def _lane(self) -> TokenLane | None:
        """The short way of this stream's tokens, if it has one."""
        by_token = self._encoder.by_token()
        long = self._echo or self._stages or self._continued or self._encoder.keeps
        if by_token is None or long:
            return None
        given = (self._choices, self._parts, by_token, self._resume_log, self._histories, self._referenced)
        return TokenLane(*given, self.checked)

    def _at_end(self) -> Extras:
        """Of the event that ends a choice: the last one's tells of the whole request."""
        if self._engine.open:
            return Extras(prompts=self._prompt_records)
        extras = self._extras()
        if self.checked.include_usage:
            # The usage has an event of its own.
            extras.counts = None
        return extras

    async def plain(self) -> bytes:
        by_choice: list[list[Piece]] = [[] for _ in self._choices]

        def take(choice: Choice, event: GenerationEvent) -> None:
            by_choice[choice.index] += self._applied(choice, event, replayed=False)

        await self._run(take)
        snapshot = self._measured.snapshot
        parts = [self._parts.whole(choice, by_choice[choice.index], snapshot) for choice in self._choices]
        extras = self._extras()
        if self._referenced is not None:
            extras = await self._stored(self._referenced, extras)
        return self._encoder.whole(parts, snapshot, extras)

    async def _stored(self, referenced: ReferencedRecords, extras: Extras) -> Extras:
        """Choices become turns when their file is stored, as only then there is an answer. Raises RecordsNotStored."""
        reference = await referenced.stored(self._choices)
        for choice in self._choices if self._histories else ():
            history = self._histories[choice.index // self.checked.n]
            own = TurnReference(reference, choice.index, referenced.columns(history.records))
            history.end(choice, self._service.clock(), own)
        if self.checked.referenced:
            return replace(extras, reference=reference)
        return replace(extras, in_files=referenced.in_files(reference))

    def _extras(self) -> Extras:
        measured, aborted = self._measured, bool(self._engine.aborted)
        metrics = measured.metrics(done=True, aborted=aborted) if self.checked.perf_metrics else UNSET
        counts = measured.counts(self._choices, aborted=aborted)
        return Extras(counts, metrics, self._prompt_records, measured.took_s)

    # -- events in, pieces out

    async def _replay(self, continued: Continued) -> list[tuple[Choice, list[Piece]]]:
        """Replays what the client already has, up to where the stream broke off. Returns what each event released.

        Other streams continue meanwhile. Raises CannotResume, InvalidRequest.
        """
        n, released = self.checked.n, list[tuple[Choice, list[Piece]]]()
        ids: list[list[int]] = [[] for _ in self._choices]
        for index, event in continued.events():
            choice = self._choices[index]
            if choice.finish is None:
                released.append((choice, self._apply(choice, event, replayed=True)))
                if len(released) % REPLAYED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                ids[index] += [record.token_id for record in event.tokens]
        finished = [choice.index for choice in self._choices if choice.finish is not None]
        serving = self._serving()
        continued.check_snapshot(serving, self._service.files_of(serving), finished)
        requests = self._engine.requests
        for prompt, request in enumerate(requests):
            own = self._choices[prompt * n : (prompt + 1) * n]
            unfinished = [choice for choice in own if choice.finish is None]
            shown = all(choice.echoed for choice in unfinished)
            requests[prompt] = replace(
                request,
                emitted=tuple(None if c.finish is not None else tuple(ids[c.index]) for c in own),
                prompt_records=0 if shown else request.prompt_records,
                kv_age_max=0 if continued.exact else request.kv_age_max,
            )
        tokens_before = self._measured.tokens_before = [choice.generated for choice in self._choices]
        self._encoder.seam = continued.seam(tokens_before)
        return released

    async def _begin_again(self, again: GeneratedAgain) -> None:
        """Raises CannotResume, InvalidRequest."""
        assert self._continued is not None
        tokens, serving = await again.read(), self._serving()
        self._service.check_boot()
        self._continued.check_snapshot(serving, self._service.files_of(serving), ())
        self._engine.requests[:] = [replace(request, kv_age_max=0) for request in self._engine.requests]
        self._encoder.seam = self._continued.seam(tokens)

    def _had(self, choice: Choice, event: GenerationEvent) -> None:
        self._not_sent(choice, self._applied(choice, event, replayed=False))

    def _not_sent(self, choice: Choice, pieces: Sequence[Piece]) -> None:
        """The client has them."""
        for piece in pieces:
            self._encoder.replayed(self._parts.part(choice.index, piece))

    async def _run(
        self,
        take: Take,
        sink: Sink | None = None,
        lane: TokenLane | None = None,
    ) -> None:
        """Give `take` each event of the engine until every choice is complete. No event is taken while `sink`
        is full. lane: of an event that it can tell, its bytes go to `sink` instead."""
        engine, choices = self._engine, self._choices
        if engine.open == 0:
            # The stream was whole before it was resumed.
            return

        def at_once(event: GenerationEvent) -> bool:
            if sink is not None:
                if not sink.writable:
                    return False
                if lane is not None and (data := lane.data(event)) is not None:
                    sink.write(data)
                    return True
            take(choices[event.index], event)
            return True

        try:
            async with aclosing(engine.events(at_once)) as events:
                async for event in events:
                    if event.error is not None:
                        raise EngineFailed(event.error)
                    choice = choices[event.index]
                    if choice.finish is None:
                        take(choice, event)
                    if engine.open == 0:
                        return
                    if sink is not None and not sink.writable:
                        await sink.drained()
        except EngineDied as error:
            self._service.on_engine_death(str(error))
            raise EngineLost("the engine stopped while it served this request") from error
        except StreamLost as error:
            raise StreamGivenUp(f"the engine gave this request up: {error}") from error
        if engine.open:
            raise EngineFailed("the engine ended the request before every choice was complete")

    def _apply(self, choice: Choice, event: GenerationEvent, *, replayed: bool) -> list[Piece]:
        """replayed: another replica sent the event, and the client has what it released."""
        pieces = self._released(choice, event, replayed=replayed)
        if self._histories:
            history = self._histories[choice.index // self.checked.n]
            history.take(choice.index, pieces, replayed=replayed)
            if choice.finish is not None and self._referenced is None:
                history.end(choice, self._service.clock())
        return pieces

    def _released(self, choice: Choice, event: GenerationEvent, *, replayed: bool) -> list[Piece]:
        """As _apply, of a request without a history."""
        measured = self._measured
        if event.cached_tokens is not None or event.queued_s is not None:
            measured.take(choice.index // self.checked.n, event)
        if event.kv_snapshots is not None:
            self._take_kv(choice, event, replayed)
        pieces = [] if self._echo is None else self._echoed(self._echo, choice, event, replayed)
        stage = None if self._stages is None else self._stages[choice.index]
        if event.tokens and not replayed and self.timings.first_token is None:
            measured.first_token()
        for record in event.tokens:
            if self._routes and record.route is None and not replayed:
                raise EngineFailed("the engine returned a token without its route")
            if self._router_weights and record.router_weights is None and not replayed:
                raise EngineFailed("the engine returned a token without its router weights")
            if self._masks and record.mask is None and not replayed:
                raise EngineFailed("the engine returned a token without its sampling mask")
            if choice.snapshot != record.snapshot or record.snapshot not in measured.labels:
                measured.label(choice.snapshot, record.snapshot)
            new = choice.feed(record)
            if self._referenced is not None:
                self._referenced.take(choice.index, record)
            pieces += new if stage is None else stage.feed(new)
            if stage is not None and stage.complete and choice.finish is None:
                choice.finish = "stop"
            if choice.finish is not None:
                break
        if event.finish is not None and choice.finish is None:
            if event.finish == "abort" and not (self._engine.is_aborted(choice.index) or replayed):
                raise EngineFailed("the engine aborted the request")
            new = choice.end(event.finish)
            pieces += new if stage is None else stage.feed(new)
        return pieces if choice.finish is None else self._ended(choice, event, pieces, replayed)

    def _ended(
        self, choice: Choice, event: GenerationEvent, pieces: list[Piece], replayed: bool
    ) -> list[Piece]:
        """The last pieces of a choice: each has a snapshot."""
        if self._stages is not None:
            stage = self._stages[choice.index]
            pieces += stage.end()
            choice.call_in_thinking = stage.call_in_thinking
            if stage.called and choice.finish == "stop":
                choice.finish = "tool_calls"
        choice.close_kv(self._prompt_tokens(choice))
        self._engine.ended(choice.index, unknown=event.finish is None and not replayed)
        snapshot = self._measured.snapshot
        return [piece if piece.snapshot else replace(piece, snapshot=snapshot) for piece in pieces]

    def _echoed(
        self, echo: PromptEcho, choice: Choice, event: GenerationEvent, replayed: bool
    ) -> list[Piece]:
        """The pieces of the prompt that the choice has to show now."""
        prompt = choice.index // self.checked.n
        request = self._engine.requests[prompt]
        echo.take(prompt, request, event)
        if not echo.of(prompt, choice):
            return []
        if request.prompt_records == 0 or replayed:
            return echo.pieces(prompt, choice, request, event, self._serving())
        before = choice.snapshot
        pieces = echo.pieces(prompt, choice, request, event, None)
        if self._referenced is not None:
            shown = (scored.record for piece in pieces for scored in piece.echoed)
            self._referenced.take_prompt(choice.index, shown)
        for piece in pieces:
            self._measured.label(before, piece.snapshot)
            before = piece.snapshot
        return pieces

    def _take_kv(self, choice: Choice, event: GenerationEvent, replayed: bool) -> None:
        """Notes which snapshots computed the KV that the event reports."""
        assert event.kv_snapshots is not None
        if self._keeps_kv:
            choice.rename_kv(event.renamed)
            choice.take_kv(event.kv_snapshots, self._prompt_tokens(choice))
        if self._continued is not None and not replayed:
            again = self._prompt_tokens(choice) + choice.generated - 1
            self._continued.check_kv(choice.index, event, again)

    # -- inside

    def _serving(self) -> str:
        """What serves this request."""
        return self._work.requests[0].snapshot or self._service.serving()

    def _prompt_of(self, choice: Choice) -> Prompt:
        return self._work.prompts[choice.index // self.checked.n]

    def _prompt_tokens(self, choice: Choice) -> int:
        return len(self._prompt_of(choice).token_ids)


def _head(service: Surroundings, opening: Opening) -> ResponseHead:
    return ResponseHead(
        id=opening.id,
        created=opening.created,
        model=service.names.model,
        wide_routes=service.info.num_experts > 256,
        route_shape=(service.info.moe_layers, service.info.top_k),
        vocab_size=service.info.vocab_size,
    )
