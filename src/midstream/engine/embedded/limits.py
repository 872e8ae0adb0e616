"""Limits on the tokens of one sequence: allowed_token_ids, bad words and min_tokens. Imports no torch.

Owns: which tokens these forbid next, on their own or on top of a grammar.
Always holds: what is forbidden depends on the sequence's generated tokens alone, so it outlives preemption and swaps. A
sequence without limits has no object of this kind and costs nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from midstream.core.types import SamplingParams


class TokenFollower(Protocol):
    """What follows a sequence token by token and says which token may come next (constraint.Matcher is one).

    error: why the sequence cannot continue.
    """

    error: str | None

    def mask(self) -> bytes | None:
        """The tokens that may come next, bit i (little-endian) for token i. None: `error` says why there are none."""

    def accept(self, token: int) -> bool:
        """Take a token that `mask` allowed. Returns whether the sequence ends with it."""


class TokenLimiter:
    """under: follows the sequence's grammar, if it has one."""

    def __init__(self, sampling: SamplingParams, vocab_size: int, under: TokenFollower | None) -> None:
        self.error: str | None = None
        self._under = under
        self._min_tokens = sampling.min_tokens
        self._ends = [token for token in sampling.stop_token_ids if token < vocab_size]
        self._bad = [bad for bad in sampling.bad_tokens if bad and bad[-1] < vocab_size]
        self._generated: list[int] = []
        # A grammar's mask comes in words of four bytes, too.
        allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
        given = [token for token in sampling.allowed_token_ids if token < vocab_size]
        allowed[given if sampling.allowed_token_ids else slice(vocab_size)] = 1
        self._allowed = np.packbits(allowed, bitorder="little")

    def mask(self) -> bytes | None:
        bits = self._allowed.copy()
        for token in self._forbidden():
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        if self._under is not None:
            mask = self._under.mask()
            if mask is None:
                self.error = self._under.error
                return None
            under = np.frombuffer(mask, dtype=np.uint8)
            bits, left_out = bits[: len(under)], len(under) - len(bits)
            bits = np.pad(bits, (0, max(left_out, 0))) & under
        if not bits.any():
            self.error = "allowed_token_ids, bad_words, min_tokens and the grammar together leave none"
            return None
        return bits.tobytes()

    def accept(self, token: int) -> bool:
        self._generated.append(token)
        return self._under is not None and self._under.accept(token)

    def _forbidden(self) -> list[int]:
        made = self._generated
        tokens = self._ends if len(made) < self._min_tokens else []
        return tokens + [bad[-1] for bad in self._bad if _ends_with(made, bad[:-1])]


def _ends_with(tokens: list[int], end: tuple[int, ...]) -> bool:
    return not end or tuple(tokens[-len(end) :]) == end
