"""What the ledger says, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.types import BASE_SNAPSHOT, Desired, ResetPromptCache, Stage, TransitionType


@dataclass(frozen=True)
class DeploymentRow:
    name: str
    model: str
    bucket_url: str
    transition: TransitionType
    desired_snapshot: str
    generation: int  # of the last effective signal; 0: nothing signalled yet
    created_at: float


@dataclass(frozen=True)
class SnapshotRow:
    identity: str
    kind: str  # "full"
    url: str
    reset_prompt_cache: ResetPromptCache
    first_signalled_at: float
    signalled_at: float  # of the last effective signal
    generation: int


@dataclass(frozen=True)
class TransitionRow:
    replica: str
    boot: str
    seq: int
    identity: str
    generation: int
    stage: Stage
    at: float
    detail: str


@dataclass(frozen=True)
class DeploymentState:
    """What control/ acts on: read in one transaction.

    desired: None while nothing has been signalled: the replicas serve the weights they started with.
    fallbacks: snapshots that some replica has served, the last one to become ready first, as they may be sent.
    """

    desired: Desired | None
    fallbacks: tuple[Desired, ...] = ()

    @property
    def snapshot(self) -> str:
        return BASE_SNAPSHOT if self.desired is None else self.desired.snapshot


@dataclass(frozen=True)
class SignalResult:
    desired: Desired
    changed: bool  # False: the signal asked for what is already desired
