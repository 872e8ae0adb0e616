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
    Signal,
    Signalled,
    SignalResult,
    SnapshotRow,
    TransitionRow,
    Verdict,
    stronger_reset,
)

__all__ = [
    "CHAIN_MAX",
    "BootHistory",
    "Changes",
    "Death",
    "DeploymentChange",
    "DeploymentRow",
    "DeploymentState",
    "Disagreement",
    "FleetReports",
    "Ledger",
    "LedgerUnavailable",
    "Signal",
    "SignalResult",
    "Signalled",
    "SnapshotRow",
    "TransitionRow",
    "Verdict",
    "sqlite_url",
    "stronger_reset",
]
