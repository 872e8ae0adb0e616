"""The port to KV that one engine gives to another: what a piece of a cached history is, and what an engine does with it.

Owns: the form of a piece. replica/kv_travel.py carries it, and engine/embedded/kv_copies.py makes and takes it.
Always holds: a piece says which weights computed each position as the age of their commit, and names these commits. Nothing in
it chooses tokens or a namespace: who takes it says both.
"""

from __future__ import annotations

import abc
from typing import Annotated, NamedTuple

import msgspec

_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
#: Commits that a piece may name. KV of older ones stays where it is.
COMMITS_MAX = 64


class KvRefused(Exception):
    """The engine takes nothing of a piece, or has nothing to give, and is as it was."""


class KvForm(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be equal for KV to be of use elsewhere. kind: a digest of model, base weights, kernels and sizes.
    block_bytes: all that is kept for a block."""

    kind: str
    block_tokens: int
    block_bytes: int


class KvPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks `first` to `first + count` of a chain of `total`. spans: of the chain from its root to the piece's end, first
    position and age of its commit. commits: label and files of the commits up to the newest, which is the last and has the
    age 0."""

    total: _Whole = 0
    first: _Whole = 0
    count: _Whole = 0
    spans: Annotated[tuple[tuple[_Whole, _Whole], ...], msgspec.Meta(max_length=COMMITS_MAX)] = ()
    commits: Annotated[tuple[tuple[str, str], ...], msgspec.Meta(max_length=COMMITS_MAX)] = ()


class KvPlace(NamedTuple):
    """Whose KV it is in one engine. tokens: of the history, as 32-bit integers of this machine."""

    salt: bytes
    policy: str
    tokens: bytes


class KvCopies(abc.ABC):
    """form: of the engine that runs."""

    form: KvForm

    @abc.abstractmethod
    async def give(
        self, place: KvPlace, first: int, most: int, kv_age_max: int | None
    ) -> tuple[KvPiece, bytes]:
        """Of what a request with these tokens would find, at most so many blocks from `first` on. Raises EngineDied,
        KvRefused."""

    @abc.abstractmethod
    async def take(self, place: KvPlace, part: KvPiece, content: bytes, session: str, kept_s: float) -> int:
        """Keep blocks that another engine gave, for a session whose turn comes at once. kept_s: as in GenerateRequest.

        How many blocks of the piece's chain are here now, from its root on; fewer than `part.first` where some before the piece
        are not. Raises EngineDied, KvRefused for what does not fit what this engine serves.
        """
