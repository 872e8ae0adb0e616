"""One request inside an engine's server: a request of its own for each choice. Its chunks become events.

Always holds:
- The last event of a choice that the server ends comes after it has said everything about it, so its labels are proved. It says
  nothing more about a choice that the replica ends, at a stop string: its labels come from the order of arrival alone.
- A choice with routes gives its tokens when it has the routes. Where they do not come with the tokens, that is at its end.
- A choice that is closed early is aborted: the server notices that the connection is gone.
- An event begins at each token with which the server says that other weights computed the KV. So none gets the KV of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from operator import attrgetter

from msgspec.structs import replace

from midstream.core.types import FinishReason, GenerateRequest, GenerationEvent, TokenRecord
from midstream.engine.base import AtOnce
from midstream.engine.request_events import RequestEvents
from midstream.engine.servers.chunks import Chunk, EventReader, InvalidAnswer, error_of
from midstream.engine.servers.labels import ChoiceLabels, Epochs, KvSpans, Spans
from midstream.http.call import ResponseStream


@dataclass(frozen=True)
class ServedWeights:
    """What a request runs under. name: at the server. epochs: what its tokens are labelled with."""

    name: str
    epochs: Epochs


def problem_at_servers(request: GenerateRequest, who: str) -> str | None:
    """The reason why no engine's server can serve this request, for the user; None if it can. who: the server."""
    sampling = request.sampling
    if request.grammar is not None and request.grammar.lstrip().startswith("{"):
        return f"{who} takes a grammar in the Lark dialect only, not as JSON"
    if not any(request.emitted_of(choice) for choice in request.choices):
        return None
    cannot = f"{who} cannot continue a stream"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return f"{cannot} under presence_penalty or frequency_penalty: it would not count its tokens"
    if sampling.bad_words:
        return f"{cannot} under bad_words: it would not look at its tokens"
    if request.grammar is not None:
        return f"{cannot} that must match a grammar: it would begin the grammar again"
    return None


_tokens_of = attrgetter("tokens")
NO_ROUTES: tuple[tuple[bytes, bytes | None], ...] = ()
NONE_RENAMED: tuple[tuple[str, str], ...] = ()
FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


#: The status for a model that a server does not have. Ours have what they were given, unless they were restarted.
UNKNOWN_MODEL = 404


