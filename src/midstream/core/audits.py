"""What a continuous audit asks and says: the job of a turn, its answer, and what a replica reports. Pure.

Owns: the forms that replica, auditor process and gateway share.
"""

from __future__ import annotations

import msgspec

from midstream.core.config import EngineSettings
from midstream.core.types import Whole

#: Why a turn was not audited. The verifier has other reasons.
GONE, NO_TIME, ENDED = "snapshot gone", "no idle time", "the auditor ended"
#: The likely causes of a mismatch, in the words of reports (verify/findings.py): all are counted from the start.
CAUSES = (
    "wrong label",
    "swapped route row",
    "router weights",
    "moved logprob",
    "other sampling parameters",
    "other snapshot in the bucket",
    "stale KV",
    "dropped or repeated token",
    "other choice's ids",
    "other adapter version",
    "other session's turn",
    "wrong mask id",
    "wrong token id",
    "unknown",
)


class AuditBegin(msgspec.Struct, frozen=True, tag=True):
    """The first message to an auditor, which answers it. settings: of the engine whose turns it computes."""

    settings: EngineSettings


class AuditJob(msgspec.Struct, frozen=True, tag=True):
    """record: of the turn, as JSON, with all tokens before it as its own. files: the directory of each snapshot here."""

    record: bytes
    files: dict[str, str]


class AuditMismatch(msgspec.Struct, frozen=True):
    """cause, detail: as in a finding of the verifier. snapshot: the label of the first token that differs."""

    cause: str
    detail: str
    snapshot: str


class AuditAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """worst: the largest difference of a log-probability, in nats. unaudited: why nothing was computed; "": it was."""

    worst: float = 0.0
    unaudited: str = ""
    mismatches: list[AuditMismatch] = []


class AuditedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that differed. at: when that was found, since the epoch."""

    session: str
    turn: int
    snapshot: str
    cause: str
    at: float


class AuditStats(msgspec.Struct, frozen=True, kw_only=True):
    """Since the replica's process began. audited: turns. waiting: those that wait for idle time. max_dlogprob: the largest
    difference of the turns that were audited last. mismatches, not_audited: turns, by cause and by reason. last: the one
    that differed last."""

    audited: Whole = 0
    waiting: Whole = 0
    max_dlogprob: float = 0.0
    mismatches: dict[str, Whole] = {}
    not_audited: dict[str, Whole] = {}
    last: AuditedTurn | None = None
