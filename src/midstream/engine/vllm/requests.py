"""One request on its way through a vLLM server: a vLLM request for each choice, their chunks turned into events.

Always holds: the last event of a choice that vLLM ends comes after vLLM said everything about it, so its labels are proved
(one that the replica ends, at a stop string, has labels by arrival alone: vLLM says nothing more of it); a choice that
asked for routes gives its tokens when it has them, which is at its end; what closes early is aborted by vLLM, which notices
that the connection is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import nan

from msgspec.structs import replace

from midstream.engine.vllm import wire
from midstream.engine.vllm.labels import Epochs, Told
from midstream.engine.vllm.model import Shape
from midstream.engine.vllm.routes import RoutesBroken, decode_routes
from midstream.httpcall import ResponseStream
from midstream.types import FinishReason, GenerateRequest, GenerationEvent, TokenRecord

FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class ChoiceStream:
    """The chunks of one choice. `emit` gets its events in order; after one with `finish` or `error` none follows."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        epochs: Epochs,
        shape: Shape,
        emit: Callable[[GenerationEvent], None],
        *,
        clean: bool,
        prompt: tuple[TokenRecord, ...] | None,
    ) -> None:
        """clean: what is cached under its salt is of the snapshot that serves. prompt: what its first event tells of it."""
        self.told = Told(epochs, len(request.prompt) + len(request.emitted_of(index)), clean=clean)
        self.over = False
        self.doubted = False  # its labels are not what vLLM says
        self.salt = ""
        self.prompt = prompt  # until it is told
        self._request = request
        self._index = index
        self._shape = shape
        self._emit = emit
        self._scored = prompt is not None
        self._lines = wire.Lines(wire.alternatives(request))
        self._kv_told = not request.want_kv_snapshots
        self._held: list[TokenRecord] = []  # tokens that wait for their routes, or for the end
        self._finish: FinishReason | None = None
        self._cached: int | None = None
        self._spans: tuple[tuple[str, int, int], ...] | None = None
        self._error_body = b""
        self._said: str | None = None  # an error event; nothing is taken behind it
        self.on_complaint: Callable[[], None] = lambda: self.ended(None)  # what an error event leads to
        self.response: ResponseStream | None = None

    def __repr__(self) -> str:
        return f"ChoiceStream({self._index}, {self.told.count} tokens, over={self.over})"

    def on_body(self, data: bytes) -> None:
        if self.over:
            return
        if self.response is not None and self.response.status >= 400:
            self._error_body += data
            return
        try:
            chunks = self._lines.feed(data)
        except wire.WireBroken as error:
            self.fail(f"vLLM's answer cannot be read: {error}")
            return
        for chunk in chunks:
            self._take(chunk)

    def ended(self, reason: str | None) -> None:
        """The response is over; reason: why it was cut short."""
        if self.over:
            return
        status = 0 if self.response is None else self.response.status
        if status >= 400:
            self.fail(wire.error_of(status, self._error_body))
        elif self._said is not None:
            self.fail(self._said)
        else:
            self.fail(f"vLLM's answer was cut short: {reason or 'it ended before the choice was complete'}")

    @property
    def complaint(self) -> str | None:
        """What the server said went wrong in it: with this request, or because the server itself is dying."""
        if self.response is not None and self.response.status >= 500:
            return wire.error_of(self.response.status, self._error_body)
        return self._said

    def switched(self) -> None:
        self.told.switched()
        self._kv_told = not self._request.want_kv_snapshots

    def close(self) -> None:
        """vLLM gives it up; nothing more is told of it."""
        self.over = True
        if self.response is not None:
            self.response.abort()

    def fail(self, message: str) -> None:
        self.over = True
        self._emit(GenerationEvent(index=self._index, error=message))

    def _take(self, chunk: wire.Chunk) -> None:
        if self.over or self._said is not None:
            return
        if chunk.error is not None:
            self._said = chunk.error
            self.on_complaint()
            return
        if (
            chunk.cached is not None
        ):  # a prompt that was scored was computed anew for it, and found by what comes after
            self._cached = 0 if self._scored else chunk.cached
        if chunk.tokens:
            snapshot = self.told.take(len(chunk.tokens))
            sampling = self._sampling_logprob
            self._held += [
                TokenRecord(t.token_id, t.logprob, sampling(t.logprob), snapshot, None, t.top)
                for t in chunk.tokens
            ]
        if chunk.finish is not None:
            self._finish = FINISHES.get(chunk.finish)
            self._spans = chunk.spans
            if self._finish is None:
                self.fail(f"vLLM ended the request with {chunk.finish!r}")
                return
            if self._request.want_routes and not self._route(chunk.routes):
                return
        if chunk.done:
            self._end()
        elif self._held and self._finish is None and not self._request.want_routes:
            self._send()

    def _sampling_logprob(self, logprob: float) -> float:
        """Where it follows from the raw one; else NaN."""
        s = self._request.sampling
        if s.temperature <= 0:
            return 0.0
        plain = s.temperature == 1 and s.top_p >= 1 and s.top_k <= 0 and s.min_p <= 0 and not s.logit_bias
        penalized = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
        return logprob if plain and not penalized and self._request.grammar is None else nan

    def _route(self, routes: str | None) -> bool:
        """Give each token its route; False: the request was failed."""
        shape, count = self._shape, len(self._held)
        if routes is None:
            self.fail("vLLM returned no routes (routed_experts) for a request that asked for them")
            return False
        try:
            decoded = decode_routes(
                routes,
                first=0,
                count=count,
                moe_layers=shape.moe_layers,
                hidden_layers=shape.hidden_layers,
                top_k=shape.top_k,
                num_experts=shape.num_experts,
            )
        except RoutesBroken as error:
            self.fail(f"vLLM returned routes that cannot be used: {error}")
            return False
        self._held = [replace(record, route=route) for record, route in zip(self._held, decoded, strict=True)]
        return True

    def _end(self) -> None:
        if self._finish is None:
            self.fail("vLLM ended the stream before the choice was complete")
            return
        problem = self.told.problem(self._spans)
        if problem is not None:
            self.doubted = True
            self.fail(problem)
            return
        self.over = True
        self._kv_told = not self._request.want_kv_snapshots
        self._send()

    def _send(self) -> None:
        tokens, self._held = tuple(self._held), []
        prompt, self.prompt = self.prompt, None
        kv = None
        if not self._kv_told:
            kv, self._kv_told = self.told.kv(), True
        self._emit(
            GenerationEvent(
                index=self._index,
                tokens=tokens,
                prompt=prompt,
                cached_tokens=self._cached if self.over else None,
                finish=self._finish if self.over else None,
                kv_snapshots=kv,
            )
        )


class Run:
    """A request inside the engine: its choices, and their events for whoever iterates."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.choices: dict[int, ChoiceStream] = {}
        self.open = set(request.choices)
        self._arrived: deque[GenerationEvent | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"Run({self.request.request_id}, open={sorted(self.open)})"

    def put(self, item: GenerationEvent | Exception) -> None:
        self._arrived.append(item)
        self._wake()

    async def next(self) -> GenerationEvent | None:
        """The next event; None: there is none, every choice is over. Raises what ended the request."""
        while self.open:
            while not self._arrived:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                if not self.open:
                    return None
            item = self._arrived.popleft()
            if isinstance(item, Exception):
                raise item
            if item.error is not None:
                self.open.clear()
            elif item.index not in self.open:
                continue  # was on its way when the choice was ended
            elif item.finish is not None:
                self.open.discard(item.index)
            return item
        return None

    def end_choice(self, index: int) -> None:
        self.open.discard(index)
        if (choice := self.choices.get(index)) is not None:
            choice.close()
        self._wake()

    def close(self) -> None:
        self.open.clear()
        for choice in self.choices.values():
            choice.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
