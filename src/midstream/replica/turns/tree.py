"""The turns of sessions as token ids: a tree for each session, found again by the messages that a client sends back.

Owns: the trees of a replica, within one bound of bytes, and which sessions' trees were dropped for it.
Always holds:
- A turn never changes. Its tokens are its parent's tokens, then those that its request added, then those that were sampled.
- A turn is found by all messages up to its answer, and by the tools. White space at the ends of an answer and in its calls'
  arguments does not count, and neither do the ids of its calls. Thinking counts where the client sends it: then it is the
  turn's own, and that of the answers before it.
- A prompt of token ids continues the turn with the most tokens that it begins with; one of text, the turn with the longest
  text, special tokens by name.
- The least recently used tree is dropped first, as a whole. Its session is known as forgotten.

Threads may read while the loop's thread adds: each step is one operation of a dict.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from midstream.core.errors import InvalidRequest
from midstream.core.measures import Rewarded
from midstream.core.references import TurnReference
from midstream.core.traces import REWARDS_MAX, Reward, TurnSampling
from midstream.core.types import FinishReason, Session
from midstream.replica.text.reasoning_tags import Render
from midstream.replica.turns.continuing import Closings, closings_of
from midstream.replica.turns.message_keys import Key, digest
from midstream.replica.turns.rewards import Rewards

#: Of all trees together.
BYTES_MAX = 256 * 2**20
FORGOTTEN_MAX = 100_000
#: How many sets of tools have their closings kept.
CLOSINGS_MAX = 1024
#: How many turns with the same words are kept apart.
SAME_WORDS_MAX = 64
#: What a turn and a message key take beside tokens, roughly.
_TURN_BYTES = 512
_KEY_BYTES = 128
_THOUGHT_BYTES = 128
_MASK_BYTES = 48

#: Digests of thinking (`message_keys.thought_of`), each with the place of its message in the conversation.
Thoughts = Sequence[tuple[int, str]]


class Turn:
    """One answer of a session. number: within the tree. added: what the request had behind the parent's tokens."""

    __slots__ = ("added", "number", "parent", "record", "sampled", "thoughts")

    def __init__(
        self,
        number: int,
        parent: Turn | None,
        added: Sequence[int],
        sampled: Sequence[int],
        record: TurnRecord | None = None,
        thoughts: Thoughts = (),
    ) -> None:
        """thoughts: of the messages behind the parent's answer, this answer included."""
        self.thoughts = thoughts
        self.number = number
        self.parent = parent
        self.record = record
        self.added = array("I", added)
        self.sampled = array("I", sampled)

    def __repr__(self) -> str:
        parent = None if self.parent is None else self.parent.number
        return f"Turn({self.number}, parent={parent}, {len(self.added)} added, {len(self.sampled)} sampled)"

    @property
    def size(self) -> int:
        """Roughly, in bytes."""
        record = 0 if self.record is None else self.record.size
        record += _THOUGHT_BYTES * len(self.thoughts)
        return _TURN_BYTES + 4 * (len(self.added) + len(self.sampled)) + record

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids, from the first of the conversation on."""
        turn: Turn | None = self
        parts: list[array[int]] = []
        while turn is not None:
            parts += (turn.sampled, turn.added)
            turn = turn.parent
        return tuple(itertools.chain.from_iterable(reversed(parts)))

    @property
    def finish(self) -> FinishReason | None:
        return None if self.record is None else self.record.finish

    def goes_on_with(self) -> list[Turn]:
        """The turns with the answer that it continues, the youngest first."""
        turns, turn = list[Turn](), self
        while turn.parent is not None and not turn.added:
            turn = turn.parent
            turns.append(turn)
        return turns

    @property
    def answered(self) -> int:
        """How many tokens its answer has, with those of the turns that it continues."""
        return sum(len(turn.sampled) for turn in (self, *self.goes_on_with()))

    @property
    def all_thoughts(self) -> dict[int, str]:
        """The thoughts of the whole conversation, by the place of the message."""
        turn: Turn | None = self
        found: dict[int, str] = {}
        while turn is not None:
            # A turn that continues its parent's answer has the thinking of both.
            for at, thought in turn.thoughts:
                found.setdefault(at, thought)
            turn = turn.parent
        return found


class TurnRecord(NamedTuple):
    """What a trace has of a turn beside its tokens.

    logprobs, sampling_logprobs: of the sampled tokens; NaN where the engine does not know them; empty where they were not asked
    for.
    routes: of the sampled tokens, one behind the other, all of one size. snapshots, kv, earlier_kv: as in
    choice.Choice.
    model: the one that they are snapshots of; "": the replica's own. resumed: how many of the sampled tokens, from the first
    on, are of a replica that was lost. Their numbers, and so those of the turn, went to the client alone. constrained: as in a
    TokenRecord. masks: of the sampled tokens; empty where they were not asked for. reference: to the file with columns.
    sampling: what shaped their distributions. router_weights: of the routes; empty where they were not asked for.
    """

    finish: FinishReason
    created: float
    logprobs: array[float]
    sampling_logprobs: array[float]
    routes: bytes
    snapshots: tuple[tuple[str, int, int], ...]
    kv: tuple[tuple[str, int, int], ...]
    earlier_kv: tuple[tuple[int, Sequence[tuple[str, int, int]]], ...]
    branch: dict[str, Any] | None
    model: str = ""
    resumed: int = 0
    constrained: bool = False
    masks: tuple[bytes, ...] = ()
    reference: TurnReference | None = None
    sampling: TurnSampling | None = None
    router_weights: bytes = b""

    @property
    def size(self) -> int:
        masks = sum(len(mask) for mask in self.masks) + _MASK_BYTES * len(self.masks)
        of_routes = len(self.routes) + len(self.router_weights)
        return 8 * (len(self.logprobs) + len(self.sampling_logprobs)) + of_routes + masks


class FoundTurn(NamedTuple):
    """turn: the last one with all its messages in the request, in the same words; None: there is none. messages: their number.

    known: how many messages from the first on any turn of the session has had. ambiguous: turns of other tokens have the same
    words, so this one, the youngest, may not be meant.
    """

    turn: Turn | None
    messages: int
    known: int
    ambiguous: bool = False


class TurnKeys(NamedTuple):
    """What a turn is found again by. keys: as for `TurnTree.find`, with the answer's own at the end. thoughts: as in Turn.
    text: of a prompt of text and the answer to it. special: the tokenizer added its special tokens. recorded: Trees.on_turn
    hears of the turn."""

    keys: Sequence[Key] = ()
    thoughts: Thoughts = ()
    text: str | None = None
    special: bool = True
    recorded: bool = False


class TurnTree:
    """The turns of one session."""

    def __init__(self, number: int = 0) -> None:
        """number: of this tree among all of the replica's process."""
        self.number = number
        #: Turns of the same words, the oldest first.
        self.by_words: dict[Key, tuple[Turn, ...]] = {}
        #: The beginnings of all conversations that were had.
        self.known: set[Key] = set()
        #: By the number of the parent; 0: none.
        self._children: dict[int, list[Turn]] = {}
        #: By a digest of the text, with its length in characters. Its lengths in bytes, the shortest first.
        self.by_text: dict[Key, tuple[tuple[Turn, ...], int]] = {}
        self.text_sizes: tuple[int, ...] = ()
        #: All of them, in the order of their numbers.
        self.turns: list[Turn] = []
        #: By turn, or None for the session, and name.
        self.rewards: dict[tuple[int | None, str], Reward] = {}
        #: Where each of them is counted.
        self._counted: dict[tuple[int | None, str], Rewarded] = {}
        self.size = 0

    def __repr__(self) -> str:
        return f"TurnTree({len(self.turns)} turns, {self.size} bytes)"

    def __len__(self) -> int:
        return len(self.turns)

    @classmethod
    def of(
        cls,
        turns: list[Turn],
        known: Iterable[Key],
        by_words: dict[Key, tuple[Turn, ...]],
        by_text: dict[Key, tuple[tuple[Turn, ...], int]],
        text_sizes: Iterable[int],
    ) -> TurnTree:
        """A tree of another replica."""
        tree = cls()
        tree.turns, tree.known, tree.by_words = turns, set(known), by_words
        tree.by_text, tree.text_sizes = by_text, tuple(text_sizes)
        for turn in turns:
            tree._children.setdefault(0 if turn.parent is None else turn.parent.number, []).append(turn)
        tree.size = sum(turn.size for turn in turns) + _KEY_BYTES * (len(tree.known) + len(by_text))
        return tree

    def holds(self, turn: Turn) -> bool:
        return turn.number <= len(self.turns) and self.turns[turn.number - 1] is turn

    def find(self, keys: Sequence[Key], thoughts: Sequence[str]) -> FoundTurn:
        """keys: of the beginnings of a conversation, the shortest first (`message_keys.keys_of`). thoughts: of each of its
        messages."""
        known = next((at for at in range(len(keys), 0, -1) if keys[at - 1] in self.known), 0)
        given = [(at, thought) for at, thought in enumerate(thoughts) if thought]
        for at in range(known, 0, -1):
            turns = self.by_words.get(keys[at - 1])
            if turns is None:
                continue
            differ = [_differs(turn, given, at) for turn in turns]
            turns = tuple(turn for turn, place in zip(turns, differ, strict=True) if place is None)
            if turns:
                turn, ambiguous = _meant(turns)
                return FoundTurn(turn, at, max(known, at), ambiguous)
            # The answer, or one before it, was said with other thinking.
            known = min(known, max(place for place in differ if place is not None))
        return FoundTurn(None, 0, known)

    def find_tokens(self, prompt: Sequence[int]) -> Turn | None:
        """The turn with the most tokens that the prompt begins with, the youngest of equal ones."""
        given, best, best_end = array("I", prompt), None, 0
        reached = [(0, 0)]
        while reached:
            number, at = reached.pop()
            for turn in self._children.get(number, ()):
                middle = at + len(turn.added)
                end = middle + len(turn.sampled)
                if end > len(given) or given[at:middle] != turn.added or given[middle:end] != turn.sampled:
                    continue
                reached.append((turn.number, end))
                if (end, turn.number) > (best_end, best.number if best else 0):
                    best, best_end = turn, end
        return best

    def find_text(self, prompt: str, special: bool = True) -> FoundTurn:
        """The turn with the longest text that the prompt begins with; `messages` is how many of its characters that is."""
        data, digest, at = _utf8(prompt), _text_digest(special), 0
        turns: tuple[Turn, ...] = ()
        length = 0
        for size in self.text_sizes:
            if size > len(data):
                break
            digest.update(data[at:size])
            at = size
            turns, length = self.by_text.get(digest.digest(), (turns, length))
        if not turns:
            return FoundTurn(None, 0, 0)
        turn, ambiguous = _meant(turns)
        return FoundTurn(turn, length, 0, ambiguous)

    def add(self, turn: Turn, known_by: TurnKeys) -> None:
        """Add a turn. It gets the next number."""
        assert turn.number == len(self.turns) + 1
        self.turns.append(turn)
        self._children.setdefault(0 if turn.parent is None else turn.parent.number, []).append(turn)
        before = len(self.known) + len(self.by_text)
        if known_by.keys:
            key = known_by.keys[-1]
            self.known.update(known_by.keys)
            self.by_words[key] = (*self.by_words.get(key, ())[-SAME_WORDS_MAX:], turn)
        if known_by.text is not None:
            data, digest = _utf8(known_by.text), _text_digest(known_by.special)
            digest.update(data)
            turns, _ = self.by_text.get(digest.digest(), ((), 0))
            self.by_text[digest.digest()] = (*turns[-SAME_WORDS_MAX:], turn), len(known_by.text)
            self.text_sizes = tuple(sorted({*self.text_sizes, len(data)}))
        self.size += _KEY_BYTES * (len(self.known) + len(self.by_text) - before) + turn.size

    def reward(self, given: Reward, rewards: Rewards) -> None:
        """Replaces one of the same turn and name. rewards: where it is counted.

        Raises InvalidRequest when there are too many.
        """
        key = (given.turn, given.name)
        before = self.rewards.get(key)
        if before is None and len(self.rewards) >= REWARDS_MAX:
            raise InvalidRequest(f"reward: a session takes at most {REWARDS_MAX}", param="reward")
        self.rewards[key] = given
        self.size += len(msgspec.json.encode(given)) - (
            0 if before is None else len(msgspec.json.encode(before))
        )
        counted = self._counted.pop(key, None)
        if before is not None and counted is not None:
            rewards.take_back(counted, before)
        record = self.turns[(given.turn or len(self.turns)) - 1].record
        if record is not None and record.snapshots:
            self._counted[key] = rewards.give(record.model, record.snapshots[-1][0], given)


