"""What replicas report, for tests that play them: fields of the deployment's own policy stand beside those of the replica."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec.structs import replace

from midstream.core.reports import PolicyReport, ReplicaReport, Reported

OWN = frozenset(PolicyReport.__struct_fields__) - {"policy", "made", "in_flight"}


def replica_report(
    replica: str = "replica-0",
    boot: str = "b",
    ready: bool = True,
    policies: tuple[PolicyReport, ...] = (),
    **fields: Any,
) -> ReplicaReport:
    """ready: its engine answers. policies: besides the own. fields: of PolicyReport, for the own, and of ReplicaReport."""
    own = PolicyReport(**{name: fields.pop(name) for name in OWN & fields.keys()})
    return ReplicaReport(replica=replica, boot=boot, alive=ready, policies=(own, *policies), **fields)


def reported(replica: str = "replica-0", boot: str = "b", ready: bool = True, **fields: Any) -> Reported:
    """As `replica_report`; what it says of the own policy."""
    report = replica_report(replica, boot, ready, **fields)
    return report.about(report.own)


_Report = TypeVar("_Report", Reported, ReplicaReport)


def changed(report: _Report, **fields: Any) -> _Report:
    """fields: as of `replica_report`."""
    own = replace(report.own, **{name: fields.pop(name) for name in OWN & fields.keys()})
    if isinstance(report, Reported):
        return replace(report, own=own, **fields)
    return replace(report, policies=(own, *report.others), **fields)
