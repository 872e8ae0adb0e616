"""The canary: the fixed prompt that proves what weights compute. Pure.

Always holds: it is the same for every replica and engine of a model, and a shorter one is the beginning of a longer one.
"""

from __future__ import annotations

CANARY_TOKENS = 32
#: Of a policy's adapter. Streams of others wait for it, and would wait longer for a longer one.
CANARY_TOKENS_OF_POLICY = 4


def canary_ids(vocab_size: int, context: int, tokens: int = CANARY_TOKENS) -> tuple[int, ...]:
    """Token ids all over the vocabulary, two at least, and no more than the context has room for."""
    size = max(2, min(tokens, context - 1))
    return tuple((i * 7919 + 13) % vocab_size for i in range(size))
