"""One choice of a request inside a vLLM server, and which numbers it needs.

Always holds: routes of another shape than the model's end the choice with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import isnan
from typing import NamedTuple

from midstream.core.types import GenerateRequest, GenerationEvent, TokenRecord
from midstream.engine.servers.chunks import Chunk, InvalidAnswer, alternatives
from midstream.engine.servers.labels import ChoiceLabels
from midstream.engine.servers.model import Shape
from midstream.engine.servers.requests import ChoiceStream, sampling_logprob
from midstream.engine.servers.routes import InvalidRoutes
from midstream.engine.step import GREEDY_BELOW
from midstream.engine.vllm import protocol
from midstream.engine.vllm.masks import fixed_mask
from midstream.engine.vllm.routes import decode_routes, routes_with


class WithTokens(NamedTuple):
    """What vLLM was asked for with each token: both log-probabilities, a sampling mask, its route."""

    both: bool = False
    masks: bool = False
    routed: bool = False


class VllmChoice(ChoiceStream):
    WHO = "vLLM"

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        labels: ChoiceLabels,
        shape: Shape,
        emit: Callable[[GenerationEvent], None],
        asked: WithTokens,
        *,
        prompt: tuple[TokenRecord, ...] | None,
    ) -> None:
        reader = protocol.ChunkReader(
            alternatives(request), both=asked.both, kv=labels.told, masks=asked.masks
        )
        mask = fixed_mask(request, shape.vocab_size) if request.want_masks else None
        constrained = request.grammar is not None and not asked.both
        super().__init__(
            request, index, labels, emit, reader, prompt=prompt, constrained=constrained, mask=mask
        )
        self._routed = asked.routed
        self._routes_late = request.want_routes and not asked.routed
        self._shape = shape

    def _decode(self, routes: str, count: int) -> Sequence[bytes]:
        try:
            return decode_routes(routes, self._shape, first=0, count=count)
        except InvalidRoutes as error:
            raise InvalidAnswer(str(error)) from error

    def _routes_with(self, chunk: Chunk, before: int) -> Sequence[tuple[bytes, bytes | None]]:
        asked = {"first": self.prompt_size - 1 + before, "count": len(chunk.tokens)}
        try:
            return routes_with(chunk.passes, self._shape, **asked, weights=self._request.want_router_weights)
        except InvalidRoutes as error:
            raise InvalidAnswer(str(error)) from error


def unknown_feature(request: GenerateRequest) -> str:
    """The feature without which vLLM's own log-probability leaves the raw or the sampling one unknown; "" if it does not."""
    if not request.want_logprobs:
        return ""
    if request.grammar is not None:
        return "constrained_logprobs"
    known = sampling_logprob(request)
    return "sampling_logprobs" if known is not None and isnan(known) else ""


def wants_both(request: GenerateRequest, proved: Collection[str]) -> bool:
    """Whether a rank has to say more than a rank. proved: of NUMBERS, the features that the server has."""
    if unknown_feature(request) in proved:
        return True
    if request.grammar is not None and "constrained_logprobs" not in proved:
        # What would come with a near tie was not seen to be the raw number.
        return False
    return request.want_logprobs and request.sampling.temperature < GREEDY_BELOW and "near_ties" in proved
