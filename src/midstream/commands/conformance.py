"""`midstream conformance URL`: which promised behaviours a live endpoint has, row by row.

Always holds: exit code 0 when no row failed (with --strict: none was skipped either), 1 when one did, 2 when the endpoint or
the options cannot be used. Whatever happens, an endpoint whose snapshots were switched ends on the checkpoint's own weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import httpx

from midstream.client import PublishError
from midstream.commands.connection import KEY_VARIABLE
from midstream.conformance import report
from midstream.conformance.endpoint import Endpoint
from midstream.conformance.rows import Failed, Result, Row
from midstream.conformance.runner import all_rows, chosen, run_rows
from midstream.conformance.session import Session
from midstream.conformance.snapshots import Snapshots
from midstream.conformance.target import Target, look
from midstream.errors import ConfigError, SnapshotError

TOLERANCE = 0.05
LIMIT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_conformance)
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="of the endpoint, with or without /v1; nobody else should use it now",
    )
    parser.add_argument("--deployment", metavar="NAME", help="(default: the endpoint's only one, or its own)")
    parser.add_argument("--api-key", metavar="KEY", help=f"(default: ${KEY_VARIABLE})")
    parser.add_argument("--model", metavar="NAME", help="(default: the first one that the endpoint lists)")
    parser.add_argument(
        "--bucket", metavar="URL", help="where the endpoint reads snapshots: file:///DIR, s3://, gs://, az://"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="the served model's directory; snapshots are made of it",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="GROUP|ID", help="these rows")
    parser.add_argument("--list", action="store_true", dest="list_rows", help="show the rows and run none")
    parser.add_argument("--strict", action="store_true", help="a skipped row counts as a failed one")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="NATS",
        help="by which two computations of one log-probability may differ (default: %(default)g)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help="of a row, and of a snapshot's loading (default: %(default)g)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON; - for standard output instead of the table"
    )


def _conformance(options: argparse.Namespace) -> int:
    rows = chosen(all_rows(), options.only)
    if options.list_rows:
        for row in rows:
            print(f"{row.id}: {row.statement} [{row.source}]")
        return 0
    if options.url is None:
        raise ConfigError("URL: name the endpoint, http://HOST:PORT")
    if (options.bucket is None) != (options.checkpoint is None):
        raise ConfigError("--bucket, --checkpoint: give both, or neither: then no row switches snapshots")
    if options.checkpoint is not None and not options.checkpoint.is_dir():
        raise ConfigError(f"--checkpoint {options.checkpoint}: is not a directory")
    for name in ("tolerance", "limit"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name} must be more than 0, got {getattr(options, name):g}")
    with _output(options.json) as output:
        return asyncio.run(_run(options, rows, output))


@contextlib.contextmanager
def _output(name: str | None) -> Iterator[TextIO | None]:
    """Where the JSON goes; opened before anything runs, so that a path that cannot be written is found out first."""
    if name is None or name == "-":
        yield None if name is None else sys.stdout
        return
    try:
        file = open(name, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--json {name}: cannot be written: {error.strerror}") from error
    with file:
        yield file


async def _run(options: argparse.Namespace, rows: Sequence[Row], output: TextIO | None) -> int:
    key = options.api_key or os.environ.get(KEY_VARIABLE) or None
    endpoint = Endpoint(options.url, api_key=key, deployment=options.deployment, model=options.model or "")
    async with endpoint:
        target = await look(endpoint, options.checkpoint, options.bucket is not None)
        snapshots = None
        if options.bucket is not None:
            prefix = f"conformance-{secrets.token_hex(4)}"
            snapshots = Snapshots(endpoint, options.bucket, options.checkpoint, prefix, options.limit)
        session = Session(endpoint, target, snapshots, tolerance=options.tolerance, limit_s=options.limit)
        show = _Shown(rows, sys.stderr if output is sys.stdout else sys.stdout)
        show.head(endpoint.root, target)
        left_on = None
        try:
            results = await run_rows(rows, session, show.begins, show.result)
        finally:
            if snapshots is not None:
                left_on = await _leave(snapshots, show)
        code = report.exit_code(results, options.strict)
        show.say(report.summary(results, options.strict))
        if output is not None:
            body = report.as_json(results, target, endpoint.root, left_on, code)
            print(json.dumps(body, indent=2), file=output)
        return code


async def _leave(snapshots: Snapshots, show: _Shown) -> str | None:
    try:
        left_on = await snapshots.leave()
    except (Failed, PublishError, SnapshotError, httpx.TransportError) as error:
        show.say(f"the deployment could not be put back onto the checkpoint's weights: {error}")
        return None
    if left_on is not None:
        show.say(f"the deployment is left on snapshot {left_on}, whose weights are the checkpoint's")
    return left_on


class _Shown:
    """The table, a line as each row ends; on a terminal also which one runs."""

    def __init__(self, rows: Sequence[Row], out: TextIO) -> None:
        self._out = out
        self._width = max((len(row.id) for row in rows), default=0)
        self._tty = out.isatty()

    def head(self, root: str, target: Target) -> None:
        replicas = "unknown" if target.replicas is None else target.replicas
        self.say(f"{root}: model {target.model}, engine {target.engine}, {replicas} replicas ready")

    def begins(self, row: Row) -> None:
        if self._tty:
            print(f"\r\x1b[K      {row.id} ...", end="", file=self._out, flush=True)

    def result(self, result: Result) -> None:
        self.say(report.line(result, self._width))

    def say(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._tty else text, file=self._out, flush=True)
