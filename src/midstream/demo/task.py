"""The task of the demo: write characters of one alphabet, in two turns. Pure.

Turn 1 names an alphabet. Turn 2 asks for more of the same one, so its answer depends on the history. The reward of a turn is
the share of its token budget that is characters of the alphabet. Random weights get a few percent, and stopping early gains
nothing.
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
        """The text between the first answer and the second one in the rendered conversation.

        answer_ended: the first answer's own tokens already end with <|im_end|>.
        """
        end = "" if answer_ended else "<|im_end|>"
        return f"{end}\n<|im_start|>user\n{FOLLOW_UP}<|im_end|>\n<|im_start|>assistant\n"

    def reward(self, tokens: Sequence[int], budget: int) -> float:
        """The share of `budget` tokens that are characters of the alphabet. A token i below 256 is byte i."""
        return sum(token in _BYTES[self.kind] for token in tokens) / budget


def problems(seed: int, step: int, count: int) -> list[Problem]:
    """The problems of one step, in an order that depends on the seed. Each kind comes equally often, up to the remainder."""
    kinds = sorted(ALPHABETS)
    random.Random(f"{seed}/{step}").shuffle(kinds)
    return [Problem(kinds[i % len(kinds)]) for i in range(count)]


def request_seed(seed: int, step: int, group: int, sample: int, turn: int) -> int:
    """The sampling seed of one request. It differs for every turn of every rollout, and is the same in every run."""
    return random.Random(f"{seed}/{step}/{group}/{sample}/{turn}").getrandbits(31)
