"""`midstream explain`: whose the gap between a trainer's log-probabilities and the server's is, by cause.

Always holds: exit code 0 says that the gaps are near ties and precision alone; 1, that another cause was found; 2, that the
arguments or the files cannot be used; 3, as 0, and record files are gone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
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
from midstream.snapshots.identity import check_identity
from midstream.verify.claims import ClaimedRecords
from midstream.verify.explain import Explainer, GapReport
from midstream.verify.gaps import REMEDIES, CauseShare, GapCause, Split, share_row, shares, whole
from midstream.verify.page import page
from midstream.verify.trainer import TrainerTable, read_trainer
from midstream.verify.verifier import used

FORMAT = "midstream.explain.v1"
#: What no trainer can do otherwise.
HARMLESS = frozenset({GapCause.TIES, GapCause.PRECISION})
#: Turns that are printed: those with the largest gaps.
SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run)
    add_records_argument(parser)
    parser.add_argument(
        "trainer",
        metavar="TRAINER",
        type=Path,
        help="the trainer's log-probabilities: JSON lines, .npz or .parquet (docs/verify.md has the fields)",
    )
    parser.add_argument(
        "--against",
        choices=("sampling_logprob", "logprob"),
        default="sampling_logprob",
        help="the server's number that the trainer's are compared with (default: %(default)s)",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="IDENTITY",
        help="a snapshot that the trainer may have computed by and no record names; may be repeated",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="an HTML page; replaced if it is there")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="every token's parts, as JSON; replaced if it is there"
    )
    add_recomputing_arguments(parser)
    add_gaps_argument(parser)


def _run(options: argparse.Namespace) -> int:
    check_recomputing(options)
    for name in options.also:
        check_identity(name, "--also")
    began = time.monotonic()
    try:
        with no_progress_bars(), ProgressLine(options.progress) as line:
            line.show("reading records")
            table = read_trainer(options.trainer)
            records = records_of(options)
            with tempfile.TemporaryDirectory(prefix="midstream-explain-", dir=options.work_dir) as scratch:
                report, about = _explained(options, records, table, Path(scratch), line)
    except (SnapshotError, ValueError, OSError) as error:
        raise ConfigError(plain(str(error))) from error
    if not report.splits:
        reasons = "; ".join(f"{count} turns: {reason}" for reason, count in report.not_split.items())
        raise ConfigError(f"there is no turn that both have numbers of ({plain(reasons)})")
    facts = _facts(report, about, table, time.monotonic() - began)
    if options.out is not None:
        write_whole("--out", options.out, json.dumps(_document(report, about), indent=1) + "\n")
    if options.report is not None:
        write_whole("--report", options.report, page(report.splits, facts))
    _print(report, facts)
    harmless = all(found <= HARMLESS for found in map(_found, report.splits))
    return exit_code(0 if harmless else 1, records.gone, options)


def _explained(
    options: argparse.Namespace,
    records: ClaimedRecords,
    table: TrainerTable,
    scratch: Path,
    line: ProgressLine,
) -> tuple[GapReport, dict[str, Any]]:
    claims = [claim for tree in records.trees for claim in tree.claims.values()]
    table.match(claims)
    # Routes can be forced in transformers alone.
    routed = any(claim.routes is not None for claim in claims)
    names = [*dict.fromkeys([*used(records.trees), *options.also])]
    made = Recomputing(options, names, scratch, line, plain=routed)
    for name in options.also:
        if (error := made.missing(name)) is not None:
            raise error
    explainer = Explainer(
        made.computer,
        made.missing,
        table,
        against=options.against,
        tolerance=options.tolerance,
        other_ties=made.plain.other_ties if made.computer.experts else None,
    )
    line.show("computing")
    report = explainer.explain(
        records.trees,
        also=options.also,
        sample=options.sample,
        seed=options.seed,
        progress=lambda done, total: line.often(f"{done / max(1, total):4.0%} of {total} positions"),
    )
    asked = {name: getattr(options, name) for name in ("sample", "seed", "deployment", "against", "also")}
    about = {
        "format": FORMAT,
        "asked": asked,
        "computed_by": made.computer.about,
        "tolerance": explainer.tolerance,
        "versions": versions(),
    }
    return report, about


def _found(split: Split) -> set[GapCause]:
    """The causes of a turn: those that say something, and what has the largest part."""
    return {*split.details, split.cause}


def _facts(report: GapReport, about: dict[str, Any], table: TrainerTable, seconds: float) -> list[str]:
    tokens, code = sum(len(split.gap) for split in report.splits), about["computed_by"]["code"]
    facts = [
        f"{len(report.splits)} turns, {tokens} tokens, against {about['asked']['against']}; {report.positions} positions "
        f"computed by {code} in {seconds:.1f} s.",
    ]
    if off := [split for split in report.splits if split.off > about["tolerance"]]:
        worst = max(off, key=lambda split: split.off)
        facts.append(
            f"{len(off)} records are further than {about['tolerance']:g} nats from what was computed, the worst by "
            f"{worst.off:.2g}: midstream verify says whether they are true. The worst is {worst.claim.place}."
        )
    facts += [f"{count} turns not split: {reason}." for reason, count in sorted(report.not_split.items())]
    if report.unpaired:
        facts.append(f"{report.unpaired} tokens have no counterpart, as the trainer has more or fewer.")
    if lost := table.unmatched:
        facts.append(f"{len(lost)} rows of the trainer are of no turn in the records, such as {lost[0]}.")
    return facts


def _print(report: GapReport, facts: Sequence[str]) -> None:
    for fact in facts:
        print(plain(fact))
    print(f"{'cause':26} {'turns':>6} {'tokens':>7} {'KL k1':>10} {'KL k3':>10} {'mean':>10} {'largest':>10}")
    by_cause = shares(report.splits)
    for cause, one in by_cause.items():
        print(_line(cause, one))
    print(_line("all", whole(report.splits)))
    largest = sorted(report.splits, key=lambda split: -float(abs(split.gap).sum()))
    for split in largest[:SHOWN]:
        if split.details:
            causes = "; ".join(f"{cause}: {detail}" for cause, detail in split.details.items())
            print(plain(f"{split.claim.place}: {causes}"))
    for cause in GapCause:
        if cause not in HARMLESS and any(cause in _found(split) for split in report.splits):
            print(f"{cause}: {REMEDIES[cause]}")


def _line(name: str, one: CauseShare) -> str:
    numbers = " ".join(f"{number:10.3g}" for number in (one.k1, one.k3, one.mean, one.largest))
    return f"{name:26} {one.turns:6} {one.tokens:7} {numbers}"


def _document(report: GapReport, about: dict[str, Any]) -> dict[str, Any]:
    return {
        **about,
        "causes": {cause: share_row(one) for cause, one in shares(report.splits).items()},
        "all": share_row(whole(report.splits)),
        "not_split": dict(sorted(report.not_split.items())),
        "unpaired_tokens": report.unpaired,
        "turns": [_turn(split) for split in report.splits],
    }


def _turn(split: Split) -> dict[str, Any]:
    place = split.claim.place
    return {
        "session": place.session,
        "replica": place.replica,
        "turn": place.turn,
        "segment": place.segment,
        "line": place.line,
        "cause": split.cause,
        "details": split.details,
        "record_off": split.off,
        "token_ids": [*split.tokens],
        "rollout": split.rollout.tolist(),
        "trainer": split.trainer.tolist(),
        "parts": {cause: part.tolist() for cause, part in split.parts.items() if part.any()},
    }