class ChoiceStream:
    """Turns the chunks of one choice into events. `emit` gets them in order, and none after `finish` or `error`."""

    #: The engine, for messages.
    WHO = "the server"

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        labels: ChoiceLabels,
        emit: Callable[[GenerationEvent], None],
        reader: EventReader,
        *,
        prompt: tuple[TokenRecord, ...] | None,
        constrained: bool = False,
        mask: bytes | None = None,
    ) -> None:
        """prompt: records for its first event. constrained: as of its records. mask: of all tokens, unless each has its own."""
        self.prompt_size = len(request.prompt) + len(request.emitted_of(index))
        self.labels = labels
        self.over = False
        # The labels differ from what the server says.
        self.labels_wrong = False
        self.salt = ""
        # None once it is in an event.
        self.prompt = prompt
        self.response: ResponseStream | None = None
        # Called when tokens have arrived.
        self.on_tokens: Callable[[], None] = lambda: None
        # Called after an error event.
        self.on_error: Callable[[], None] = lambda: self.ended(None)
        self._request = request
        self._index = index
        self._emit = emit
        self._scored = prompt is not None
        self._sampling_logprob = sampling_logprob(request)
        self._constrained = constrained
        self._mask = mask
        # Tokens come with their routes, or wait for them. Neither where none are asked for.
        self._routed, self._routes_late = False, request.want_routes
        self._reader = reader
        self._kv_reported = not request.want_kv_snapshots
        # Tokens that wait for their routes, or for the end.
        self._held: list[TokenRecord] = []
        self._finish: FinishReason | None = None
        self._cached: int | None = None
        self._spans: Spans | None = None
        self._error_body = b""
        # The text of an error event. Nothing is read after it.
        self._error: str | None = None
        # It says that the server computed what is no number.
        self.not_finite = False

    def on_body(self, data: bytes) -> None:
        if self.over:
            return
        if self.response is not None and self.response.status >= 400:
            self._error_body += data
            return
        try:
            chunks = self._reader.feed(data)
        except InvalidAnswer as error:
            self.fail(f"{self.WHO}'s answer cannot be read: {error}")
            return
        # Once for all tokens of a read.
        if self._error is None and any(map(_tokens_of, chunks)):
            self.on_tokens()
        for chunk in chunks:
            self._take(chunk)

    def ended(self, reason: str | None) -> None:
        """Called when the response is over. reason: why it was cut short, if it was."""
        if self.over:
            return
        status = 0 if self.response is None else self.response.status
        if status >= 400:
            self.fail(error_of(self.WHO, status, self._error_body))
        elif self._error is not None:
            self.fail(self._error)
        else:
            self.fail(
                f"{self.WHO}'s answer was cut short: {reason or 'it ended before the choice was complete'}"
            )

    @property
    def server_error(self) -> str | None:
        """The error that the server reported. It may lie in this request, or the server may be dying or another one."""
        status = 0 if self.response is None else self.response.status
        if self.response is not None and (status >= 500 or status == UNKNOWN_MODEL):
            return error_of(self.WHO, self.response.status, self._error_body)
        return self._error

    def switched(self) -> None:
        self.labels.switched()
        if not self.labels.told:
            self._kv_reported = not self._request.want_kv_snapshots

    def close(self) -> None:
        """Abort the choice at the server. No further event of it comes."""
        self.over = True
        if self.response is not None:
            self.response.abort()

    def fail(self, message: str) -> None:
        self.over = True
        self._emit(GenerationEvent(index=self._index, error=message))

    def _take(self, chunk: Chunk) -> None:
        if self.over or self._error is not None:
            return
        if chunk.error is not None:
            self._error, self.not_finite = chunk.error, chunk.not_finite
            self.on_error()
            return
        if chunk.cached is not None:
            # A prompt that was scored was computed for that, and only then found in the cache.
            self._cached = 0 if self._scored else chunk.cached
        if chunk.tokens:
            routes = self._routes_of(chunk) if self._routed else NO_ROUTES
            if routes is None:
                return
            snapshot = self.labels.take(len(chunk.tokens))
            for place, token in enumerate(chunk.tokens):
                sampling = token.sampling
                if sampling is None:
                    sampling = token.logprob if self._sampling_logprob is None else self._sampling_logprob
                record = TokenRecord(
                    token.token_id,
                    token.logprob,
                    sampling,
                    snapshot,
                    routes[place][0] if routes else None,
                    token.top,
                    token.near_tie,
                    constrained=self._constrained,
                    mask=chunk.masks[place] if chunk.masks else self._mask,
                    router_weights=routes[place][1] if routes else None,
                )
                self._held.append(record)
            if (chunk.kv or self.labels.expects) and not self._hear(len(chunk.tokens), chunk.kv):
                return
        if chunk.finish is not None and not self._take_finish(chunk):
            return
        if chunk.done:
            self._end()
        elif self._held and self._finish is None and not self._routes_late:
            if self.labels.coming:
                self._split()
            if not self.over:
                self._send()

    def _take_finish(self, chunk: Chunk) -> bool:
        """False if it cannot end so and the request got an error."""
        self._finish = FINISHES.get(chunk.finish or "")
        self._spans = chunk.spans
        if self._finish is None:
            self.fail(f"{self.WHO} ended the request with {chunk.finish!r}")
            return False
        return not self._routes_late or self._route(chunk.routes)

    def _routes_of(self, chunk: Chunk) -> Sequence[tuple[bytes, bytes | None]] | None:
        """None if they cannot be used and the request got an error."""
        try:
            return self._routes_with(chunk, self.labels.count)
        except InvalidAnswer as error:
            self._fail_routes(error)
            return None

    def _hear(self, tokens: int, kv: Sequence[tuple[int, KvSpans]]) -> bool:
        """What the server says of the KV behind the newest tokens. False if that cannot be and the request got an error."""
        problem = self.labels.hear(tokens, kv)
        if problem is not None:
            self._fail_labels(problem)
        return problem is None

    def _fail_labels(self, problem: str) -> None:
        self.labels_wrong = True
        self.fail(problem)

    def _route(self, routes: str | None) -> bool:
        """Give each token its route. False if that failed and the request got an error."""
        if routes is None:
            self.fail(f"{self.WHO} returned no routes (routed_experts) for a request that asked for them")
            return False
        try:
            decoded = self._decode(routes, len(self._held))
        except InvalidAnswer as error:
            self._fail_routes(error)
            return False
        self._held = [replace(record, route=route) for record, route in zip(self._held, decoded, strict=True)]
        return True

    def _fail_routes(self, error: InvalidAnswer) -> None:
        self.fail(f"{self.WHO} returned routes that cannot be used: {error}")

    def _decode(self, routes: str, count: int) -> Sequence[bytes]:
        """Of so many tokens. Raises InvalidAnswer."""
        raise InvalidAnswer("nothing reads them")

    def _routes_with(self, chunk: Chunk, before: int) -> Sequence[tuple[bytes, bytes | None]]:
        """Of its tokens, with the weights of routers where they were asked for. before: how many came before them.
        Raises InvalidAnswer."""
        raise InvalidAnswer("nothing reads them")

    def _end(self) -> None:
        if self._finish is None:
            self.fail(f"{self.WHO} ended the stream before the choice was complete")
            return
        problem = self.labels.problem(self._spans)
        if problem is not None:
            self._fail_labels(problem)
            return
        self._split()
        if self.over:
            return
        self.over = True
        self._kv_reported = not self._request.want_kv_snapshots
        self._send()

    def _split(self) -> None:
        """Send what is held before each change of the KV. What is behind the last one stays held."""
        for at, kv in self.labels.changes():
            held, later = self._held, self.labels.count - at
            if len(held) > later:
                self._held = held[:-later]
                self._send(later)
                if self.over:
                    # The event was enough.
                    return
                self._held = held[-later:]
            self.labels.computed(kv)
            self._kv_reported = not self._request.want_kv_snapshots

    def _send(self, later: int = 0) -> None:
        """What is held. later: how many tokens have come behind it."""
        tokens, self._held = tuple(self._held), []
        prompt, self.prompt = self.prompt, None
        kv: Spans | None = None
        files, renamed = "", NONE_RENAMED
        if not self._kv_reported:
            kv, files, renamed = self.labels.kv(later), self.labels.kv_files(), self.labels.renamed()
            self._kv_reported = True
        self._emit(
            GenerationEvent(
                index=self._index,
                tokens=tokens,
                prompt=prompt,
                cached_tokens=self._cached if self.over else None,
                finish=self._finish if self.over else None,
                kv_snapshots=kv,
                kv_files=files,
                renamed=renamed,
            )
        )


