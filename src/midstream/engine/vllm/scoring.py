"""The records of a prompt, from vLLM: a request of its own, computed anew from the first token.

Always holds: every record is of one snapshot: what was computed while weights were switched is computed again.
"""

from __future__ import annotations

from msgspec.structs import replace

from midstream.engine.vllm import wire
from midstream.engine.vllm.labels import Epochs, Spans
from midstream.engine.vllm.model import Shape
from midstream.engine.vllm.routes import RoutesBroken, decode_routes
from midstream.httpcall import call
from midstream.types import GenerateRequest, TokenRecord

TRIES = 4
PATH = "/inference/v1/generate"
ANSWER_S_MAX = 600.0


class WrongWeights(Exception):
    """vLLM says that other weights computed it than those that serve."""


class Scorer:
    """model: what the server calls it."""

    def __init__(self, url: str, headers: str, epochs: Epochs, shape: Shape, model: str) -> None:
        self._url = url
        self._headers = headers
        self._epochs = epochs
        self._shape = shape
        self._model = model

    async def score(self, request: GenerateRequest, salt: str) -> tuple[TokenRecord, ...] | str:
        """Records of the last `request.prompt_records` prompt tokens, or why there are none.

        Raises CallFailed, WrongWeights.
        """
        first = max(
            len(request.prompt) - request.prompt_records - 1, 0
        )  # the pass that scores the first of them
        alone = replace(request, n=1, emitted=(), reproducible=False, grammar=None)
        data = wire.body(
            alone,
            0,
            model=self._model,
            salt=salt,
            stream=False,
            prompt_logprobs=request.top_logprobs,
            max_tokens=1,
            routes_start=first if request.want_routes else None,
        )
        for _ in range(TRIES):
            epoch = self._epochs.now
            status, answer = await call(self._url, "POST", PATH, data, ANSWER_S_MAX, self._headers)
            if status != 200:
                return wire.error_of(status, answer)
            if self._epochs.now == epoch:
                return self._records(request, answer, first)
        return f"weights were switched {TRIES} times while the prompt was scored"

    def _records(self, request: GenerateRequest, answer: bytes, first: int) -> tuple[TokenRecord, ...] | str:
        snapshot = self._epochs.snapshot
        try:
            records = wire.prompt_records(
                answer, request.prompt, request.prompt_records, request.top_logprobs, snapshot
            )
            chunk = wire.read_answer(answer, wire.alternatives(request))
            self._check(chunk.spans)
            if not request.want_routes:
                return records
            if chunk.routes is None:
                return "vLLM returned no routes (routed_experts) for a prompt whose routes were asked for"
            routes = decode_routes(
                chunk.routes,
                first=first,
                count=len(request.prompt) - first,
                moe_layers=self._shape.moe_layers,
                hidden_layers=self._shape.hidden_layers,
                top_k=self._shape.top_k,
                num_experts=self._shape.num_experts,
            )
        except (wire.WireBroken, RoutesBroken) as error:
            return f"vLLM's scores of the prompt cannot be used: {error}"
        unrouted = 1 if len(records) == len(request.prompt) else 0  # no pass produced the first prompt token
        return (
            *records[:unrouted],
            *(replace(r, route=route) for r, route in zip(records[unrouted:], routes, strict=False)),
        )

    def _check(self, spans: Spans | None) -> None:
        """spans: of the token behind the prompt, by vLLM's word; None: it does not say."""
        ours = self._epochs.version(self._epochs.now, self._epochs.snapshot)
        wrong = [version for version, _, _ in spans or () if version != ours]
        if wrong:
            raise WrongWeights(f"its scores are of weights {wrong[0]!r}, and {ours!r} serve")
