"""The records of rollouts and steps, shared by sampling, training and the report. Pure data.

Always holds: in a Turn, `tokens`, `logprobs`, `sampling_logprobs`, `snapshots` and `routes` have one entry per generated
token. Entry j describes the forward pass at input position len(prompt) - 1 + j, which produced the token.

The task of the demo: write characters of one alphabet, in two turns. Pure.

Turn 1 names an alphabet. Turn 2 asks for more of the same one, so its answer depends on the history. The reward of a turn is
the share of its token budget that is characters of the alphabet. Random weights get a few percent, and stopping early gains
nothing.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


#: [positions, moe_layers, top_k]
Routes = NDArray[np.int64]


@dataclass(frozen=True)
class Turn:
    """One request and its answer. logprobs: in nats.

    prompt_routes: routes of the passes at input positions 0 .. len(prompt) - 2.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    snapshots: tuple[str, ...]
    routes: Routes
    prompt_routes: Routes
    replica: str
    cached_tokens: int
    reward: float

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.logprobs), len(self.sampling_logprobs), len(self.snapshots)}
        if lengths != {len(self.routes)} or len(self.prompt_routes) != len(self.prompt) - 1:
            raise ValueError(
                f"a turn's records do not line up: {len(self.tokens)} tokens, {len(self.logprobs)} logprobs, "
                f"{len(self.snapshots)} snapshots, {len(self.routes)} routes, "
                f"{len(self.prompt_routes)} prompt routes for {len(self.prompt)} prompt tokens"
            )

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.prompt + self.tokens

    @property
    def input_routes(self) -> Routes:
        """Routes of every input position of `sequence[:-1]`."""
        return np.concatenate([self.prompt_routes, self.routes])

    @property
    def crossed_swap(self) -> bool:
        return len(set(self.snapshots)) > 1

    def segments(self) -> list[tuple[str, int, int]]:
        """The snapshots that computed the input positions [start, end) of `sequence[:-1]`, in order.

        The snapshot of the first token computed the prompt: a swap changes the prompt-cache namespace, so no older KV is
        reused.
        """
        found: list[tuple[str, int, int]] = []
        for j, snapshot in enumerate(self.snapshots):
            position = len(self.prompt) - 1 + j
            if found and found[-1][0] == snapshot:
                found[-1] = (snapshot, found[-1][1], position + 1)
            else:
                found.append((snapshot, position if found else 0, position + 1))
        return found


@dataclass(frozen=True)
class Rollout:
    """One trajectory: the turns of one session. group: the number of the problem within the step."""

    session: str
    step: int
    group: int
    sample: int
    turns: tuple[Turn, ...]

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns) / len(self.turns)

    @property
    def one_replica(self) -> bool:
        return len({turn.replica for turn in self.turns}) == 1


def rollouts_sha256(rollouts: Sequence[Rollout]) -> str:
    """A digest of sessions, prompts and tokens, in whatever order the rollouts came."""
    digest = hashlib.sha256()
    for rollout in sorted(rollouts, key=lambda r: r.session):
        digest.update(repr((rollout.session, [(t.prompt, t.tokens) for t in rollout.turns])).encode())
    return digest.hexdigest()


@dataclass
class StepRow:
    """One line of the table: what a step sampled, trained and published.

    snapshot: that the step published. rewards: of each rollout. one_replica: rollouts that one replica served alone.
    older_snapshot_share: of tokens that were sampled from other weights than the trainer had. tokens: generated ones.
    route_diff_share: of tokens whose routes differ in any layer. route_layer_diff_share: of pairs of token and layer.
    served: every replica serves the snapshot. pause_ms: of each replica's swap to it. kind: full or delta, once served.
    bytes_sent: of its files in the bucket. bytes_whole: of the whole checkpoint. publish_s: from the copy of the weights until
    every replica served them.
    """

    step: int
    snapshot: str
    reward: float
    rewards: tuple[float, ...]
    prompt_tokens: int
    cached_prompt_tokens: int
    older_snapshot_share: float
    streams: int
    streams_crossed_swap: int
    one_replica: int
    tokens: int
    failed_requests: int = 0
    kl_own_routes: float = 0.0
    kl_replayed_routes: float = 0.0
    route_diff_share: float = 0.0
    route_layer_diff_share: float = 0.0
    loss: float = 0.0
    seconds: float = 0.0
    served: bool = False
    pause_ms: tuple[float, ...] = ()
    kind: str = ""
    bytes_sent: int = 0
    bytes_whole: int = 0
    publish_s: float = 0.0

    @property
    def cached_prompt_share(self) -> float:
        return self.cached_prompt_tokens / self.prompt_tokens
