"""What the ledger says, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict

from midstream.types import (
    BASE_SNAPSHOT,
    CompressionFormat,
    Content,
    Desired,
    ResetPromptCache,
    SnapshotFiles,
    Stage,
    TransitionType,
)

Verdict = Literal["reload", "out", "agreed"]

CHAIN_MAX = 64  # incremental snapshots on one full snapshot, unless the settings say otherwise


@dataclass(frozen=True)
class DeploymentRow:
    """replicas_min, replicas_max: as asked for. fields: whatever else the API was told, by its names there."""

    name: str
    model: str
    bucket_url: str
    transition: TransitionType
    desired_snapshot: str
    generation: int  # of the last effective signal or reset; 0: nothing signalled yet
    created_at: float
    updated_at: float
    replicas_min: int = 1
    replicas_max: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)
    deleting: bool = False


class DeploymentChange(TypedDict, total=False):
    """What can be changed of a deployment. `fields` is merged into what is stored; a value of None removes one."""

    bucket_url: str
    transition: TransitionType
    replicas_min: int
    replicas_max: int
    fields: Mapping[str, Any]
    deleting: bool


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One hot-load signal, understood. previous: what an incremental snapshot is the difference to, None: it is full.

    sizes: of the files as they are in the bucket; None: unknown. content: what their manifest says they are. overwrite: the
    identity means these files from now on, whatever it meant before.
    """

    identity: str
    url: str
    reset_prompt_cache: ResetPromptCache = "all"
    fingerprint: str | None = None
    previous: str | None = None
    compression: CompressionFormat | None = None
    checksum_format: str | None = None
    max_cache_age: int | None = None
    ignore_config: tuple[str, ...] = ()
    sizes: Mapping[str, int] | None = None
    content: Content | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Fleet:
    """What the replicas report when a signal comes.

    failed_generation: a replica failed on what is desired under this generation (its row may not be written yet).
    generation_floor: the highest one reported. serving: (snapshot, generation it was loaded under) of each ready replica.
    """

    failed_generation: int | None = None
    generation_floor: int = 0
    serving: tuple[tuple[str, int], ...] = ()


NO_FLEET = Fleet()


@dataclass(frozen=True)
class SnapshotRow:
    """parents: of a delta, the files it stands on, the full snapshot first, as they were when it was signalled.

    content: what its own files are, byte for byte, once known.
    """

    identity: str
    kind: Literal["full", "delta"]
    url: str
    reset_prompt_cache: ResetPromptCache
    first_signalled_at: float
    signalled_at: float  # of the last effective signal
    generation: int
    fingerprint: str | None  # of its files at that signal
    ready_at: float | None  # when it was ready on a replica for the first time
    previous: str | None = None
    compression: CompressionFormat | None = None
    checksum_format: str | None = None
    parents: tuple[SnapshotFiles, ...] = ()
    max_cache_age: int | None = None
    ignore_config: tuple[str, ...] = ()
    content: Content | None = None


class Signalled(NamedTuple):
    """A snapshot, the generation of its last signal, and whether it was ready on a replica since."""

    snapshot: str
    generation: int
    ready: bool


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
class Disagreement:
    """The check of a replica differed from the others', which serve the same files.

    generation: of the check. retry_generation: under which it loads them once more. verdict: reload until that is done; out
    when it differed again, or could not load them; agreed once it is like the others.
    """

    replica: str
    boot: str
    identity: str
    generation: int
    retry_generation: int
    detail: str
    verdict: Verdict = "reload"


@dataclass(frozen=True)
class DeploymentState:
    """What the reconciler (fleet/) acts on: read in one transaction.

    desired: None while nothing has been signalled: the replicas serve the weights they started with. BASE_SNAPSHOT after
        the ledger was reset: they go back to those.
    fallbacks: snapshots that some replica has served, the last one to become ready first, as they may be sent.
    since: by identity, of the desired one and the fallbacks: the first generation that meant the files of now. A replica
        that loaded the identity under this or a later generation has exactly these.
    ever_ready: whether any published snapshot was ever ready on any replica.
    reset_all, reset_new_session: the generation of the last signal with this policy, 0 when there was none.
    deaths: the newest, oldest first, but those that the replica made up for: it loaded that snapshot, or one that was
        signalled later.
    disagreements: the last one of each replica.
    proven: some replica has served what is desired.
    weights: by identity, of the desired one and the fallbacks: the digest of the weights by kind of engine.
    """

    desired: Desired | None
    fallbacks: tuple[Desired, ...] = ()
    since: Mapping[str, int] = field(default_factory=dict)
    ever_ready: bool = False
    first_signalled_at: float | None = None
    reset_all: int = 0
    reset_new_session: int = 0
    deaths: tuple[Death, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    proven: bool = False
    weights: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

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
