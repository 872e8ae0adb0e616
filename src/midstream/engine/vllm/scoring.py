"""The records of a prompt, as vLLM gives them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from midstream.core.types import GenerateRequest
from midstream.engine.servers.chunks import Chunk, InvalidAnswer, alternatives
from midstream.engine.servers.labels import Epochs
from midstream.engine.servers.model import Shape
from midstream.engine.servers.routes import InvalidRoutes
from midstream.engine.servers.scoring import PromptScorer, Scores
from midstream.engine.vllm import protocol
from midstream.engine.vllm.routes import decode_routes, passes_of, routes_with


class Scorer(PromptScorer):
    """model: its name at the server. in_pause: in a pause it computes urgent ones. routed: routes come with tokens."""

    WHO = "vLLM"
    PATH = protocol.PATH

    def __init__(
        self,
        url: str,
        headers: str,
        epochs: Epochs,
        shape: Shape,
        model: str,
        *,
        by_priority: bool = False,
        in_pause: bool = False,
        routed: bool = False,
    ) -> None:
        super().__init__(url, headers, epochs, shape, by_priority=by_priority)
        self._in_pause = in_pause
        self._routed = routed
        self._model = model

    def _body(self, alone: GenerateRequest, salt: str, first: int) -> bytes:
        return protocol.body(
            alone,
            0,
            model=self._model,
            salt=salt,
            stream=False,
            prompt_logprobs=alone.top_logprobs,
            max_tokens=1,
            routes_start=first if alone.want_routes and not self._routed else None,
            passes_from=(first, alone.want_router_weights) if self._routed and alone.want_routes else None,
            by_priority=self._by_priority,
            in_pause=self._in_pause,
        )

    def _read(self, request: GenerateRequest, answer: bytes, first: int) -> Scores | str:
        records = protocol.prompt_records(
            answer, request.prompt, request.prompt_records, request.top_logprobs, self._epochs.snapshot
        )
        chunk = protocol.read_answer(answer, alternatives(request))
        if chunk.error is not None:
            return chunk.error
        if not request.want_routes:
            return records, chunk.spans
        if chunk.routes is None and not self._routed:
            return "vLLM returned no routes (routed_experts) for a prompt, although they were asked for"
        try:
            routes = self._routes(request, chunk, first=first, count=len(request.prompt) - first)
        except InvalidRoutes as error:
            raise InvalidAnswer(str(error)) from error
        # No pass scores the first prompt token.
        unrouted = 1 if len(records) == len(request.prompt) else 0
        routed = [
            replace(record, route=route, router_weights=weights)
            for record, (route, weights) in zip(records[unrouted:], routes, strict=False)
        ]
        return (*records[:unrouted], *routed), chunk.spans

    def _routes(
        self, request: GenerateRequest, chunk: Chunk, **asked: int
    ) -> Sequence[tuple[bytes, bytes | None]]:
        if self._routed:
            return routes_with(passes_of(chunk), self._shape, **asked, weights=request.want_router_weights)
        assert chunk.routes is not None
        return [(route, None) for route in decode_routes(chunk.routes, self._shape, **asked)]
