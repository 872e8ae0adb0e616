"""A stream that another replica began and this one continues.

Always holds: the stream continues exactly or not at all, unless its client allows any snapshot. Exactly means the same prompt
tokens, the same seed, and KV of the same snapshot under all emitted tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from midstream.core.resumption import CannotResume, Opening, Resume, ResumeLogReader
from midstream.core.types import EngineCard, GenerationEvent
from midstream.replica.request.checked import Checked, Prompt


def can_be_resumed(checked: Checked, card: EngineCard) -> bool:
    """True if another replica can continue a stream: all that its end repeats must follow from token ids alone. The numbers of
    a record file do not, so the other replica has to make the same tokens again."""
    repeats = checked.cumulative or (checked.raw_output and checked.logprobs)
    again = not checked.by_file or card.has("reproducible_sampling")
    return checked.stream and again and not repeats


def digest(prompts: Iterable[Prompt]) -> str:
    """The digest of a request's prompt token ids."""
    ids = msgspec.msgpack.encode([prompt.token_ids for prompt in prompts])
    return hashlib.blake2b(ids, digest_size=12).hexdigest()


def branch_seam(branches: Any) -> dict[str, Any]:
    """What a response says of branches, which are as in Opening.branch."""
    return {"branches": branches} if isinstance(branches, list) else {"branch": branches}


class Continued:
    """A resumed stream, as its resume log has it. Raises InvalidRequest."""

    def __init__(self, resume: Resume, checked: Checked, choices: int, card: EngineCard) -> None:
        if not can_be_resumed(checked, card):
            raise CannotResume("this kind of request cannot be resumed")
        self._lost = resume.lost
        # A file has numbers of all tokens, which no other weights give.
        self._exact = resume.exact or checked.by_file
        self._log = ResumeLogReader(resume.state)
        self._choices = choices
        #: The snapshot that must have computed all KV.
        self._snapshot: str | None = None
        #: What its files were, as far as the log says.
        self._files: set[str] = set()
        #: Choices with KV that is proved to be of it.
        self._proved: set[int] = set()

    def __repr__(self) -> str:
        return f"Continued({self._log!r}, exact={self._exact})"

    @property
    def opening(self) -> Opening:
        return self._log.opening

    @property
    def exact(self) -> bool:
        return self._exact

    def events(self) -> Iterable[tuple[int, GenerationEvent]]:
        return self._log.events(self._choices)

    def over(self) -> set[int]:
        """The choices that are complete."""
        return self._log.over()

    def prompts(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts of the stream: those that the body gives here, unless the stream had others and says which.

        Raises CannotResume.
        """
        if self.opening.ids is not None:
            prompts = [Prompt(self.opening.ids, within=self.opening.within)]
        if digest(prompts) != self.opening.prompts:
            raise CannotResume("the prompt is read as other tokens than before")
        return prompts

    def check_snapshot(self, serving: str, files: str, finished: Collection[int]) -> None:
        """Raises CannotResume unless the KV of what is unfinished can be computed again as it was. files: of what serves, see
        resumption.Step."""
        self._snapshot = self._log.snapshot(finished) if self._exact else None
        if self._snapshot not in (None, serving):
            raise CannotResume(f"its KV is of snapshot {self._snapshot!r}, and {serving!r} serves here")
        self._files = set() if self._snapshot is None else self._log.files(finished)
        self._check_files(files)

    def _check_files(self, files: str) -> None:
        if files and not self._files <= {files}:
            raise CannotResume(f"its KV is of other files of {self._snapshot!r}, which was overwritten")

    def check_kv(self, choice: int, event: GenerationEvent, again: int) -> None:
        """Raises CannotResume when a swap came between: positions below `again` are what was computed again.

        The engine may have switched to other files of the same name before the replica heard of it.
        """
        if self._snapshot is None or choice in self._proved or event.kv_snapshots is None:
            return
        self._proved.add(choice)
        found = {snapshot for snapshot, start, _ in event.kv_snapshots if start < again}
        if not found <= {self._snapshot}:
            raise CannotResume("weights were swapped while the stream's KV was computed again")
        self._check_files(event.kv_files)

    def seam(self, tokens: list[int]) -> dict[str, Any]:
        """What the first chunk says; `tokens`: how many of each choice the client had before."""
        branch = {} if self.opening.branch is None else branch_seam(self.opening.branch)
        return {"resumed": {"from": self._lost, "tokens": tokens, "exact": self._exact}, **branch}
