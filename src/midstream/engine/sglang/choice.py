"""One choice of a request inside an SGLang server, and the scores of a prompt.

Always holds: each message of a choice names the weights that its tokens are labelled with, or the choice ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable

from midstream.core.types import GenerateRequest, GenerationEvent, TokenRecord
from midstream.engine.servers.chunks import Chunk, alternatives
from midstream.engine.servers.labels import ChoiceLabels, Epochs
from midstream.engine.servers.requests import ChoiceStream
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
        emit: Callable[[GenerationEvent], None],
        *,
        name: str,
        prompt: tuple[TokenRecord, ...] | None = None,
    ) -> None:
        super().__init__(
            request, index, labels, emit, protocol.SglangReader(alternatives(request)), prompt=prompt
        )
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


class SglangScorer(PromptScorer):
    """name: makes the name of a request at the server. by_priority: the server goes by priority."""

    WHO = "SGLang"
    PATH = protocol.PATH

    def __init__(
        self, url: str, headers: str, epochs: Epochs, name: Callable[[], str], *, by_priority: bool = False
    ) -> None:
        super().__init__(url, headers, epochs)
        self._name = name
        self._by_priority = by_priority

    def _body(self, alone: GenerateRequest, salt: str, first: int) -> bytes:
        return protocol.body(
            alone, 0, name=self._name(), salt=salt, stream=False, score=True, by_priority=self._by_priority
        )

    def _read(self, request: GenerateRequest, answer: bytes, first: int) -> Scores | str:
        chunk = protocol.read_answer(answer)
        if chunk.error is not None:
            return chunk.error
        records = protocol.prompt_records(
            answer, request.prompt, request.prompt_records, request.top_logprobs, self._epochs.snapshot
        )
        return records, chunk.spans
