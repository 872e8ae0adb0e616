"""What the demo remembers of its rollouts. Pure data, shared by sampling, training and the report.

Always holds: in a Turn, `tokens`, `logprobs`, `sampling_logprobs`, `snapshots` and `routes` have one entry per generated
token, and entry j describes the forward pass at input position len(prompt) - 1 + j, which produced it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.int64]  # [positions, moe_layers, top_k]


@dataclass(frozen=True)
class Turn:
    """One request and its answer.

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
        """Which snapshot computed which input positions [start, end) of `sequence[:-1]`, in order.

        The prompt was computed by the snapshot that produced the first token: a swap changes the prompt-cache namespace,
        so nothing older is reused.
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
    """One trajectory: the turns of one session. `group` names the problem within the step."""

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
    """A digest of what was sampled: sessions, prompts and tokens, whatever order they came in."""
    digest = hashlib.sha256()
    for rollout in sorted(rollouts, key=lambda r: r.session):
        digest.update(repr((rollout.session, [(t.prompt, t.tokens) for t in rollout.turns])).encode())
    return digest.hexdigest()


@dataclass
class StepRow:
    """One line of the table: what a step sampled, trained and published."""

    step: int
    snapshot: str  # published by this step
    reward: float
    rewards: tuple[float, ...]  # of each rollout
    prompt_tokens: int
    cached_prompt_tokens: int
    older_snapshot_share: (
        float  # tokens not sampled from the weights the trainer held when it trained on them
    )
    streams: int
    streams_crossed_swap: int
    one_replica: int  # rollouts all of whose turns one replica served
    tokens: int  # generated
    failed_requests: int = 0
    kl_own_routes: float = 0.0
    kl_replayed_routes: float = 0.0
    route_diff_share: float = 0.0  # tokens whose routes differ in at least one layer
    route_layer_diff_share: float = 0.0  # (token, layer) pairs whose routes differ
    loss: float = 0.0
    seconds: float = 0.0
    served: bool = False  # every replica reported the snapshot as served
    pause_ms: tuple[float, ...] = field(default=())  # of each replica's swap to `snapshot`
    kind: str = ""  # full or delta, once served
    bytes_sent: int = 0  # of its files in the bucket
    bytes_whole: int = 0  # of the whole checkpoint
    publish_s: float = 0.0  # from the copied weights until every replica served them

    @property
    def cached_prompt_share(self) -> float:
        return self.cached_prompt_tokens / self.prompt_tokens
