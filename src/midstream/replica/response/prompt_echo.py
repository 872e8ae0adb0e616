"""The prompt in a response: how many of its tokens are shown or scored, the tokens, and their records. Pure.

Always holds: a record is of exactly the token of the prompt. Where routes were asked for, only the first token's has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from midstream.core.errors import EngineFailed
from midstream.core.types import GenerateRequest, GenerationEvent, TokenRecord
from midstream.replica.request.checked import Checked, Prompt
from midstream.replica.response.choice import Choice, Piece


def echoed_tokens(checked: Checked, prompt: Prompt) -> int:
    size = len(prompt.token_ids)
    return size if checked.echo is None else min(checked.echo, size)


def scored_tokens(checked: Checked, prompt: Prompt) -> int:
    """Of how many of the last prompt tokens records are needed."""
    if checked.prompt_from is not None:
        # A request that generates nothing has at least one record to tell.
        return max(len(prompt.token_ids) - checked.prompt_from, int(checked.max_tokens == 0))
    # Without log-probabilities an echo shows nothing that the prompt itself does not say.
    return echoed_tokens(checked, prompt) if checked.scored else 0


class PromptEcho:
    def __init__(self, checked: Checked, prompts: Sequence[Prompt]) -> None:
        self._routes, self._router_weights = checked.routes, checked.router_weights
        self._wanted = checked.prompt_from is not None
        #: By prompt: how many of its last tokens are shown.
        self._sizes = [echoed_tokens(checked, prompt) for prompt in prompts]
        #: By prompt, where they were asked for.
        self.records: dict[int, tuple[TokenRecord, ...]] = {}

    def take(self, prompt: int, request: GenerateRequest, event: GenerationEvent) -> None:
        """Keeps the records that the event has. Raises EngineFailed."""
        if event.prompt is not None and self._wanted:
            self.records[prompt] = self._checked(request, event.prompt)

    def of(self, prompt: int, choice: Choice) -> bool:
        """Whether the choice has to show the prompt yet."""
        return bool(self._sizes[prompt]) and not choice.echoed

    def pieces(
        self,
        prompt: int,
        choice: Choice,
        request: GenerateRequest,
        event: GenerationEvent,
        serving: str | None,
    ) -> list[Piece]:
        """Raises EngineFailed. serving: of a prompt without records, the snapshot that it is labelled with."""
        size = self._sizes[prompt]
        if serving is not None:
            snapshot = event.tokens[0].snapshot if event.tokens else serving
            return choice.echo(tuple(TokenRecord(t, 0.0, None, snapshot) for t in request.prompt[-size:]))
        if event.prompt is None:
            if event.tokens or event.finish not in (None, "abort"):
                raise EngineFailed("the engine returned no records of the prompt")
            return []
        return choice.echo(self._checked(request, event.prompt)[-size:])

    def _checked(self, request: GenerateRequest, records: tuple[TokenRecord, ...]) -> tuple[TokenRecord, ...]:
        if tuple(r.token_id for r in records) != request.prompt[-request.prompt_records :]:
            raise EngineFailed("the engine returned records of other tokens than the prompt's")
        # Nothing scores the first prompt token.
        first = 1 if len(records) == len(request.prompt) else 0
        if self._routes and any(r.route is None for r in records[first:]):
            raise EngineFailed("the engine returned a prompt token without its route")
        if self._router_weights and any(r.router_weights is None for r in records[first:]):
            raise EngineFailed("the engine returned a prompt token without its router weights")
        if first and len(records) > 1:
            # No pass scored it, so it has no snapshot of its own: the next token's.
            return (replace(records[0], snapshot=records[1].snapshot), *records[1:])
        return records
