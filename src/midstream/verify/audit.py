"""Audits single turns by the files of a machine: the verifier on one record at a time, with the weights of that record alone.

Owns: which weights are in memory.
Always holds: what is found is what `midstream verify` would find. Weights of other snapshots than the last turn's are let go.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from midstream.core.audits import GONE, AuditAnswer, AuditJob, AuditMismatch
from midstream.core.config import EngineSettings
from midstream.core.errors import SnapshotError, SnapshotMissing
from midstream.core.types import BASE_SNAPSHOT
from midstream.snapshots.adapter import is_adapter
from midstream.verify.claims import Claim, gather
from midstream.verify.findings import Cause, Finding
from midstream.verify.paged import PagedComputer
from midstream.verify.plain import PlainComputer
from midstream.verify.verifier import Verifier

#: Positions of KV in memory, and so the longest turn that is audited.
POSITIONS_MAX = 16384


class TurnAudits:
    """settings: of the engine that sampled the turns."""

    def __init__(self, settings: EngineSettings) -> None:
        positions = min(settings.kv_cache_tokens or POSITIONS_MAX, POSITIONS_MAX)
        self._settings = msgspec.structs.replace(settings, kv_cache_tokens=positions)
        self._files: dict[str, str] = {}
        self._computer: PagedComputer | None = None
        self._plain: PlainComputer | None = None
        self._first = ""

    def __repr__(self) -> str:
        return f"TurnAudits({self._first!r})"

    def audit(self, job: AuditJob) -> AuditAnswer:
        claims = gather([msgspec.json.decode(job.record)], [])
        [tree] = claims.trees
        [claim] = tree.claims.values()
        if claim.unverified is not None:
            return AuditAnswer(unaudited=claim.unverified)
        self._keep({name: job.files[name] for name in claim.snapshots | {BASE_SNAPSHOT} if name in job.files})
        try:
            first = self._whole(claim)
            computer = self._computer_of(first)
        except SnapshotError:
            return AuditAnswer(unaudited=GONE)
        verifier = Verifier(computer, self._missing, self._is_adapter, with_ties=self._with_ties)
        report = verifier.verify(claims.trees)
        if any(finding.cause is Cause.NO_SNAPSHOT for finding in report.findings):
            return AuditAnswer(unaudited=GONE)
        mismatches = [_mismatch(finding, claim) for finding in (*claims.findings, *report.findings)]
        return AuditAnswer(
            worst=report.worst, unaudited=next(iter(report.unverified), ""), mismatches=mismatches
        )

    def _keep(self, files: Mapping[str, str]) -> None:
        """A name may mean other files than before."""
        if any(self._files.get(name, path) != path for name, path in files.items()):
            self._forget()
        self._files.update(files)

    def _forget(self) -> None:
        self._computer = self._plain = None
        self._files, self._first = {}, ""
        gc.collect()

    def _whole(self, claim: Claim) -> str:
        """Full weights that the turn needs. Raises SnapshotMissing."""
        last = claim.labels[-1] if claim.labels else BASE_SNAPSHOT
        adapted = any(self._is_adapter(name) for name in claim.snapshots if self._missing(name) is None)
        return BASE_SNAPSHOT if adapted or self._missing(last) is not None else last

    def _computer_of(self, first: str) -> PagedComputer:
        if self._computer is None or first != self._first:
            files = dict(self._files)
            self._forget()
            self._files, self._first = files, first
            self._computer = PagedComputer(self._directory, first, self._settings)
        return self._computer

    def _directory(self, name: str) -> Path:
        path = Path(self._files.get(name, ""))
        if name not in self._files or not path.is_dir():
            raise SnapshotMissing(f"{name}: is not on this machine any more")
        return path

    def _missing(self, name: str) -> SnapshotError | None:
        try:
            self._directory(name)
        except SnapshotMissing as error:
            return error
        return None

    def _is_adapter(self, name: str) -> bool:
        return is_adapter(self._directory(name))

    def _with_ties(self, *arguments: Any) -> Any:
        if self._plain is None:
            self._plain = PlainComputer(self._directory, self._first)
        return self._plain.with_ties(*arguments)


def _mismatch(finding: Finding, claim: Claim) -> AuditMismatch:
    at = finding.tokens[0].token if finding.tokens else 0
    snapshot = claim.labels[at] if at < len(claim.labels) else ""
    return AuditMismatch(finding.cause, finding.detail, snapshot)