def sampling_logprob(request: GenerateRequest) -> float | None:
    """Of every token. NaN: not known. None: it is the server's log-probability, of what a grammar allows."""
    s = request.sampling
    if s.temperature <= 0:
        return 0.0
    plain = s.temperature == 1 and s.top_p >= 1 and s.top_k <= 0 and s.min_p <= 0 and not s.logit_bias
    plain = plain and not s.limited
    penalized = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
    return None if plain and not penalized else nan


class ServerRequest(RequestEvents):
    """A request inside the engine: its choices, and their events for the iterator."""

    def __init__(
        self, request: GenerateRequest, weights: ServedWeights, at_once: AtOnce | None = None
    ) -> None:
        super().__init__(request, at_once)
        self.weights = weights
        self.choices: dict[int, ChoiceStream] = {}
        # Prompt tokens that are being scored.
        self.scoring = 0
        # Events that must not be sent yet; None if all may be sent.
        self._kept_back: list[GenerationEvent] | None = None

    def put(self, event: GenerationEvent) -> None:
        if self._kept_back is None:
            super().put(event)
        else:
            self._kept_back.append(event)

    def keep_back(self) -> None:
        """Keep what comes from now on until `release`, or until `lose`."""
        if self._kept_back is None:
            self._kept_back = []

    def release(self) -> None:
        kept, self._kept_back = self._kept_back, None
        for event in kept or ():
            super().put(event)

    def lose(self, reason: Exception) -> None:
        """End with `reason`, without what was kept back."""
        self._kept_back = None
        for choice in self.choices.values():
            choice.close()
        self.fail(reason)

    def end_choice(self, index: int) -> None:
        if (choice := self.choices.get(index)) is not None:
            choice.close()
        super().end_choice(index)

    def abort(self, index: int | None = None) -> None:
        for number, choice in self.choices.items():
            if index in (None, number):
                choice.close()
        # The end is seen at once, and what was kept back of an ended choice never is.
        kept, self._kept_back = self._kept_back, None
        super().abort(index)
        if kept is not None and index is not None:
            self._kept_back = [event for event in kept if event.index != index]

    def close(self) -> None:
        self.open.clear()
        for choice in self.choices.values():
            choice.close()


def finished(request: GenerateRequest, choice: int) -> FinishReason | None:
    """How a choice ended, if another engine had completed it already."""
    emitted = request.emitted_of(choice)
    if emitted and emitted[-1] in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(emitted) >= request.sampling.max_tokens else None
