"""`midstream conformance URL`: which promised behaviours a live endpoint has, row by row.

Always holds: the exit code is the outcome. 0: no row failed (with --strict: none was skipped either), and the deployment was
put back. 1: not so. 2: the endpoint or the options cannot be used. 130: interrupted (Ctrl-C, SIGTERM). Whatever happens, an
endpoint whose snapshots were switched ends on the checkpoint's own weights, or the last lines say that it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import httpx

from midstream.client import PublishError
from midstream.core.errors import ConfigError, SnapshotError
from midstream.core.text import plain
from midstream_conformance import report
from midstream_conformance.endpoint import Endpoint
from midstream_conformance.outcome import Failed
from midstream_conformance.rows import Result, Row
from midstream_conformance.runner import all_rows, chosen, run_rows
from midstream_conformance.session import Session
from midstream_conformance.snapshots import Snapshots
from midstream_conformance.target import Target, look

# The same variable as for midstream's other commands.
KEY_VARIABLE = "MIDSTREAM_API_KEY"
TOLERANCE = 0.05
LIMIT_S = 300.0
# Loads of a snapshot for which a row has time.
LOADINGS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_conformance)
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help="of the endpoint, with or without /v1; no other client should use it now",
    )
    parser.add_argument(
        "--deployment", metavar="NAME", help="of the endpoint (default: its only one, or its own)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"better kept in the environment (default: ${KEY_VARIABLE})"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="to sample from (default: the first one that the endpoint lists)"
    )
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
        help=f"of a snapshot's loading; a row may take {LOADINGS} times as long (default: %(default)g)",
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
        try:
            return asyncio.run(_run(options, rows, output))
        except asyncio.CancelledError:
            # By SIGTERM, before there was anything to report.
            return report.INTERRUPTED


@contextlib.contextmanager
def _output(name: str | None) -> Iterator[TextIO | None]:
    """Where the JSON goes: beside the file, whose place it takes at the end if anything was written. Opened before anything
    runs, so that a path that cannot be written is found out first.
    """
    if name is None or name == "-":
        yield None if name is None else sys.stdout
        return
    given = Path(name)
    # A link keeps naming its file.
    path = given.resolve()
    # Else it is a pipe or the like, which may have no resolved name.
    beside = not given.exists() or given.is_file()
    whole = path.with_name(f".{path.name}.{secrets.token_hex(4)}") if beside else given
    try:
        file = open(whole, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--json {name}: cannot be written: {error.strerror}") from error
    try:
        with file:
            yield file
        if beside and whole.stat().st_size:
            whole.replace(path)
    finally:
        if beside:
            whole.unlink(missing_ok=True)


async def _run(options: argparse.Namespace, rows: Sequence[Row], output: TextIO | None) -> int:
    key = options.api_key or os.environ.get(KEY_VARIABLE) or None
    endpoint = Endpoint(options.url, api_key=key, deployment=options.deployment, model=options.model or "")
    with _ended_by_sigterm():
        async with endpoint:
            target = await look(endpoint, options.checkpoint, options.bucket is not None)
            snapshots = None
            if options.bucket is not None:
                prefix = f"conformance-{secrets.token_hex(4)}"
                snapshots = Snapshots(endpoint, options.bucket, options.checkpoint, prefix, options.limit)
            limit_s = options.limit * LOADINGS
            session = Session(endpoint, target, snapshots, tolerance=options.tolerance, limit_s=limit_s)
            show = _Shown(rows, sys.stderr if output is sys.stdout else sys.stdout)
            show.head(endpoint.root, target)
            if snapshots is not None and any("publish" in row.needs for row in rows):
                await _load_checkpoint(snapshots, target, show)
            results, left, code = await _rows(rows, session, snapshots, show, options.strict)
        show.say(report.summary(results, options.strict))
        if output is not None:
            body = report.as_json(results, target, endpoint.root, left, code)
            print(json.dumps(body, indent=2, allow_nan=False), file=output)
        return code


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within: SIGTERM does what Ctrl-C does."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    # The platform has no such signals, or this is not the main thread.
    with contextlib.suppress(NotImplementedError, RuntimeError):
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.remove_signal_handler(signal.SIGTERM)


async def _load_checkpoint(snapshots: Snapshots, target: Target, show: _Shown) -> None:
    """The checkpoint itself, as a snapshot of ours. Raises ConfigError: then no row could say anything of the endpoint."""
    try:
        await snapshots.serve("same")
    except (Failed, PublishError, SnapshotError, OSError, httpx.HTTPError) as error:
        raise ConfigError(
            "--bucket, --checkpoint: the checkpoint itself, published there, does not load: "
            f"{plain(str(error))}; is that the bucket that the endpoint reads, and the model that it serves? "
            f"{report.had_before(target)}"
        ) from error
    except asyncio.CancelledError:
        show.say(f"interrupted: {snapshots.prefix}-1 may still load; its weights are the checkpoint's")
        raise


async def _rows(
    rows: Sequence[Row], session: Session, snapshots: Snapshots | None, show: _Shown, strict: bool
) -> tuple[list[Result], report.Left, int]:
    """The results, how the deployment was left, and the exit code. An interruption ends the rows and nothing else."""
    results: list[Result] = []

    def ended(result: Result) -> None:
        results.append(result)
        show.result(result)

    interrupted = False
    try:
        await run_rows(rows, session, show.begins, ended)
    except asyncio.CancelledError:
        interrupted = _heard(show)
    finally:
        left, again = await _left(asyncio.create_task(_leave(session, snapshots, show)), show, interrupted)
    interrupted |= again
    code = report.exit_code(results, strict, left.put_back)
    return results, left, report.INTERRUPTED if interrupted else code


def _heard(show: _Shown) -> bool:
    """The first interruption: what is to be put back is put back all the same."""
    if task := asyncio.current_task():
        task.uncancel()
    show.say("interrupted")
    return True


async def _left(
    leaving: asyncio.Task[report.Left], show: _Shown, interrupted: bool
) -> tuple[report.Left, bool]:
    """What `leaving` gives, and whether it was interrupted; the second interruption of a run gives it up."""
    try:
        return await asyncio.shield(leaving), False
    except asyncio.CancelledError:
        if not interrupted:
            _heard(show)
            return (await _left(leaving, show, True))[0], True
        leaving.cancel()
        await asyncio.wait((leaving,))
        show.say("interrupted again: it is not known what the deployment is left on")
        raise


async def _leave(session: Session, snapshots: Snapshots | None, show: _Shown) -> report.Left:
    """Put back what rows changed: a pause, the transition, and the checkpoint's weights."""
    put_back, on_snapshot = True, None
    try:
        if await session.restore_pause():
            show.say("the deployment's pause is ended")
    except Exception as error:  # noqa: BLE001 - whatever it is, the rest is to be put back all the same
        put_back = False
        show.say(f"the deployment may be paused still; POST /resume ends that: {error}")
    try:
        if transition := await session.restore_transition():
            show.say(f"the deployment's transition is {transition} again")
    except Exception as error:  # noqa: BLE001 - whatever it is, the weights are to be put back all the same
        put_back = False
        show.say(f"the deployment's transition could not be put back: {error}")
    if snapshots is None or not snapshots.loaded:
        return report.Left(None, put_back)
    show.say("putting the checkpoint's weights back ...")
    try:
        on_snapshot = await snapshots.leave()
    except Exception as error:  # noqa: BLE001 - whatever it is, what the rows found is to be shown
        show.say(f"the deployment could not be put back onto the checkpoint's weights: {error}")
        put_back = False
    else:
        show.say(f"the deployment is left on snapshot {on_snapshot}, whose weights are the checkpoint's")
    if before := report.had_before(session.target):
        show.say(before)
    return report.Left(on_snapshot, put_back)


class _Shown:
    """The table, a line as each row ends; on a terminal also which one runs."""

    def __init__(self, rows: Sequence[Row], out: TextIO) -> None:
        self._out = out
        self._width = max((len(row.id) for row in rows), default=0)
        self._tty = out.isatty()

    def head(self, root: str, target: Target) -> None:
        replicas = "unknown" if target.replicas is None else target.replicas
        serving = f", serving {', '.join(target.serving)}" if target.serving else ""
        self.say(f"{root}: model {target.model}, engine {target.engine}, {replicas} replicas ready{serving}")

    def begins(self, row: Row) -> None:
        if self._tty:
            self._print(f"\r\x1b[K      {row.id} ...", "")

    def result(self, result: Result) -> None:
        self.say(report.line(result, self._width))

    def say(self, text: str) -> None:
        self._print(f"\r\x1b[K{text}" if self._tty else text, "\n")

    def _print(self, text: str, end: str) -> None:
        try:
            print(text, end=end, file=self._out, flush=True)
        except BrokenPipeError:
            # The reader has seen enough. The deployment is put back all the same.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
