"""`midstream export`: training records of a server's sessions, or of records in a bucket, one JSON object per line.

Always holds: the file appears whole, under its name, or not at all. Exit code 3 says that it is there, and that turns in it
have loss mask 0 because their record files are gone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from midstream.client import PublishError, ServerClient
from midstream.client import export as formats
from midstream.client.errors import ReplicasSilent, SignalRefused
from midstream.client.gone import GoneFiles, GoneTurn
from midstream.client.journal import read_records, traces_of
from midstream.client.records import TrainingSequence, sequences_of
from midstream.commands.common import add_server_arguments, connect, given_url, guarded
from midstream.commands.gaps import add_gaps_argument, exit_code
from midstream.commands.progress import ProgressLine, add_progress_argument
from midstream.core.errors import ConfigError, SnapshotError

FORMATS: Mapping[str, Callable[[Iterable[TrainingSequence]], list[dict[str, Any]]]] = {
    "jsonl": formats.jsonl_records,
    "tinker": formats.tinker_data,
    "verl": formats.verl_rows,
    "nemo-gym": formats.nemo_gym_records,
    "verifiers": formats.verifiers_rollouts,
}
_NOT_FOUND = 404
#: How long replicas that do not answer are waited for, and the time between two questions.
SILENT_S_MAX, SILENT_POLL_S = 30.0, 1.0

_Answer = TypeVar("_Answer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=guarded(_export))
    add_server_arguments(parser, of="of the server, or of --records")
    sessions = parser.add_mutually_exclusive_group(required=True)
    sessions.add_argument("--session", action="append", metavar="KEY", help="may be repeated")
    sessions.add_argument("--all", action="store_true", help="every session that the server has")
    parser.add_argument(
        "--format", choices=tuple(FORMATS), default="jsonl", help="of each line (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="replaced if it is there")
    parser.add_argument(
        "--logprobs",
        choices=("logprob", "sampling_logprob"),
        default="logprob",
        help="of the model's own distribution, or of the one that was sampled from (default: %(default)s)",
    )
    parser.add_argument(
        "--unscored",
        choices=("refuse", "mask"),
        default="refuse",
        help="what becomes of a turn without log-probabilities: an error, or loss mask 0 (default: %(default)s)",
    )
    add_gaps_argument(parser)
    add_progress_argument(parser)


def _export(options: argparse.Namespace) -> int:
    out: Path = options.out
    part = out.with_name(f".{out.name}.part")
    convert, sessions, records = FORMATS[options.format], 0, 0
    gone = GoneFiles()
    try:
        with ProgressLine(options.progress) as line, part.open("w", encoding="utf-8") as file:
            for trace in _traces(options, line, gone):
                sequences = sequences_of(trace, logprobs=options.logprobs, unscored=options.unscored)
                for record in convert(sequences):
                    file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
                    records += 1
                sessions += 1
                line.often(f"{sessions} sessions, {records} records")
        os.replace(part, out)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    print(f"{out}: {records} records of {sessions} session{'s' if sessions != 1 else ''}")
    return exit_code(0, gone, options)


def _traces(options: argparse.Namespace, line: ProgressLine, gone: GoneFiles) -> Iterator[dict[str, Any]]:
    url = given_url(options)
    if url is not None and "://" in url and not url.startswith(("http://", "https://")):
        return _kept(url, options, gone)
    return _served(options, line)


def _kept(url: str, options: argparse.Namespace, gone: GoneFiles) -> Iterator[dict[str, Any]]:
    """Training records of the records in a bucket."""

    def hear(turn: GoneTurn) -> None:
        if options.session is None or turn.session in options.session:
            gone.add(turn)

    try:
        yield from traces_of(read_records(url, deployment=options.deployment, on_gone=hear), options.session)
    except SnapshotError as error:
        raise PublishError(str(error)) from error


def _served(options: argparse.Namespace, line: ProgressLine) -> Iterator[dict[str, Any]]:
    asking = _Patient(leave_out=options.all, line=line)
    with connect(options) as server:
        listed = options.session or asking.heard(
            lambda without: list(server.sessions.keys(retry_s=0, without=without))
        )
        for key in listed:
            try:
                yield asking.heard(partial(_trace, server, key))
            except SignalRefused as error:
                # Of those that were listed, one may have been closed meanwhile, and one of completions has no turns.
                if not options.all or error.status != _NOT_FOUND:
                    raise


def _trace(server: ServerClient, key: str, without: Collection[str]) -> dict[str, Any]:
    return server.sessions.trace(key, retry_s=0, without=without)


class _Patient:
    """Waits for replicas that do not answer, SILENT_S_MAX seconds in all: one that restarts answers again.

    leave_out: those that stay silent are then left out, which is said once. Otherwise they are an error.
    """

    def __init__(
        self,
        *,
        leave_out: bool,
        line: ProgressLine,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leave_out, self._line, self._sleep, self._monotonic = leave_out, line, sleep, monotonic
        self._until: float | None = None
        self._without: set[str] = set()

    def heard(self, ask: Callable[[Collection[str]], _Answer]) -> _Answer:
        """The answer of `ask`, which gets the replicas that need not answer. Raises PublishError."""
        while True:
            try:
                return ask(self._without)
            except ReplicasSilent as silent:
                now, names = self._monotonic(), ", ".join(silent.replicas)
                self._until = now + SILENT_S_MAX if self._until is None else self._until
                if now < self._until:
                    self._line.often(f"waiting for {names}, which does not answer")
                    self._sleep(SILENT_POLL_S)
                    continue
                if not self._leave_out:
                    raise
                self._without.update(silent.replicas)
                warning = f"{names} did not answer for {SILENT_S_MAX:g} s: sessions of it are left out"
                print(warning, file=sys.stderr)
