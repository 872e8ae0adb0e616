"""`midstream verify`: recomputes what records say, from the snapshots in the bucket, and says what differs and why.

Always holds: exit code 0 says that everything was computed that could be, and fits; 1, that something differs; 2, that the
arguments or the files cannot be used. torch is imported only once there is something to compute.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from midstream import __version__
from midstream.client.checkpoint import no_progress_bars
from midstream.commands.progress import ProgressLine, add_progress_argument
from midstream.core.config import EngineSettings
from midstream.core.errors import ConfigError, SnapshotError, SnapshotMissing
from midstream.core.text import plain
from midstream.core.types import BASE_SNAPSHOT
from midstream.snapshots.identity import check_bucket, check_identity
from midstream.verify.claims import ClaimedRecords, read_claims
from midstream.verify.jobs import Computer
from midstream.verify.snapshots import BucketSnapshots
from midstream.verify.statement import sealed, statement_body
from midstream.verify.verifier import Report, Verifier, WithTies, used

#: Findings that are printed; the statement has more.
SHOWN = 50
KEY_BYTES_MAX = 2**16
#: JSON has no larger integers.
SEED_END = 2**63


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    parser.add_argument(
        "records", metavar="RECORDS", help="the URL that the server had as --records, or its directory"
    )
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
        "--sample", type=int, metavar="N", help="verify so many turns, drawn at random (default: all)"
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
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the statement, as JSON; replaced if it is there"
    )
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="sign the statement with the key in it (HMAC-SHA256)"
    )
    add_progress_argument(parser)


def _run(options: argparse.Namespace) -> int:
    key = _checked(options)
    began = time.time()
    try:
        with no_progress_bars(), ProgressLine(options.progress) as line:
            line.show("reading records")
            records = _records(options)
            with tempfile.TemporaryDirectory(prefix="midstream-verify-", dir=options.work_dir) as scratch:
                report, statement = _verified(options, records, Path(scratch), line)
    except SnapshotError as error:
        raise ConfigError(plain(str(error))) from error
    except (ValueError, OSError) as error:
        raise ConfigError(plain(str(error))) from error
    statement["seconds"] = round(time.time() - began, 3)
    _write(options, sealed(statement, key))
    _print(options, report, statement)
    return 1 if report.findings else 0


def _checked(options: argparse.Namespace) -> bytes | None:
    """The key. Raises ConfigError."""
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
    if options.key_file is None:
        return None
    if options.out is None:
        raise ConfigError("--key-file signs the statement: name it with --out")
    try:
        with options.key_file.open("rb") as file:
            key: bytes = file.read(KEY_BYTES_MAX).strip()
        sealed({}, key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--key-file {options.key_file}: {error}") from error
    return key


def _records(options: argparse.Namespace) -> ClaimedRecords:
    """Raises ConfigError, SnapshotError, ValueError."""
    records = read_claims(options.records, options.deployment)
    if len(records.deployments) > 1:
        names = ", ".join(records.deployments)
        raise ConfigError(f"the records are of several deployments: name one of {names} with --deployment")
    if not records.trees and not records.findings:
        raise ConfigError(f"{options.records}: holds no turns")
    return records


def _verified(
    options: argparse.Namespace, records: ClaimedRecords, scratch: Path, line: ProgressLine
) -> tuple[Report, dict[str, Any]]:
    names = used(records.trees)
    snapshots = BucketSnapshots(
        options.bucket,
        scratch,
        base=options.base,
        parents=_parents(options.parent),
        known=names,
        said=line.show,
    )
    missing = _missing(snapshots)
    computer, with_ties = _computer(options, snapshots, missing, names)
    verifier = Verifier(
        computer, missing, snapshots.is_adapter, tolerance=options.tolerance, with_ties=with_ties
    )
    line.show("computing")
    report = verifier.verify(
        records.trees,
        sample=options.sample,
        seed=options.seed,
        progress=lambda done, total: line.often(f"{done / max(1, total):4.0%} of {total} positions"),
    )
    report.findings[:0] = records.findings
    about = {
        "asked": {"sample": options.sample, "seed": options.seed, "deployment": options.deployment},
        "computed_by": computer.about,
        "tolerances": {"logprob": verifier.tolerance, "routes": "equal sets of experts"},
        "versions": _versions(),
        "created": time.time(),
    }
    contents, stands_on = snapshots.contents, snapshots.stands_on
    return report, statement_body(records, report, report.findings, contents, stands_on, about)


def _missing(snapshots: BucketSnapshots) -> Callable[[str], SnapshotError | None]:
    def missing(name: str) -> SnapshotError | None:
        why = snapshots.refused(name)
        if why is None and name != BASE_SNAPSHOT and snapshots.is_adapter(name):
            why = snapshots.refused(BASE_SNAPSHOT)
        return why

    return missing


def _computer(
    options: argparse.Namespace,
    snapshots: BucketSnapshots,
    missing: Callable[[str], SnapshotError | None],
    names: Sequence[str],
) -> tuple[Computer, WithTies | None]:
    """Raises SnapshotError, ConfigError."""
    candidates = [BASE_SNAPSHOT, *names] if options.base is not None else names
    first = next((one for one in candidates if missing(one) is None and not snapshots.is_adapter(one)), None)
    if first is None:
        reasons = "; ".join(str(missing(name)) for name in names[:3])
        raise SnapshotMissing(f"no snapshot with full weights can be used: {reasons}")
    from midstream.verify.plain import PlainComputer

    plain_computer: PlainComputer | None = None

    def with_ties(*arguments: Any) -> Any:
        nonlocal plain_computer
        if plain_computer is None:
            plain_computer = PlainComputer(snapshots.whole, first)
        return plain_computer.with_ties(*arguments)

    if options.reference:
        plain_computer = PlainComputer(snapshots.whole, first)
        return plain_computer, with_ties
    from midstream.verify.paged import PagedComputer

    settings = EngineSettings(dtype=options.dtype, device=options.device, kv_cache_tokens=options.kv_tokens)
    return PagedComputer(snapshots.whole, first, settings), with_ties


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


def _versions() -> dict[str, str]:
    found = {"midstream": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in ("torch", "transformers"):
        found[name] = importlib.metadata.version(name)
    return found


def _write(options: argparse.Namespace, statement: dict[str, Any]) -> None:
    if options.out is None:
        return
    part = options.out.with_name(f".{options.out.name}.part")
    try:
        part.write_text(json.dumps(statement, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(part, options.out)
    except OSError as error:
        raise ConfigError(f"--out {options.out}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _print(options: argparse.Namespace, report: Report, statement: dict[str, Any]) -> None:
    for finding in report.findings[:SHOWN]:
        print("\n".join(plain(text) for text in finding.lines()))
    if len(report.findings) > SHOWN:
        print(f"and {len(report.findings) - SHOWN} more, of which --out has the first ones")
    by_cause = Counter[str](finding.cause for finding in report.findings)
    if by_cause:
        print("; ".join(f"{count} {cause}" for cause, count in by_cause.most_common()), file=sys.stderr)
    code, speed = statement["computed_by"]["code"], report.positions / max(statement["seconds"], 1e-3)
    print(
        f"{report.turns} turns, {report.tokens} tokens verified by {code} ({statement['computed_by']['dtype']}), to "
        f"{statement['tolerances']['logprob']:g} nats: {len(report.findings)} differences; the largest difference of a "
        f"clean turn is {report.off:.2g}; {statement['seconds']:.1f} s, {speed:.0f} positions/s"
    )
    if unknown := report.sampling.get("not computed"):
        print(f"{unknown} sampling_logprobs were not computed: a record has neither temperature nor filters")
    if gaps := statement["other_records"].get("gap"):
        print(f"{gaps} gaps in the records, where replicas lost some for want of disk")
    for reason, count in sorted(report.unverified.items()):
        print(f"{count} turns not verified: {plain(reason)}")
    if options.out is not None:
        print(f"{options.out}: the statement, {'signed' if options.key_file else 'not signed'}")