def _differs(turn: Turn, given: Thoughts, end: int) -> int | None:
    """The place of the first of `end` messages that a client sent with other thinking than the turn's conversation has. None:
    of no one; what the client left out is no matter."""
    own = turn.all_thoughts if given else {}
    return next((at for at, thought in given if at < end and own.get(at) != thought), None)


def _meant(turns: Sequence[Turn]) -> tuple[Turn, bool]:
    """Which of the turns of the same words is continued, and whether it may be another one."""
    youngest = turns[-1]
    if len(turns) == 1:
        return youngest, False
    # A cut answer that went on, and said no more, has the words of both.
    tokens, before = youngest.tokens, youngest.goes_on_with()
    return youngest, any(turn.tokens != tokens for turn in turns[:-1] if turn not in before)


class Trees:
    """The trees of all sessions."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self.rewards = Rewards()
        self._numbers = itertools.count(1)
        #: Hears of turns, with the number of the tree of each.
        self.on_turn: Callable[[Session, int, Turn], None] | None = None
        self._trees: OrderedDict[Session, TurnTree] = OrderedDict()
        #: Of sessions that moved here: the trees of their homes before, the last one first.
        self._before: OrderedDict[Session, tuple[TurnTree, ...]] = OrderedDict()
        self._forgotten: OrderedDict[Session, None] = OrderedDict()
        self._closings: dict[Key, tuple[Closings | None]] = {}
        self.size = 0

    def __repr__(self) -> str:
        return f"Trees({len(self._trees)} sessions, {self.size} bytes, {len(self._forgotten)} forgotten)"

    def closings(self, others: Any, render: Render) -> Closings | None:
        """The closings of the replica's template. others: what it gets beside the messages."""
        key = digest(b"", others)
        known = self._closings.get(key)
        if known is None:
            known = (closings_of(render),)
            if len(self._closings) >= CLOSINGS_MAX:
                self._closings.clear()
            self._closings[key] = known
        return known[0]

    def of(self, session: Session) -> TurnTree | None:
        """None: nothing was kept of the session."""
        return self._trees.get(session)

    def all_of(self, session: Session) -> tuple[TurnTree, ...]:
        """Those of its homes before, too, behind this replica's own."""
        own = self._trees.get(session)
        return (() if own is None else (own,)) + self._before.get(session, ())

    def bring(self, session: Session, before: tuple[TurnTree, ...]) -> None:
        """The session moved here from a replica that had these trees."""
        self._drop_before(session)
        if before:
            self._before[session] = before
            self.size += sum(tree.size for tree in before)
            self._fit()

    def _drop_before(self, session: Session) -> None:
        self.size -= sum(tree.size for tree in self._before.pop(session, ()))

    def forgot(self, session: Session) -> bool:
        """Whether the session had turns here that were dropped."""
        return session in self._forgotten

    def add(
        self,
        session: Session,
        parent: Turn | None,
        added: Sequence[int],
        sampled: Sequence[int],
        known_by: TurnKeys,
        record: TurnRecord | None = None,
    ) -> Turn:
        """added: what the request had behind the parent's tokens."""
        tree = self._trees.get(session)
        if tree is None:
            tree = self._trees[session] = TurnTree(next(self._numbers))
        if parent is not None and not tree.holds(parent):
            # The tree that had it was dropped: the turn stands by itself.
            added = (*parent.tokens, *added)
            known_by = known_by._replace(
                thoughts=tuple((parent.all_thoughts | dict(known_by.thoughts)).items())
            )
            parent = None
        before = tree.size
        turn = Turn(len(tree) + 1, parent, added, sampled, record, known_by.thoughts)
        tree.add(turn, known_by)
        self.size += tree.size - before
        self._trees.move_to_end(session)
        if known_by.recorded and self.on_turn is not None:
            self.on_turn(session, tree.number, turn)
        self._fit()
        return turn

    def reward(self, session: Session, given: Reward, *, look: bool = False) -> tuple[bool, bool]:
        """True, if there are turns of the session; and True, if the reward's turn is among them. The reward is kept unless look
        is set. Raises InvalidRequest."""
        tree = self._trees.get(session)
        if tree is None:
            return False, False
        here = given.turn is None or given.turn <= len(tree.turns)
        if here and not look:
            before = tree.size
            tree.reward(given, self.rewards)
            self.size += tree.size - before
            self._fit()
        return True, here

    def _fit(self) -> None:
        while self.size > self._bytes_max and self._before:
            oldest = next(iter(self._before))
            self._drop_before(oldest)
            self._forgotten[oldest] = None
        while self.size > self._bytes_max and self._trees:
            oldest, dropped = self._trees.popitem(last=False)
            self.size -= dropped.size
            self._forgotten[oldest] = None
        while len(self._forgotten) > FORGOTTEN_MAX:
            self._forgotten.popitem(last=False)

    def close(self, session: Session) -> None:
        """The session is over: nothing of it stays."""
        self._drop_before(session)
        self._forgotten.pop(session, None)
        tree = self._trees.pop(session, None)
        if tree is not None:
            self.size -= tree.size


def _text_digest(special: bool) -> Any:
    return hashlib.blake2b(digest_size=16, person=b"special" if special else b"plain")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
