"""The task of the demo: write characters of one kind, then go on when asked to. Pure.

Turn 1 names a kind of character; turn 2 asks for more "of the same kind", so it can only be answered from the history.
The reward of a turn is the share of its token budget spent on characters of that kind: random weights score a few
percent, every better character counts, and stopping early gains nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SYSTEM_PROMPT = (
    "Each conversation names an alphabet. Answer every request with characters of it only, "
    "without spaces and without a word of explanation."
)
FOLLOW_UP = "Good. Now more from the same alphabet."
ALPHABETS = {
    "lowercase": "abcdefghijklmnopqrstuvwxyz",
    "consonants": "bcdfghjklmnpqrstvwxyz",
    "hexadecimal": "0123456789abcdef",
}
_BYTES = {kind: frozenset(alphabet.encode()) for kind, alphabet in ALPHABETS.items()}


@dataclass(frozen=True)
class Problem:
    kind: str

    def first_messages(self) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"Alphabet: {ALPHABETS[self.kind]}"},
        ]

    def follow_up_text(self, answer_ended: bool) -> str:
        """What stands between the first answer and the second in the rendered conversation.

        answer_ended: the first answer's own tokens already end with <|im_end|>.
        """
        end = "" if answer_ended else "<|im_end|>"
        return f"{end}\n<|im_start|>user\n{FOLLOW_UP}<|im_end|>\n<|im_start|>assistant\n"

    def reward(self, tokens: Sequence[int], budget: int) -> float:
        """Share of `budget` tokens that are characters of the kind; token i < 256 is byte i."""
        return sum(token in _BYTES[self.kind] for token in tokens) / budget


def problems(seed: int, step: int, count: int) -> list[Problem]:
    """The problems of one step: every kind equally often (up to the remainder), in seeded order."""
    kinds = sorted(ALPHABETS)
    random.Random(f"{seed}/{step}").shuffle(kinds)
    return [Problem(kinds[i % len(kinds)]) for i in range(count)]


def request_seed(seed: int, step: int, group: int, sample: int, turn: int) -> int:
    """The sampling seed of one request: different for every turn of every rollout, the same in every run."""
    return random.Random(f"{seed}/{step}/{group}/{sample}/{turn}").getrandbits(31)
