"""Serves one inference request: checks it, admits it, runs it on the engine, encodes what comes.

Always holds: a request that is not valid is refused before it waits at the gate, and one that the gate would refuse is
refused before it is tokenized; the salt is taken in the step in which the gate was passed; every choice ends with a finish
reason or the request ends with an error; leaving the context closes the engine's iterator, so nothing is generated for a
client that is gone.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Protocol, cast
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from midstream.engine.base import Engine, EngineDied
from midstream.errors import EngineFailed, InvalidRequest, ReplicaUnavailable
from midstream.names import ServedNames
from midstream.replica import admission, grammar
from midstream.replica.calling import CallStage, id_maker
from midstream.replica.chat import TextModel
from midstream.replica.checked import (
    Checked,
    Kind,
    Prompt,
    check,
    check_choices,
    check_messages,
    sampling_for,
    split_prompts,
)
from midstream.replica.choice import Choice, Piece
from midstream.replica.encode import DONE, CachedDetails, Encoder, Extras, Kept, RawOutput, Usage
from midstream.replica.namespaces import Namespaces, Session, cache_salt
from midstream.replica.schema import ChatBody, CompletionBody, parse_chat, parse_completion
from midstream.replica.toolformat import ToolFormat
from midstream.replica.tools import check_template, prepare_history
from midstream.sessionkey import session_from_body, session_from_headers
from midstream.types import (
    HEADER_SESSION,
    HEADER_TENANT,
    GenerateRequest,
    GenerationEvent,
    ModelInfo,
    TokenRecord,
)

HEADER_MODEL = "fireworks-model"
HEADER_ISOLATION = "x-prompt-cache-isolation-key"
_LONG_TEXT = 16_384  # characters of all prompts together from which tokenizing leaves the event loop


class Sink(Protocol):
    """Where a stream goes."""

    @property
    def writable(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    async def drained(self) -> None:
        """Returns when it is writable."""


class Timings(msgspec.Struct):
    started: float
    first_token: float | None = None
    queued_s: float | None = None  # in the engine, of the choice that waited longest


class Service:
    def __init__(
        self,
        *,
        engine: Engine,
        info: ModelInfo,
        text: TextModel,
        names: ServedNames,
        gate: admission.Gate,
        namespaces: Namespaces,
        serving: Callable[[], str],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        random_seed: Callable[[], int],
        on_engine_death: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.info = info
        self.text = text
        self.names = names
        self.gate = gate
        self.namespaces = namespaces
        self.serving = serving
        self.clock = clock
        self.monotonic = monotonic
        self.random_seed = random_seed
        self.on_engine_death = on_engine_death

    @asynccontextmanager
    async def admitted(
        self, kind: Kind, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Generation]:
        """A request inside the gate, ready to be streamed or answered. Raises MidstreamError."""
        timings = Timings(self.monotonic())
        parsed = parse_chat(body) if kind == "chat" else parse_completion(body)
        checked = check(parsed, self.info)
        wanted = self._wanted(checked.model, headers)
        patience = admission.patience(headers.get(admission.HEADER_DRAIN_TIMEOUT))
        session = session_of(checked, headers)
        tool_format = None if checked.tools is None else check_template(checked.tools, self.text.tools)
        given, size, read = self._unread(parsed, checked, len(body))
        choices = check_choices(given, checked.n)
        self.gate.check(choices)
        answer = await self._grammar(checked, tool_format)
        prompts = read() if size < _LONG_TEXT else await asyncio.to_thread(read)
        seed = self.random_seed() if checked.seed is None else checked.seed
        requests = self._requests(checked, prompts, seed, answer)
        await self.gate.enter(patience, choices)
        # No await from here until the request counts as inside: gate, snapshot and salt belong to the same moment.
        self.names.check_snapshot(wanted, self.serving())
        salt = self._salt(checked, session, headers)
        age_max = self.namespaces.kv_age_max
        requests = [replace(request, salt=salt, kv_age_max=age_max) for request in requests]
        with self.gate.admitted(choices):
            yield Generation(self, checked, prompts, requests, timings, tool_format)

    def _wanted(self, model: str, headers: Mapping[str, str]) -> str | None:
        """The snapshot asked for by name: in the body's model, or else in the header's."""
        wanted, param = self.names.split(model), "model"
        header = headers.get(HEADER_MODEL, "")
        if wanted is None and "@" in header:
            wanted, param = self.names.split(header), HEADER_MODEL
        if wanted == "":
            raise InvalidRequest(f"{param}: the snapshot named after @ must not be empty", param=param)
        return wanted

    def _unread(
        self, body: CompletionBody | ChatBody, checked: Checked, body_size: int
    ) -> tuple[int, int, Callable[[], list[Prompt]]]:
        """How many prompts there are, about how many characters to tokenize, and what does it; any thread may call it."""
        if isinstance(body, ChatBody):
            messages = check_messages(body.messages)
            if any("tool_calls" in message or "function_call" in message for message in messages):
                messages = prepare_history(messages, self.text.tools.arguments)
            tools = None if checked.tools is None else checked.tools.given
            return 1, body_size, partial(self._read_chat, messages, tools)
        prompts = split_prompts(body.prompt, self.info.vocab_size)
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return len(prompts), size, partial(self._read_prompts, prompts)

    async def _grammar(self, checked: Checked, tool_format: ToolFormat | None) -> str | None:
        """What the answer must match, compiled once here so that a mistake in it is the client's to see."""
        if checked.schema is None and (checked.tools is None or not checked.tools.constrained):
            return None
        param = "tools" if checked.schema is None else "response_format"
        if not self.info.grammars:
            what = "answers that must match a grammar" if param == "tools" else "it"
            raise InvalidRequest(f"{param}: this engine or tokenizer does not support {what}", param=param)
        eos = self.info.eos_token_ids
        return await asyncio.to_thread(
            grammar.build, checked.schema, checked.tools, tool_format, self.text, eos
        )

    def _read_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[Prompt]:
        text = self.text.render(messages, tools)
        return _not_empty([Prompt(self.text.encode_rendered(text), text)])

    def _read_prompts(self, prompts: list[str | tuple[int, ...]]) -> list[Prompt]:
        return _not_empty(
            [
                Prompt(self.text.encode(prompt), prompt) if isinstance(prompt, str) else Prompt(prompt)
                for prompt in prompts
            ]
        )

    def _requests(
        self, checked: Checked, prompts: list[Prompt], seed: int, answer: str | None
    ) -> list[GenerateRequest]:
        engine_id = uuid.uuid4().hex  # x-request-id may repeat: a retry carries it again
        return [
            GenerateRequest(
                request_id=f"{engine_id}-{index}",
                prompt=prompt.token_ids,
                sampling=sampling_for(checked, prompt, index, seed, self.info),
                n=checked.n,
                want_routes=checked.routes,
                top_logprobs=checked.top_logprobs,
                # Without log-probabilities an echo shows nothing that the prompt itself does not say.
                prompt_records=echoed_tokens(checked, prompt) if checked.logprobs else 0,
                want_kv_snapshots=checked.perf_metrics,
                grammar=answer,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _salt(self, checked: Checked, session: Session | None, headers: Mapping[str, str]) -> bytes:
        if not checked.prompt_cache:
            return os.urandom(16)  # shared with nobody
        isolation = checked.isolation_key or headers.get(HEADER_ISOLATION, "")
        namespace = self.namespaces.admit(session)
        return cache_salt(namespace, headers.get(HEADER_TENANT, ""), isolation, self.names.model)


def echoed_tokens(checked: Checked, prompt: Prompt) -> int:
    size = len(prompt.token_ids)
    return size if checked.echo is None else min(checked.echo, size)


def session_of(checked: Checked, headers: Mapping[str, str]) -> Session | None:
    """The gateway's word, or what it would have said when the replica is asked directly."""
    given = headers.get(HEADER_SESSION)
    key = unquote(given) if given else session_from_headers(headers)
    key = key or session_from_body(checked.prompt_cache_key, checked.user)
    return None if key is None else (headers.get(HEADER_TENANT, ""), key)


def _not_empty(prompts: list[Prompt]) -> list[Prompt]:
    if any(not prompt.token_ids for prompt in prompts):
        raise InvalidRequest("prompt: must hold at least one token", param="prompt")
    return prompts


class Generation:
    """One admitted request. Use `stream` or `plain`, once, inside `Service.admitted`."""

    def __init__(
        self,
        service: Service,
        checked: Checked,
        prompts: list[Prompt],
        requests: list[GenerateRequest],
        timings: Timings,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self._service = service
        self.checked = checked
        self._prompts = prompts
        self._requests = requests
        self._timings = timings
        self._cached: dict[int, int] = {}  # prompt index to reused tokens
        self._final_metrics: dict[str, Any] | None = None  # measured once, for body and headers alike
        stops, silent = checked.stops, frozenset(requests[0].sampling.stop_token_ids)
        vocabulary = service.text.vocabulary
        shown, stages = frozenset[int](), None
        if checked.tools is not None and tool_format is not None:
            # Forced calls end where their grammar ends.
            dialect, parallel = tool_format.dialect, checked.tools.parallel or checked.tools.forced
            shown, new_id = service.text.marker_ids(dialect.markers), id_maker(dialect.id_length)
            schemas = checked.tools.schemas
            stages = [
                CallStage(dialect.parser(schemas), parallel, new_id) for _ in range(len(prompts) * checked.n)
            ]
        self._stages = stages  # of choices that may call tools
        self._choices = [
            Choice(index, vocabulary, stops, silent, shown) for index in range(len(prompts) * checked.n)
        ]
        self._echoed = [echoed_tokens(checked, prompt) for prompt in prompts]
        self._open = [checked.n] * len(prompts)  # choices without a finish reason, by prompt
        self._open_in_all = len(self._choices)
        self._snapshot = service.serving()  # the newest one that any token was labelled with
        self._seen: set[str] = set()
        prefix = "chatcmpl" if checked.kind == "chat" else "cmpl"
        self._encoder = Encoder(
            checked,
            response_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(service.clock()),
            model=service.names.model,
            vocabulary=vocabulary,
            wide_routes=service.info.num_experts > 256,
        )

    async def stream(self, sink: Sink) -> None:
        """Server-sent events, as many at a time as one engine event gives."""
        checked, encoder = self.checked, self._encoder
        greeted = [False] * len(self._choices)
        kept = [Kept([], [], []) for _ in self._choices] if checked.raw_output else None

        def take(choice: Choice, pieces: list[Piece]) -> None:
            index, data = choice.index, b""
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

        await self._run(take, sink)
        tail = encoder.usage_chunk(self._snapshot, self._extras()) if checked.include_usage else b""
        sink.write(tail + DONE)

    def _finish(self, choice: Choice, first: Prompt | None, raw: RawOutput | UnsetType) -> bytes:
        extras = Extras()
        if self._open_in_all == 0:
            extras = self._extras()
            if self.checked.include_usage:  # has a chunk of its own
                extras.usage = UNSET
        return self._encoder.finish_chunk(choice, choice.snapshot or self._snapshot, first, raw, extras)

    async def plain(self) -> bytes:
        kept = [Kept([], [], []) for _ in self._choices]

        def take(choice: Choice, pieces: list[Piece]) -> None:
            for piece in pieces:
                kept[choice.index].keep(piece)

        await self._run(take)
        return self._encoder.plain(self._choices, kept, self._prompts, self._snapshot, self._extras())

    def _extras(self) -> Extras:
        return Extras(self._usage(), self._metrics(done=True) if self.checked.perf_metrics else UNSET)

    def headers(self, *, done: bool) -> dict[str, str]:
        """The metrics known by now as response headers."""
        return {f"fireworks-{name}": str(value) for name, value in self._metrics(done=done).items()}

    async def _run(self, take: Callable[[Choice, list[Piece]], None], sink: Sink | None = None) -> None:
        """Give `take` what each event of the engine released until every choice is complete. No event is taken while `sink`
        is full."""
        n = self.checked.n
        try:
            async with aclosing(self._events()) as events:
                async for prompt, event in events:
                    if event.error is not None:
                        raise EngineFailed(event.error)
                    choice = self._choices[prompt * n + event.index]
                    if choice.finish is None:
                        take(choice, self._apply(prompt, choice, event))
                    if self._open_in_all == 0:
                        return
                    if sink is not None and not sink.writable:
                        await sink.drained()
        except EngineDied as error:
            self._service.on_engine_death(str(error))
            raise ReplicaUnavailable("the engine stopped while it served this request") from error
        raise EngineFailed("the engine ended the request before every choice was complete")

    def _ended(self, prompt: int, event: GenerationEvent) -> None:
        self._open[prompt] -= 1
        self._open_in_all -= 1
        if event.finish is None:  # a stop string, of which the engine knows nothing
            self._service.engine.end_choice(self._requests[prompt].request_id, event.index)

    def _apply(self, prompt: int, choice: Choice, event: GenerationEvent) -> list[Piece]:
        if event.cached_tokens is not None:
            self._cached.setdefault(prompt, event.cached_tokens)
        if event.queued_s is not None:
            self._timings.queued_s = max(event.queued_s, self._timings.queued_s or 0.0)
        if event.kv_snapshots is not None:
            choice.kv = list(event.kv_snapshots)
        pieces = self._echo(prompt, choice, event) if self._echoed[prompt] and not choice.echoed else []
        stage = None if self._stages is None else self._stages[choice.index]
        if event.tokens and self._timings.first_token is None:
            self._timings.first_token = self._service.monotonic()
        for record in event.tokens:
            if self.checked.routes and record.route is None:
                raise EngineFailed("the engine returned a token without its route")
            if choice.snapshot != record.snapshot or record.snapshot not in self._seen:
                self._note(choice.snapshot, record.snapshot)
            new = choice.feed(record)
            pieces += new if stage is None else stage.feed(new)
            if stage is not None and stage.complete and choice.finish is None:
                choice.finish = "stop"  # at the end of the only call
            if choice.finish is not None:
                break
        if event.finish is not None and choice.finish is None:
            if event.finish == "abort":
                raise EngineFailed("the engine aborted the request")
            new = choice.end(event.finish)
            pieces += new if stage is None else stage.feed(new)
        if choice.finish is not None and stage is not None:
            pieces += stage.end()
            if stage.called and choice.finish == "stop":
                choice.finish = "tool_calls"
        if choice.finish is not None:
            choice.close_kv(len(self._prompts[prompt].token_ids))
            self._ended(prompt, event)
            pieces = [
                piece if piece.snapshot else replace(piece, snapshot=self._snapshot) for piece in pieces
            ]
        return pieces

    def _note(self, before: str | None, snapshot: str) -> None:
        """A token of `snapshot` followed one of `before` in its choice. Events of several prompts overtake each other, so
        the token that came last is not always of the newest snapshot: one is newer when no token had it so far, or when
        a choice went on to it from the newest."""
        if snapshot not in self._seen or before == self._snapshot:
            self._seen.add(snapshot)
            self._snapshot = snapshot

    def _echo(self, prompt: int, choice: Choice, event: GenerationEvent) -> list[Piece]:
        request, size = self._requests[prompt], self._echoed[prompt]
        if request.prompt_records == 0:
            snapshot = event.tokens[0].snapshot if event.tokens else self._service.serving()
            return choice.echo(tuple(TokenRecord(t, 0.0, None, snapshot) for t in request.prompt[-size:]))
        if event.prompt is None:
            if event.tokens or event.finish:
                raise EngineFailed("the engine returned no records of the prompt")
            return []
        before = choice.snapshot
        pieces = choice.echo(self._check_echo(request, event.prompt))
        for piece in pieces:
            self._note(before, piece.snapshot)
            before = piece.snapshot
        return pieces

    def _check_echo(
        self, request: GenerateRequest, records: tuple[TokenRecord, ...]
    ) -> tuple[TokenRecord, ...]:
        if tuple(r.token_id for r in records) != request.prompt[-request.prompt_records :]:
            raise EngineFailed("the engine returned records of other tokens than the prompt's")
        first = 1 if len(records) == len(request.prompt) else 0  # nothing scores the first prompt token
        if self.checked.routes and any(r.route is None for r in records[first:]):
            raise EngineFailed("the engine returned a prompt token without its route")
        if (
            first and len(records) > 1
        ):  # no pass scored it, so it has no snapshot of its own: the next token's
            return (replace(records[0], snapshot=records[1].snapshot), *records[1:])
        return records

    async def _events(self) -> AsyncGenerator[tuple[int, GenerationEvent], None]:
        generate = self._service.engine.generate
        if len(self._requests) == 1:
            async with aclosing(_closable(generate(self._requests[0]))) as events:
                async for event in events:
                    yield 0, event
            return
        queue: asyncio.Queue[tuple[int, GenerationEvent] | asyncio.Task[None]] = asyncio.Queue()
        pumps = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self._requests))]
        for pump in pumps:
            pump.add_done_callback(queue.put_nowait)
        running = len(pumps)
        try:
            while running:
                item = await queue.get()
                if isinstance(item, asyncio.Task):
                    running -= 1
                    item.result()  # raises what ended it
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            for pump in pumps:  # one failure is told; the others are the same one
                if not pump.cancelled():
                    pump.exception()

    async def _pump(
        self, prompt: int, queue: asyncio.Queue[tuple[int, GenerationEvent] | asyncio.Task[None]]
    ) -> None:
        async with aclosing(_closable(self._service.engine.generate(self._requests[prompt]))) as events:
            async for event in events:
                if self._open[prompt] == 0:
                    break
                queue.put_nowait((prompt, event))

    def _usage(self) -> Usage:
        prompt = sum(len(p.token_ids) for p in self._prompts)
        completion = sum(choice.generated for choice in self._choices)
        cached = sum(self._cached.values())
        return Usage(prompt, completion, prompt + completion, CachedDetails(cached))

    def _metrics(self, *, done: bool) -> dict[str, Any]:
        if self._final_metrics is not None:
            return self._final_metrics
        started, first_token = self._timings.started, self._timings.first_token
        metrics: dict[str, Any] = {"prompt-tokens": sum(len(p.token_ids) for p in self._prompts)}
        if done or len(self._cached) == len(self._prompts):
            metrics["cached-prompt-tokens"] = sum(self._cached.values())
        metrics["num-concurrent-requests"] = self._service.gate.inside
        if self._timings.queued_s is not None:
            metrics["prefill-queue-duration"] = round(self._timings.queued_s, 6)
        if first_token is not None:
            metrics["server-time-to-first-token"] = round(first_token - started, 6)
        if done:
            metrics["server-processing-time"] = round(self._service.monotonic() - started, 6)
            self._final_metrics = metrics
        return metrics


def _closable(events: AsyncIterator[GenerationEvent]) -> AsyncGenerator[GenerationEvent, None]:
    """The port's iterators have aclose (see Engine.generate); its type does not say so."""
    return cast("AsyncGenerator[GenerationEvent, None]", events)
