"""The turns of a session that moves, as bytes: what finds them again, and their tokens. Pure.

Their records stay with the replica that sampled them: traces, rewards and journals name the replica of each turn.
Always holds: a tree that was read finds the same turns for the same messages, tokens and texts as the one that was written.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from midstream.core.types import FinishReason
from midstream.replica.turns.tree import Turn, TurnRecord, TurnTree

#: Of a session that moved often, the trees of its last homes.
HOMES_MAX = 4
_NONE = array("d")


class _Turn(NamedTuple):
    """parent: its number; 0: none. added, sampled: ids of 32 bits as this machine has them."""

    parent: int
    added: bytes
    sampled: bytes
    finish: FinishReason
    thoughts: list[tuple[int, str]]


class _Tree(NamedTuple):
    """turns: in the order of their numbers. words, texts: the numbers of turns by their digests; of a text, its characters."""

    turns: list[_Turn]
    known: list[bytes]
    words: list[tuple[bytes, list[int]]]
    texts: list[tuple[bytes, list[int], int]]
    text_sizes: list[int]


_decoder = msgspec.msgpack.Decoder(list[_Tree])


def packed(trees: Sequence[TurnTree]) -> bytes:
    """The trees of one session, the one of its last home first. Any thread may call it."""
    return msgspec.msgpack.encode([_tree(tree) for tree in trees[:HOMES_MAX]])


def unpacked(data: bytes) -> tuple[TurnTree, ...]:
    """Raises ValueError for what `packed` never wrote."""
    try:
        return tuple(_tree_of(given) for given in _decoder.decode(data)[:HOMES_MAX])
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"no turns: {error}") from error


def _tree(tree: TurnTree) -> _Tree:
    # The loop's thread may add a turn meanwhile: turns first, so what names them may name more.
    words, texts = dict(tree.by_words), dict(tree.by_text)
    turns = list(tree.turns)
    return _Tree(
        turns=[
            _Turn(
                0 if turn.parent is None else turn.parent.number,
                turn.added.tobytes(),
                turn.sampled.tobytes(),
                turn.finish or "stop",
                [(at, thought) for at, thought in turn.thoughts],
            )
            for turn in turns
        ],
        known=list(tree.known.copy()),
        words=[(key, [turn.number for turn in found]) for key, found in words.items()],
        texts=[(key, [turn.number for turn in found], length) for key, (found, length) in texts.items()],
        text_sizes=list(tree.text_sizes),
    )


def _tree_of(given: _Tree) -> TurnTree:
    turns: list[Turn] = []
    for number, one in enumerate(given.turns, start=1):
        if not 0 <= one.parent < number:
            raise ValueError(f"turn {number} has the parent {one.parent}")
        parent = turns[one.parent - 1] if one.parent else None
        record = TurnRecord(one.finish, 0.0, _NONE, _NONE, b"", (), (), (), None)
        turns.append(Turn(number, parent, _ids(one.added), _ids(one.sampled), record, one.thoughts))
    lists = [numbers for _, numbers in given.words] + [numbers for _, numbers, _ in given.texts]
    named = [number for numbers in lists for number in numbers]
    if named and not 1 <= min(named) <= max(named) <= len(turns):
        raise ValueError("a key names a turn that is not there")
    words = {key: tuple(turns[number - 1] for number in numbers) for key, numbers in given.words}
    texts = {
        key: (tuple(turns[number - 1] for number in numbers), length) for key, numbers, length in given.texts
    }
    return TurnTree.of(turns, given.known, words, texts, given.text_sizes)


def _ids(data: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(data)
    return ids
