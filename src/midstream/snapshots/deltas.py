"""Applies a delta of any format to its parent: the one place that knows which formats there are.

Always holds: whatever the format, the result appears whole and compared with the delta's checksums, or not at all.
"""

from __future__ import annotations

from pathlib import Path

from midstream.core.types import CompressionFormat
from midstream.snapshots.arc2 import rebuild as of_arc2
from midstream.snapshots.arc2.files import Cancelled, Making, Progress
from midstream.snapshots.trainer_deltas import rebuild as of_trainers
from midstream.snapshots.trainer_deltas.records import Lineage


def apply_delta(
    parent: Path,
    delta: Path,
    out: Path,
    compression: CompressionFormat,
    *,
    lineage: Lineage = of_trainers.NO_LINEAGE,
    threads: int | None = None,
    cancelled: Cancelled | None = None,
    progress: Progress | None = None,
    making: Making | None = None,
) -> bool:
    """As arc2.rebuild.rebuild. lineage: what a delta that says its versions is compared with. making: learns of ARC2 alone."""
    if compression == "arc_v1" or compression == "arc_v2":
        return of_arc2.rebuild(
            parent,
            delta,
            out,
            compression,
            threads=threads,
            cancelled=cancelled,
            progress=progress,
            making=making,
        )
    of_trainers.rebuild(
        parent,
        delta,
        out,
        compression,
        lineage=lineage,
        threads=threads,
        cancelled=cancelled,
        progress=progress,
    )
    return False


def verify_delta(
    parent: Path,
    delta: Path,
    compression: CompressionFormat,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Make all checks of `apply_delta`, and write nothing."""
    if compression == "arc_v1" or compression == "arc_v2":
        of_arc2.verify(parent, delta, compression, threads=threads, progress=progress)
    else:
        of_trainers.verify(parent, delta, compression, threads=threads, progress=progress)
