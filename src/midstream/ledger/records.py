"""What the ledger says, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    fingerprint: str | None  # of its files at that signal
    ready_at: float | None  # when it was ready on a replica for the first time


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
class BootHistory:
    """What is stored of a replica when one of its boots is first heard of.

    last_seq: the last stage change stored of this boot, -1 when there is none.
    previous_boot: the boot before, None when none is known or this boot is not new; `tail` has its last stage changes.
    """

    last_seq: int
    previous_boot: str | None = None
    tail: tuple[TransitionRow, ...] = ()


@dataclass(frozen=True)
class Death:
    """A boot of a replica ended while it was loading a snapshot."""

    replica: str
    identity: str
    generation: int
    detail: str


@dataclass(frozen=True)
class DeploymentState:
    """What control/ acts on: read in one transaction.

    desired: None while nothing has been signalled: the replicas serve the weights they started with.
    fallbacks: snapshots that some replica has served, the last one to become ready first, as they may be sent.
    since: by identity, of the desired one and the fallbacks: the first generation that meant the files of now. A replica
        that loaded the identity under this or a later generation has exactly these.
    ever_ready: whether any published snapshot was ever ready on any replica.
    reset_all, reset_new_session: the generation of the last signal with this policy, 0 when there was none.
    deaths: under the generation of the desired snapshot and later ones.
    """

    desired: Desired | None
    fallbacks: tuple[Desired, ...] = ()
    since: Mapping[str, int] = field(default_factory=dict)
    ever_ready: bool = False
    first_signalled_at: float | None = None
    reset_all: int = 0
    reset_new_session: int = 0
    deaths: tuple[Death, ...] = ()

    @property
    def snapshot(self) -> str:
        return BASE_SNAPSHOT if self.desired is None else self.desired.snapshot


@dataclass(frozen=True)
class SignalResult:
    desired: Desired
    changed: bool  # False: the signal asked for what is already desired


#: The weakest first; each does what those before it do.
RESET_STRENGTH: tuple[ResetPromptCache, ...] = ("none", "new_session", "all")


def stronger_reset(one: ResetPromptCache, other: ResetPromptCache) -> ResetPromptCache:
    return max(one, other, key=RESET_STRENGTH.index)
