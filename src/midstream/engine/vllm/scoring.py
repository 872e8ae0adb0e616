"""The records of a prompt, from vLLM: a request of its own, which vLLM computes from the first token.

Always holds: all records are of one snapshot. A prompt is computed again if its scores crossed a switch of weights.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from midstream.core.types import GenerateRequest, TokenRecord
from midstream.engine.vllm import protocol
from midstream.engine.vllm.labels import Epochs, Spans
from midstream.engine.vllm.model import Shape
from midstream.engine.vllm.routes import InvalidRoutes, decode_routes
from midstream.http.call import CallFailed, call

TRIES = 4
#: The status for a model that a server does not have. Ours have what they were given, unless they were restarted.
UNKNOWN_MODEL = 404
#: A prompt waits for others before it. Once the server serves, watch.py ends a wait for one that hangs.
ANSWER_S_MAX = 600.0


class WrongWeights(Exception):
    """vLLM says that other weights than the serving ones computed the scores."""


class Scorer:
    """model: its name at the server. by_priority: the server goes by priority. in_pause: in a pause it computes urgent ones."""

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
    ) -> None:
        self._by_priority = by_priority
        self._in_pause = in_pause
        self._url = url
        self._headers = headers
        self._epochs = epochs
        self._shape = shape
        self._model = model

    async def score(self, request: GenerateRequest, salt: str) -> tuple[TokenRecord, ...] | str:
        """Records of the last `request.prompt_records` prompt tokens, or the reason why there are none.

        Raises CallFailed, WrongWeights.
        """
        # The pass that scores the first of them.
        first = max(len(request.prompt) - request.prompt_records - 1, 0)
        alone = replace(request, n=1, emitted=(), reproducible=False, grammar=None)
        data = protocol.body(
            alone,
            0,
            model=self._model,
            salt=salt,
            stream=False,
            prompt_logprobs=request.top_logprobs,
            max_tokens=1,
            routes_start=first if request.want_routes else None,
            by_priority=self._by_priority,
            in_pause=self._in_pause,
        )
        for _ in range(TRIES):
            epoch, switches = self._epochs.now, self._epochs.server.switches
            answer = await call(self._url, "POST", protocol.PATH, data, ANSWER_S_MAX, self._headers)
            if answer.status == UNKNOWN_MODEL:
                raise CallFailed(protocol.error_of(answer.status, answer.body))
            if answer.status != 200:
                return protocol.error_of(answer.status, answer.body)
            if self._epochs.now == epoch:
                return self._records(request, answer.body, first, self._epochs.versions_since(switches))
        return f"weights were switched {TRIES} times while the prompt was scored"

    def _records(
        self, request: GenerateRequest, answer: bytes, first: int, versions: Collection[str]
    ) -> tuple[TokenRecord, ...] | str:
        snapshot = self._epochs.snapshot
        try:
            records = protocol.prompt_records(
                answer, request.prompt, request.prompt_records, request.top_logprobs, snapshot
            )
            chunk = protocol.read_answer(answer, protocol.alternatives(request))
            if chunk.error is not None:
                return chunk.error
            self._check(chunk.spans, versions)
            if not request.want_routes:
                return records
            if chunk.routes is None:
                return "vLLM returned no routes (routed_experts) for a prompt, although they were asked for"
            count = len(request.prompt) - first
            routes = decode_routes(chunk.routes, self._shape, first=first, count=count)
        except (protocol.InvalidAnswer, InvalidRoutes) as error:
            return f"vLLM's scores of the prompt cannot be used: {error}"
        # No pass scores the first prompt token.
        unrouted = 1 if len(records) == len(request.prompt) else 0
        return (
            *records[:unrouted],
            *(replace(r, route=route) for r, route in zip(records[unrouted:], routes, strict=False)),
        )

    def _check(self, spans: Spans | None, versions: Collection[str]) -> None:
        """spans: the weight versions of the token behind the prompt; None when vLLM does not report them. versions: those of
        its epoch that the server has had meanwhile."""
        wrong = [version for version, _, _ in spans or () if version not in versions]
        if wrong:
            ours = self._epochs.serving_version
            raise WrongWeights(f"its scores are of weights {wrong[0]!r}, and {ours!r} serve")
