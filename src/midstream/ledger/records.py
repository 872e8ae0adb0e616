"""The ledger's arguments and results, as plain values.

Always holds: a value that is read from a table names its columns, so `from_row` is the only reader of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import msgspec

from midstream.core.types import (
    BASE_SNAPSHOT,
    CompressionFormat,
    Content,
    Desired,
    Pause,
    PolicyFate,
    ResetPromptCache,
    SnapshotFiles,
    Stage,
    TransitionType,
)

Verdict = Literal["reload", "out", "agreed"]
Kept = Literal["", "wanted", "kept", "off", "given up"]

#: Incremental snapshots on one full snapshot, unless the settings say otherwise.
CHAIN_MAX = 64

_Value = TypeVar("_Value")


def from_row(row: Any, kind: type[_Value]) -> _Value:
    """A row of a table as one of these values. A field that is no column has its default."""
    return msgspec.convert(row, kind, from_attributes=True)


@dataclass(frozen=True)
class NewDeployment:
    """A deployment to be made. replicas_min, replicas_max: as asked for. fields: other properties that the API was given, by
    its names, as JSON values."""

    name: str
    model: str
    bucket_url: str
    transition: TransitionType = "ASYNC"
    replicas_min: int = 1
    replicas_max: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeploymentRow(NewDeployment):
    """A deployment. The defaults are those of one that was just made.

    generation: of the last effective signal or reset; 0 before the first.
    """

    desired_snapshot: str = BASE_SNAPSHOT
    generation: int = 0
    created_at: float = 0.0
    updated_at: float = 0.0
    deleting: bool = False


class DeploymentChange(TypedDict, total=False):
    """Changes of a deployment. `fields` is merged into the stored fields; a value of None removes one."""

    bucket_url: str
    transition: TransitionType
    replicas_min: int
    replicas_max: int
    fields: Mapping[str, Any]
    deleting: bool


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One hot-load signal, parsed.

    previous: the snapshot that an incremental one is a difference to; None for a full one. sizes: of the files in the bucket,
    in bytes; None when unknown. content: the files by their manifest. overwrite: the identity means these files from now on,
    whatever it meant before. parents: the chain under an incremental snapshot of another policy, which this one takes over as
    it is. policies: what becomes of the deployment's policies.

    identity: "": the ledger gives it one, `update-GENERATION-DIRECTORY`; a desired snapshot of this url with these files keeps
    its own. url: "": the identity's place in the deployment's bucket, and the directory of such a name is `push`.
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
    parents: tuple[SnapshotFiles, ...] = ()
    policies: PolicyFate = "keep"


@dataclass(frozen=True)
class FleetReports:
    """The reports of the replicas when a signal comes.

    failed_generation: a replica failed on the snapshot desired under this generation. Its stage change may not be stored yet.
    generation_floor: the highest generation reported. serving: (snapshot, generation it was loaded under) of each ready
    replica. boots: of the replicas that serve the base weights.
    """

    failed_generation: int | None = None
    generation_floor: int = 0
    serving: tuple[tuple[str, int], ...] = ()
    boots: tuple[str, ...] = ()


NO_FLEET = FleetReports()


@dataclass(frozen=True)
class SnapshotRow:
    """A signalled snapshot.

    parents: the files that a delta stands on, the full snapshot first, as they were when it was signalled. content: its own
    files, byte for byte, once known. signalled_at, fingerprint: at its last effective signal. ready_at: when it was ready on a
    replica for the first time. full_url: where its whole files lie beside its own, if they do. full_needed: the chain that is
    desired begins there, or that of a snapshot to which replicas fall back.
    """

    identity: str
    kind: Literal["full", "delta"]
    url: str
    reset_prompt_cache: ResetPromptCache
    first_signalled_at: float
    signalled_at: float
    generation: int
    fingerprint: str | None
    ready_at: float | None
    previous: str | None = None
    compression: CompressionFormat | None = None
    checksum_format: str | None = None
    parents: tuple[SnapshotFiles, ...] = ()
    max_cache_age: int | None = None
    ignore_config: tuple[str, ...] = ()
    content: Content | None = None
    full_url: str | None = None
    full_needed: bool = False


class Signalled(NamedTuple):
    """A snapshot, the generation of its last signal, and whether it was ready on a replica since."""

    snapshot: str
    generation: int
    ready: bool


@dataclass(frozen=True)
class TransitionRow:
    """A stage change of a replica. at: seconds since the epoch."""

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
    """The stored reports of a replica when it is first heard of in one of its boots.

    last_seq: the last stage change stored of this boot, -1 when there is none.
    previous_boot: the boot before, None when none is known or this boot is not new. tail: its last stage changes.
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

    generation: of the check. retry_generation: of the load that it does once more. verdict: "reload" until that is done, "out"
    when it differed again or could not load them, "agreed" once it is like the others.
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
    """What the reconciler (fleet/) acts on, read in one transaction.

    desired: None while no snapshot has been signalled: the replicas serve the weights that they started with. BASE_SNAPSHOT
        after the ledger was reset: they go back to those.
    fallbacks: snapshots that a replica has served, as they may be sent. The last one to become ready comes first.
    since: the first generation that meant the current files, by identity, for the desired one and the fallbacks. A replica that
        loaded the identity under this or a later generation has exactly these files.
    ever_ready: whether a published snapshot was ever ready on a replica.
    first_boots: boots of replicas that served the base weights when the first signal came.
    reset_all, reset_new_session: the generation of the last signal with this policy, 0 when there was none.
    deaths: the newest ones, oldest first. A death does not count after the replica has loaded that snapshot, or one that was
        signalled later.
    disagreements: the last one of each replica.
    proven: a replica has served the desired snapshot.
    pause: whether the deployment generates.
    weights: the digest of the weights by kind of engine, by identity, for the desired one and the fallbacks.
    rebase_problem: why a long chain is not shortened; empty when nothing is known to prevent it.
    """

    desired: Desired | None
    fallbacks: tuple[Desired, ...] = ()
    since: Mapping[str, int] = field(default_factory=dict)
    ever_ready: bool = False
    first_boots: frozenset[str] = frozenset()
    reset_all: int = 0
    reset_new_session: int = 0
    deaths: tuple[Death, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    proven: bool = False
    pause: Pause = field(default_factory=Pause)
    weights: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rebase_problem: str = ""

    @property
    def snapshot(self) -> str:
        return BASE_SNAPSHOT if self.desired is None else self.desired.snapshot


@dataclass(frozen=True)
class Unkept:
    """Whole files that replicas have, and somebody is to bring into the bucket: of a committed update, or of an incremental
    snapshot, whose chain they shorten (rebases.py).

    content: None where the identity means other files now, or none, or they lie in another bucket, or where no replica ever
    served it and something else is desired. For a rebase it is None until replicas have digested the whole files of `chain`,
    which is () where the content of an update would be None. desired: the identity is desired. name: of the directory in
    `bucket`, of a rebase. lineage: which links a rebase's files are of. reason: why the last try of a rebase failed.
    """

    key: int
    deployment: str
    group: str
    identity: str
    bucket: str
    tries: int
    keep_at: float
    content: Content | None
    desired: bool
    of: Literal["update", "rebase"] = "update"
    name: str = ""
    chain: tuple[SnapshotFiles, ...] = ()
    lineage: str = ""
    reason: str = ""


@dataclass(frozen=True)
class SignalResult:
    """changed: False when the signal asked for the snapshot that is already desired."""

    desired: Desired
    changed: bool


#: The weakest first. Each includes those before it.
RESET_STRENGTH: tuple[ResetPromptCache, ...] = ("none", "new_session", "all")


def stronger_reset(one: ResetPromptCache, other: ResetPromptCache) -> ResetPromptCache:
    return max(one, other, key=RESET_STRENGTH.index)
