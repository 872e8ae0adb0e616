"""Serves one inference request: checks it, admits it, runs it on the engine, encodes what comes.

Always holds: a request that is not valid is refused before it waits at the gate; the salt is taken and the engine asked in
the step in which the gate was passed; every choice ends with a finish reason or the request ends with an error; leaving
the context closes the engine's iterator, so nothing is generated for a client that is gone.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, UnsetType

from midstream.engine.base import Engine, EngineDied
from midstream.errors import EngineFailed, InvalidRequest, ReplicaUnavailable
from midstream.names import ServedNames
from midstream.replica import admission
from midstream.replica.chat import TextModel
from midstream.replica.checked import (
    Checked,
    Kind,
    Prompt,
    check,
    check_messages,
    sampling_for,
    split_prompts,
)
from midstream.replica.choice import Choice, Piece
from midstream.replica.encode import DONE, CachedDetails, Encoder, Extras, Kept, RawOutput, Usage
from midstream.replica.namespaces import Namespaces, Session, cache_salt
from midstream.replica.schema import ChatBody, CompletionBody, parse_chat, parse_completion
from midstream.sessionkey import session_from_body, session_from_headers
from midstream.types import HEADER_SESSION, HEADER_TENANT, GenerateRequest, GenerationEvent, ModelInfo

HEADER_ISOLATION = "x-prompt-cache-isolation-key"
_LONG_TEXT = 16_384  # characters from which tokenizing leaves the event loop


class Timings(msgspec.Struct):
    started: float
    first_token: float | None = None


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
        wanted = self.names.split(checked.model)
        patience = admission.patience(headers.get(admission.HEADER_DRAIN_TIMEOUT))
        prompts = await self._prompts(parsed)
        seed = self.random_seed() if checked.seed is None else checked.seed
        requests = self._requests(checked, prompts, seed)
        session = session_of(checked, headers)
        await self.gate.enter(patience)
        # No await from here to the engine's first step: salt, snapshot and gate belong to the same moment.
        self.names.check_snapshot(wanted, self.serving())
        salt = self._salt(checked, session, headers)
        requests = [msgspec.structs.replace(request, salt=salt) for request in requests]
        with self.gate.admitted():
            yield Generation(self, checked, prompts, requests, timings)

    async def _prompts(self, body: CompletionBody | ChatBody) -> list[Prompt]:
        if isinstance(body, ChatBody):
            text = self.text.render(check_messages(body.messages))
            prompts = [Prompt(await _tokenize(self.text.encode_rendered, text), text)]
        else:
            prompts = [
                Prompt(await _tokenize(self.text.encode, prompt), prompt)
                if isinstance(prompt, str)
                else Prompt(prompt)
                for prompt in split_prompts(body.prompt, self.info.vocab_size)
            ]
        if any(not prompt.token_ids for prompt in prompts):
            raise InvalidRequest("prompt: must hold at least one token", param="prompt")
        return prompts

    def _requests(self, checked: Checked, prompts: list[Prompt], seed: int) -> list[GenerateRequest]:
        engine_id = uuid.uuid4().hex  # x-request-id may repeat: a retry carries it again
        return [
            GenerateRequest(
                request_id=f"{engine_id}-{index}",
                prompt=prompt.token_ids,
                sampling=sampling_for(checked, prompt, index, seed, self.info),
                n=checked.n,
                want_routes=checked.routes,
                top_logprobs=checked.top_logprobs,
                prompt_records=echoed_tokens(checked, prompt),
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


async def _tokenize(encode: Callable[[str], tuple[int, ...]], text: str) -> tuple[int, ...]:
    return encode(text) if len(text) < _LONG_TEXT else await asyncio.to_thread(encode, text)


class Generation:
    """One admitted request. Use `stream` or `plain`, once, inside `Service.admitted`."""

    def __init__(
        self,
        service: Service,
        checked: Checked,
        prompts: list[Prompt],
        requests: list[GenerateRequest],
        timings: Timings,
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
        self._choices = [
            Choice(index, vocabulary, stops, silent) for index in range(len(prompts) * checked.n)
        ]
        self._snapshot = service.serving()  # of the newest token of any choice
        prefix = "chatcmpl" if checked.kind == "chat" else "cmpl"
        self._encoder = Encoder(
            checked,
            response_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(service.clock()),
            model=service.names.model,
            vocabulary=vocabulary,
            wide_routes=service.info.num_experts > 256,
        )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, as many at a time as one engine event gives."""
        checked, encoder = self.checked, self._encoder
        greeted = [False] * len(self._choices)
        kept = [Kept([], [], []) for _ in self._choices] if checked.raw_output else None
        open_choices = len(self._choices)
        async with aclosing(self._updates()) as updates:
            async for choice, pieces in updates:
                index, data = choice.index, b""
                prompt = self._prompts[index // checked.n]
                for piece in pieces:
                    data += encoder.chunk(index, piece, None if greeted[index] else prompt)
                    greeted[index] = True
                    if kept is not None:
                        kept[index].keep(piece)
                if choice.finish is not None:
                    open_choices -= 1
                    raw = encoder.raw_output(kept[index], prompt) if kept is not None else UNSET
                    data += self._finish(choice, None if greeted[index] else prompt, raw, open_choices == 0)
                if data:
                    yield data
        tail = encoder.usage_chunk(self._snapshot, self._usage()) if checked.include_usage else b""
        yield tail + DONE

    def _finish(self, choice: Choice, first: Prompt | None, raw: RawOutput | UnsetType, last: bool) -> bytes:
        extras = Extras()
        if last:
            extras.perf_metrics = self._metrics(done=True) if self.checked.perf_metrics else UNSET
            extras.usage = UNSET if self.checked.include_usage else self._usage()
        return self._encoder.finish_chunk(choice, choice.snapshot or self._snapshot, first, raw, extras)

    async def plain(self) -> bytes:
        kept = [Kept([], [], []) for _ in self._choices]
        async with aclosing(self._updates()) as updates:
            async for choice, pieces in updates:
                for piece in pieces:
                    kept[choice.index].keep(piece)
        metrics = self._metrics(done=True) if self.checked.perf_metrics else UNSET
        extras = Extras(self._usage(), metrics)
        return self._encoder.plain(self._choices, kept, self._prompts, self._snapshot, extras)

    def headers(self, *, done: bool) -> dict[str, str]:
        """The metrics known by now as response headers."""
        return {f"fireworks-{name}": str(value) for name, value in self._metrics(done=done).items()}

    async def _updates(self) -> AsyncGenerator[tuple[Choice, list[Piece]], None]:
        n = self.checked.n
        try:
            async with aclosing(self._events()) as events:
                async for prompt, event in events:
                    if event.error is not None:
                        raise EngineFailed(event.error)
                    choice = self._choices[prompt * n + event.index]
                    if choice.finish is None:
                        yield choice, self._apply(prompt, choice, event)
                    if self._all_ended(range(len(self._choices))):
                        return
        except EngineDied as error:
            self._service.on_engine_death(str(error))
            raise ReplicaUnavailable("the engine stopped while it served this request") from error
        raise EngineFailed("the engine ended the request before every choice was complete")

    def _all_ended(self, indexes: range) -> bool:
        return all(self._choices[index].finish is not None for index in indexes)

    def _apply(self, prompt: int, choice: Choice, event: GenerationEvent) -> list[Piece]:
        pieces: list[Piece] = []
        if event.cached_tokens is not None:
            self._cached.setdefault(prompt, event.cached_tokens)
        if event.prompt is not None and self._requests[prompt].prompt_records:
            self._check_echo(prompt, event)
            pieces += choice.echo(event.prompt)
        if self._requests[prompt].prompt_records and not choice.echoed and (event.tokens or event.finish):
            raise EngineFailed("the engine returned no records of the prompt")
        if event.tokens and self._timings.first_token is None:
            self._timings.first_token = self._service.monotonic()
        for record in event.tokens:
            if self.checked.routes and record.route is None:
                raise EngineFailed("the engine returned a token without its route")
            pieces += choice.feed(record)
            if choice.finish is not None:
                break
        if event.finish is not None and choice.finish is None:
            if event.finish == "abort":
                raise EngineFailed("the engine aborted the request")
            pieces += choice.end(event.finish)
        self._snapshot = choice.snapshot or self._snapshot
        return [piece if piece.snapshot else piece._replace(snapshot=self._snapshot) for piece in pieces]

    def _check_echo(self, prompt: int, event: GenerationEvent) -> None:
        request, records = self._requests[prompt], event.prompt or ()
        if tuple(r.token_id for r in records) != request.prompt[-request.prompt_records :]:
            raise EngineFailed("the engine returned records of other tokens than the prompt's")
        first = 1 if len(records) == len(request.prompt) else 0  # nothing scores the first prompt token
        if self.checked.routes and any(r.route is None for r in records[first:]):
            raise EngineFailed("the engine returned a prompt token without its route")

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

    async def _pump(
        self, prompt: int, queue: asyncio.Queue[tuple[int, GenerationEvent] | asyncio.Task[None]]
    ) -> None:
        n = self.checked.n
        async with aclosing(_closable(self._service.engine.generate(self._requests[prompt]))) as events:
            async for event in events:
                if self._all_ended(range(prompt * n, prompt * n + n)):
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
        if first_token is not None:
            metrics["server-time-to-first-token"] = round(first_token - started, 6)
        if done:
            metrics["server-processing-time"] = round(self._service.monotonic() - started, 6)
            self._final_metrics = metrics
        return metrics


def _closable(events: AsyncIterator[GenerationEvent]) -> AsyncGenerator[GenerationEvent, None]:
    """The port's iterators have aclose (see Engine.generate); its type does not say so."""
    return cast("AsyncGenerator[GenerationEvent, None]", events)
