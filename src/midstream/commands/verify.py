"""`midstream verify`: recomputes what records say, from the snapshots in the bucket, and says what differs and why.

Always holds: exit code 0 says that everything was computed that could be, and fits; 1, that something differs; 2, that the
arguments or the files cannot be used; 3, that nothing differs, and record files are gone. torch is imported only once
there is something to compute.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from midstream.client.checkpoint import no_progress_bars
from midstream.commands.gaps import add_gaps_argument, exit_code
from midstream.commands.progress import ProgressLine
from midstream.commands.recomputing import (
    Recomputing,
    add_recomputing_arguments,
    add_records_argument,
    check_recomputing,
    records_of,
    versions,
    write_whole,
)
from midstream.core.errors import ConfigError, SnapshotError
from midstream.core.text import plain
from midstream.verify.claims import ClaimedRecords
from midstream.verify.compare import WEIGHTS_WIDER
from midstream.verify.statement import sealed, statement_body
from midstream.verify.verifier import Report, Verifier, used

#: Findings that are printed; the statement has more.
SHOWN = 50
KEY_BYTES_MAX = 2**16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    add_records_argument(parser)
    add_recomputing_arguments(parser)
    add_gaps_argument(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the statement, as JSON; replaced if it is there"
    )
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="sign the statement with the key in it (HMAC-SHA256)"
    )


def _run(options: argparse.Namespace) -> int:
    key = _checked(options)
    began = time.time()
    try:
        with no_progress_bars(), ProgressLine(options.progress) as line:
            line.show("reading records")
            records = records_of(options)
            with tempfile.TemporaryDirectory(prefix="midstream-verify-", dir=options.work_dir) as scratch:
                report, statement = _verified(options, records, Path(scratch), line)
    except SnapshotError as error:
        raise ConfigError(plain(str(error))) from error
    except (ValueError, OSError) as error:
        raise ConfigError(plain(str(error))) from error
    statement["seconds"] = round(time.time() - began, 3)
    if options.out is not None:
        text = json.dumps(sealed(statement, key), indent=1, sort_keys=True)
        write_whole("--out", options.out, text + "\n")
    _print(options, report, statement)
    return exit_code(1 if report.findings else 0, records.gone, options)


def _checked(options: argparse.Namespace) -> bytes | None:
    """The key. Raises ConfigError."""
    check_recomputing(options)
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


def _verified(
    options: argparse.Namespace, records: ClaimedRecords, scratch: Path, line: ProgressLine
) -> tuple[Report, dict[str, Any]]:
    made = Recomputing(options, used(records.trees), scratch, line)
    snapshots, computer = made.snapshots, made.computer
    verifier = Verifier(
        computer,
        made.missing,
        snapshots.is_adapter,
        tolerance=options.tolerance,
        with_ties=made.with_ties,
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
        "tolerances": {
            "logprob": verifier.tolerance,
            "routes": "equal sets of experts",
            "router_weights": WEIGHTS_WIDER * verifier.tolerance,
        },
        "versions": versions(),
        "created": time.time(),
    }
    contents, stands_on = snapshots.contents, snapshots.stands_on
    return report, statement_body(records, report, report.findings, contents, stands_on, about)


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
        print(
            f"{unknown} sampling_logprobs were not computed: their records do not have all that shaped them"
        )
    if hidden := report.weights.get("not computed"):
        print(f"router weights of {hidden} tokens were not computed: the model's code hides them")
    if gaps := statement["other_records"].get("gap"):
        print(f"{gaps} gaps in the records, where replicas lost some for want of disk")
    for reason, count in sorted(report.unverified.items()):
        print(f"{count} turns could not be verified: {plain(reason)}")
    if options.out is not None:
        print(f"{options.out}: the statement, {'signed' if options.key_file else 'not signed'}")
