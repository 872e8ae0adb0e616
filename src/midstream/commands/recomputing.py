"""What `midstream verify` and `midstream explain` share: the records, the snapshots that they name, and what computes.

Owns: the options of both. Always holds: torch is imported only once there is something to compute.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream import __version__
from midstream.commands.progress import ProgressLine, add_progress_argument
from midstream.core.config import EngineSettings
from midstream.core.errors import ConfigError, SnapshotError, SnapshotMissing
from midstream.core.types import BASE_SNAPSHOT
from midstream.snapshots.identity import check_bucket, check_identity
from midstream.verify.claims import ClaimedRecords, read_claims
from midstream.verify.jobs import Computer
from midstream.verify.snapshots import BucketSnapshots

if TYPE_CHECKING:
    from midstream.verify.plain import PlainComputer

#: JSON has no larger integers.
SEED_END = 2**63


def add_records_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "records", metavar="RECORDS", help="the URL that the server had as --records, or its directory"
    )


def add_recomputing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bucket", required=True, metavar="URL", help="where the snapshots are")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="the checkpoint that the deployment began with, for tokens of `base` and for adapters",
    )
    parser.add_argument(
        "--deployment", metavar="NAME", help="whose records; needed where there are several (default: all)"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="so many turns, drawn at random (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --sample (default: %(default)s)")
    parser.add_argument(
        "--reference",
        action="store_true",
        help="compute in plain transformers, in float32, instead of the embedded engine's code; slower",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="NATS",
        help="of a log-probability (default: 1e-4 for float32, 6e-3 for float16, 5e-2 for bfloat16)",
    )
    parser.add_argument(
        "--parent",
        action="append",
        default=[],
        metavar="DELTA=IDENTITY",
        help="what a delta stands on, where its checksums are not to find it; may be repeated",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="that the server computed in (default: the checkpoint's)",
    )
    parser.add_argument("--device", default="cpu", help="as PyTorch names it (default: %(default)s)")
    parser.add_argument(
        "--kv-tokens",
        type=int,
        default=65536,
        help="positions of KV in memory at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="for fetched snapshots (default: a temporary one)"
    )
    add_progress_argument(parser)


def check_recomputing(options: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if "://" not in options.records:
        directory = Path(options.records)
        if not directory.is_dir():
            raise ConfigError(f"RECORDS {options.records}: neither a URL nor a directory")
        options.records = directory.absolute().as_uri()
    check_bucket(options.records)
    check_bucket(options.bucket)
    for name in ("sample", "kv_tokens"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if abs(options.seed) >= SEED_END:
        raise ConfigError(f"--seed must be of less than 64 bits, got {options.seed}")
    if options.tolerance is not None and not 0 < options.tolerance < float("inf"):
        raise ConfigError(f"--tolerance must be a number above 0, got {options.tolerance}")
    if options.base is not None and not (options.base / "config.json").is_file():
        raise ConfigError(f"--base {options.base}: is no directory with a config.json")


def records_of(options: argparse.Namespace) -> ClaimedRecords:
    """Raises ConfigError, SnapshotError, ValueError."""
    records = read_claims(options.records, options.deployment)
    if len(records.deployments) > 1:
        names = ", ".join(records.deployments)
        raise ConfigError(f"the records are of several deployments: name one of {names} with --deployment")
    if not records.trees and not records.findings:
        raise ConfigError(f"{options.records}: holds no turns")
    return records


class Recomputing:
    """The snapshots that records name, and what computes by them. known: their names, in the order of their use.

    plain: whether transformers compute, whatever the options say. Raises SnapshotError, ConfigError.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        known: Sequence[str],
        scratch: Path,
        line: ProgressLine,
        *,
        plain: bool = False,
    ) -> None:
        self._known, self._based = known, options.base is not None
        self.snapshots = BucketSnapshots(
            options.bucket,
            scratch,
            base=options.base,
            parents=_parents(options.parent),
            known=known,
            said=line.show,
        )
        self.missing = _missing(self.snapshots)
        self._first = self._whole()
        self._plain: PlainComputer | None = None
        self.computer: Computer
        if options.reference or plain:
            self.computer = self.plain
            return
        from midstream.verify.paged import PagedComputer

        settings = EngineSettings(
            dtype=options.dtype, device=options.device, kv_cache_tokens=options.kv_tokens
        )
        self.computer = PagedComputer(self.snapshots.whole, self._first, settings)

    @property
    def plain(self) -> PlainComputer:
        """In transformers, loaded when it is first needed."""
        if self._plain is None:
            from midstream.verify.plain import PlainComputer

            self._plain = PlainComputer(self.snapshots.whole, self._first)
        return self._plain

    def with_ties(self, *arguments: Any) -> Any:
        return self.plain.with_ties(*arguments)

    def _whole(self) -> str:
        """A snapshot with full weights. Raises SnapshotMissing."""
        names = [BASE_SNAPSHOT, *self._known] if self._based else self._known
        usable = (one for one in names if self.missing(one) is None)
        first = next((one for one in usable if not self.snapshots.is_adapter(one)), None)
        if first is None:
            reasons = "; ".join(str(self.missing(name)) for name in self._known[:3])
            raise SnapshotMissing(f"no snapshot with full weights can be used: {reasons}")
        return first


def _missing(snapshots: BucketSnapshots) -> Callable[[str], SnapshotError | None]:
    def missing(name: str) -> SnapshotError | None:
        why = snapshots.refused(name)
        if why is None and name != BASE_SNAPSHOT and snapshots.is_adapter(name):
            why = snapshots.refused(BASE_SNAPSHOT)
        return why

    return missing


def _parents(given: Sequence[str]) -> dict[str, str]:
    parents = {}
    for one in given:
        child, separator, parent = one.partition("=")
        if not separator:
            raise ConfigError(f"--parent {one}: expected DELTA=IDENTITY")
        check_identity(child, "--parent")
        check_identity(parent, "--parent")
        parents[child] = parent
    return parents


def versions() -> dict[str, str]:
    found = {"midstream": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "transformers"):
        found[name] = importlib.metadata.version(name)
    return found


def write_whole(option: str, path: Path, text: str) -> None:
    """The file appears whole, or not at all. Raises ConfigError that names the option."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
