"""A stream by reference that another replica began: all of it is generated again here, as the lost replica's numbers are gone.

Owns: how far each choice has come back to where the client is.
Always holds: each token that the client has is made again as the same token with the same label, or the stream fails. What the
client has is not sent again, and what follows is left out nowhere.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection

from midstream.core.resumption import CannotResume
from midstream.core.types import FinishReason, GenerationEvent
from midstream.replica.request.checked import Checked
from midstream.replica.response.choice import Choice
from midstream.replica.response.engine_events import EngineEvents
from midstream.replica.response.resume import Continued

#: Events of the log. Each takes a microsecond or two.
READ_AT_ONCE = 1024
#: Takes an event of the engine for its choice.
Take = Callable[[Choice, GenerationEvent], None]


class GeneratedAgain:
    """had: takes what the client has."""

    def __init__(self, continued: Continued, engine: EngineEvents, choices: int, had: Take) -> None:
        self._engine, self._had = engine, had
        self._log = continued
        #: By choice, token and label of what is still to come again.
        self._left = [deque[tuple[int, str]]() for _ in range(choices)]
        #: Choices whose first event the client has, and those whose end it has.
        self._begun, self._over = set[int](), set[int]()
        #: The last reason that the log has for the end of a choice.
        self._finish: dict[int, FinishReason] = {}
        #: Choices that a trainer ended meanwhile.
        self._aborted = set[int]()
        self._is_read = False

    def __repr__(self) -> str:
        return f"GeneratedAgain({sum(map(len, self._left))} tokens left)"

    async def read(self) -> list[int]:
        """Reads the log, while other streams continue. How many tokens of each choice the client has. Raises InvalidRequest."""
        for number, (index, event) in enumerate(self._log.events()):
            self._begun.add(index)
            self._left[index].extend([(record.token_id, record.snapshot) for record in event.tokens])
            if event.finish is not None:
                self._finish[index] = event.finish
            if number % READ_AT_ONCE == READ_AT_ONCE - 1:
                await asyncio.sleep(0)
        self._over, self._is_read = self._log.over(), True
        none = {index for index, left in enumerate(self._left) if not left}
        ended = {index for index in self._over if self._was_aborted(index)}
        self._engine.abort(none & (ended | (self._aborted - self._over)))
        return [len(left) for left in self._left]

    def abort(self, choices: Collection[int]) -> set[int]:
        """Those of the choices that may end now. The client has more of the others, which end once they are there."""
        behind = {index for index in choices if not self._is_read or self._left[index] or index in self._over}
        self._aborted |= behind
        return {*choices} - behind

    def take(self, new: Take, choice: Choice, event: GenerationEvent) -> None:
        """new: takes what the client does not have. Raises CannotResume."""
        index, left, tokens = choice.index, self._left[choice.index], event.tokens
        over = index in self._over
        if not left and not over and index not in self._begun:
            new(choice, event)
            return
        self._begun.discard(index)
        count = min(len(tokens), len(left))
        for record in tokens[:count]:
            if (record.token_id, record.snapshot) != left.popleft():
                raise _changed(choice)
        rest, finish = tokens[count:], event.finish
        self._had(
            choice,
            GenerationEvent(
                index=index,
                tokens=tokens[:count],
                prompt=event.prompt,
                cached_tokens=event.cached_tokens,
                queued_s=event.queued_s,
                finish=finish if over and not rest else None,
                kv_snapshots=event.kv_snapshots,
                kv_files=event.kv_files,
                renamed=event.renamed,
            ),
        )
        if over:
            self._close(choice, beyond=bool(rest))
        elif choice.finish is not None or (left and finish is not None):
            raise _changed(choice)
        elif rest or finish is not None:
            new(choice, GenerationEvent(index=index, tokens=rest, finish=finish))
        if not left and choice.finish is None and index in self._aborted:
            self._engine.abort({index})

    def _close(self, choice: Choice, *, beyond: bool) -> None:
        """Ends a choice that is over for the client where that was. beyond: the engine has more tokens already."""
        index, left = choice.index, self._left[choice.index]
        if choice.finish is None and not left and self._was_aborted(index):
            self._engine.stop(index)
            self._had(choice, GenerationEvent(index=index, finish="abort"))
        if (choice.finish is not None and left) or (choice.finish is None and beyond):
            raise _changed(choice)

    def _was_aborted(self, index: int) -> bool:
        return self._finish.get(index) == "abort"


def generated_again(
    continued: Continued | None, checked: Checked, engine: EngineEvents, choices: int, had: Take
) -> GeneratedAgain | None:
    """None: no other replica began the stream, or it has no file."""
    if continued is None or not checked.by_file:
        return None
    return GeneratedAgain(continued, engine, choices, had)


def _changed(choice: Choice) -> CannotResume:
    return CannotResume(
        f"choice {choice.index} comes out differently here from token {choice.generated} on, so its file would have other "
        "records than the lost replica's"
    )
