"""One request's part in its session's tree: the turn it continues, the prompt that follows, the turns it adds.

Always holds:
- A prompt begins with the exact tokens of the turn that it continues, or the request is marked as a branch.
- A request with answers in its history that continues no turn is a branch. So is a request with answers after a turn that were
  not sampled here.
- A request that continues an answer continues the answer's turn, if the answer was cut. The turn that it adds is found by the
  whole answer.
- Only answers that came to their end become turns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from midstream.core.errors import InvalidRequest
from midstream.core.headers import HEADER_HISTORY
from midstream.core.references import TurnReference
from midstream.core.traces import WITH_ROUTES, RecordsKept, TurnSampling
from midstream.core.types import Session
from midstream.replica.request.checked import Prompt
from midstream.replica.response.choice import Choice, Piece
from midstream.replica.text import reasoning_tags
from midstream.replica.text.chat import TextModel
from midstream.replica.text.reasoning_tags import Render
from midstream.replica.turns.continuing import text_behind, without_end
from midstream.replica.turns.message_keys import (
    Key,
    calls_of,
    key_before,
    key_of_answer,
    keys_of,
    thought_of,
    thoughts_of,
)
from midstream.replica.turns.tree import FoundTurn, Trees, Turn, TurnKeys, TurnRecord, TurnTree

#: A sampling log-probability that the engine does not know.
_UNKNOWN = float("nan")
#: See types.HEADER_HISTORY.
Policy = Literal["exact", "template"]


class Branch(msgspec.Struct):
    """Why a request continues no turn as it was sampled. messages: how many of its messages, from the first on, the session
    has had before. turn: the number of the turn that its prompt begins with, token for token, if there is one.

    - new: it has no answers in its history; a sub-agent, a compacted conversation, or a prompt that comes again. A prompt of
      text or of token ids is new when it begins with no turn.
    - edited: it has answers, or thinking in them, that this replica did not sample in this session. Another one may have, and
      was lost. Or it continues an answer that had come to its end.
    - unknown: it has answers, and this replica has no turn of the session.
    - forgotten: likewise, as the session's turns were dropped for want of memory.
    - template: the chat template renders the conversation otherwise, and the client wants that, or the template does not
      separate answers.
    - ambiguous: several turns with different tokens have these words. The youngest is continued.
    """

    why: Literal["new", "edited", "unknown", "forgotten", "template", "ambiguous"]
    messages: int
    turn: int | UnsetType = UNSET


def policy_of(given: str | None) -> Policy:
    """Raises InvalidRequest."""
    if given in (None, "", "exact"):
        return "exact"
    if given == "template":
        return "template"
    message = f"{HEADER_HISTORY}: expected exact or template, got {given!r}"
    raise InvalidRequest(message, param=HEADER_HISTORY)


def branches_of(histories: Sequence[History]) -> Branch | list[Branch | None] | None:
    """The branch that a response says, or one for each of several prompts. None: no prompt is a branch."""
    branches = [history.branch for history in histories]
    if not any(branches):
        return None
    return branches if len(branches) > 1 else branches[0]


class _Answer:
    """What a choice has sampled so far. A long stream keeps a few bytes a token, and routes and masks only where they are asked
    for."""

    def __init__(self) -> None:
        self.tokens = array("I")
        self.logprobs = array("d")
        self.sampling_logprobs = array("d")
        self.constrained = False
        self.routes: list[bytes] = []
        self.router_weights: list[bytes] = []
        self.masks: list[bytes] = []
        #: Tokens that a replica sampled that was lost. Their numbers are not known here.
        self.replayed = 0
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[tuple[str, str]] = []

    def take(self, piece: Piece, kept: RecordsKept) -> None:
        records = [scored.record for scored in piece.tokens]
        self.tokens.extend(record.token_id for record in records)
        self.text.append(piece.text)
        self.reasoning.append(piece.reasoning)
        self.calls += [(call.name, call.arguments) for call in piece.calls]
        if kept == "none":
            return
        self.logprobs.extend(record.logprob for record in records)
        self.constrained = self.constrained or any(record.constrained for record in records)
        given = (record.sampling_logprob for record in records)
        self.sampling_logprobs.extend(_UNKNOWN if value is None else value for value in given)
        if kept in WITH_ROUTES:
            self.routes += [record.route for record in records if record.route is not None]
            self.router_weights += [r.router_weights for r in records if r.router_weights is not None]
            self.masks += [record.mask for record in records if record.mask is not None]


def _found(trees: Iterable[TurnTree], keys: Sequence[Key], thoughts: Sequence[str]) -> FoundTurn:
    return _furthest(tree.find(keys, thoughts) for tree in trees)


def _furthest(found: Iterable[FoundTurn]) -> FoundTurn:
    """What has the most of the request; of equal ones the first."""
    every = tuple(found)
    best = max(every, key=lambda one: one.messages, default=FoundTurn(None, 0, 0))
    return best._replace(known=max((one.known for one in every), default=0))


class History:
    """branch: None where the request begins a session or continues a turn."""

    def __init__(
        self,
        trees: Trees,
        session: Session,
        ends: Collection[int],
        policy: Policy = "exact",
        records: RecordsKept = "none",
        held: Callable[[], bool] | None = None,
        *,
        begins: bool = False,
        model: str = "",
    ) -> None:
        """ends: tokens that end answers. records: what is kept for the session's trace. held: whether the session is open;
        None: always. Nothing is kept of one that was closed meanwhile. begins: there was nothing that it could continue, so
        it is no branch, whatever answers it has. model: the one that generates."""
        self._begins = begins
        self._model = model
        self._held = held
        self.records = records
        self._trees = trees
        self._ends = ends
        self._session = session
        self._policy = policy
        self._keys: list[Key] = []
        #: Of each message.
        self._thoughts: list[str] = []
        #: The answer that is continued, and the key of the messages before it.
        self._begun: dict[str, Any] | None = None
        self._key_before: Key = b""
        #: A prompt of text, and what its answer's tokens are as text.
        self._text: str | None = None
        self._special = True
        self._raw_text: Callable[[Iterable[int]], str] = lambda tokens: ""
        #: The turn that has the request's messages, and the one that has its prompt's tokens.
        self._found: Turn | None = None
        self._parent: Turn | None = None
        #: How many messages the turn found has.
        self._found_at = 0
        #: How many messages the prompt has as the tokens of turns; the others are rendered.
        self.sampled = 0
        self._reused = False
        #: The session's tree when the request began.
        self._tree: TurnTree | None = None
        self._prompt: tuple[int, ...] = ()
        self._answers: dict[int, _Answer] = {}
        self.branch: Branch | None = None
        #: Of the request that is sampled from.
        self.sampling: TurnSampling | None = None

    def __repr__(self) -> str:
        return f"History({self._session}, parent={self._parent}, branch={self.branch})"

    # -- the prompt

    def prompt(
        self,
        text: TextModel,
        render: Render,
        messages: Sequence[dict[str, Any]],
        others: Any,
        check: Callable[[str], None],
        encode: Callable[[str], tuple[int, ...]],
        *,
        goes_on: bool = False,
    ) -> Prompt | None:
        """The prompt that continues a turn; None: render the conversation. others: what else the template gets. check: raises
        for a text that is too long to be tokenized. encode: of the text behind a turn. goes_on: the last message is an answer
        to be continued.

        Any thread may call it. Raises InvalidRequest.
        """
        self._keys, self._thoughts = keys_of(messages, others), thoughts_of(messages)
        trees = self._trees.all_of(self._session)
        found = _found(trees, self._keys, self._thoughts)
        if goes_on and messages[-1]["role"] == "assistant":
            self._begun = messages[-1]
            self._key_before = self._keys[-2] if len(self._keys) > 1 else key_before(others)
            if found.turn is not None and found.messages == len(messages):
                if found.turn.finish != "stop" or found.turn.sampled[-1] in self._ends:
                    return self._within(found, found.turn)
                # A stop string ended the answer, so that the client has less of it than was sampled.
                found = _found(trees, self._keys[:-1], self._thoughts[:-1])._replace(known=found.known)
        # A client that writes answers into a history which were not sampled here begins a branch.
        answers = any(message["role"] == "assistant" for message in messages[found.messages :])
        if found.turn is None:
            if trees:
                self.branch = Branch("edited" if answers else "new", found.known)
            elif answers and not self._begins:
                self.branch = Branch("forgotten" if self._trees.forgot(self._session) else "unknown", 0)
            return None
        self._found, self._found_at = found.turn, found.messages
        if answers or found.ambiguous:
            self.branch = Branch("edited" if answers else "ambiguous", found.known, found.turn.number)
        if self._policy == "template":
            return None
        closings = self._trees.closings(others, render)
        behind = None if closings is None else text_behind(render, closings, messages, found.messages - 1)
        if closings is None or behind is None:
            self.branch = Branch("template", found.known)
            return None
        check(behind)
        self._reused, self.sampled = True, found.messages
        return Prompt(continued(text, found.turn, closings.within, behind, self._ends, encode))

    def _within(self, found: FoundTurn, turn: Turn) -> Prompt | None:
        """The prompt that continues the turn's answer; None: render it."""
        tokens, within = turn.tokens, turn.answered
        if turn.finish in ("stop", "tool_calls") and tokens[-1] in self._ends:
            # The answer without its end, which is not all that was sampled.
            self._found, number = turn.parent, UNSET if turn.parent is None else turn.parent.number
            self.branch = Branch("edited", found.known, number)
            tokens, within = tokens[:-1], within - 1
        else:
            self._found, self._found_at = turn, found.messages
            if found.ambiguous:
                self.branch = Branch("ambiguous", found.known, turn.number)
        if self._policy == "template":
            return None
        self._reused, self.sampled = True, len(self._keys)
        return Prompt(tokens, within=within)

    def raw(
        self,
        text: TextModel,
        encode: Callable[[str], tuple[int, ...]],
        given: str | tuple[int, ...],
        special: bool,
    ) -> Prompt:
        """The prompt of a completion. encode: of a text that continues nothing. special: it adds the special tokens of the
        tokenizer. Any thread may call it."""
        trees = self._trees.all_of(self._session)
        if isinstance(given, str):
            self._text, self._special, self._raw_text = given, special, text.vocabulary.raw_text
            found = _furthest(tree.find_text(given, special) for tree in trees)
        else:
            turns = [turn for tree in trees if (turn := tree.find_tokens(given)) is not None]
            found = FoundTurn(max(turns, key=lambda turn: len(turn.tokens), default=None), 0, 0)
        turn = self._found = found.turn
        if trees and turn is None:
            self.branch = Branch("new", 0)
        if not isinstance(given, str):
            return Prompt(given)
        if turn is None or self._policy == "template":
            return Prompt(encode(given), given)
        if found.ambiguous:
            self.branch = Branch("ambiguous", 0, turn.number)
        self._reused = True
        behind = text.encode_behind(given[found.messages :], special=special)
        return Prompt(turn.tokens + behind, given)

    def settled(self, prompt: Prompt) -> None:
        """It is this prompt that is sampled from. It may still begin with a turn's tokens where it was rendered."""
        self._prompt = prompt.token_ids
        self._tree = self._trees.of(self._session)
        turn = self._found
        if turn is not None:
            tokens = turn.tokens
            if self._prompt[: len(tokens)] == tokens:
                self._parent = turn
            elif self.branch is None:
                self.branch = Branch("template", len(self._keys))

    @property
    def continues(self) -> bool:
        """Whether the prompt was made from a turn's tokens."""
        return self._reused

    # -- the answers

    def take(self, choice: int, pieces: Sequence[Piece], *, replayed: bool = False) -> None:
        """replayed: the tokens are of a replica that was lost, and their numbers are not known here."""
        answer = self._answers.get(choice)
        if answer is None:
            answer = self._answers[choice] = _Answer()
        for piece in pieces:
            if not piece.echoed:
                answer.take(piece, self.records)
                answer.replayed += len(piece.tokens) if replayed else 0

    def end(self, choice: Choice, created: float, reference: TurnReference | None = None) -> None:
        """The choice came to its end, and is a turn from now on. created: seconds since the epoch. reference: of the file that
        has its columns, too."""
        answer = self._answers.pop(choice.index, None)
        closed = self._held is not None and not self._held()
        if answer is None or closed or not (self._keys or answer.tokens):
            return
        dropped = self._tree is not None and self._trees.of(self._session) is not self._tree
        if dropped and not self._trees.forgot(self._session):
            # The session was closed, and a new one began meanwhile.
            return
        added = self._prompt[0 if self._parent is None else len(self._parent.tokens) :]
        record = self._record(choice, answer, created)._replace(reference=reference)
        keys = self._keys_of(answer)._replace(recorded=self.records != "none")
        self._trees.add(self._session, self._parent, added, answer.tokens, keys, record)

    def _keys_of(self, answer: _Answer) -> TurnKeys:
        if not self._keys:
            text = None if self._text is None else self._text + self._raw_text(answer.tokens)
            return TurnKeys(text=text, special=self._special)
        content, thought = "".join(answer.text), "".join(answer.reasoning)
        calls: list[tuple[str, Any]] = [*answer.calls]
        own, before = len(self._keys), self._keys[-1]
        if self._begun is not None:
            # The client has one answer, which this one continues.
            own, before = own - 1, self._key_before
            content = (self._begun.get("content") or "") + content
            thought = reasoning_tags.of_message(self._begun) + thought
            calls = calls_of(self._begun) + calls
        first = self._found_at if self._parent is not None and self._parent is self._found else 0
        thoughts = {at: self._thoughts[at] for at in range(first, len(self._keys))}
        thoughts[own] = thought_of(content, thought)
        keys = [*self._keys, key_of_answer(before, content, calls)]
        return TurnKeys(keys, [(at, thought) for at, thought in thoughts.items() if thought])

    def _record(self, choice: Choice, answer: _Answer, created: float) -> TurnRecord:
        none = array("d")
        whole = 0 if answer.replayed else len(answer.tokens)
        return TurnRecord(
            choice.finish or "stop",
            created,
            none if answer.replayed else answer.logprobs,
            none if answer.replayed else answer.sampling_logprobs,
            b"".join(answer.routes) if len(answer.routes) == whole else b"",
            tuple(choice.spans),
            tuple(choice.kv),
            tuple(choice.earlier_kv),
            None if self.branch is None else msgspec.to_builtins(self.branch),
            self._model,
            answer.replayed,
            answer.constrained,
            tuple(answer.masks) if len(answer.masks) == whole else (),
            sampling=self.sampling,
            router_weights=b"".join(answer.router_weights) if len(answer.router_weights) == whole else b"",
        )


def continued(
    text: TextModel,
    turn: Turn,
    closing: str,
    behind: str,
    ends: Collection[int],
    encode: Callable[[str], tuple[int, ...]],
) -> tuple[int, ...]:
    """The turn's tokens and those of the text behind its answer. ends: tokens that end answers."""
    tokens = turn.tokens
    last = text.marker_text(tokens[-1])
    # A client may stop a base model at the token that its template ends answers with.
    if tokens[-1] in ends or (last and last in closing):
        behind = without_end(behind, closing, last, text.markers)
    return tokens + encode(behind)
