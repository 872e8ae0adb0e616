"""What a replica reports of itself and of each policy that it holds: the only thing that a gateway knows about it.

Always holds: a report is sent whole on every change. What concerns the replica stands in it once, what concerns a policy once
for each policy. The deployment's own weights are the policy with the empty name.
"""

from __future__ import annotations

import msgspec

from midstream.core.audits import AuditStats
from midstream.core.kv import KvWaits
from midstream.core.price import TurnPace
from midstream.core.types import (
    BASE_SNAPSHOT,
    POLICIES_MAX,
    EngineCard,
    EngineStats,
    Pause,
    SnapshotCheck,
    SnapshotContent,
    Stage,
    SwapTiming,
    Transition,
    Whole,
)


class RecordsStats(msgspec.Struct, frozen=True, kw_only=True):
    """Since the replica's process began. durable: records that a crash does not take. lost: found no room. waiting_bytes: not
    in the bucket yet."""

    durable: Whole = 0
    lost: Whole = 0
    waiting_bytes: Whole = 0


class RecordFilesStats(msgspec.Struct, frozen=True, kw_only=True):
    """Since the replica's process began: files written, those that the bucket did not take, and those that were removed for
    their age. held_bytes: of the deployment's files, as the replica last saw them."""

    written: Whole = 0
    failed: Whole = 0
    expired: Whole = 0
    held_bytes: Whole = 0


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one policy on a replica."""

    # "": the deployment's own weights.
    policy: str = ""
    # When the policy was made.
    made: float = 0.0
    # What serves did not fail its check.
    sound: bool = True
    # The snapshot that serves now. BASE_SNAPSHOT of another policy than the deployment's own: nothing serves yet.
    snapshot: str = BASE_SNAPSHOT
    # `signalled` of the Desired that serves. 0: the base weights of the start.
    signalled: Whole = 0
    # Generation of the Desired last accepted. 0 means none yet.
    generation: Whole = 0
    stage: Stage = Stage.IDLE
    # The snapshot that is being loaded, or the one that failed.
    target: str | None = None
    error: str | None = None
    # Generation of the last target whose files or weights were at fault, so that any replica would refuse them. 0: of none.
    refused: Whole = 0
    # Requests being served.
    in_flight: Whole = 0
    # The target is staged and waits to be let go.
    held: bool = False
    # False: new requests get a 425 until a SYNC swap is done.
    admitting: bool = True
    # False: a swap waits for requests that are pinned to what serves, and admits no more of them.
    pinnable: bool = True
    # The check of the snapshot that serves, once it is known.
    check: SnapshotCheck | None = None
    # Contents of the snapshot that serves and of its chain, where the replica was not given them.
    contents: tuple[SnapshotContent, ...] = ()
    # The last few of this boot, oldest first: several may end between two looks.
    swaps: tuple[SwapTiming, ...] = ()
    # The most recent ones, oldest first.
    transitions: tuple[Transition, ...] = ()
    # Besides the snapshot that serves, those that a request may ask for, the least recently used first.
    resident: tuple[str, ...] = ()

    @property
    def last_swap(self) -> SwapTiming | None:
        return self.swaps[-1] if self.swaps else None


#: Of a policy that a replica does not hold.
NOT_HELD = PolicyReport(sound=False)


class _OfBoot(msgspec.Struct, frozen=True, kw_only=True):
    """What concerns all policies of a replica, and seldom changes within a boot."""

    # A stable name, such as "replica-0".
    replica: str
    # Random, new at each process start. A new boot starts from the base weights.
    boot: str
    # The engine answers.
    alive: bool
    # What the engine is and can do. None before it was ever started.
    card: EngineCard | None = None
    # Tokens of prompt and answer together. None as with card.
    max_model_len: Whole | None = None


class Reported(_OfBoot, frozen=True, kw_only=True):
    """What a replica reports of one policy."""

    own: PolicyReport

    @property
    def ready(self) -> bool:
        """The engine answers and a sound snapshot of the policy serves."""
        own = self.own
        return self.alive and own.sound and not (own.policy and own.snapshot == BASE_SNAPSHOT)


class ReplicaReport(_OfBoot, frozen=True, kw_only=True):
    """A replica's state."""

    # Requests being served, of all policies.
    in_flight: Whole = 0
    # The last pause or resumption that was carried out; in a pause that ends requests, `in_flight` shows when they have ended.
    pause: Pause = Pause()
    engine: EngineStats = EngineStats()
    kv_waits: KvWaits = KvWaits()
    pace: TurnPace = TurnPace()
    # Long prompts and grammars that are read beside its event loop, or wait for that.
    long_texts: Whole = 0
    # The longest stall of its event loop within the last half minute.
    stalled_s: float = 0.0
    # Time since the engine was last heard, from ENGINE_SILENT_FROM_S on.
    engine_silent_s: Whole = 0
    # None where no records are kept.
    records: RecordsStats | None = None
    record_files: RecordFilesStats | None = None
    # None where no turns are audited.
    audit: AuditStats | None = None
    # The deployment's own first.
    policies: tuple[PolicyReport, ...] = ()
    # So many it holds at once, besides the deployment's own.
    policies_max: Whole = POLICIES_MAX

    @property
    def others(self) -> tuple[PolicyReport, ...]:
        """Besides the deployment's own."""
        return tuple(one for one in self.policies if one.policy)

    @property
    def ready(self) -> bool:
        """The deployment's own weights serve."""
        return self.about(self.own).ready

    @property
    def own(self) -> PolicyReport:
        return next((one for one in self.policies if not one.policy), NOT_HELD)

    def about(self, policy: PolicyReport) -> Reported:
        """What it says of one policy."""
        return Reported(
            replica=self.replica,
            boot=self.boot,
            alive=self.alive,
            card=self.card,
            max_model_len=self.max_model_len,
            own=policy,
        )
