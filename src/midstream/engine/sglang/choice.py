"""One choice of a request inside an SGLang server, and the scores of a prompt.

Always holds:
- Each message of a choice names the weights that its tokens are labelled with, or the choice ends with an error.
- Routes of another shape than the model's end the choice with an error.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from math import nan

import numpy as np
from msgspec.structs import replace

from midstream.core.types import GenerateRequest, GenerationEvent, TokenRecord
from midstream.engine.servers.chunks import Chunk, InvalidAnswer, alternatives
from midstream.engine.servers.labels import ChoiceLabels, Epochs
from midstream.engine.servers.model import Shape
from midstream.engine.servers.requests import ChoiceStream
from midstream.engine.servers.routes import InvalidRoutes, routes_of
from midstream.engine.servers.scoring import PromptScorer, Scores
from midstream.engine.sglang import protocol


class SglangChoice(ChoiceStream):
    """name: of the request at the server."""

    WHO = "SGLang"

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        labels: ChoiceLabels,
        epochs: Epochs,
        shape: Shape,
        emit: Callable[[GenerationEvent], None],
        *,
        name: str,
        prompt: tuple[TokenRecord, ...] | None = None,
    ) -> None:
        super().__init__(
            request, index, labels, emit, protocol.SglangReader(alternatives(request)), prompt=prompt
        )
        if request.grammar is not None and self._sampling_logprob is None:
            # SGLang says the raw number alone.
            self._sampling_logprob = nan
        self._shape = shape
        self.name = name
        # Called when it is given up before its end.
        self.on_abort: Callable[[], None] = lambda: None
        self._epochs = epochs

    def close(self) -> None:
        if not self.over:
            self.on_abort()
        super().close()

    def _take(self, chunk: Chunk) -> None:
        ours = self._epochs.serving_version
        if chunk.tokens and chunk.version != ours and not self.over and self._error is None:
            self._fail_labels(f"SGLang says that weights {chunk.version!r} serve, and {ours!r} do")
            return
        super()._take(chunk)

    def _decode(self, routes: str, count: int) -> Sequence[bytes]:
        return decode_routes(routes, self._shape, first=self.prompt_size - 1, count=count)


def decode_routes(data: str, shape: Shape, *, first: int, count: int) -> list[bytes]:
    """As routes_of, of `routed_experts` that were asked for from pass `first` on: base64 of int32, [passes, layers, experts].

    SGLang 0.5.23 sends them with the last message of a choice only. Raises InvalidAnswer.
    """
    try:
        raw = base64.b64decode(data, validate=True)
        rows = np.frombuffer(raw, "<i4").reshape(-1, shape.hidden_layers, max(shape.top_k, 1))
        return routes_of(rows, shape, first=first, count=count)
    except (binascii.Error, ValueError, InvalidRoutes) as error:
        raise InvalidAnswer(f"routed_experts: {error}") from error


class SglangScorer(PromptScorer):
    """name: makes the name of a request at the server."""

    WHO = "SGLang"
    PATH = protocol.PATH

    def __init__(
        self,
        url: str,
        headers: str,
        epochs: Epochs,
        shape: Shape,
        name: Callable[[], str],
        *,
        by_priority: bool = False,
    ) -> None:
        super().__init__(url, headers, epochs, shape, by_priority=by_priority)
        self._name = name

    def _body(self, alone: GenerateRequest, salt: str, first: int) -> bytes:
        start = first if alone.want_routes else None
        return protocol.body(
            alone,
            0,
            name=self._name(),
            salt=salt,
            stream=False,
            score=True,
            routes_start=start,
            by_priority=self._by_priority,
        )

    def _read(self, request: GenerateRequest, answer: bytes, first: int) -> Scores | str:
        chunk = protocol.read_answer(answer)
        if chunk.error is not None:
            return chunk.error
        records = protocol.prompt_records(
            answer,
            request.prompt,
            request.prompt_records,
            request.top_logprobs,
            self._epochs.snapshot,
            self._shape.vocab_size,
        )
        if not request.want_routes:
            return records, chunk.spans
        if chunk.routes is None:
            return "SGLang returned no routes (routed_experts) for a prompt, although they were asked for"
        routes = decode_routes(chunk.routes, self._shape, first=first, count=len(request.prompt) - first)
        # No pass scores the first prompt token.
        unrouted = 1 if len(records) == len(request.prompt) else 0
        routed = [replace(r, route=route) for r, route in zip(records[unrouted:], routes, strict=False)]
        return (*records[:unrouted], *routed), chunk.spans
