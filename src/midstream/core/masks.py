"""A sampling mask: which tokens the limits and filters of a request left for one draw, as the bytes of a token record. Pure.

Owns: the form of these bytes, which records, traces and responses all have. The embedded engine's sampler writes them.
Always holds: ids ascend, which is the order in which samplers add up weights. The token that was drawn is one of them.

The first byte says what follows:
0: nothing: the drawn token alone was left. A greedy draw is one of these.
1: nothing: no limit and no filter was asked for, so every token was left.
2, 4: the ids, little-endian, of so many bytes each; 2 where every id fits into it.
8: a bit for each token up to the last one that was left, lowest bit first; where that is shorter than ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress, pairwise

ALONE, EVERY = b"\0", b"\1"
SHORT, LONG, BITS = 2, 4, 8
#: Little-endian, as all machines are that train.
_CODES = {SHORT: "H", LONG: "I"}
#: Ids are int32 wherever they are computed with.
_IDS_END = 1 << 31
_AS_FLAGS = bytes.maketrans(b"01", b"\0\1")


def kept_ids(mask: bytes, token: int) -> Sequence[int] | None:
    """The ids that were left; None: every one. token: that was drawn. Raises ValueError for bytes that are no mask of it."""
    if not 0 <= token < _IDS_END:
        raise ValueError(f"a sampling mask of token {token}, which is no id")
    if mask == ALONE:
        return array("I", (token,))
    if mask == EVERY:
        return None
    kind, size = mask[:1], len(mask) - 1
    if kind and kind[0] == BITS:
        ids = array("I", compress(range(8 * size), _flags(mask[1:])))
    elif kind and kind[0] in _CODES and size % kind[0] == 0:
        ids = array(_CODES[kind[0]], mask[1:])
    else:
        raise ValueError(f"{len(mask)} bytes that begin with {kind.hex() or 'nothing'} are no sampling mask")
    if token not in ids or ids[-1] >= _IDS_END or any(one >= other for one, other in pairwise(ids)):
        raise ValueError(
            f"a sampling mask of {len(ids)} ids does not ascend, or lacks token {token}, which was drawn"
        )
    return ids


def _flags(bits: bytes) -> bytes:
    """A byte for each bit, 0 or 1."""
    digits = f"{int.from_bytes(bits, 'little'):b}"
    return digits[::-1].encode().translate(_AS_FLAGS)
