"""The records of rollouts and steps, shared by sampling, training and the report. Pure data.

Always holds: in a Turn, `tokens`, `logprobs`, `sampling_logprobs`, `snapshots` and `routes` have one entry per generated
token. Entry j describes the forward pass at input position len(prompt) - 1 + j, which produced the token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
