"""The records of a prompt, from a server: a request of its own, which the server computes from the first token.

Always holds: all records are of one snapshot. A prompt is computed again if its scores crossed a switch of weights.
"""

from __future__ import annotations

import abc
from collections.abc import Collection

from msgspec.structs import replace

from midstream.core.types import GenerateRequest, TokenRecord
from midstream.engine.servers.chunks import InvalidAnswer, error_of
from midstream.engine.servers.labels import Epochs, Spans
from midstream.engine.servers.model import Shape
from midstream.engine.servers.requests import UNKNOWN_MODEL
from midstream.http.call import CallFailed, call

TRIES = 4
#: A prompt waits for others before it. Once the server serves, watch.py ends a wait for one that hangs.
ANSWER_S_MAX = 600.0

#: The records, and which weights the server says computed them; None: it does not say.
Scores = tuple[tuple[TokenRecord, ...], Spans | None]


class WrongWeights(Exception):
    """The server says that other weights than the serving ones computed the scores."""


class PromptScorer(abc.ABC):
    """epochs: of the weights that it asks for. by_priority: the server goes by priority."""

    #: The engine, for messages, and where it is asked.
    WHO = "the server"
    PATH = ""

    def __init__(
        self, url: str, headers: str, epochs: Epochs, shape: Shape, *, by_priority: bool = False
    ) -> None:
        self._url = url
        self._headers = headers
        self._epochs = epochs
        self._shape = shape
        self._by_priority = by_priority

    @abc.abstractmethod
    def _body(self, alone: GenerateRequest, salt: str, first: int) -> bytes:
        """alone: the request as one choice. first: the position of the pass that scores the first token asked for."""

    @abc.abstractmethod
    def _read(self, request: GenerateRequest, answer: bytes, first: int) -> Scores | str:
        """Or the reason why there are none. Raises InvalidAnswer."""

    async def score(self, request: GenerateRequest, salt: str) -> tuple[TokenRecord, ...] | str:
        """Records of the last `request.prompt_records` prompt tokens, or the reason why there are none.

        Raises CallFailed, WrongWeights.
        """
        first = max(len(request.prompt) - request.prompt_records - 1, 0)
        alone = replace(request, n=1, emitted=(), reproducible=False, grammar=None)
        data = self._body(alone, salt, first)
        for _ in range(TRIES):
            epoch, switches = self._epochs.now, self._epochs.server.switches
            answer = await call(self._url, "POST", self.PATH, data, ANSWER_S_MAX, self._headers)
            if answer.status == UNKNOWN_MODEL:
                raise CallFailed(error_of(self.WHO, answer.status, answer.body))
            if answer.status != 200:
                return error_of(self.WHO, answer.status, answer.body)
            if self._epochs.now == epoch:
                return self._records(request, answer.body, first, self._epochs.versions_since(switches))
        return f"weights were switched {TRIES} times while the prompt was scored"

    def _records(
        self, request: GenerateRequest, answer: bytes, first: int, versions: Collection[str]
    ) -> tuple[TokenRecord, ...] | str:
        try:
            found = self._read(request, answer, first)
        except InvalidAnswer as error:
            return f"{self.WHO}'s scores of the prompt cannot be used: {error}"
        if isinstance(found, str):
            return found
        records, spans = found
        self._check(spans, versions)
        return records

    def _check(self, spans: Spans | None, versions: Collection[str]) -> None:
        """spans: the weight versions of the token behind the prompt. versions: those of its epoch that the server has had
        meanwhile."""
        wrong = [version for version, _, _ in spans or () if version not in versions]
        if wrong:
            ours = self._epochs.serving_version
            raise WrongWeights(f"its scores are of weights {wrong[0]!r}, and {ours!r} serve")
