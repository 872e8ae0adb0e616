"""The records of a prompt, as vLLM gives them."""

from __future__ import annotations

from msgspec.structs import replace

from midstream.core.types import GenerateRequest
from midstream.engine.servers.chunks import InvalidAnswer, alternatives
from midstream.engine.servers.labels import Epochs
from midstream.engine.servers.model import Shape
from midstream.engine.servers.routes import InvalidRoutes
from midstream.engine.servers.scoring import PromptScorer, Scores
from midstream.engine.vllm import protocol
from midstream.engine.vllm.routes import decode_routes, routes_with


class Scorer(PromptScorer):
    """model: its name at the server. by_priority: the server goes by priority. in_pause: in a pause it computes urgent ones.
    routed: routes come with tokens."""

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
        super().__init__(url, headers, epochs)
        self._by_priority = by_priority
        self._in_pause = in_pause
        self._routed = routed
        self._shape = shape
        self._model = model

    def _body(self, alone: GenerateRequest, salt: str, first: int) -> bytes:
        start = first if alone.want_routes else None
        return protocol.body(
            alone,
            0,
            model=self._model,
            salt=salt,
            stream=False,
            prompt_logprobs=alone.top_logprobs,
            max_tokens=1,
            routes_start=None if self._routed else start,
            passes_from=start if self._routed else None,
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
            asked = {"first": first, "count": len(request.prompt) - first}
            if chunk.routes is None:
                routes = routes_with(chunk.passes, self._shape, **asked)
            else:
                routes = decode_routes(chunk.routes, self._shape, **asked)
        except InvalidRoutes as error:
            raise InvalidAnswer(str(error)) from error
        # No pass scores the first prompt token.
        unrouted = 1 if len(records) == len(request.prompt) else 0
        routed = [replace(r, route=route) for r, route in zip(records[unrouted:], routes, strict=False)]
        return (*records[:unrouted], *routed), chunk.spans
