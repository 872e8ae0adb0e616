"""The durable truth in SQLite or PostgreSQL; see ledger.py for what always holds."""

from midstream.ledger.changes import Changes
from midstream.ledger.database import LedgerUnavailable
from midstream.ledger.ledger import Ledger, sqlite_url
from midstream.ledger.records import (
    CHAIN_MAX,
    BootHistory,
    Death,
    DeploymentChange,
    DeploymentRow,
    DeploymentState,
    Disagreement,
    FleetReports,
    Kept,
    Signal,
    Signalled,
    SignalResult,
    SnapshotRow,
    TransitionRow,
    Unkept,
    Verdict,
    stronger_reset,
)
from midstream.ledger.transfers import (
    Committing,
    Event,
    GroupMoved,
    Phase,
    Transfer,
    TransferMember,
    TransferUpdate,
)

__all__ = [
    "CHAIN_MAX",
    "BootHistory",
    "Changes",
    "Committing",
    "Death",
    "DeploymentChange",
    "DeploymentRow",
    "DeploymentState",
    "Disagreement",
    "Event",
    "FleetReports",
    "GroupMoved",
    "Kept",
    "Ledger",
    "LedgerUnavailable",
    "Phase",
    "Signal",
    "SignalResult",
    "Signalled",
    "SnapshotRow",
    "Transfer",
    "TransferMember",
    "TransferUpdate",
    "TransitionRow",
    "Unkept",
    "Verdict",
    "sqlite_url",
    "stronger_reset",
]
